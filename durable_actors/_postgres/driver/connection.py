"""The engine's driver: prepared statements on a libpq connection, one round trip each, on Trio.

No cursors, no type adaptation, no asyncio, no thread for queries. Parameters go in as text (`encode`), columns come out
as bytes. One task at a time uses a connection; the pool guarantees that.

    [row] = (await conn.run(CLAIM, [b"default", b"10"])).rows
    claimed, parked = await conn.batch([(CLAIM, [...]), (PARK, [...])])     # one round trip, one transaction

Cancelled at any await: the driver cancels the statement on the server and reads the rest of the answer, shielded,
within a bounded time; if that fails, it closes the connection. A cancelled statement may have been done.
"""

from __future__ import annotations

import select
from collections.abc import Callable, Iterable, Mapping
from typing import Final, NoReturn

import psycopg
import trio
from psycopg import pq
from trio.lowlevel import checkpoint_if_cancelled, wait_readable

from durable_actors._postgres.driver import failures, waiting
from durable_actors._postgres.driver.conninfo import bad_dsn, engine_conninfo
from durable_actors._postgres.driver.failures import COMMIT, NO_COMMIT
from durable_actors._postgres.driver.session import (
    check_shared_session,
    refused_setting,
    session_calls,
    transaction_calls,
)
from durable_actors._postgres.driver.statement import (
    Params,
    Prepared,
    Result,
    Statement,
    read_result,
    send_pipeline,
)
from durable_actors._postgres.driver.transaction import Transaction
from durable_actors.errors import StoreUnavailable

# Plain integers: looking up an enum member costs 100 ns, comparing with it another 100 ns.
_BAD: Final = int(pq.ConnStatus.BAD)
_IDLE: Final = int(pq.TransactionStatus.IDLE)
_PIPELINE_OFF: Final = int(pq.PipelineStatus.OFF)
_PIPELINE_SYNC: Final = int(pq.ExecStatus.PIPELINE_SYNC)
_REFUSED: Final = int(pq.ExecStatus.FATAL_ERROR)
_MAX_READS_PER_WAIT: Final = 64  # 16 kB each, so a megabyte, about 1 ms: then other tasks run


class PgConn:
    """A Postgres connection driven by Trio. Make one with `open`."""

    __slots__ = (
        "_busy", "_fd", "_keepalive", "_pgconn", "_poller",
        "broken", "in_transaction", "opened_at", "pid", "preamble", "prepared",
    )  # fmt: skip

    def __init__(self, pgconn: pq.abc.PGconn, keepalive: object) -> None:
        self._pgconn = pgconn
        self._keepalive = keepalive
        self._fd = pgconn.socket
        self._poller = select.poll()
        self._poller.register(self._fd, select.POLLIN)
        self._busy = False
        self.prepared: Final = Prepared()
        self.in_transaction = False
        """Inside `transaction()`: a statement's completion does not commit."""
        self.broken = False
        """The server went away, fell silent or is a standby now. Connections opened before may be affected, too."""
        self.opened_at: Final = trio.current_time()
        """When it was opened, on Trio's clock."""
        self.pid: Final = pgconn.backend_pid
        """Pid of the server process; behind a pooler a number that the pooler makes up."""
        self.preamble: list[tuple[Statement, Params]] = []
        """Behind a pooler: the statements that every transaction begins with."""

    @classmethod
    async def open(cls, dsn: str, *, settings: Mapping[str, str] | None = None) -> PgConn:
        """Connect. `settings` are session settings (`{"jit": "off"}`).

        Raises `StoreUnavailable` if no server accepts the connection, `ConfigError` for a malformed DSN or a wrong
        setting. Cancelled: nothing is left open.
        """
        try:
            pgconn, keepalive = await waiting.open_pgconn(engine_conninfo(dsn))
        except psycopg.OperationalError as exc:
            raise StoreUnavailable(f"cannot connect to Postgres: {exc}") from exc
        except (psycopg.ProgrammingError, UnicodeError) as exc:  # the latter from Python's resolver
            # Not `from exc`: libpq quotes the part that it cannot read, which may be the password.
            raise bad_dsn(dsn, exc) from None
        conn = cls(pgconn, keepalive)
        try:
            await conn._set_up(settings or {})
        except BaseException:
            conn.close()
            raise
        return conn

    async def _set_up(self, settings: Mapping[str, str]) -> None:
        """Set the session up, or note what each transaction must begin with: see `session`.

        One round trip; two behind a pooler.
        """
        try:
            *_, direct = await self.batch(session_calls(settings, self.pid))
            if direct.rows:  # the process that we connected to has run them: no pooler is in between
                self.prepared.off = False
                return
            preamble = transaction_calls(settings)
            *_, shared = await self.batch(preamble)
        except psycopg.Error as exc:
            raise refused_setting(settings, exc) from exc
        except StoreUnavailable as exc:
            raise StoreUnavailable(f"cannot connect to Postgres: {exc}") from exc
        check_shared_session(shared.rows[0])
        self.preamble = preamble

    @property
    def closed(self) -> bool:
        """Closed by us or found broken. A server that vanished silently is only noticed when the connection is used."""
        return self._pgconn.status == _BAD

    @property
    def pooled(self) -> bool:
        """Whether a pooler is in between: each transaction may run in another server process. See `session`."""
        return bool(self.preamble)

    @property
    def pristine(self) -> bool:
        """Whether the next task can use it: open, idle, no transaction, no pipeline, no half-read answer."""
        pgconn = self._pgconn
        return (
            not self._busy
            and pgconn.status != _BAD
            and pgconn.transaction_status == _IDLE
            and pgconn.pipeline_status == _PIPELINE_OFF
        )

    def alive(self) -> bool:
        """Whether an idle connection still has its server, without a round trip. Closes it if not.

        A terminated backend or a stopped server leaves bytes or an end of file on the socket.
        """
        if self._pgconn.status == _BAD:
            return False
        if not self._poller.poll(0):
            return True
        try:
            self._pgconn.consume_input()
            # Unasked, the server sends only notices and parameter changes, and libpq has read them now. An end of
            # file makes the socket readable again at once.
            gone = bool(self._poller.poll(0))
        except psycopg.OperationalError:
            gone = True
        if gone:
            self._break()
        return not gone

    def close(self) -> None:
        """Close now, without a round trip; a task waiting on it gets `StoreUnavailable`. Safe to repeat."""
        waiting.discard(self._pgconn)

    async def run(self, statement: Statement, params: Params = ()) -> Result:
        """Run one statement in one round trip. Outside `transaction()` it is a transaction of its own.

        Raises `psycopg.Error` (refused, not done), `StoreUnavailable` (not done) or `CommitUnknown`.
        """
        name = self.prepared.names.get(statement)
        if name is None:
            return (await self.batch([(statement, params)]))[0]
        expected = NO_COMMIT if statement.read_only or self.in_transaction else 1
        send = self._pgconn.send_query_prepared
        results = await self._converse(expected, statement.name, send, name, params)
        result = results[-1]  # a second one is an error at the commit, e.g. of a deferred constraint
        if result.status == _REFUSED:
            if not self._forgets([statement], result):
                self._refuse(result, doing=statement.name)
            return await self.run(statement, params)
        return read_result(statement, result)

    async def batch(self, calls: Iterable[tuple[Statement, Params]]) -> list[Result]:
        """Run several statements in one round trip and, outside `transaction()`, in one transaction.

        All or nothing: the first error rolls the whole batch back and is raised with the statement's name.
        """
        calls = list(calls)
        if not calls:
            return []
        doing = calls[0][0].name
        preamble = [] if self.in_transaction else self.preamble
        calls = preamble + calls
        known = [statement for statement, _ in calls if statement in self.prepared.names]
        messages = self.prepared.plan(calls)
        commits = not (self.in_transaction or all(statement.read_only for statement, _ in calls))
        results = await self._converse(
            len(messages) if commits else NO_COMMIT, doing, send_pipeline, self._pgconn, messages
        )
        if len(results) > len(messages):  # every statement succeeded, the commit did not
            self._refuse(results[-1], doing=f"the commit of {doing}")
        executed = self.prepared.learn(messages, results)
        for (statement, _), result in zip(calls, executed, strict=True):
            if result.status == _REFUSED:
                if not self._forgets(known, result):
                    self._refuse(result, doing=statement.name)
                return await self.batch(calls)
        answers = [read_result(call[0], result) for call, result in zip(calls, executed, strict=True)]
        return answers[len(preamble) :]

    async def script(self, sql: str) -> None:
        """Run any number of statements, without parameters, as one simple query (migrations).

        Postgres runs it as one transaction, unless it contains BEGIN, COMMIT or a command that cannot run in one.
        """
        results = await self._converse(COMMIT, "script", self._pgconn.send_query, sql.encode())
        for result in results:
            if not failures.is_done(result):
                self._refuse(result, doing="script")

    def transaction(self, *, begin: str = "BEGIN") -> Transaction[PgConn]:
        """Open an explicit transaction: committed when the body ends, rolled back when it raises.

        `begin` may contain transaction modes. Raises `CommitUnknown` if the connection is lost during COMMIT.
        """
        return Transaction(self, begin)

    async def command(self, sql: str, *, commits: bool = False) -> str:
        """Run BEGIN, COMMIT or ROLLBACK (for `transaction()`); return the command tag."""
        [result] = await self._converse(
            COMMIT if commits else NO_COMMIT, sql, self._pgconn.send_query_params, sql.encode(), None
        )
        if not failures.is_done(result):
            self._refuse(result, doing=sql)
        return (result.command_status or b"").decode()

    # ------------------------------------------------------------------ the conversation

    async def _converse(
        self, expected: int, doing: str, send: Callable[..., None], *args: object
    ) -> list[pq.abc.PGresult]:
        """Send, wait, and read the whole answer. On return the connection is ready for the next statement.

        `expected` decides what a lost connection means, see `failures.loss`.
        """
        pgconn = self._pgconn
        if pgconn.status == _BAD:
            raise StoreUnavailable(f"the connection is closed; {doing} was not sent")
        if self._busy:
            raise trio.BusyResourceError("another task is using this connection")
        await checkpoint_if_cancelled()
        # libpq hides that a write failed. If the server is gone before we send, the statement was not done (1 µs).
        if expected != NO_COMMIT and not self.alive():
            raise StoreUnavailable(f"the server closed the connection before {doing} was sent")
        results: list[pq.abc.PGresult] = []
        sent = False
        self._busy = True
        try:
            send(*args)
            if pgconn.flush():
                await self._flush()
            sent = True
            await self._read(results)
        except trio.Cancelled:
            await self._salvage(sent=sent)
            raise
        except psycopg.NotSupportedError:
            self.close()  # COPY: the server waits for data or sends it, and only closing ends that
            raise
        except waiting.CONNECTION_ERRORS as exc:
            if not sent and isinstance(exc, psycopg.Error) and pgconn.status != _BAD:
                self.close()  # libpq itself refused to send it, e.g. 70,000 parameters
                raise
            # If not all of it was sent, neither was the Sync at its end, and the server cannot have committed.
            self._lost(results, exc, expected=expected if sent else NO_COMMIT, doing=doing)
        except BaseException:
            # A parameter of the wrong type, or KeyboardInterrupt: it is unknown what was sent.
            self.close()
            raise
        finally:
            self._busy = False
        return results

    async def _read(self, results: list[pq.abc.PGresult]) -> None:
        """Read results until the server is ready for the next query (in a pipeline: until the answer to the Sync)."""
        pgconn, fd, poll = self._pgconn, self._fd, self._poller.poll
        pipeline = pgconn.pipeline_status != _PIPELINE_OFF
        at_once = 0
        while True:
            while pgconn.is_busy():
                # libpq reads 16 kB at a time, and one pass of Trio's loop may run 200 steps of jobs before the next
                # read.
                if at_once and poll(0):
                    at_once -= 1
                else:
                    await wait_readable(fd)
                    at_once = _MAX_READS_PER_WAIT
                pgconn.consume_input()
            result = pgconn.get_result()
            if result is None:
                if pgconn.status == _BAD:
                    raise psycopg.OperationalError("the server closed the connection")
                if not pipeline:
                    return
            elif result.status == _PIPELINE_SYNC:
                pgconn.exit_pipeline_mode()
                return
            elif failures.is_copy(result):
                raise psycopg.NotSupportedError("this driver does not support COPY; use TrioConnection")
            else:
                results.append(result)

    async def _flush(self) -> None:
        """Send what the socket did not take at once. Reads meanwhile; otherwise both sides could wait for ever."""
        while True:
            ready = await waiting.wait_either(self._fd)
            # If the server reads as fast as we send, the wait above never blocks: let other tasks run.
            await trio.lowlevel.checkpoint()
            if ready & waiting.READABLE:
                self._pgconn.consume_input()
            if not self._pgconn.flush():
                return

    async def _salvage(self, *, sent: bool) -> None:
        """Make an interrupted connection usable again within a bounded time, or close it. Never raises."""
        usable = False
        try:
            with trio.move_on_after(waiting.CANCEL_TIMEOUT, shield=True) as scope:
                usable = await self._drain(sent=sent)
            self.broken = scope.cancelled_caught  # the server is silent
        except waiting.CONNECTION_ERRORS:
            self.broken = True
        finally:
            if not usable:
                self.close()

    async def _drain(self, *, sent: bool) -> bool:
        """Stop the statement and read the rest of its answer.

        False if only half a message was sent: the connection cannot be used any more.
        """
        pgconn = self._pgconn
        if not sent:  # an earlier statement of the pipeline may be running
            await waiting.send_cancel(pgconn)
            return False
        pgconn.consume_input()
        if pgconn.is_busy():
            await waiting.send_cancel(pgconn)
        while pgconn.is_busy():  # the cancel request may have overtaken the statement: repeat it
            await waiting.wait_stopping(pgconn)
            pgconn.consume_input()
        await self._read([])
        return True

    def _lost(
        self, results: list[pq.abc.PGresult], cause: BaseException, *, expected: int, doing: str
    ) -> NoReturn:
        """Close, and raise the error that says whether the statements were not done, or may have been."""
        pgconn = self._pgconn
        for _ in range(4):  # e.g. the FATAL error that arrived together with the end of file
            if pgconn.status != _BAD or pgconn.is_busy():
                break
            final = pgconn.get_result()
            if final is None:
                break
            results.append(final)
        self._break()
        raise failures.loss(results, cause, expected=expected, doing=doing) from cause

    # ------------------------------------------------------------------ after the conversation

    def _forgets(self, known: list[Statement], result: pq.abc.PGresult) -> bool:
        """Forget stale prepared statements; return whether to run them again (no: a failed transaction)."""
        return self.prepared.forget(known, result) and not self.in_transaction

    def _refuse(self, result: pq.abc.PGresult, *, doing: str) -> NoReturn:
        if failures.sqlstate(result) in failures.RECONNECT:
            self._break()
        raise failures.server_error(result, doing=doing)

    def _break(self) -> None:
        self.broken = True
        self.close()
