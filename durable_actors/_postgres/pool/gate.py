"""The gate in front of the server: back-off between failed connects, shared by all lanes of a pool.

While connects succeed, the gate is open and does nothing. After a failed connect one task at a time tries again, after
a pause that doubles; the other tasks that need a connection wait for its result. So an outage costs a handful of
connects per minute, no matter how many tasks want a connection, and no task waits for ever.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

import trio

from durable_actors._postgres.driver.connection import PgConn
from durable_actors.errors import StoreUnavailable

FIRST_DELAY: Final = 0.1
LONGEST_DELAY: Final = 5.0
"""Seconds between two attempts to connect, and the longest time until the pool notices that Postgres is back."""


def connect_delay(failures: int, *, jitter: float) -> float:
    """Seconds to wait before the next attempt, after `failures` failed attempts in a row.

    Doubles from FIRST_DELAY to LONGEST_DELAY. `jitter`, between 0 and 1, takes up to half of it off, so that the nodes
    of a cluster do not reconnect in step. Pure.
    """
    doubled = FIRST_DELAY * 2.0 ** min(failures - 1, 16)
    return min(doubled, LONGEST_DELAY) * (1 - jitter / 2)


class Gate:
    """Lets tasks connect: all at once while connects succeed, otherwise one at a time after a pause."""

    def __init__(self, jitter: Callable[[], float]) -> None:
        self._jitter = jitter
        self._probe: trio.Event | None = None
        self._attempts_ended = 0
        self.last_failure: StoreUnavailable | None = None
        """The error of the last attempt; None if it succeeded."""
        self.failures = 0
        """Failed attempts in a row."""
        self.retry_at = 0.0
        """After a failure: the earliest time of the next attempt, on Trio's clock."""
        self.generation = 0
        """Incremented when a server goes away or becomes a standby: connections of an older generation are closed."""

    def suspect(self, generation: int) -> None:
        """Have every connection of this generation replaced, because one of them broke.

        A server that vanished or was demoted leaves idle connections that look healthy until they are used.
        A broken connection of an older generation is no news.
        """
        if generation == self.generation:
            self.generation += 1

    async def connect(self, attempt: Callable[[], Awaitable[PgConn]]) -> PgConn:
        """Connect, after the pause if there is one. Raises `StoreUnavailable` if this or the shared attempt failed.

        Cancelled: if this task was the one that tries, the next waiting task takes over.
        """
        ended_before = self._attempts_ended
        while self.failures:
            if self._probe is None:
                return await self._retry(attempt)
            await self._probe.wait()
            if self._attempts_ended > ended_before and self.failures:
                raise StoreUnavailable(str(self.last_failure)) from self.last_failure
        return await self._attempt(attempt)

    async def _retry(self, attempt: Callable[[], Awaitable[PgConn]]) -> PgConn:
        self._probe = probe = trio.Event()
        try:
            await trio.sleep_until(self.retry_at)
            return await self._attempt(attempt)
        finally:
            self._probe = None
            probe.set()

    async def _attempt(self, attempt: Callable[[], Awaitable[PgConn]]) -> PgConn:
        before = self.failures
        try:
            conn = await attempt()
        except StoreUnavailable as exc:
            if self.failures == before:  # attempts that ran at the same time count as one
                self.fail(exc)
            raise
        self.failures = 0
        self.last_failure = None
        self._attempts_ended += 1
        return conn

    def fail(self, why: StoreUnavailable) -> None:
        """Record an attempt that failed or was given up because it took too long."""
        self.failures += 1
        self.retry_at = trio.current_time() + connect_delay(self.failures, jitter=self._jitter())
        self.last_failure = why
        self._attempts_ended += 1
