"""Claims at once: a row that this process inserts or wakes, in a queue at rest, is claimed in the same transaction.

Otherwise it would be hinted at and picked: a round trip of the feeder, which at rest takes as long as half of a commit.
For calls of the engine's client; it decides from what the feeder knows, as `HandOver` does for commits. At most one
such call per queue is under way, so that a burst of inserts is picked in batches.

If a call is refused, nothing was claimed. If its fate is unknown, its claim may exist without an owner: the feeder
releases it, as after such a pick.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import psycopg
import trio

from durable_actors._engine.claiming.idle_queues import IdleQueues
from durable_actors._engine.claiming.planner import ClaimPlanner
from durable_actors._engine.node import Node
from durable_actors._engine.running.dispatcher import Dispatcher
from durable_actors._postgres.driver.connection import PgConn
from durable_actors._postgres.driver.statement import Params, Result, Statement
from durable_actors._store.claim import ClaimAtOnce
from durable_actors._store.rows import Claim
from durable_actors.telemetry import Picked


class ClaimsAtOnce:
    """What calls of this process may claim for its node, and what they have claimed."""

    def __init__(
        self,
        node: Node,
        planners: Mapping[str, ClaimPlanner],
        dispatchers: Mapping[str, Dispatcher],
        idle: IdleQueues,
    ) -> None:
        self._node = node
        self._planners = planners
        self._dispatchers = dispatchers
        self._idle = idle
        self._under_way: set[str] = set()  # queues
        self._over = trio.Event()

    async def run(
        self,
        conn: PgConn,
        call: tuple[Statement, Params],
        queues: Iterable[str] | None,
        ids: Sequence[int] = (),
    ) -> tuple[Result, bool]:
        """Run a call that makes one row runnable, and claim the row if a queue of these (None: any) is at rest.

        `ids`: the row; none: the one that the call inserts. True: it is claimed, and needs no hint.
        """
        ask = self.begin(self._dispatchers if queues is None else queues)
        if ask is None:
            return await conn.run(*call), False
        try:
            made, claimed = await conn.batch([call, ask.call(ids)])
        except psycopg.Error:
            self.failed(ask, unknown_fate=False)
            if not conn.pristine:
                raise
            return await conn.run(*call), False  # a user's trigger may refuse the claim, not the insert
        except BaseException:
            self.failed(ask, unknown_fate=True)
            raise
        claims = ask.read(claimed.rows)
        self.done(ask, claims)
        return made, bool(claims)

    def begin(self, queues: Iterable[str]) -> ClaimAtOnce | None:
        """Which of these queues may claim a row that is about to be made runnable. `done` or `failed` must follow."""
        node = self._node
        if node.draining.value or node.told != node.catalog.generation:
            return None
        free = [queue for queue in queues if queue in self._dispatchers and self._at_rest(queue)]
        if not free:
            return None
        self._under_way.update(free)
        return ClaimAtOnce(node.owner, free, node.catalog.array, trio.current_time())

    def _at_rest(self, queue: str) -> bool:
        planner, dispatcher = self._planners[queue], self._dispatchers[queue]
        # In a fair queue it is the keys' turn that decides. Beside the row a slot and a pick stay possible.
        return (
            queue not in self._under_way
            and planner.shares is None
            and planner.drained
            and dispatcher.room > 0
            and dispatcher.can_claim_one_by_id
        )

    def done(self, ask: ClaimAtOnce, claims: Sequence[Claim]) -> None:
        """The call has answered. From here on its claim is renewed, whatever happens to the caller."""
        now = trio.current_time()
        for claim in claims:
            queue, dispatcher = claim.queue, self._dispatchers[claim.queue]
            dispatcher.add([claim], now)
            dispatcher.start_claimed(now)
            self._planners[queue].claimed_at_once()
            self._idle.of(queue).claimed()
            if self._node.telemetry.active:
                seconds = now - ask.now
                self._node.telemetry.emit(
                    Picked(queue=queue, wanted=1, claimed=1, held=0, shelved=0, left=0, seconds=seconds)
                )
        self._end(ask)

    def failed(self, ask: ClaimAtOnce, *, unknown_fate: bool) -> None:
        """The call was refused, or may have happened: then there may be a claim that no task knows."""
        if unknown_fate:
            for queue in ask.queues:
                self._planners[queue].lost_claims()
        self._end(ask)

    def _end(self, ask: ClaimAtOnce) -> None:
        self._under_way.difference_update(ask.queues)
        self._over.set()
        self._over = trio.Event()

    async def settled(self, queue: str) -> None:
        """Wait until what calls under way have claimed in this queue is known: else it would look like an orphan."""
        while queue in self._under_way:
            await self._over.wait()
