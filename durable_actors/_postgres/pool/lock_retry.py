"""Calls that may wait for somebody else's row lock, without keeping a connection while they wait.

A caller's open transaction may lock a row for minutes. In a lane with `SHORT_LOCK_TIMEOUT` Postgres refuses a statement
that has waited for a lock for 100 ms. The call then returns its connection to the pool and tries again, so a few such
waits cannot use up the lane.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

import psycopg
import trio

from durable_actors._postgres.driver.connection import PgConn
from durable_actors._postgres.driver.failures import RETRYABLE
from durable_actors._postgres.pool.pool import ConnectionPool

SHORT_LOCK_TIMEOUT: Final = {"lock_timeout": "100ms"}
"""Session settings of a lane for `retry_while_locked`."""
CLIENT_SETTINGS: Final = {
    "jit": "off",
    "plan_cache_mode": "force_generic_plan",
    "enable_seqscan": "off",
    **SHORT_LOCK_TIMEOUT,
}
"""Session settings of a lane for clients' calls.

Without a generic plan Postgres plans these statements on each execution, because it estimates a plan for one row to be
cheaper than one for arrays. Planning was half of the 1,550 µs of a signal (woken and run) and 140 of the 475 µs of an
insert. Without `enable_seqscan = off`, a plan made while the table was small would read all of it until the next
ANALYZE: 60 ms to find one of 100,000 results.
"""
MAX_WAITING_CALLS: Final = 10_000
"""Calls that may wait for a connection of such a lane: a burst of inserts waits in line instead of being refused."""
QUERY_CANCELED: Final = "57014"
MAX_CANCELED: Final = 5
"""Attempts in a row that may end as if somebody had cancelled the statement.

Postgres can report a lock timeout that way: when the timeout of one lock fires in the moment in which the lock is
granted, and the statement waits for another lock (the row's tuple lock, then its holder's transaction), the server
forgets why it interrupts the statement. Senders that wait for one row from the same moment on meet this. A
`statement_timeout` of the role, or an operator who ends the statement again and again, is reported to the caller.
"""
FIRST_PAUSE: Final = 0.005
LONGEST_PAUSE: Final = 0.25
"""Seconds between two attempts; the pause doubles."""

T = TypeVar("T")


async def retry_while_locked(
    pool: ConnectionPool, lane: str, call: Callable[[PgConn], Awaitable[T]], *, within: float | None = None
) -> T:
    """Run `call` on a connection of the lane until no lock refuses it. `call` must be all or nothing.

    Waits as long as the lock is held: bound it with a cancel scope. Each attempt may take `within` seconds, if given.
    Cancelled: as `call`.
    """
    pause, canceled = FIRST_PAUSE, 0
    while True:
        try:
            async with pool.acquire(lane, within=within) as conn:
                return await call(conn)
        except psycopg.Error as exc:
            canceled = canceled + 1 if exc.sqlstate == QUERY_CANCELED else 0
            if exc.sqlstate not in RETRYABLE and not 0 < canceled <= MAX_CANCELED:
                raise
        await trio.sleep(pause)
        pause = min(pause * 2, LONGEST_PAUSE)
