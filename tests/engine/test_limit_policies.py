"""Limits that drop, slots that instances keep, limits beside cancel and prefetch, as engines and steps see them."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import durable_actors as da
import pytest
import trio
from tests.engine.kit import Db, running
from tests.kit import until

pytestmark = pytest.mark.usefixtures("registry")


async def test_what_a_full_limit_drops_is_cancelled_and_its_parent_goes_on(db: Db):
    ran: list[int] = []

    @da.job(name="call", rate_limit="api")
    async def call(args: int) -> None:
        ran.append(args)

    class Parent(da.Machine[Any], name="parent"):
        @da.step
        async def start(self, ctx: da.Context[Any]) -> da.Outcome:
            children = [da.Child(call, args=n) for n in range(3)]
            return da.ScheduleChildren(self.end, children)

        @da.step
        async def end(self, ctx: da.Context[Any]) -> da.Outcome:
            return da.Done(sorted(child.status for child in ctx.children))

    async with running(db.dsn, limits={"api": da.Limit(1, per=3600, on_full="drop")}):
        assert await da.result(await da.insert(Parent), timeout=10) == ["cancelled", "cancelled", "done"]
        late = await da.insert(call, args=9)
        with pytest.raises(da.InstanceCancelled, match="the limit api is full"):
            await da.result(late, timeout=5)
        told = await da.explain(late)
        assert "limit 'api' was full" in told.summary
        await da.retry(late)
        await until(lambda: db.row(late, "hold, limited_by") == (3, "api"))  # somebody wants it: it waits
    assert ran == [0]


async def test_what_is_dropped_on_its_way_compensates(db: Db):
    class Order(da.Machine[Any], name="order"):
        @da.step
        async def start(self, ctx: da.Context[Any]) -> da.Outcome:
            return da.Next(self.charge, rate_limit="api")

        @da.step
        async def charge(self, ctx: da.Context[Any]) -> da.Outcome:
            return da.Done("charged")

        @da.step(on_cancel=True)
        async def undo(self, ctx: da.Context[Any]) -> da.Outcome:
            assert ctx.cancellation is not None
            undone.append((ctx.id, ctx.cancellation.limit))
            return da.Done()

    undone: list[tuple[int, str | None]] = []
    async with running(db.dsn, limits={"api": da.Limit(1, per=3600, on_full="drop")}):
        assert await da.result(await da.insert(Order), timeout=5) == "charged"
        second = await da.insert(Order)
        with pytest.raises(da.InstanceCancelled):
            await da.result(second, timeout=5)
    assert undone == [(second, "api")]


async def test_an_instance_keeps_its_slot_while_it_awaits(db: Db):
    class Session(da.Machine[Any], name="session"):
        @da.step(slot="seat")
        async def start(self, ctx: da.Context[Any]) -> da.Outcome:
            began.append(ctx.id)
            return da.Await("go", then=self.end)

        @da.step
        async def end(self, ctx: da.Context[Any]) -> da.Outcome:
            return da.Done()

    began: list[int] = []
    async with running(db.dsn, limits={"seat": da.Limit(slots=1, held="instance")}):
        first = await da.insert(Session)
        await until(lambda: db.row(first, "status::text") == ("awaiting_signal",))
        second = await da.insert(Session)
        await until(lambda: db.row(second, "hold, limited_by") == (3, "seat"))
        told = await da.explain(second)
        assert f"all 1 slots are taken, by instances {first}" in str(told.blockers)
        await da.signal(first, "go")
        await da.result(first, timeout=5)
        await until(lambda: began == [first, second])
        await da.cancel(second)
        third = await da.insert(Session)
        await until(lambda: began == [first, second, third])


async def test_a_step_with_a_slot_alone_that_is_told_to_wait_waits(db: Db):
    ran: list[float] = []

    @da.job(name="render", slot="gpu", max_attempts=1)
    async def render(args: int) -> None:
        ran.append(trio.current_time())
        if len(ran) == 1:
            raise da.RateLimited(retry_after=0.4)

    async with running(db.dsn, limits={"gpu": da.Limit(slots=1)}):
        await da.result(await da.insert(render, args=1), timeout=5)
    assert len(ran) == 2
    assert ran[1] - ran[0] > 0.35, "it ran again and again"


async def test_what_compensates_waits_for_its_own_slot(db: Db):
    now = most = 0

    class M(da.Machine[Any], name="m"):
        @da.step(slot="gpu")
        async def start(self, ctx: da.Context[Any]) -> da.Outcome:
            return await self.work(da.Done())

        @da.step(on_cancel=True, slot="gpu")
        async def undo(self, ctx: da.Context[Any]) -> da.Outcome:
            return await self.work(da.Done())

        async def work(self, outcome: da.Outcome) -> da.Outcome:
            nonlocal now, most
            now += 1
            most = max(most, now)
            await trio.sleep(0.05)
            now -= 1
            return outcome

    async with running(db.dsn, limits={"gpu": da.Limit(slots=1)}):
        ids = [await da.insert(M) for _ in range(6)]
        for number in ids[1:]:
            await da.cancel(number)
        for number in ids:
            with trio.fail_after(10):
                await until(lambda number=number: db.row(number, "status::text")[0] in {"done", "cancelled"})
    assert most == 1


async def test_what_uses_limits_is_not_prefetched_again_and_again(db: Db):
    """A queue with a prefetch claims rows beyond its slots; those with limits it must give back, once."""
    released = trio.Event()

    @da.job(name="call", rate_limit="api")
    async def call(args: int) -> None:
        await released.wait()

    queue = {"default": da.Queue(1, prefetch=50)}
    async with running(db.dsn, limits={"api": da.Limit(1000, burst=1000)}, queues=queue):
        ids = await da.insert_many(call, [{"args": n} for n in range(100)])
        await until(
            lambda: db.value("select count(*) from durable.gen_durable where status = 'executing'") == 1
        )
        await trio.sleep(0.3)
        revs = [db.row(number or 0, "rev")[0] for number in ids]
        released.set()
        for number in ids:
            await da.result(number or 0, timeout=20)
    assert sum(revs) < 500, f"claimed and given back {sum(revs) // 2} times in 0.3 s"


@pytest.mark.parametrize("wrapped", [False, True])
async def test_what_a_step_is_told_to_wait_may_be_a_timedelta_and_come_from_a_nursery(db: Db, wrapped: bool):
    ran: list[float] = []

    async def ask() -> None:
        raise da.RateLimited(retry_after=timedelta(milliseconds=400))

    @da.job(name="call", rate_limit="api", max_attempts=1)
    async def call(args: int) -> None:
        ran.append(trio.current_time())
        if len(ran) == 1 and wrapped:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ask)
        elif len(ran) == 1:
            await ask()

    async with running(db.dsn, limits={"api": da.Limit(1000)}):
        await da.result(await da.insert(call, args=1), timeout=5)
    assert len(ran) == 2
    assert ran[1] - ran[0] > 0.35
