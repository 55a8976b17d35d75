"""Feeder: claims the work of one queue and hands it to the dispatcher.

Owns       nothing that would die with it: claims are the dispatcher's, what it knows of the queue is the planner's.
Receives   a wake-up: a slot is free, or a hint for the planner. Wake-ups coalesce.
Sends      claims to the queue's dispatcher.
Writes     pick_instances.sql, pick_instances_by_id.sql, in a fair queue pick_fair.sql instead; read_thawed.sql,
           expire_awaits.sql, and release_claims.sql after a pick of unknown fate, on the claim lane.
Reads      read_queue.sql, read_orphans.sql, in a fair queue read_fair_keys.sql.
If it dies buffered claims are released (attempt unchanged); running steps are not touched.
Never      runs user code, commits, or renews.
"""

from __future__ import annotations

from typing import Final

import trio

from durable_actors._engine.claiming.idle_queues import IdleQueue
from durable_actors._engine.claiming.planner import (
    MAX_PICK,
    ClaimPlanner,
    Expire,
    Pick,
    RefreshStats,
    ReleaseOrphans,
    Sleep,
)
from durable_actors._engine.claiming.throttled import Thaw
from durable_actors._engine.committing.queue import Commits
from durable_actors._engine.keys.locks import Keys
from durable_actors._engine.limits import QueueLimits
from durable_actors._engine.node import Node, logger
from durable_actors._engine.outage import TRANSIENT_ERRORS, Outage
from durable_actors._engine.running.dispatcher import Dispatcher
from durable_actors._engine.shares import FairShares
from durable_actors._postgres.driver.connection import PgConn
from durable_actors._store.cascade import write_compensations
from durable_actors._store.claim import pick_instances, read_queue
from durable_actors._store.fair import pick_fair, read_fair_keys
from durable_actors._store.lease import release_orphans
from durable_actors._store.limits import read_thawed
from durable_actors._store.rows import PickResult
from durable_actors._store.signal import Expired, expire_awaits
from durable_actors.errors import CommitUnknown
from durable_actors.otp import Actor, ExitReason, PoolClosed
from durable_actors.telemetry import AwaitTimedOut, Picked as PickedEvent, QueuePolled, QueueSaturated

MAX_REFRESH_LATENCY: Final = 1.0
"""Seconds that a refresh may take to reach the server, so that it still sees every row which the pick before missed."""

CALLS_TIME: Final = 1.0
"""Seconds for which a feeder that ends waits for calls that may claim a row of its queue."""


class Feeder(Actor[object]):
    """The feeder of one queue; a message is nothing but a wake-up."""

    def __init__(
        self,
        node: Node,
        queue: str,
        *,
        limits: QueueLimits,
        planner: ClaimPlanner,
        dispatcher: Dispatcher,
        idle: IdleQueue,
        commits: Commits,
        keys: Keys,
    ) -> None:
        self._node = node
        self._queue = queue
        self._limits = limits
        self._planner = planner
        self._dispatcher = dispatcher
        self._idle = idle
        self._commits = commits
        self._keys = keys
        self._outage = Outage(node, f"feeder of {queue!r}")
        self._saturated = False
        self._pick_sent = 0.0
        self._unstarted = False  # the last pick's claims have not been started
        self._started_beside = False  # they were, before the statistics were read
        self._turn_owed = False  # claims were started, and may not have had their first turn of the scheduler

    async def init(self) -> None:
        """Begin with no knowledge of the queue."""
        self._idle.busy()
        self._dispatcher.open()
        self._planner.restart()

    async def run(self) -> None:
        """Refill whenever there is demand; sleep when there is none, or no work."""
        try:
            planner, dispatcher = self._planner, self._dispatcher
            while not self._node.draining.value:
                await self._take_keys_and_start()
                now = trio.current_time()
                wanted = dispatcher.demand(now)
                self._report_saturation(wanted)
                self._node.catalog.refresh()
                planner.begin(
                    now,
                    wanted=wanted,
                    one_by_id=planner.queue_empty and dispatcher.can_claim_one_by_id,
                    known=self._node.catalog.names,
                )
                sleep = await self._round()
                if self._node.telemetry.active:
                    self._report_load()
                until = min(sleep.until, dispatcher.wake_at)
                if until <= trio.current_time() and not self.mailbox.stopping:
                    # Being cancelled in a receive would cost ten times that.
                    if not await self._let_started_begin():
                        await trio.lowlevel.checkpoint()
                    planner.woke(by="timer")
                    continue
                if sleep.has_room:
                    self._idle.rest(trio.current_time())
                else:
                    self._idle.busy()
                with trio.move_on_at(until) as scope:
                    await self.mailbox.receive()
                planner.woke(by="timer" if scope.cancelled_caught else "message")
            while True:  # the gate is closed: nothing more to do until this actor is asked to stop
                await self.mailbox.receive()
        except PoolClosed:
            # If the whole tree is cancelled, the step pool may end before this task feels it: that is no failure.
            await trio.lowlevel.checkpoint_if_cancelled()
            raise

    async def terminate(self, reason: ExitReason) -> None:  # noqa: ARG002 - the protocol's
        """Release buffered claims at once, attempt unchanged: none of their steps has begun."""
        self._idle.busy()
        self._dispatcher.close()
        # What an insert claims just now is released by the flusher, which stops next.
        with trio.move_on_after(CALLS_TIME, shield=True):
            await self._node.at_once.settled(self._queue)

    async def _round(self) -> Sleep:
        """Do what the planner says until it says to sleep, or a drain begins."""
        planner = self._planner
        self._unstarted = self._started_beside = False
        sleep = Sleep(trio.current_time())
        try:
            while not self._node.draining.value:
                match planner.next(trio.current_time(), watched=self._idle.watched):
                    case Sleep() as sleep:
                        break
                    case RefreshStats(after_pick=True):
                        await self._refresh_after_pick()
                    case action:
                        await self._let_started_begin()
                        if isinstance(action, ReleaseOrphans):
                            await self._node.hand_over.settled()
                            await self._node.at_once.settled(self._queue)
                        async with self._node.pool.acquire(self._node.lane("claim")) as conn:
                            await self._act(conn, action)
                        if isinstance(action, Pick):
                            self._start_picked()
        except TRANSIENT_ERRORS as exc:
            planner.failed(unknown_fate=isinstance(exc, CommitUnknown))
            sleep = Sleep(trio.current_time() + self._outage.failed(exc))
        else:
            self._outage.ok()
        if self._unstarted:  # also if only the refresh after the pick has failed
            await self._take_keys_and_start()
        return sleep

    async def _let_started_begin(self) -> bool:
        """Let started claims take their first turn while this task holds no connection. False: none has to.

        A step that blocks the loop for half a lease would else look like a server that does not answer. After one
        checkpoint, also that of a receive which a message ended, this task may still be the first of its turn.
        """
        if not (self._turn_owed or self._planner.turn_owed):
            return False
        self._turn_owed = self._planner.turn_owed = False
        await trio.lowlevel.checkpoint()
        await trio.lowlevel.checkpoint()
        return True

    async def _act(self, conn: PgConn, action: Pick | RefreshStats | Expire | Thaw | ReleaseOrphans) -> None:
        match action:
            case Pick():
                await self._pick(conn, action.limit)
            case RefreshStats():
                await self._refresh(conn)
            case Expire():
                await self._expire(conn)
            case Thaw():
                await self._thaw(conn, action.limit)
            case ReleaseOrphans():
                await self._release_orphans(conn)

    # -- the actions

    async def _pick(self, conn: PgConn, limit: int) -> None:
        node, planner = self._node, self._planner
        asked = trio.current_time()
        if node.draining.value:  # the drain may have begun while this waited for the connection
            return
        if node.told != node.catalog.generation:
            await self._tell_compensations(conn)
        self._pick_sent = asked
        if planner.shares is None or planner.throttled.thawed:
            picked = await pick_instances(
                conn,
                node.owner,
                queue=self._queue,
                limit=limit,
                known=node.catalog.array,
                begin=planner.pick_from(),
                now=asked,
            )
        else:
            picked = await self._pick_fair(conn, limit, planner.shares)
        now = trio.current_time()
        # From here on the claims are renewed, whatever happens to this task.
        self._dispatcher.add(picked.claims, now)
        planner.picked(picked, now, seconds=now - asked)
        if picked.claims:
            self._unstarted = True
            self._idle.claimed()
        if node.telemetry.active:
            node.telemetry.emit(pick_event(self._queue, picked, wanted=limit, seconds=now - asked))

    async def _pick_fair(self, conn: PgConn, limit: int, shares: FairShares) -> PickResult:
        """Look which keys have due rows, and claim so many of each."""
        node, planner = self._node, self._planner
        begin = planner.look_from()
        look = await read_fair_keys(conn, node.owner.schema, self._queue, begin)
        asked = trio.current_time()
        picked, keys = await pick_fair(
            conn,
            node.owner,
            queue=self._queue,
            limit=limit,
            known=node.catalog.array,
            take=planner.looked(begin, look, asked),
            now=asked,
        )
        now = trio.current_time()
        order = shares.order({claim.claim_id: keys[claim.claim_id] for claim in picked.claims}, now)
        picked.claims.sort(key=lambda claim: (claim.priority, order[claim.claim_id]))
        shares.claimed(keys, now)
        return picked

    async def _tell_compensations(self, conn: PgConn) -> None:
        """A machine was defined after the start: record the step that compensates before a row of it is claimed.

        Whoever cancels the row needs not know its machine.
        """
        node, generation = self._node, self._node.catalog.generation
        await write_compensations(conn, node.owner.schema, node.catalog.specs)
        node.told = generation

    def _start_picked(self) -> None:
        """Start the claims of a pick before the statistics are read, which at rest takes half as long as the pick."""
        if self._unstarted and not self._planner.stats.last_was_slow and not self._dispatcher.without_key():
            self._dispatcher.start(trio.current_time())
            self._unstarted = False
            self._started_beside = self._turn_owed = True

    async def _refresh_after_pick(self) -> None:
        """Read the statistics after a pick."""
        await self._let_started_begin()
        began = trio.current_time()
        async with self._node.pool.acquire(self._node.lane("claim")) as conn:
            # A row may have become due between the pick and this: the pick did not see it.
            await self._refresh(conn, since=trio.current_time() - self._pick_sent + MAX_REFRESH_LATENCY)
        seconds = trio.current_time() - began
        self._planner.stats.took(began, seconds, alone=not self._started_beside)

    async def _refresh(self, conn: PgConn, *, since: float = 0.0) -> None:
        """Read which priorities the queue has and what is due next, or has become due in the last `since` seconds."""
        self._planner.refresh_begins()
        shape = await read_queue(conn, self._node.owner.schema, self._queue, since=since)
        for text in self._node.catalog.explain_unknown(shape.shelved) if shape.shelved else ():
            logger.warning(
                "queue %r has rows that this node cannot run: %s. They wait for a node that can",
                self._queue,
                text,
            )
        self._planner.refreshed(shape, trio.current_time())

    async def _thaw(self, conn: PgConn, limit: int) -> None:
        """Read which throttled rows may run."""
        throttled = self._planner.throttled
        ended = throttled.look()
        found = await read_thawed(conn, self._node.owner.schema, self._queue, limit=limit, ended=ended)
        throttled.found(found.ids, found.next_in, trio.current_time())

    async def _expire(self, conn: PgConn) -> None:
        """Wake instances whose deadline has passed."""
        node = self._node
        expired = await expire_awaits(conn, node.owner.schema, self._queue, limit=MAX_PICK)
        self._planner.expired(len(expired), trio.current_time())
        if expired:
            waits_ended(node, expired)

    async def _release_orphans(self, conn: PgConn) -> None:
        """After a pick of unknown fate: release what it claimed now rather than when its lease ends."""
        node = self._node
        known = [*(active.claim.claim_id for active in node.claims.all()), *self._commits.releasing]
        count, offered = await release_orphans(
            conn, node.owner.schema, owner=node.owner.name, queue=self._queue, known=known
        )
        self._planner.orphans_released()
        if count:
            logger.info("feeder of %r: released %d rows of a pick that was cut off", self._queue, count)
        node.offer(offered)

    async def _take_keys_and_start(self) -> None:
        """Take the partition keys of buffered claims, release those whose key is busy, start the most urgent."""
        wanting = self._dispatcher.without_key()
        if wanting:
            granted = await self._keys.take([active.claim for active in wanting])
            self._dispatcher.give_back_contended(
                active for active in wanting if active.claim.claim_id not in granted
            )
        running = self._dispatcher.running
        self._dispatcher.start(trio.current_time())
        self._turn_owed |= self._dispatcher.running > running

    def _report_load(self) -> None:
        self._node.telemetry.emit(
            QueuePolled(
                queue=self._queue,
                running=self._dispatcher.running,
                buffered=self._dispatcher.buffered,
                concurrency=self._limits.concurrency,
                prefetch=self._limits.prefetch,
                fair_keys=None if self._planner.shares is None else self._planner.shares.awake,
            )
        )

    def _report_saturation(self, wanted: int) -> None:
        most = self._limits.concurrency + self._limits.prefetch
        running, buffered = self._dispatcher.running, self._dispatcher.buffered
        full = not wanted and running + buffered >= most and not self._dispatcher.has_excess
        if full and not self._saturated and self._node.telemetry.active:
            self._node.telemetry.emit(QueueSaturated(queue=self._queue, running=running, buffered=buffered))
        self._saturated = full


def waits_ended(node: Node, expired: Expired) -> None:
    """The deadlines of these instances have passed: they are runnable, or an undecided approval has failed."""
    for number in expired.ended:
        node.on_final(number)
        logger.error("instance %d failed: nobody decided in time", number)
    node.offer(expired.offered)
    if node.telemetry.active:
        node.telemetry.emit(AwaitTimedOut(count=len(expired)))
    if node.wakeups is not None:
        node.wakeups.add(expired.woken)
    if expired.cascades or expired.ended:  # dependents are told, too
        node.cascade()


def pick_event(queue: str, picked: PickResult, *, wanted: int, seconds: float) -> PickedEvent:
    """The event of one pick."""
    return PickedEvent(
        queue=queue,
        wanted=wanted,
        claimed=len(picked.claims),
        held=sum(row.what == "h" for row in picked.seen),
        shelved=sum(row.what == "s" for row in picked.seen),
        throttled=sum(row.what == "t" for row in picked.seen),
        left=sum(row.postponed for row in picked.seen),
        seconds=seconds,
    )
