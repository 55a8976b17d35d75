"""The gate before the server: what all lanes of a pool know together about reaching it.

While the server lets connections in, the gate is open and does nothing. After a failed connect one task at a
time tries again, after a pause that doubles; whoever else needs a connection waits for that one's verdict.
So an outage costs a handful of connects per minute however many tasks want one, and nobody waits for ever.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

import trio

from durable_actors._postgres.driver.connection import PgConn
from durable_actors.errors import StoreUnavailable

FIRST_DELAY: Final = 0.1
LONGEST_DELAY: Final = 5.0
"""Seconds between two attempts to connect: so long it takes at worst to notice that Postgres is back."""


def connect_delay(failures: int, *, jitter: float) -> float:
    """How long to wait before the next attempt after so many failed ones in a row.

    Doubles from FIRST_DELAY to LONGEST_DELAY. `jitter` in 0…1 takes up to half of it off, so that the nodes
    of a cluster do not come back in step. Pure.
    """
    doubled = FIRST_DELAY * 2.0 ** min(failures - 1, 16)
    return min(doubled, LONGEST_DELAY) * (1 - jitter / 2)


class Gate:
    """Lets tasks through to connect: all at once while that works, else one after a pause."""

    def __init__(self, jitter: Callable[[], float]) -> None:
        self._jitter = jitter
        self._probe: trio.Event | None = None
        self._verdicts = 0
        self.last: StoreUnavailable | None = None
        """Why the last attempt failed, if it did."""
        self.failures = 0
        """Failed attempts in a row."""
        self.retry_at = 0.0
        """Not before this moment of Trio's clock, after a failure."""
        self.generation = 0
        """Counts up when a server went away or became a standby: older connections are of no use then."""

    def suspect(self, generation: int) -> None:
        """A connection of this generation broke: have every connection of that age replaced.

        A server that vanished or was demoted leaves idle connections that look healthy until they are used.
        One that is older than the last such event tells nothing new.
        """
        if generation == self.generation:
            self.generation += 1

    async def connect(self, attempt: Callable[[], Awaitable[PgConn]]) -> PgConn:
        """Connect when it is time. Raises `StoreUnavailable` when this attempt, or the shared one, failed.

        Cancelled: if this task was the one to try, the next one that waits takes over.
        """
        verdicts = self._verdicts
        while self.failures:
            if self._probe is None:
                return await self._try_again(attempt)
            await self._probe.wait()
            if self._verdicts > verdicts and self.failures:
                raise StoreUnavailable(str(self.last)) from self.last
        return await self._attempt(attempt)

    async def _try_again(self, attempt: Callable[[], Awaitable[PgConn]]) -> PgConn:
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
            if self.failures == before:  # attempts that were under way together count as one
                self.fail(exc)
            raise
        self.failures = 0
        self.last = None
        self._verdicts += 1
        return conn

    def fail(self, why: StoreUnavailable) -> None:
        """Note a failed attempt, or one that was given up because it took too long."""
        self.failures += 1
        self.retry_at = trio.current_time() + connect_delay(self.failures, jitter=self._jitter())
        self.last = why
        self._verdicts += 1
