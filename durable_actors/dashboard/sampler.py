"""The sampler: one picture of queues and nodes per interval for all viewers, and the bell that says there is a new one.

Each dashboard has one. Whoever comes first in an interval takes the sample and writes it to the database; the others
read it. Pages, metrics and the live updates of all viewers use `Sampler.latest`: no viewer costs a counting query.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Any, Final, TypeVar, cast

import psycopg
import trio

from durable_actors._postgres.driver.connection import PgConn
from durable_actors._postgres.pool.pool import ConnectionPool
from durable_actors._store.samples import Sample, rates_of, read_samples, take_sample
from durable_actors.errors import StoreUnavailable

logger = logging.getLogger("durable_actors.dashboard")

KEPT: Final = 720
"""Samples that are kept in memory for charts: an hour of them."""
MOST_SHARED: Final = 100
"""Things that are kept for all viewers until the next sample."""
TROUBLE: Final = (StoreUnavailable, psycopg.Error)
MISSING: Final = (psycopg.errors.UndefinedTable, psycopg.errors.InvalidSchemaName)
FIRST_PAUSE: Final = 0.5
LONGEST_PAUSE: Final = 15.0

T = TypeVar("T")


class Bell:
    """Tells all viewers that there is something new. A viewer who is busy hears several rings as one."""

    def __init__(self) -> None:
        self._next = trio.Event()
        self.rung = 0
        """How often it has rung."""

    def ring(self) -> None:
        """Wake everybody who listens."""
        self.rung += 1
        self._next.set()
        self._next = trio.Event()

    async def wait(self, heard: int) -> int:
        """Wait until it has rung more often than `heard`; return how often."""
        while self.rung == heard:
            await self._next.wait()
        return self.rung

    @property
    def listeners(self) -> int:
        """How many wait for it now."""
        return self._next.statistics().tasks_waiting


class Sampler:
    """Takes or reads samples. `run` runs in a task of its own."""

    def __init__(self, pool: ConnectionPool, lane: str, schema: str, *, interval: float) -> None:
        self._pool = pool
        self._lane = lane
        self._schema = schema
        self._slots: deque[int] = deque(maxlen=KEPT)
        self._samples: dict[int, Sample] = {}
        self._shared: dict[str, tuple[int, Any]] = {}
        self.interval: Final = interval
        self.bell: Final = Bell()
        self.taken = 0
        """Samples that this process has taken itself."""
        self.trouble: str | None = None
        """Why there is no new sample; None if there is no reason to complain."""

    @property
    def latest(self) -> Sample | None:
        """The newest sample; None before the first."""
        return self._samples[self._slots[-1]] if self._slots else None

    def rates(self, limit: int = 60) -> list[tuple[datetime, float, float]]:
        """Inserts and row updates per second, oldest first."""
        slots = list(self._slots)[-limit - 1 :]
        return rates_of({slot: self._samples[slot] for slot in slots})

    async def run(self) -> None:
        """Sample for ever. A database that is away is waited for."""
        pause = FIRST_PAUSE
        while True:
            try:
                await self.refresh()
            except TROUBLE as exc:
                self._complain(exc)
                await trio.sleep(pause)
                pause = min(pause * 2, LONGEST_PAUSE)
            else:
                pause = FIRST_PAUSE
                await trio.sleep(self.interval)

    async def refresh(self) -> None:
        """Take the sample of this interval, unless somebody has; read what is new. Rings if there is something."""
        newest = self._slots[-1] if self._slots else 0
        found = await self.read(self._take, newest)
        self.trouble = None
        for slot in sorted(found):
            if len(self._slots) == KEPT:
                del self._samples[self._slots[0]]
            self._slots.append(slot)
            self._samples[slot] = found[slot]
        if found:
            self.bell.ring()

    async def _take(self, conn: PgConn, newest: int) -> dict[int, Sample]:
        if await take_sample(conn, self._schema, interval=self.interval) is not None:
            self.taken += 1
        return await read_samples(conn, self._schema, after=newest, limit=KEPT if not newest else 20)

    async def read(self, call: Callable[..., Awaitable[T]], *args: object) -> T:
        """Run a read of the dashboard on a connection of its lane."""
        async with self._pool.acquire(self._lane) as conn:
            return await call(conn, *args)

    async def shared(self, name: str, call: Callable[[PgConn, str], Awaitable[T]]) -> T:
        """Read what is too dear for every sample: only if somebody looks, and once per sample for all viewers."""
        rung, found = self._shared.get(name, (-1, None))
        if rung != self.bell.rung:
            rung, found = self.bell.rung, await self.read(call, self._schema)
            if len(self._shared) >= MOST_SHARED:
                self._shared.clear()
            self._shared[name] = rung, found
        return cast("T", found)

    def _complain(self, error: Exception) -> None:
        if self.trouble is None and isinstance(error, MISSING):
            logger.info("the dashboard waits for the schema: a worker or `durable-actors migrate` creates it")
        elif self.trouble is None:
            logger.warning("the dashboard cannot read the database: %s", error)
        self.trouble = str(error)


@asynccontextmanager
async def sampling(sampler: Sampler) -> AsyncGenerator[None, None]:
    """Run a sampler while a block runs."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(sampler.run)
        try:
            yield
        finally:
            nursery.cancel_scope.cancel()
