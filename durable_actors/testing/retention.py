"""Retention on a bench: all of it at once, where an engine walks in small batches."""

from __future__ import annotations

from typing import Final

from durable_actors._engine.maintenance.janitor import ages_of
from durable_actors._postgres.pool.pool import ConnectionPool
from durable_actors._store.retention import delete_ended, write_keeps
from durable_actors.machine import current_registry
from durable_actors.retention import Retention

BATCH: Final = 1000


async def sweep(pool: ConnectionPool, lane: str, schema: str, retention: Retention) -> int:
    """Delete every instance whose time has come; return how many.

    Again until nothing is left to delete: a child goes after its parent, which may have a greater id.
    """
    count = 0
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
