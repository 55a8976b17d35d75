"""Hostile step bodies beside innocent ones: whatever a step does, it is its own instance that bears it."""

from __future__ import annotations

import contextlib
import gc
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import durable_actors as da
import pytest
import trio
from tests.engine import hostile_bodies
from tests.engine.hostile_bodies import HOSTILE, Hostile
from tests.engine.kit import Gate, Run, running
from tests.kit import PATIENCE

pytestmark = [
    pytest.mark.usefixtures("registry"),
    # Trio tells of generators that nobody closed.
    pytest.mark.filterwarnings("ignore:Async generator:ResourceWarning"),
    pytest.mark.filterwarnings("ignore:coroutine 'sleep' was never awaited:RuntimeWarning"),
]


class Innocents:
    """Jobs that may run once, and once only; every other one waits."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.runs = Counter[int]()
        self.ids: list[int] = []
        self.strange: list[str] = []

        @da.job(name="innocent", max_attempts=1)
        async def innocent(ctx: da.Context[dict[str, Any]]) -> int:
            self.runs[ctx.id] += 1
            if hostile_bodies.variable.get() != "nobody's":
                self.strange.append("a variable of another step")
            if trio.current_effective_deadline() < trio.current_time() + 1:
                self.strange.append("a deadline of another step")
            if ctx.id % 2:
                await trio.sleep(0.02)
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(trio.sleep, 0.01)
                await da.insert(wanted)
            return ctx.id

        @da.job(name="wanted", queue="elsewhere")
        async def wanted(args: dict[str, Any]) -> None:
            """Never runs here."""

        self.job = innocent

    async def send(self, count: int) -> None:
        ids = await self.run.engine.client.insert_many(self.job, [{"args": {}}] * count)
        self.ids += [number for number in ids if number is not None]

    async def check(self) -> None:
        for number in self.ids:
            row = await self.run.ended(number)
            assert (row.status, row.result, row.attempt, self.runs[number]) == ("done", number, 0, 1), row
        assert not self.strange


@contextlib.asynccontextmanager
async def beside_innocents(
    dsn: str, hostile: Hostile, **options: Any
) -> AsyncIterator[tuple[Run, Any, Innocents]]:
    """A healthy engine before and after, that stops in time."""
    job = da.job(name="hostile", **hostile.options)(hostile.body)
    drained = trio.Event()
    with trio.CancelScope() as late:
        async with running(dsn, queues={"default": 4}, max_crashes=1, drain_timeout=60, **options) as run:
            yield run, job, Innocents(run)
            tree = run.engine.snapshot().render()
            late.deadline = trio.current_time() + PATIENCE
        drained.set()
    assert drained.is_set(), "the engine has not stopped in time"
    assert "restart" not in tree, tree
    hostile_bodies.kept.clear()
    gc.collect()


@pytest.mark.parametrize("name", HOSTILE)
async def test_no_innocent_one_is_hurt(durable_dsn, name):
    hostile = HOSTILE[name]
    async with beside_innocents(durable_dsn, hostile) as (run, job, innocents):
        await innocents.send(5)
        first = await run.insert(job, args={})
        await innocents.send(5)
        second = await run.insert(job, args={})
        await innocents.send(5)
        rows = [await run.ended(number) for number in (first, second)]
        await innocents.check()
        await innocents.send(10)  # on workers that have seen it
        await innocents.check()
    for row in rows:
        assert row.status == ("done" if hostile.fate == "done" else "failed"), row
        assert hostile.says in (row.last_error or ""), row
        assert row.crashes == (1 if hostile.fate == "crash" else 0), row
        if hostile.fate == "crash":
            assert "quarantined" in (row.last_error or ""), row


async def test_a_thread_that_never_returns_takes_its_own_slot_alone(durable_dsn):
    gate = Gate()

    def never(ctx: Any) -> str:
        gate.wait_in_thread(60)
        return "late"

    async with beside_innocents(durable_dsn, Hostile(never, "done")) as (run, job, innocents):
        number = await run.insert(job, args={})
        await gate.wait_entered()
        await innocents.send(10)
        await innocents.check()
        gate.open()
        assert (await run.ended(number)).result == "late"


async def test_one_that_cancels_the_nursery_of_its_worker_ends_more_than_itself(durable_dsn):
    """Nobody can keep that from the others: they run again, on a new pool, and all of them end."""
    ran = list[int]()
    gate = Gate()

    @da.job(name="saboteur")
    async def saboteur(ctx: da.Context[dict[str, Any]]) -> None:
        ran.append(ctx.id)
        if len(ran) == 1:
            nursery = trio.lowlevel.current_task().parent_nursery
            assert nursery is not None
            nursery.cancel_scope.cancel()
            await trio.sleep_forever()

    @da.job(name="innocent")
    async def innocent(args: dict[str, Any]) -> None:
        gate.arrive()
        if gate.entered <= 2:
            await trio.sleep_forever()

    async with running(durable_dsn, queues={"default": 4}) as run:
        ids = [await run.insert(innocent, args={}) for _ in range(2)]
        await gate.wait_entered(2)
        ids.append(await run.insert(saboteur, args={}))
        rows = [await run.ended(number) for number in ids]
    assert [row.status for row in rows] == ["done"] * 3
