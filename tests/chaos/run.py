"""One run: a world is made, its work is sent, its nemesis acts, everything must end, and what is left is judged."""

from __future__ import annotations

import os
import random
import shutil
import signal
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Final

import attrs
import psycopg
import trio
from durable_actors._postgres.embedded import server as embedded
from durable_actors._store.migrate import migrate
from durable_actors.testing.database import SERVER_SETTINGS, DatabaseServer, throwaway_directory
from psycopg.conninfo import make_conninfo
from tests.chaos.judge import (
    dump,
    find_leftovers,
    judge_history,
    judge_journal,
    judge_rebuilt,
    judge_sums,
    judge_verified,
)
from tests.chaos.nemeses import Nemesis
from tests.chaos.onlooker import Onlooker
from tests.chaos.workload import SENDERS, make_plan
from tests.chaos.world import Place, World
from tests.chaos.zygote import Zygote
from tests.invariants.audit import install_audit
from tests.invariants.effect_log import EffectLog
from tests.invariants.history import Violation
from tests.support.faults import open_proxy

SECONDS: Final = 4.0
"""How long work is sent and faults are injected, unless told otherwise."""
START: Final = 30.0
"""Seconds for the first workers to serve."""
SETTLE: Final = 30.0
"""Seconds after the last fault for everything to end."""
DRAIN: Final = 20.0
"""Seconds for the workers to go when they are told to."""
DAY: Final = 86_400.0
NOW: Final = "select extract(epoch from clock_timestamp())::float8"
LIVE: Final = "select count(*) from durable.gen_durable where finished_at is null"


@attrs.frozen(kw_only=True)
class Extent:
    """How much of it."""

    seconds: float = SECONDS
    """How long work is sent and faults are injected."""
    scale: float = 1.0
    """How much work; 1.0 is about 500 commits."""
    settle: float = SETTLE
    """Seconds after the last fault for everything to end."""
    dashboard: bool = False
    """Whether somebody looks at the dashboard meanwhile."""


@attrs.define(kw_only=True)
class Report:
    """What came of one run."""

    nemesis: str
    seed: int
    seconds: float = 0.0
    """How long it took, all in all."""
    faults: Counter[str] = attrs.field(factory=Counter)
    pages: int = 0
    """Answers of the dashboard."""
    views: Counter[str] = attrs.field(factory=Counter)
    """How often each of its views was served, with its JSON twin."""
    tally: Mapping[str, int] = attrs.field(factory=dict)
    """How much was checked: commits, reaps, runs of steps, ..."""
    failures: list[str] = attrs.field(factory=list)
    violations: list[Violation] = attrs.field(factory=list)
    story: list[str] = attrs.field(factory=list)
    lag: float = 0.0
    """By how many seconds the runner itself was late at most."""
    ended: float = 0.0
    """The server's time when the workers were told to go."""
    folder: Path | None = None
    """Where the run's history is kept, if it is."""

    @property
    def commits(self) -> int:
        """Commits that were checked."""
        return self.tally.get("outcomes", 0)

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.failures and not self.violations


async def run_once(
    nemesis: Nemesis,
    seed: int,
    shared: DatabaseServer,
    zygote: Zygote,
    *,
    seconds: float | None = None,
    scale: float = 1.0,
    settle: float = SETTLE,
    keep: bool = False,
    dashboard: bool = False,
) -> Report:
    """Make a world, break it, judge it."""
    report = Report(nemesis=nemesis.name, seed=seed)
    folder = Path(tempfile.mkdtemp(prefix=f"durable-chaos-{nemesis.name}-{seed}-"))
    began = time.monotonic()
    try:
        async with _open_place(nemesis, folder, shared) as place:
            await migrate(place.dsn)
            await trio.to_thread.run_sync(install_audit, place.dsn)
            span = seconds or nemesis.seconds or SECONDS
            extent = Extent(seconds=span, scale=scale, settle=settle, dashboard=dashboard)
            await _live(report, nemesis, place, folder, zygote, extent)
            await _judge(report, nemesis, place, folder, extent)
    except Exception:  # the supervisor of runs: the others go on
        report.failures.append(f"the run broke down: {traceback.format_exc()[-3000:]}")
    finally:
        report.seconds = time.monotonic() - began
        if keep or not report.ok:
            report.folder = folder
            (folder / "story.txt").write_text("\n".join(report.story))
        else:
            shutil.rmtree(folder)
    return report


@asynccontextmanager
async def _open_place(nemesis: Nemesis, folder: Path, shared: DatabaseServer) -> AsyncGenerator[Place]:
    if nemesis.place is not None:
        async with nemesis.place(folder) as place:
            yield place
    elif nemesis.private:
        directory = throwaway_directory(f"chaos-{os.getpid()}-{time.monotonic_ns()}")
        start = partial(
            embedded.start, directory, throwaway=True, settings={**SERVER_SETTINGS, **nemesis.settings}
        )
        with await trio.to_thread.run_sync(start) as server:
            yield Place(server.dsn(), server)
    else:
        with shared.database() as dsn:
            yield Place(dsn)


async def _live(
    report: Report, nemesis: Nemesis, place: Place, folder: Path, zygote: Zygote, extent: Extent
) -> None:
    """The run itself; afterwards nobody is left."""
    async with AsyncExitStack() as stack:
        proxy = await stack.enter_async_context(open_proxy(place.dsn)) if nemesis.proxy else None
        nursery = await stack.enter_async_context(trio.open_nursery())
        world = World(
            seed=report.seed,
            rng=random.Random(f"nemesis {nemesis.name} {report.seed}"),
            folder=folder,
            place=place,
            proxy=proxy,
            outages=nemesis.outages,
            worker_options=nemesis.options_of_workers,
            nursery=nursery,
            zygote=zygote,
            log=EffectLog(folder / "world.jsonl"),
        )
        stack.callback(world.log.close)
        report.faults, report.story = world.faults, world.story
        onlooker = Onlooker()
        try:
            for _ in range(nemesis.workers):
                await world.spawn()
            await wait_serving(world, nemesis.workers)
            nursery.start_soon(world.watch_outages)
            if extent.dashboard:
                nursery.start_soon(onlooker.look, place.dsn)
            world.until = trio.current_time() + extent.seconds
            async with trio.open_nursery() as acts:
                acts.start_soon(nemesis.attack, world)
                for number in range(SENDERS):
                    acts.start_soon(send, world, report, number, extent)
            world.tell("healed; waiting for the end of all work")
            report.failures += (await judge_verified(place.dsn, "while work goes on"))[0]
            async with trio.open_nursery() as last:
                if nemesis.afterwards is not None:
                    last.start_soon(nemesis.afterwards, world)
                report.failures += await settle(world, extent.settle)
                last.cancel_scope.cancel()
            [[report.ended]] = await world.query(NOW)
            report.failures += await dismiss(world)
        finally:
            for worker in world.workers:
                if worker.alive:
                    worker.process.kill()
            report.lag = world.lag
            nursery.cancel_scope.cancel()
            with trio.CancelScope(shield=True):
                for worker in world.workers:
                    await worker.process.wait()
                await zygote.bury()
        report.failures += world.failures + onlooker.failures
        report.pages, report.views = sum(onlooker.answers.values()), onlooker.views
        if extent.dashboard and not onlooker.answers[200]:
            report.failures.append(f"the dashboard served no page: {onlooker.answers}")


async def wait_serving(world: World, count: int) -> None:
    """Wait until so many workers serve."""
    with trio.fail_after(START):
        while sum(each.serving for each in world.workers) < count:
            await trio.sleep(0.02)
    world.tell("everybody serves")


async def send(world: World, report: Report, number: int, extent: Extent) -> None:
    """One sender process, from its start to its end, forked by the world's zygote."""
    arguments = [
        *("--seed", str(world.seed), "--number", str(number)),
        *(
            "--seconds",
            str(extent.seconds),
            "--scale",
            str(extent.scale),
            "--acks",
            str(world.folder / f"sender{number}.acks"),
        ),
        *("--dsn", make_conninfo(world.worker_dsn, application_name=f"sender{number}")),
    ]
    log = world.folder / f"sender{number}.log"
    process = await world.zygote.fork("tests.chaos.sender", arguments, log)
    try:
        with trio.move_on_after(extent.seconds + extent.settle):
            code = await process.wait()
            if code:
                report.failures.append(f"sender {number} ended with {code}: {log.read_text()[-2000:]}")
            return
        report.failures.append(f"sender {number} did not come to its end: {log.read_text()[-2000:]}")
    finally:
        if process.poll() is None:
            process.kill()
            with trio.CancelScope(shield=True):
                await process.wait()


async def settle(world: World, patience: float) -> list[str]:
    """Everything must come to its end by itself, now that nobody breaks anything."""
    with trio.move_on_after(patience):
        while True:
            try:
                [[live]] = await world.query(LIVE)
            except psycopg.OperationalError:
                live = -1
            if not live:
                world.tell("all work has ended")
                return []
            await trio.sleep(0.05)
    for worker in world.alive:
        worker.send(signal.SIGUSR2)  # their stacks go to their logs
    return [f"{live} instances have not ended {patience:g} s after the last fault"]


async def dismiss(world: World) -> list[str]:
    """Every worker goes when it is told to, and says that all is well."""
    world.closing = True
    last = world.alive
    for worker in last:
        worker.doomed = True
        worker.send(signal.SIGTERM)
    failures: list[str] = []
    with trio.move_on_after(DRAIN):
        for worker in last:
            code = await worker.process.wait()
            started = worker.ready.exists()
            # Killed at the very end of the faults, and not noticed before it was told to go.
            killed = code == -signal.SIGKILL and (worker.killed or worker.kill_at)
            if code and started and not killed:  # SIGTERM before it catches signals is an ordinary death
                failures.append(f"{worker.name} ended with {code}: {worker.log.read_text()[-2000:]}")
    return failures + [f"{each.name} does not go: process left" for each in last if each.alive]


async def _judge(report: Report, nemesis: Nemesis, place: Place, folder: Path, extent: Extent) -> None:
    plan = make_plan(report.seed, extent.seconds, scale=extent.scale)
    report.failures += await find_leftovers(place.dsn)
    report.failures += await trio.to_thread.run_sync(judge_sums, place.dsn, plan, folder)
    report.failures += await trio.to_thread.run_sync(judge_journal, place.dsn)
    shortens = "--history" in nemesis.worker_options
    judged = partial(judge_history, snapshots=shortens)
    violations, report.tally = await trio.to_thread.run_sync(
        judged, place.dsn, folder, report.ended, report.lag, nemesis.retention or DAY
    )
    report.violations += [each for each in violations if each.invariant not in nemesis.forgives]
    problems, verified = await judge_verified(place.dsn, "at the end")
    report.failures += problems
    if not report.ok:
        await trio.to_thread.run_sync(dump, place.dsn, folder)
        return
    failures, rebuilt = await judge_rebuilt(place.dsn, report.seed)
    report.failures += failures
    report.tally = {**report.tally, "verified": verified, "rebuilt": rebuilt}
    if failures:
        await trio.to_thread.run_sync(dump, place.dsn, folder)
