"""Connections of small nodes: what the store's functions call, and what a message may meet on its way.

Late, refused, lost before or after it was carried out, carried out after the client has given it up; a node that is cut
off, stopped or dead; a server that restarts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from random import Random
from typing import TYPE_CHECKING, Any

import trio
from durable_actors._postgres.driver.statement import Params, Result, Statement
from durable_actors._postgres.driver.transaction import Transaction
from durable_actors.errors import CommitUnknown, StoreUnavailable
from tests.simulation.driver import REFUSALS, Rates
from tests.simulation.process import Violation, World
from tests.simulation.server import Reply, Request, Server, Session, refusal

if TYPE_CHECKING:
    from tests.simulation.small.host import Host

SETTINGS: Mapping[str, str] = {"lock_timeout": "100ms"}
SIZES = {"client": 4}
"""Connections of a lane; of the others there is one."""
STORM = 600
"""Messages of one schedule, and per ten seconds of it: usual are 50 to 200; more is a loop that never sleeps."""


class Lost(Exception):
    """The connection is gone; nobody can tell whether the message was carried out."""


class Network:
    """Everything between the nodes and the server."""

    def __init__(self, world: World, server: Server, rates: Rates, keepalive: float) -> None:
        self.world = world
        self.server = server
        self.rates = rates
        self.keepalive = keepalive
        """Seconds until the server gives up a session whose host is silent."""
        self.random: Random = world.random
        self.messages = 0
        self._cut: dict[str, float] = {}

    def calm(self) -> None:
        self.rates = Rates(lag=self.rates.lag)
        self._cut.clear()

    def cut(self, host: Host, seconds: float) -> None:
        """Nothing passes for a while; a server that hears nothing for long gives the sessions up."""
        self._cut[host.name] = self.world.now + seconds
        for line in list(host.lines):
            self.world.after(self.keepalive, lambda line=line: self._give_up(host, line))

    def _give_up(self, host: Host, line: Line) -> None:
        if self.is_cut(host):
            line.session.end()

    def is_cut(self, host: Host) -> bool:
        return self._cut.get(host.name, 0.0) > self.world.now

    def killed(self, host: Host, *, silent: bool) -> None:
        """Its kernel closes the sockets; a host that is gone closes nothing. What was sent may still arrive."""
        for line in list(host.lines):
            self.world.after(self.keepalive if silent else 0.05, line.session.end)

    def fate(self) -> str | None:
        """What a message meets."""
        rates, chance = self.rates, self.random.random()
        if chance < rates.refused:
            return "refused"
        chance -= rates.refused
        if chance < rates.lost_request:
            return "lost"
        return "mute" if chance - rates.lost_request < rates.lost_reply else None

    async def travel(self, host: Host) -> None:
        """From the node to the server, or back. Most messages take no time, only their turn."""
        self.messages += 1
        if self.messages > STORM * (1.0 + self.world.now / 10.0):
            host.land.fail("storm", f"{self.messages} messages for so little work")
            await trio.sleep_forever()
        if self.is_cut(host):
            await trio.sleep(self._cut[host.name] - self.world.now)
            if self.random.random() < 0.5:
                raise Lost
        rates, chance = self.rates, self.random.random()
        if chance < rates.slow:
            await trio.sleep(self.random.random() * rates.delay)
        elif chance < 0.7 or not rates.lag:
            await trio.lowlevel.checkpoint()
        else:
            # On a grid: what arrives at one instant arrives in an order that only the seed decides.
            await trio.sleep_until((trio.current_time() // rates.lag + 1.0) * rates.lag)

    def straggle(self, host: Host, session: Session, request: Request) -> None:
        """It was on its way when the client gave up, and arrives later."""
        orphan = Request(request.calls, request.command, lambda _: None)

        def arrive() -> None:
            if session.alive:
                self.server.receive(session, orphan)
                session.end()

        begin = max(self.world.now, self._cut.get(host.name, 0.0))
        self.world.at(begin + self.random.random() * self.rates.delay, arrive)


class Line:
    """One connection: `PgConn` as the store's functions use it."""

    def __init__(self, network: Network, host: Host, session: Session) -> None:
        self.network, self.host, self.session = network, host, session
        self.in_transaction = self.closed = self.broken = self.pooled = False
        self.preamble: list[Any] = []
        self.opened_at = network.world.now
        self._reply: Reply | None = None
        self._event: trio.Event | None = None
        session.on_end = self._wake
        host.lines.append(self)

    @property
    def pristine(self) -> bool:
        return self.session.tx is None

    def alive(self) -> bool:
        """As far as the node can see: that the server has closed it, a node that is cut off learns later."""
        return not self.closed and (self.session.alive or self.network.is_cut(self.host))

    def close(self, *, later: bool = False) -> None:
        """`later`: a message is still on its way, and ends the session. That of a dead host, its kernel ends."""
        if self.closed:
            return
        self.closed = True
        self.host.lines.remove(self)
        if later or self.host.dead:
            return
        if self.network.is_cut(self.host):
            self.network.world.after(self.network.keepalive, self.session.end)
        else:
            self.session.end()

    async def run(self, statement: Statement, params: Params = ()) -> Result:
        if (
            statement.name == "touch_node"
        ):  # for people: nothing depends on it, and it is a tenth of all messages
            return Result([], "")
        commits = not (statement.read_only or self.in_transaction)
        found: list[Result] = await self._ask([(statement, params)], None, commits=commits)
        return found[0]

    async def batch(self, calls: Iterable[tuple[Statement, Params]]) -> list[Result]:
        listed = list(calls)
        commits = not (self.in_transaction or all(statement.read_only for statement, _ in listed))
        found: list[Result] = await self._ask(listed, None, commits=commits)
        return found

    async def command(self, sql: str, *, commits: bool = False) -> Any:
        return await self._ask([], sql, commits=commits)

    def transaction(self) -> Transaction[Line]:
        return Transaction(self, "BEGIN")

    async def _ask(self, calls: list[tuple[Statement, Params]], command: str | None, *, commits: bool) -> Any:
        host, network = self.host, self.network
        if not self.alive():
            self.close()
            raise StoreUnavailable("the connection was gone before it was sent")
        self._reply = None
        request = Request(calls, command, self._settle)
        task = trio.lowlevel.current_task()
        host.on_wire.add(task)
        try:
            reply = await self._exchange(request)
            if network.random.random() < network.rates.slow:
                await trio.sleep(network.random.random() * network.rates.delay)
            if host.paused:
                await host.awake()
        except Lost:
            if host.paused:
                await host.awake()
            self._abandon(request)
            text = "the connection was lost"
            raise (CommitUnknown(text) if commits else StoreUnavailable(text)) from None
        except trio.Cancelled:
            if host.paused:  # it learns that when it goes on, and its session is there until then
                with trio.CancelScope(shield=True):
                    await host.awake()
            self._abandon(request)
            raise
        finally:
            host.on_wire.discard(task)
        if isinstance(reply, Exception):
            raise reply
        return reply

    async def _exchange(self, request: Request) -> Reply:
        fate = self.network.fate()
        await self.network.travel(self.host)
        if not self.session.alive or fate == "lost":
            raise Lost
        if fate == "refused":
            self.session.failed = self.session.tx is not None
            request.ended = True
            return self._refusal()
        try:
            self.network.server.receive(self.session, request)
        except Violation as exc:  # not for the step that asked
            self.host.land.fail(exc.rule, str(exc))
            raise
        if self._reply is None:  # a row lock is in its way
            self._event = trio.Event()
            await self._event.wait()
        if self._reply is None or fate == "mute":
            raise Lost
        return self._reply

    def _refusal(self) -> Exception:
        code = self.network.random.choice(REFUSALS)
        return StoreUnavailable(code) if code.startswith("53") else refusal(code, "injected")

    def _abandon(self, request: Request) -> None:
        """Give the connection up. What is not done may still be, unless it was part of a transaction."""
        network = self.network
        if request.ended:
            self.close()
        elif request.began >= 0:
            network.server.cancel(self.session, request)
            self.close()
        else:
            writes = not all(statement.read_only for statement, _ in request.calls)
            later = writes and not self.in_transaction and network.random.random() < 0.5
            if later:
                network.straggle(self.host, self.session, request)
            self.close(later=later)

    def _settle(self, reply: Reply) -> None:
        self._reply = reply
        self._wake()

    def _wake(self) -> None:
        if self._event is not None:
            self._event.set()


class Lines:
    """A node's connections: what its parts take for the pool. As many per lane as the lane has."""

    def __init__(self, network: Network, host: Host) -> None:
        self.network, self.host = network, host
        self.idle: dict[str, list[Line]] = {}
        self.places: dict[str, trio.Semaphore] = {}

    def acquire(
        self, lane: str, *, within: float | None = None, on_line: Callable[[], object] | None = None
    ) -> Lease:
        return Lease(self, lane)

    async def open(self, lane: str) -> Line:
        if lane not in self.places:
            self.places[lane] = trio.Semaphore(SIZES.get(lane, 1))
            self.idle[lane] = []
        try:
            self.places[lane].acquire_nowait()
        except trio.WouldBlock:
            await self.places[lane].acquire()
        try:
            return await self._open(self.idle[lane])
        except BaseException:
            self.places[lane].release()
            raise

    async def _open(self, idle: list[Line]) -> Line:
        while idle:
            line = idle.pop()
            if line.alive():
                return line
            line.close()
        if self.host.dead:
            await trio.sleep_forever()  # what unwinds is shielded for a while, and reaches nobody
        if not self.network.server.up:
            await trio.lowlevel.checkpoint()
            raise StoreUnavailable("cannot connect: connection refused")
        return Line(self.network, self.host, self.network.server.open_session(SETTINGS))


class Lease:
    """One use of a connection."""

    __slots__ = ("_lane", "_line", "_lines")

    def __init__(self, lines: Lines, lane: str) -> None:
        self._lines, self._lane = lines, lane

    async def __aenter__(self) -> Line:
        self._line = await self._lines.open(self._lane)
        return self._line

    async def __aexit__(self, *exc: object) -> None:
        line, lines = self._line, self._lines
        if not line.closed and line.pristine:
            lines.idle[self._lane].append(line)
        else:
            line.close()
        lines.places[self._lane].release()
