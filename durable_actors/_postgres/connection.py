"""The engine's driver: prepared statements on a libpq connection, one round trip each, on Trio.

No cursors, no type adaptation, no asyncio, no thread for queries. Parameters go in as text (`encode`),
columns come out as bytes. One task at a time uses a connection; the pool sees to that.

    conn = await PgConn.open(dsn)
    [row] = (await conn.run(CLAIM, [b"default", b"10"])).rows
    claimed, parked = await conn.batch([(CLAIM, [...]), (PARK, [...])])     # one round trip, one transaction

Cancellation, at every await: the statement is cancelled on the server and the connection drained within
`CANCEL_TIMEOUT` (shielded), else the connection is closed. A cancelled statement may have been done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final, NoReturn

import psycopg
import trio
from psycopg import pq
from psycopg.pq import ConnStatus, ExecStatus, PipelineStatus, TransactionStatus
from trio.lowlevel import checkpoint_if_cancelled, wait_readable

from durable_actors._postgres import failures, waiting
from durable_actors._postgres.statement import Message, Params, Prepared, Result, Statement, read_result
from durable_actors._postgres.transaction import Transaction
from durable_actors.errors import ConfigError, StoreUnavailable

_TROUBLE: Final = (psycopg.Error, OSError, trio.ClosedResourceError)


class PgConn:
    """A Postgres connection driven by Trio. Make one with `open`."""

    __slots__ = (
        "_busy", "_fd", "_keepalive", "_pgconn", "_prepared", "_unflushed",
        "in_transaction", "opened_at", "pid",
    )  # fmt: skip

    def __init__(self, pgconn: pq.abc.PGconn, keepalive: object) -> None:
        self._pgconn = pgconn
        self._keepalive = keepalive
        self._fd = pgconn.socket
        self._prepared = Prepared()
        self._busy = False
        self._unflushed = False
        self.in_transaction = False
        """Inside `transaction()`: a statement's completion does not commit."""
        self.opened_at: Final = trio.current_time()
        """When it was connected, on Trio's clock."""
        self.pid: Final = pgconn.backend_pid
        """The server process."""

    @classmethod
    async def open(cls, dsn: str, *, settings: Mapping[str, str] | None = None) -> PgConn:
        """Connect. `settings` are session settings (`{"jit": "off"}`), applied in one round trip.

        Raises `StoreUnavailable` when no server lets us in, `ConfigError` for a malformed DSN. Cancelled: nothing is left open.
        """
        try:
            pgconn, keepalive = await waiting.open_pgconn(dsn)
        except psycopg.OperationalError as exc:
            raise StoreUnavailable(f"cannot connect to Postgres: {exc}") from exc
        except psycopg.ProgrammingError as exc:
            raise ConfigError(f"dsn is not a connection string or URI: {exc}", option="dsn") from exc
        conn = cls(pgconn, keepalive)
        if settings:
            try:
                await conn.batch([(_SET, [k.encode(), v.encode()]) for k, v in settings.items()])
            except BaseException:
                conn.close()
                raise
        return conn

    @property
    def closed(self) -> bool:
        """Closed by us or found broken; a server that vanished silently is only noticed in use."""
        return self._pgconn.status == ConnStatus.BAD

    @property
    def pristine(self) -> bool:
        """Fit for the next user: open, idle, no transaction, no pipeline, nothing half-read."""
        pgconn = self._pgconn
        return (
            pgconn.status == ConnStatus.OK
            and not self._busy
            and pgconn.transaction_status == TransactionStatus.IDLE
            and pgconn.pipeline_status == PipelineStatus.OFF
        )

    def alive(self) -> bool:
        """Tell whether an idle connection still has its server, without a round trip.

        A terminated backend or a stopped server leaves bytes or an end of file on the socket.
        """
        if self.closed:
            return False
        if not waiting.is_readable(self._fd):
            return True
        try:
            self._pgconn.consume_input()
            # Only a notice or a parameter change may come unasked, and libpq has read it now. An end of
            # file shows as readable again at once.
            gone = waiting.is_readable(self._fd)
        except psycopg.OperationalError:
            gone = True
        if gone:
            self.close()
        return not gone

    def close(self) -> None:
        """Close now, without a round trip; a task waiting on it gets `StoreUnavailable`. Safe to repeat."""
        waiting.discard(self._pgconn)

    async def run(self, statement: Statement, params: Params = ()) -> Result:
        """Run one statement in one round trip. Outside `transaction()` it commits by itself.

        Raises `psycopg.Error` (refused, not done), `StoreUnavailable` (not done) or `CommitUnknown`.
        """
        name = self._prepared.name(statement)
        if name is None:
            return (await self.batch([(statement, params)]))[0]
        commits = not (statement.read_only or self.in_transaction)
        [result] = await self._converse(
            self._pgconn.send_query_prepared, name, params, commits=commits, doing=statement.name
        )
        if result.status == ExecStatus.FATAL_ERROR:
            if not self._forgets([statement], result):
                self._refuse(result, doing=statement.name)
            return await self.run(statement, params)
        return read_result(result)

    async def batch(self, calls: Iterable[tuple[Statement, Params]]) -> list[Result]:
        """Run several statements in one round trip and, outside `transaction()`, in one transaction.

        All or nothing: the first refusal rolls the whole batch back and is raised with the statement's name.
        """
        calls = list(calls)
        if not calls:
            return []
        known = [statement for statement, _ in calls if self._prepared.name(statement)]
        commits = not (self.in_transaction or all(statement.read_only for statement, _ in calls))
        messages = self._prepared.plan(calls)
        results = await self._converse(
            self._send_pipeline, messages, commits=commits, doing=calls[0][0].name, pipeline=len(messages)
        )
        executed = self._prepared.learn(messages, results)
        for (statement, _), result in zip(calls, executed, strict=True):
            if result.status == ExecStatus.FATAL_ERROR:
                if not self._forgets(known, result):
                    self._refuse(result, doing=statement.name)
                return await self.batch(calls)
        return [read_result(result) for result in executed]

    async def script(self, sql: str) -> None:
        """Run any number of statements, without parameters, as one simple query (migrations).

        Postgres makes one transaction of it unless it holds BEGIN/COMMIT or what cannot run in one.
        """
        results = await self._converse(self._pgconn.send_query, sql.encode(), commits=True, doing="script")
        for result in results:
            if not failures.is_done(result):
                self._refuse(result, doing="script")

    def transaction(self, *, begin: str = "BEGIN") -> Transaction:
        """Open an explicit transaction: `async with conn.transaction(): ...`.

        Committed when the body ends, rolled back when it raises. `begin` may carry modes
        (`"BEGIN ISOLATION LEVEL REPEATABLE READ"`). Raises `CommitUnknown` when the COMMIT's fate is unknown.
        """
        return Transaction(self, begin)

    # ------------------------------------------------------------------ the conversation

    async def _converse(
        self,
        send: Callable[..., None],
        *args: object,
        commits: bool,
        doing: str,
        pipeline: int = 0,
        expected: int | None = 1,
    ) -> list[pq.abc.PGresult]:
        """Send, wait, and read to the end. On return the connection is ready for the next statement."""
        pgconn = self._pgconn
        if pgconn.status == ConnStatus.BAD:
            raise StoreUnavailable("the connection is closed")
        if self._busy:
            raise trio.BusyResourceError("another task is using this connection")
        await checkpoint_if_cancelled()
        results: list[pq.abc.PGresult] = []
        lost: BaseException | str | None = None
        self._busy = True
        try:
            send(*args)
            if pgconn.flush():
                await self._flush()
            await self._read(results, pipeline=bool(pipeline))
            if pipeline:
                pgconn.exit_pipeline_mode()
        except trio.Cancelled:
            await self._salvage()
            raise
        except _TROUBLE as exc:
            lost = exc
        except BaseException:
            # A bad parameter, or KeyboardInterrupt in the midst: nobody knows what was sent.
            self.close()
            raise
        finally:
            self._busy = False
        if lost is None and pgconn.status == ConnStatus.BAD:
            lost = doing
        if lost is not None:
            self._lost(results, lost, commits=commits, expected=pipeline or expected)
        return results

    async def _read(self, results: list[pq.abc.PGresult], *, pipeline: bool) -> None:
        """Read results until the server is ready for the next query (until the Sync's echo in a pipeline)."""
        pgconn, fd = self._pgconn, self._fd
        while True:
            while pgconn.is_busy():
                await wait_readable(fd)
                pgconn.consume_input()
            result = pgconn.get_result()
            if result is None:
                if not pipeline:
                    return
                if pgconn.status == ConnStatus.BAD:
                    raise psycopg.OperationalError("the connection was lost")
            elif result.status == ExecStatus.PIPELINE_SYNC:
                return
            elif failures.is_copy(result):
                raise psycopg.NotSupportedError("COPY is not for this driver; use TrioConnection")
            else:
                results.append(result)

    async def _flush(self) -> None:
        """Send what the socket did not take at once. Reads meanwhile, else both sides may wait for ever."""
        self._unflushed = True
        while True:
            ready = await waiting.wait_either(self._fd)
            if ready & waiting.READABLE:
                self._pgconn.consume_input()
            if not self._pgconn.flush():
                break
        self._unflushed = False

    async def _salvage(self) -> None:
        """Get an interrupted connection back within a bounded time, or close it. Never raises."""
        with trio.move_on_after(waiting.CANCEL_TIMEOUT, shield=True):
            try:
                if await self._drain():
                    return
            except _TROUBLE:
                pass
        self.close()

    async def _drain(self) -> bool:
        pgconn = self._pgconn
        if self._unflushed:
            await waiting.send_cancel(pgconn)  # an earlier statement of the pipeline may be running
            return False  # half a message is out: only closing helps
        pgconn.consume_input()
        if pgconn.is_busy():
            await waiting.send_cancel(pgconn)
        pipeline = pgconn.pipeline_status != PipelineStatus.OFF
        await self._read([], pipeline=pipeline)
        if pipeline:
            pgconn.exit_pipeline_mode()
        return True

    def _lost(
        self,
        results: list[pq.abc.PGresult],
        cause: BaseException | str,
        *,
        commits: bool,
        expected: int | None,
    ) -> NoReturn:
        """Close, and raise what the caller must know: not done, or unknown."""
        pgconn = self._pgconn
        for _ in range(4):  # e.g. the FATAL that came together with the end of file
            if pgconn.status != ConnStatus.BAD or pgconn.is_busy():
                break
            last_words = pgconn.get_result()
            if last_words is None:
                break
            results.append(last_words)
        self.close()
        loss = failures.loss(results, expected=expected, commits=commits, cause=cause)
        raise loss from (cause if isinstance(cause, BaseException) else None)

    # ------------------------------------------------------------------ after the conversation

    def _send_pipeline(self, messages: list[Message]) -> None:
        self._pgconn.enter_pipeline_mode()
        for statement, name, params in messages:
            if params is None:
                self._pgconn.send_prepare(name, statement.sql.encode())
            else:
                self._pgconn.send_query_prepared(name, params)
        self._pgconn.pipeline_sync()

    def _forgets(self, known: list[Statement], result: pq.abc.PGresult) -> bool:
        return not self.in_transaction and self._prepared.forget(known, result)

    def _refuse(self, result: pq.abc.PGresult, *, doing: str) -> NoReturn:
        if failures.sqlstate(result) in failures.RECONNECT:
            self.close()
        raise failures.server_error(result, doing=doing)

    async def command(self, sql: str, *, commits: bool = False) -> str:
        """Run BEGIN, COMMIT or ROLLBACK (for `transaction()`); return the command tag."""
        [result] = await self._converse(
            self._pgconn.send_query_params,
            sql.encode(),
            None,
            commits=commits,
            doing=sql,
            expected=None,
        )
        if not failures.is_done(result):
            self._refuse(result, doing=sql)
        return (result.command_status or b"").decode()


_SET: Final = Statement("set_config", "select set_config($1, $2, false)")
