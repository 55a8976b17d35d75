"""Starting while Postgres is not ready: it starts, it recovers, somebody has locked a table for a moment.

What may pass is waited for; what an operator must mend is told at once. A failed connect alone does not say which it
is: libpq gives a text in the server's language and no SQLSTATE. `PQping` tells whether the server lets anybody in. If
it does, and refuses us a second time, then it is the password, the role or the database's name.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import Final, TypeVar

import psycopg
import trio
from psycopg import pq

from durable_actors._postgres.failures import RETRYABLE
from durable_actors._postgres.opening import engine_conninfo
from durable_actors.errors import SchemaError, StoreUnavailable

logger: Final = logging.getLogger("durable_actors")

LOCKED: Final = RETRYABLE | {"57014"}
"""SQLSTATEs of a statement that a lock has held up; the last one is a `statement_timeout` of the role's."""
FIRST_PAUSE: Final = 0.1
LONGEST_PAUSE: Final = 1.0
PING_TIMEOUT: Final = 3.0
"""Seconds; a server that is silent for longer does not answer."""

T = TypeVar("T")


class InRecovery(SchemaError):  # noqa: N818 - as its siblings
    """This server is a standby, or replays its log after a restore."""


async def when_ready(attempt: Callable[[], Awaitable[T]], dsns: Iterable[str], *, start_timeout: float) -> T:
    """Run `attempt` until it succeeds, for `start_timeout` seconds. It must be harmless to repeat.

    Raises what an operator must mend at once, and `StoreUnavailable` when the time is over. One WARNING tells of the
    wait. `dsns` are the ways to the server that the attempt uses.
    """
    began = trio.current_time()
    pause, refused, warned = FIRST_PAUSE, False, False
    while True:
        try:
            result = await attempt()
        except (StoreUnavailable, psycopg.Error, InRecovery) as exc:
            if isinstance(exc, psycopg.Error) and exc.sqlstate not in LOCKED:
                raise
            again = refused
            refused = _is_failed_connect(exc) and await _lets_in(dsns)
            if again and refused:
                raise
            left = began + start_timeout - trio.current_time()
            if left <= 0:
                if not start_timeout and isinstance(exc, StoreUnavailable):
                    raise
                text = f"Postgres was not ready within start_timeout={start_timeout:g} s: {exc}"
                raise StoreUnavailable(text) from exc
            if not (warned or refused):
                warned = True
                logger.warning("waiting for Postgres, for up to %g s: %s", start_timeout, exc)
        else:
            if warned:
                logger.info("Postgres is ready after %.1f s", trio.current_time() - began)
            return result
        await trio.sleep(min(pause, left))
        pause = min(pause * 2, LONGEST_PAUSE)


def _is_failed_connect(error: BaseException) -> bool:
    """Whether libpq got no session at all. What the server refuses later has a SQLSTATE."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, psycopg.OperationalError) and cause.sqlstate is None:
            return True
        cause = cause.__cause__
    return False


async def _lets_in(dsns: Iterable[str]) -> bool:
    """Whether the servers of all these take connections. Cancelled: the thread is left to itself."""
    for dsn in dsns:
        with trio.move_on_after(PING_TIMEOUT):
            status = await trio.to_thread.run_sync(
                pq.PGconn.ping, engine_conninfo(dsn).encode(), abandon_on_cancel=True
            )
            if status == pq.Ping.OK:
                continue
        return False
    return True
