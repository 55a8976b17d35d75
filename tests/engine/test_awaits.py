"""Awaits end to end: both forms, packs, deadlines, and what each outcome does to attempt, visit and inbox."""

from __future__ import annotations

from typing import Any

import durable_actors as da
import psycopg
import pytest
import trio
from durable_actors._engine.claiming import feeder, planner
from durable_actors.telemetry import AwaitTimedOut, StepCommitted
from tests.engine.kit import QUIET, Db, Gate, parked, running
from tests.kit import PATIENCE, until

pytestmark = pytest.mark.usefixtures("registry")

State = dict[str, Any]


def seen(ctx: da.Context[State]) -> list[Any]:
    return [signal.payload for signal in ctx.awaited]


async def test_await_then_enters_the_step_with_what_matched(durable_dsn):
    class M(da.Machine[State]):
        @da.step
        async def start(self, ctx):
            assert (ctx.awaited, ctx.visit) == ((), 1)
            if ctx.attempt == 0:
                return da.Retry()
            return da.Await(["a", "b"], {"n": 1}, then=self.after)

        @da.step
        async def after(self, ctx):
            return da.Done([seen(ctx), len(ctx.signals), ctx.attempt, ctx.visit, ctx.state])

    async with running(durable_dsn) as run:
        number = await run.insert(M)
        await parked(run, number)
        await da.signal(number, "c", 0)
        await da.signal(number, "b", {"x": 1})
        assert await da.result(number, timeout=PATIENCE) == [[{"x": 1}], 2, 0, 2, {"n": 1}]
        assert (await run.ended(number)).state == {"n": 1}


async def test_await_without_then_runs_the_same_step_again(durable_dsn):
    class M(da.Machine[State]):
        @da.step
        async def start(self, ctx):
            if not ctx.awaited:
                return da.Retry() if ctx.attempt < 2 else da.Await("a")
            return da.Done([seen(ctx), ctx.attempt, ctx.visit, ctx.idempotency_key])

    async with running(durable_dsn) as run:
        number = await run.insert(M)
        await parked(run, number)
        await da.signal(number, "a", 1)
        assert await da.result(number, timeout=PATIENCE) == [[1], 2, 1, f"{number}/1/start"]


async def test_a_signal_before_during_and_after_the_park(durable_dsn):
    gate = Gate()

    class M(da.Machine[State]):
        @da.step
        async def start(self, ctx):
            await gate.wait()
            return da.Await("a", then=self.after)

        @da.step
        async def after(self, ctx):
            return da.Done(seen(ctx))

    async with running(durable_dsn, **QUIET) as run:
        before = await run.insert(M, schedule_in=0.2)
        await da.signal(before, "a", "before")
        during = await run.insert(M)
        after = await run.insert(M)
        await gate.wait_entered(3)
        await da.signal(during, "a", "during")
        gate.open()
        await parked(run, after)
        await da.signal(after, "a", "after")
        found = [await da.result(each, timeout=PATIENCE) for each in (before, during, after)]
    assert found == [["before"], ["during"], ["after"]]


@pytest.mark.parametrize("then", [True, False])
async def test_a_deadline_starts_the_step_without_polls_and_reaps(durable_dsn, then):
    class M(da.Machine[State]):
        @da.step
        async def start(self, ctx):
            if ctx.state.get("asked"):
                return await self.after(ctx)
            if ctx.attempt < 2:
                return da.Retry()
            return da.Await("never", {"asked": True}, then=self.after if then else None, timeout=0.5)

        @da.step
        async def after(self, ctx):
            return da.Done([list(ctx.awaited), ctx.attempt, ctx.visit])

    async with running(durable_dsn, **QUIET, reap_interval=600) as run:
        number = await run.insert(M)
        await parked(run, number)
        began = trio.current_time()
        assert await da.result(number, timeout=PATIENCE) == ([[], 0, 2] if then else [[], 2, 1])
        assert trio.current_time() - began < 10, "polling would take 60 s, reaping 600"
        await run.events.wait(AwaitTimedOut)


async def test_a_later_deadline_does_not_hide_an_earlier_one(durable_dsn):
    class M(da.Machine[State]):
        @da.step
        async def start(self, ctx):
            return da.Await("never", then=self.after, timeout=ctx.state["timeout"])

        @da.step
        async def after(self, ctx):
            return da.Done()

    async with running(durable_dsn, **QUIET, reap_interval=600) as run:
        far = await run.insert(M, state={"timeout": 60 * 86_400})
        near = await run.insert(M, state={"timeout": 0.3})
        await da.result(near, timeout=PATIENCE)
        assert (await da.inspect(far)).status == "awaiting_signal"


async def test_polls_do_not_put_a_deadline_off(durable_dsn, monkeypatch):
    """Found locked several times, it is looked at less often; polls, which come sooner, must not start that anew."""
    looks = 0
    expire = feeder.expire_awaits

    async def find_locked(*args: Any, **options: Any) -> list[int]:
        nonlocal looks
        looks += 1
        if looks == 1:
            stranger.execute("select from durable.gen_durable for update")
        return await expire(*args, **options)

    class M(da.Machine[State]):
        @da.step
        async def start(self, ctx):
            return da.Await("never", then=self.after, timeout=0.1)

        @da.step
        async def after(self, ctx):
            return da.Done("woken")

    monkeypatch.setattr(feeder, "expire_awaits", find_locked)
    poll = planner.MAX_LOCKED_PAUSE / 2
    async with running(durable_dsn, poll_interval=poll, max_poll_interval=poll) as run:
        with psycopg.connect(durable_dsn) as stranger:
            number = await run.insert(M)
            await until(lambda: looks >= 8)
        assert await da.result(number, timeout=PATIENCE) == "woken"


async def test_packs_accumulate_until_the_deadline_or_the_count(durable_dsn):
    runs: list[list[int]] = []

    class Pack(da.Machine[State]):
        @da.step
        async def start(self, ctx):
            runs.append(seen(ctx))
            if len(ctx.awaited) < 3 and not ctx.state.get("last"):
                return da.Await("part", {"last": len(ctx.awaited) == 2}, timeout=60)
            return da.Next(self.after)

        @da.step
        async def after(self, ctx):
            return da.Done([list(ctx.awaited), [s.payload for s in ctx.signals]])

    async with running(durable_dsn) as run:
        number = await run.insert(Pack)
        for n in range(3):
            await parked(run, number, n + 1)
            await da.signal(number, "part", n)
        assert await da.result(number, timeout=PATIENCE) == [[], []], "Next has consumed what was handed"
    assert runs == [[], [0], [0, 1], [0, 1, 2]], "one run per signal: what was seen does not wake"


async def test_what_is_awaited_no_longer_is_consumed_the_rest_is_kept(durable_dsn):
    class M(da.Machine[State]):
        @da.step
        async def start(self, ctx):
            return da.Await(["a", "b"], then=self.second, timeout=60)

        @da.step
        async def second(self, ctx):
            if ctx.state.get("again"):
                return da.Done([s.name for s in ctx.signals])
            return da.Await(["b", "c"], {"again": True})

    async with running(durable_dsn) as run:
        number = await run.insert(M, schedule_in=0.1)
        assert await da.signal_many([{"target": number, "name": n} for n in "abx"]) == ["sent"] * 3
        await parked(run, number)
        await da.signal(number, "c")
        # a was handed and is awaited no longer; b is kept; x was never handed; c has come.
        assert await da.result(number, timeout=PATIENCE) == ["b", "x", "c"]


async def test_consume_names_further_signals(durable_dsn):
    class M(da.Machine[State]):
        @da.step
        async def start(self, ctx):
            if not ctx.signals:
                return da.Retry(delay=0.01)
            return da.Await("a", then=self.second, consume=[s for s in ctx.signals if s.name == "noise"])

        @da.step
        async def second(self, ctx):
            loud = [s.id for s in ctx.signals if s.name == "loud"]
            return da.Next(self.third, consume=loud)

        @da.step
        async def third(self, ctx):
            return da.Done([s.name for s in ctx.signals])

    async with running(durable_dsn) as run:
        number = await run.insert(M, schedule_in=0.1)
        await da.signal_many([{"target": number, "name": n} for n in ("noise", "loud", "kept", "a")])
        assert await da.result(number, timeout=PATIENCE) == ["kept"]


async def test_retry_consumes_nothing_and_what_comes_meanwhile_survives(durable_dsn, ahead):
    class M(da.Machine[State], run_ahead=ahead):
        @da.step
        async def start(self, ctx):
            return da.Await("a", then=self.second)

        @da.step
        async def second(self, ctx):
            if ctx.attempt == 0:
                return da.Retry()
            assert seen(ctx) == [1]
            await da.signal(ctx.id, "a", 2)
            return da.Next(self.third)

        @da.step
        async def third(self, ctx):
            assert ctx.awaited == ()
            return da.Await("a", then=self.last)

        @da.step
        async def last(self, ctx):
            return da.Done(seen(ctx))

    async with running(durable_dsn) as run:
        number = await run.insert(M)
        await parked(run, number)
        await da.signal(number, "a", 1)
        assert await da.result(number, timeout=PATIENCE) == [2]


async def test_running_ahead_shows_the_inbox_as_it_is(durable_dsn, ahead):
    class M(da.Machine[State], run_ahead=ahead):
        @da.step
        async def start(self, ctx):
            assert ctx.signals == ()
            await da.signal(ctx.id, "a", 7)
            return da.Next(self.second)

        @da.step
        async def second(self, ctx):
            return da.Done([s.payload for s in ctx.signals])

    async with running(durable_dsn) as run:
        assert (await run.run(M)).result == [7]


async def test_an_await_from_handle_runs_once_per_signal_and_keeps_the_attempt(durable_dsn):
    """H45: the handed signal does not wake the park that `handle` asks for, or it would fail at full speed."""
    attempts: list[tuple[int, int]] = []

    class M(da.Machine[State]):
        @da.step
        async def start(self, ctx):
            return da.Await("go", then=self.work)

        @da.step
        async def work(self, ctx):
            attempts.append((ctx.attempt, len(ctx.awaited)))
            if len(ctx.awaited) < 3:
                raise RuntimeError("not yet")
            return da.Done()

        async def handle(self, error, ctx):
            assert (ctx.signals, ctx.awaited, ctx.children) == ((), (), ())
            return da.Retry() if ctx.attempt == 0 else da.Await("go", then=self.work)

    async with running(durable_dsn) as run:
        number = await run.insert(M)
        await parked(run, number)
        for count in (2, 3):
            await da.signal(number, "go")
            await parked(run, number, count)
        await da.signal(number, "go")
        await run.ended(number)
    assert attempts == [(0, 1), (1, 1), (1, 2), (1, 3)]


async def test_a_signal_between_pick_and_run_is_seen(durable_dsn):
    """H57: the row timed out and was claimed into the buffer; then the signal came. It has not timed out."""
    gate = Gate()

    class Blocker(da.Machine[State]):
        @da.step
        async def start(self, ctx):
            await gate.wait()
            return da.Done()

    class M(da.Machine[State]):
        @da.step
        async def start(self, ctx):
            return da.Await("paid", then=self.after, timeout=0.2)

        @da.step
        async def after(self, ctx):
            return da.Done(seen(ctx))

    queue = da.Queue(1, prefetch=5)
    async with running(durable_dsn, queues={"default": queue}) as run:
        number = await run.insert(M)
        await parked(run, number)
        await run.insert(Blocker)
        await gate.wait_entered()
        with trio.fail_after(PATIENCE):
            while (await da.inspect(number)).status != "executing":
                await trio.sleep(0.01)
        await da.signal(number, "paid", 5)
        gate.open()
        assert await da.result(number, timeout=PATIENCE) == [5]


async def test_an_end_drops_the_inbox(durable_dsn, db: Db):
    gate = Gate()

    class M(da.Machine[State]):
        @da.step
        async def start(self, ctx):
            await gate.wait()
            return da.Done()

    async with running(durable_dsn) as run:
        number = await run.insert(M)
        await gate.wait_entered()
        await da.signal(number, "a")
        await da.signal(number, "b", dedup_key="1")
        gate.open()
        await run.ended(number)
        with pytest.raises(da.NoTarget, match=f"instance {number}"):
            await da.signal(number, "a")
    assert db.execute("select count(*) from durable.signals") == [(0,)]


@pytest.mark.parametrize("gone", ["never there", "another name", "beyond the page"])
async def test_consuming_what_was_not_handed_does_not_spin(durable_dsn, db: Db, gone: str):
    """With more matches than a page, the next run would be shown the very same ones."""
    runs: list[int] = []

    class M(da.Machine[State]):
        @da.step
        async def start(self, ctx):
            runs.append(len(ctx.awaited))
            if len(runs) > 3:
                return da.Stop("it spins")
            if not ctx.awaited:
                return da.Await(["x", "now"])
            [[number]] = db.execute(NUMBERS[gone])
            return da.Await(["x", "now"], consume=[number])

    async with running(durable_dsn) as run:
        number = await run.insert(M)
        await parked(run, number)
        await da.signal(number, "other")
        await da.signal_many([{"target": number, "name": "x"}] * 1100)
        again = await run.events.wait(StepCommitted, id=number, count=2)
        assert (again.status, runs) == ("awaiting_signal", [0, 1000]), "it sleeps until something new comes"


NUMBERS = {
    "never there": "select max(id) + 1000 from durable.signals",
    "another name": "select id from durable.signals where name = 'other'",
    "beyond the page": "select max(id) from durable.signals where name = 'x'",
}


async def test_more_matches_than_a_page_neither_spin_nor_stall(durable_dsn, db: Db):
    """Re-awaiting with 2,500 matches parks; consuming what was handed pages through all of them."""
    runs: list[int] = []

    class M(da.Machine[State]):
        @da.step
        async def start(self, ctx):
            runs.append(len(ctx.awaited))
            if len(runs) <= 2:
                return da.Await(["x", "now"])
            total = ctx.state.get("total", 0) + len(ctx.awaited)
            if total >= 2501:
                return da.Done(total)
            return da.Await(["x", "now"], {"total": total}, consume=ctx.awaited)

    async with running(durable_dsn) as run:
        number = await run.insert(M)
        await parked(run, number)
        await da.signal_many([{"target": number, "name": "x"}] * 2500)
        await parked(run, number, 2)
        assert runs == [0, 1000]
        await da.signal(number, "now")
        assert await da.result(number, timeout=PATIENCE) == 2501
    assert runs == [0, 1000, 1000, 1000, 501]
