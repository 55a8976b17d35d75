"""Retention on a bench: all of it at once, where an engine walks in small batches."""

from __future__ import annotations

from typing import Final

from durable_actors._engine.maintenance.janitor import ages_of
from durable_actors._postgres.pool.pool import ConnectionPool
from durable_actors._store.retention import (
    delete_ended,
    find_long_journals,
    snapshot_journal,
    truncate_journal,
    write_keeps,
)
from durable_actors.machine import current_registry
from durable_actors.retention import Retention

BATCH: Final = 1000


async def sweep(pool: ConnectionPool, lane: str, schema: str, retention: Retention) -> int:
    """Delete every instance whose time has come, and records of long histories; return how many instances.

    Again until nothing is left to delete: a child goes after its parent, which may have a greater id.
    """
    count = 0
    if retention.history is not None:
        await truncate(pool, lane, schema, retention.history)
    while True:
        async with pool.acquire(lane) as conn:
            await write_keeps(conn, schema, current_registry().specs.values())
            found, after = 0, 0
            while True:
                swept = await delete_ended(
                    conn, schema, ages_of(retention), after=after, limit=BATCH, old=0.0
                )
                found += swept.deleted
                if swept.last is None:
                    break
                after = swept.last
        count += found
        if not found:
            return count


async def truncate(pool: ConnectionPool, lane: str, schema: str, moves: int) -> None:
    """Write the snapshots that are due, and delete what lies far enough back."""
    after: int | None = 0
    async with pool.acquire(lane) as conn:
        while after is not None:
            found = await find_long_journals(conn, schema, moves=moves, after=after, limit=BATCH)
            for number in found.grown:
                await snapshot_journal(conn, schema, number, moves=moves)
            for number in {*found.grown, *found.hides}:
                while await truncate_journal(conn, schema, number, moves=moves, most=BATCH) == BATCH:
                    pass
            after = found.last
