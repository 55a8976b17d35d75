"""Dispatcher: owns the claims of one queue, from the pick to the end. Sans-I/O; time is an argument.

Made before the queue's feeder, and valid across its restarts. The feeder adds claims and asks for the demand; step
tasks say when a step has ended, the pool when a task waits or exits; `Completion` says what became of an outcome.
Whatever happens to a claim is a call of `Slots._move`, and every count follows from it.

Which claim starts when: picked rows wait for a slot in the buffer; instances between two steps have kept theirs, and go
first. A task that runs a step without waiting takes the next claim itself (`follow`), without a turn of the scheduler
between them, so at most one such task is needed. The first step that waits starts two others, each of which may start
two others.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Final

import attrs
from trio_util import AsyncBool

from durable_actors._engine.claims import ActiveClaim, ActiveClaims, ClaimState
from durable_actors._engine.committing.queue import Commits, PendingCommit
from durable_actors._engine.keys.locks import Keys
from durable_actors._engine.limits import QueueLimits, demand
from durable_actors._engine.running.buffer import ClaimBuffer
from durable_actors._engine.running.slots import Slots
from durable_actors._engine.running.task_pool import TaskPool
from durable_actors._store.holds import HELD, OFFERED
from durable_actors._store.rows import Claim
from durable_actors.otp import PoolClosed, PoolFull, PoolTask

INBOX_FRESH: Final = 0.25
"""Seconds for which the inbox flag of a claimed row is believed, while the row waits for nothing but its turn."""
MAX_SLICE: Final = 0.001
"""Seconds for which steps that wait for nothing may follow one another in one task before other tasks run."""
RUN_AHEAD_STEPS: Final = 50
"""Steps that an instance may run on one claim before others get its slot."""
RUN_AHEAD_SECONDS: Final = 0.5
"""Seconds for which it may do so."""

GONE, BUFFERED, RUNNING, COMMITTING, CONTINUING, READY, RECOVERING, ABANDONED = ClaimState


class TaskSlice:
    """What one task of the step pool runs: a claim, and after a step that did not wait the next claim."""

    __slots__ = ("active", "dispatcher", "since", "suspended", "task")

    def __init__(
        self, dispatcher: Dispatcher, active: ActiveClaim, since: float, *, suspended: bool = False
    ) -> None:
        self.dispatcher, self.since = dispatcher, since
        self.active = active
        """The claim whose step runs now, or ran last."""
        self.suspended = suspended
        """The task has waited for something: it ends after this step."""
        self.task: PoolTask | None = None

    def __str__(self) -> str:
        claim = self.active.claim
        return f"instance {claim.id}, {claim.fsm}, step {claim.step}"


PLAIN_PICKS: Final = 10
"""Picks without limited rows after which rows are prefetched again. A row with limits that has no slot is given back: a
queue with a prefetch would claim it at once, give it back, and so on, thousands of times a second."""

RunSlice = Callable[[TaskSlice, PendingCommit | None], Awaitable[object]]
"""The body of a step task (`StepTasks.run`). The second argument is an outcome that Postgres refused."""


class Dispatcher(Slots):
    """The claims and slots of one queue."""

    def __init__(
        self,
        limits: QueueLimits,
        *,
        claims: ActiveClaims,
        commits: Commits,
        keys: Keys,
        pool: TaskPool,
        draining: AsyncBool,
        wake_feeder: Callable[[], bool],
        on_contended: Callable[[Claim], None],
    ) -> None:
        super().__init__(limits)
        self._claims = claims
        self._commits = commits
        self._keys = keys
        self._pool = pool
        self._wake_feeder = wake_feeder
        self._on_contended = on_contended
        self.run_slice: RunSlice
        """The body of a task; set once, when the step tasks are made."""
        self._draining = draining  # then nothing starts any more, and no instance continues on its claim
        self._buffer = ClaimBuffer(keys.owns)  # BUFFERED
        self._ready: deque[ActiveClaim] = deque()  # READY
        self._eager = 0  # tasks that have not waited yet: each starts the next claim when it waits or ends
        self._losses = 0  # of keys, when the buffer was searched for claims that lack theirs
        self._inboxes_doubted = False  # the buffer waits for slots, and its inbox flags were discarded
        self.closed = False  # no feeder works for this queue
        self._pauses: Mapping[str, float] = {}  # paused machines, until when; "": all
        self._bare = attrs.evolve(limits, prefetch=0)
        self._without_limits = PLAIN_PICKS  # picks since the last one that brought rows with limits
        self._feeder_woken = False  # the feeder will ask for the demand: no need to wake it again
        # When it asked last, there was demand: if it sleeps, it waits for rows, not for slots.
        self._had_room = False
        self.has_excess = False
        """Some claims of the buffer were prefetched, and have had no slot yet."""
        self.reserved = 0
        """Rows that the commit under way is expected to claim: next rows of keys that were handed on before."""

    @property
    def buffered(self) -> int:
        """Claims that wait for a slot."""
        return len(self._buffer)

    def _excess(self) -> int:
        """How many claims of the buffer have neither a slot nor a place in `prefetch`."""
        limits = self._limits
        return len(self._buffer) - limits.prefetch - max(limits.concurrency - self.running, 0)

    # -- called by the feeder

    def open(self) -> None:
        """A feeder works for this queue (again)."""
        self.closed = False
        self._feeder_woken = False

    def close(self) -> None:
        """The feeder ends: release every claim whose step has not begun, now and later; attempts unchanged."""
        self.closed = True
        while self._ready or self._buffer:
            self._give_back(self._ready.popleft() if self._ready else self._buffer.pop_first())

    def demand(self, now: float) -> int:
        """How many rows to ask for now. The feeder, which calls this, waits for no partition key meanwhile."""
        self._feeder_woken = False
        if self.has_excess and (self._all_suspended(self._eager) or self.prefetch.late(now)):
            self._give_back_excess()
        self._note_if_all_ran(now)
        wanted = self._demand(len(self._buffer))
        self._had_room = wanted > 0
        return wanted

    def _demand(self, buffered: int) -> int:
        limits, prefetch, running = self._limits, self.prefetch.rows, self.running
        buffered += self.reserved
        if self._without_limits < PLAIN_PICKS:  # what uses limits is not prefetched
            limits, prefetch = self._bare, 0
        wanted = demand(limits, running=running, buffered=buffered)
        if not wanted:
            return 0
        wanted += prefetch
        room = self._max_inflight + limits.prefetch + prefetch - self._counts[COMMITTING] - running - buffered
        if room >= wanted:
            return wanted
        # Many outcomes wait for their commit. After it there is more room, and a pick is worth its round trip.
        return 0 if room < min(limits.min_demand, wanted) else room

    @property
    def room(self) -> int:
        """How many rows may be handed over now."""
        return 0 if self.closed or self._draining.value else self._demand(len(self._buffer))

    def room_for_siblings(self, claim: Claim) -> int:
        """How many rows may be handed over with keys, one of them the next after this claim; it frees no more slots."""
        if self.closed or self._draining.value:
            return 0
        if self._buffer and self._buffer.priority < claim.priority:
            return 0
        limits = self._limits
        return max(
            limits.concurrency + limits.prefetch + self.prefetch.rows - self.running - len(self._buffer), 0
        )

    @property
    def can_claim_one_by_id(self) -> bool:
        """Whether one more claim would leave a free slot and a demand for rows that are more urgent."""
        slot = self.running + len(self._buffer) + 2 <= self._limits.concurrency
        return slot and self._demand(len(self._buffer) + 1) > 0

    @property
    def wake_at(self) -> float:
        """When the feeder must call `demand` again, whatever else happens."""
        return self.prefetch.until if self.has_excess else math.inf

    def add(self, claims: list[Claim], now: float) -> None:
        """Own these claims: they are renewed from now on. The most urgent goes first."""
        self._note_if_all_ran(now)
        self.prefetch.picked(len(claims), now)
        keyed, added = False, list[ActiveClaim]()
        for claim in claims:
            active = ActiveClaim(claim, now)
            self._claims.add(active)
            self._move(active, BUFFERED)
            added.append(active)
            if claim.partition_key is not None:
                keyed = True
        self._buffer.add(added, keyed=keyed)
        self._inboxes_doubted, self.has_excess = False, self._excess() > 0
        if len(self._suspended) >= self._limits.concurrency:
            self._doubt_inboxes()
        if any(claim.recorded.rate_limit is not None for claim in claims):
            self._without_limits = 0
            self._give_back_excess(self._limits.prefetch)  # what uses limits is not prefetched
        elif claims:
            self._without_limits += 1

    def start(self, now: float) -> None:
        """Start the most urgent claim, unless a running task is about to. Claims may have got their keys meanwhile."""
        self._buffer.sort_out()
        if not self._eager:
            self._start_next(now)

    def start_claimed(self, now: float) -> None:
        """Start what came with a commit or a call. While the pool is down, the feeder is to start or release it."""
        if self.closed:
            self.close()
            return
        try:
            self.start(now)
        except (PoolClosed, PoolFull):
            self._wake()

    def without_key(self) -> list[ActiveClaim]:
        """Buffered claims that lack their partition key: just picked, or the key went with its session."""
        lost, self._losses = self._keys.losses != self._losses, self._keys.losses
        return self._buffer.without_key(lost=lost)

    def give_back_contended(self, contended: Iterable[ActiveClaim]) -> None:
        """The keys of these claims are busy elsewhere: release them, held behind their key."""
        contended = list(contended)
        if contended:
            self._buffer.remove(contended)
        for active in contended:
            self._give_back(active, hold=HELD)
            self._on_contended(active.claim)

    def give_back_between_steps(self, active: ActiveClaim) -> None:
        """A command asks for it before its next step: release it. One whose key is being taken: after that."""
        if active.claim.partition_key is None or self._keys.owns(active.claim):
            if active.state is BUFFERED:
                self._buffer.remove([active])
            else:
                self._ready.remove(active)
            self._give_back(active)
            self._wake()

    def pause(self, pauses: Mapping[str, float], now: float) -> None:
        """Nothing of these machines begins until then; "" is the whole queue. Release what has not begun."""
        self._pauses = pauses
        if pauses:
            for active in [*self._ready, *self._buffer]:
                if self._is_paused(active.claim, now):
                    self.give_back_between_steps(active)

    def _is_paused(self, claim: Claim, now: float) -> bool:
        """Whether its queue or its machine is paused."""
        return max(self._pauses.get("", -math.inf), self._pauses.get(claim.fsm, -math.inf)) > now

    def _note_if_all_ran(self, now: float) -> None:
        if not self._buffer and not self._eager:  # a step that waited was noted already
            self.prefetch.all_ran(now)

    def _give_back_excess(self, prefetched: int = 0) -> None:
        """Release prefetched claims that have no slot, for nodes that have one; the most urgent first."""
        count = self._excess() + prefetched
        if count > 0:
            self.prefetch.waited()
            for active in [self._buffer.pop_last() for _ in range(count)][::-1]:
                self._give_back(active)
        self.has_excess = False

    # -- starting

    def _start_next(self, now: float) -> bool:
        """Start the next claim in a task of its own. False: there is none, or no slot."""
        active = self._take_next(now)
        if active is None:
            return False
        task_slice = TaskSlice(self, active, now)
        try:
            self._start_task(task_slice, None)
        except BaseException:
            active.steps -= 1  # the pool is down: a claim that is dropped here would be renewed for ever
            self._move(active, READY if active.steps else BUFFERED)
            if active.steps:
                self._ready.appendleft(active)
            else:
                self._buffer.put_back(active)
            raise
        self._eager += 1
        return True

    def _start_task(self, task_slice: TaskSlice, refused: PendingCommit | None) -> None:
        active = task_slice.active
        task_slice.task = active.task = self._pool.start_nowait(
            self.run_slice, task_slice, refused, key=task_slice, deadline=active.claim.trusted_until
        )

    def _take_next(self, now: float) -> ActiveClaim | None:
        """The next claim to run, now RUNNING. None in a drain, too: the last pick may still be under way."""
        while not self._draining.value:
            if self._ready:
                active = self._ready.popleft()
                held = self._keys.holds(active.claim)
            elif self._buffer.startable and self._has_free_slot():
                found = self._buffer.pop_startable()
                if found is None:
                    return None
                active = found
                active.run_ahead_until = now + RUN_AHEAD_SECONDS
                held = True
            else:
                return None
            ours = held and active.lost is None and not active.cancel_requested
            paused = self._pauses and self._is_paused(active.claim, now)
            if ours and active.claim.trusted_until > now and not paused:
                if now - active.inbox_known_at > INBOX_FRESH:
                    active.claim.inbox = True  # a signal may have come since: read the inbox
                active.steps += 1
                self._move(active, RUNNING)
                return active
            self._give_back(active)
            self._wake()
        return None

    def _start_if_none_eager(self, now: float) -> None:
        """A slot may be free. The feeder may be in a pick: claims need not wait for it."""
        if not self._eager and (self._ready or self._buffer.startable) and self._pool.free:
            self._start_next(now)

    def _wake(self) -> None:
        """Let the feeder ask for its demand, if it is not about to."""
        if not self._feeder_woken:
            self._feeder_woken = self._wake_feeder()

    # -- called by step tasks, and for them by the pool (`tree.py::_task_suspended`, `_task_exited`)

    def follow(self, task_slice: TaskSlice, now: float) -> bool:
        """A step has ended without waiting: run the next claim in its task. False: the task ends."""
        task = task_slice.task
        if task is None or task.cancelling or now - task_slice.since > MAX_SLICE:
            return False
        deadline = task.deadline
        if deadline <= now:
            return False
        active = self._take_next(now)
        if active is None:
            return False
        task_slice.active, active.task = active, task
        if deadline != active.claim.trusted_until:
            task.deadline = active.claim.trusted_until
        return True

    def on_suspended(self, task_slice: TaskSlice, now: float) -> None:
        """A task waits for something."""
        if not task_slice.suspended:
            task_slice.suspended = True
            self._eager -= 1
            active = task_slice.active
            if active.state is RUNNING and active.claim.plain:  # else it commits children, or reads its inbox
                self._suspended.add(active)
                if self._buffer and len(self._suspended) >= self._limits.concurrency:
                    self._doubt_inboxes()
        if (
            (self._ready or self._buffer.startable)
            and self._pool.free
            and self._start_next(now)
            and self._pool.free
        ):
            self._start_next(now)
        self._note_slot_is_kept(0)

    def on_exited(self, task_slice: TaskSlice, now: float) -> None:
        """A task has ended. Its last claim is over, unless its outcome is on its way."""
        if not task_slice.suspended:
            self._eager -= 1
        active = task_slice.active
        if active.task is not None and active.task is task_slice.task:
            active.task = None
            self._end(active)
        if self._pool.can_follow:
            self._start_next(now)
        else:
            self._start_if_none_eager(now)

    def may_continue(self, active: ActiveClaim, now: float) -> bool:
        """Whether it may keep its slot for its next step: a drain, or more urgent claims, may have come meanwhile."""
        if self._draining.value or active.interrupted is not None or not self._limits.run_ahead:
            return False
        if active.steps >= RUN_AHEAD_STEPS or now >= active.run_ahead_until:
            return False
        if self._pauses and self._is_paused(active.claim, now):
            return False
        return not self._buffer or self._buffer.priority >= active.claim.priority

    def hand_over(self, task_slice: TaskSlice, *, keep_slot: bool) -> None:
        """The step's outcome goes to the flusher: its task is free for another claim."""
        active = task_slice.active
        active.task = None
        if keep_slot:
            self._move(active, CONTINUING)
            self._note_slot_is_kept(not task_slice.suspended)
        elif active.state is not COMMITTING:
            self._move(active, COMMITTING)
            # If its key was handed on to it, a sibling most likely takes its place, and the feeder knows of others.
            if not self._feeder_woken and not (active.turns and self._had_room):
                self._wake()

    def commit_in_task(self, active: ActiveClaim, now: float) -> None:
        """The step's task commits the outcome itself, and waits for that. Another claim may run meanwhile."""
        if active.state is not COMMITTING:
            self._move(active, COMMITTING)
            self._start_if_none_eager(now)
            self._wake()

    def recovering(self, active: ActiveClaim) -> None:
        """`handle` runs, for Postgres refused the outcome."""
        self._move(active, RECOVERING)

    def _note_slot_is_kept(self, eager_here: int) -> None:
        """A step holds its slot beyond its first turn: it waits, or its instance continues after the commit."""
        self.prefetch.waited()
        if self.has_excess and self._all_suspended(self._eager - eager_here):
            self._wake()  # claims without a slot are to be released

    def _doubt_inboxes(self) -> None:
        """Every slot is taken by a step whose code waits, so the buffered claims may wait for long, too.

        Their inboxes are read when they begin. Once for all that were added. Not for slots that are kept between two
        steps, and free within milliseconds: reading 2,000 prefetched inboxes cost a third of the worker's CPU.
        """
        if not self._inboxes_doubted:
            self._inboxes_doubted = True
            for active in self._buffer:
                active.inbox_known_at = -math.inf

    # -- called by `Completion`

    def continue_on_claim(self, active: ActiveClaim, now: float) -> None:
        """The outcome is committed, and the row stays executing: its next step has a slot already."""
        active.inbox_known_at = now
        active.interrupted = None  # that was the last step's: the next one can be interrupted again
        self._move(active, READY)
        if self.closed:
            self._give_back(active)
        else:
            self._ready.append(active)
            self._start_if_none_eager(now)

    def finish(self, active: ActiveClaim, now: float) -> None:
        """The outcome has its verdict, or was withdrawn, and the claim is over."""
        self._end(active)
        self._start_if_none_eager(now)

    def recover(self, pending: PendingCommit, now: float) -> bool:
        """Start a task that runs `handle`. False: its claim or key is lost, it is cancelled, or no task starts now."""
        active = pending.active
        if active.lost is not None or active.cancel_requested or not self._keys.holds(active.claim):
            return False
        # Suspended from the beginning: this task is not expected to start the next claim.
        task_slice = TaskSlice(self, active, now, suspended=True)
        try:
            self._start_task(task_slice, pending)
        except (PoolClosed, PoolFull):
            return False
        active.interrupted = None
        return True

    def abandon(self, active: ActiveClaim) -> None:
        """The engine stops, and a thread of this step still runs: it keeps its lease and its key."""
        active.task = None
        self._move(active, ABANDONED)

    # -- the end of a claim

    def _end(self, active: ActiveClaim) -> None:
        """A claim is over. Not before its task or thread has ended: until then, it keeps its key."""
        if active.state is not ABANDONED:
            self._drop(active)
            if not self._feeder_woken and not active.handed_on:
                self._wake()

    def _give_back(self, active: ActiveClaim, *, hold: int = OFFERED) -> None:
        """Release a claim whose step has not begun; attempts unchanged."""
        self._drop(active)
        if active.lost is None:
            self._commits.release(active.claim, attempts=0, hold=hold, began=False)

    def _drop(self, active: ActiveClaim) -> None:
        """Drop ownership: renew it no longer, and let others have its key."""
        self._move(active, GONE)
        self._claims.drop(active)
        if active.claim.partition_key is not None:
            self._keys.free(active.claim)
