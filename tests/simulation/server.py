"""The server: sessions with their locks and transactions, restarts, waiting for row locks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs
import psycopg
from durable_actors._postgres.driver.statement import Params, Result, Statement
from tests.simulation import (  # noqa: F401 - their meanings register themselves
    statements_boundaries,
    statements_cancel,
    statements_fair,
    statements_graph,
    statements_inbox,
    statements_keys,
    statements_lease,
    statements_limits,
    statements_pauses,
    statements_retention,
    statements_schedules,
)
from tests.simulation.limits import expect_slot, slot_of
from tests.simulation.process import Violation, World
from tests.simulation.statements import MEANINGS, SECOND, Scene
from tests.simulation.tables import Blocked, NotYet, Tables, Tx

Reply = list[Result] | str | Exception


def refusal(sqlstate: str, text: str) -> psycopg.Error:
    return psycopg.errors.lookup(sqlstate)(text)


@attrs.define(eq=False)
class Request:
    """One message of a client: statements, or a command of a transaction."""

    calls: list[tuple[Statement, Params]]
    command: str | None
    reply: Callable[[Reply], None]
    began: int = -1
    """When the server first saw it: `now()` of what it runs."""
    ended: bool = False
    cancelled: bool = False

    @property
    def name(self) -> str:
        return self.command or "+".join(statement.name for statement, _ in self.calls)


class Session:
    """One server process."""

    def __init__(self, server: Server, pid: int, settings: Mapping[str, str]) -> None:
        self.server = server
        self.pid = pid
        self.alive = True
        self.tx: Tx | None = None
        self.failed = False
        self.lock_timeout = (
            float(settings["lock_timeout"][:-2]) / 1000 if "lock_timeout" in settings else None
        )
        self.on_end: Callable[[], None] = lambda: None

    def end(self) -> None:
        """Its transaction is rolled back and its locks are free."""
        if not self.alive:
            return
        self.alive = False
        server = self.server
        del server.sessions[self.pid]
        if self.tx is not None:
            self.tx.rollback()
            self.tx = None
        for name in [name for name, pid in server.locks.items() if pid == self.pid]:
            del server.locks[name]
        self.on_end()


class Server:
    """Postgres, as far as the engine can see it."""

    def __init__(self, world: World, broken: frozenset[str], *, ahead: float = 0.0) -> None:
        self.world = world
        self.ahead = ahead
        """Seconds by which its clock differs from the world's."""
        self.tables = Tables()
        self.sessions: dict[int, Session] = {}
        self.locks: dict[str, int] = {}
        self.up = True
        self._pids = 100
        self._claims = 0
        self.scene = Scene(broken, self._new_claim, self.locks)
        self.scene.started_at = -3600 * SECOND
        self._waiting: list[tuple[Session, Request]] = []
        self._trying = False
        self.tables.unlocked = self._retry_soon
        self.tables.slot_freed = lambda tx, row: expect_slot(tx, str(slot_of(row)))

    def now(self) -> int:
        return round((self.world.now + self.ahead) * SECOND)

    def open_session(self, settings: Mapping[str, str]) -> Session:
        self._pids += 1
        session = self.sessions[self._pids] = Session(self, self._pids, settings)
        return session

    def stop(self) -> None:
        """An immediate stop: everything committed is kept, every session ends."""
        self.up = False
        self.world.log("server", "stop")
        for session in list(self.sessions.values()):
            session.end()

    def start(self) -> None:
        """It may be up again already, because the faults have ended: sessions that are open have seen no start."""
        if self.up:
            return
        self.up = True
        self.scene.started_at = self.now()
        self.world.log("server", "start")

    # -- requests

    def receive(self, session: Session, request: Request) -> None:
        """Run a request; reply now, or when a lock is free or its time-out is over."""
        if request.ended or not session.alive:
            return
        if request.cancelled:
            self._answer(session, request, refusal("57014", "canceling statement due to user request"))
            return
        first = request.began < 0
        if first:
            request.began = self.now()
        self._trying = True
        try:
            reply = self._run(session, request)
        except Blocked as blocked:
            self._trying = False  # what it locked and let go again is as it was: nobody need try again
            if first and session.lock_timeout is not None:
                row = blocked.row
                self.world.after(session.lock_timeout, lambda: self._time_out(session, request, row))
            self._waiting.append((session, request))
        except NotYet as later:
            self._trying = False
            self.world.after(later.seconds, lambda: self.receive(session, request))
        except psycopg.Error as exc:
            self._tried()
            self._answer(session, request, exc)
        else:
            self._tried()
            self._answer(session, request, reply)

    def _tried(self) -> None:
        self._trying = False
        self._retry_soon()

    def cancel(self, session: Session, request: Request) -> None:
        """A cancel request: hits a statement that waits or has not begun; the rest is done already."""
        request.cancelled = True
        if (session, request) in self._waiting:
            self._waiting.remove((session, request))
            self._answer(session, request, refusal("57014", "canceling statement due to user request"))

    def _time_out(self, session: Session, request: Request, row: int) -> None:
        if not request.ended and (session, request) in self._waiting:
            self._waiting.remove((session, request))
            self._answer(session, request, refusal("55P03", f"lock of row {row} not available"))

    def _answer(self, session: Session, request: Request, reply: Reply) -> None:
        request.ended = True
        if isinstance(reply, Exception) and session.tx is not None:
            session.failed = True
        if session.alive:
            request.reply(reply)

    def _retry_soon(self) -> None:
        if self._waiting and not self._trying:
            self.world.after(0.0, self._retry)

    def _retry(self) -> None:
        waiting, self._waiting = self._waiting, []
        for session, request in waiting:
            self.receive(session, request)

    def _run(self, session: Session, request: Request) -> list[Result] | str:
        if request.command is not None:
            return self._command(session, request.command)
        if session.tx is None:
            tx = Tx(self.tables, request.began)
            try:
                results = self._statements(session, tx, request)
                tx.commit()
            except BaseException:
                tx.rollback()
                raise
            return results
        if session.failed:
            raise refusal("25P02", "current transaction is aborted")
        mark = session.tx.mark()
        try:
            return self._statements(session, session.tx, request)
        except BaseException:
            session.tx.back_to(mark)
            raise

    def _statements(self, session: Session, tx: Tx, request: Request) -> list[Result]:
        scene = self.scene
        scene.backend = session.pid
        tx.clock = self.now()
        for statement, _ in request.calls:
            if statement.name not in MEANINGS:
                raise Violation("model", f"tests/simulation does not know what {statement.name}.sql means")
        return [
            Result(MEANINGS[statement.name](scene, tx, params), "")
            for statement, params in request.calls
        ]  # fmt: skip

    def _command(self, session: Session, command: str) -> str:
        if command.startswith("BEGIN"):
            session.tx, session.failed = Tx(self.tables, self.now()), False
            return "BEGIN"
        tx, failed = session.tx, session.failed
        session.tx, session.failed = None, False
        if tx is not None and command == "COMMIT" and not failed:
            tx.commit()
            return "COMMIT"
        if tx is not None:
            tx.rollback()
        return "ROLLBACK"

    def _new_claim(self) -> str:
        self._claims += 1
        return f"claim-{self._claims}"

    # -- somebody else's work

    def hold_rows(self, numbers: list[int]) -> Callable[[], None]:
        """A caller's open transaction that has locked these rows; returns how it ends."""
        tx = Tx(self.tables, self.now())
        for number in numbers:
            if not tx.is_locked(number):
                tx.lock(number)
        return tx.rollback

    def row(self, number: int) -> Any:
        return self.tables.rows[number]
