"""`conn.transaction()` on Trio. It ends committed, rolled back, with a closed connection, or with `CommitUnknown`."""
# ruff: noqa: SLF001 - psycopg's internals, all listed in hooks

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

import psycopg
import trio
from psycopg import AsyncTransaction
from psycopg.abc import PQGen
from psycopg.pq import ConnStatus, TransactionStatus

from durable_actors._postgres.driver.waiting import discard, is_readable
from durable_actors._postgres.trio.wait import TrioWaiter, hang_up_reason, is_cancelled, log
from durable_actors.errors import CommitUnknown

_IN_TRANSACTION = (TransactionStatus.INTRANS, TransactionStatus.INERROR)


def commit_unknown(cause: psycopg.Error) -> CommitUnknown:
    """Make the error for a connection that was lost after COMMIT was sent."""
    return CommitUnknown(
        f"the connection was lost after COMMIT was sent, the commit may have happened: {cause}"
    )


def failed_transaction() -> psycopg.errors.InFailedSqlTransaction:
    """Make the error for the COMMIT of a failed transaction, which Postgres answers with a silent ROLLBACK.

    A query that `move_on_after` cancelled inside the block fails the transaction as well: without an error its work
    would be lost silently.
    """
    return psycopg.errors.InFailedSqlTransaction(
        "nothing was committed: an earlier statement of the transaction failed or was cancelled, "
        "and the transaction was rolled back"
    )


def check_alive(conn: TrioWaiter[Any]) -> None:
    """Raise if the server has already closed the session: then COMMIT was not sent, and nothing is committed.

    One poll(2) per commit. It distinguishes a session that timed out or was terminated while idle from a lost reply.
    """
    pgconn = conn.pgconn
    if pgconn.status == ConnStatus.OK and is_readable(pgconn.socket):
        reason = hang_up_reason(pgconn)
        if reason is not None:
            discard(pgconn)
            raise reason


class TrioTransaction(AsyncTransaction):
    """A transaction or savepoint block. Made by `TrioConnection.transaction()`."""

    _conn: TrioWaiter[Any]  # pyright: ignore[reportIncompatibleVariableOverride]

    def _begun(self) -> bool:
        return self.status is not self.Status.NOT_STARTED

    async def __aenter__(self) -> Self:
        async with self._conn.lock:
            if self._begun():
                raise TypeError("transaction blocks can be used only once")
            try:
                await self._conn.wait(self._enter_gen())
            except BaseException as exc:
                # If it has begun, undo it, because __aexit__ will not be called. Otherwise nothing was sent.
                if self._begun():
                    async with self._conn.unwinding():
                        await self._roll_back(exc, quiet=True)
                raise
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> bool:
        if self.pgconn.status != ConnStatus.OK:
            self.status = self.Status.FAILED
            return False
        if exc_val is None and not self.force_rollback:
            await self._commit()
            return False
        quiet = is_cancelled() or isinstance(exc_val, trio.Cancelled)
        swallow = False
        async with self._conn.unwinding(), self._conn.lock:
            swallow = await self._roll_back(exc_val, quiet=quiet)
        if self.pgconn.status != ConnStatus.OK:
            self.status = self.Status.FAILED
        return swallow

    async def _roll_back(self, exc: BaseException | None, *, quiet: bool) -> bool:
        """Roll back, under the lock; True if `exc` is a `Rollback` that ends at this block.

        psycopg logs an error of the ROLLBACK itself and lets `exc` propagate. It raises if blocks are left out of
        order; with `quiet` the connection is closed instead, because no other error may replace a Cancelled.
        """
        swallow = False
        try:
            swallow = await self._conn.wait(self._exit_gen(type(exc) if exc else None, exc, None))
        except psycopg.Error as error:
            if isinstance(error, psycopg.ProgrammingError) and not quiet:
                raise
            log.warning("%s: error ignored in rollback: %s", self, error)
            discard(self.pgconn)
        outermost = self._outer_transaction and self._conn._pipeline is None
        if outermost and self.pgconn.transaction_status != TransactionStatus.IDLE:
            discard(self.pgconn)  # whatever went wrong: closing makes the server roll back
        return swallow

    async def _commit(self) -> None:
        conn = self._conn
        try:
            async with conn.lock:
                if conn._pipeline is None:
                    if self.pgconn.transaction_status == TransactionStatus.INERROR:
                        failed = failed_transaction()
                        await conn.wait(self._exit_gen(type(failed), failed, None))
                        raise failed
                    check_alive(conn)
                await conn.wait(self._exit_gen(None, None, None))
        except trio.Cancelled as exc:
            await self._undo_commit(exc)
            raise
        except psycopg.Error as exc:
            if self.lost_in_commit:
                raise commit_unknown(exc) from exc
            raise

    @property
    def outermost(self) -> bool:
        """Whether it is a transaction, not a savepoint inside one."""
        return self._outer_transaction

    @property
    def lost_in_commit(self) -> bool:
        """Whether the COMMIT of the outermost block was sent or queued and the connection is gone."""
        return (
            self._outer_transaction
            and self.status is self.Status.COMMITTED
            and self.pgconn.status == ConnStatus.BAD
        )

    async def _undo_commit(self, exc: BaseException) -> None:
        """End the transaction after its commit was cancelled: before it was sent, on the server, or too late."""
        async with self._conn.unwinding(), self._conn.lock:
            if self.pgconn.status != ConnStatus.OK:
                self.status = self.Status.FAILED
            elif self.status is self.Status.ACTIVE:
                await self._roll_back(exc, quiet=True)
            elif self._outer_transaction or self.pgconn.transaction_status == TransactionStatus.INERROR:
                try:
                    await self._conn.wait(self._end_gen())
                except psycopg.Error as error:
                    log.warning("%s: error ignored in rollback: %s", self, error)
                    discard(self.pgconn)

    def _end_gen(self) -> PQGen[None]:
        if self.pgconn.transaction_status in _IN_TRANSACTION:
            self.status = self.Status.ROLLED_BACK_WITH_ERROR
            for command in self._get_rollback_commands():
                yield from self._conn._exec_command(command)
