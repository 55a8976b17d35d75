"""Limits on a bench: declared as by an engine that starts."""

from __future__ import annotations

from collections.abc import Mapping

from durable_actors._limits import Limit, limits_of
from durable_actors._postgres.pool.pool import ConnectionPool
from durable_actors._store.limits import declare_limits


async def declare(pool: ConnectionPool, lane: str, schema: str, limits: Mapping[str, Limit]) -> None:
    """Write what `Config(limits=...)` would declare."""
    async with pool.acquire(lane) as conn:
        await declare_limits(conn, schema, limits_of(limits), node="bench")
