"""Forced interleavings: several sessions, each held at a known point.

::

    with open_sessions(dsn, 2) as (a, b):
        a.run("begin")
        a.run("update t set n = n + 1")
        waiting = b.start("update t set n = n + 10")
        waiting.wait_blocked(by=a)          # asks the server which session waits for which
        a.run("commit")
        waiting.result()

`wait_backend_blocked` does the same for a connection that Trio drives.
"""

from __future__ import annotations

import time
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
    """A separate connection that shows which backend waits for which."""

    def __init__(self, connection: psycopg.Connection) -> None:
        self._connection = connection

    def blockers(self, pid: int) -> frozenset[int]:
        """Backends that block this backend: they hold its lock, or are ahead of it in the queue."""
        row = self._connection.execute("select pg_blocking_pids(%s)", [pid]).fetchone()
        return frozenset(row[0]) if row is not None else frozenset()

    def cancel(self, pid: int) -> None:
        """Cancel the statement of that backend."""
        self._connection.execute("select pg_cancel_backend(%s)", [pid])


class Pending:
    """A statement that was sent."""

    def __init__(self, session: Session, future: Future[list[Row]], statement: str) -> None:
        self._session = session
        self._future = future
        self._statement = statement

    @property
    def done(self) -> bool:
        """Whether it has ended, successfully or not."""
        return self._future.done()

    def wait_blocked(self, *, by: Session | None = None, timeout: float = TIMEOUT) -> None:
        """Wait until it is blocked by a lock (of that session); fail if it ends instead."""
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
        """Its rows. Raises the statement's error, or TimeoutError if it is still running."""
        return self._future.result(timeout)


class Session:
    """One autocommit connection, which runs one statement after the other in its own thread."""

    def __init__(
        self, connection: psycopg.Connection, observer: Observer, executor: ThreadPoolExecutor
    ) -> None:
        self.connection = connection
        self.observer = observer
        self.pid = connection.info.backend_pid
        self._executor = executor
        self._last: Pending | None = None

    def run(self, statement: LiteralString, arguments: Sequence[object] = ()) -> list[Row]:
        """Run a statement to its end. A statement that blocks fails after a timeout."""
        return self.start(statement, arguments).result()

    def start(self, statement: LiteralString, arguments: Sequence[object] = ()) -> Pending:
        """Send a statement and return at once."""
        future = self._executor.submit(self._execute, statement, arguments)
        self._last = Pending(self, future, statement)
        return self._last

    def _execute(self, statement: LiteralString, arguments: Sequence[object]) -> list[Row]:
        cursor = self.connection.execute(statement, arguments or None)
        return cursor.fetchall() if cursor.description else []

    def close(self) -> None:
        """Cancel the statement that is still running, and disconnect."""
        while self._last is not None and not self._last.done:
            self.observer.cancel(self.pid)
            time.sleep(POLL)
        self._executor.shutdown()
        self.connection.close()


@contextmanager
def open_sessions(dsn: str, count: int = 2) -> Generator[tuple[Session, ...]]:
    """Open `count` sessions on one database. Statements that are still running at the end are cancelled."""
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
    """Wait until that backend is blocked by a lock, for connections that Trio drives.

    Raises trio.TooSlowError after the timeout. If it is cancelled, it leaves nothing behind.
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
