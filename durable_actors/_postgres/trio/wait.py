"""psycopg's asyncio connection with asyncio's event loop replaced by Trio.

Above libpq, psycopg consists of generators that yield what to wait for. Every cursor, transaction, pipeline and COPY
runs them through `await connection.wait(generator)` under `async with connection.lock`. This module replaces these two
and defines what happens when the wait is cancelled.

Trio's cancellation is level-triggered: inside a cancelled scope *every* await raises again, also in `__aexit__`, where
psycopg, written for asyncio, still talks to the server. Hence three rules, enforced here:

1. An interrupted generator is never resumed: a later part of it (the query after its Parse) would still be sent.
   Statements in flight are cancelled on the server and their answers read, or the connection is closed.
2. Clean-up runs in `unwinding()`: shielded, for a bounded time, after which the connection is closed.
3. When a generator has ended, its result is returned; `Cancelled` is raised by the next call, not by this one.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from time import monotonic
from typing import Any, Final

import psycopg
import trio
from psycopg import AsyncConnection, pq
from psycopg.abc import RV, PQGen
from psycopg.pq import ExecStatus, PipelineStatus, TransactionStatus
from psycopg.rows import Row
from trio.lowlevel import (
    cancel_shielded_checkpoint,
    checkpoint,
    checkpoint_if_cancelled,
    current_task,
    wait_readable,
)

from durable_actors._postgres.driver.waiting import (
    CANCEL_TIMEOUT,
    CONNECTION_ERRORS,
    READABLE,
    FreeLock,
    discard,
    send_cancel,
    wait_either,
    wait_stopping,
)

MAX_TIME_BETWEEN_CHECKPOINTS: Final = 0.001
"""Seconds that a call may run without a checkpoint, if it never has to wait."""

CLEANUP_TIMEOUT: Final = 5.0
"""Seconds for a ROLLBACK outside of a cancelled scope. After that the connection is closed, which has the same
effect."""

_WAIT_R: Final = 1
_READY_R: Final = 1

# After one of these commands psycopg forgets its prepared statements. If we read the answer instead, it does not.
_INVALIDATES_PREPARED: Final = (b"DROP", b"ALTER", b"ROLLBACK", b"DISCARD", b"DEALLOCATE")
_COPY: Final = (ExecStatus.COPY_IN, ExecStatus.COPY_OUT, ExecStatus.COPY_BOTH)

log: Final = logging.getLogger("durable_actors.postgres")


def is_cancelled() -> bool:
    """Whether the current scope is cancelled, that is, whether the next checkpoint raises."""
    return trio.current_effective_deadline() == float("-inf")


class TrioWaiter(AsyncConnection[Row]):
    """The part of `TrioConnection` that waits: lock, `wait`, `close`, cancel requests, clean-up."""

    def _take_over(self) -> None:
        """Replace what `AsyncConnection.__init__` created for asyncio."""
        self.lock = FreeLock()  # type: ignore[assignment]  # pyright: ignore[reportIncompatibleVariableOverride, reportAttributeAccessIssue]
        self._checkpointed_at = 0.0
        self._unwinders: set[trio.lowlevel.Task] = set()
        self._stopping = False

    async def wait(  # noqa: C901, PLR0912 - every round trip comes through here: one frame, no calls
        self, gen: PQGen[RV], interval: float = 0.1, timeout: float | None = None
    ) -> RV:
        """Run one of psycopg's generators to its end, waiting on Trio.

        `interval` is only there because psycopg passes it: Trio needs no regular wake-ups. Raises
        `trio.TooSlowError` after `timeout`. Cancelled: the connection is idle, in a (failed) transaction, or closed.
        """
        if timeout is not None:
            with trio.fail_after(timeout):
                return await self.wait(gen, interval)
        started = waited = False
        try:
            await checkpoint_if_cancelled()
            fd = self.pgconn.socket  # raises if the connection is closed: then nothing has been started
            started = True
            state = next(gen)
            while True:
                if state == _WAIT_R:
                    if self._stopping:
                        await wait_stopping(self.pgconn)
                    else:
                        await wait_readable(fd)
                    waited = True
                    state = gen.send(_READY_R)
                else:
                    # Also for "writable" (the end of a COPY) we wait in both directions: a server that cannot send its
                    # notices does not read. The generator flushes, and libpq then reads.
                    ready = await wait_either(fd)
                    if monotonic() - self._checkpointed_at > MAX_TIME_BETWEEN_CHECKPOINTS:
                        await checkpoint()
                        self._checkpointed_at = monotonic()
                    state = gen.send(ready)
        except StopIteration as done:
            if not waited and monotonic() - self._checkpointed_at > MAX_TIME_BETWEEN_CHECKPOINTS:
                # Many short answers from libpq's buffer (COPY, stream) must not starve other tasks or delay the
                # caller's own deadline. Shielded: rule 3.
                await cancel_shielded_checkpoint()
                self._checkpointed_at = monotonic()
            result: RV = done.value
            return result
        except trio.Cancelled:
            await self._interrupted(gen, started=started)
            raise
        except (trio.ClosedResourceError, OSError) as exc:
            if isinstance(exc, OSError) and exc.errno != errno.EBADF:
                raise  # from the caller's own iterator, in executemany
            discard(self.pgconn)
            self._drop(gen)
            raise psycopg.OperationalError("the connection was closed while waiting for it") from exc
        except psycopg.Error:
            self._drop(gen)  # it has ended, unless the error comes from a cancel request
            raise
        except (KeyboardInterrupt, SystemExit):
            # Raised at any point: the state is unknown, so do not talk to the server.
            if self.pgconn.transaction_status == TransactionStatus.ACTIVE:
                discard(self.pgconn)
            self._drop(gen)
            raise

    async def _interrupted(self, gen: PQGen[Any], *, started: bool) -> None:
        """Make the connection usable again after `Cancelled`, or close it. Raises nothing else."""
        pgconn = self.pgconn
        if pgconn.pipeline_status != PipelineStatus.OFF:
            # If it was not started, nothing was sent, and the exit of the pipeline synchronises.
            unusable = started
        else:
            unusable = pgconn.transaction_status == TransactionStatus.ACTIVE
        if unusable and (current_task() in self._unwinders or not await self._cancel_and_drain()):
            discard(pgconn)
        self._drop(gen)

    def _drop(self, gen: PQGen[Any]) -> None:
        """Close a generator now; if the garbage collector did it, errors would be printed."""
        try:
            gen.close()
        except psycopg.Error as exc:
            # The generator of a pipeline flushes in its `finally`; the connection is closed by now.
            log.debug("%s: closing an interrupted call: %s", self, exc)

    async def _cancel_and_drain(self) -> bool:
        """Cancel the statement and read the rest of its answers; True if the connection is usable again."""
        with trio.CancelScope(shield=True, relative_deadline=CANCEL_TIMEOUT):
            try:
                return await self._drain()
            except CONNECTION_ERRORS as exc:
                log.debug("%s: cannot be used again after a cancellation: %s", self, exc)
        return False

    async def _drain(self) -> bool:
        pgconn = self.pgconn
        if pgconn.pipeline_status != PipelineStatus.OFF:
            await self._stop_pipeline()
            return False
        if pgconn.flush():
            # Half a message was sent. The server may still be busy with earlier data (rows of a COPY).
            await send_cancel(pgconn)
            return False
        requested = False
        forgotten = False
        pgconn.consume_input()
        while True:
            while pgconn.is_busy():
                if not requested:
                    await send_cancel(pgconn)
                    requested = True
                await wait_stopping(pgconn)
                pgconn.consume_input()
            result = pgconn.get_result()
            if result is None:
                return not forgotten
            if result.status in _COPY:
                if not requested:
                    await send_cancel(pgconn)
                return False
            if result.status == ExecStatus.COMMAND_OK and (result.command_status or b"").startswith(
                _INVALIDATES_PREPARED
            ):
                forgotten = True

    async def _stop_pipeline(self) -> None:
        """Make sure that the server has stopped.

        The caller then closes the connection, because psycopg's queues no longer match the answers.
        """
        pgconn = self.pgconn
        await send_cancel(pgconn)
        pgconn.pipeline_sync()  # without it the server may not answer at all
        while pgconn.flush():
            if await wait_either(pgconn.socket) & READABLE:
                pgconn.consume_input()
        while True:
            while pgconn.is_busy():
                await wait_stopping(pgconn)
                pgconn.consume_input()
            result = pgconn.get_result()
            if result is not None and result.status == ExecStatus.PIPELINE_SYNC:
                try:
                    pgconn.exit_pipeline_mode()
                except psycopg.OperationalError:
                    continue  # not the last Sync
                return

    @asynccontextmanager
    async def unwinding(self) -> AsyncGenerator[None, None]:
        """Shield clean-up that talks to the server from cancellation, for a bounded time.

        When the time is over, the running statement is cancelled and the connection is closed, which also makes the
        server roll back. The block then ends without an error of its own: `Cancelled`, or the error that caused the
        clean-up, propagates. Not for new work.
        """
        timeout = CANCEL_TIMEOUT if is_cancelled() else CLEANUP_TIMEOUT
        task = current_task()
        outermost = task not in self._unwinders
        with trio.CancelScope(shield=True, relative_deadline=timeout) as scope:
            self._unwinders.add(task)
            try:
                yield
            finally:
                if outermost:
                    self._unwinders.discard(task)
        if scope.cancelled_caught:
            log.warning("%s: closed, because the server did not answer within %s s", self, timeout)
            await self._try_cancel()
            discard(self.pgconn)

    async def close(self) -> None:
        """Close the connection now, without a round trip. A task waiting on it gets `OperationalError`.

        The server rolls back an open transaction, but does not stop a running query: `cancel_safe()` does.
        """
        if not self.closed:
            self._closed = True
            discard(self.pgconn)

    async def cancel_safe(self, *, timeout: float = 30.0) -> None:
        """Send a cancel request for the running statement, and wait until the server has received it.

        Raises `psycopg.errors.CancellationTimeout` if that takes longer than `timeout`.
        """
        if not self._should_cancel():
            return
        with trio.move_on_after(timeout or float("inf")) as scope:
            try:
                await send_cancel(self.pgconn)
            except OSError as exc:
                raise psycopg.OperationalError(f"cancel request failed: {exc}") from exc
        if scope.cancelled_caught:
            raise psycopg.errors.CancellationTimeout("cancellation timeout expired")

    @asynccontextmanager
    async def stopping(self) -> AsyncGenerator[None, None]:
        """As `unwinding`, if the server may be busy for long: cancels the statement first."""
        async with self.unwinding():
            self._stopping = True
            try:
                await self._try_cancel()
                yield
            finally:
                self._stopping = False

    async def _try_cancel(self, *, timeout: float = CANCEL_TIMEOUT) -> None:
        """Send a cancel request during clean-up (`stream`, COPY): shielded, bounded; an error is logged."""
        with trio.CancelScope(shield=True, relative_deadline=min(timeout, CANCEL_TIMEOUT)):
            try:
                if not self.closed:
                    await send_cancel(self.pgconn)
            except CONNECTION_ERRORS as exc:
                log.warning("%s: cancel request failed: %s", self, exc)


def hang_up_reason(pgconn: pq.abc.PGconn) -> psycopg.Error | None:
    """Why the server closed an idle connection; None if it is still there.

    To an idle client the server sends only parameter changes, notices, and the reason why it ends the session: a FATAL
    error, which libpq passes to the notice handler when no query is running.
    """
    fatal: list[psycopg.Error] = []

    def listen(result: pq.abc.PGresult) -> None:
        # The result is only valid inside this function.
        if result.error_field(pq.DiagnosticField.SEVERITY_NONLOCALIZED) in (b"FATAL", b"PANIC"):
            state = (result.error_field(pq.DiagnosticField.SQLSTATE) or b"").decode()
            text = (result.error_field(pq.DiagnosticField.MESSAGE_PRIMARY) or b"").decode(errors="replace")
            try:
                fatal.append(psycopg.errors.lookup(state)(text))
            except KeyError:
                fatal.append(psycopg.OperationalError(text))

    handler = pgconn.notice_handler
    pgconn.notice_handler = listen
    try:
        pgconn.consume_input()
        pgconn.is_busy()  # parses the messages
        if not fatal:
            pgconn.consume_input()  # detects an end of file
    except psycopg.OperationalError as exc:
        return exc
    finally:
        pgconn.notice_handler = handler
    return fatal[-1] if fatal else None
