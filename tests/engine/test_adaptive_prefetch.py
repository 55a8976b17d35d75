"""Claims beyond the free slots: only while steps end without waiting; otherwise the excess is released."""

from __future__ import annotations

import time

import durable_actors as da
import pytest
import trio
from durable_actors._engine.claims import ActiveClaim, ClaimState
from durable_actors._engine.committing import flusher
from durable_actors._engine.limits import QueueLimits
from durable_actors._engine.running import prefetch
from durable_actors._engine.running.dispatcher import Dispatcher
from durable_actors._engine.running.prefetch import AdaptivePrefetch
from durable_actors.telemetry import Picked
from tests.engine.dispatcher_kit import DispatcherRig
from tests.engine.kit import (
    QUIET,
    Gate,
    dispatcher_of,
    gated,
    in_flight,
    refuse_bad,
    restarts_of,
    running,
)
from tests.kit import until

pytestmark = pytest.mark.usefixtures("registry")


def limits(concurrency: int, prefetch: int = 0) -> QueueLimits:
    return QueueLimits(concurrency, prefetch, 1, 1.0, 1.0)


def simple() -> type[da.Machine]:
    """A machine whose only step ends at once."""

    class M(da.Machine, name="simple"):
        @da.step
        async def start(self, ctx):
            return da.Done()

    return M


def grown(concurrency: int, prefetch: int = 0) -> list[int]:
    """Rows ahead after each of ten picks that run at once, each of as many rows as it may have."""
    one, found = AdaptivePrefetch(limits(concurrency, prefetch)), []
    for now in range(10):
        one.picked(concurrency + one.rows, float(now))
        one.all_ran(now + 0.001)
        found.append(one.rows)
    return found


def grown_rig() -> DispatcherRig:
    """A dispatcher of two slots, all free, that claims six rows ahead."""
    rig = DispatcherRig(limits(2))
    for count in (2, 4):
        for active in rig.run_at_once(count):
            rig.dispatcher.finish(active, rig.now)
        rig.demand()
    assert rig.dispatcher.prefetch.rows == 6
    return rig


@pytest.mark.parametrize(
    ("concurrency", "prefetch", "expected"),
    [
        (1, 0, [1, 3, 3]),
        (10, 0, [10, 30, 30]),
        (10, 20, [10, 10, 10]),
        (10, 30, [0, 0, 0]),
        (100, 0, [100, 200, 200]),
        (1000, 2000, [0, 0, 0]),
    ],
)
def test_it_grows_by_what_has_run_up_to_a_limit(concurrency, prefetch, expected):
    rows = grown(concurrency, prefetch)
    assert rows[:3] == expected
    assert len(set(rows[2:])) == 1


def test_a_step_that_waits_or_takes_long_ends_it():
    one = AdaptivePrefetch(limits(10))
    one.picked(10, 0.0)
    one.all_ran(0.001)
    assert one.rows == 10
    one.picked(20, 1.0)
    one.waited()
    assert one.rows == 0
    one.all_ran(1.001)
    assert one.rows == 0, "of what has waited nothing counts"
    one.picked(1, 2.0)
    one.all_ran(2.001)
    assert one.rows == 1, "it begins small again"
    one.picked(11, 3.0)
    one.picked(5, 3.001)
    assert one.until == 3.0 + prefetch.MAX_BATCH_SECONDS, "from the first of what has not run"
    assert one.late(one.until), (
        "else a feeder that sleeps until then would wake for nothing, for ever on a mock clock"
    )
    one.all_ran(3.0 + 2 * prefetch.MAX_BATCH_SECONDS)
    assert one.rows == 0
    one.all_ran(3.0 + 2 * prefetch.MAX_BATCH_SECONDS)
    assert one.rows == 0, "nothing was claimed"


def test_demand_asks_for_them_when_a_slot_is_free_and_not_before():
    rig = grown_rig()
    assert rig.demand() == 8
    rig.add()
    assert rig.demand() == 7
    rig.add()
    assert rig.demand() == 0, "enough for both slots is there already"


def test_outcomes_that_wait_for_their_commit_leave_places_for_prefetched_rows():
    rig = grown_rig()
    rig.add(13)
    [task] = rig.start()
    for _ in range(12):
        assert rig.hand_over_and_follow(task)
    assert (rig.dispatcher.running, rig.dispatcher.count(ClaimState.COMMITTING)) == (1, 12)
    assert rig.demand() == 1, "8 places and 6 ahead"
    rig.add(2)
    assert rig.hand_over_and_follow(task), "there is a slot for the last one"
    assert not rig.hand_over_and_follow(task), "and none beyond it"
    assert rig.dispatcher.count(ClaimState.COMMITTING) == 14


def test_claims_without_a_slot_are_released_when_no_running_step_may_end_without_waiting():
    rig = grown_rig()
    rig.add(8)
    [first] = rig.start()
    rig.woken = 0
    rig.suspend(first)
    assert (rig.dispatcher.running, rig.demand(), rig.released) == (2, 0, [])
    assert rig.woken == 0, "one of them may end without waiting"
    [_, second] = rig.pool.tasks
    rig.suspend(second)
    assert rig.woken == 1
    buffered = rig.ids(rig.dispatcher.buffered)
    assert (rig.demand(), rig.dispatcher.buffered) == (0, 0)
    assert rig.released == buffered


@pytest.mark.parametrize("buffered", range(4))
def test_when_a_step_takes_long_claims_beyond_the_free_slots_are_released(buffered: int):
    rig = grown_rig()
    rig.add(1 + buffered)
    rig.start()
    assert (rig.dispatcher.running, rig.dispatcher.buffered) == (1, buffered)
    rig.now += prefetch.MAX_BATCH_SECONDS
    rig.demand()
    assert rig.dispatcher.buffered == min(buffered, 1), "one slot is free"
    assert len(rig.released) == max(buffered - 1, 0)
    assert rig.released == rig.ids(len(rig.released)), "the least urgent, in their order"


async def insert_before(dsn: str, *work: tuple[type[da.Machine], int]) -> list[int]:
    """So many instances each, before any worker is there."""
    async with running(dsn, queues={}) as client:
        found = [await client.engine.client.insert_many(machine, [{}] * count) for machine, count in work]
    return [number for each in found for number in each if number is not None]


async def test_picks_grow_while_steps_end_at_once(durable_dsn, monkeypatch):
    monkeypatch.setattr(prefetch, "MAX_BATCH_SECONDS", 60.0)  # however slow the machine is
    ids = await insert_before(durable_dsn, (simple(), 100))
    async with running(durable_dsn, queues={"default": 2}) as run:
        for number in ids:
            assert (await run.ended(number)).attempt == 0
        wanted = [event.wanted for event in run.events.all(Picked)]
    assert wanted[0] == 2
    assert 2 < max(wanted) <= 8  # 8 when both slots are free at that moment
    assert len([event for event in run.events.all(Picked) if event.claimed]) < 30


@pytest.fixture
def back(monkeypatch) -> list[int]:
    """The instances that were claimed and released before a step began."""
    found: list[int] = []
    real = Dispatcher._give_back

    def give_back(self: Dispatcher, active: ActiveClaim, **how: int) -> None:
        found.append(active.claim.id)
        real(self, active, **how)

    monkeypatch.setattr(Dispatcher, "_give_back", give_back)
    return found


async def test_steps_that_wait_a_little_are_never_claimed_ahead(durable_dsn, monkeypatch, back):
    monkeypatch.setattr(prefetch, "MAX_BATCH_SECONDS", 60.0)
    rows: set[int] = set()

    class Short(da.Machine):
        @da.step
        async def start(self, ctx):
            await trio.lowlevel.checkpoint()
            rows.add(dispatcher_of(run).prefetch.rows)
            return da.Done()

    ids = await insert_before(durable_dsn, (Short, 40))
    async with running(durable_dsn, queues={"default": 2}) as run:
        for number in ids:
            await run.ended(number)
    assert rows == {0}
    assert back == []


async def test_rows_in_prefetch_are_no_sign_of_quick_steps(durable_dsn):
    """All slots are taken, and rows trickle in: nothing of them has run, so no more is claimed than there is room."""
    gate = Gate()
    slow = gated(gate)
    async with running(durable_dsn, queues={"default": da.Queue(2, prefetch=4)}, **QUIET) as run:
        for _ in range(2):
            await run.insert(slow)
        await gate.wait_entered(2)
        for _ in range(3):
            await run.insert(slow)
        await run.engine.client.insert_many(slow, [{}] * 20)
        await until(lambda: dispatcher_of(run).buffered == 4)
        assert dispatcher_of(run).prefetch.rows == 0
        assert not dispatcher_of(run).has_excess
        gate.open()


async def test_what_has_no_slot_goes_back_when_steps_begin_to_wait(durable_dsn, db, monkeypatch):
    monkeypatch.setattr(prefetch, "MAX_BATCH_SECONDS", 60.0)
    gate = Gate()
    slow = gated(gate)
    ids = await insert_before(durable_dsn, (simple(), 62), (slow, 20))
    async with running(durable_dsn, queues={"default": 2}) as run:
        await gate.wait_entered(2)
        executing = "select count(*) from durable.gen_durable where status = 'executing'"
        await until(lambda: db.execute(executing) == [(2,)])
        assert gate.entered == 2
        assert 2 < max(event.wanted for event in run.events.all(Picked)) <= 8
        assert dispatcher_of(run).prefetch.rows == 0
        gate.open()
        for number in ids:
            row = await run.ended(number)
            assert (row.status, row.attempt) == ("done", 0)
    assert gate.entered == 20, "each of them once"


async def test_what_has_no_slot_goes_back_when_steps_take_long(durable_dsn, monkeypatch, back):
    """They wait for nothing, and let nobody else run: other workers may have nothing to do."""
    monkeypatch.setattr(prefetch, "MAX_BATCH_SECONDS", 60.0)
    ran: list[int] = []

    class Long(da.Machine):
        @da.step
        async def start(self, ctx):
            ran.append(ctx.id)
            if dispatcher_of(run).buffered >= 4:
                monkeypatch.setattr(prefetch, "MAX_BATCH_SECONDS", 0.0)
            time.sleep(0.003)
            return da.Done()

    ids = await insert_before(durable_dsn, (simple(), 62), (Long, 40))
    async with running(durable_dsn, queues={"default": 2}) as run:
        for number in ids:
            row = await run.ended(number)
            assert (row.status, row.attempt) == ("done", 0)
        assert dispatcher_of(run).prefetch.rows == 0
    assert back
    assert set(back) <= set(ids[62:])
    assert sorted(ran) == ids[62:], "each of them once"


async def test_what_goes_back_comes_again_in_its_order(durable_dsn, monkeypatch, back):
    monkeypatch.setattr(prefetch, "MAX_BATCH_SECONDS", 60.0)
    order: list[str] = []

    class Mixed(da.Machine):
        @da.step
        async def start(self, ctx):
            if name := ctx.state.get("name"):
                order.append(name)
                await trio.sleep(0.01)
            return da.Done()

    async with running(durable_dsn, queues={"default": 1}) as run:
        quick = await run.engine.client.insert_many(Mixed, [{}] * 40)
        for number in quick:
            assert number is not None
            await run.ended(number)
        await until(lambda: dispatcher_of(run).prefetch.rows == 3)
        options = [{"state": {"name": name}, "priority": n} for n, name in enumerate("WABC")]
        await run.engine.client.insert_many(Mixed, options)
        await until(lambda: len(order) == 4)
    assert order == ["W", "A", "B", "C"]
    assert back


@pytest.mark.parametrize("busy", ["for a moment", "for long"])
async def test_a_key_that_is_being_taken_is_not_lost_with_its_row(durable_dsn, db, monkeypatch, busy):
    """Its row was claimed ahead; while the feeder waits for the key, steps begin to wait and take every slot."""
    monkeypatch.setattr(prefetch, "MAX_BATCH_SECONDS", 60.0)
    asked, taken = trio.Event(), trio.Event()
    tries = 0
    first, second = Gate(), Gate()
    early, quick = gated(first, "early"), simple()
    gated(second, "late")
    async with running(durable_dsn, queues={"default": 3}, reap_interval=0.5) as run:
        assert run.engine._parts is not None
        keys = run.engine._parts.keys
        await run.insert(early)
        await first.wait_entered()
        for number in await run.engine.client.insert_many(quick, [{}] * 60):
            assert number is not None
            await run.ended(number)
        real = keys.take

        async def take(claims):
            nonlocal tries
            asked.set()
            tries += 1
            if tries == 1:
                await taken.wait()
                if busy == "for long":
                    return set()
            return await real(claims)

        monkeypatch.setattr(keys, "take", take)
        numbers = db.execute(
            "insert into durable.gen_durable (fsm, step, partition_key) values ('late', 'start', null),"
            " ('late', 'start', null), ('late', 'start', null), ('simple', 'start', 'k') returning id"
        )
        await asked.wait()
        first.open()
        await second.wait_entered(3)
        taken.set()
        second.open()
        for (number,) in numbers:
            assert (await run.ended(number)).status == "done"
        assert restarts_of(run, "feeder default") == 0
        await until(lambda: not keys.table._owners)


async def test_refused_outcomes_of_rows_claimed_ahead_are_handled_once(durable_dsn, db, monkeypatch):
    """Seven times as many as may run are in hand: there is a task for the `handle` of each."""
    monkeypatch.setattr(prefetch, "MAX_BATCH_SECONDS", 60.0)
    real, gate = flusher.commit_outcomes, trio.Event()

    async def late(*args, **options):
        await gate.wait()
        return await real(*args, **options)

    ran: list[int] = []

    class Bad(da.Machine):
        @da.step
        async def start(self, ctx):
            ran.append(ctx.id)
            return da.Done("bad")

        async def handle(self, error, ctx):
            return da.Stop(error)

    async with running(durable_dsn, queues={"default": 2}) as run:
        for number in await run.engine.client.insert_many(simple(), [{}] * 40):
            assert number is not None
            await run.ended(number)
        await until(lambda: dispatcher_of(run).prefetch.rows == 6 and in_flight(run) == (0, 0))
        refuse_bad(db, "P0001")
        monkeypatch.setattr(flusher, "commit_outcomes", late)
        ids = await run.engine.client.insert_many(Bad, [{}] * 14)
        await until(lambda: in_flight(run) == (0, 14))
        gate.set()
        for number in ids:
            assert number is not None
            row = await run.ended(number)
            assert (row.status, row.attempt) == ("failed", 0)
    assert len(ran) == 14, "each of them once"
