"""Explicit transactions of the engine's driver: committed, rolled back, or closed; never left open."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Generic, Literal, Protocol, TypeVar

import psycopg
import trio

from durable_actors._postgres.driver import waiting
from durable_actors._postgres.driver.statement import Params, Result, Statement
from durable_actors.errors import StoreUnavailable


class Transactional(Protocol):
    """What a transaction needs of its connection: `PgConn`, or a simulated one."""

    in_transaction: bool

    @property
    def preamble(self) -> Sequence[tuple[Statement, Params]]: ...

    @property
    def closed(self) -> bool: ...

    @property
    def pristine(self) -> bool: ...

    async def command(self, sql: str, *, commits: bool = False) -> str: ...

    async def batch(self, calls: Iterable[tuple[Statement, Params]]) -> list[Result]: ...

    def close(self) -> None: ...


C = TypeVar("C", bound=Transactional)


class Transaction(Generic[C]):
    """`async with conn.transaction():`, see `PgConn.transaction`."""

    __slots__ = ("_begin", "_conn")

    def __init__(self, conn: C, begin: str) -> None:
        self._conn = conn
        self._begin = begin

    async def __aenter__(self) -> C:
        if self._conn.in_transaction:
            raise RuntimeError("this connection is in a transaction already; transactions do not nest")
        try:
            await self._conn.command(self._begin)
            if self._conn.preamble:
                self._conn.in_transaction = True
                await self._conn.batch(self._conn.preamble)
        except trio.BusyResourceError:
            raise  # another task is using the connection: its statement is not ours to roll back
        except BaseException:
            self._conn.in_transaction = False
            await self._rollback()  # after a cancellation BEGIN may have been done
            raise
        self._conn.in_transaction = True
        return self._conn

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Literal[False]:
        conn = self._conn
        conn.in_transaction = False
        if error is not None:
            await self._rollback()
            return False
        try:
            tag = await conn.command("COMMIT", commits=True)
        except BaseException:
            await self._rollback()  # a refused or cancelled COMMIT must not leave a transaction open
            raise
        if tag != "COMMIT":  # Postgres answers ROLLBACK to the COMMIT of a failed transaction
            raise psycopg.errors.InFailedSqlTransaction(
                "the transaction was rolled back: a statement in it failed and the error was not raised"
            )
        return False

    async def _rollback(self) -> None:
        """Roll back within a bounded time, or close the connection. Never raises."""
        conn = self._conn
        if conn.closed or conn.pristine:
            return
        with trio.move_on_after(waiting.CANCEL_TIMEOUT, shield=True):
            try:
                await conn.command("ROLLBACK")
            except (StoreUnavailable, psycopg.Error, trio.BusyResourceError):
                conn.close()
                return
        if not conn.pristine:
            conn.close()
