"""How fast work goes: counters of the tables, and what became of the newest instances. For operators."""

from __future__ import annotations

from typing import Final

import attrs

from durable_actors._postgres.driver import encode
from durable_actors._postgres.driver.connection import PgConn
from durable_actors._store.sql import statement

NEWEST_ROWS: Final = 10_000
"""The newest instances that `read_recent` looks at: milliseconds, whatever the size of the table."""
RECENT: Final = 10.0
"""Seconds over which it counts what was done."""


@attrs.frozen
class Rates:
    """Counters of the tables. Two readings make rates."""

    inserts: int
    updates: int
    signals: int
    at: float
    """Seconds on the server's clock."""


@attrs.frozen
class Recent:
    """What became of the newest instances of a queue."""

    looked: int
    """How many of them were among the newest `NEWEST_ROWS`."""
    done: float
    """Of these, done per second in the last `RECENT` seconds. Older ones may have been done, too."""
    failed: int
    """Of these, how many have failed."""


async def read_rates(conn: PgConn, schema: str) -> Rates:
    """Read the counters."""
    [row] = (await conn.run(statement("read_rates", schema, read_only=True), [schema.encode()])).rows
    return Rates(int(row[0] or 0), int(row[1] or 0), int(row[2] or 0), float(row[3] or 0))


async def read_recent(conn: PgConn, schema: str) -> dict[str, Recent]:
    """What became of the newest instances, by queue."""
    params = [encode.number(NEWEST_ROWS), encode.number(RECENT)]
    rows = (await conn.run(statement("read_recent", schema, read_only=True), params)).rows
    return {
        (queue or b"").decode(): Recent(int(looked or 0), int(done or 0) / RECENT, int(failed or 0))
        for queue, looked, done, failed in rows
    }
