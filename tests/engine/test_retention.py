"""Retention as users meet it: `keep=`, `keep=0`, results, children, the bench's clock."""

from __future__ import annotations

from typing import Any

import durable_actors as da
import pytest
import trio
from durable_actors import errors
from durable_actors.testing import Bench
from tests.engine.kit import Db, Gate, running

pytestmark = pytest.mark.usefixtures("registry")

SCOPE = ("runnable", "executing", "awaiting_signal", "awaiting_children", "done")
COUNTS = (
    "select (select count(*) from durable.gen_durable), (select count(*) from durable.signals),"
    " (select count(*) from durable.journal)"
)


def quick(**options: Any) -> Any:
    @da.job(name="quick", **options)
    async def perform(n: int) -> int:
        return n + 1

    return perform


async def gone(bench: Bench, number: int) -> bool:
    try:
        await bench.inspect(number)
    except da.NoTarget:
        return True
    return False


async def test_the_clock_of_a_bench(durable: Bench) -> None:
    job = quick()
    number = await durable.insert(job, state=1)
    await durable.drain()
    assert await durable.sweep() == 0
    await durable.advance("6d")
    assert await durable.sweep() == 0
    await durable.advance("25h")
    assert await durable.sweep() == 1
    assert await gone(durable, number)


async def test_keep_of_a_machine_goes_before_the_engines(durable: Bench) -> None:
    short, ever = quick(keep=60), quick(keep=None, version=2)
    numbers = [await durable.insert(job, state=1) for job in (short, ever)]
    await durable.drain()
    await durable.advance("61s")
    assert await durable.sweep() == 1
    await durable.advance("900d")
    assert await durable.sweep() == 0
    assert [await gone(durable, number) for number in numbers] == [True, False]
    assert await durable.sweep(da.Retention(done=1)) == 0


async def test_a_class_hands_keep_down() -> None:
    class Base(da.Machine[Any], name="base", keep=60):
        @da.step
        async def start(self, ctx: Any) -> da.Outcome:
            return da.Done()

    class Heir(Base, name="heir"): ...

    class Other(Base, name="other", keep=None): ...

    keeps = [each.__durable__ and each.__durable__.keep for each in (Base, Heir, Other)]
    assert keeps == [60.0, 60.0, None]


@pytest.mark.parametrize("keep", [-1, 0.5, float("nan"), "1d", True])
def test_a_keep_that_is_none(keep: Any) -> None:
    with pytest.raises(errors.DefinitionError, match="keep="):
        quick(keep=keep)


async def test_keep_0_leaves_nothing(db: Db) -> None:
    """Not the row, no signal, no tombstone, no record; and whoever waits in this process has the result."""
    gate = Gate()

    class Order(da.Machine[Any], name="order", keep=0, journal="claims"):
        @da.step(initial=True)
        async def ask(self, ctx: Any) -> da.Outcome:
            return da.Await("paid", then=self.wait)

        @da.step
        async def wait(self, ctx: Any) -> da.Outcome:
            await gate.wait()
            return da.Done({"paid": True})

    async with running(db.dsn) as run:
        number = await run.insert(Order, state={})
        await run.engine.client.signal(number, "paid", dedup_key="k")
        results: list[Any] = []

        async def wait() -> None:
            results.append(await run.engine.client.result(number, timeout=10))

        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(wait)
            await gate.wait_entered()
            gate.open()
        assert results == [{"paid": True}] * 3
        assert db.execute(COUNTS) == [(0, 0, 0)]
        with pytest.raises(da.NoTarget):
            await run.engine.client.result(number)
        with pytest.raises(da.NoTarget):
            await run.engine.client.signal(number, "paid")


async def test_keep_0_of_many_with_waiters(db: Db) -> None:
    gate, results = Gate(), dict[int, int]()

    @da.job(name="held", keep=0)
    async def held(n: int) -> int:
        await gate.wait()
        return n + 1

    async with running(db.dsn, queues={"default": 50}) as run:

        async def one(n: int) -> None:
            number = await run.insert(held, state=n)
            results[n] = await run.engine.client.result(number, timeout=10)

        async with trio.open_nursery() as nursery:
            for n in range(50):
                nursery.start_soon(one, n)
            await gate.wait_entered(50)
            gate.open()
    assert results == {n: n + 1 for n in range(50)}
    assert db.execute(COUNTS) == [(0, 0, 0)]


async def test_keep_0_keeps_what_failed(durable: Bench) -> None:
    @da.job(name="fails", keep=0, max_attempts=1)
    async def fails() -> None:
        raise ValueError("no")

    number = await durable.insert(fails)
    await durable.drain()
    assert (await durable.inspect(number)).status == "failed"
    await durable.advance("29d")
    assert await durable.sweep() == 0
    await durable.retry(number)
    await durable.drain()
    await durable.advance("31d")
    assert await durable.sweep() == 1


async def test_a_parent_reads_children_with_keep_0(durable: Bench) -> None:
    job = quick(keep=0)

    class Parent(da.Machine[Any], name="parent"):
        @da.step(initial=True)
        async def begin(self, ctx: Any) -> da.Outcome:
            children = [da.Child(job, state=n) for n in range(3)]
            return da.ScheduleChildren(self.read, children)

        @da.step
        async def read(self, ctx: Any) -> da.Outcome:
            return da.Done([child.result for child in ctx.children])

    number = await durable.insert(Parent, state={})
    await durable.drain()
    assert await durable.result(number) == [1, 2, 3]
    assert await durable.sweep() == 3, "their parent is done"
    assert not await gone(durable, number)


async def test_what_a_step_inserted_is_found_when_it_runs_again(durable: Bench) -> None:
    job = quick(keep=0)
    runs: list[int] = []

    class Caller(da.Machine[Any], name="caller"):
        @da.step
        async def start(self, ctx: Any) -> da.Outcome:
            runs.append(await ctx.insert(job, state=1))
            return da.Done()

    await durable.insert(Caller, state={})
    durable.crash_after(Caller.start)
    await durable.drain()
    await durable.drain()
    assert runs == [runs[0]] * 2, "the second run found what the first one had inserted, although it was done"
    assert not await gone(durable, runs[0])
    await durable.advance("2d")
    assert await durable.sweep() == 1


async def test_a_unique_key_that_outlives_its_instance_keeps_the_row(durable: Bench) -> None:
    job = quick(keep=0)
    number = await durable.insert(job, state=1, unique_key="once", unique_scope=SCOPE)
    await durable.drain()
    await durable.advance("900d")
    assert await durable.sweep() == 0
    assert (await durable.inspect(number)).status == "done"


async def test_retention_leaves_the_history_clean(durable: Bench) -> None:
    class Order(da.Machine[Any], name="order", journal="full"):
        @da.step(initial=True)
        async def one(self, ctx: Any) -> da.Outcome:
            return da.Next(self.two)

        @da.step
        async def two(self, ctx: Any) -> da.Outcome:
            return da.Done()

    await durable.insert(Order, state={})
    await durable.drain()
    await durable.advance("4d")
    kept = await durable.insert(Order, state={})
    await durable.drain()
    await durable.advance("4d")
    assert await durable.sweep() == 1
    report = await durable.verify()
    assert (report.checked, report.problems) == (1, [])
    assert next(record.kind for record in await durable.history(kept)) == "started"
