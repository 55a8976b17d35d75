"""Cursors and COPY on Trio: they let other tasks run, they push back, and they end cleanly when cancelled."""
# ruff: noqa: SLF001 - psycopg's internals, each named in trio_hooks

from __future__ import annotations

import operator
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from time import monotonic
from typing import Any, Final, TypeVar

import psycopg
import trio
from psycopg import AsyncCursor, AsyncPipeline, AsyncServerCursor, pq
from psycopg.abc import Buffer, Params, PQGen, Query
from psycopg.copy import AsyncCopy, AsyncLibpqWriter, AsyncQueuedLibpqWriter, AsyncWriter
from psycopg.pq import ExecStatus, TransactionStatus
from psycopg.rows import Row
from trio.lowlevel import cancel_shielded_checkpoint, checkpoint_if_cancelled

from durable_actors._postgres.trio.wait import MAX_TIME_BETWEEN_CHECKPOINTS, TrioWaiter, is_cancelled, log

_CHUNK: Final = 128 * 1024
"""Bytes given to libpq before they must be on their way. Larger pieces can make libpq loop (psycopg #255)."""

_WAIT_RW: Final = 3

_T = TypeVar("_T")


class TrioCursor(AsyncCursor[Row]):
    """psycopg's cursor. Fetching lets other tasks run at least every millisecond."""

    __slots__ = ()

    _conn: TrioWaiter[Any]  # pyright: ignore[reportIncompatibleVariableOverride]

    async def _fetch_pipeline(self) -> None:
        # The first thing in every fetch. The rows are here already, so nothing else would ever yield.
        conn = self._conn
        if monotonic() - conn._checkpointed_at > MAX_TIME_BETWEEN_CHECKPOINTS:
            await cancel_shielded_checkpoint()
            conn._checkpointed_at = monotonic()
            await checkpoint_if_cancelled()
        if self._pending_pipeline() is None:
            return
        async with conn.lock:
            # psycopg does not look again under the lock: another task may have ended the pipeline by now.
            pipeline = self._pending_pipeline()
            if pipeline is not None:
                await conn.wait(pipeline._fetch_gen(flush=True))

    def _pending_pipeline(self) -> AsyncPipeline | None:
        """Return the pipeline that has yet to bring this cursor's result."""
        if self.pgresult is not None or self._execmany_returning is False:
            return None
        return self._conn._pipeline

    @asynccontextmanager
    async def copy(
        self, statement: Query, params: Params | None = None, *, writer: AsyncWriter | None = None
    ) -> AsyncGenerator[AsyncCopy, None]:
        """Start a COPY; the block reads from or writes to it.

        Left by an exception or by cancellation, a COPY FROM is refused by the server as a whole, and a
        COPY TO is cancelled. Cancelled in the middle of reading or writing, the connection is closed.
        """
        if isinstance(writer, AsyncQueuedLibpqWriter):
            raise psycopg.NotSupportedError("AsyncQueuedLibpqWriter runs an asyncio task; leave writer= out")
        async with self._conn.lock:
            await self._conn.wait(self._start_copy_gen(statement, params))
            async with TrioCopy(self, writer=writer or TrioWriter(self)) as copy:
                yield copy
        self._select_current_result(0)


class TrioServerCursor(AsyncServerCursor[Row]):
    """psycopg's server-side cursor. Closing it is part of unwinding."""

    __slots__ = ()

    _conn: TrioWaiter[Any]  # pyright: ignore[reportIncompatibleVariableOverride]

    async def close(self) -> None:
        """Close the cursor here and on the server. Cancelled: it is closed nevertheless."""
        try:
            await super().close()
        except trio.Cancelled:
            self._described = False  # CLOSE may have happened: psycopg looks for the cursor first, then
            async with self._conn.unwinding():
                try:
                    await super().close()
                except psycopg.Error as exc:
                    log.warning("%s: error ignored in close: %s", self, exc)
            raise
        finally:
            self._close()


class TrioCopy(AsyncCopy):
    """psycopg's COPY, ended cleanly also in a cancelled scope."""

    connection: TrioWaiter[Any]  # pyright: ignore[reportIncompatibleVariableOverride]

    def __aiter__(self) -> AsyncIterator[Buffer]:
        """Read block by block."""
        return _Reading(self.read, operator.not_)

    def rows(self) -> AsyncIterator[tuple[Any, ...]]:
        """Read row by row."""
        return _Reading(self.read_row, _is_none)  # a row of no columns is empty, too

    async def finish(self, exc: BaseException | None) -> None:
        """End the COPY. You need not call this."""
        if exc is None:
            try:
                await self._finish_well()
            except trio.Cancelled as cancelled:
                await self._abort(cancelled)
                raise
        elif is_cancelled() or isinstance(exc, trio.Cancelled):
            await self._abort(exc)
        else:
            await super().finish(exc)

    async def _finish_well(self) -> None:
        if self._direction == ExecStatus.COPY_OUT and self._active():
            # Left before the last row: psycopg leaves the rest in the pipe, and the next query fails.
            await checkpoint_if_cancelled()
            await self.connection._try_cancel()
            await self.connection.wait(self._end_copy_out_gen())
        else:
            await super().finish(None)

    async def _abort(self, exc: BaseException) -> None:
        if not self._active():
            return
        # The server may be busy with what it has (a trigger, a lock) and not read our refusal.
        async with self.connection.stopping():
            try:
                await super().finish(exc)
            except psycopg.Error as error:
                log.warning("%s: error ignored after a cancelled COPY: %s", self, error)

    def _active(self) -> bool:
        return self._pgconn.transaction_status == TransactionStatus.ACTIVE


class _Reading(AsyncIterator[_T]):
    """Calls until the end. psycopg's generators would have to be closed by hand when a loop is left early."""

    def __init__(self, read: Callable[[], Awaitable[_T | None]], ended: Callable[[object], bool]) -> None:
        self._read = read
        self._ended = ended

    async def __anext__(self) -> _T:
        item = await self._read()
        if item is None or self._ended(item):
            raise StopAsyncIteration
        return item


def _is_none(item: object) -> bool:
    return item is None


class TrioWriter(AsyncLibpqWriter):
    """Sends COPY data with back-pressure: no more than a chunk waits in memory for the network."""

    def __init__(self, cursor: AsyncCursor[Any]) -> None:
        super().__init__(cursor)
        self._waiting = 0

    async def write(self, data: Buffer) -> None:
        """Send, and wait until the network took it once a chunk has gathered."""
        # Here nothing of this piece was sent: the COPY can still be refused politely, by `finish`.
        await checkpoint_if_cancelled()
        for start in range(0, len(data), _CHUNK):
            piece = data if len(data) <= _CHUNK else data[start : start + _CHUNK]
            self._waiting += len(piece)
            full = self._waiting >= _CHUNK
            await self.connection.wait(_put_gen(self._pgconn, piece, flush=full))
            if full:
                self._waiting = 0

    async def finish(self, exc: BaseException | None = None) -> None:
        """Commit to the data sent, or have the server refuse it because of `exc`."""
        if exc is None:
            await checkpoint_if_cancelled()
        await super().finish(exc)


def _put_gen(pgconn: pq.abc.PGconn, data: Buffer, *, flush: bool) -> PQGen[None]:
    # Waiting for room only, as psycopg does, can deadlock with a server that waits for us to read notices.
    while pgconn.put_copy_data(data) == 0:
        yield _WAIT_RW  # type: ignore[misc]
        pgconn.flush()
    while flush and pgconn.flush():
        yield _WAIT_RW  # type: ignore[misc]
