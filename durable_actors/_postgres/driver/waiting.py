"""libpq on Trio: connect, wait for a socket, cancel a statement, close.

Five primitives, used by `driver.connection.PgConn` and by `trio.connection.TrioConnection`:

`wait_either`   wait until a socket is readable or writable, whichever comes first
`open_pgconn`   connect in a worker thread
`send_cancel`   send a cancel request and wait until the server has received it
`wait_stopping` wait for the answer of a cancelled statement, repeating the request
`discard`       close a connection now and wake the tasks that wait for its socket

They use only the public `psycopg.pq` interface, `psycopg.Connection.connect` and `trio.lowlevel`.
"""

from __future__ import annotations

import select
import threading
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Final

import psycopg
import trio
from psycopg import pq
from trio.lowlevel import Task, wait_readable, wait_writable

from durable_actors._postgres.driver.conninfo import with_connect_timeout
from durable_actors.errors import ConfigError

READABLE: Final = 1
WRITABLE: Final = 2

MIN_LIBPQ: Final = 170000
"""Older versions send a cancel request with the GIL held: a silent server would freeze the whole process."""

CANCEL_TIMEOUT: Final = 2.0
"""Seconds, shielded, to make an interrupted connection usable again; after that it is closed."""

CANCEL_RETRY_INTERVAL: Final = 0.05
"""Seconds after which a cancel request that had no effect is repeated."""

CONNECTION_ERRORS: Final = (psycopg.Error, OSError, trio.ClosedResourceError)
"""What a conversation with the server can raise, apart from `Cancelled`."""

# libpq's connect is a sequence of short waits: this bounds threads, not load. All pools of the process share it, so
# that a reconnect storm does not use up Trio's default limiter, which the user's `def` steps need.
_CONNECT_LIMIT: Final = 8
_connect_limiter: trio.lowlevel.RunVar[trio.CapacityLimiter] = trio.lowlevel.RunVar("durable_actors_connect")


def require_libpq(version: int | None = None) -> None:
    """Raise `ConfigError` for a libpq that cannot send a cancel request without blocking."""
    found = pq.version() if version is None else version
    if found < MIN_LIBPQ:
        raise ConfigError(
            f"durable_actors needs libpq 17 or newer, this process has {found // 10000}: "
            "an older one freezes the process while it cancels a query on a server that does not answer. "
            "Install the wheel that bundles it: pip install 'psycopg[binary]'",
            option="libpq",
            value=found,
        )


async def wait_either(fd: int) -> int:
    """Wait until `fd` is readable or writable; return the mask of READABLE and WRITABLE.

    Trio waits for one direction at a time. In the common case the socket is ready: one poll(2), no checkpoint.
    Otherwise two tasks wait (33 µs, which does not matter once the socket's buffer is full). A nested epoll would be
    cheaper, but `discard` could not wake it: the task would hang for ever.
    Cancelled: nothing has changed, nothing stays registered.
    """
    ready = _poll(fd, select.POLLIN | select.POLLOUT)
    if ready:
        return ready
    trouble: OSError | trio.ClosedResourceError | None = None

    async def wait(one: Callable[[int], Awaitable[None]]) -> None:
        nonlocal trouble
        try:
            await one(fd)
        except (OSError, trio.ClosedResourceError) as exc:
            trouble = exc  # raised below, not in a group
        nursery.cancel_scope.cancel()

    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait, wait_readable)
            nursery.start_soon(wait, wait_writable)
    except BaseExceptionGroup as group:
        # It holds only Cancelled or KeyboardInterrupt, and `except Cancelled` does not catch a group.
        raise _first_of(group) from None
    if trouble is not None:
        raise trouble
    return _poll(fd, select.POLLIN | select.POLLOUT)


def _first_of(group: BaseExceptionGroup[BaseException]) -> BaseException:
    interrupts = group.subgroup(lambda error: not isinstance(error, trio.Cancelled))
    return (interrupts or group).exceptions[0]  # flat: the two tasks raise no groups


def _poll(fd: int, events: int) -> int:
    poller = select.poll()
    poller.register(fd, events)
    found = poller.poll(0)
    if not found:
        return 0
    mask = found[0][1]
    trouble = mask & (select.POLLERR | select.POLLHUP | select.POLLNVAL)
    return (READABLE if mask & select.POLLIN or trouble else 0) | (
        WRITABLE if mask & select.POLLOUT or trouble else 0
    )


def is_readable(fd: int) -> bool:
    """Whether bytes or an end of file can be read from the socket. Costs one poll(2)."""
    return bool(_poll(fd, select.POLLIN) & READABLE)


class _Handover:
    """Passes a connection from the connecting thread to the task, and closes it if the task is gone."""

    def __init__(self, opener: type[psycopg.Connection[tuple[object, ...]]]) -> None:
        self._opener = opener
        self._lock = threading.Lock()
        self._abandoned = False
        self._connection: psycopg.Connection[tuple[object, ...]] | None = None

    def connect(self, conninfo: str) -> psycopg.Connection[tuple[object, ...]]:
        connection = self._opener.connect(conninfo, autocommit=True)
        with self._lock:
            if self._abandoned:
                connection.close()
            self._connection = connection
        return connection

    def abandon(self) -> None:
        with self._lock:
            self._abandoned = True
            if self._connection is not None:
                self._connection.close()


async def open_pgconn(
    conninfo: str, *, opener: type[psycopg.Connection[tuple[object, ...]]] = psycopg.Connection
) -> tuple[pq.abc.PGconn, object]:
    """Connect in a worker thread; return the libpq connection, non-blocking, and the object that keeps it alive.

    The thread runs psycopg's own synchronous connect, which resolves names, handles timeouts and multi-host DSNs with
    `target_session_attrs`, and waits in select(2). `PQconnectdb` would be shorter, but psycopg calls it with the GIL
    held: a silent server would freeze the process for `connect_timeout` (observed: 2.0 s). SCRAM costs about 4 ms of
    CPU, which this way is not spent in the event loop's thread.

    `opener` warns if it is garbage-collected while the connection is open; a subclass may suppress that.
    Cancelled: the thread continues until it is connected or `connect_timeout` is over, then closes the connection.
    Raises `psycopg.OperationalError` if no server of the DSN accepts the connection.
    """
    require_libpq()
    conninfo = with_connect_timeout(conninfo)
    handover = _Handover(opener)
    try:
        connection = await trio.to_thread.run_sync(
            handover.connect, conninfo, abandon_on_cancel=True, limiter=_limiter()
        )
    except BaseException:
        handover.abandon()
        raise
    connection.pgconn.nonblocking = 1
    return connection.pgconn, connection


def _limiter() -> trio.CapacityLimiter:
    try:
        return _connect_limiter.get()
    except LookupError:
        limiter = trio.CapacityLimiter(_CONNECT_LIMIT)
        _connect_limiter.set(limiter)
        return limiter


async def send_cancel(pgconn: pq.abc.PGconn) -> None:
    """Send a cancel request for what `pgconn` runs, and wait until the server has closed the cancel connection.

    The server closes it after it has signalled the backend, so the signal cannot hit a later query of ours (PgBouncer
    does not guarantee that order). Raises `psycopg.Error` or OSError if the request could not be delivered.
    """
    cancel = pgconn.cancel_conn()
    try:
        cancel.start()
        while True:
            status = cancel.poll()
            if status == pq.PollingStatus.OK:
                return
            if status == pq.PollingStatus.READING:
                await wait_readable(cancel.socket)
            elif status == pq.PollingStatus.WRITING:
                await wait_writable(cancel.socket)
            else:
                raise psycopg.OperationalError(f"cancel request failed: {cancel.get_error_message()}")
    finally:
        cancel.finish()


async def wait_stopping(pgconn: pq.abc.PGconn) -> None:
    """Wait for an answer after `send_cancel`, repeating the request every `CANCEL_RETRY_INTERVAL` seconds.

    A statement that was sent just before the request may reach its backend after it, and an idle backend ignores the
    request: observed in one of three attempts on a busy machine. The statement would then run to its end. Repeating is
    harmless: a request that arrives after the end of the statement is ignored as well.
    """
    while True:
        with trio.move_on_after(CANCEL_RETRY_INTERVAL):
            await wait_readable(pgconn.socket)
            return
        try:
            await send_cancel(pgconn)
        except (psycopg.Error, OSError):
            await wait_readable(pgconn.socket)  # until an answer arrives or the caller's deadline is over
            return


def discard(pgconn: pq.abc.PGconn) -> None:
    """Close the connection without a round trip, and wake the tasks that wait for its socket.

    Without `notify_closing` they would hang for ever. Safe to call twice.
    """
    if pgconn.status == pq.ConnStatus.BAD:
        # libpq has closed the socket already, or never had one; finish() frees the memory.
        pgconn.finish()
        return
    trio.lowlevel.notify_closing(pgconn.socket)
    pgconn.finish()


class FreeLock:
    """A FIFO lock whose `acquire` does not checkpoint if the lock is free.

    `trio.Lock` costs a scheduler pass (6 µs) and, worse, raises Cancelled when it is acquired during clean-up in a
    cancelled scope, so that the clean-up would never run. Not re-entrant, has no owner.
    """

    __slots__ = ("_held", "_waiters")

    def __init__(self) -> None:
        self._held = False
        self._waiters: OrderedDict[Task, None] = OrderedDict()

    def locked(self) -> bool:
        """Whether a task holds the lock."""
        return self._held

    async def acquire(self) -> None:
        """Acquire the lock. Cancelled while waiting: it was not acquired."""
        if not self._held:
            self._held = True
            return
        task = trio.lowlevel.current_task()
        self._waiters[task] = None

        def abort(_: trio.lowlevel.RaiseCancelT) -> trio.lowlevel.Abort:
            del self._waiters[task]
            return trio.lowlevel.Abort.SUCCEEDED

        # A rescheduled task cannot be cancelled any more, so the hand-over loses neither the lock nor a Cancelled.
        await trio.lowlevel.wait_task_rescheduled(abort)

    def release(self) -> None:
        """Hand the lock to the next waiting task, or free it."""
        if self._waiters:
            task, _ = self._waiters.popitem(last=False)
            trio.lowlevel.reschedule(task)
        else:
            self._held = False

    async def __aenter__(self) -> None:
        await self.acquire()

    async def __aexit__(self, *_: object) -> None:
        self.release()
