"""`TrioConnection`: psycopg's connection, cursors, transactions, pipelines and COPY, driven by Trio itself.

    async with await TrioConnection.connect(dsn, row_factory=dict_row) as conn:
        async with conn.transaction():
            cursor = await conn.execute("update seats set taken = true where id = %s returning price", [12])
            row = await cursor.fetchone()

No asyncio, no thread per query. Cancellation at any await leaves the connection usable or closed, and the server idle.
The engine does not use it; it is for your own queries.

`hooks` lists what is overridden in psycopg, and why. `wait` explains waiting and cancellation.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from types import TracebackType
from typing import Any, Final, NoReturn, Self, TypeVar, cast, overload

import psycopg
from psycopg import AsyncCursor, AsyncServerCursor, Notify, pq
from psycopg.abc import AdaptContext, ConnParam
from psycopg.adapt import AdaptersMap
from psycopg.conninfo import make_conninfo
from psycopg.pq import ConnStatus, TransactionStatus
from psycopg.rows import AsyncRowFactory, Row, tuple_row

from durable_actors._postgres.driver.waiting import discard, open_pgconn
from durable_actors._postgres.trio.cursor import TrioCursor, TrioServerCursor
from durable_actors._postgres.trio.pipeline import TrioPipeline
from durable_actors._postgres.trio.transaction import (
    TrioTransaction,
    check_alive,
    commit_unknown,
    failed_transaction,
)
from durable_actors._postgres.trio.wait import TrioWaiter, log

_R = TypeVar("_R")

_MAY_COMMIT: Final = (TransactionStatus.INTRANS, TransactionStatus.ACTIVE)  # active: in a pipeline
_TUPLES: Final = cast("AsyncRowFactory[Any]", tuple_row)


class _Opener(psycopg.Connection[Any]):
    """Connects in the worker thread. The libpq connection outlives it."""

    def __del__(self, _warn: object = None, /) -> None:
        """Do not warn about an open connection: it belongs to the TrioConnection, which warns itself."""


class TrioConnection(TrioWaiter[Row]):
    """A psycopg connection for Trio. Make one with `await TrioConnection.connect(...)`.

    Several tasks may use it; their statements then wait for each other. Cursors, row factories, adaptation,
    `transaction()`, `pipeline()`, `cursor.copy()` and `cursor.stream()` are psycopg's.
    """

    def __init__(
        self,
        pgconn: pq.abc.PGconn,
        row_factory: AsyncRowFactory[Row] = _TUPLES,
    ) -> None:
        super().__init__(pgconn, row_factory)
        self._take_over()
        self._after_commit: list[Callable[[], object]] = []
        self.cursor_factory = cast("type[AsyncCursor[Row]]", TrioCursor)
        self.server_cursor_factory = cast("type[AsyncServerCursor[Row]]", TrioServerCursor)

    # psycopg has one signature, with `row_factory: AsyncRowFactory[Row]`; with that pyright infers tuples.
    @overload  # type: ignore[override]
    @classmethod
    async def connect(
        cls,
        conninfo: str = "",
        *,
        autocommit: bool = False,
        prepare_threshold: int | None = 5,
        context: AdaptContext | None = None,
        row_factory: AsyncRowFactory[_R],
        cursor_factory: type[AsyncCursor[Any]] | None = None,
        **kwargs: ConnParam,
    ) -> TrioConnection[_R]: ...

    @overload
    @classmethod
    async def connect(
        cls,
        conninfo: str = "",
        *,
        autocommit: bool = False,
        prepare_threshold: int | None = 5,
        context: AdaptContext | None = None,
        row_factory: None = None,
        cursor_factory: type[AsyncCursor[Any]] | None = None,
        **kwargs: ConnParam,
    ) -> Self: ...

    @classmethod
    async def connect(
        cls,
        conninfo: str = "",
        *,
        autocommit: bool = False,
        prepare_threshold: int | None = 5,
        context: AdaptContext | None = None,
        row_factory: AsyncRowFactory[Any] | None = None,
        cursor_factory: type[AsyncCursor[Any]] | None = None,
        **kwargs: ConnParam,
    ) -> TrioConnection[Any]:
        """Connect, in a worker thread, and return the connection. The options are psycopg's.

        Raises `psycopg.OperationalError` if no server of the DSN accepts the connection, after `connect_timeout`
        (10 seconds unless the DSN sets another) at the latest. Cancelled: nothing is left open.
        """
        pgconn, _ = await open_pgconn(make_conninfo(conninfo, **kwargs), opener=_Opener)
        try:
            self = cls(pgconn)
        except BaseException:
            discard(pgconn)
            raise
        self._autocommit = bool(autocommit)
        if row_factory:
            self.row_factory = row_factory
        if cursor_factory:
            self.cursor_factory = cursor_factory
        if context:
            self._adapters = AdaptersMap(context.adapters)
        self.prepare_threshold = prepare_threshold
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> None:
        """Commit, or roll back after an exception, and close."""
        if self.closed:
            return
        try:
            if exc_val is None:
                await self.commit()
            else:
                async with self.unwinding():
                    await self._roll_back_quietly()
        finally:
            await self.close()

    async def _roll_back_quietly(self) -> None:
        try:
            await self.rollback()
        except psycopg.Error as exc:
            log.warning("%s: error ignored in rollback: %s", self, exc)

    async def commit(self) -> None:
        """Commit the open transaction, if there is one.

        Raises `durable_actors.errors.CommitUnknown` if the connection was lost after COMMIT was sent, and
        `psycopg.errors.InFailedSqlTransaction` if a statement of the transaction failed or was cancelled: then the
        transaction was rolled back (psycopg alone would not raise). Cancelled: committed, or not, or closed.
        """
        async with self.lock:
            status = self.pgconn.transaction_status
            if status == TransactionStatus.INTRANS and self._pipeline is None:
                check_alive(self)
            try:
                await self.wait(self._commit_gen())
            except psycopg.Error as exc:
                if status in _MAY_COMMIT and self.pgconn.status == ConnStatus.BAD:
                    raise commit_unknown(exc) from exc
                raise
        self._run_after_commit(committed=status in _MAY_COMMIT)
        if status == TransactionStatus.INERROR:
            raise failed_transaction()

    async def rollback(self) -> None:
        """Roll back the open transaction, if there is one."""
        await super().rollback()
        self._run_after_commit(committed=False)

    def after_commit(self, callback: Callable[[], object]) -> None:
        """Call `callback` after the open transaction is committed; immediately if there is none.

        For hints only: rolling back to a savepoint does not remove it, and a COMMIT sent as SQL text does not call it.
        """
        if self.pgconn.transaction_status == TransactionStatus.IDLE:
            callback()
        else:
            self._after_commit.append(callback)

    def _run_after_commit(self, *, committed: bool) -> None:
        callbacks, self._after_commit = self._after_commit, []
        if committed:
            for callback in callbacks:
                callback()

    @asynccontextmanager
    async def transaction(
        self,
        savepoint_name: str | None = None,
        force_rollback: bool = False,  # noqa: FBT001, FBT002 - psycopg's
    ) -> AsyncGenerator[TrioTransaction, None]:
        """Open a transaction, or a savepoint inside one.

        It is committed when the block ends and rolled back when it raises. Raises what `commit()` raises.
        Cancelled anywhere: rolled back, or the connection is closed. It may be committed only if COMMIT had already
        been sent.
        """
        block = TrioTransaction(self, savepoint_name, force_rollback)
        committed = False
        try:
            if self._pipeline is None:
                async with block:
                    yield block
            else:
                async with self.pipeline(), block, self.pipeline():
                    yield block
            committed = block.status is block.Status.COMMITTED
        except psycopg.Error as exc:
            if block.lost_in_commit:
                raise commit_unknown(exc) from exc
            raise
        finally:
            if block.outermost:
                self._run_after_commit(committed=committed)

    @asynccontextmanager
    async def pipeline(self) -> AsyncGenerator[TrioPipeline, None]:
        """Switch to pipeline mode: statements are sent without waiting for the answers to earlier ones.

        Cancelled inside a call that talks to the server: the connection is closed. Cancelled elsewhere in the block:
        the connection is synchronised and usable.
        """
        async with AsyncExitStack() as stack:
            async with self.lock:
                # Check, enter and publish it under one lock; otherwise another task's statement could come in between.
                self._check_connection_ok()
                pipeline = cast("TrioPipeline | None", self._pipeline) or TrioPipeline(self)
                await self.wait(pipeline._enter_gen())  # noqa: SLF001 - see hooks
                self._pipeline = pipeline
            stack.push_async_exit(pipeline)
            yield pipeline

    @asynccontextmanager
    async def _pipeline_nolock(self) -> AsyncGenerator[TrioPipeline, None]:
        # For executemany, which holds the lock and has checked that there is no pipeline.
        pipeline = self._pipeline = TrioPipeline(self, _no_lock=True)
        try:
            async with pipeline:
                yield pipeline
        finally:
            self._pipeline = None

    def notifies(
        self, *, timeout: float | None = None, stop_after: int | None = None
    ) -> AsyncGenerator[Notify, None]:
        """Refuse: LISTEN/NOTIFY is banned here."""
        _refuse_notifications(timeout, stop_after)

    def add_notify_handler(self, callback: Any) -> None:
        """Refuse: LISTEN/NOTIFY is banned here."""
        _refuse_notifications(callback)


def _refuse_notifications(*_: object) -> NoReturn:
    raise psycopg.NotSupportedError(
        "LISTEN/NOTIFY is banned on a TrioConnection: a notification is lost while nobody listens. "
        "Poll a table, or use durable_actors' signals"
    )
