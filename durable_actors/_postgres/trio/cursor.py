"""Cursors and COPY on Trio: with checkpoints, back-pressure, and a clean end when cancelled."""
# ruff: noqa: SLF001 - psycopg's internals, all listed in hooks

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
"""Bytes given to libpq before they must be flushed. Larger pieces can make libpq loop (psycopg #255)."""

_WAIT_RW: Final = 3

_T = TypeVar("_T")


class TrioCursor(AsyncCursor[Row]):
    """psycopg's cursor. Fetching lets other tasks run at least every millisecond."""

    __slots__ = ()

    _conn: TrioWaiter[Any]  # pyright: ignore[reportIncompatibleVariableOverride]

    async def _fetch_pipeline(self) -> None:
        # Every fetch calls this first. The rows have arrived already, so nothing else would ever checkpoint.
        conn = self._conn
        if monotonic() - conn._checkpointed_at > MAX_TIME_BETWEEN_CHECKPOINTS:
            await cancel_shielded_checkpoint()
            conn._checkpointed_at = monotonic()
            await checkpoint_if_cancelled()
        if self._pending_pipeline() is None:
            return
        async with conn.lock:
            # psycopg does not check again under the lock: another task may have ended the pipeline meanwhile.
            pipeline = self._pending_pipeline()
            if pipeline is not None:
                await conn.wait(pipeline._fetch_gen(flush=True))

    def _pending_pipeline(self) -> AsyncPipeline | None:
        """The pipeline that still has to fetch this cursor's result."""
        if self.pgresult is not None or self._execmany_returning is False:
            return None
        return self._conn._pipeline

    @asynccontextmanager
    async def copy(
        self, statement: Query, params: Params | None = None, *, writer: AsyncWriter | None = None
    ) -> AsyncGenerator[AsyncCopy, None]:
        """Start a COPY; the block reads from or writes to it.

        If the block raises or is cancelled, the server rejects a COPY FROM as a whole, and a COPY TO is cancelled.
        Cancelled in the middle of reading or writing: the connection is closed.
        """
        if isinstance(writer, AsyncQueuedLibpqWriter):
            raise psycopg.NotSupportedError("AsyncQueuedLibpqWriter runs an asyncio task; leave writer= out")
        async with self._conn.lock:
            await self._conn.wait(self._start_copy_gen(statement, params))
            async with TrioCopy(self, writer=writer or TrioWriter(self)) as copy:
                yield copy
        self._select_current_result(0)


class TrioServerCursor(AsyncServerCursor[Row]):
    """psycopg's server-side cursor. It is closed also in a cancelled scope."""

    __slots__ = ()

    _conn: TrioWaiter[Any]  # pyright: ignore[reportIncompatibleVariableOverride]

    async def close(self) -> None:
        """Close the cursor, also on the server. Cancelled: it is closed nevertheless."""
        try:
            await super().close()
        except trio.Cancelled:
            # CLOSE may have been done: with this, psycopg first checks that the cursor exists.
            self._described = False
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
        return _Reading(self.read_row, _is_none)  # not operator.not_: a row without columns is empty, too

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
            # Left before the last row: psycopg would not read the rest, and the next query would fail.
            await checkpoint_if_cancelled()
            await self.connection._try_cancel()
            await self.connection.wait(self._end_copy_out_gen())
        else:
            await super().finish(None)

    async def _abort(self, exc: BaseException) -> None:
        if not self._active():
            return
        # The server may be busy (a trigger, a lock) and not read our CopyFail message.
        async with self.connection.stopping():
            try:
                await super().finish(exc)
            except psycopg.Error as error:
                log.warning("%s: error ignored after a cancelled COPY: %s", self, error)

    def _active(self) -> bool:
        return self._pgconn.transaction_status == TransactionStatus.ACTIVE


class _Reading(AsyncIterator[_T]):
    """Calls `read` until the end. psycopg's generators would need an explicit close when a loop is left early."""

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
    """Sends COPY data with back-pressure: at most one chunk is buffered in memory."""

    def __init__(self, cursor: AsyncCursor[Any]) -> None:
        super().__init__(cursor)
        self._waiting = 0

    async def write(self, data: Buffer) -> None:
        """Send; wait for the network whenever a chunk has accumulated."""
        # Nothing of this piece was sent yet: `finish` can still end the COPY cleanly.
        await checkpoint_if_cancelled()
        for start in range(0, len(data), _CHUNK):
            piece = data if len(data) <= _CHUNK else data[start : start + _CHUNK]
            self._waiting += len(piece)
            full = self._waiting >= _CHUNK
            await self.connection.wait(_put_gen(self._pgconn, piece, flush=full))
            if full:
                self._waiting = 0

    async def finish(self, exc: BaseException | None = None) -> None:
        """End the COPY; with `exc`, have the server reject it."""
        if exc is None:
            await checkpoint_if_cancelled()
        await super().finish(exc)


def _put_gen(pgconn: pq.abc.PGconn, data: Buffer, *, flush: bool) -> PQGen[None]:
    # psycopg only waits until it can write, which can deadlock with a server that waits for us to read its notices.
    while pgconn.put_copy_data(data) == 0:
        yield _WAIT_RW  # type: ignore[misc]
        pgconn.flush()
    while flush and pgconn.flush():
        yield _WAIT_RW  # type: ignore[misc]
