"""Limits on a bench: declared, used up, refilled by `advance`; slots; `run_step` of a limited step."""

from __future__ import annotations

from typing import Any

import durable_actors as da
import pytest
from durable_actors.testing import Bench, crash_anywhere

pytestmark = pytest.mark.usefixtures("registry")


async def test_a_limit_lets_go_what_its_rate_allows(durable: Bench) -> None:
    @da.job(name="call", rate_limit="api")
    async def call(args: dict[str, int]) -> int:
        return args["n"]

    await durable.declare_limits({"api": da.Limit(2, per=60)})
    ids = [await durable.insert(call, args={"n": n}, journal="full") for n in range(5)]
    assert [each.id for each in (await durable.drain()).ran] == ids[:2]
    left = await durable.drain()
    assert not left.ran
    assert (
        "it waits for the limit 'api': its tokens are spent, the next one may run in 30"
        in left.waiting[0].why
    )
    assert left.waiting[1].why.endswith(f"; instance {ids[2]} goes first")
    await durable.advance("30s")
    assert [each.id for each in (await durable.drain()).ran] == ids[2:3]
    assert not (await durable.drain()).ran
    await durable.advance("1h")
    assert [each.id for each in (await durable.drain()).ran] == ids[3:]
    report = await durable.verify()
    assert report.ok, report.problems


async def test_a_limit_that_nobody_declared_is_named(durable: Bench) -> None:
    @da.job(name="call", rate_limit="api")
    async def call(args: dict[str, int]) -> int:
        return 1

    number = await durable.insert(call, args={})
    left = await durable.drain()
    assert not left.ran
    assert "no node has declared 'api'" in left.waiting[0].why
    await durable.declare_limits({"api": da.Limit(2, per=60)})
    await durable.drain()
    await durable.assert_done(number, 1)


async def test_a_slot_is_free_again_after_a_crash(durable: Bench) -> None:
    @da.job(name="render", slot="gpu")
    async def render(args: dict[str, int]) -> int:
        return args["n"]

    await durable.declare_limits({"gpu": da.Limit(slots=1)})
    ids = [await durable.insert(render, args={"n": n}) for n in range(3)]
    with durable.crash_after(render):
        await durable.drain()
    await durable.drain()
    await durable.drain()
    for n, number in enumerate(ids):
        await durable.assert_done(number, n)


async def test_one_instance_of_a_limit(durable: Bench) -> None:
    @da.job(name="call", rate_limit="api")
    async def call(args: dict[str, int]) -> int:
        return 1

    await durable.declare_limits({"api": da.Limit(1, per=60)})
    first, second = [await durable.insert(call, args={}) for _ in range(2)]
    assert [each.id for each in (await durable.drain(only=first)).ran] == [first]
    assert not (await durable.drain(only=second)).ran
    await durable.advance("1m")
    assert [each.id for each in (await durable.drain(only=second)).ran] == [second]


async def test_a_step_alone_is_not_held_by_its_limits(durable: Bench) -> None:
    class Calls(da.Machine, name="calls", initial="call"):
        @da.step(rate_limit="api", slot="gpu")
        async def call(self, ctx: da.Context[Any]) -> da.Outcome:
            if ctx.state:
                raise da.RateLimited(retry_after=5)
            return da.Done(1)

        async def handle(self, error: Exception, ctx: da.Context[Any]) -> da.Outcome:
            return da.Stop(error)

    for _ in range(3):
        assert await durable.run_step(Calls.call) == da.Done(1)
    with pytest.raises(da.RateLimited):
        await durable.run_step(Calls.call, {"busy": True}, handle=True)
    assert not (await durable.list_instances())


async def test_a_step_that_compensates_is_told_why(durable: Bench) -> None:
    class Trip(da.Machine, name="trip", initial="book"):
        @da.step
        async def book(self, ctx: da.Context[Any]) -> da.Outcome:
            return da.Done()

        @da.step(on_cancel=True)
        async def undo(self, ctx: da.Context[Any]) -> da.Outcome:
            assert ctx.cancellation is not None
            return da.Done({"why": ctx.cancellation.reason, "by": ctx.cancellation.by})

    told = da.Cancellation(reason="no seat", by="ada")
    assert await durable.run_step(Trip.undo, cancellation=told) == da.Done({"why": "no seat", "by": "ada"})
    with pytest.raises(da.ConfigError, match="cancellation must be a Cancellation"):
        await durable.run_step(Trip.undo, cancellation="no seat")  # type: ignore[arg-type]


async def test_a_step_that_is_told_to_wait(durable: Bench) -> None:
    busy = [True]

    @da.job(name="call", rate_limit="api")
    async def call(args: dict[str, Any]) -> int:
        if busy[0]:
            raise da.RateLimited(retry_after=30)
        return 1

    await durable.declare_limits({"api": da.Limit(10, per=60)})
    number, other = [await durable.insert(call, args={}, journal="full") for _ in range(2)]
    drained = await durable.drain()
    assert [(each.id, each.outcome, each.attempt) for each in drained.ran] == [(number, "postponed", 0)]
    assert "a step was told to wait by what it calls, the next one may run in 30" in drained.waiting[0].why
    assert (await durable.explain(other)).reason == "throttled"
    busy[0] = False
    await durable.advance("30s")
    assert [(each.id, each.attempt) for each in (await durable.drain()).ran] == [(number, 0), (other, 0)]
    report = await durable.verify()
    assert report.ok, report.problems


async def test_a_step_that_is_told_to_wait_no_time_does_not_stop_a_drain(durable: Bench) -> None:
    @da.job(name="call", slot="gpu")
    async def call(args: dict[str, Any]) -> int:
        raise da.RateLimited(retry_after=0)

    await durable.declare_limits({"gpu": da.Limit(slots=1)})
    await durable.insert(call, args={})
    with pytest.raises(AssertionError, match="max_steps=5"):
        await durable.drain(max_steps=5)


async def test_a_crash_anywhere_leaves_no_slot_taken(durable: Bench) -> None:
    class Render(da.Machine[Any], name="render"):
        @da.step
        async def start(self, ctx: da.Context[Any]) -> da.Outcome:
            return da.Next(self.draw, slot="gpu")

        @da.step(rate_limit="api")
        async def draw(self, ctx: da.Context[Any]) -> da.Outcome:
            return da.Await("seen", then=self.show)

        @da.step(slot="gpu")
        async def show(self, ctx: da.Context[Any]) -> da.Outcome:
            return da.Done("shown")

    async def scenario(bench: Bench) -> None:
        await bench.declare_limits({"gpu": da.Limit(slots=1), "api": da.Limit(100, per=1)})
        for _ in range(2):
            await bench.insert(Render, journal="full")
        await bench.drain()
        for each in await bench.list_instances():
            await bench.signal(each.id, "seen")
        await bench.drain()
        assert (await bench.verify()).ok

    await crash_anywhere(durable, scenario)
