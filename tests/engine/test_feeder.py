"""The feeder: hints, refills, due times, priorities, unknown machines, drains during a pick, a pool that is down."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import durable_actors as da
import pytest
import trio
from durable_actors._engine import setup
from durable_actors._engine.claiming import feeder
from durable_actors._engine.claiming.cursor import MAX_EXTRAS, PickCursor
from durable_actors._engine.claiming.planner import ClaimPlanner, Pick, Sleep
from durable_actors._engine.claiming.stats_refresh import StatsRefresh
from durable_actors._engine.limits import QueueLimits
from durable_actors._store.claim import QueueShape
from durable_actors._store.rows import PickResult
from durable_actors.machine import isolated_registry
from durable_actors.otp import Pool, PoolClosed
from durable_actors.telemetry import DrainStarted, Picked, QueueSaturated, StepStarted
from psycopg.errors import QueryCanceled
from tests.engine.kit import QUIET, Gate, at_rest, gated, leave_to_the_feeder, running, simple
from tests.kit import until

pytestmark = pytest.mark.usefixtures("registry")


async def idle(run, queue: str = "default") -> None:
    """Until the feeder has looked and found nothing more to claim."""
    await until(lambda: run.events.all(Picked, queue=queue, claimed=0))


async def test_an_insert_starts_at_once(durable_dsn):
    M = simple()
    async with running(durable_dsn, **QUIET) as run:
        await idle(run)
        assert (await run.run(M, state={"n": 1})).result == 1
        assert (await run.run(M, state={"n": 2}, priority=7)).result == 2
        assert (await run.run(M, state={"n": 3}, priority=-7)).result == 3


async def test_a_hint_wakes_the_feeder_while_a_long_step_runs(durable_dsn):
    """H52: free capacity decides, not whether anything runs."""
    gate = Gate()
    Long, M = gated(gate), simple()
    async with running(durable_dsn, queues={"default": 2}, **QUIET) as run:
        long = await run.insert(Long)
        await gate.wait_entered()
        assert (await run.run(M)).status == "done"
        assert (await run.run(M)).status == "done"
        gate.open()
        await run.ended(long)


async def test_a_backlog_is_worked_off_without_polling(durable_dsn):
    """A free slot refills; 30 rows on 2 slots, nobody polls."""
    M = simple()
    async with running(durable_dsn, queues={"default": 2}, **QUIET) as run:
        ids = await run.engine.client.insert_many(M, [{"state": {"n": n}} for n in range(30)])
        assert [(await run.ended(number)).result for number in ids if number] == list(range(30))


async def test_a_feeder_is_notified_of_what_a_step_starts(durable_dsn):
    M = simple(queue="second")

    class Parent(da.Machine):
        @da.step
        async def start(self, ctx):
            return da.Done([await ctx.insert(M, state={"n": 5}, priority=9), await da.insert(M, priority=4)])

    async with running(durable_dsn, **QUIET) as run:
        await idle(run, "second")
        one, two = (await run.run(Parent)).result
        assert (await run.ended(one)).result == 5
        assert (await run.ended(two)).status == "done"


async def test_rows_of_a_new_priority_from_elsewhere(durable_dsn, db):
    """One pick finds them although their priority is new here: not the pick after the next poll."""
    M = simple()
    async with running(durable_dsn, **QUIET) as run:
        await idle(run)
        number = da.sync.insert(db.conn, M, priority=55)
        assert number is not None
        run.engine._node.notify("default")  # as when the poll is due
        assert (await run.ended(number)).status == "done"


@pytest.mark.parametrize("how", ["schedule_in", "schedule_at", "eligible_at", "past"])
async def test_a_row_starts_when_it_is_due(durable_dsn, db, how):
    """Whatever the polls: the feeder sleeps no longer than to its next due time."""
    now = datetime.now(UTC)
    soon = now + timedelta(seconds=0.2)
    options = {
        "schedule_in": {"schedule_in": 0.2},
        "schedule_at": {"schedule_at": soon, "schedule_in": 3600},
        "eligible_at": {"eligible_at": soon, "schedule_at": now + timedelta(days=1)},
        "past": {"eligible_at": now - timedelta(days=1)},
    }[how]
    M = simple()
    async with running(durable_dsn, **QUIET) as run:
        await run.run(M)  # the cursor stands beyond what is in the past
        number = await run.insert(M, priority=3, **options)
        row = await run.ended(number)
        query = "select finished_at >= eligible_at from durable.gen_durable where id = %s"
        assert db.execute(query, number) == [(True,)]
    assert row.status == "done"


async def test_a_row_that_becomes_due_between_the_pick_and_the_refresh_is_picked(
    durable_dsn, db, monkeypatch
):
    """To the pick it is a future row, to the statistics a past one: it waited for the next poll."""
    M, read, later = simple(), feeder.read_queue, []

    async def late(*args, **options):
        if (
            later
        ):  # the pick has seen nothing; the row becomes due, and the statement needs some time to the server
            db.execute(
                "update durable.gen_durable set eligible_at = clock_timestamp() where id = %s", later.pop()
            )
            await trio.sleep(0.02)
        return await read(*args, **options)

    monkeypatch.setattr(feeder, "read_queue", late)
    async with running(durable_dsn, **QUIET) as run:
        await run.run(M)
        number = await run.insert(M, schedule_in=3600)
        later.append(number)
        run.engine._node.notify("default", priority=0)
        assert (await run.ended(number)).status == "done"


def test_a_row_that_is_overdue_after_every_pick_is_picked_less_and_less_often():
    """Another session has locked it."""
    planner = ClaimPlanner(QueueLimits(10, 0, 1, 60.0, 60.0), wake_feeder=lambda: None)
    planner.restart()
    pauses = []
    for now in range(8):
        planner.begin(float(now), wanted=10, one_by_id=False, known=frozenset())
        while not isinstance(action := planner.next(float(now)), Sleep):
            if isinstance(action, Pick):
                planner.pick_from()
                planner.picked(PickResult([], [], {}), float(now), seconds=0.0)
            else:
                planner.refresh_begins()
                planner.refreshed(
                    QueueShape((0,), -0.001 if action.after_pick else None, (), None), float(now)
                )
        pauses.append(round(action.until - now, 3))
    assert pauses == [0.0, 0.01, 0.02, 0.04, 0.08, 0.16, 0.3, 0.3]


async def test_far_future_rows_wait(durable_dsn):
    M = simple()
    async with running(durable_dsn) as run:
        later = await run.insert(M, schedule_in=timedelta(days=60), priority=-5)
        assert (await run.run(M)).status == "done"
        row = await run.engine.client.inspect(later)
    assert row.status == "runnable"
    assert timedelta(days=59) < row.eligible_at - row.inserted_at < timedelta(days=61)


async def test_urgent_rows_go_first(durable_dsn):
    order = []

    class M(da.Machine):
        @da.step
        async def start(self, ctx):
            order.append(ctx.state["n"])
            return da.Done()

    rows = [(5, 1), (0, 2), (-3, 3), (5, 4), (0, 5), (32000, 6), (-32000, 7)]
    async with running(durable_dsn, queues={}) as client:
        options = [{"state": {"n": n}, "priority": priority} for priority, n in rows]
        ids = await client.engine.client.insert_many(M, options)
    async with running(durable_dsn, queues={"default": 1}) as run:
        for number in ids:
            assert number is not None
            await run.ended(number)
    assert order == [7, 3, 2, 5, 1, 4, 6]


async def test_a_huge_min_demand_still_refills(durable_dsn):
    """H24: it counts as what the queue can ever want."""
    M = simple()
    queue = da.Queue(3, prefetch=2, min_demand=1_000_000)
    async with running(durable_dsn, queues={"default": queue}, **QUIET) as run:
        ids = await run.engine.client.insert_many(M, [{}] * 17)
        for number in ids:
            assert number is not None
            assert (await run.ended(number)).status == "done"


async def test_demand_and_saturation(durable_dsn):
    gate = Gate()
    M = gated(gate)
    async with running(durable_dsn, queues={"default": da.Queue(2, prefetch=3)}) as run:
        ids = await run.engine.client.insert_many(M, [{}] * 9)
        full = await run.events.wait(QueueSaturated)
        assert (full.queue, full.running + full.buffered) == ("default", 5)
        await gate.wait_entered(2)
        first = run.events.all(Picked)[0]
        assert first.wanted == 5
        gate.open()
        for number in ids:
            assert number is not None
            await run.ended(number)
        assert max(event.wanted for event in run.events.all(Picked)) <= 5


async def test_completions_are_coalesced(durable_dsn):
    """H51: ten steps that end together cost one or two picks, not ten."""
    gate = Gate()
    M, N = gated(gate), simple()
    async with running(durable_dsn, queues={"default": 10}, **QUIET) as run:
        await run.engine.client.insert_many(M, [{}] * 10)
        await gate.wait_entered(10)
        ids = await run.engine.client.insert_many(N, [{}] * 10)
        before = len(run.events.all(Picked))
        gate.open()
        for number in ids:
            assert number is not None
            await run.ended(number)
        claiming = [event for event in run.events.all(Picked)[before:] if event.claimed]
    assert len(claiming) <= 3


async def test_an_unknown_machine_is_never_claimed_and_blocks_nobody(durable_dsn, db):
    with isolated_registry():
        Other = simple("other")
        NewVersion = simple("simple", version=2)
        async with running(durable_dsn, queues={}) as client:
            strange = [
                await client.insert(each, priority=-9) for each in (Other, NewVersion) for _ in range(4)
            ]
    M = simple()
    async with running(durable_dsn, queues={"default": 2}) as run:
        assert [(await run.run(M)).status for _ in range(3)] == ["done"] * 3
        assert sum(event.shelved for event in run.events.all(Picked)) == 8  # counted, once each
    rows = db.execute(
        "select id, status::text, attempt, hold from durable.gen_durable where fsm_version = 2 or fsm <> 'simple'"
    )
    assert sorted(rows) == [(number, "runnable", 0, 2) for number in strange]
    with isolated_registry():
        simple("other")
        simple("simple", version=2)
        async with running(
            durable_dsn, **QUIET
        ) as run:  # a node that knows them finds them on the shelf, at once
            assert {(await run.ended(number)).status for number in strange} == {"done"}
            assert {(await run.ended(number)).attempt for number in strange} == {0}


async def test_versions_coexist(durable_dsn):
    versions = {}
    for version in (1, 2):

        class M(da.Machine, name="m", version=version):
            @da.step
            async def start(self, ctx):
                return da.Done(ctx.version)

        versions[version] = M
    async with running(durable_dsn) as run:
        assert (await run.run(versions[1])).result == 1
        assert (await run.run(versions[2])).result == 2
        assert (await run.run("m")).result == 2  # by name: the newest


async def test_queues_are_served_apart(durable_dsn):
    gate = Gate()
    Slow, Quick = gated(gate, "slow", queue="slow"), simple("quick", queue="quick")
    async with running(durable_dsn, queues={"slow": 1, "quick": 1}) as run:
        ids = [await run.insert(Slow) for _ in range(3)]
        await gate.wait_entered()
        assert (await run.run(Quick)).status == "done"
        gate.open()
        for number in ids:
            await run.ended(number)


async def test_without_queues_every_machine_is_served(durable_dsn):
    One, Two, Three = simple("one", queue="a"), simple("two", queue="b"), simple("three")
    async with running(durable_dsn) as run:
        for each in (One, Two, Three):
            assert (await run.run(each)).status == "done"
        assert set(run.engine._node.queues) == {"a", "b", "default", "durable.ops"}


async def test_concurrency_is_a_ceiling(durable_dsn):
    now, most = 0, 0

    class M(da.Machine):
        @da.step
        async def start(self, ctx):
            nonlocal now, most
            now += 1
            most = max(most, now)
            await trio.sleep(0.005)
            now -= 1
            return da.Done()

    async with running(durable_dsn, queues={"default": da.Queue(3, prefetch=5)}) as run:
        ids = await run.engine.client.insert_many(M, [{}] * 20)
        for number in ids:
            assert number is not None
            await run.ended(number)
    assert most == 3


async def test_a_pick_that_waits_for_its_connection_claims_nothing_in_a_drain(durable_dsn, db, monkeypatch):
    """Nor does it read the statistics: nobody needs them any more."""
    read, reads = feeder.read_queue, list[str]()

    async def noted(conn, schema, queue, **options):
        found = await read(conn, schema, queue, **options)
        reads.append(queue)
        return found

    monkeypatch.setattr(feeder, "read_queue", noted)
    monkeypatch.setattr(setup, "builtin_queues", frozenset)  # a queue less to wait for
    leave_to_the_feeder(monkeypatch)

    @da.job
    async def quick(args):
        return 1

    async with running(durable_dsn, **QUIET) as run:
        node = run.engine._node
        await until(lambda: len(reads) == 2)  # before and after the first pick
        async with node.pool.acquire("claim"):
            number = await run.insert(quick, args={})
            await until(
                lambda: any(lane.name == "claim" and lane.waiting for lane in run.engine.connections().lanes)
            )
            run.engine.request_stop()
            await run.events.wait(DrainStarted)
            reads.clear()
        await run.engine.stop()
        assert reads == []
        assert run.events.all(StepStarted) == []
    assert db.row(number, "status::text, attempt, updated_at = inserted_at") == ("runnable", 0, True)


@pytest.mark.parametrize("by", ["a pick", "the insert"])
async def test_a_claim_is_not_forgotten_when_the_pool_is_down(durable_dsn, monkeypatch, by):
    """Neither buffered nor running, it would be renewed for ever and run by nobody."""
    real, failures = Pool.start_nowait, [PoolClosed("x")]

    def start_nowait(self, *args, **kwargs):
        if failures:
            raise failures.pop()
        return real(self, *args, **kwargs)

    @da.job
    async def quick(args):
        return "finished"

    monkeypatch.setattr(Pool, "start_nowait", start_nowait)
    if by == "a pick":
        leave_to_the_feeder(monkeypatch)
    async with running(durable_dsn, lease_ttl=3600, reap_interval=3600) as run:
        await at_rest(run)
        row = await run.run(quick, args={})
    assert (row.result, row.attempt, row.crashes, failures) == ("finished", 0, 0, [])


async def test_urgent_rows_overtake_prefetched_ones(durable_dsn):
    gate, order = Gate(), []

    @da.job
    async def ordered(args):
        order.append(args["name"])
        await gate.wait()

    async with running(durable_dsn, queues={"default": da.Queue(1, prefetch=3)}) as run:
        await run.insert(ordered, args={"name": "first"})
        await gate.wait_entered()
        numbers = [await run.insert(ordered, args={"name": "later"}, priority=5)]
        await run.events.wait(Picked, claimed=1, count=2)
        numbers.append(await run.insert(ordered, args={"name": "urgent"}, priority=-5))
        await run.events.wait(Picked, claimed=1, count=3)
        gate.open()
        for number in numbers:
            await run.ended(number)
    assert order == ["first", "urgent", "later"]


def test_hints_are_bounded():
    cursor = PickCursor()
    for number in range(MAX_EXTRAS + 5):
        cursor.hint(number)
    assert len(cursor.begin(1.0, limit=10**6, known=frozenset()).extras) == MAX_EXTRAS


async def test_a_burst_of_inserts_is_served(durable_dsn):
    @da.job
    async def quick(args):
        return args["n"]

    ids: list[int] = []

    async with running(durable_dsn, queues={}) as run:

        async def insert(n):
            ids.append(await run.insert(quick, args={"n": n}))

        async with trio.open_nursery() as nursery:
            for n in range(1200):
                nursery.start_soon(insert, n)
    assert len(set(ids)) == 1200


async def test_claims_start_before_the_statistics_are_refreshed(durable_dsn, monkeypatch):
    """At rest every pick is short, and the refresh after it took half as long as the pick."""
    read, pick, refresh, step, claimed = feeder.read_queue, feeder.pick_instances, Gate(), Gate(), []

    @da.job
    async def quick(args):
        await step.wait()

    async def picked(*args, **kwargs):
        found = await pick(*args, **kwargs)
        claimed.extend(found.claims)
        return found

    async def held(*args, **options):
        if claimed:
            await refresh.wait()
        return await read(*args, **options)

    leave_to_the_feeder(monkeypatch)
    monkeypatch.setattr(feeder, "pick_instances", picked)
    monkeypatch.setattr(feeder, "read_queue", held)
    async with running(durable_dsn) as run:
        await run.insert(quick, args={})
        await step.wait_entered()
        await refresh.wait_entered()
        step.open()
        refresh.open()


@pytest.mark.parametrize("key", [None, "k"])
async def test_claims_start_although_the_refresh_after_their_pick_fails(durable_dsn, db, monkeypatch, key):
    """They do not wait for the pause after the failure: here, that is an hour."""
    read, claimed = feeder.read_queue, list[object]()
    pick = feeder.pick_instances
    M = simple()

    async def picked(*args, **kwargs):
        found = await pick(*args, **kwargs)
        claimed.extend(found.claims)
        return found

    async def refused(*args, **options):
        if claimed:
            raise QueryCanceled("canceling statement due to statement timeout")
        return await read(*args, **options)

    monkeypatch.setattr(feeder, "pick_instances", picked)
    monkeypatch.setattr(feeder, "read_queue", refused)
    monkeypatch.setattr(
        StatsRefresh, "last_was_slow", property(lambda _: True, lambda *_: None), raising=False
    )
    monkeypatch.setattr(feeder.Outage, "failed", lambda *_: 3600.0)
    number = da.sync.insert(db.conn, M, state={"n": 1}, partition_key=key)
    assert number is not None
    async with running(durable_dsn, **QUIET) as run:
        assert (await run.ended(number)).result == 1
