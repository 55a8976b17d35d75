"""The client's end of a connection, and the network between: `PgConn` as the pool and the store use it.

What a request may meet: latency, a late reply, a request that is lost with its connection, a reply that is lost after
the commit, a connection that falls silent, a refusal, a partition of its whole process, a server that is gone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import attrs
import outcome
import trio
from durable_actors._postgres.driver.statement import Params, Result, Statement
from durable_actors._postgres.driver.transaction import Transaction
from durable_actors._postgres.driver.waiting import CANCEL_TIMEOUT
from durable_actors.errors import CommitUnknown, StoreUnavailable
from tests.simulation.process import Process, World, current_process
from tests.simulation.server import Reply, Request, Server, Session, refusal

REFUSALS = ("40P01", "57014", "53200", "53100")
"""Deadlock, statement timeout, out of memory, disk full: nothing was done, the connection lives."""

SILENCE = 30.0
"""Seconds until the kernel gives a connection up whose other end no longer answers; `tcp_user_timeout`."""


@attrs.frozen
class Rates:
    """How often a request meets what; zero once the faults are over."""

    slow: float = 0.0
    lost_request: float = 0.0
    lost_reply: float = 0.0
    silent: float = 0.0
    refused: float = 0.0
    lag: float = 0.002
    """Seconds of latency, one way, at most, when nothing is wrong."""
    delay: float = 2.0
    """Seconds that a slow message takes at most."""


class Network:
    """Everything between clients and the server."""

    def __init__(self, world: World, server: Server, rates: Rates, keepalive: float) -> None:
        self.world = world
        self.server = server
        self.rates = rates
        self.keepalive = keepalive
        """Seconds until the server gives up a session whose host is silent."""
        self.cut: dict[str, float] = {}
        """Processes that cannot reach the server, until when."""
        self.conns: list[SimConn] = []
        self.random = world.random
        self.looks: Counter[Process] = Counter()
        """How often each process asked for work."""

    def calm(self) -> None:
        self.rates = Rates()
        self.cut.clear()

    def latency(self) -> float:
        rates, draw = self.rates, self.random.random
        if rates.slow and draw() < rates.slow:
            return draw() * rates.delay
        return 0.0001 + draw() * rates.lag

    def is_cut(self, process: Process) -> float | None:
        until = self.cut.get(process.name, 0.0)
        return until if until > self.world.now else None

    def partition(self, process: Process, seconds: float) -> None:
        """Nothing passes for a while; a server that hears nothing for long gives the sessions up."""
        self.cut[process.name] = self.world.now + seconds
        for conn in [each for each in self.conns if each.process is process]:
            self.world.after(self.keepalive, lambda conn=conn: self._give_up(conn))

    def _give_up(self, conn: SimConn) -> None:
        if self.is_cut(conn.process) or conn.process.dead:
            conn.session.end()

    def killed(self, process: Process, *, host: bool) -> None:
        """Its kernel closes the sockets; a host that is gone closes nothing. What was sent still arrives."""
        delay = self.keepalive if host else 0.05
        for conn in [each for each in self.conns if each.process is process]:
            self.world.after(delay, conn.session.end)

    # -- connecting

    async def open(self, dsn: str, *, settings: Mapping[str, str] | None = None) -> SimConn:
        """What the pool calls instead of `PgConn.open`."""
        process = current_process.get()
        if process.dead:
            raise StoreUnavailable("this process is dead")
        until = self.is_cut(process)
        if until is not None:
            await trio.sleep(until - self.world.now)
        await trio.sleep(self.latency() * 3)
        if not self.server.up or process.dead:
            raise StoreUnavailable("cannot connect to Postgres: connection refused")
        rates = self.rates
        if rates.refused and self.random.random() < rates.refused:
            raise StoreUnavailable("cannot connect to Postgres: too many clients")
        conn = SimConn(self, process, self.server.open_session(settings or {}))
        self.conns.append(conn)
        return conn

    # -- messages

    def send(self, conn: SimConn, request: Request) -> None:
        draw, rates = self.random.random, self.rates
        if request.name == "read_queue":
            self.looks[conn.process] += 1
        if rates.refused and draw() < rates.refused:
            code = self.random.choice(REFUSALS)
            error: Exception = refusal(code, "injected")
            if code.startswith("53"):
                error = StoreUnavailable(f"Postgres cannot serve now ({code})")
            self.world.after(self.latency(), lambda: self._refuse(conn, request, error))
            return
        chance = draw()
        if chance < rates.lost_request:
            self.world.after(self.latency(), lambda: self._lose(conn, request))
        elif chance < rates.lost_request + rates.silent:
            if draw() < 0.5:
                self.world.after(self.latency(), lambda: self.server.receive(conn.session, request))
            request.reply = lambda _: None
            self.world.after(SILENCE, lambda: conn.process.deliver(conn.lose))
        else:
            if chance < rates.lost_request + rates.silent + rates.lost_reply:
                request.reply = lambda _: self._lose(conn, request)
            self.world.after(self.latency(), lambda: self._arrive(conn, request))

    def _refuse(self, conn: SimConn, request: Request, error: Exception) -> None:
        if not request.ended and conn.session.alive:
            request.ended = True
            conn.session.failed = conn.session.tx is not None
            request.reply(error)

    def _arrive(self, conn: SimConn, request: Request) -> None:
        until = None if conn.process.dead else self.is_cut(conn.process)
        if until is None:
            self.server.receive(conn.session, request)
        else:
            self._after_cut(conn, until, lambda: self._arrive(conn, request))

    def _after_cut(self, conn: SimConn, until: float, again: Any) -> None:
        """TCP repeats what was not acknowledged; or a middle box has forgotten the connection."""
        if self.random.random() < 0.5:
            self.world.at(until + self.latency(), again)
        else:
            self.world.at(until + self.latency(), lambda: self._lose(conn, None))

    def answer(self, conn: SimConn, reply: Reply) -> None:
        """The server's reply, on its way back."""
        self.world.after(self.latency(), lambda: self._come_back(conn, reply))

    def _come_back(self, conn: SimConn, reply: Reply) -> None:
        until = self.is_cut(conn.process)
        if until is None:
            conn.process.deliver(lambda: conn.finish(reply))
        else:
            self._after_cut(conn, until, lambda: self._come_back(conn, reply))

    def notice(self, conn: SimConn) -> None:
        """The server has closed it; the client hears of that when it can hear anything."""
        when = self.is_cut(conn.process) or self.world.now
        self.world.at(when + self.latency(), lambda: conn.process.deliver(conn.lose))

    def _lose(self, conn: SimConn, request: Request | None) -> None:
        """The connection breaks; the server notices now, or only a while later."""
        if request is not None:
            request.ended = True
        self.world.after(self.random.choice((0.0, 0.0, self.keepalive)), conn.session.end)
        conn.process.deliver(conn.lose)


class SimConn:
    """A connection, with the face of `PgConn`."""

    def __init__(self, network: Network, process: Process, session: Session) -> None:
        self.network = network
        self.process = process
        self.session = session
        self.in_transaction = False
        self.broken = False
        self.closed = False
        self.pooled = False
        self.preamble: list[tuple[Statement, Params]] = []
        self.opened_at = trio.current_time()
        self.pid = session.pid
        self._busy = False
        self._commits = False
        self._request: Request | None = None
        self._reply: outcome.Outcome[Any] | None = None
        self._task: trio.lowlevel.Task | None = None
        session.on_end = lambda: network.notice(self)

    @property
    def pristine(self) -> bool:
        return not self._busy and not self.closed and self.session.tx is None

    def alive(self) -> bool:
        if not self.closed and not self.session.alive and self.network.is_cut(self.process) is None:
            self.broken = True
            self.close()
        return not self.closed

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        if self in self.network.conns:
            self.network.conns.remove(self)
        if not self.process.dead:
            cut = self.network.is_cut(self.process) is not None
            self.network.world.after(self.network.keepalive if cut else 0.001, self.session.end)
        self._settle(outcome.Error(self._lost()))

    # -- statements

    async def run(self, statement: Statement, params: Params = ()) -> Result:
        commits = not (statement.read_only or self.in_transaction)
        return (await self._converse([(statement, params)], None, commits=commits))[0]

    async def batch(self, calls: Iterable[tuple[Statement, Params]]) -> list[Result]:
        listed = list(calls)
        if not listed:
            return []
        commits = not (self.in_transaction or all(statement.read_only for statement, _ in listed))
        return await self._converse(listed, None, commits=commits)

    async def command(self, sql: str, *, commits: bool = False) -> str:
        return await self._converse([], sql, commits=commits)

    def transaction(self, *, begin: str = "BEGIN") -> Transaction[SimConn]:
        return Transaction(self, begin)

    async def _converse(
        self, calls: list[tuple[Statement, Params]], command: str | None, *, commits: bool
    ) -> Any:
        if self.closed or self.process.dead:
            raise StoreUnavailable("the connection is closed; nothing was sent")
        if self._busy:
            raise trio.BusyResourceError("another task is using this connection")
        await trio.lowlevel.checkpoint_if_cancelled()
        if commits and not self.alive():
            raise StoreUnavailable("the server closed the connection before it was sent")
        self._busy, self._commits, self._reply = True, commits, None
        self._request = Request(calls, command, lambda reply: self.network.answer(self, reply))
        self.network.send(self, self._request)
        try:
            await self._wait()
        except trio.Cancelled:
            await self._salvage(self._request)
            raise
        finally:
            self._busy = False
        reply, self._reply = self._reply, None
        assert reply is not None
        return reply.unwrap()

    async def _wait(self) -> None:
        def abort(_: object) -> trio.lowlevel.Abort:
            self._task = None
            return trio.lowlevel.Abort.SUCCEEDED

        if self._reply is None:
            self._task = trio.lowlevel.current_task()
            await trio.lowlevel.wait_task_rescheduled(abort)

    async def _salvage(self, request: Request) -> None:
        """As `PgConn`: have the server stop, read the rest, within a bounded time; else close."""
        if self.process.dead:
            self.close()
            return
        if self.network.random.random() < 0.5:  # else it comes too late
            self.network.server.cancel(self.session, request)
        with trio.move_on_after(CANCEL_TIMEOUT, shield=True) as scope:
            await self._wait()
        if scope.cancelled_caught:
            self.broken = True
            self.close()

    def finish(self, reply: Reply) -> None:
        """The reply has come."""
        self._settle(outcome.Error(reply) if isinstance(reply, Exception) else outcome.Value(reply))

    def lose(self) -> None:
        """The connection is gone, and we notice."""
        if not self.closed:
            self.broken = True
            self.close()

    def _lost(self) -> StoreUnavailable:
        # Without any word of the server nobody knows; its own last words would prove "not done".
        if self._commits and self._busy:
            return CommitUnknown("the connection was lost after its commit was sent")
        return StoreUnavailable("the connection was lost, nothing was done")

    def _settle(self, reply: outcome.Outcome[Any]) -> None:
        if not self._busy or self._reply is not None:
            return
        self._reply = reply
        task, self._task = self._task, None
        if task is not None:
            trio.lowlevel.reschedule(task)
