"""One schedule of small nodes: its plan in one Trio run; then the faults end, and everything must be as it must be."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import trio
import trio._core._run as trio_run
from durable_actors._store.commands import Command, plan_command
from durable_actors._store.dialogues import RETRY, CarriedOut, cancelling, carrying_out, run_dialogue
from durable_actors._store.insert import insert_instances
from durable_actors._store.signal import plan_signal, send_signals
from durable_actors.errors import NoTarget
from durable_actors.machine import plan_insert
from tests.simulation import workload
from tests.simulation.plan import Plan, Strike
from tests.simulation.process import Violation, World, current_process
from tests.simulation.run import EngineErrors, Report
from tests.simulation.server import Server
from tests.simulation.small.book import SmallBook
from tests.simulation.small.host import SCHEMA, Host, stoppable
from tests.simulation.small.wire import Lines, Network
from tests.simulation.tables import Row, Tx

BEGIN = 5000.0
"""Trio's time at the beginning: the nodes' clocks. The server's may differ from it (`skew`)."""
PATIENCE = 60.0
"""Virtual seconds after the last fault within which everything must have ended."""


class JumpClock(trio.abc.Clock):
    """Time stands still while anything can run, and then jumps to the next deadline."""

    def __init__(self) -> None:
        self.now = BEGIN

    def start_clock(self) -> None:
        pass

    def current_time(self) -> float:
        return self.now

    def deadline_to_sleep_time(self, deadline: float) -> float:
        """Trio asks when nothing can run. There is always a deadline: that of the whole schedule."""
        self.now = max(self.now, deadline)
        return 0.0


class TrioWorld(World):
    """A world whose clock and whose events are Trio's."""

    nursery: trio.Nursery

    def __init__(self, seed: int) -> None:
        self.clock = JumpClock()
        super().__init__(seed)

    @property  # type: ignore[override]
    def now(self) -> float:
        return self.clock.now - BEGIN

    @now.setter
    def now(self, seconds: float) -> None:
        """Trio's clock moves itself."""

    def at(self, when: float, call: Callable[[], None]) -> None:
        self.nursery.start_soon(self._later, when, call)

    async def _later(self, when: float, call: Callable[[], None]) -> None:
        await trio.sleep_until(BEGIN + when)
        call()


class SmallClient:
    """What the workload needs of a client."""

    def __init__(self, lines: Lines) -> None:
        self.lines = lines

    async def insert(self, machine: Any, **options: Any) -> int | None:
        async with self.lines.acquire("client") as conn:
            [number] = await insert_instances(
                conn,  # type: ignore[arg-type]
                SCHEMA,
                [plan_insert(machine.__durable__, options)],  # type: ignore[arg-type]
            )
        return number

    async def signal(self, target: int, name: str, payload: object, *, dedup_key: str) -> None:
        async with self.lines.acquire("client") as conn:
            [sent] = await send_signals(conn, SCHEMA, [plan_signal(target, name, payload, dedup_key)])  # type: ignore[arg-type]
        if sent.outcome == "no_target":
            raise NoTarget(name)

    async def cancel(self, target: int, *, force: bool, **about: Any) -> object:
        return await self._carry_out(partial(cancelling, force=force), target, plan_command(**about))

    async def retry(self, target: int, **about: Any) -> object:
        return await self._carry_out(partial(carrying_out, RETRY), target, plan_command(**about))

    async def _carry_out(self, dialogue: Callable[..., Any], target: int, command: Command) -> object:
        async with self.lines.acquire("client") as conn:
            done: CarriedOut = await run_dialogue(conn, dialogue(SCHEMA, target, command))  # type: ignore[arg-type]
        return done.result


class Land:
    """A plan on its way."""

    def __init__(self, plan: Plan, broken: frozenset[str]) -> None:
        self.plan = plan
        self.world = TrioWorld(plan.seed)
        self.server = Server(self.world, broken, ahead=BEGIN + plan.options["skew"])
        keepalive = max(1, int(plan.options["lease_ttl"] / 4)) * 3.0
        self.network = Network(self.world, self.server, plan.rates, keepalive)
        self.book = SmallBook(self.world, self.server, plan)
        self.server.tables.changed = self._changed
        self.hosts: list[Host] = []
        self._births = 0
        self._open = 0
        self._sent = False
        self.seconds = 0.0

    def fail(self, rule: str, text: str) -> None:
        self.book.fail(rule, text)
        self._look()

    def _changed(self, tx: Tx, old: Row | None, new: Row) -> None:
        self.book.changed(tx, old, new)
        if old is None:
            self._open += 1
        was = old is not None and old.terminal
        self._open += was - new.terminal
        self._look()

    def _look(self) -> None:
        if self.book.failure is not None or (self._sent and not self._open):
            self.done.set()

    # -- nodes

    def start(self, place: int) -> None:
        """Start a node in this place, as the next incarnation."""
        self._births += 1
        host = Host(self, f"node{place}.{self._births}")
        self.book.owners[host.name] = host  # type: ignore[assignment]
        self.world.log(host.name, "starts")
        self.hosts[place : place + 1] = [host]
        self.nursery.start_soon(host.run)

    def crash(self, host: Host, *, silent: bool = False, back_after: float = 0.2) -> None:
        if host.dead:
            return
        place = self.hosts.index(host)
        host.kill()
        self.network.killed(host, silent=silent)
        self.world.after(back_after, lambda: self.start(place))

    def ended(self, host: Host) -> None:
        """It has drained."""
        if host in self.hosts and not host.dead:
            place = self.hosts.index(host)
            self.world.after(0.2, lambda: self.start(place))

    def strike(self, strike: Strike) -> None:
        host, seconds, world = self.hosts[strike.node], strike.seconds, self.world
        world.log("strike", strike.fault, host.name, round(seconds, 3))
        self.book.counts[f"fault {strike.fault}"] += 1
        match strike.fault:
            case "crash" | "host":
                self.crash(host, silent=strike.fault == "host", back_after=0.1 + seconds)
            case "pause":
                host.pause()
                world.after(seconds, host.resume)
            case "cut":
                self.network.cut(host, seconds)
            case "restart":
                self.server.stop()
                world.after(seconds / 4, self.server.start)
            case "terminate":
                for session in list(self.server.sessions.values()):
                    if world.random.random() < 0.5:
                        session.end()
            case "lock":
                rows = [number for number in self.server.tables.rows if world.random.random() < 0.5]
                world.after(seconds, self.server.hold_rows(rows))
            case "drain":
                host.drain()
            case "bug":
                host.crash_one(world.random.random())

    async def _faults(self) -> None:
        for strike in sorted(self.plan.strikes, key=lambda each: each.at):
            await trio.sleep_until(BEGIN + strike.at)
            self.strike(strike)
        await trio.sleep_until(BEGIN + self.plan.lasts)
        self.world.log("calm")
        self.book.check_journal()  # many instances are on their way
        self.network.calm()
        if not self.server.up:
            self.server.start()
        for host in self.hosts:
            host.resume()

    # -- the client

    async def _client(self) -> None:
        client: Any = Host(self, "client")
        current_process.set(client)
        lines = SmallClient(Lines(self.network, client))
        async with trio.open_nursery() as nursery:
            for item in self.plan.items:
                nursery.start_soon(workload.submit, lines, item)
            for orders in workload.by_target(self.plan):
                nursery.start_soon(workload.command, lines, orders)
        self._sent = True
        self._look()

    # -- all of it

    async def run(self, patience: float) -> None:
        self.done = trio.Event()
        with trio.move_on_after(self.plan.lasts + patience):
            async with trio.open_nursery() as nursery:
                self.nursery = self.world.nursery = nursery
                for place in range(self.plan.nodes):
                    self.start(place)
                nursery.start_soon(self._client)
                nursery.start_soon(self._faults)
                try:
                    await self.done.wait()
                finally:
                    for host in self.hosts:
                        host.kill()
                nursery.cancel_scope.cancel()
        self.seconds = self.world.now
        if not self.done.is_set():
            stuck = [row for row in self.server.tables.rows.values() if not row.terminal]
            self.book.fail("I7", f"not everything has ended: {stuck or 'not everything was inserted'}")
        elif self.book.failure is None:
            workload.check_results(self.plan.items, self.server.tables.rows, self.book)
            self.book.check_journal()


@contextmanager
def quiet(errors: logging.Handler) -> Iterator[None]:
    """Take chance out of Trio's scheduler, and say nothing about the faults; an error is a bug of the engine's."""
    log = logging.getLogger("durable_actors")
    level, allowed = log.level, trio_run._ALLOW_DETERMINISTIC_SCHEDULING
    state = trio_run._r.getstate()
    log.setLevel(logging.ERROR)
    log.addHandler(errors)
    trio_run._ALLOW_DETERMINISTIC_SCHEDULING = True
    collects = gc.isenabled()
    gc.disable()  # a schedule leaves little garbage, and collections in its middle take a tenth of the time
    try:
        yield
    finally:
        if collects:
            gc.enable()
        log.removeHandler(errors)
        log.setLevel(level)
        trio_run._ALLOW_DETERMINISTIC_SCHEDULING = allowed
        trio_run._r.setstate(state)


def simulate(plan: Plan, broken: frozenset[str] = frozenset(), *, patience: float = PATIENCE) -> Report:
    """Run a schedule to its end, or to its first violation. The same plan gives the same history."""
    land = Land(plan, broken)
    errors = EngineErrors(land.book)
    with quiet(errors), stoppable():
        trio_run._r.seed(plan.seed)
        try:
            trio.run(land.run, patience, clock=land.world.clock)
        except Exception as exc:
            error: BaseException = exc
            while isinstance(error, BaseExceptionGroup):
                error = error.exceptions[0]
            rule = error.rule if isinstance(error, Violation) else "internal error"
            land.book.fail(rule, repr(error))
    return Report(plan, land.book.failure, land.world.history, land.book.counts, land.seconds)
