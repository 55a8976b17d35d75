"""Calls that may meet a foreign row lock, without holding a connection while they wait.

A caller's open transaction may hold a row for minutes. A lane whose sessions have `PATIENCE` refuses after a moment;
the call gives its connection back and tries again, so that a few such waits cannot use up the lane.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

import psycopg
import trio

from durable_actors._postgres.driver.connection import PgConn
from durable_actors._postgres.driver.failures import RETRYABLE
from durable_actors._postgres.pool.pool import Pool

PATIENCE: Final = {"lock_timeout": "100ms"}
"""Settings of a lane on which locks are waited for in turns."""
CALLER: Final = {"jit": "off", "plan_cache_mode": "force_generic_plan", "enable_seqscan": "off", **PATIENCE}
"""Settings of a lane for clients' calls. Postgres would plan their statements anew each time, thinking a plan for one
row cheaper than one for arrays: half of the 1,550 µs that a signal cost it (woken and run), 140 of 475 for an insert.
A plan made when the table was small would read all of it until the next ANALYZE: 60 ms for one of 100,000 results.
"""
CALLERS: Final = 10_000
"""Calls that may wait for a connection of such a lane: a host's burst of inserts is served in turn, not turned away."""
LONGEST_PAUSE: Final = 0.25

T = TypeVar("T")


async def with_patience(
    pool: Pool, lane: str, call: Callable[[PgConn], Awaitable[T]], *, within: float | None = None
) -> T:
    """Run `call` on a connection of the lane, as often as a lock is in its way. It must be all or nothing.

    Waits as long as the lock is held: bound it with a cancel scope. Each attempt has `within` seconds, where given.
    Cancelled: as `call`.
    """
    pause = 0.005
    while True:
        try:
            async with pool.acquire(lane, within=within) as conn:
                return await call(conn)
        except psycopg.Error as exc:
            if exc.sqlstate not in RETRYABLE:
                raise
        await trio.sleep(pause)
        pause = min(pause * 2, LONGEST_PAUSE)
