"""When a feeder reads its queue's statistics, and what it takes for the cost of that read."""

from __future__ import annotations

import math
import time

import durable_actors as da
import pytest
import trio
import trio.testing
from durable_actors._engine import setup
from durable_actors._engine.claiming import feeder, stats_refresh
from durable_actors._engine.claiming.stats_refresh import REFRESH_INTERVAL, StatsRefresh
from durable_actors._engine.maintenance.reaper import Reaper
from durable_actors._engine.running import dispatcher
from durable_actors._postgres.driver.connection import PgConn
from durable_actors.telemetry import Picked, StepCommitted, StepStarted
from tests.engine.kit import QUIET, Gate, leave_to_the_feeder, running
from tests.kit import until

pytestmark = pytest.mark.usefixtures("registry")


def refreshed(at: float) -> StatsRefresh:
    stats = StatsRefresh()
    stats.done(stats.begin(), at)
    return stats


def test_a_short_pick_is_followed_by_a_refresh_and_a_full_one_now_and_then():
    stats = refreshed(100.0)
    assert stats.wanted(100.1, short=True)
    assert not stats.wanted(100.1, short=False)
    assert stats.wanted(100.0 + REFRESH_INTERVAL, short=False)


def test_an_expensive_refresh_is_not_repeated_at_once():
    stats = refreshed(100.0)
    stats.took(99.95, 0.05, alone=True)
    assert not stats.wanted(100.5, short=True)
    assert stats.postponed
    assert stats.not_before == pytest.approx(100.95)
    assert stats.wanted(101.0, short=True)
    assert not stats.postponed


def test_cpu_time_of_steps_beside_a_refresh_is_not_its_price():
    stats = refreshed(100.0)
    stats.took(99.0, 1.0, alone=False)
    assert stats.wanted(100.1, short=True)
    assert stats.last_was_slow, "the next one is made before claims start"
    stats.took(100.1, 0.001, alone=True)
    assert not stats.last_was_slow


def test_a_measured_price_is_not_replaced_by_that_of_a_refresh_beside_steps():
    stats = refreshed(100.0)
    stats.took(99.9, 0.1, alone=True)
    stats.took(100.0, 0.001, alone=False)
    assert not stats.wanted(100.5, short=True)


def test_a_request_while_a_refresh_is_under_way_leads_to_another():
    stats = refreshed(100.0)
    begun = stats.begin()
    stats.request()
    stats.done(begun, 101.0)
    assert stats.wanted(101.0, short=False)


async def test_a_step_that_computes_does_not_postpone_the_next_refresh(durable_dsn, monkeypatch):
    """When 100 ms of a step were mistaken for the server's time, a row due in 0.3 s began 1.5 s late."""
    long: list[bool] = []
    asked, burns, took, refresh = trio.Event(), trio.Event(), StatsRefresh.took, feeder.Feeder._refresh

    def noted(self: StatsRefresh, began: float, seconds: float, *, alone: bool) -> None:
        if seconds >= 0.5:
            long.append(alone)
        took(self, began, seconds, alone=alone)

    async def noted_refresh(self: feeder.Feeder, conn: PgConn, **options: float) -> None:
        if self._started_beside and not burns.is_set():  # the refresh after the pick of the job
            asked.set()
            await burns.wait()
        await refresh(self, conn, **options)

    @da.job
    async def nothing(args):
        """Whatever is picked beside it lets the statistics be read."""

    @da.job
    async def burn(args):
        await asked.wait()
        burns.set()
        time.sleep(0.6)  # while the answer is on its way

    # On a busy machine the first refresh may count as slow: then the next one is made before claims start.
    monkeypatch.setattr(stats_refresh, "CHEAP_REFRESH", math.inf)
    monkeypatch.setattr(stats_refresh, "refresh_pause", lambda _: 0.0)
    monkeypatch.setattr(StatsRefresh, "took", noted)
    monkeypatch.setattr(feeder.Feeder, "_refresh", noted_refresh)
    monkeypatch.setattr(setup, "builtin_queues", frozenset)
    leave_to_the_feeder(monkeypatch)
    async with running(durable_dsn, **QUIET) as run:
        number = await run.insert(burn, args={})
        while not burns.is_set():  # the pick of a lone row may be followed by no refresh
            await run.insert(nothing, args={})
        await run.events.final(number)
    assert long == [False]


async def test_no_connection_is_held_while_a_step_takes_its_first_turn(durable_dsn, monkeypatch):
    """A step that blocks the loop for half a lease would look like a server that does not answer."""
    used: list[int] = []

    async def round_of_nothing(_: object) -> float:
        return 3600.0

    monkeypatch.setattr(Reaper, "_round", round_of_nothing)  # it uses the lane, too
    monkeypatch.setattr(setup, "builtin_queues", frozenset)  # as its feeder does

    @da.job
    async def first(args):
        [lane] = [lane for lane in run.engine.connections().lanes if lane.name == "claim"]
        used.append(lane.in_use)

    leave_to_the_feeder(monkeypatch)
    async with running(durable_dsn) as run:
        for _ in range(4):
            await run.run(first, args={})
    assert used == [0, 0, 0, 0]
    kinds = [type(event) for event in run.events.events if isinstance(event, StepStarted | Picked)]
    assert kinds.index(Picked) < kinds.index(StepStarted)


async def test_running_ahead_is_counted_from_the_first_turn(durable_dsn, monkeypatch):
    """An instance that waited for its turn behind a step that computes has all of its time left."""
    monkeypatch.setattr(dispatcher, "RUN_AHEAD_SECONDS", 0.8)
    computed: list[int] = []

    class Two(da.Machine[dict]):
        @da.step(initial=True)
        async def a(self, ctx):
            if not computed:
                computed.append(ctx.id)
                time.sleep(0.9)
            return da.Next(self.b)

        @da.step
        async def b(self, ctx):
            return da.Done()

    async with running(durable_dsn, queues={"default": 2}) as run:
        async with run.engine._node.pool.acquire("claim"):  # both in one pick
            numbers = [await run.insert(Two, state={}) for _ in range(2)]
        for number in numbers:
            await run.events.final(number)
    status = {event.id: event.status for event in run.events.all(StepCommitted) if event.step == "a"}
    assert status == {number: "runnable" if number in computed else "executing" for number in numbers}


async def test_a_job_at_rest_costs_one_pick(durable_dsn, monkeypatch):
    """Its free slot and its settled outcome wake the feeder. Each costs a refresh: a tenth of a pick."""
    monkeypatch.setattr(stats_refresh, "CHEAP_REFRESH", math.inf)

    @da.job
    async def nothing(args):
        pass

    async with running(durable_dsn, **QUIET) as run:
        await run.run(nothing, args={})
        before = len(run.events.all(Picked))
        for _ in range(10):
            await trio.testing.wait_all_tasks_blocked(0.01)
            await run.run(nothing, args={})
        picks = run.events.all(Picked)[before:]
    assert [pick.claimed for pick in picks if pick.claimed] == [1] * 10
    assert (
        len(picks) < 20
    )  # ten, unless a refresh after the last job finds the next one before its hint comes


async def test_rows_of_others_are_found_when_a_slot_becomes_free(durable_dsn, db):
    """There was no hint, and the last refresh saw no row."""
    gate = Gate()

    @da.job(queue="one", name="long")
    async def wait(args):
        await gate.wait()

    async with running(durable_dsn, queues={"one": 2}, **QUIET) as run:
        first = await run.insert(wait, args={})
        await gate.wait_entered()
        parts = run.engine._parts
        assert parts is not None
        await until(lambda: parts.planners["one"].queue_empty)
        numbers = [db.insert(fsm="long", step="perform", queue="one") for _ in range(3)]
        gate.open()
        for number in (first, *numbers):
            assert (await run.ended(number)).status == "done"
