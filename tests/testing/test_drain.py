"""`Bench.drain`: everything that is due, in order, with what ran and why the rest waits."""

from __future__ import annotations

import contextvars
from typing import Any

import durable_actors as da
import pytest
import trio
from durable_actors.testing import Bench
from tests.testing.shop import Checkout, Order, mail


async def test_a_whole_machine(durable: Bench) -> None:
    number = await durable.insert(Checkout, state=Order(42))
    first = await durable.drain()
    assert first.steps == ["ask", "perform"]
    assert [each.instance.id for each in first.waiting] == [number]
    assert "it awaits a signal named 'confirmed' until its deadline in 3 d, then runs step 'charge'" in str(
        first
    )
    await durable.signal(number, "confirmed")
    second = await durable.drain()
    assert second.steps == ["charge", "ship"]
    assert [(each.outcome, each.attempt, each.committed) for each in second.ran] == [
        ("Next", 0, True),
        ("Done", 0, True),
    ]
    assert not second.waiting
    assert await durable.result(number) == {"shipped": 42, "paid": True}
    assert str(second).splitlines() == [
        "2 steps ran:",
        f"    1  shop:Checkout {number}, step 'charge' → Next",
        f"    2  shop:Checkout {number}, step 'ship' → Done",
        "0 instances wait",
    ]
    assert (await durable.drain()).ran == ()


async def test_helpers_find_the_bench(durable: Bench) -> None:
    number = await da.insert(Checkout, state=Order(1))
    await durable.drain()
    await da.signal(number, "confirmed")
    await durable.drain()
    assert await da.result(number) == {"shipped": 1, "paid": True}


async def test_only_an_instance_a_machine_or_a_queue(durable: Bench) -> None:
    first = await durable.insert(Checkout, state=Order(1))
    second = await durable.insert(Checkout, state=Order(2))
    letter = await durable.insert(mail, args={"to": "ada"})
    only = await durable.drain(only=second)
    assert [(each.id, each.step) for each in only.ran] == [(second, "ask")]
    left = {each.instance.id: each.why for each in only.waiting}
    assert left[first] == f"it is due, and drain(only={second}) has left it out"
    assert (await durable.drain(only="mail")).ran[0].id == letter
    assert {each.machine for each in (await durable.drain(only=Checkout)).ran} == {"shop:Checkout"}
    assert {each.machine for each in (await durable.drain(only=mail)).ran} == {"shop:mail"}
    with pytest.raises(da.ConfigError, match=r"only=3\.5 must be an instance \(its id"):
        await durable.drain(only=3.5)  # type: ignore[arg-type]


async def test_keyed_instances_run_one_after_the_other(durable: Bench) -> None:
    numbers = [await durable.insert(mail, args={"to": n}, partition_key="k") for n in range(3)]
    assert [each.id for each in (await durable.drain()).ran] == numbers


async def test_a_machine_that_never_waits_hits_the_limit(durable: Bench) -> None:
    class Endless(da.Machine, name="endless"):
        @da.step
        async def start(self, ctx: da.Context) -> da.Outcome:
            return da.Retry()

    number = await durable.insert(Endless)
    with pytest.raises(AssertionError) as info:
        await durable.drain(max_steps=30)
    lines = str(info.value).splitlines()
    assert lines[0].startswith("drain has run max_steps=30 steps, and more is due: ")
    assert "pass a greater max_steps" in lines[0]
    assert lines[1] == "  … 10 steps before"
    assert lines[-1] == f"   30  endless {number}, step 'start', attempt 29 → Retry"


async def test_the_limit_may_be_reached_if_nothing_more_is_due(durable: Bench) -> None:
    class Two(da.Machine, name="two"):
        @da.step
        async def start(self, ctx: da.Context) -> da.Outcome:
            return da.Next(self.end)

        @da.step
        async def end(self, ctx: da.Context) -> da.Outcome:
            return da.Done()

    for only in (None, Two, "default", 4):
        await durable.insert(Two)
        assert len((await durable.drain(only, max_steps=2)).ran) == 2
    for only in (None, Two, "default", 8):
        await durable.insert(Two)
        with pytest.raises(AssertionError, match="more is due"):
            await durable.drain(only, max_steps=1)
        await durable.drain()
    await durable.insert(Two)
    await durable.insert(Two, queue="other")
    assert len((await durable.drain("other", max_steps=2)).ran) == 2, "what is left out is not counted"


async def test_errors_retries_and_reasons(durable: Bench) -> None:
    number = await durable.insert(mail, args={"bad": True})
    drained = await durable.drain()
    [ran] = drained.ran
    assert ran.outcome == "Retry"
    assert "DeclinedError: no such address" in str(ran)
    assert "it is scheduled: due in" in drained.waiting[0].why
    await durable.advance("10m")
    await durable.drain()
    await durable.advance("10m")
    await durable.drain()
    await durable.assert_failed(number, "no such address")


async def test_every_kind_of_rest_is_explained(durable: Bench) -> None:
    class Parent(da.Machine, name="parent"):
        @da.step(initial=True)
        async def start(self, ctx: da.Context) -> da.Outcome:
            return da.ScheduleChildren(self.end, [da.Child(mail, args={"to": "x"}, schedule_in=60)])

        @da.step
        async def end(self, ctx: da.Context) -> da.Outcome:
            return da.Done()

    await durable.insert(Parent)
    await durable.insert(mail, args={"to": "y"}, schedule_in=4 * 3600)

    class Gone(da.Machine, name="gone"):
        @da.step
        async def start(self, ctx: da.Context) -> da.Outcome:
            return da.Done()

    await durable.insert(Gone)
    da.machine.current_registry().unregister("gone")
    reasons = sorted(each.why for each in (await durable.drain()).waiting)
    assert reasons[0] == "it is scheduled: due in 4 h"
    assert reasons[1].startswith("it is scheduled: due in 60 s")
    assert reasons[2].startswith("it is shelved: ")
    assert "no live node that serves queue 'default' knows gone/1" in reasons[2]
    assert reasons[3] == "it waits for 1 more of 1 children, then runs step 'end'"


async def test_a_result_that_is_not_there_says_why(durable: Bench) -> None:
    number = await durable.insert(Checkout, state=Order(1))
    with pytest.raises(AssertionError, match="has not ended\nshop:Checkout 1: it is due"):
        await durable.result(number)


async def test_a_crashing_step_is_recorded(durable: Bench) -> None:
    class Exits(da.Machine, name="exits"):
        @da.step
        async def start(self, ctx: da.Context) -> da.Outcome:
            if ctx.attempt < 1:
                raise SystemExit(3)
            return da.Done()

    await durable.insert(Exits)
    drained = await durable.drain()
    assert [(each.outcome, each.attempt) for each in drained.ran] == [("crashed", 0), ("Done", 1)]
    assert isinstance(drained.ran[0].error, SystemExit)


async def test_context_variables_and_tasks_do_not_leak(durable: Bench) -> None:
    seen: list[Any] = []
    variable = contextvars.ContextVar("variable", default=0)

    class Sets(da.Machine, name="sets"):
        @da.step
        async def start(self, ctx: da.Context) -> da.Outcome:
            seen.append(variable.get())
            variable.set(7)
            return da.Done()

    token = variable.set(3)
    for _ in range(2):
        await durable.insert(Sets)
    before = trio.lowlevel.current_statistics().tasks_living
    await durable.drain()
    assert trio.lowlevel.current_statistics().tasks_living == before
    assert seen == [3, 3]
    variable.reset(token)
