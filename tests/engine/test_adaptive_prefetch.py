"""Claims beyond the free slots: only while steps end without waiting; otherwise the excess is released."""

from __future__ import annotations

import time

import durable_actors as da
import pytest
import trio
from durable_actors._engine.committing import flusher
from durable_actors._engine.limits import QueueLimits
from durable_actors._engine.running import prefetch as ahead
from durable_actors._engine.running.dispatcher import Claimed
from durable_actors._engine.running.slots import Slots
from durable_actors.telemetry import Picked
from tests.engine.kit import QUIET, Gate, gated, refuse_bad, running, simple
from tests.kit import until

pytestmark = pytest.mark.usefixtures("registry")


def limits(concurrency: int, prefetch: int = 0) -> QueueLimits:
    return QueueLimits(concurrency, prefetch, 1, 1.0, 1.0)


def grown(concurrency: int, prefetch: int = 0) -> list[int]:
    """Rows ahead after each of ten picks that run at once, each of as many rows as it may have."""
    one, found = Ahead(limits(concurrency, prefetch)), []
    for now in range(10):
        one.picked(concurrency + one.rows, float(now))
        one.ran(now + 0.001)
        found.append(one.rows)
    return found


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
    one = Ahead(limits(10))
    one.picked(10, 0.0)
    one.ran(0.001)
    assert one.rows == 10
    one.picked(20, 1.0)
    one.waited()
    assert one.rows == 0
    one.ran(1.001)
    assert one.rows == 0, "of what has waited nothing counts"
    one.picked(1, 2.0)
    one.ran(2.001)
    assert one.rows == 1, "it begins small again"
    one.picked(11, 3.0)
    one.picked(5, 3.001)
    assert one.until == 3.0 + ahead.QUICK, "from the first of what has not run"
    assert one.late(one.until), (
        "else a feeder that sleeps until then would wake for nothing, for ever on a mock clock"
    )
    one.ran(3.0 + 2 * ahead.QUICK)
    assert one.rows == 0
    one.ran(3.0 + 2 * ahead.QUICK)
    assert one.rows == 0, "nothing was claimed"


def test_demand_asks_for_them_when_a_slot_is_free_and_not_before():
    slots = Slots(limits(2))
    slots.ahead.rows = 6
    assert slots.demand(0) == 8
    assert slots.demand(1) == 7
    assert slots.demand(2) == 0, "enough for both slots is there already"
    slots.running, slots.ending = 1, 12
    assert slots.demand(0) == 1, "8 places and 6 ahead"
    assert slots.free
    slots.ending = 13
    assert not slots.free
    assert [slots.full(0), slots.full(1)] == [False, False]
    slots.running = 2
    assert [slots.full(0), slots.full(1)] == [True, False], "one of them may end without waiting"
    slots.running = 1
    assert [slots.excess(buffered) for buffered in range(4)] == [-1, 0, 1, 2]


async def insert_before(dsn: str, *work: tuple[type[da.Machine], int]) -> list[int]:
    """So many instances each, before any worker is there."""
    async with running(dsn, queues={}) as client:
        found = [await client.engine.client.insert_many(machine, [{}] * count) for machine, count in work]
    return [number for each in found for number in each if number is not None]


async def test_picks_grow_while_steps_end_at_once(durable_dsn, monkeypatch):
    monkeypatch.setattr(ahead, "QUICK", 60.0)  # however slow the machine is
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
    """The instances that were claimed and given back."""
    found: list[int] = []
    real = Claimed._give_back

    def give_back(self, held, **how):
        found.append(held.claim.id)
        real(self, held, **how)

    monkeypatch.setattr(Claimed, "_give_back", give_back)
    return found


async def test_steps_that_wait_a_little_are_never_claimed_ahead(durable_dsn, monkeypatch, back):
    monkeypatch.setattr(ahead, "QUICK", 60.0)
    rows: set[int] = set()

    class Short(da.Machine):
        @da.step
        async def start(self, ctx):
            await trio.lowlevel.checkpoint()
            rows.add(run.engine._node.feeders["default"].claimed.slots.ahead.rows)
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
        claimed = run.engine._node.feeders["default"].claimed
        for _ in range(2):
            await run.insert(slow)
        await gate.wait_entered(2)
        for _ in range(3):
            await run.insert(slow)
        await run.engine.client.insert_many(slow, [{}] * 20)
        await until(lambda: len(claimed) == 4)
        assert claimed.slots.ahead.rows == 0
        assert not claimed.over
        gate.open()


async def test_what_has_no_slot_goes_back_when_steps_begin_to_wait(durable_dsn, db, monkeypatch):
    monkeypatch.setattr(ahead, "QUICK", 60.0)
    gate = Gate()
    slow = gated(gate)
    ids = await insert_before(durable_dsn, (simple(), 62), (slow, 20))
    async with running(durable_dsn, queues={"default": 2}) as run:
        await gate.wait_entered(2)
        executing = "select count(*) from durable.gen_durable where status = 'executing'"
        await until(lambda: db.execute(executing) == [(2,)])
        assert gate.entered == 2
        assert 2 < max(event.wanted for event in run.events.all(Picked)) <= 8
        assert run.engine._node.feeders["default"].claimed.slots.ahead.rows == 0
        gate.open()
        for number in ids:
            row = await run.ended(number)
            assert (row.status, row.attempt) == ("done", 0)
    assert gate.entered == 20, "each of them once"


async def test_what_has_no_slot_goes_back_when_steps_take_long(durable_dsn, monkeypatch, back):
    """They wait for nothing, and let nobody else run: other workers may have nothing to do."""
    monkeypatch.setattr(ahead, "QUICK", 60.0)
    ran: list[int] = []

    class Long(da.Machine):
        @da.step
        async def start(self, ctx):
            ran.append(ctx.id)
            if len(run.engine._node.feeders["default"].claimed) >= 4:
                monkeypatch.setattr(ahead, "QUICK", 0.0)
            time.sleep(0.003)
            return da.Done()

    ids = await insert_before(durable_dsn, (simple(), 62), (Long, 40))
    async with running(durable_dsn, queues={"default": 2}) as run:
        for number in ids:
            row = await run.ended(number)
            assert (row.status, row.attempt) == ("done", 0)
        assert run.engine._node.feeders["default"].claimed.slots.ahead.rows == 0
    assert back
    assert set(back) <= set(ids[62:])
    assert sorted(ran) == ids[62:], "each of them once"


async def test_what_goes_back_comes_again_in_its_order(durable_dsn, monkeypatch, back):
    monkeypatch.setattr(ahead, "QUICK", 60.0)
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
        await until(lambda: run.engine._node.feeders["default"].claimed.slots.ahead.rows == 3)
        options = [{"state": {"name": name}, "priority": n} for n, name in enumerate("WABC")]
        await run.engine.client.insert_many(Mixed, options)
        await until(lambda: len(order) == 4)
    assert order == ["W", "A", "B", "C"]
    assert back


@pytest.mark.parametrize("busy", ["for a moment", "for long"])
async def test_a_key_that_is_being_taken_is_not_lost_with_its_row(durable_dsn, db, monkeypatch, busy):
    """Its row was claimed ahead; while the feeder waits for the key, steps begin to wait and take every slot."""
    monkeypatch.setattr(ahead, "QUICK", 60.0)
    asked, taken = trio.Event(), trio.Event()
    tries = 0
    first, second = Gate(), Gate()
    early, quick = gated(first, "early"), simple()
    gated(second, "late")
    async with running(durable_dsn, queues={"default": 3}, reap_interval=0.5) as run:
        node = run.engine._node
        feeder = node.feeders["default"]
        await run.insert(early)
        await first.wait_entered()
        for number in await run.engine.client.insert_many(quick, [{}] * 60):
            assert number is not None
            await run.ended(number)
        real = feeder._keys.take

        async def take(claims):
            nonlocal tries
            asked.set()
            tries += 1
            if tries == 1:
                await taken.wait()
                if busy == "for long":
                    return set()
            return await real(claims)

        monkeypatch.setattr(feeder._keys, "take", take)
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
        assert node.feeders["default"] is feeder, "it has not crashed"
        await until(lambda: not feeder._keys.table._owners)


async def test_refused_outcomes_of_rows_claimed_ahead_are_handled_once(durable_dsn, db, monkeypatch):
    """Seven times as many as may run are in hand: there is a task for the `handle` of each."""
    monkeypatch.setattr(ahead, "QUICK", 60.0)
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
        slots = run.engine._node.feeders["default"].claimed.slots
        for number in await run.engine.client.insert_many(simple(), [{}] * 40):
            assert number is not None
            await run.ended(number)
        await until(lambda: slots.ahead.rows == 6 and not slots.ending)
        refuse_bad(db, "P0001")
        monkeypatch.setattr(flusher, "commit_outcomes", late)
        ids = await run.engine.client.insert_many(Bad, [{}] * 14)
        await until(lambda: slots.ending == 14)
        gate.set()
        for number in ids:
            assert number is not None
            row = await run.ended(number)
            assert (row.status, row.attempt) == ("failed", 0)
    assert len(ran) == 14, "each of them once"
