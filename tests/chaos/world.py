"""The world of one run: its Postgres, its worker processes, its randomness, and a count of what was done to it.

Nemeses act on it (`tests.chaos.nemeses`); `tests.chaos.run` makes one per run and judges what is left of it.
"""

from __future__ import annotations

import itertools
import random
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, LiteralString

import attrs
import psycopg
import trio
from durable_actors._postgres.embedded.server import EmbeddedServer
from psycopg.conninfo import make_conninfo
from tests.chaos.workload import default_level
from tests.chaos.zygote import Forked, Zygote
from tests.invariants.effect_log import EffectLog
from tests.support.faults import FaultProxy

LEASE = 1.5
"""Seconds: `lease_ttl` of every worker."""
BLOCK = LEASE * 1.4
"""Seconds for which a step blocks the loop, when it is told to."""
JOURNAL = "DURABLE_CHAOS_JOURNAL"
"""Tells a worker at which level it records what its steps insert. In the environment: workers of the release before
have no option for it."""
REAP = 0.4
"""Seconds: `reap_interval` of every worker."""
DEAD_AFTER = 0.8
"""Seconds: `dead_after` of every worker."""
LOOK = 0.02
"""Seconds between looks at whether anybody serves."""
RESPAWN = 0.3
"""Seconds until a worker that could not start is tried again."""


@attrs.frozen
class Place:
    """Where a run's Postgres is."""

    dsn: str
    """Into the run's own database; with several hosts where there are several servers."""
    server: EmbeddedServer | None = None
    """The run's own server; None: a shared one, which must not be hurt."""


@attrs.define(eq=False)
class WorkerProcess:
    """One worker process, and what the world expects of it."""

    name: str
    process: Forked
    log: Path
    ready: Path
    """There as soon as the worker serves."""
    kill_at: str = ""
    """The point at which it kills itself, if it was told to."""
    doomed: bool = False
    """Its end was asked for."""
    killed: bool = False
    """SIGKILL was sent by us."""
    stopped: bool = False
    """SIGSTOP was sent, and no SIGCONT since."""

    blocked_until: float = 0.0
    """Its event loop is blocked, or soon will be, until about then."""

    @property
    def alive(self) -> bool:
        """Whether the process runs, stopped or not."""
        return self.process.poll() is None

    @property
    def serving(self) -> bool:
        """Whether it is there, ready, awake, and nobody has told it to go."""
        blocked = trio.current_time() < self.blocked_until
        return self.alive and not (self.doomed or self.stopped or blocked) and self.ready.exists()

    def is_stopped(self) -> bool:
        """Whether the kernel has stopped it, by whomever it was asked to (Linux)."""
        try:
            status = Path(f"/proc/{self.process.pid}/stat").read_text()
        except FileNotFoundError:
            return False
        return status.rpartition(")")[2].split()[0] == "T"

    def send(self, number: signal.Signals) -> None:
        """Send a signal, if it still runs."""
        if self.alive:
            self.process.send_signal(number)


@attrs.define(eq=False, kw_only=True)
class World:
    """One run."""

    seed: int
    rng: random.Random
    """The nemesis's; workload and workers have their own, from the same seed."""
    folder: Path
    """Of this run: logs, effect files, records of the senders."""
    place: Place
    proxy: FaultProxy | None = None
    outages: bool = False
    """Workers may fail to start: Postgres is away at times."""
    worker_options: tuple[str, ...] = ()
    nursery: trio.Nursery
    zygote: Zygote
    """Forks workers and senders."""
    log: EffectLog
    """Tell it what you do to processes and to Postgres (paused, resumed, outage, recovered, sessions_lost), before you
    do it: what nobody could prevent is not blamed on the engine. `stop` and `resume` do so by themselves."""
    until: float = 0.0
    """Trio's time at which faults end."""
    faults: Counter[str] = attrs.field(factory=Counter)
    """What was done, by kind."""
    workers: list[WorkerProcess] = attrs.field(factory=list)
    """Every worker there ever was."""
    failures: list[str] = attrs.field(factory=list)
    """What must not be: workers that ended without being told to, and what nemeses find."""
    story: list[str] = attrs.field(factory=list)
    """What happened when, for people."""
    lag: float = 0.0
    """By how many seconds this process itself was late at most: how loaded the machine is."""
    closing: bool = False
    """The run is over: whoever ends now is not replaced."""
    _depth: int = 0
    _numbers: Iterator[int] = attrs.field(factory=lambda: itertools.count(1))
    _began: float = attrs.field(factory=trio.current_time)

    # -- places

    @property
    def dsn(self) -> str:
        """The direct way to the database: for looking, and for hurting it."""
        return self.place.dsn

    @property
    def worker_dsn(self) -> str:
        """The way of workers and senders."""
        return self.place.dsn if self.proxy is None else self.proxy.dsn

    async def query(
        self, statement: LiteralString, params: Any = None, *, dsn: str | None = None
    ) -> list[tuple[Any, ...]]:
        """Run one statement on a fresh direct connection and return its rows (none for a command)."""

        def work() -> list[tuple[Any, ...]]:
            with psycopg.connect(
                dsn or self.dsn, autocommit=True, application_name="chaos", connect_timeout=5
            ) as conn:
                cursor = conn.execute(statement, params)
                return cursor.fetchall() if cursor.description is not None else []

        return await trio.to_thread.run_sync(work)

    # -- time and tale

    @property
    def over(self) -> bool:
        """Whether the time for faults is over."""
        return trio.current_time() >= self.until

    async def pause(self, least: float, most: float) -> bool:
        """Wait for a random time, not past the end; False when the time for faults is over."""
        await trio.sleep(min(self.rng.uniform(least, most), max(0.0, self.until - trio.current_time())))
        return not self.over

    def count(self, kind: str, about: str = "", number: int = 1) -> None:
        """Note a fault that was injected."""
        self.faults[kind] += number
        self.tell(f"{kind} {about}".rstrip())

    def fail(self, text: str) -> None:
        """Let the run fail."""
        self.failures.append(text)
        self.tell(f"FAILURE: {text}")

    def tell(self, text: str) -> None:
        """Note what happened, with the time."""
        self.story.append(f"{trio.current_time() - self._began:7.3f}  {text}")

    # -- times in which nobody can work

    def outage(self) -> None:
        """From now on nobody can work: before Postgres is stopped or cut off. May be nested."""
        self._depth += 1
        if self._depth == 1:
            self.log.outage()

    def recovered(self) -> None:
        """That is over: after Postgres takes connections again."""
        self._depth -= 1
        if self._depth == 0:
            self.log.recovered()

    async def watch_outages(self) -> None:
        """Note the times in which no worker serves (all killed, stopped, blocked), and our own lag. Endless."""
        away, last = False, trio.current_time()
        while True:
            now = trio.current_time()
            self.lag, last = max(self.lag, now - last - LOOK), now
            serves = any(each.serving for each in self.workers)
            if serves is away:
                away = not serves
                (self.outage if away else self.recovered)()
            await trio.sleep(LOOK)

    # -- workers

    @property
    def alive(self) -> list[WorkerProcess]:
        """The workers that run now, stopped ones included."""
        return [each for each in self.workers if each.alive]

    def pick(self) -> WorkerProcess | None:
        """A worker that serves, at random; None when there is none just now."""
        serving = [each for each in self.workers if each.serving]
        return self.rng.choice(serving) if serving else None

    async def spawn(
        self,
        *options: str,
        replace: bool = True,
        kill_at: str = "",
    ) -> WorkerProcess:
        """Start a worker. With `replace`, another one with the world's options follows when it ends.

        `kill_at` names a point and how often it is passed: `"step:3"` (tests.chaos.points has the list).
        """
        number = next(self._numbers)
        name = f"w{number}"
        log, ready = self.folder / f"{name}.log", self.folder / f"{name}.ready"
        arguments = [
            *("--node", name, "--dsn", make_conninfo(self.worker_dsn, application_name=name)),
            *("--effects", str(self.folder / f"{name}.jsonl"), "--ready", str(ready)),
            *("--seed", str(self.seed * 1000 + number), *self.worker_options, *options),
            *(("--kill-at", kill_at) if kill_at else ()),
        ]
        # In the list before anything else is awaited: a worker that nobody knows would outlive the run.
        level = {JOURNAL: default_level(self.seed)}
        process = await self.zygote.fork("tests.chaos.worker", arguments, log, level)
        worker = WorkerProcess(name, process, log, ready, kill_at.partition(":")[0])
        self.workers.append(worker)
        self.tell(f"start {name} {' '.join(options)}".rstrip())
        self.nursery.start_soon(self._watch, worker, replace)
        return worker

    def kill(self, worker: WorkerProcess, kind: str = "SIGKILL") -> None:
        """SIGKILL; another worker takes its place."""
        worker.doomed = worker.killed = True
        worker.send(signal.SIGKILL)
        self.count(kind, worker.name)

    def stop(self, worker: WorkerProcess) -> None:
        """SIGSTOP: it neither works nor renews, and does not know."""
        worker.stopped = True
        self.log.paused(worker.process.pid)
        worker.send(signal.SIGSTOP)
        self.count("SIGSTOP", worker.name)

    def resume(self, worker: WorkerProcess) -> None:
        """SIGCONT."""
        worker.stopped = False
        self.log.resumed(worker.process.pid)
        worker.send(signal.SIGCONT)
        self.tell(f"SIGCONT {worker.name}")

    def block(self, worker: WorkerProcess) -> None:
        """Its next step blocks its event loop for longer than a lease."""
        worker.blocked_until = trio.current_time() + BLOCK + 0.5  # as soon as a step begins
        worker.send(signal.SIGUSR1)
        self.count("blocked loop", worker.name)

    def terminate(self, worker: WorkerProcess, kind: str = "SIGTERM") -> None:
        """SIGTERM: it drains and ends; another worker takes its place."""
        worker.doomed = True
        worker.send(signal.SIGTERM)
        self.count(kind, worker.name)

    async def _watch(self, worker: WorkerProcess, replace: bool) -> None:
        code = await worker.process.wait()
        self.tell(f"ended {worker.name}: {code}")
        if worker.kill_at and code == -signal.SIGKILL and not worker.killed:
            worker.doomed = True
            self.count(f"killed at {worker.kill_at}", worker.name)
        if not worker.doomed and not self.closing:
            if worker.ready.exists() or not self.outages:
                text = worker.log.read_text(errors="replace")
                self.fail(f"{worker.name} ended by itself with {code}: {text[-2000:]}")
            else:
                self.tell(f"{worker.name} could not start")
                await trio.sleep(RESPAWN)
        if replace and not self.closing:
            await self.spawn()
