"""Races made to order: several sessions, held at known points.

::

    with open_sessions(dsn, 2) as (a, b):
        a.run("begin")
        a.run("update t set n = n + 1")
        waiting = b.start("update t set n = n + 10")
        waiting.wait_blocked(by=a)          # asks the server, does not sleep and hope
        a.run("commit")
        waiting.result()

Code that runs on Trio is held by `Points`, and `wait_backend_blocked` tells when its connection waits for a lock.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any, LiteralString

import psycopg
import trio
from psycopg.conninfo import conninfo_to_dict

TIMEOUT = 10.0
POLL = 0.003

Row = tuple[Any, ...]


class Observer:
    """A connection of its own that sees who waits for whom."""

    def __init__(self, connection: psycopg.Connection) -> None:
        self._connection = connection

    def blockers(self, pid: int) -> frozenset[int]:
        """Backends that this backend waits for: its lock is held, or asked for before, by them."""
        row = self._connection.execute("select pg_blocking_pids(%s)", [pid]).fetchone()
        return frozenset(row[0]) if row is not None else frozenset()

    def cancel(self, pid: int) -> None:
        """End what that backend runs."""
        self._connection.execute("select pg_cancel_backend(%s)", [pid])


class Pending:
    """A statement on its way."""

    def __init__(self, session: Session, future: Future[list[Row]], statement: str) -> None:
        self._session = session
        self._future = future
        self._statement = statement

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._future.done()

    def wait_blocked(self, *, by: Session | None = None, timeout: float = TIMEOUT) -> None:
        """Return when it waits for a lock (of that session); fail when it ends instead."""
        deadline = time.monotonic() + timeout
        while True:
            blockers = self._session.observer.blockers(self._session.pid)
            if blockers and (by is None or by.pid in blockers):
                return
            if self._future.done():
                self._future.result()
                raise AssertionError(f"was not blocked: {self._statement}")
            if time.monotonic() > deadline:
                raise AssertionError(f"neither blocked nor done after {timeout} s: {self._statement}")
            time.sleep(POLL)

    def result(self, *, timeout: float = TIMEOUT) -> list[Row]:
        """Its rows; raises what it raised, and TimeoutError when it still waits."""
        return self._future.result(timeout)


class Session:
    """One connection, autocommit, that runs one statement after the other in a thread of its own."""

    def __init__(
        self, connection: psycopg.Connection, observer: Observer, executor: ThreadPoolExecutor
    ) -> None:
        self.connection = connection
        self.observer = observer
        self.pid = connection.info.backend_pid
        self._executor = executor
        self._last: Pending | None = None

    def run(self, statement: LiteralString, arguments: Sequence[object] = ()) -> list[Row]:
        """Run it to its end. What should block here is a failure, after a while."""
        return self.start(statement, arguments).result()

    def start(self, statement: LiteralString, arguments: Sequence[object] = ()) -> Pending:
        """Send it and return at once."""
        future = self._executor.submit(self._execute, statement, arguments)
        self._last = Pending(self, future, statement)
        return self._last

    def _execute(self, statement: LiteralString, arguments: Sequence[object]) -> list[Row]:
        cursor = self.connection.execute(statement, arguments or None)
        return cursor.fetchall() if cursor.description else []

    def close(self) -> None:
        """Cancel what still waits, and disconnect."""
        while self._last is not None and not self._last.done:
            self.observer.cancel(self.pid)
            time.sleep(POLL)
        self._executor.shutdown()
        self.connection.close()


@contextmanager
def open_sessions(dsn: str, count: int = 2) -> Generator[tuple[Session, ...]]:
    """That many sessions on one database; what they left waiting is cancelled at the end."""
    with ExitStack() as stack:
        observer = Observer(stack.enter_context(psycopg.connect(dsn, autocommit=True)))
        sessions: list[Session] = []
        for number in range(count):
            connection = psycopg.connect(dsn, autocommit=True, application_name=f"session {number}")
            session = Session(connection, observer, ThreadPoolExecutor(1, f"session {number}"))
            stack.callback(session.close)
            sessions.append(session)
        yield tuple(sessions)


async def wait_backend_blocked(
    dsn: str, pid: int, *, by: int | None = None, timeout: float = TIMEOUT
) -> None:
    """Return when that backend waits for a lock; for connections that Trio drives.

    Raises trio.TooSlowError when it does not within the timeout. Cancelled: nothing is left behind.
    """
    if conninfo_to_dict(dsn).get("dbname") is None:
        raise ValueError(f"the DSN names no database: {dsn!r}")
    connection = await trio.to_thread.run_sync(lambda: psycopg.connect(dsn, autocommit=True))
    observer = Observer(connection)
    try:
        with trio.fail_after(timeout):
            while True:
                blockers = await trio.to_thread.run_sync(observer.blockers, pid)
                if blockers and (by is None or by in blockers):
                    return
                await trio.sleep(POLL)
    finally:
        connection.close()


class Points:
    """Named points at which Trio tasks stop until the test lets them go.

    The code under test (a fake, a callback, a subclass) calls ``await points.reach("parked")``; the test calls
    ``await points.wait_reached("parked")``, does what must happen meanwhile, and calls ``points.release("parked")``.
    """

    def __init__(self) -> None:
        self._reached: defaultdict[str, trio.Event] = defaultdict(trio.Event)
        self._released: defaultdict[str, trio.Event] = defaultdict(trio.Event)

    async def reach(self, name: str) -> None:
        """Stop here until the test releases this point; later comers pass."""
        self._reached[name].set()
        await self._released[name].wait()

    async def wait_reached(self, name: str, *, timeout: float = TIMEOUT) -> None:
        """Return when a task has stopped there. Raises trio.TooSlowError."""
        with trio.fail_after(timeout):
            await self._reached[name].wait()

    def release(self, name: str) -> None:
        """Let go whoever is or will be there."""
        self._released[name].set()
