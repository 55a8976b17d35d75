"""One schedule: build the world of a plan, let it happen, end the faults, see whether everything is as it must be."""

from __future__ import annotations

import hashlib
import logging
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import attrs
import psycopg
import trio
import trio._core._run as trio_run
from durable_actors import Config, Queue, StoreUnavailable, engine as engines
from durable_actors._client import Client
from durable_actors._engine import setup
from durable_actors._engine.committing.queue import Commits, PendingCommit
from durable_actors._engine.committing.verdicts import Verdict
from durable_actors._postgres.pool import pool as pools
from durable_actors._postgres.pool.lane import Lane
from durable_actors.machine import isolated_registry
from tests.simulation import workload
from tests.simulation.book import Book
from tests.simulation.driver import SILENCE, Network
from tests.simulation.plan import Plan, Strike, make_plan
from tests.simulation.process import Process, Violation, World
from tests.simulation.server import Server
from tests.simulation.tables import SHORT

PATIENCE = 120.0
"""Virtual seconds after the last fault within which everything must have ended: back-offs after crashes are long."""
STORM = 30.0
"""Looks for work per second and process, beside the polls that are due: more, for a handful of instances, is a loop.
Usual are 1 to 10; every step that ends causes two, and a hint up to four."""
FAREWELL = 60.0


@attrs.frozen
class Report:
    """What became of a schedule."""

    plan: Plan
    violation: Violation | None
    history: list[tuple[Any, ...]]
    counts: Counter[str]
    seconds: float
    """Virtual ones."""

    @property
    def digest(self) -> str:
        return hashlib.sha256(repr(self.history).encode()).hexdigest()


class EngineErrors(logging.Handler):
    """Errors that the engine logs are bugs of its own: users' errors go through `handle`."""

    def __init__(self, book: Book) -> None:
        super().__init__(logging.ERROR)
        self.book: Book | None = book

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if record.exc_info:
            text += f" {record.exc_info[1]!r}"
        process = workload.current_process.get(None)
        if self.book is not None and (process is None or not process.dead):
            self.book.fail("internal error", text)


class _Secrets:
    """Tokens that a seed repeats."""

    def __init__(self) -> None:
        self.serial = 0

    def token_hex(self, size: int) -> str:
        self.serial += 1
        return f"{self.serial:0{size * 2}x}"

    def token_bytes(self, size: int) -> bytes:
        return bytes(size)


def _told(answer: Callable[..., None]) -> Callable[..., None]:
    """Tell the book of every verdict."""

    def wrapper(self: Commits, pending: PendingCommit, verdict: Verdict | None, now: float) -> None:
        if pending.open:
            workload.book().judged(pending, verdict)
        answer(self, pending, verdict, now)

    return wrapper


@contextmanager
def _surroundings(network: Network, errors: EngineErrors, seed: int) -> Iterator[None]:
    """Put the simulated driver below the pool, and take chance out of everything else."""

    async def require_schema(conn: object, *, schema: str) -> None:
        await trio.lowlevel.checkpoint()

    log = logging.getLogger("durable_actors")
    level = log.level
    with ExitStack() as stack:
        stack.enter_context(isolated_registry())
        stack.enter_context(patch.object(pools, "PgConn", network))
        stack.enter_context(patch.object(engines, "require_schema", require_schema))
        stack.enter_context(patch.object(setup, "secrets", _Secrets()))
        stack.enter_context(patch.object(Commits, "answer", _told(Commits.answer)))
        stack.enter_context(patch.object(trio_run, "_ALLOW_DETERMINISTIC_SCHEDULING", True))
        state, trio_state = random.getstate(), trio_run._r.getstate()
        random.seed(seed)
        trio_run._r.seed(seed)
        log.addHandler(errors)
        log.setLevel(logging.ERROR)
        try:
            yield
        finally:
            log.setLevel(level)
            log.removeHandler(errors)
            random.setstate(state)
            trio_run._r.setstate(trio_state)


class Schedule:
    """A plan on its way."""

    def __init__(self, plan: Plan, broken: frozenset[str], patience: float) -> None:
        self.plan = plan
        self.patience = patience
        self.world = World(plan.seed)
        self.server = Server(self.world, broken)
        lease = plan.options["lease_ttl"]
        self.network = Network(self.world, self.server, plan.rates, keepalive=max(1, int(lease / 4)) * 3.0)
        self.book = Book(self.world, self.server, dead_after=plan.options["dead_after"])
        self.nodes: list[Process] = []
        self.over = False
        self.hints: Counter[Process] = Counter()
        self._births = 0

    # -- processes

    def start_node(self, place: int) -> None:
        """Start an engine in this place, as the next incarnation."""
        self._births += 1
        plan, name = self.plan, f"node{place}.{self._births}"
        config = Config(
            dsn="host=simulated", migrate=False, name=name, node=name, machines=workload.MACHINES,
            drain_on_cancel=False,
            queues={"default": Queue(plan.concurrency, prefetch=plan.prefetch, fair=plan.fair)},
            retention=SHORT, limits=workload.limits(plan), schedules=workload.clockwork(plan), **plan.options,
        )  # fmt: skip

        async def main(process: Any) -> None:
            process.book = self.book
            async with trio.open_nursery() as nursery:
                process.engine = await nursery.start(partial(engines.run_engine, config))
                self.book.owners[process.engine.incarnation] = process

        process = Process(self.world, name, main)
        process.on_end = partial(self._ended, process, place)
        self.world.log(name, "starts")
        if place < len(self.nodes):
            self.nodes[place] = process
        else:
            self.nodes.append(process)

    def _ended(self, process: Process, place: int) -> None:
        """It stopped by itself: asked to, or because there was no server to start with; else it is a bug."""
        self.world.log(process.name, "ended")
        error = process.error
        while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
            error = error.exceptions[0]
        starting = getattr(process, "engine", None) is None
        if error is not None and not (starting and isinstance(error, StoreUnavailable | psycopg.Error)):
            self.book.fail("engine died", f"{process.name}: {error!r}")
        if not self.over:
            self.world.after(0.3, partial(self._replace, process, place))

    def _replace(self, process: Process, place: int) -> None:
        if self.nodes[place] is process and not self.over:
            self.start_node(place)

    def start_client(self) -> None:
        async def main(process: Any) -> None:
            process.book = self.book
            async with pools.open_pool("host=simulated", lanes=[Lane("client", 2)]) as pool:
                client = Client("client", pool, "client", "durable")
                client.notify = self._notify
                await workload.run_client(process, client, self.plan)

        self.client = Process(self.world, "client", main)
        self.client.on_end = self._client_ended

    def _notify(self, queue: str, /, **hint: Any) -> None:
        """Some calls count as made in the process of a node: its feeder is told of them."""
        node = self.world.random.choice(self.nodes)
        engine = getattr(node, "engine", None)
        if engine is not None and self.world.random.random() < 0.5:
            self.hints[node] += 1
            self.world.after(0.0, partial(node.deliver, partial(engine._node.notify, queue, **hint)))

    def _client_ended(self) -> None:
        self.world.log("client", "ended")
        if self.client.error is not None:
            raise self.client.error

    # -- faults

    def strike(self, strike: Strike) -> None:
        if strike.node >= len(self.nodes):
            return
        node, world, seconds = self.nodes[strike.node], self.world, strike.seconds
        world.log("strike", strike.fault, node.name, round(seconds, 3))
        self.book.counts[f"fault {strike.fault}"] += 1
        match strike.fault:
            case "crash" | "host":
                self.network.killed(node, host=strike.fault == "host")
                node.kill()
                world.after(0.2 + seconds, partial(self._replace, node, strike.node))
            case "pause":
                node.pause()
                world.after(seconds, node.resume)
            case "cut":
                self.network.partition(node, seconds)
            case "restart":
                self.server.stop()
                world.after(seconds, self.server.start)
            case "terminate":
                for session in list(self.server.sessions.values()):
                    if world.random.random() < 0.5:
                        session.end()
            case "lock":
                rows = [number for number in self.server.tables.rows if world.random.random() < 0.5]
                world.after(seconds, self.server.hold_rows(rows))
            case "drain":
                engine = getattr(node, "engine", None)
                if engine is not None:
                    node.deliver(engine.request_stop)

    def calm(self) -> None:
        """The faults are over."""
        self.world.log("calm")
        self.book.check_journal()  # many instances are on their way
        self.network.calm()
        if not self.server.up:
            self.server.start()
        for place, node in enumerate(self.nodes):
            node.resume()
            if node.dead:
                self._replace(node, place)
        self.world.after(self._bound, self._look_for_stuck)

    @property
    def _bound(self) -> float:
        """Seconds after which a node that works has taken back what nobody owns: also if it waits for a deaf socket."""
        options = self.plan.options
        lease, interval = float(options["lease_ttl"]), float(options["reap_interval"])
        return lease + interval + self.network.keepalive + SILENCE + 3.0

    def _look_for_stuck(self) -> None:
        works = [
            node
            for node in self.nodes
            if not node.ended and not node.dead and node.started_at < self.world.now - self._bound
        ]
        over = [row for row in self.book.stuck() if row.lease < self.server.now() - 3_000_000]
        if works and over:
            self.book.fail("I12", f"executing without a live owner, long after its lease: {over[0]}")
        if not self.over:
            self.world.after(self._bound, self._look_for_stuck)

    # -- all of it

    def run(self) -> None:
        plan, world = self.plan, self.world
        for place in range(plan.nodes):
            self.start_node(place)
        self.start_client()
        for strike in plan.strikes:
            world.at(strike.at, partial(self.strike, strike))
        world.at(plan.lasts, self.calm)
        done = world.run(self._all_done, horizon=plan.lasts + self.patience)
        if self.book.failure is None and not done:
            stuck = [row for row in self.server.tables.rows.values() if not row.terminal]
            self.book.fail("I7", f"not everything has ended: {stuck or 'not everything was inserted'}")
        if self.book.failure is None:
            self._stop()
        if self.book.failure is None:
            self._check_results()

    def _all_done(self) -> bool:
        if self.book.failure is not None:
            return True
        if self.world.now < self.plan.lasts or not self.client.ended:
            return False
        return self.book.schedules_ended(self.plan) and all(
            row.terminal for row in self.server.tables.rows.values()
        )

    def _stop(self) -> None:
        """Drain every node: that must end, too, and leave nothing."""
        self.over = True
        for node in self.nodes:
            engine = getattr(node, "engine", None)
            if engine is not None and not node.ended:
                node.deliver(engine.request_stop)
            else:
                node.kill()

        def ended() -> bool:
            return self.book.failure is not None or all(node.ended or node.dead for node in self.nodes)

        if not self.world.run(ended, horizon=self.world.now + FAREWELL):
            self.book.fail("drain", "an engine that was asked to stop does not end")

    def _check_results(self) -> None:
        for process, looks in self.network.looks.items():
            polls = 1 / self.plan.options["poll_interval"]  # a second, beside what steps and hints cause
            allowed = (STORM + polls) * max(self.world.now - process.started_at, 2.0) + 4 * self.hints[
                process
            ]
            if looks > allowed:
                self.book.fail("storm", f"{process.name} asked for work {looks} times")
        workload.check_results(self.plan.items, self.server.tables.rows, self.book)
        self.book.check_journal()
        self.book.check_schedules()


def simulate(plan: Plan, broken: frozenset[str] = frozenset(), *, patience: float = PATIENCE) -> Report:
    """Run a schedule to its end, or to its first violation. The same plan gives the same history."""
    schedule = Schedule(plan, broken, patience)
    errors = EngineErrors(schedule.book)
    with _surroundings(schedule.network, errors, plan.seed):
        try:
            schedule.run()
        except Violation as exc:
            schedule.book.fail(exc.rule, str(exc))
        finally:
            errors.book = None
            schedule.world.end()
    book, world = schedule.book, schedule.world
    return Report(plan, book.failure, world.history, book.counts, world.now)


def simulate_seed(seed: int) -> Report:
    """One schedule by its seed; importable, for the processes of a pool."""
    return simulate(make_plan(seed))
