"""psycopg's asyncio connection with the event loop taken out and Trio put in.

All of psycopg above libpq is generators that say what to wait for, and every cursor, transaction, pipeline
and COPY runs them through `await connection.wait(generator)` under `async with connection.lock`. This module
replaces these two, and what must happen when the waiting is cancelled.

Trio's cancellation stays on: inside a cancelled scope *every* await raises again, also in `__aexit__`, where
psycopg, written for asyncio, still wants to talk to the server. Hence three rules, kept here:

1. An interrupted generator is never resumed: a later step of it (the query after its Parse) would still be
   sent. What is in flight is cancelled on the server and drained, or the connection is closed.
2. What unwinds runs in `unwinding()`: shielded, for a bounded time, after which the connection is closed.
3. A generator that ended has its result returned; `Cancelled` is then raised by the next call, not by this.
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
"""Seconds that a call which never has to wait may keep the event loop to itself."""

CLEANUP_TIMEOUT: Final = 5.0
"""Seconds for a ROLLBACK that no cancellation hurries. Closing the connection does the same, after all."""

_WAIT_R: Final = 1
_READY_R: Final = 1

# After one of these psycopg forgets its prepared statements. When the answer was drained unseen it has not.
_INVALIDATES_PREPARED: Final = (b"DROP", b"ALTER", b"ROLLBACK", b"DISCARD", b"DEALLOCATE")
_COPY: Final = (ExecStatus.COPY_IN, ExecStatus.COPY_OUT, ExecStatus.COPY_BOTH)

log: Final = logging.getLogger("durable_actors.postgres")


def is_cancelled() -> bool:
    """Tell whether the scope around us is cancelled, that is, whether the next checkpoint raises."""
    return trio.current_effective_deadline() == float("-inf")


class TrioWaiter(AsyncConnection[Row]):
    """The part of `TrioConnection` that waits: lock, `wait`, `close`, cancel requests, unwinding."""

    def _take_over(self) -> None:
        """Replace what `AsyncConnection.__init__` made for asyncio."""
        self.lock = FreeLock()  # type: ignore[assignment]  # pyright: ignore[reportIncompatibleVariableOverride, reportAttributeAccessIssue]
        self._checkpointed_at = 0.0
        self._unwinders: set[trio.lowlevel.Task] = set()
        self._stopping = False

    async def wait(  # noqa: C901, PLR0912 - every round trip comes through here: one frame, no calls
        self, gen: PQGen[RV], interval: float = 0.1, timeout: float | None = None
    ) -> RV:
        """Run one of psycopg's generators to its end, waiting on Trio.

        `interval` is accepted for psycopg's sake: Trio needs no regular wake-ups. Raises `trio.TooSlowError`
        after `timeout`. Cancelled: the connection is idle or in a (failed) transaction, or closed.
        """
        if timeout is not None:
            with trio.fail_after(timeout):
                return await self.wait(gen, interval)
        started = waited = False
        try:
            await checkpoint_if_cancelled()
            fd = self.pgconn.socket  # raises when the connection is closed: nothing is started then
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
                    # "Writable" (the end of a COPY) is waited for in both directions, too: a server that has no
                    # room for its notices does not read. The generator flushes, and libpq then reads.
                    ready = await wait_either(fd)
                    if monotonic() - self._checkpointed_at > MAX_TIME_BETWEEN_CHECKPOINTS:
                        await checkpoint()
                        self._checkpointed_at = monotonic()
                    state = gen.send(ready)
        except StopIteration as done:
            if not waited and monotonic() - self._checkpointed_at > MAX_TIME_BETWEEN_CHECKPOINTS:
                # Many short answers out of libpq's buffer (COPY, stream) must not starve the other tasks, nor
                # their own deadline. Shielded: rule 3.
                await cancel_shielded_checkpoint()
                self._checkpointed_at = monotonic()
            result: RV = done.value
            return result
        except trio.Cancelled:
            await self._interrupted(gen, started=started)
            raise
        except (trio.ClosedResourceError, OSError) as exc:
            if isinstance(exc, OSError) and exc.errno != errno.EBADF:
                raise  # out of the caller's own iterator, in executemany
            discard(self.pgconn)
            self._drop(gen)
            raise psycopg.OperationalError("the connection was closed while waiting for it") from exc
        except psycopg.Error:
            self._drop(gen)  # it has ended, unless the error is of asking the server to stop
            raise
        except (KeyboardInterrupt, SystemExit):
            # Raised in the midst of anything: no time, and no trust, for a conversation with the server.
            if self.pgconn.transaction_status == TransactionStatus.ACTIVE:
                discard(self.pgconn)
            self._drop(gen)
            raise

    async def _interrupted(self, gen: PQGen[Any], *, started: bool) -> None:
        """Leave the connection fit for use, or closed, after `Cancelled`. Never raises anything else."""
        pgconn = self.pgconn
        if pgconn.pipeline_status != PipelineStatus.OFF:
            # Not started: nothing of this call was sent, and the pipeline's own exit still synchronises.
            unfit = started
        else:
            unfit = pgconn.transaction_status == TransactionStatus.ACTIVE
        if unfit and (current_task() in self._unwinders or not await self._settle()):
            discard(pgconn)
        self._drop(gen)

    def _drop(self, gen: PQGen[Any]) -> None:
        """Close a generator here and now; left to the garbage collector, its errors would be printed."""
        try:
            gen.close()
        except psycopg.Error as exc:
            # A pipeline's generator wants to flush in its `finally`; the connection is closed by now.
            log.debug("%s: closing an interrupted call: %s", self, exc)

    async def _settle(self) -> bool:
        """Cancel what the server does and read its answers away; True when the connection is fit again."""
        with trio.CancelScope(shield=True, relative_deadline=CANCEL_TIMEOUT):
            try:
                return await self._drain()
            except CONNECTION_ERRORS as exc:
                log.debug("%s: not settled after a cancellation: %s", self, exc)
        return False

    async def _drain(self) -> bool:
        pgconn = self.pgconn
        if pgconn.pipeline_status != PipelineStatus.OFF:
            await self._stop_pipeline()
            return False
        if pgconn.flush():
            # Half a message is out. The server may be busy with what came before (rows of a COPY).
            await send_cancel(pgconn)
            return False
        told = False
        forgotten = False
        pgconn.consume_input()
        while True:
            while pgconn.is_busy():
                if not told:
                    await send_cancel(pgconn)
                    told = True
                await wait_stopping(pgconn)
                pgconn.consume_input()
            result = pgconn.get_result()
            if result is None:
                return not forgotten
            if result.status in _COPY:
                if not told:
                    await send_cancel(pgconn)
                return False
            if result.status == ExecStatus.COMMAND_OK and (result.command_status or b"").startswith(
                _INVALIDATES_PREPARED
            ):
                forgotten = True

    async def _stop_pipeline(self) -> None:
        """Make sure that the server has stopped. psycopg's queues no longer match the answers: close then."""
        pgconn = self.pgconn
        await send_cancel(pgconn)
        pgconn.pipeline_sync()  # without it the server need not answer at all
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

        When the time is over, what the server still runs is cancelled and the connection closed, which undoes
        everything on the server, too, and the block is left quietly: `Cancelled`, or the error that made us
        unwind, goes on. Not for new work.
        """
        patience = CANCEL_TIMEOUT if is_cancelled() else CLEANUP_TIMEOUT
        task = current_task()
        outermost = task not in self._unwinders
        with trio.CancelScope(shield=True, relative_deadline=patience) as scope:
            self._unwinders.add(task)
            try:
                yield
            finally:
                if outermost:
                    self._unwinders.discard(task)
        if scope.cancelled_caught:
            log.warning("%s: closed, the server did not answer within %s s", self, patience)
            await self._try_cancel()
            discard(self.pgconn)

    async def close(self) -> None:
        """Close the connection now, without a round trip. A task waiting on it gets `OperationalError`.

        The server rolls an open transaction back. It does not stop a running query: `cancel_safe()` does.
        """
        if not self.closed:
            self._closed = True
            discard(self.pgconn)

    async def cancel_safe(self, *, timeout: float = 30.0) -> None:
        """Ask the server to cancel what this connection is doing, and wait until it was told.

        Raises `psycopg.errors.CancellationTimeout` when it could not be told in time.
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
        """Unwind while the server may be busy for long with what it was sent: it is asked to stop."""
        async with self.unwinding():
            self._stopping = True
            try:
                await self._try_cancel()
                yield
            finally:
                self._stopping = False

    async def _try_cancel(self, *, timeout: float = CANCEL_TIMEOUT) -> None:
        """Cancel as a part of clean-up (in `stream`, COPY): shielded, bounded; an error is logged."""
        with trio.CancelScope(shield=True, relative_deadline=min(timeout, CANCEL_TIMEOUT)):
            try:
                if not self.closed:
                    await send_cancel(self.pgconn)
            except CONNECTION_ERRORS as exc:
                log.warning("%s: cancel request failed: %s", self, exc)


def hang_up_reason(pgconn: pq.abc.PGconn) -> psycopg.Error | None:
    """Return why the server hung up on an idle connection, or None while it is there.

    An idle server speaks unasked only to change a parameter, to give a notice, or to say why it ends the
    session (a FATAL, which libpq passes to the notice handler when no query is running).
    """
    heard: list[psycopg.Error] = []

    def listen(result: pq.abc.PGresult) -> None:
        # The result is only valid in here.
        if result.error_field(pq.DiagnosticField.SEVERITY_NONLOCALIZED) in (b"FATAL", b"PANIC"):
            state = (result.error_field(pq.DiagnosticField.SQLSTATE) or b"").decode()
            text = (result.error_field(pq.DiagnosticField.MESSAGE_PRIMARY) or b"").decode(errors="replace")
            try:
                heard.append(psycopg.errors.lookup(state)(text))
            except KeyError:
                heard.append(psycopg.OperationalError(text))

    handler = pgconn.notice_handler
    pgconn.notice_handler = listen
    try:
        pgconn.consume_input()
        pgconn.is_busy()  # parses what was said
        if not heard:
            pgconn.consume_input()  # finds the end of file
    except psycopg.OperationalError as exc:
        return exc
    finally:
        pgconn.notice_handler = handler
    return heard[-1] if heard else None
