"""Feeder: claims the work of one queue and hands it to step tasks.

Owns       the queue's buffer (claimed, not started), its pick cursor, and the demand of its slots.
Receives   a wake-up: a slot is free, a poke, a row on offer again. Wake-ups coalesce.
Sends      claims to the queue's pool, rows it cannot start to the flusher for release.
Writes     pick_instances.sql, pick_instances_by_id.sql, expire_awaits.sql, and release_claims.sql after a pick of
           unknown fate, on the claim lane.
Reads      read_queue.sql, read_orphans.sql.
If it dies its buffer goes back (attempt unchanged); running steps are not touched.
Never      runs user code, commits, or renews.
"""

from __future__ import annotations

import math
from typing import Final

import trio

from durable_actors._engine.claiming.cursor import PickCursor
from durable_actors._engine.claiming.demand import PollTimer, QueueLimits
from durable_actors._engine.claiming.events import pick_event
from durable_actors._engine.claiming.looks import Looks
from durable_actors._engine.committing.queue import Commits
from durable_actors._engine.keys.keeper import Keys
from durable_actors._engine.node import Node, logger
from durable_actors._engine.outage import TRANSIENT_ERRORS, Outage
from durable_actors._engine.running.dispatcher import Claimed
from durable_actors._postgres.driver.connection import PgConn
from durable_actors._store.claim import pick_instances, read_queue
from durable_actors._store.lease import release_orphans
from durable_actors._store.rows import Picked
from durable_actors._store.signal import expire_awaits
from durable_actors.errors import CommitUnknown
from durable_actors.otp import Actor, ExitReason, Pool
from durable_actors.telemetry import AwaitTimedOut, QueueSaturated

MAX_PICK: Final = 1000
"""Rows per pick; batches beyond a few hundred buy nothing."""
SOONEST: Final = 0.01
"""Seconds until a deadline is looked at at the soonest: its row may be locked by whoever signals it."""
LATEST: Final = 0.3
"""The same, when it was found locked several times."""

WATCHED_REST: Final = 1.0
"""Seconds that a feeder sleeps at least while the server watches its queue: quick polls would be for nothing."""


class Feeder(Actor[object]):
    """The feeder of one queue; a message is nothing but a wake-up."""

    def __init__(
        self,
        node: Node,
        queue: str,
        *,
        limits: QueueLimits,
        pool: Pool,
        commits: Commits,
        keys: Keys,
    ) -> None:
        self._node = node
        self._queue = queue
        self._limits = limits
        self._commits = commits
        self._keys = keys
        self.claimed = Claimed(node, queue, limits=limits, pool=pool, commits=commits, keys=keys)
        self._outage = Outage(node, f"feeder of {queue!r}")
        self._idle = node.idle_queues.of(queue)
        self._poll_timer = PollTimer(limits)
        self._found_work = True  # by the last pick
        self._has_room = False  # more than there was to pick
        self._next_due: float | None = None
        self._deadline = math.inf
        self._soonest = SOONEST
        self._expire_from = 0.0
        self.looks = Looks()
        self._saturated = False
        self._missed = False
        self._fresh = True
        self._polls = False  # awake because time has passed, not because of a message
        self._nothing = False  # no row of the queue is on offer, due or not
        self._unsure = False  # a pick may have claimed rows of which nobody here knows
        self.cursor = PickCursor()
        """Hints about rows go here."""

    def look_for_deadlines(self) -> None:
        """A deadline was set here: read when the next one is before sleeping again."""
        self.looks.ask()

    def seen_due(self, priority: int) -> None:
        """The long poll has seen a due row: pick from the head, without another look before that."""
        self.cursor.rewind()
        self.cursor.hint(priority=priority)
        self.address.cast(None)

    async def init(self) -> None:
        """Become the queue's feeder: pokes come here from now on."""
        self.claimed.recount()
        self._idle.busy()
        self._unsure = self._queue in self._node.feeders  # the last incarnation may have died in a pick
        self._node.feeders[self._queue] = self

    async def run(self) -> None:
        """Refill whenever there is free capacity; sleep when there is none, or no work."""
        while not self._node.draining:
            await self._take_keys()
            self.claimed.start()
            wanted = min(self.claimed.demand(), MAX_PICK)
            self._has_room = False
            self._tell_saturation(wanted)
            wait = self.claimed.until if not wanted else min(await self._refill(wanted), self.claimed.until)
            if wait <= trio.current_time() and not self.mailbox.stopping:
                # What has begun takes its turn, while no connection is held: after one checkpoint this task may still
                # be the first of its turn. To be cancelled in a receive would cost ten times that.
                await trio.lowlevel.checkpoint()
                await trio.lowlevel.checkpoint()
                self._polls = not self._found_work
                continue
            if self._has_room:
                self._idle.rest(trio.current_time())
            else:
                self._idle.busy()
            with trio.move_on_at(wait) as sleep:
                await self.mailbox.receive()
            # A freed slot is no evidence of work either, if the last look found the queue empty.
            self._polls = (
                not self._found_work if sleep.cancelled_caught else self._nothing and not self.cursor.hinted
            )
        while True:  # the gate is closed: nothing more to do until this actor is asked to stop
            await self.mailbox.receive()

    async def terminate(self, reason: ExitReason) -> None:  # noqa: ARG002 - the protocol's
        """Give the buffer back at once, attempt unchanged: nothing of it has run."""
        self._idle.busy()
        self.claimed.close()

    # -- picking

    async def _refill(self, wanted: int) -> float:
        """Pick; return until when to sleep (a time in the past: not at all)."""
        try:
            picked, look = await self._pick(wanted)
            if begins := bool(picked.claims) and not self.looks.doubted and not self.claimed.without_key():
                self.claimed.start()  # before the look, which at rest takes half as long as the pick
            if look:
                await self._look_again(alone=not begins)
        except TRANSIENT_ERRORS as exc:
            self._unsure = self._unsure or isinstance(exc, CommitUnknown)
            self._nothing = False  # who knows, by now
            return trio.current_time() + self._outage.failed(exc)
        self._outage.ok()
        now = trio.current_time()
        if picked.claims:
            self._found_work = True
            self._idle.claimed()
            if not begins:
                await self._take_keys()
                self.claimed.start()
        if picked.window >= wanted or self._missed:
            self._missed = False
            return now  # there may be more behind a full window, also when all of it was held or shelved
        self._found_work = bool(picked.claims)
        self._has_room = True
        wait = self._poll_timer.looked(now, found_work=self._found_work)
        if self._idle.watched:
            wait = max(wait, now + WATCHED_REST)
        if self._next_due is not None:
            wait = min(wait, now + max(self._next_due, 0.0))
        if self.looks.old:
            wait = min(wait, self.looks.not_before)
        later = self.cursor.next_look(now)
        return min(wait, self._deadline, math.inf if later is None else now + later)

    async def _pick(self, wanted: int) -> tuple[Picked, bool]:
        """Pick; tell what was found, and whether the queue is to be looked at now."""
        node, began = self._node, trio.current_time()
        node.catalog.refresh()
        async with node.pool.acquire(node.lane("claim")) as conn:
            if self._unsure:
                await self._release_orphans(conn)
            if self._fresh:  # or the first pick would take priority 0 before more urgent rows
                await self._learn(conn)
                self._fresh = False
            if self._deadline <= began:
                await self._expire(conn)
            looked = self._polls and await self._look(conn)
            if node.draining or (looked and self._nothing):  # a drain may have begun while this waited
                return Picked([], [], {}), False
            alone = self._nothing and self.claimed.room_beside_one
            begin = self.cursor.begin(began, limit=wanted, known=node.catalog.names, alone=alone)
            asked = trio.current_time()
            known = node.catalog.array
            picked = await pick_instances(
                conn, node.owner, queue=self._queue, limit=wanted, known=known, begin=begin, now=asked
            )
            self.claimed.add(picked.claims)  # from here on they are kept alive, whatever happens to this task
            now = trio.current_time()
            if begin.by_id:
                self.cursor.missed(picked)
                self._missed = True  # somebody else's rows, unless the look that follows sees none
            else:
                self.cursor.advance(picked, now=now, took=now - asked)
            if begin.by_id or picked.window >= wanted:
                self._nothing = False  # until the next look
        if node.telemetry.active:
            node.telemetry.emit(pick_event(self._queue, picked, wanted=wanted, seconds=now - asked))
        return picked, self.looks.wanted(now, short=picked.window < wanted) and not looked

    async def _look_again(self, *, alone: bool) -> None:
        """Look at the queue after a pick. No connection is held while what has begun takes its first turn."""
        if not alone:
            await trio.lowlevel.checkpoint()
            await trio.lowlevel.checkpoint()  # after one of them this task may still be the first of its turn
        began = trio.current_time()
        async with self._node.pool.acquire(self._node.lane("claim")) as conn:
            missed = await self._learn(conn)
            self._missed = missed or (self._missed and not self._nothing)
        self.looks.took(began, trio.current_time() - began, alone=alone)

    async def _release_orphans(self, conn: PgConn) -> None:
        """After a pick of unknown fate: what it claimed goes back now rather than when its lease is over."""
        node = self._node
        known = [*(held.claim.claim_id for held in node.claims.all()), *self._commits.releasing]
        count, offered = await release_orphans(
            conn, node.owner.schema, owner=node.owner.name, queue=self._queue, known=known
        )
        self._unsure = False
        if count:
            logger.info("feeder of %r: %d rows of a pick that was cut off went back", self._queue, count)
        node.offer(offered)

    async def _look(self, conn: PgConn) -> bool:
        """Nobody told of work, and the last pick found none: look before picking, which costs a third of it.

        False: not looked, some rows are to be looked at by their ids.
        """
        if self.cursor.expects_rows:
            return False
        await self._learn(conn)
        if self._nothing:
            self.cursor.rewind()
        return True

    async def _learn(self, conn: PgConn) -> bool:
        """Read which priorities the queue has and what is due next; tell whether the last pick missed some."""
        begun = self.looks.begin()
        shape = await read_queue(conn, self._node.owner.schema, self._queue)
        now = trio.current_time()
        names = self._node.catalog.names
        self._nothing = not shape.priorities and names.isdisjoint(shape.shelved)
        for text in self._node.catalog.explain_unknown(shape.shelved) if shape.shelved else ():
            logger.warning(
                "queue %r has rows that this node cannot run: %s. They wait for a node that can",
                self._queue,
                text,
            )
        self._next_due = shape.next_due
        # Not from now on: who looks more often than that would put the deadline off for ever.
        later = shape.next_deadline
        self._deadline = math.inf if later is None else max(now + later, self._expire_from)
        self.looks.learned(begun, now)
        return self.cursor.learn(shape, known=names)

    async def _expire(self, conn: PgConn) -> None:
        """Wake instances whose deadline has passed; a full batch leaves more for the next round."""
        count = await expire_awaits(conn, self._node.owner.schema, self._queue, limit=MAX_PICK)
        self.looks.ask()
        # None although one is due: somebody's transaction has locked it. A hundred looks a second would not help.
        self._soonest = SOONEST if count else min(self._soonest * 2, LATEST)
        self._expire_from = trio.current_time() + self._soonest
        if count and self._node.telemetry.active:
            self._node.telemetry.emit(AwaitTimedOut(count=count))

    async def _take_keys(self) -> None:
        """Keep only the claims whose key is ours now; the others go back and keep their place."""
        wanting = self.claimed.without_key()
        if not wanting:
            return
        granted = await self._keys.take([held.claim for held in wanting])
        self.claimed.give_back(held for held in wanting if held.claim.claim_id not in granted)

    # -- telling

    def _tell_saturation(self, wanted: int) -> None:
        most = self._limits.concurrency + self._limits.prefetch
        running, buffered = self.claimed.slots.running, len(self.claimed)
        full = not wanted and running + buffered >= most and not self.claimed.over
        if full and not self._saturated and self._node.telemetry.active:
            self._node.telemetry.emit(QueueSaturated(queue=self._queue, running=running, buffered=buffered))
        self._saturated = full
