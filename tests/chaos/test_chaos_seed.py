"""One chaos run of the normal suite: always the same work and the same faults. `make chaos` runs the others."""

from __future__ import annotations

import pytest
from durable_actors.testing.database import DatabaseServer
from tests.chaos.__main__ import explain, parse
from tests.chaos.nemeses import nemeses
from tests.chaos.run import run_once
from tests.chaos.zygote import open_zygote

SEED = 7


@pytest.mark.slow
async def test_killed_stopped_and_blocked_workers_lose_nothing_and_obey_commands(
    durable_server: DatabaseServer,
):
    async with open_zygote() as zygote:
        report = await run_once(
            nemeses()["commands-mixed"], SEED, durable_server, zygote, seconds=3.0, scale=0.6
        )
    assert report.ok, explain(report, parse([]))
    assert report.commits > 200
    assert sum(report.faults.values()) > 3
