"""One lane of the pool: which connections it has, who holds one, who waits. Never awaits but to wait in line.

A lane has `size` places. A place is empty, being connected, held by a task, or idle with a connection.
Somebody waits only when every place is being connected or held; a place that comes back goes to the first
in line, as a connection or as the right to open one. What is handed over cannot be lost to a cancellation:
a task that Trio has rescheduled can no longer be cancelled before it has taken what it was given.
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
    """A named share of a node's connections, for one kind of work."""

    name: str = attrs.field(kw_only=False)
    """E.g. `claim`, `commit`, `heartbeat`: a busy one never takes the connections of another."""
    size: int = attrs.field(kw_only=False, validator=_check_size)
    """How many connections it may have. The node's budget is the sum over its lanes."""
    settings: Mapping[str, str] = attrs.field(factory=dict[str, str])
    """Session settings of its connections, e.g. `{"synchronous_commit": "off"}`."""
    max_waiting: int = attrs.field(default=1000, validator=_check_size)
    """So many tasks may wait for one of its connections; the next gets `PoolTimeout` at once."""
    dsn: str | None = attrs.field(default=None, repr=False)
    """Another way to the server for this lane (session locks, past a transaction pooler)."""
    answer_within: float | None = None
    """Seconds for which one may be held; then what it is asked is cancelled, and `CommitUnknown` raised. A server that
    nobody hears any more, on one connection only, would else be waited for as long as TCP believes in it."""
    option: str = "pool_size"
    """The option that an operator raises when the lane is too small; errors name it."""


@attrs.frozen
class LaneStatistics:
    """One lane at one moment. Counters run from the pool's opening."""

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
    """Connections given up so far: broken, too old, or returned in mid-transaction."""
    failed_connects: int
    timeouts: int
    """Callers turned away with `PoolTimeout`."""
    longest_wait: float
    """Seconds that the most patient caller waited in line for its connection."""


class PooledConnection:
    """A connection of the pool, with what decides how long it is kept."""

    __slots__ = ("conn", "expires_at", "generation")

    def __init__(self, conn: PgConn, *, expires_at: float, generation: int) -> None:
        self.conn: Final = conn
        self.expires_at: Final = expires_at
        """On Trio's clock; with jitter, so that connections opened together are not replaced together."""
        self.generation: Final = generation


class Waiter:
    """A task in line, and what it was given: a connection, a place (None), or bad news."""

    __slots__ = ("given", "task")

    def __init__(self, task: trio.lowlevel.Task) -> None:
        self.task: Final = task
        self.given: PooledConnection | StoreUnavailable | None = None


class LaneState:
    """The state of one lane. Every method but `wait_turn` is synchronous."""

    def __init__(self, lane: Lane, gate: Gate) -> None:
        self.lane: Final = lane
        self.gate: Final = gate
        self._idle: list[PooledConnection] = []
        self._in_use: set[PooledConnection] = set()
        self._opening = 0
        self._waiters: OrderedDict[Waiter, None] = OrderedDict()
        self._closed = False
        self.on_wait: set[Callable[[], object]] = set()
        """Called when a task begins to wait in line: by whoever holds a connection that it can do without."""
        self._opened = self._discarded = self._failed = self._timeouts = 0
        self._longest_wait = 0.0

    def take_idle(self) -> PooledConnection | None:
        """Lend the connection that was used last, if it is still good."""
        idle = self._idle
        if not idle:
            return None
        now = trio.current_time()
        if idle[0].expires_at <= now:  # at the bottom, where a quiet lane would never look
            self._discard(idle.pop(0))
        while idle:
            held = idle.pop()
            if held.generation == self.gate.generation and held.expires_at > now and held.conn.alive():
                self._in_use.add(held)
                return held
            self._discard(held)
        return None

    @property
    def has_free(self) -> bool:
        """Whether a task could have a connection now, or open one, without being in anybody's way."""
        return not self._closed and not self._waiters and (bool(self._idle) or self._has_room())

    def take_place(self) -> bool:
        """Take an empty place in order to connect. The caller ends it with `fill` or `vacate`."""
        if self._closed:
            raise StoreUnavailable("the pool is closed")
        if not self._has_room():
            return False
        self._opening += 1
        return True

    async def wait_turn(self) -> PooledConnection | None:
        """Wait in line; return a connection, or None for a place in which to open one.

        Cancelled: out of the line, with nothing. Raises `PoolTimeout` at once when the line is too long.
        """
        if len(self._waiters) >= self.lane.max_waiting:
            raise self.timed_out(f"{len(self._waiters)} callers wait already")
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
        """Lend a new connection to the task that opened it in its place."""
        self._opening -= 1
        self._opened += 1
        held = PooledConnection(conn, expires_at=expires_at, generation=generation)
        self._in_use.add(held)
        while self._waiters and self._has_room():  # places that an outage had left empty
            self._pass_place()
        return held

    def vacate(self, failure: BaseException | None = None) -> None:
        """Give a place up that could not be filled.

        After a cancellation it goes to the first in line. When Postgres let nobody in, the line is served by
        the connections that are out (too_many_connections) and one of it tries again; when there are none,
        it hears the news.
        """
        self._opening -= 1
        if not isinstance(failure, StoreUnavailable):
            self._pass_place()
        elif not self._opening:
            if self._in_use:
                self._pass_place()
            else:
                self._turn_away(failure)

    def count_failed_connect(self) -> None:
        """For the statistics."""
        self._failed += 1

    def give_back(self, held: PooledConnection) -> None:
        """Take a connection back from the task that held it. Never awaits, never raises."""
        self._in_use.discard(held)
        conn = held.conn
        if conn.broken:
            self.gate.suspect(held.generation)
        if (
            not conn.pristine
            or held.generation != self.gate.generation
            or self._closed
            or held.expires_at <= trio.current_time()
        ):
            self._discard(held)
            self._pass_place()
        elif self._waiters:
            self._in_use.add(held)
            self._wake(held)
        else:
            self._idle.append(held)

    def close(self) -> None:
        """Close every connection, also those in use, and turn away whoever waits."""
        self._closed = True
        for held in (*self._idle, *self._in_use):
            held.conn.close()
        self._idle.clear()
        self._turn_away(StoreUnavailable("the pool was closed"))

    def timed_out(self, why: str) -> PoolTimeout:
        """Count and make the error for a caller who gets no connection."""
        self._timeouts += 1
        lane = self.lane
        if self.gate.failures:
            why += f"; {self.gate.last}"
        return PoolTimeout(
            f"lane {lane.name!r} has no connection for this call: {why} ({len(self._in_use)} of {lane.size} in "
            f"use, {self._opening} connecting, {len(self._waiters)} waiting); raise {lane.option}, or hold "
            "connections for a shorter time"
        )

    def statistics(self) -> LaneStatistics:
        """The lane now."""
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

    def _discard(self, held: PooledConnection) -> None:
        self._discarded += 1
        held.conn.close()

    def _pass_place(self) -> None:
        if self._waiters:
            self._opening += 1
            self._wake(None)

    def _turn_away(self, failure: StoreUnavailable) -> None:
        while self._waiters:
            news = StoreUnavailable(str(failure))
            news.__cause__ = failure.__cause__
            self._wake(news)

    def _wake(self, given: PooledConnection | StoreUnavailable | None) -> None:
        waiter, _ = self._waiters.popitem(last=False)
        waiter.given = given
        trio.lowlevel.reschedule(waiter.task)
