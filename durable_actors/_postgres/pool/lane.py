"""One lane of the pool: its connections, and the tasks that use them or wait for one. Only `wait_turn` awaits.

A lane has `size` places. A place is empty, being connected, in use by a task, or idle with a connection. Tasks wait
only while every place is being connected or in use. A place that becomes free goes to the first task in line, as a
connection or as the right to open one. A cancellation cannot lose it on the way: a task that Trio has rescheduled
cannot be cancelled before it has received what it was given.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Final

import attrs
import trio

from durable_actors._postgres.driver.connection import PgConn
from durable_actors._postgres.pool.gate import Gate
from durable_actors.errors import ConfigError, PoolTimeout, StoreUnavailable


def _check_size(lane: Lane, attribute: attrs.Attribute[int], value: int) -> None:
    if value < 1:
        raise ConfigError(
            f"lane {lane.name!r}: {attribute.name} must be at least 1, not {value}",
            option=lane.option,
            value=value,
        )


@attrs.frozen(kw_only=True)
class Lane:
    """A named share of a node's connections, reserved for one kind of work."""

    name: str = attrs.field(kw_only=False)
    """E.g. `claim`, `commit`, `heartbeat`. A busy lane never takes the connections of another."""
    size: int = attrs.field(kw_only=False, validator=_check_size)
    """Maximum number of connections. The node's budget is the sum over its lanes."""
    settings: Mapping[str, str] = attrs.field(factory=dict[str, str])
    """Session settings of its connections, e.g. `{"synchronous_commit": "off"}`."""
    max_waiting: int = attrs.field(default=1000, validator=_check_size)
    """Maximum number of tasks in line; the next one gets `PoolTimeout` at once."""
    dsn: str | None = attrs.field(default=None, repr=False)
    """A DSN for this lane only: session locks need a direct connection where others go through a pooler."""
    answer_within: float | None = None
    """Seconds that a task may use a connection. Then the statement is cancelled and `CommitUnknown` is raised. Without
    it a task would wait for a connection that fell silent until TCP gives it up."""
    option: str = "pool_size"
    """The option to raise when the lane is too small; errors name it."""


@attrs.frozen
class LaneStatistics:
    """One lane at one moment. Counters start when the pool is opened."""

    name: str
    size: int
    idle: int
    """Open and unused."""
    in_use: int
    opening: int
    """Being connected."""
    waiting: int
    """Tasks in line."""
    opened: int
    """Connections opened so far."""
    discarded: int
    """Connections closed by the pool so far: broken, too old, or returned inside a transaction."""
    failed_connects: int
    timeouts: int
    """Callers that got `PoolTimeout`."""
    longest_wait: float
    """The longest time in seconds that a caller waited in line for its connection."""


class PooledConnection:
    """A connection of the pool, with the values that decide how long it is kept."""

    __slots__ = ("conn", "expires_at", "generation")

    def __init__(self, conn: PgConn, *, expires_at: float, generation: int) -> None:
        self.conn: Final = conn
        self.expires_at: Final = expires_at
        """On Trio's clock. Jittered, so that connections opened together are not replaced together."""
        self.generation: Final = generation


class Waiter:
    """A task in line, and what it is given: a connection, a place to open one in (None), or an error."""

    __slots__ = ("given", "task")

    def __init__(self, task: trio.lowlevel.Task) -> None:
        self.task: Final = task
        self.given: PooledConnection | StoreUnavailable | None = None


class LaneState:
    """The connections and waiting tasks of one lane. Every method but `wait_turn` is synchronous."""

    def __init__(self, lane: Lane, gate: Gate) -> None:
        self.lane: Final = lane
        self.gate: Final = gate
        self._idle: list[PooledConnection] = []
        self._in_use: set[PooledConnection] = set()
        self._opening = 0
        self._waiters: OrderedDict[Waiter, None] = OrderedDict()
        self._closed = False
        self.on_wait: set[Callable[[], object]] = set()
        """Called when a task begins to wait in line. Users that can do without their connection add themselves."""
        self._opened = self._discarded = self._failed = self._timeouts = 0
        self._longest_wait = 0.0

    def take_idle(self) -> PooledConnection | None:
        """Take the connection that was used last, if it is still usable."""
        idle = self._idle
        if not idle:
            return None
        now = trio.current_time()
        if idle[0].expires_at <= now:  # the oldest one: a quiet lane would never get to it otherwise
            self._discard(idle.pop(0))
        while idle:
            pooled = idle.pop()
            if pooled.generation == self.gate.generation and pooled.expires_at > now and pooled.conn.alive():
                self._in_use.add(pooled)
                return pooled
            self._discard(pooled)
        return None

    @property
    def has_free(self) -> bool:
        """Whether a task could take or open a connection now without delaying another task."""
        return not self._closed and not self._waiters and (bool(self._idle) or self._has_room())

    def take_place(self) -> bool:
        """Take an empty place in order to connect. The caller then calls `fill` or `vacate`."""
        if self._closed:
            raise StoreUnavailable("the pool is closed")
        if not self._has_room():
            return False
        self._opening += 1
        return True

    async def wait_turn(self) -> PooledConnection | None:
        """Wait in line; return a connection, or None for a place in which to open one.

        Raises `PoolTimeout` at once if the line is full. Cancelled: the task has left the line and taken nothing.
        """
        if len(self._waiters) >= self.lane.max_waiting:
            raise self.timed_out(f"{len(self._waiters)} callers are waiting already")
        for give_way in tuple(self.on_wait):
            give_way()
        waiter = Waiter(trio.lowlevel.current_task())
        self._waiters[waiter] = None
        since = trio.current_time()

        def abort(_: trio.lowlevel.RaiseCancelT) -> trio.lowlevel.Abort:
            del self._waiters[waiter]
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(abort)
        self._longest_wait = max(self._longest_wait, trio.current_time() - since)
        if isinstance(waiter.given, StoreUnavailable):
            raise waiter.given
        return waiter.given

    def fill(self, conn: PgConn, *, expires_at: float, generation: int) -> PooledConnection:
        """Put a new connection into the place that its task has taken; the task uses it first."""
        self._opening -= 1
        self._opened += 1
        pooled = PooledConnection(conn, expires_at=expires_at, generation=generation)
        self._in_use.add(pooled)
        while self._waiters and self._has_room():  # an outage may have left places empty
            self._offer_place()
        return pooled

    def vacate(self, failure: BaseException | None = None) -> None:
        """Give up a place in which no connection was opened.

        After a cancellation the place goes to the first task in line. If Postgres accepted no connection, the line
        waits for the connections in use (too_many_connections) and its first task tries again. If none is in use,
        the whole line gets the error.
        """
        self._opening -= 1
        if not isinstance(failure, StoreUnavailable):
            self._offer_place()
        elif not self._opening:
            if self._in_use:
                self._offer_place()
            else:
                self._refuse_waiters(failure)

    def count_failed_connect(self) -> None:
        """Count a failed connect, for the statistics."""
        self._failed += 1

    def give_back(self, pooled: PooledConnection) -> None:
        """Take a connection back from its task. Never raises."""
        self._in_use.discard(pooled)
        conn = pooled.conn
        if conn.broken:
            self.gate.suspect(pooled.generation)
        if (
            not conn.pristine
            or pooled.generation != self.gate.generation
            or self._closed
            or pooled.expires_at <= trio.current_time()
        ):
            self._discard(pooled)
            self._offer_place()
        elif self._waiters:
            self._in_use.add(pooled)
            self._wake(pooled)
        else:
            self._idle.append(pooled)

    def close(self) -> None:
        """Close every connection, including those in use, and refuse every waiting task."""
        self._closed = True
        for pooled in (*self._idle, *self._in_use):
            pooled.conn.close()
        self._idle.clear()
        self._refuse_waiters(StoreUnavailable("the pool was closed"))

    def timed_out(self, why: str) -> PoolTimeout:
        """Count a caller that gets no connection, and make its error."""
        self._timeouts += 1
        lane = self.lane
        if self.gate.failures:
            why += f"; {self.gate.last_failure}"
        return PoolTimeout(
            f"lane {lane.name!r} has no connection for this call: {why} ({len(self._in_use)} of {lane.size} in "
            f"use, {self._opening} connecting, {len(self._waiters)} waiting); raise {lane.option}, or hold "
            "connections for a shorter time"
        )

    def statistics(self) -> LaneStatistics:
        """A snapshot of the lane."""
        return LaneStatistics(
            name=self.lane.name,
            size=self.lane.size,
            idle=len(self._idle),
            in_use=len(self._in_use),
            opening=self._opening,
            waiting=len(self._waiters),
            opened=self._opened,
            discarded=self._discarded,
            failed_connects=self._failed,
            timeouts=self._timeouts,
            longest_wait=self._longest_wait,
        )

    def _has_room(self) -> bool:
        return len(self._idle) + len(self._in_use) + self._opening < self.lane.size

    def _discard(self, pooled: PooledConnection) -> None:
        self._discarded += 1
        pooled.conn.close()

    def _offer_place(self) -> None:
        if self._waiters:
            self._opening += 1
            self._wake(None)

    def _refuse_waiters(self, failure: StoreUnavailable) -> None:
        while self._waiters:
            error = StoreUnavailable(str(failure))
            error.__cause__ = failure.__cause__
            self._wake(error)

    def _wake(self, given: PooledConnection | StoreUnavailable | None) -> None:
        waiter, _ = self._waiters.popitem(last=False)
        waiter.given = given
        trio.lowlevel.reschedule(waiter.task)
