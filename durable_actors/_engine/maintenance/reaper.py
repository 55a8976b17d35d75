"""Reaper: reaps the claims of dead and silent nodes, offers held rows that nothing promotes, deletes old `nodes` rows.

Owns       what it has seen of other nodes' locks (`failure_detector`); after a restart it begins anew.
Receives   nothing.
Sends      hints to the feeders here about rows that are on offer again; `on_final` for instances that it ends.
Writes     reap_claims.sql, promote_siblings.sql, free_holds.sql; on the claim lane. forget_nodes.sql,
           forget_flushes.sql and forget_limit_keys.sql in a task of its own: they may fail, and delay nothing.
Reads      read_owners.sql, sweep_keys.sql.
If it dies it is restarted, and every other node has one, too: no leader, ordered SKIP LOCKED, bounded batches.
Never      takes a claim that has not expired, unless its node is proved dead.

It uses the claim lane because that has exactly one connection: two looks at a node's lock prove something only if they
come from one session.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import trio

from durable_actors._engine.maintenance.failure_detector import SuspectLog, judge_owners, wait_for_next
from durable_actors._engine.node import Node, logger
from durable_actors._engine.outage import TRANSIENT_ERRORS, Outage
from durable_actors._postgres.driver.connection import PgConn
from durable_actors._store.claim import promote_siblings
from durable_actors._store.commit import forget_flushes
from durable_actors._store.lease import OwnerState, Reaped, read_owners, reap_claims, sweep_keys
from durable_actors._store.limits import forget_limit_keys
from durable_actors._store.node import forget_nodes
from durable_actors._wording import counted
from durable_actors.machine import ENDED
from durable_actors.otp import Actor
from durable_actors.telemetry import ClaimsReaped

BATCH: Final = 500
"""Claims per statement, about 8 µs each."""
SWEEP: Final = 1000
"""Keys per statement of the sweep, about 19 µs each."""
SWEEP_REST: Final = 9.0
"""How many times as long as such a statement the sweep rests before the next one: picks use the same connection.
Without a rest, a sweep of 10,000 keys kept them from it for a fifth of a second."""
SWEEP_FIRST: Final = 1.0
"""Seconds after the start until the first sweep, at most: a node that starts has other work, and what it reaps or
releases offers the next row of its key without it."""
FORGET_FIRST: Final = 60.0
"""Seconds after the start until old nodes are deleted: not while this one starts its work."""
FORGET_EVERY: Final = 3600.0
"""Seconds from then on."""
FORGET_STOPPED: Final = 86_400.0
"""Seconds for which the row of a node that stopped in good order is kept."""
FORGET_LOST: Final = 7 * 86_400.0
"""The same for a node that vanished: people may want to know which one it was."""
FORGET_FLUSHES: Final = 86_400.0
"""Seconds for which a group commit of unknown fate can be looked up. Its node asks as soon as Postgres answers."""

FORGET_KEYS: Final = 86_400.0
"""Seconds for which a key of a limit that is at rest keeps its row."""
MOST_KEYS: Final = 10_000
"""Such keys per hour and node, at most."""


class Reaper(Actor[object]):
    """The actor; a message makes it look at once."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._outage = Outage(node, "reaper")
        self._suspects = SuspectLog()
        self._sweep_at = math.inf
        self._swept_to = ""  # the last key of the sweep under way; "" is before the first
        self._forget_at = math.inf

    async def run(self) -> None:
        """Look, reap, sleep until something may be due."""
        began, interval = trio.current_time(), self._node.config.reap_interval
        self._forget_at, self._sweep_at = began + FORGET_FIRST, began + min(SWEEP_FIRST, interval)
        while True:
            try:
                wait = await self._round()
            except TRANSIENT_ERRORS as exc:
                wait = self._outage.failed(exc)
            else:
                self._outage.ok()
            with trio.move_on_after(wait):
                await self.mailbox.receive()

    async def _round(self) -> float:
        """Reap all dead claims; return how long to sleep."""
        node = self._node
        while True:
            owners, dead, next_look = await self._look()
            if not dead and not any(each.soonest_expiry <= 0 for each in owners):
                break
            if not await self._reap(dead):
                break  # their rows are locked: they are being committed, renewed or reaped right now
        if trio.current_time() >= self._sweep_at:
            await self._sweep()
        now = trio.current_time()
        if now >= self._forget_at:
            self._forget_at = now + FORGET_EVERY
            self.nursery.start_soon(self._forget)
        wait = wait_for_next(owners, next_look=next_look, now=now, reap_interval=node.config.reap_interval)
        # Nodes that wait for the end of the same lease should not all wake in the same millisecond.
        return min(wait + 0.02 * node.random(), max(self._sweep_at - now, 0.0))

    async def _look(self) -> tuple[list[OwnerState], dict[str, float], float | None]:
        node = self._node
        async with node.pool.acquire(node.lane("claim")) as conn:
            asked = trio.current_time()
            owners = await read_owners(conn, node.owner.schema)
            # The server process and our connection to it: a pooler may change one without the other.
            session = (conn.opened_at, owners[0].backend if owners else 0)
        judgement = judge_owners(
            self._suspects,
            owners,
            me=node.owner.name,
            session=session,
            asked=asked,
            seen=trio.current_time(),
            dead_after=node.config.dead_after,
        )
        self._suspects = judgement.log
        # With the expiry that was seen: a node that has come back since, and renewed its claims, must keep them.
        dead = {each.owner: each.latest_expiry for each in owners if each.owner in judgement.dead}
        return owners, dead, judgement.next_look

    async def _reap(self, dead: dict[str, float]) -> int:
        """Reap expired claims and those of dead nodes; return how many."""
        node = self._node
        count = 0
        while True:
            async with node.pool.acquire(node.lane("claim")) as conn:
                found = await reap_some(node, conn, limit=BATCH, dead=dead)
            count += found
            if found < BATCH:
                return count

    async def _forget(self) -> None:
        """Delete nodes long gone, what commits left, and limit keys at rest; what fails is repeated after an hour.

        In a task of its own, on the client lane: that may be busy, and has a time-out for locks (the table may be
        altered).
        """
        node = self._node
        try:
            async with node.pool.acquire(node.lane("client")) as conn:
                gone = await forget_nodes(
                    conn, node.owner.schema, stopped=FORGET_STOPPED, lost=FORGET_LOST, limit=BATCH
                )
                await forget_flushes(conn, node.owner.schema, after=FORGET_FLUSHES)
                await forget_limit_keys(conn, node.owner.schema, after=FORGET_KEYS, limit=MOST_KEYS)
        except TRANSIENT_ERRORS as exc:
            logger.debug("could not delete old rows of nodes: %s", exc)
        else:
            if gone:
                logger.debug("deleted %d old rows of nodes: %s", len(gone), ", ".join(gone[:10]))

    async def _sweep(self) -> None:
        """Offer rows that are held although no sibling goes first: the safety net under every promotion.

        Some keys in each round, so that neither the looks nor the picks wait for the rest.
        """
        node, began = self._node, trio.current_time()
        async with node.pool.acquire(node.lane("claim")) as conn:
            sent = trio.current_time()
            _, after = await sweep_some(node, conn, after=self._swept_to, limit=SWEEP)
        now = trio.current_time()
        self._swept_to = after or ""
        self._sweep_at = (
            began + node.config.reap_interval if after is None else now + (now - sent) * SWEEP_REST
        )


# Used by `execute_next`, too.


async def reap_some(
    node: Node, conn: PgConn, *, limit: int, dead: Mapping[str, float] = MappingProxyType({})
) -> int:
    """Reap up to `limit` expired claims, and those of dead nodes; log them, and return how many."""
    reaped, promoted = await reap_claims(
        conn, node.owner.schema, limit=limit, dead=dead, max_crashes=node.config.max_crashes
    )
    node.offer(promoted)
    if reaped:
        _report(node, reaped, tuple(dead))
    return len(reaped)


async def sweep_some(node: Node, conn: PgConn, *, after: str, limit: int) -> tuple[int, str | None]:
    """Offer the stuck rows of up to `limit` keys; return how many there were, and where to continue (None: the end)."""
    stuck, last = await sweep_keys(conn, node.owner.schema, after=after, limit=limit)
    promoted = await promote_siblings(conn, node.owner.schema, stuck) if stuck else []
    node.offer(promoted)
    return len(promoted), last


def _report(node: Node, reaped: list[Reaped], dead: tuple[str, ...]) -> None:
    failed = 0
    for each in reaped:
        if each.status == "cancelled":
            node.on_final(each.id)
            logger.info("instance %d was cancelled: %s, step %s", each.id, each.machine, each.step)
        elif each.status == "failed":
            failed += 1
            node.on_final(each.id)
            logger.error("instance %d failed: %s, step %s: %s", each.id, each.machine, each.step, each.fault)
        else:
            node.notify(each.queue, instance_id=each.id)
    if node.wakeups is not None:
        node.wakeups.add(each.id for each in reaped)
    if any(each.cascades or each.status in ENDED for each in reaped):  # dependents are told, too
        node.cascade()
    logger.warning(
        "reaped %s whose lease had expired%s%s",
        counted(len(reaped), "claim"),
        f", or whose node is gone: {', '.join(dead)}" if dead else "",
        f"; {failed} of them failed" if failed else "",
    )
    if node.telemetry.active:
        node.telemetry.emit(ClaimsReaped(count=len(reaped), failed=failed, dead_nodes=dead))
