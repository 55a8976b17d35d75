"""A rolling upgrade under load: the release before is replaced, worker by worker, and nothing is lost.

Three workers of the release before work on a schema that it made. The new package migrates it under them. Then one of
them is killed, one is drained, and one stays, beside workers of the new release, until everything has ended. The work
is that of the chaos runs: jobs, chains of steps, awaits and signals, barriers, shared partition keys, retries; one of
its senders is of each release.
"""

from __future__ import annotations

import random
import signal
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import trio
from durable_actors._store.migrate import migrate
from durable_actors._store.moves import OUTCOMES
from durable_actors._store.releases import RELEASES
from durable_actors.testing.database import DatabaseServer
from tests.chaos.judge import LATER, MARGIN, find_leftovers, judge_sums
from tests.chaos.run import NOW, SETTLE, Extent, Report, dismiss, send, settle, wait_serving
from tests.chaos.sender import read_acks
from tests.chaos.workload import Plan, make_plan
from tests.chaos.world import LEASE, REAP, Place, WorkerProcess, World
from tests.chaos.zygote import Zygote, open_zygote
from tests.invariants.audit import install_audit
from tests.invariants.check import check, read_history
from tests.invariants.effect_log import EffectLog
from tests.invariants.history import History
from tests.kit import PATIENCE
from tests.upgrade.counting import without_count
from tests.upgrade.old import OldRelease

SEED = 16
EXTENT = Extent(seconds=2.0, scale=1.0)
OLD_WORKERS = 3
EARLY = 10
"""What a sender of the release before was told is done, before the schema is migrated: it has connected by then."""


@pytest.mark.slow
async def test_a_rolling_upgrade_loses_nothing(
    old_release: OldRelease, durable_server: DatabaseServer, tmp_path: Path
):
    with durable_server.database() as dsn:
        report = await roll(old_release, dsn, tmp_path)
        report.failures += await find_leftovers(dsn)
        plan = as_inserted(make_plan(SEED, EXTENT.seconds, scale=EXTENT.scale))
        report.failures += await trio.to_thread.run_sync(judge_sums, dsn, plan, tmp_path)
        assert not report.failures, "\n".join([*report.story, *report.failures])
        margin = MARGIN + LATER * report.lag
        history = without_count(
            read_history(dsn, [tmp_path], lease=LEASE, reap_interval=REAP, margin=margin, ended=report.ended)
        )
    assert "\n".join(map(str, check(history))) == ""
    assert_shared(history)


def as_inserted(plan: Plan) -> Plan:
    """Sender 0 is of the release before, which has no graphs and no limits."""
    new = {"chaos.Graph", "chaos.Limited"}
    return Plan(
        tuple(each for each in plan.inserts if each.sender != 0 or each.machine not in new), plan.sends
    )


async def roll(old_release: OldRelease, dsn: str, folder: Path) -> Report:
    """The upgrade, from the first worker of the release before to the end of all work."""
    report = Report(nemesis="upgrade", seed=SEED)
    async with AsyncExitStack() as stack:
        old = await stack.enter_async_context(open_zygote(old_release.environ, old_release.folder))
        new = await stack.enter_async_context(open_zygote())
        await migrate_by(old, dsn, folder)
        await trio.to_thread.run_sync(install_audit, dsn)
        nursery = await stack.enter_async_context(trio.open_nursery())
        world = World(
            seed=SEED,
            rng=random.Random(SEED),
            folder=folder,
            place=Place(dsn),
            nursery=nursery,
            zygote=old,
            log=EffectLog(folder / "world.jsonl"),
        )
        stack.callback(world.log.close)
        report.story = world.story
        try:
            killed, drained, _ = [await world.spawn(replace=False) for _ in range(OLD_WORKERS)]
            await wait_serving(world, OLD_WORKERS)
            nursery.start_soon(world.watch_outages)
            async with trio.open_nursery() as senders:
                senders.start_soon(send, world, report, 0, EXTENT)
                await until_told(folder / "sender0.acks", EARLY)
                await migrate_under_load(world)
                world.zygote = new
                senders.start_soon(send, world, report, 1, EXTENT)
                for _ in range(2):
                    await world.spawn(replace=False)
                await wait_serving(world, OLD_WORKERS + 2)
                await until_claimed(world, killed)
                world.kill(killed)
                await until_claimed(world, drained)
                world.terminate(drained)
            report.failures += await settle(world, SETTLE)
            [[report.ended]] = await world.query(NOW)
            report.failures += await dismiss(world) + world.failures
        finally:
            report.lag = world.lag
            for worker in world.workers:
                worker.send(signal.SIGKILL)
            nursery.cancel_scope.cancel()
            with trio.CancelScope(shield=True):
                for worker in world.workers:
                    await worker.process.wait()
                for zygote in (old, new):
                    await zygote.bury()
    return report


async def migrate_by(zygote: Zygote, dsn: str, folder: Path) -> None:
    """The release before makes its schema itself."""
    log = folder / "migrate.log"
    process = await zygote.fork("durable_actors.cli", ["migrate", "--dsn", dsn], log)
    assert await process.wait() == 0, log.read_text()
    assert f"version {list(RELEASES.values())[-2]}" in log.read_text()


async def migrate_under_load(world: World) -> None:
    with trio.fail_after(PATIENCE):
        found = await migrate(world.dsn)
    assert found.current == found.latest
    world.tell("migrated")


async def until_told(acks: Path, count: int) -> None:
    with trio.fail_after(PATIENCE):
        while len(read_acks(acks)) < count:
            await trio.sleep(0.01)


async def until_claimed(world: World, worker: WorkerProcess) -> None:
    """It runs something just now."""
    claims = "select count(*) from durable.gen_durable where locked_by like %s"
    with trio.fail_after(PATIENCE):
        while not (await world.query(claims, [f"{worker.name}:%"]))[0][0]:
            await trio.sleep(0.005)


def assert_shared(history: History) -> None:
    """Both releases have worked on the same things: else this test would prove little."""
    old = {f"w{n}" for n in range(1, OLD_WORKERS + 1)}
    commits: Counter[bool] = Counter()
    touched: dict[int, set[bool]] = {}
    keys: dict[str | None, set[bool]] = {}
    for change, move in history.moves:
        if move in OUTCOMES and change.new is not None:
            is_old = change.writer in old
            commits[is_old] += 1
            touched.setdefault(change.instance, set()).add(is_old)
            keys.setdefault(change.new.partition_key, set()).add(is_old)
    both = {True, False}
    assert min(commits[True], commits[False]) > 20, commits
    assert sum(each == both for each in touched.values()) > 2, "instances that began here and ended there"
    assert any(key is not None and each == both for key, each in keys.items()), "a key of both"
