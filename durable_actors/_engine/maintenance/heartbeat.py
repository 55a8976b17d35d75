"""Heartbeat: renews this node's leases.

Owns       nothing: the claims are in `ActiveClaims`, which outlives it.
Receives   nothing; a message makes it beat at once.
Sends      cancellation to steps whose claim is lost.
Writes     renew_leases.sql, touch_node.sql, every `heartbeat_interval` seconds, on its own lane. Between two beats, a
           pulse renews a few claims as a sign of life (`pulse_interval`).
If it dies it is restarted; a lease lasts for at least two more beats.
Never      claims, commits, or runs user code.

The trust window begins when a renewal is *sent*. After a failed round nothing is lost yet: the deadlines of the steps
stay, and the heartbeat soon tries again. A claim that is missing from the answer may only have a locked row, so its row
is read without a lock: the claim is lost only if the row has another claim or none.

Renewals are sent first. A renewal that Postgres refuses (a user's trigger, a lock) costs only its own claim: the batch
is renewed in halves. The row in `nodes`, which is for people, is written last and never waits for a lock.
"""

from __future__ import annotations

from collections import deque
from typing import Final

import psycopg
import trio

from durable_actors._engine.claims import ActiveClaim, ClaimState
from durable_actors._engine.node import Node, logger
from durable_actors._engine.outage import TRANSIENT_ERRORS, Outage
from durable_actors._postgres.driver.connection import PgConn
from durable_actors._store.claim import read_claims
from durable_actors._store.lease import renew_leases
from durable_actors._store.node import register_node, touch_node
from durable_actors.otp import Actor

BATCH: Final = 1000
PULSE: Final = 10
"""Claims that a pulse renews. One would be enough, but its row may be locked."""
SHORTEST_PULSE: Final = 0.1
"""Seconds between two signs of life, at least."""


def pulse_interval(heartbeat_interval: float, dead_after: float) -> float:
    """Seconds between two signs of life. Pure.

    A node whose session is cut has lost its lock, and others may take its claims when its leases have not moved for
    `dead_after` seconds (`failure_detector`). So it renews some claims at least twice in that time, although its
    heartbeats may be further apart: by default every 20 s, against a `dead_after` of 10 s.
    """
    return min(heartbeat_interval, max(dead_after / 3, SHORTEST_PULSE))


class Heartbeat(Actor[object]):
    """The actor."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._outage = Outage(node, "heartbeat")
        self._refused: set[str] = set()  # claims whose renewal was refused alone, and logged

    async def run(self) -> None:
        """Renew until asked to stop."""
        config = self._node.config
        interval = config.heartbeat_interval
        pulse = pulse_interval(interval, config.dead_after)
        beat_at = trio.current_time() + interval
        due = trio.current_time() + pulse
        while True:
            with trio.move_on_at(due) as sleep:
                await self.mailbox.receive()
            began = trio.current_time()
            beats = began >= beat_at or not sleep.cancelled_caught
            try:
                await (self._beat() if beats else self._pulse())
            except TRANSIENT_ERRORS as exc:
                due = trio.current_time() + min(self._outage.failed(exc), pulse)
            else:
                self._outage.ok()
                if beats:
                    beat_at = began + interval
                due = min(began + pulse, beat_at)

    async def _beat(self) -> None:
        """Renew every claim, in batches. Raises if a batch could not be sent or confirmed."""
        node = self._node
        async with node.pool.acquire(node.lane("heartbeat")) as conn:
            await self._renew(conn, node.claims.live())
            await self._touch_node(conn)

    async def _pulse(self) -> None:
        """Renew some claims, so that other nodes see that this one is alive."""
        node = self._node
        claims = node.claims.live()[:PULSE]
        if not claims:
            return
        async with node.pool.acquire(node.lane("heartbeat")) as conn:
            renewed = await self._renew(conn, claims)
        if not renewed:
            await self._beat()

    async def _renew(self, conn: PgConn, claims: list[ActiveClaim]) -> int:
        """Renew these claims; return how many were renewed. Refused ones are found by halving; then it raises."""
        node = self._node
        count, refusal = 0, None
        # Larger groups first: they renew the most claims before the time for the search is over.
        groups = deque(claims[first : first + BATCH] for first in range(0, len(claims), BATCH))
        until = trio.current_time() + node.owner.lease_ttl / 6
        while groups:
            batch = groups.popleft()
            try:
                count += await self._renew_batch(conn, batch)
            except psycopg.Error as exc:
                refusal = exc
                if trio.current_time() >= until:
                    break
                if len(batch) > 1:
                    groups += [batch[: len(batch) // 2], batch[len(batch) // 2 :]]
                else:
                    self._log_refused(batch[0], exc)
        if refusal is not None:
            raise refusal
        self._refused.clear()
        return count

    async def _renew_batch(self, conn: PgConn, batch: list[ActiveClaim]) -> int:
        node = self._node
        sent = trio.current_time()
        renewed = await renew_leases(
            conn, node.owner.schema, [active.claim for active in batch], lease_ttl=node.owner.lease_ttl
        )
        node.claims.extend(
            (active for active in batch if active.claim.claim_id in renewed), sent + node.owner.lease_ttl
        )
        missing = [active for active in batch if active.claim.claim_id not in renewed]
        if missing:
            states = await read_claims(conn, node.owner.schema, [active.claim.id for active in missing])
            self._judge(missing, {number: state.claim_id for number, state in states.items()})
        return len(renewed)

    async def _touch_node(self, conn: PgConn) -> None:
        """Update this node's row in `nodes`, unless it is locked."""
        node, owner = self._node, self._node.owner
        try:
            if node.registered:
                await touch_node(conn, owner.schema, owner.name)
            else:
                await register_node(
                    conn, owner.schema, incarnation=owner.name, node=node.config.node, about=node.about
                )
                node.registered = True
        except psycopg.Error as exc:
            logger.debug("heartbeat: could not update the row of %s in nodes: %s", owner.name, exc)

    def _log_refused(self, active: ActiveClaim, error: psycopg.Error) -> None:
        if active.claim.claim_id not in self._refused:
            self._refused.add(active.claim.claim_id)
            number = active.claim.id
            logger.warning(
                "instance %d: Postgres refuses to renew its lease, trying again: %s", number, error
            )

    def _judge(self, missing: list[ActiveClaim], owners: dict[int, str | None]) -> None:
        for active in missing:
            owner = owners.get(active.claim.id)
            if active.claim.id not in owners and active.state is ClaimState.COMMITTING:
                continue  # its own commit may have deleted it (`keep=0`): the flusher finds out
            if owner != active.claim.claim_id:
                why = "its claim was taken back" if owner is None else "another worker has claimed it"
                self._node.claims.lose(active, why)
