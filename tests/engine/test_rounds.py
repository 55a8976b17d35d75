"""What a step sends without a key: a crash re-run finds it, a run that an outcome asked for sends anew."""

from __future__ import annotations

from typing import Any

import durable_actors as da
import pytest
from tests.engine.kit import REAP, Db, Gate, collector, running
from tests.kit import until
from tests.store.kit import connect
from tests.support.commands import retry_instance

pytestmark = pytest.mark.usefixtures("registry")

State = dict[str, Any]
PAYLOADS = "select payload from durable.signals where target_id = %s order by id"
LEAVES = "select state from durable.gen_durable where fsm = 'leaf' order by id"


def leaf() -> Any:
    @da.job(name="leaf", queue="nobody")
    async def leaf(args: dict[str, Any]) -> None: ...

    return leaf


def sent(db: Db, target: int) -> list[Any]:
    return [payload for (payload,) in db.execute(PAYLOADS, target)]


async def test_a_committed_retry_sends_and_inserts_anew(durable_dsn, db: Db):
    child = leaf()

    class Reports(da.Machine[State]):
        @da.step
        async def start(self, ctx):
            await ctx.signal("k", "progress", ctx.attempt)
            await ctx.insert(child, args={"n": ctx.attempt})
            return da.Retry() if ctx.attempt < 2 else da.Done()

    async with running(durable_dsn, queues={"default": 5}) as run:
        target = await run.insert(collector(), unique_key="k", schedule_in=3600)
        assert (await run.run(Reports)).status == "done"
    assert sent(db, target) == [0, 1, 2]
    assert [state["n"] for (state,) in db.execute(LEAVES)] == [0, 1, 2]


async def test_a_same_step_await_that_keeps_its_pack_sends_anew(durable_dsn, db: Db):
    """The oldest signal that it was handed is the same in every run."""

    class Packs(da.Machine[State]):
        @da.step
        async def start(self, ctx):
            await ctx.signal("k", "progress", len(ctx.awaited))
            return da.Await("item") if len(ctx.awaited) < 3 else da.Done()

    async with running(durable_dsn) as run:
        target = await run.insert(collector(), unique_key="k", schedule_in=3600)
        number = await run.insert(Packs)
        for count in range(1, 4):
            await until(lambda count=count: len(sent(db, target)) == count)
            await until(lambda: db.row(number, "status") == ("awaiting_signal",))
            await da.signal(number, "item")
        assert (await run.ended(number)).status == "done"
    assert sent(db, target) == [0, 1, 2, 3]


async def test_a_crash_rerun_of_a_later_round_finds_what_it_sent(durable_dsn, db: Db):
    child, gate = leaf(), Gate()

    class Reports(da.Machine[State]):
        @da.step
        async def start(self, ctx):
            await ctx.signal("k", "progress", ctx.state["round"])
            await ctx.insert(child, args={"n": ctx.state["round"]})
            if not ctx.state["round"]:
                return da.Retry({"round": 1})
            if ctx.attempt == 1:
                await gate.wait()
            return da.Done()

    async with running(durable_dsn, queues={"default": 5}, heartbeat_interval=0.05) as run:
        target = await run.insert(collector(), unique_key="k", schedule_in=3600)
        number = await run.insert(Reports, state={"round": 0})
        await gate.wait_entered()
        db.execute(REAP, number)
        row = await run.ended(number)
        assert (row.status, row.crashes) == ("done", 1)
    assert sent(db, target) == [0, 1]
    assert [state["n"] for (state,) in db.execute(LEAVES)] == [0, 1]


async def test_a_rerun_that_is_handed_more_than_the_timed_out_run_sends_nothing_twice(durable_dsn, db: Db):
    """A timeout wakes it, it sends, its worker loses it; a signal arrives before it runs again."""
    gate = Gate()
    handed: list[int] = []

    class Waits(da.Machine[State]):
        @da.step
        async def start(self, ctx):
            if not ctx.state["waited"]:
                return da.Await("a", {"waited": True}, timeout=0.01)
            handed.append(len(ctx.awaited))
            await ctx.signal("k", "reminder")
            if not ctx.attempt:
                await gate.wait()
            return da.Done()

    async with running(durable_dsn, heartbeat_interval=0.05) as run:
        target = await run.insert(collector(), unique_key="k", schedule_in=3600)
        number = await run.insert(Waits, state={"waited": False})
        await gate.wait_entered()
        await da.signal(number, "a")
        db.execute(REAP, number)
        assert (await run.ended(number)).status == "done"
    assert handed == [0, 1]
    assert sent(db, target) == [None]


async def test_what_handle_sends_is_sent_once_per_failure(durable_dsn, db: Db):
    """Also when `handle` runs again because its worker was lost before its outcome was committed."""
    gate = Gate()

    class Fails(da.Machine[State]):
        @da.step
        async def start(self, ctx):
            if ctx.attempt == 3:
                return da.Done()
            raise RuntimeError("no")

        async def handle(self, error, ctx):
            await ctx.signal("k", "alarm", ctx.attempt)
            if ctx.attempt == 1:
                await gate.wait()
            return da.Retry()

    async with running(durable_dsn, heartbeat_interval=0.05) as run:
        target = await run.insert(collector(), unique_key="k", schedule_in=3600)
        number = await run.insert(Fails)
        await gate.wait_entered()
        db.execute(REAP, number)
        assert (await run.ended(number)).status == "done"
    assert sent(db, target) == [0, 1], "attempt 2 was the re-run of the second failure's handle"


async def test_a_retried_instance_sends_anew(durable_dsn, db: Db):
    """It failed by an outcome, and somebody asked for another run."""

    class Fails(da.Machine[State]):
        @da.step
        async def start(self, ctx):
            await ctx.signal("k", "progress")
            return da.Stop("no")

    async with running(durable_dsn) as run:
        target = await run.insert(collector(), unique_key="k", schedule_in=3600)
        number = (await run.run(Fails)).id
        async with connect(durable_dsn) as conn:
            assert await retry_instance(conn, "durable", number)
        await until(lambda: len(sent(db, target)) == 2)
