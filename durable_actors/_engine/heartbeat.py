"""Heartbeat: keeps this node's leases alive.

Owns       nothing: the claims are in `Leases`, which outlives it.
Receives   nothing.
Sends      cancellation to steps whose claim is lost.
Writes     renew_leases.sql, touch_node.sql, every `heartbeat_interval` seconds, on its own lane.
If it dies it is restarted; leases live on for at least two more beats.
Never      claims, commits, or runs user code.

Trust counts from when a renewal was *sent*. A round that fails is "unknown": nothing is lost yet, the deadlines of
the steps stand, and it is tried again soon. A claim missing from a round's answer is unknown, too (its row may be
locked): a lock-free read decides. Only another claim, or none, in the row means lost.
"""

from __future__ import annotations

from typing import Final

import trio

from durable_actors._engine.leases import Held
from durable_actors._engine.node import Node
from durable_actors._engine.outage import TROUBLE, Outage
from durable_actors._store.claim import read_claims
from durable_actors._store.lease import renew_leases
from durable_actors._store.node import touch_node
from durable_actors.otp import Actor

BATCH: Final = 1000


class Heartbeat(Actor[object]):
    """The actor."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._outage = Outage(node, "heartbeat")

    async def run(self) -> None:
        """Beat until asked to stop."""
        interval = self._node.config.heartbeat_interval
        due = trio.current_time() + interval
        while True:
            with trio.move_on_at(due):
                await self.mailbox.receive()
            began = trio.current_time()
            try:
                await self._beat()
            except TROUBLE as exc:
                due = trio.current_time() + min(self._outage.failed(exc), interval)
            else:
                self._outage.over()
                due = began + interval

    async def _beat(self) -> None:
        """Renew every claim, in batches; raises when a batch could not be sent or confirmed."""
        node = self._node
        claims = node.leases.all()
        async with node.pool.acquire(node.lane("heartbeat")) as conn:
            await touch_node(conn, node.owner.schema, node.owner.name)
            for first in range(0, len(claims), BATCH):
                batch = claims[first : first + BATCH]
                sent = trio.current_time()
                renewed = await renew_leases(
                    conn, node.owner.schema, [held.claim for held in batch], lease_ttl=node.owner.lease_ttl
                )
                node.leases.extend(
                    (held for held in batch if held.claim.claim_id in renewed), sent + node.owner.lease_ttl
                )
                missing = [held for held in batch if held.claim.claim_id not in renewed]
                if missing:
                    states = await read_claims(conn, node.owner.schema, [held.claim.id for held in missing])
                    self._judge(missing, {number: state.claim_id for number, state in states.items()})

    def _judge(self, missing: list[Held], owners: dict[int, str | None]) -> None:
        for held in missing:
            owner = owners.get(held.claim.id)
            if owner != held.claim.claim_id:
                why = "its claim was taken back" if owner is None else "another worker has claimed it"
                self._node.leases.lose(held, why)
