"""Hand-over: what an outcome of this node offers is claimed by this node in the same transaction.

Dependents of what has ended, and the next row of a partition key that is free now. Otherwise they would be offered,
hinted at, and picked: a write, and a round trip of the feeder; with a key a second transaction that waits for the disk.
Synchronous, for all queues of an engine; the flusher, which commits one group at a time, is the only caller. Whether a
queue takes any is decided here, from what the feeder knows; which rows it gets is decided by the statements
(`tell_dependents.sql`, `hand_siblings.sql`), which hand over only what a pick of that moment would claim.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Final

import trio

from durable_actors._engine.claiming.idle_queues import IdleQueues
from durable_actors._engine.claiming.planner import MAX_PICK, ClaimPlanner
from durable_actors._engine.claims import ActiveClaim
from durable_actors._engine.keys.locks import Keys, key_of
from durable_actors._engine.node import Node
from durable_actors._engine.running.dispatcher import RUN_AHEAD_SECONDS, Dispatcher
from durable_actors._store.graph import Room
from durable_actors._store.rows import Claim
from durable_actors._store.siblings import Heir
from durable_actors.telemetry import Picked

MAX_TURNS: Final = 64
"""How often a key is handed on before its next row is offered to the pick: other rows wait, too."""


class HandOver:
    """What a commit may claim for this node, and what it has claimed."""

    def __init__(
        self,
        node: Node,
        planners: Mapping[str, ClaimPlanner],
        dispatchers: Mapping[str, Dispatcher],
        idle: IdleQueues,
        keys: Keys,
    ) -> None:
        self._node = node
        self._idle = idle
        self._planners = planners
        self._dispatchers = dispatchers
        self._keys = keys
        self._room: Room | None = None  # of the commit under way
        self._leaving: dict[
            str, ActiveClaim
        ] = {}  # of the commit under way: keys that it may hand on, and who has them
        self._began = 0.0
        self._over = trio.Event()

    def begin(self, queues: Iterable[str]) -> Room | None:
        """How much of these queues a commit that is about to be sent may claim; None: nothing.

        `done` or `failed` must follow.
        """
        node, now = self._node, trio.current_time()
        if node.draining.value or node.told != node.catalog.generation:
            return None
        free = {
            queue: min(room, MAX_PICK)
            for queue in queues
            # In a fair queue it is the keys' turn that decides.
            if self._planners[queue].shares is None
            and self._planners[queue].drained
            and (room := self._dispatchers[queue].room)
        }
        if not free:
            return None
        priorities = sorted({each for queue in free for each in self._planners[queue].cursor.priorities})
        self._over, self._began = trio.Event(), now
        self._room = Room(node.owner, free, priorities, node.catalog.array, now)
        return self._room

    def begin_keys(self, claims: Sequence[Claim]) -> Heir | None:
        """Of which of these claims a commit that is about to be sent may claim the key's next row; None: of none.

        Called after `begin`, if at all. `done` or `failed` must follow.
        """
        node, now = self._node, trio.current_time()
        if node.draining.value or node.told != node.catalog.generation:
            return None
        rooms: dict[str, int] = {}
        leaving: dict[str, ActiveClaim] = {}
        for claim in claims:
            active = self._may_hand_on(claim, now)
            if active is None:
                continue
            room = self._dispatchers[claim.queue].room_for_siblings(claim)
            if room:
                rooms[claim.queue] = room
                leaving[key_of(claim)] = active
        if not leaving:
            return None
        if self._room is None:
            self._over = trio.Event()
        self._leaving, self._began = leaving, now
        for active in leaving.values():
            if active.turns:
                self._dispatchers[active.claim.queue].reserved += 1
        ids = frozenset([active.claim.claim_id for active in leaving.values()])
        return Heir(node.owner, rooms, ids, node.catalog.array, now)

    def _may_hand_on(self, claim: Claim, now: float) -> ActiveClaim | None:
        """The claim in our hands, if it has its key for certain, and others need not have their turn now."""
        active = self._node.claims.find(claim.claim_id)
        if (
            active is None
            or active.lost is not None
            or active.turns >= MAX_TURNS
            or now >= active.turns_until
        ):
            return None
        planner = self._planners[claim.queue]
        # While the feeder looks for orphans, what a commit has just claimed would look like one.
        fits = planner.shares is None and not (planner.paused or planner.may_have_orphans)
        fits = fits and self._keys.holds(claim)
        return active if fits else None

    def done(self, claims: Sequence[Claim]) -> None:
        """The commit has answered. From here on these claims are renewed, whatever happens to the caller."""
        room, leaving = self._room, self._leaving
        if not self._end():
            return
        now = trio.current_time()
        for queue in {claim.queue for claim in claims}:
            mine = sorted([claim for claim in claims if claim.queue == queue], key=attrgetter("priority"))
            dispatcher = self._dispatchers[queue]
            dispatcher.add(mine, now)
            self._hand_on(mine, leaving, now)
            dispatcher.start_claimed(now)
            self._idle.of(queue).claimed()
            if self._node.telemetry.active:
                keys = sum(active.claim.queue == queue for active in leaving.values())
                wanted = keys + (0 if room is None else room.queues.get(queue, 0))
                self._tell(queue, wanted, len(mine), now - self._began)
        self._over.set()

    def _hand_on(self, claims: Iterable[Claim], leaving: Mapping[str, ActiveClaim], now: float) -> None:
        """Give keys to the claims of their next rows: no session lock is freed or taken."""
        for claim in claims:
            if claim.partition_key is None:
                continue
            before, active = leaving[claim.partition_key], self._node.claims.find(claim.claim_id)
            assert active is not None
            active.turns = before.turns + 1
            active.turns_until = before.turns_until if before.turns else now + RUN_AHEAD_SECONDS
            # If not, the session is in doubt or gone: its feeder, woken when the claim before it ends, takes the key.
            before.handed_on = self._keys.hand_on(before.claim, claim)

    def _tell(self, queue: str, wanted: int, claimed: int, seconds: float) -> None:
        self._node.telemetry.emit(
            Picked(queue=queue, wanted=wanted, claimed=claimed, held=0, shelved=0, left=0, seconds=seconds)
        )

    def failed(self, *, unknown_fate: bool) -> None:
        """The commit was refused, or may have happened: then there may be claims that no task knows."""
        room, leaving = self._room, self._leaving
        if not self._end():
            return
        if unknown_fate:
            queues = {active.claim.queue for active in leaving.values()}
            for queue in queues.union(() if room is None else room.queues):
                self._planners[queue].lost_claims()
        self._over.set()

    def _end(self) -> bool:
        """The commit under way is over. False: it could claim nothing."""
        if self._room is None and not self._leaving:
            return False
        for queue, count in Counter(
            each.claim.queue for each in self._leaving.values() if each.turns
        ).items():
            self._dispatchers[queue].reserved -= count
        self._room, self._leaving = None, {}
        return True

    async def settled(self) -> None:
        """Wait until what a commit under way has claimed is known: else it would look like an orphan."""
        while self._room is not None or self._leaving:
            await self._over.wait()
