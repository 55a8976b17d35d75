"""The claims of one queue whose next step has not begun: which of them begins, and when. Synchronous.

Rows that were picked wait for a slot; instances between two steps on one claim have kept theirs, and go first. One
begins when none is about to: steps that wait for nothing follow one another in one task, without a turn of the
scheduler between them; the first that waits lets two others begin, each of which may let two others begin.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from typing import Final

import trio

from durable_actors._engine.claiming.demand import QueueLimits
from durable_actors._engine.claiming.events import contended_event
from durable_actors._engine.claims import ActiveClaim, TaskSlice
from durable_actors._engine.committing.queue import Commits
from durable_actors._engine.keys.keeper import Keys
from durable_actors._engine.node import Node, logger
from durable_actors._engine.running.slots import Slots
from durable_actors._engine.running.step_task import StepTasks
from durable_actors._store.claim import HELD, OFFERED
from durable_actors._store.rows import Claim
from durable_actors.otp import Pool

FRESH: Final = 0.25
"""Seconds for which the inbox flag of a claimed row is believed, while the row waits for nothing but its turn."""
SLICE: Final = 0.001
"""Seconds for which steps that wait for nothing may follow one another in one task before others run."""


class Claimed:
    """The buffer of a feeder, and its slots."""

    def __init__(
        self, node: Node, queue: str, *, limits: QueueLimits, pool: Pool, commits: Commits, keys: Keys
    ) -> None:
        self._node = node
        self._queue = queue
        self._pool = pool
        self._tasks = StepTasks(node, commits, keys, pool)
        self._commits = commits
        self._keys = keys
        self._buffer: deque[ActiveClaim] = deque()
        self._going: deque[ActiveClaim] = deque()  # between two steps on one claim; each has kept its slot
        self._keyed = False  # some of the buffer may have a key
        self._doubted = False  # what is in the buffer waits for a slot, and is known to
        self._closed = False
        self._woken = False  # the feeder will look: it need not be told again
        self._now = trio.lowlevel.current_clock().current_time
        self.over = False
        """Some of it was claimed ahead, and has had no slot yet."""
        self._eager = 0  # tasks that have not waited yet: whoever of them waits or ends starts what is next
        self._concurrency = limits.concurrency
        self._suspended: set[ActiveClaim] = set()  # steps whose own code waits for something
        self.slots = Slots(limits)

    def __len__(self) -> int:
        """Claimed rows that wait for a slot."""
        return len(self._buffer)

    def has_more_urgent(self, priority: int) -> bool:
        """Whether a claimed row waits that should go before one of this priority."""
        return bool(self._buffer) and self._buffer[0].claim.priority < priority

    def add(self, claims: list[Claim]) -> None:
        """These are claimed: from here on they are kept alive. What is more urgent goes first."""
        waiting, now = len(self._buffer), self._now()
        self._note_all_ran(now)
        self.slots.ahead.picked(len(claims), now)
        self._buffer.extend([self._node.claims.hold(claim, now) for claim in claims])
        self._doubted = False
        self._keyed = self._keyed or any([claim.partition_key is not None for claim in claims])  # noqa: C419 - faster
        self.over = self.slots.excess(len(self._buffer)) > 0
        if len(self._suspended) >= self._concurrency:
            self._doubt()
        if waiting and claims:
            self._buffer = deque(sorted(self._buffer, key=_urgency))

    def demand(self) -> int:
        """How many rows to ask for now. Called by the feeder, which then has no key to wait for."""
        slots, now = self.slots, self._now()
        self._woken = False
        if self.over and (slots.full(self._eager) or slots.ahead.late(now)):
            self._give_back_excess()
        self._note_all_ran(now)
        return slots.demand(len(self._buffer))

    @property
    def room_beside_one(self) -> bool:
        """Whether one row may be claimed without taking the last slot or the next pick from more urgent ones."""
        return self.slots.room_beside_one(len(self._buffer))

    @property
    def until(self) -> float:
        """When the feeder must see to its claims again, whatever else happens."""
        return self.slots.ahead.until if self.over else math.inf

    def _note_all_ran(self, now: float) -> None:
        if not self._buffer and not self._eager:  # what has waited is told already
            self.slots.ahead.ran(now)

    def recount(self) -> None:
        """Steps that the last incarnation of the feeder started still run, and what it left is on its way."""
        self.slots.recount(
            held
            for held in self._node.claims.all()
            if held.claim.queue == self._queue
            and (held.left or (held.task is not None and held.task.running))
        )

    # -- starting

    def start(self) -> None:
        """Hand the most urgent claim to a free slot, unless a task is about to do so."""
        if not self._eager:
            self._start_next()

    def _start_next(self) -> bool:
        """Start one in a task of its own. False: none is there, or no slot."""
        now = self._now()
        held = self._take_next(now)
        if held is None:
            return False
        turn = TaskSlice(held, now)
        try:
            turn.task = held.task = self._pool.start_nowait(
                self._tasks.run, turn, key=turn, deadline=held.claim.trusted_until
            )
        except BaseException:
            # The pool is down: dropped here, it would be renewed for nobody.
            self._put_back(held)
            raise
        self._eager += 1
        return True

    def follow(self, turn: TaskSlice) -> bool:
        """A step has ended without waiting: go on with the next claim in its task. False: the task ends."""
        task, now = turn.task, self._now()
        if task is None or task.cancelling or task.deadline <= now or now - turn.since > SLICE:
            return False
        held = self._take_next(now)
        if held is None:
            return False
        turn.held, held.task = held, task
        if task.deadline != held.claim.trusted_until:
            task.deadline = held.claim.trusted_until
        return True

    def _take_next(self, now: float) -> ActiveClaim | None:
        """The next claim to run; its slot is taken. None in a drain, too: its last pick may still come."""
        while not self._node.draining:
            if self._going:
                held = self._going.popleft()
                if now - held.seen > FRESH:
                    held.claim.inbox = True
                if _may_run(held, now) and self._keys.holds(held.claim):
                    return held
                self._give_back(held)
                self._freed(held)
            elif self._buffer and self.slots.free:
                found = self._next_startable()
                if found is None:
                    return None
                if _may_run(found, now):
                    if now - found.seen > FRESH:
                        found.claim.inbox = True  # a signal may have come since: it is worth a look
                    self.slots.running += 1
                    return found
                self._give_back(found)
            else:
                return None
        return None

    def _put_back(self, held: ActiveClaim) -> None:
        held.task = None
        if held.steps:
            self._going.appendleft(held)
        else:
            self.slots.running -= 1
            self._buffer.appendleft(held)

    def _next_startable(self) -> ActiveClaim | None:
        """Take the first claim that has what it needs; one whose key is being taken waits."""
        for index, held in enumerate(self._buffer):
            if held.claim.partition_key is None or self._keys.owns(held.claim):
                del self._buffer[index]
                return held
        return None

    # -- told by the tasks and by what they leave

    def waits(self, held: ActiveClaim) -> None:
        """A step waits for something for the first time; called in its task."""
        if not held.waited:
            held.waited = True
            self._eager = max(self._eager - 1, 0)  # it may be a task of the last incarnation
            if held.claim.plain:  # else it waits for its inbox, and its own code has not begun
                self._suspended.add(held)
                if self._buffer and len(self._suspended) >= self._concurrency:
                    self._doubt()
        if self._waiting and self._pool.free and self._start_next() and self._pool.free:
            self._start_next()
        self._keeps_slot(held)

    def stays(self, held: ActiveClaim) -> None:
        """A step's code has ended, and its instance goes on here when that is committed."""
        if self._suspended:
            self._suspended.discard(held)
        self._keeps_slot(held)

    def _keeps_slot(self, held: ActiveClaim) -> None:
        """A step keeps its slot beyond its first turn: it waits, or its instance goes on when it is committed."""
        self.slots.ahead.waited()
        if self.over and self.slots.full(self._eager - (not held.waited)):
            self._wake()  # what has no slot goes back

    def _doubt(self) -> None:
        """Every slot is taken by a step whose code waits: so does the buffer, for nobody knows how long.

        The inboxes of these rows are read when they begin. Once per pick: nothing else puts rows into the buffer. A
        slot that an instance keeps between two steps is free within milliseconds, and tells nothing: reading 2,000
        prefetched inboxes for that cost a third of the worker's CPU.
        """
        if not self._doubted:
            self._doubted = True
            for held in self._buffer:
                held.seen = -math.inf

    def goes_on(self, held: ActiveClaim) -> None:
        """What a task has left is committed, and its instance stays on the claim: its next step has a slot already."""
        held.left = held.waited = False
        held.seen = self._commits.answered
        held.interrupted = None  # it was that step's: the next one can be interrupted again
        if self._closed:
            self._give_back(held)
        else:
            self._going.append(held)
            self._go_on()

    def ended(self, held: ActiveClaim, *, task_stays: bool) -> None:
        """A step's code has ended, and its instance will not go on here: another may run while it is committed.

        `task_stays`: and waits for that.
        """
        if self._suspended:
            self._suspended.discard(held)
        self.slots.ended(held)
        if task_stays:
            self._go_on()
        self._wake()

    def exited(self, held: ActiveClaim) -> None:
        """A step task has ended; called in that task, after its slot is free."""
        if not held.waited:
            self._eager = max(self._eager - 1, 0)
        if self._suspended:
            self._suspended.discard(held)
        if not held.left:
            self._freed(held)
        if self._pool.can_follow:
            self._start_next()
        else:
            self._go_on()

    def settled(self, held: ActiveClaim) -> None:
        """What a task has left is settled."""
        self._freed(held)
        self._go_on()

    def _freed(self, held: ActiveClaim) -> None:
        self.slots.exited(held)
        self._wake()

    def _wake(self) -> None:
        """Let the feeder look at its demand, if it is not about to."""
        if not self._woken:
            self._woken = self._node.wakes[self._queue].cast(None)

    def _go_on(self) -> None:
        """A slot may be free. The feeder may be in a pick: what is claimed need not wait for it."""
        if not self._eager and self._waiting and self._pool.free:
            self._start_next()

    @property
    def _waiting(self) -> bool:
        return bool(self._going or self._buffer)

    # -- giving back

    def _give_back_excess(self) -> None:
        """What was claimed ahead and has no slot goes back, for whoever has one; the most urgent first.

        By the feeder alone: it may be waiting for the keys of some of these.
        """
        count = self.slots.excess(len(self._buffer))
        if count > 0:
            self.slots.ahead.waited()
            for held in [self._buffer.pop() for _ in range(count)][::-1]:
                self._give_back(held)
        self.over = False

    def without_key(self) -> list[ActiveClaim]:
        """Claims that lack their key: picked just now or before a failure, or it went with its session."""
        if not self._keyed:
            return []
        keyed = [held for held in self._buffer if held.claim.partition_key is not None]
        self._keyed = bool(keyed)
        return [held for held in keyed if not self._keys.owns(held.claim)]

    def give_back(self, contended: Iterable[ActiveClaim]) -> None:
        """The keys of these are busy elsewhere: the rows keep their place."""
        for held in contended:
            self._buffer.remove(held)
            self._give_back(held, contended=True)

    def close(self) -> None:
        """Give all of them back, also what comes later: nothing of these steps has run, attempts unchanged."""
        self._closed = True
        while self._waiting:
            self._give_back((self._going or self._buffer).popleft())

    def _give_back(self, held: ActiveClaim, *, contended: bool = False) -> None:
        claim = held.claim
        self._node.claims.drop(held)
        if claim.partition_key is not None:
            self._keys.free(claim)
        if held.lost is None:
            self._commits.release(claim, attempts=0, hold=HELD if contended else OFFERED)
        if contended:
            logger.debug("instance %d: its key %r is busy elsewhere", claim.id, claim.partition_key)
            if self._node.telemetry.active:
                self._node.telemetry.emit(contended_event(claim))


def _may_run(held: ActiveClaim, now: float) -> bool:
    return held.lost is None and held.claim.trusted_until > now


def _urgency(held: ActiveClaim) -> int:
    return held.claim.priority
