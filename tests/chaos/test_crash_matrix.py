"""Case 54: a worker is killed at each point of its work; what it leaves is finished by others, and `verify` is clean.

Everything is recorded (the seed is even), so a run also ends with rebuilds of a tenth of its rows: `tests.chaos.run`.
"""

from __future__ import annotations

import signal
from typing import Final

import attrs
import pytest
import trio
from durable_actors.testing.database import DatabaseServer
from tests.chaos.__main__ import explain, parse
from tests.chaos.nemeses import Nemesis
from tests.chaos.run import Report, run_once
from tests.chaos.world import WorkerProcess, World
from tests.chaos.zygote import Zygote, open_zygote

SEED: Final = 54
AT_ONCE: Final = 3
DEATH: Final = 40.0
"""Seconds until the point must have been passed."""


@attrs.frozen
class Crash:
    """Where a process kills itself."""

    point: str
    """See `tests.chaos.points`."""
    recovers: bool = False
    """It runs `recover`, not an engine."""
    behind: bool = False
    """Another one was killed in a step before it: there are claims to take back."""


CRASHES: Final = {
    "after a claim": Crash("picked:2"),
    "in a step": Crash("step:3"),
    "before an outcome is sent": Crash("outcome:3"),
    "while an outcome is under way": Crash("sent:3"),
    "after an outcome": Crash("committed:3"),
    "after children were scheduled": Crash("spawned:1"),
    "in the start of a child": Crash("started:1"),
    "in the delivery of a signal": Crash("signalled:1"),
    "in a reap": Crash("took:1", behind=True),
    "in recover": Crash("recovering:1", recovers=True, behind=True),
    "in recover, after its reap": Crash("took:1", recovers=True, behind=True),
}


def nemesis_of(name: str, crash: Crash) -> Nemesis:
    async def attack(world: World) -> None:
        if crash.behind:
            await died(await world.spawn(replace=False, kill_at="step:3"))
        options = ["--recover"] if crash.recovers else []
        await died(await world.spawn(*options, replace=False, kill_at=crash.point))
        for _ in range(2):
            await world.spawn()

    return Nemesis(name=name.replace(" ", "-").replace(",", ""), attack=attack, workers=0)


async def died(worker: WorkerProcess) -> None:
    """It has killed itself."""
    with trio.fail_after(DEATH):
        assert await worker.process.wait() == -signal.SIGKILL, worker.log.read_text()[-2000:]


@pytest.mark.slow
async def test_whoever_is_killed_anywhere_others_finish_its_work_and_verify_is_clean(
    durable_server: DatabaseServer,
):
    reports: dict[str, Report] = {}
    limit = trio.CapacityLimiter(AT_ONCE)

    async def run(zygote: Zygote, name: str, crash: Crash) -> None:
        async with limit:
            nemesis = nemesis_of(name, crash)
            reports[name] = await run_once(nemesis, SEED, durable_server, zygote, seconds=0.5, scale=0.15)

    async with open_zygote() as zygote, trio.open_nursery() as nursery:
        for name, crash in CRASHES.items():
            nursery.start_soon(run, zygote, name, crash)
    for name, report in reports.items():
        assert report.ok, explain(report, parse([]))
        point = CRASHES[name].point.partition(":")[0]
        assert report.faults[f"killed at {point}"] == 1, report.story
        assert min(report.tally["verified"], report.tally["rebuilt"]) > 1, report.tally
