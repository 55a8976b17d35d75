"""How the flusher releases claims: the statements, and who is told of it. Which, when and how often: the flusher."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

import psycopg

from durable_actors._engine.committing.queue import Release
from durable_actors._engine.node import Node, logger
from durable_actors._limits import slot_of
from durable_actors._postgres.driver.connection import PgConn
from durable_actors._store.claim import ClaimRow, Released, release_claims
from durable_actors._store.lease import crash_claims
from durable_actors._store.limits import charge_limits, refunds_of
from durable_actors._store.rows import Claim, Promoted


async def give_back(node: Node, conn: PgConn, how: Release, claims: list[Claim]) -> Released:
    """Release claims as `how` says: after a crash of their step, or without one."""
    if how.crash is None:
        return await release_claims(
            conn,
            node.owner.schema,
            claims,
            attempts=how.attempts,
            interruptions=how.interruptions,
            hold=how.hold,
        )
    most = node.config.max_crashes
    crashed, promoted = await crash_claims(
        conn, node.owner.schema, claims, error=how.crash, raised=how.raised, max_crashes=most
    )
    for each in crashed:
        if each.status == "failed":
            logger.error("instance %d failed: %s, step %s: %s", each.id, each.machine, each.step, each.fault)
            node.on_final(each.id)
    cancelled = frozenset(each.id for each in crashed if each.status == "cancelled")
    cascades = any(each.cascades for each in crashed)
    return Released(frozenset(each.id for each in crashed) - cancelled, cancelled, tuple(promoted), cascades)


async def refund(node: Node, conn: PgConn, claims: list[Claim], released: Released) -> None:
    """Give back the tokens of steps that never began. If that fails, the limits are slower for a while."""
    unused = [each for each in claims if each.recorded.unstarted and each.id in released.ids]
    refunds = refunds_of(unused)
    for each in unused:
        each.recorded.unstarted = False  # once: if the answer is lost, the release may be sent again
    if refunds:
        with contextlib.suppress(psycopg.Error):
            await charge_limits(conn, node.owner.schema, refunds)


def tell_released(node: Node, how: Release, claims: list[Claim], released: Released) -> None:
    """Hint at rows that run again, and tell who waits for those that were cancelled."""
    if not how.hold:
        node.offer([Promoted(each.id, each.queue) for each in claims if each.id in released.runnable])
    for each in claims:
        if each.recorded.rate_limit is not None:
            node.expect_token(each.queue, slot_of(each.recorded.rate_limit))
    for claim in claims:
        if claim.id in released.cancelled:
            logger.info("instance %d was cancelled: %s, step %s", claim.id, claim.fsm, claim.step)
            node.on_final(claim.id)


def is_ours(claim: Claim, rows: Mapping[int, ClaimRow]) -> bool:
    """Whether a claim that was not released is still ours, by what was read of its row. Pure."""
    row = rows.get(claim.id)
    return row is not None and row.claim_id == claim.claim_id and row.status == "executing"
