"""Workers that die: after a step, after its commit, anywhere."""

from __future__ import annotations

from typing import Any

import attrs
import durable_actors as da
import psycopg
import pytest
from durable_actors.testing import Bench, Benches, CrashPoint, WorkerDied, check_crashes, crash_anywhere
from durable_actors.testing.strategies import crash_points
from hypothesis import given, settings
from tests.testing import shop
from tests.testing.shop import Checkout, Order, mail


async def test_a_worker_dies_before_the_commit(durable: Bench) -> None:
    number = await durable.insert(Checkout, state=Order(1))
    await durable.drain()
    await durable.signal(number, "confirmed")
    with durable.crash_after(Checkout.charge):
        died = await durable.drain()
    assert died.worker_died
    assert [(each.step, each.outcome, each.committed) for each in died.ran] == [
        ("charge", "worker died", False)
    ]
    row = await durable.inspect(number)
    assert (row.status, row.step, row.attempt) == ("executing", "charge", 0)  # the claim is left
    assert died.waiting[0].why == "its worker died in step 'charge'; the next drain runs it again"
    again = await durable.drain()
    assert [(each.step, each.attempt) for each in again.ran] == [("charge", 1), ("ship", 0)]
    done = await durable.assert_done(number, {"shipped": 1, "paid": True})
    assert done.crashes == 0  # of its last step
    assert shop.bank.calls == 2
    assert len(shop.bank.charges) == 1  # the key is the same in both runs


async def test_a_worker_dies_after_the_commit(durable: Bench) -> None:
    number = await durable.insert(Checkout, state=Order(1))
    durable.crash_after(Checkout.ask, committed=True)
    died = await durable.drain(only=Checkout)
    assert [(each.outcome, each.committed) for each in died.ran] == [("worker died", True)]
    assert (await durable.inspect(number)).status == "awaiting_signal"
    assert (await durable.drain(only=Checkout)).ran == ()
    with psycopg.connect(durable.dsn) as conn:
        assert conn.execute(
            "select count(*) from durable.gen_durable where fsm = 'shop:mail'"
        ).fetchone() == (1,)


@pytest.mark.parametrize("level", ["outcomes", "claims", "full"])
async def test_the_journal_of_a_crash_fits(durable: Bench, level: Any) -> None:
    """The lease of a dead worker ends at once, and its record says so: nothing was taken from a worker that lives."""
    number = await durable.insert(Checkout, state=Order(1), journal=level)
    with durable.crash_after(Checkout.ask):
        await durable.drain()
    await durable.drain()
    with durable.crash_after(Checkout.charge):
        await durable.advance("4d")
        await durable.drain()
    await durable.advance("4d")
    await durable.drain()
    assert (await durable.inspect(number)).finished_at is not None
    assert (await durable.verify()).problems == []


async def test_the_journal_of_crashes_anywhere_fits(durable: Bench) -> None:
    async def scenario(bench: Bench) -> object:
        number = await bench.insert(Checkout, state=Order(1), journal="full")
        await bench.drain()
        await bench.signal(number, "confirmed")
        await bench.drain()
        return (await bench.verify()).problems

    await crash_anywhere(durable, scenario)


async def test_several_times_and_backed_off(durable: Bench) -> None:
    number = await durable.insert(mail, args={"to": "x"})
    plan = durable.crash_after(mail, times=3)
    for _ in range(2):
        assert (await durable.drain()).worker_died
    assert (await durable.drain()).ran == ()  # the second crash is backed off for a second
    await durable.advance("10m")
    assert (await durable.drain()).worker_died
    await durable.advance("10m")
    await durable.drain()
    assert plan.crashes == 3
    assert (
        await durable.assert_failed(number)
    ).attempt == 2  # max_attempts=3: it killed its worker each time


async def test_a_plan_that_is_not_used_is_told(durable: Bench) -> None:
    await durable.insert(mail, args={"to": "x"})
    told = pytest.raises(
        AssertionError, match="expected 2 crashes inside the block, and there were 0 crashes"
    )
    with told, durable.crash_after(Checkout.charge, times=2):
        await durable.drain()
    with pytest.raises(ZeroDivisionError), durable.crash_after(Checkout.charge):
        raise ZeroDivisionError
    await durable.insert(Checkout, state=Order(1))
    await durable.drain()  # the plans ended with their blocks


async def test_a_step_is_meant_by_its_class(durable: Bench) -> None:
    class Other(da.Machine, name="other"):
        @da.step
        async def charge(self, ctx: da.Context) -> da.Outcome:
            return da.Done()

        @da.step
        async def start(self, ctx: da.Context) -> da.Outcome:
            return da.Next(self.charge)

    durable.crash_after(Checkout.charge)
    await durable.insert(Other)
    assert not (await durable.drain()).worker_died
    durable.crash_after("charge")
    await durable.insert(Other)
    assert (await durable.drain()).worker_died


async def test_execute_next_raises_it(durable: Bench) -> None:
    await durable.insert(mail, args={"to": "x"})
    durable.crash_after(mail)
    with pytest.raises(
        WorkerDied, match="the worker died after step 'perform' of instance 1, before its outcome"
    ):
        await durable.execute_next("mail")
    again = await durable.execute_next("mail")
    assert (again.status, again.result) == ("done", "mailed x")


async def test_children_are_not_spawned_by_a_dead_worker(durable: Bench) -> None:
    class Parent(da.Machine, name="parent"):
        @da.step(initial=True)
        async def start(self, ctx: da.Context) -> da.Outcome:
            return da.ScheduleChildren(self.end, [da.Child(mail, args={"to": n}) for n in range(3)])

        @da.step
        async def end(self, ctx: da.Context) -> da.Outcome:
            return da.Done([child.result for child in ctx.children])

    number = await durable.insert(Parent, partition_key="k")
    durable.crash_after(Parent.start)
    await durable.drain()
    with pytest.raises(
        AssertionError, match="no instance of shop:mail was inserted; there are instances of parent"
    ):
        await durable.assert_inserted(mail)
    await durable.drain()
    await durable.assert_done(number, ["mailed 0", "mailed 1", "mailed 2"])


# -- anywhere


async def buy(durable: Bench) -> Any:
    shop.bank.__init__()
    number = await da.insert(Checkout, state=Order(5), unique_key="order:5")
    await durable.drain()
    await durable.signal("order:5", "confirmed")
    await durable.drain()
    assert await durable.result(number) == {"shipped": 5, "paid": True}
    return len(shop.bank.charges)


async def test_a_scenario_ends_the_same_wherever_a_worker_dies(durable: Bench) -> None:
    points = await crash_anywhere(durable, buy)
    assert points == [CrashPoint(run, committed) for run in range(4) for committed in (False, True)]


@given(points=crash_points(most=3, runs=8))
@settings(max_examples=8, deadline=None, derandomize=True)
async def test_and_with_several_crashes(durable_benches: Benches, points: frozenset[CrashPoint]) -> None:
    await check_crashes(durable_benches, buy, points)


@attrs.define
class Counter:
    n: int = 0


async def test_a_machine_that_is_not_safe_is_found(durable: Bench) -> None:
    counter = Counter()

    class Unsafe(da.Machine[dict[str, Any]], name="unsafe"):
        @da.step(initial=True)
        async def start(self, ctx: da.Context[dict[str, Any]]) -> da.Outcome:
            counter.n += 1  # an effect without a key
            return da.Next(self.end, {"n": counter.n})

        @da.step
        async def end(self, ctx: da.Context[dict[str, Any]]) -> da.Outcome:
            return da.Done(ctx.state["n"])

    async def scenario(durable: Bench) -> int:
        counter.n = 0
        await durable.insert(Unsafe)
        await durable.drain()
        return counter.n

    with pytest.raises(AssertionError) as info:
        await crash_anywhere(durable, scenario)
    text = str(info.value)
    assert "with a worker that died before the commit of unsafe 1, step 'start' (run 1)" in text
    assert "it returned 2, without a crash 1" in text
    assert 'missing: 1 instance {"is_child":false,"last_error":null,"machine":"unsafe"' in text


async def test_a_scenario_that_fails_after_a_crash_is_told(durable: Bench) -> None:
    class Attempts(da.Machine, name="attempts"):
        @da.step
        async def start(self, ctx: da.Context) -> da.Outcome:
            return da.Done(ctx.attempt)

    async def scenario(durable: Bench) -> None:
        number = await durable.insert(Attempts)
        await durable.drain()
        assert await durable.result(number) == 0

    with pytest.raises(
        AssertionError, match=r"the scenario raised AssertionError.*died before the commit of attempts 1"
    ):
        await crash_anywhere(durable, scenario)
