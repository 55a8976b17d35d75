"""The feeder of a small node: which rows to claim, and when. The decisions are the product's: slots, cursor, waits."""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING

import trio
from durable_actors._engine.claiming.cursor import PickCursor
from durable_actors._engine.claiming.demand import PollTimer
from durable_actors._engine.claiming.feeder import SOONEST
from durable_actors._engine.claims import ActiveClaim
from durable_actors._engine.outage import TRANSIENT_ERRORS, Outage
from durable_actors._engine.running.slots import Slots
from durable_actors._store.claim import HELD, OFFERED, pick_instances, read_queue
from durable_actors._store.lease import release_orphans
from durable_actors._store.rows import PickResult
from durable_actors._store.signal import expire_awaits
from durable_actors.errors import CommitUnknown

if TYPE_CHECKING:
    from tests.simulation.small.host import Host

QUEUE = "default"


class Feeder:
    """Claims and starts; what it knows ends with it, as in a restart of the product's."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.slots = Slots(host.limits)
        self.slots.recount(held for held in host.node.claims.all() if not held.waits)
        self.cursor = PickCursor()
        self.buffer: deque[ActiveClaim] = deque()
        self.going: deque[ActiveClaim] = deque()
        self._closed = False
        self._outage = Outage(host.node, "feeder")
        self._unsure = QUEUE in host.node.feeders
        self._fresh = True
        self._polls = self._nothing = self._full = False
        self._poll_timer = PollTimer(host.limits)
        self._found_work = True
        self._next_due: float | None = None
        self.deadline = math.inf
        self._expire_from = -math.inf
        self.claimed = self
        host.node.feeders[QUEUE] = self  # type: ignore[assignment]

    # -- what step tasks and the node ask of a feeder

    def has_more_urgent(self, priority: int) -> bool:
        return bool(self.buffer) and self.buffer[0].claim.priority < priority

    def look_for_deadlines(self) -> None:
        self._fresh = True

    def ended(self, held: ActiveClaim, *, task_stays: bool) -> None:
        del task_stays
        self.slots.ended(held)
        self._freed()

    def stays(self, held: ActiveClaim) -> None:
        """A step keeps its slot: no news."""

    def follow(self, turn: object) -> bool:
        """Each step has a task of its own here, and its own turn: the schedules are richer."""
        del turn
        return False

    def exited(self, held: ActiveClaim) -> None:
        if not held.left:
            self.settled(held)

    def goes_on(self, held: ActiveClaim) -> None:
        held.left = held.waited = False
        held.interrupted = None
        if self._closed:
            self._give_back(held)
        else:
            self.going.append(held)
            self.host.hunger.cast()

    def settled(self, held: ActiveClaim) -> None:
        self.slots.exited(held)
        self._freed()

    def _freed(self) -> None:
        """A free slot is news only to who had none."""
        if self._full or self.buffer:
            self.host.hunger.cast()

    # -- the loop

    async def run(self) -> None:
        await self.host.keeps.wait()
        try:
            while True:
                await self._take_keys()
                self._start()
                wanted = self.slots.demand(len(self.buffer))
                self._full = not wanted
                wait = math.inf if not wanted else await self._refill(wanted)
                self._polls = not await self.host.hunger.wait(wait) and not self._found_work
        finally:
            self._closed = True
            while self.going or self.buffer:
                self._give_back((self.going or self.buffer).popleft())

    async def _refill(self, wanted: int) -> float:
        """Pick; return the seconds to sleep."""
        host = self.host
        try:
            picked = await self._pick(wanted)
        except TRANSIENT_ERRORS as exc:
            self._unsure = self._unsure or isinstance(exc, CommitUnknown)
            return self._outage.failed(exc)
        self._outage.ok()
        if picked.claims:
            self._found_work = True
            await self._take_keys()
            self._start()
        if picked.window >= wanted:
            return 0.0
        self._found_work = bool(picked.claims)
        now = host.now()
        wait = self._poll_timer.looked(now, found_work=self._found_work) - now
        if self._next_due is not None:
            wait = min(wait, self._next_due)
        look = self.cursor.next_look(now)
        return max(min(wait, self.deadline - now, math.inf if look is None else look), 0.0)

    async def _pick(self, wanted: int) -> PickResult:
        host, node = self.host, self.host.node
        async with node.pool.acquire("claim") as conn:
            if self._unsure:
                known = [held.claim.claim_id for held in node.claims.all()]
                owner = node.owner
                _, offered = await release_orphans(
                    conn, owner.schema, owner=owner.name, queue=QUEUE, known=known
                )
                self._unsure = False
                node.offer(offered)
            if self.deadline <= host.now():
                await expire_awaits(conn, node.owner.schema, QUEUE, limit=100)
                self._fresh = True
                self._expire_from = host.now() + SOONEST
            polls = self._polls and not self.cursor.expects_rows
            if self._fresh or polls:
                await self._learn(conn)
                self._fresh = False
            if polls and self._nothing:
                self.cursor.rewind()
                return PickResult([], [], {})
            begin = self.cursor.begin(host.now(), limit=wanted, known=node.catalog.names)
            asked = host.now()
            picked = await pick_instances(
                conn, node.owner, queue=QUEUE, limit=wanted, known=node.catalog.array, begin=begin, now=asked
            )
            held = [*self.buffer, *(host.node.claims.hold(claim) for claim in picked.claims)]
            self.buffer = deque(sorted(held, key=lambda each: each.claim.priority))
            count = self.slots.running + len(self.buffer)
            if count > host.limits.concurrency + host.limits.prefetch:
                host.land.fail("slots", f"{host.name} holds {count} claims")
            self.cursor.advance(picked, now=host.now(), took=host.now() - asked)
            if picked.window < wanted and not polls and not host.hunger.rings:
                await self._learn(conn)
        return picked

    async def _learn(self, conn: object) -> None:
        host = self.host
        shape = await read_queue(conn, host.node.owner.schema, QUEUE)  # type: ignore[arg-type]
        self._nothing = not shape.priorities
        self._next_due = shape.next_due
        later = shape.next_deadline
        self.deadline = math.inf if later is None else max(host.now() + later, self._expire_from)
        self.cursor.learn(shape, known=host.node.catalog.names)

    async def _take_keys(self) -> None:
        """Keep only the claims whose key is ours now; the others go back and keep their place."""
        keys = self.host.keys
        wanting = [h for h in self.buffer if h.claim.partition_key is not None and not keys.owns(h.claim)]
        if not wanting:
            return
        granted = await keys.take([held.claim for held in wanting])
        for held in wanting:
            if held.claim.claim_id not in granted:
                self.buffer.remove(held)
                self._give_back(held, contended=True)

    def _start(self) -> None:
        """Hand claims to free slots."""
        now = self.host.now()
        while self.going:
            held = self.going.popleft()
            if held.lost is None and held.claim.trusted_until > now and self.host.keys.holds(held.claim):
                self.host.start_step(held)
            else:
                self._give_back(held)
                self.slots.exited(held)
        while self.buffer and self.slots.free:
            held = next((h for h in self.buffer if self._has_key(h)), None)
            if held is None:
                return
            self.buffer.remove(held)
            if held.lost is not None or held.claim.trusted_until <= now:
                self._give_back(held)
            else:
                self.slots.running += 1
                self.host.start_step(held)

    def _has_key(self, held: ActiveClaim) -> bool:
        return held.claim.partition_key is None or self.host.keys.owns(held.claim)

    def _give_back(self, held: ActiveClaim, *, contended: bool = False) -> None:
        host, claim = self.host, held.claim
        host.node.claims.drop(held)
        if claim.partition_key is not None:
            host.keys.free(claim)
        if held.lost is None:
            host.commits.release(claim, attempts=0, hold=HELD if contended else OFFERED)


class Bell:
    """A wake-up: what the product's queues take for an actor's address."""

    def __init__(self) -> None:
        self._event = trio.Event()

    def cast(self, message: object = None) -> bool:
        self._event.set()
        return True

    @property
    def rings(self) -> bool:
        return self._event.is_set()

    async def wait(self, seconds: float) -> bool:
        """Sleep until it rings, or so long; tell whether it rang."""
        if seconds == math.inf:
            await self._event.wait()
        else:
            with trio.move_on_after(seconds):
                await self._event.wait()
        rang = self._event.is_set()
        self._event = trio.Event()
        return rang
