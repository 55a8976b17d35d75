"""The pool: a node's connections, in named lanes that cannot starve each other.

    async with open_pool(dsn, lanes=[Lane("claim", 2), Lane("commit", 3), Lane("heartbeat", 1)]) as pool:
        async with pool.acquire("claim") as conn:
            await conn.run(...)

The task that needs a connection opens it; the pool keeps it afterwards. A returned connection must be pristine,
otherwise the pool closes it. Returning is synchronous, so no cancellation can interrupt it. If a task is cancelled
while

waiting in line     it leaves the line; it has taken nothing
connecting          its place goes to the next task in line; the half-open connection is closed
using one           the connection is returned if it is pristine; otherwise it is closed and its place is free
returning           it cannot be cancelled here

Session state (SET, temporary tables, session locks) stays with the connection after it is returned: a lane that needs
session state is not shared.
"""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Final

import attrs
import trio
from trio.lowlevel import checkpoint_if_cancelled

from durable_actors._postgres.driver.connection import PgConn
from durable_actors._postgres.pool.gate import Gate
from durable_actors._postgres.pool.lane import Lane, LaneState, LaneStatistics, PooledConnection
from durable_actors.errors import CommitUnknown, ConfigError, StoreUnavailable

ACQUIRE_TIMEOUT: Final = 10.0
"""Seconds for waiting in line and connecting together."""
MAX_LIFETIME: Final = 1800.0
"""Seconds that a connection is kept, minus a random tenth. Bounds the cost of a leaking backend; picks up DNS
changes."""


@attrs.frozen
class ConnectionStatistics:
    """The pool at one moment."""

    lanes: tuple[LaneStatistics, ...]
    connect_failures: int
    """Failed connects in a row. Above zero, Postgres cannot be reached at the moment."""
    generation: int
    """How often all connections were replaced because a server went away or became a standby."""


class AcquireContext:
    """`async with pool.acquire(lane) as conn:`. A class, because a generator would cost 2 µs more."""

    __slots__ = ("_on_wait", "_pool", "_pooled", "_scope", "_state", "_within")

    def __init__(
        self,
        pool: ConnectionPool,
        state: LaneState,
        within: float | None,
        on_wait: Callable[[], object] | None,
    ) -> None:
        self._pool = pool
        self._state = state
        self._within = within
        self._on_wait = on_wait
        self._pooled: PooledConnection | None = None
        self._scope: trio.CancelScope | None = None

    async def __aenter__(self) -> PgConn:
        if self._pooled is not None:
            raise RuntimeError("this context is in use; call acquire() for each block")
        await checkpoint_if_cancelled()
        pooled = self._state.take_idle()
        if pooled is None:
            pooled = await self._pool.obtain(self._state)
        self._pooled = pooled
        if self._within is not None:
            self._scope = trio.CancelScope(deadline=trio.current_time() + self._within)
            self._scope.__enter__()
        if self._on_wait is not None:
            self._state.on_wait.add(self._on_wait)
        return pooled.conn

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pooled, self._pooled = self._pooled, None
        scope, self._scope = self._scope, None
        assert pooled is not None
        if self._on_wait is not None:
            self._state.on_wait.discard(self._on_wait)
        try:
            if scope is not None:
                scope.__exit__(
                    kind, error, trace
                )  # raises the rest of an exception group that contains its Cancelled
        finally:
            self._state.give_back(pooled)
        if scope is not None and scope.cancelled_caught:
            raise CommitUnknown(
                f"lane {self._state.lane.name!r}: Postgres did not answer within {self._within:g} s; the "
                "statement may have been done or not"
            ) from error


class ConnectionPool:
    """Connections to one Postgres, in lanes. Made by `open_pool`."""

    def __init__(
        self,
        dsn: str,
        lanes: Iterable[Lane],
        *,
        acquire_timeout: float = ACQUIRE_TIMEOUT,
        max_lifetime: float = MAX_LIFETIME,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._dsn = dsn
        self._acquire_timeout = acquire_timeout
        self._max_lifetime = max_lifetime
        self._jitter = jitter
        self._closed = False
        self._gates: dict[
            str, Gate
        ] = {}  # by DSN: a lane with a DSN of its own may get through when the others do not
        self._lanes: dict[str, LaneState] = {}
        for lane in lanes:
            if lane.name in self._lanes:
                raise ConfigError(f"two lanes are named {lane.name!r}", option=lane.option, value=lane.name)
            gate = self._gates.setdefault(lane.dsn or dsn, Gate(jitter))
            self._lanes[lane.name] = LaneState(lane, gate)

    def acquire(
        self, lane: str, *, within: float | None = None, on_wait: Callable[[], object] | None = None
    ) -> AcquireContext:
        """Take a connection of the lane for an `async with` block of at most `within` seconds (default: the lane's).

        The pool calls `on_wait`, possibly more than once, when another task has to wait for a connection meanwhile.

        Entering raises `PoolTimeout` if no connection became free in `acquire_timeout` seconds or too many tasks
        are waiting already, and `StoreUnavailable` if Postgres cannot be reached: immediately at the first failure,
        later after at most `gate.LONGEST_DELAY` plus the time to connect. The caller backs off and retries.
        """
        try:
            state = self._lanes[lane]
        except KeyError:
            raise LookupError(f"the pool has no lane {lane!r}, only {', '.join(self._lanes)}") from None
        return AcquireContext(self, state, state.lane.answer_within if within is None else within, on_wait)

    def has_free(self, lane: str) -> bool:
        """Whether a task could take a connection of the lane now without delaying another task."""
        return self._lanes[lane].has_free

    @property
    def closed(self) -> bool:
        """Whether the pool was closed."""
        return self._closed

    def statistics(self) -> ConnectionStatistics:
        """A snapshot of the pool."""
        return ConnectionStatistics(
            lanes=tuple(state.statistics() for state in self._lanes.values()),
            connect_failures=max((gate.failures for gate in self._gates.values()), default=0),
            generation=sum(gate.generation for gate in self._gates.values()),
        )

    def close(self) -> None:
        """Close every connection. Tasks that use or wait for one get `StoreUnavailable`. Safe to repeat."""
        self._closed = True
        for state in self._lanes.values():
            state.close()

    async def aclose(self) -> None:
        """`close`, and a checkpoint."""
        self.close()
        await trio.lowlevel.checkpoint()

    async def obtain(self, state: LaneState) -> PooledConnection:
        """Get a connection when none is idle (for `AcquireContext`): open one, or wait in line."""
        has_place = tried = False

        async def attempt() -> PgConn:
            nonlocal tried
            tried = True
            try:
                return await PgConn.open(state.lane.dsn or self._dsn, settings=state.lane.settings)
            except StoreUnavailable:
                state.count_failed_connect()
                raise

        with trio.move_on_after(self._acquire_timeout):
            if not state.take_place():
                pooled = await state.wait_turn()
                if pooled is not None:
                    return pooled
            has_place = True
            return await self._open(state, attempt)
        limit = f"within acquire_timeout={self._acquire_timeout:g} s"
        if not has_place:
            raise state.timed_out(f"none became free {limit}")
        error = StoreUnavailable(
            f"cannot connect to Postgres {limit}: {state.gate.last_failure or 'no answer'}"
        )
        if tried:
            state.gate.fail(error)  # the server is silent: without this every caller would try at once
        raise error

    async def _open(self, state: LaneState, attempt: Callable[[], Awaitable[PgConn]]) -> PooledConnection:
        """Connect, in the place that this task has taken."""
        # If the server changes while we connect, we may have reached the old one: then this is used once at most.
        generation = state.gate.generation
        try:
            conn = await state.gate.connect(attempt)
        except BaseException as exc:
            state.vacate(exc)
            raise
        if self._closed:
            conn.close()
            state.vacate()
            raise StoreUnavailable("the pool was closed while connecting")
        lifetime = self._max_lifetime * (1 - self._jitter() / 10)
        return state.fill(conn, expires_at=conn.opened_at + lifetime, generation=generation)


@asynccontextmanager
async def open_pool(
    dsn: str,
    *,
    lanes: Iterable[Lane],
    acquire_timeout: float = ACQUIRE_TIMEOUT,
    max_lifetime: float = MAX_LIFETIME,
    jitter: Callable[[], float] = random.random,
) -> AsyncGenerator[ConnectionPool, None]:
    """Open a pool for the duration of the block. It connects when a lane is first used.

    `acquire_timeout` bounds waiting in line and connecting together. `jitter` returns numbers between 0 and 1.
    """
    pool = ConnectionPool(
        dsn, lanes, acquire_timeout=acquire_timeout, max_lifetime=max_lifetime, jitter=jitter
    )
    try:
        yield pool
    finally:
        await pool.aclose()
