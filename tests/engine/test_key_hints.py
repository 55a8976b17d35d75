"""Whatever frees a key, the row held behind it starts at once, in whichever queue it waits: no poll is needed."""

from __future__ import annotations

import durable_actors as da
import pytest
from durable_actors.telemetry import Picked
from tests.engine.kit import QUIET, Gate, running

pytestmark = pytest.mark.usefixtures("registry")


@pytest.mark.parametrize("kind", ["done", "stop", "retry", "await", "children", "other key"])
async def test_the_row_behind_starts_at_once(durable_dsn: str, kind: str):
    gate = Gate()

    class Child(da.Machine, name="child", queue="children"):
        @da.step
        async def start(self, ctx):
            return da.Await("never")

    class First(da.Machine, name="first", queue="a"):
        @da.step
        async def start(self, ctx):
            await gate.wait()
            return {
                "done": da.Done(),
                "stop": da.Stop("no"),
                "retry": da.Retry(delay=600),
                "await": da.Await("never"),
                "children": da.ScheduleChildren(self.then, [da.Child(Child)]),
                "other key": da.Next(self.then, partition_key="other"),
            }[kind]

        @da.step
        async def then(self, ctx):
            return da.Await("never")

    class Second(da.Machine, name="second", queue="b"):
        @da.step
        async def start(self, ctx):
            return da.Done("ran")

    async with running(durable_dsn, **QUIET) as run:
        await run.insert(First, partition_key="k")
        await gate.wait_entered()
        number = await run.insert(Second, partition_key="k")
        await run.events.wait(Picked, queue="b", held=1)
        gate.open()
        assert (await run.ended(number)).result == "ran"
