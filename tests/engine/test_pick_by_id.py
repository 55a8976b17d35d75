"""Rows that this process inserts into an idle queue are claimed by their ids; rows of others are still found."""

from __future__ import annotations

from typing import Any

import durable_actors as da
import psycopg
import pytest
import trio
import trio.testing
from durable_actors._engine.claiming.cursor import PickCursor
from durable_actors._engine.claiming.planner import ClaimPlanner
from durable_actors._engine.claims import ActiveClaims
from durable_actors._engine.limits import QueueLimits
from durable_actors._engine.running.dispatcher import Dispatcher
from durable_actors._store.claim import PickFrom
from durable_actors._store.rows import PickResult
from durable_actors.telemetry import StepCommitted
from tests.engine.dispatcher_kit import FakeKeys
from tests.engine.kit import QUIET, Gate, Picks, Run, claim, leave_to_the_feeder, running
from tests.kit import PATIENCE, until
from tests.support.faults import open_proxy
from trio_util import AsyncBool

pytestmark = pytest.mark.usefixtures("registry")


@pytest.fixture(autouse=True)
def _nothing_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of calls that claim nothing themselves: inserts and signals of a step, or on a caller's connection."""
    leave_to_the_feeder(monkeypatch)


KNOWN = frozenset({"m/1"})
INSERT = "insert into durable.gen_durable (fsm, step, state, priority) values ('noted', 'perform', %s, %s)"


def begin(cursor: PickCursor, *, alone: bool = True) -> PickFrom:
    return cursor.begin(1.0, limit=10, known=KNOWN, alone=alone)


def hinted(*hints: dict[str, Any]) -> PickCursor:
    cursor = PickCursor()
    for hint in hints:
        cursor.hint(**hint)
    return cursor


NEW: dict[str, Any] = {"instance_id": 7, "priority": 0, "new_unkeyed": True}


# -- the cursor


def test_the_only_hinted_row_is_picked_by_its_id_and_once():
    cursor = hinted(NEW)
    assert cursor.hinted
    first = begin(cursor)
    assert (list(first.by_id), first.priorities, first.extras) == ([7], (), ())
    assert not cursor.hinted
    then = begin(cursor)
    assert not then.by_id
    assert list(then.priorities) == [0]


@pytest.mark.parametrize(
    "other",
    [{"priority": 0}, {}, {"instance_id": 3}, {"instance_id": 8, "priority": 0, "new_unkeyed": True}],
    ids=["a batch", "somewhere", "by its id", "new, too"],
)
@pytest.mark.parametrize("first", [True, False])
def test_after_several_hints_the_whole_queue_is_picked_from(other: dict[str, Any], *, first: bool):
    """The other row may be more urgent, and older."""
    cursor = hinted(other, NEW) if first else hinted(NEW, other)
    found = begin(cursor)
    assert not found.by_id
    assert list(found.priorities) == [0]
    assert not begin(cursor).by_id  # that pick has found them, or another node has


def test_so_it_is_when_the_queue_is_not_at_rest():
    cursor = hinted(NEW)
    assert not begin(cursor, alone=False).by_id
    assert not begin(cursor).by_id


def test_a_row_that_was_not_claimed_is_an_extra_of_the_next_pick():
    cursor = hinted(NEW)
    begin(cursor)
    cursor.missed(PickResult([], [], {}))
    assert cursor.next_pick(1.0) == 0.0
    cursor.hint(**(NEW | {"instance_id": 8}))
    found = begin(cursor)  # extras come first
    assert (list(found.by_id), list(found.extras)) == ([], [7])


SIGNALLED: dict[str, Any] = {"instance_id": 7, "by_signal": True}


def test_a_row_that_a_signal_woke_is_picked_by_its_id_and_once():
    cursor = hinted(SIGNALLED)
    first = begin(cursor)
    assert (list(first.by_id), first.priorities, first.extras) == ([7], (), ())
    assert (list(begin(cursor).by_id), list(begin(cursor).extras)) == ([], [])


def test_it_is_an_extra_when_the_queue_is_not_at_rest_or_other_rows_were_hinted_at():
    """It may lie before the cursor."""
    assert list(begin(hinted(SIGNALLED), alone=False).extras) == [7]
    assert sorted(begin(hinted(SIGNALLED, SIGNALLED | {"instance_id": 8})).extras) == [7, 8]
    assert sorted(begin(hinted({"instance_id": 3}, SIGNALLED)).extras) == [3, 7]


@pytest.mark.parametrize("key", ["k", None])
def test_it_is_assumed_to_have_a_key_if_the_last_row_had_one(key: str | None):
    """A pick by id claims no keyed row: the round trip would be wasted."""
    cursor = hinted(SIGNALLED)
    begin(cursor, alone=False)
    cursor.advance(PickResult([claim(key, 7)], [], {0: ("2026-01-01 00:00:00+00", 7)}), now=1.0, took=0.1)
    cursor.hint(**SIGNALLED)
    assert list(begin(cursor).by_id) == ([7] if key is None else [])


def test_a_row_that_was_not_claimed_by_its_id_is_assumed_to_have_a_key():
    cursor = hinted(SIGNALLED)
    begin(cursor)
    cursor.missed(PickResult([], [], {}))
    assert list(begin(cursor).extras) == [7]
    cursor.hint(**SIGNALLED)
    assert (list((found := begin(cursor)).by_id), list(found.extras)) == ([], [7])


@pytest.mark.parametrize(
    ("concurrency", "prefetch", "min_demand", "running", "room"),
    [
        (10, 0, 1, 0, True),
        (2, 0, 1, 0, True),
        (1, 0, 1, 0, False),
        (1, 5, 1, 0, False),
        (10, 0, 1, 8, True),
        (10, 0, 1, 9, False),
        (10, 50, 1, 9, False),
        (10, 0, 9, 0, True),
        (10, 0, 10, 0, False),
    ],
)
def test_a_slot_and_a_pick_are_left_for_others(
    concurrency: int, prefetch: int, min_demand: int, running: int, *, room: bool
):
    """However many rows are prefetched: a place in the buffer is no slot."""
    unused: Any = None
    keys: Any = FakeKeys()
    dispatcher = Dispatcher(
        QueueLimits(concurrency, prefetch, min_demand, 1.0, 1.0),
        claims=ActiveClaims(),
        commits=unused,
        keys=keys,
        pool=unused,
        draining=AsyncBool(),
        wake_feeder=lambda: True,
        on_contended=lambda _: None,
    )
    dispatcher.add([claim(None, number) for number in range(running)], 0.0)
    for _ in range(running):
        assert dispatcher._take_next(0.0)
    assert dispatcher.can_claim_one_by_id is room
    dispatcher.prefetch.rows = 3 * concurrency
    assert dispatcher.can_claim_one_by_id is room


# -- the engine


def noting(ran: list[Any]) -> Any:
    @da.job(name="noted")
    async def noted(args: dict[str, Any]) -> None:
        ran.append(args["n"])

    return noted


def planner_of(run: Run) -> ClaimPlanner:
    assert run.engine._parts is not None
    return run.engine._parts.planners["default"]


async def at_rest(run: Run, *, empty: bool = True) -> None:
    """Until the feeder sleeps, having seen an empty queue, or one with rows for later."""
    planner = planner_of(run)

    def sleeps() -> bool:
        [feeder] = [node for node in run.engine.snapshot().walk() if node.name == "feeder default"]
        return feeder.waits_for is not None and "receive" in feeder.waits_for

    with trio.fail_after(PATIENCE):
        while True:
            await trio.testing.wait_all_tasks_blocked()  # else its wake-up may be under way
            if planner.queue_empty is empty and sleeps():
                return
            await trio.sleep(0.001)


async def test_an_insert_into_a_queue_at_rest_is_claimed_by_its_id(durable_dsn, monkeypatch):
    picks, ran = Picks(monkeypatch), []
    job = noting(ran)
    async with running(durable_dsn, **QUIET) as run:
        for n in range(3):
            await at_rest(run)
            number = await run.insert(job, args={"n": n})
            await run.ended(number)
            at = next(index for index, ids in enumerate(picks.claimed) if number in ids)
            assert list(picks.by_id[at]) == [number]
    assert ran == [0, 1, 2]


@pytest.mark.parametrize("priority", [0, -3])
async def test_a_row_from_elsewhere_is_found_beside_it(durable_dsn, monkeypatch, priority: int):
    """Neither a poll nor a free slot would find it: the refresh after the pick does."""
    picks, ran, both = Picks(monkeypatch), list[str](), trio.Event()

    @da.job(name="noted")
    async def job(args: dict[str, Any]) -> None:
        ran.append(args["n"])
        if len(ran) == 2:
            both.set()
        await both.wait()

    async with running(durable_dsn, **QUIET) as run:
        await at_rest(run)
        with psycopg.connect(durable_dsn, autocommit=True) as elsewhere:
            elsewhere.execute(INSERT, ['{"n": "theirs"}', priority])
        number = await run.insert(job, args={"n": "ours"})
        with trio.fail_after(10):
            await both.wait()
        assert [number] in picks.by_id
    assert ran == ["ours", "theirs"]


async def test_it_does_not_overtake_where_a_pick_has_left_rows(durable_dsn, monkeypatch):
    """A full window: there may be more. The last statistics of the queue are out of date."""
    picks, ran, gate = Picks(monkeypatch), [], Gate()
    noting(ran)

    @da.job(name="held")
    async def held(args: dict[str, Any]) -> None:
        ran.append(args["n"])
        await gate.wait()

    async with running(durable_dsn, queues={"default": 2}, **QUIET) as run:
        await at_rest(run)
        await run.engine.client.insert_many(held, [{"args": {"n": n}} for n in range(6)])
        await gate.wait_entered(2)
        last = await run.insert(held, args={"n": 6})
        assert not planner_of(run).queue_empty
        gate.open()
        await run.ended(last)
    assert sorted(ran) == list(range(7))
    assert ran.index(6) >= 5  # as tasks, those of one pick begin in any order
    assert not any(picks.by_id)


@pytest.mark.parametrize(
    "queue",
    [da.Queue(1), da.Queue(1, prefetch=1), da.Queue(10, min_demand=10)],
    ids=["one slot", "prefetch", "min_demand"],
)
async def test_it_does_not_take_the_last_slot_or_pick_from_others(durable_dsn, monkeypatch, queue: da.Queue):
    """After some quick jobs, rows are prefetched, too: that must not make a difference."""
    picks, ran, gate = Picks(monkeypatch), list[str](), Gate()

    @da.job(name="noted")
    async def job(args: dict[str, Any]) -> None:
        if args["n"] != "quick":
            ran.append(args["n"])
            await gate.wait()

    async with running(durable_dsn, queues={"default": queue}, **QUIET) as run:
        for _ in range(5):
            await at_rest(run)
            await run.ended(await run.insert(job, args={"n": "quick"}))
        await at_rest(run)
        with psycopg.connect(durable_dsn, autocommit=True) as elsewhere:
            elsewhere.execute(INSERT, ['{"n": "urgent"}', 0])
        last = await run.insert(job, args={"n": "ours"}, priority=9)
        await gate.wait_entered(2 if queue.concurrency > 1 else 1)
        assert ran[0] == "urgent"
        gate.open()
        await run.ended(last)
    assert not any(picks.by_id)


async def test_a_batch_that_was_inserted_before_goes_first(durable_dsn):
    """The feeder waits for a connection meanwhile: its pick takes all hints up to then."""
    ran, gate = list[int](), Gate()

    @da.job
    async def job(args: dict[str, Any]) -> None:
        ran.append(args["n"])
        await gate.wait()

    async with running(durable_dsn, queues={"default": 5}, **QUIET) as run:
        await at_rest(run)
        node, client = run.engine._node, run.engine.client
        async with node.pool.acquire(node.lane("claim")):
            await client.insert_many(job, [{"args": {"n": n}} for n in range(10)])
            for _ in range(4):
                await client.insert(job, args={"n": 99}, priority=9)
        await gate.wait_entered(5)
        assert sorted(ran) == [0, 1, 2, 3, 4]
        gate.open()
        await until(lambda: len(ran) == 14)


@pytest.mark.parametrize(
    "options",
    [{"partition_key": "k"}, {"schedule_in": 0.05}, {"unique_key": "k", "on_duplicate": "return"}],
    ids=["keyed", "later", "perhaps not new"],
)
async def test_keyed_later_and_perhaps_old_rows_are_not_picked_by_id(
    durable_dsn, monkeypatch, options: dict[str, Any]
):
    picks, ran = Picks(monkeypatch), []
    job = noting(ran)
    async with running(durable_dsn, **QUIET) as run:
        await at_rest(run)
        await run.ended(await run.insert(job, args={"n": 1}, **options))
    assert (ran, any(picks.by_id)) == ([1], False)


async def test_a_row_that_cannot_be_claimed_by_its_id_is_picked_as_before(durable_dsn, monkeypatch):
    """It was given a key after all: the full pick comes next, without a poll."""
    picks, ran = Picks(monkeypatch), []
    job = noting(ran)
    async with running(durable_dsn, **QUIET) as run:
        await at_rest(run)
        number = await run.insert(job, args={"n": 0}, schedule_in=3600)
        await at_rest(run, empty=False)
        with psycopg.connect(durable_dsn, autocommit=True) as elsewhere:
            elsewhere.execute(
                "update durable.gen_durable set partition_key = 'k', eligible_at = now() where id = %s",
                [number],
            )
        planner_of(run).queue_empty = True
        run.engine._node.notify("default", instance_id=number, priority=0, new_unkeyed=True)
        await run.ended(number)
        assert [number] in picks.by_id
    assert ran == [0]


async def test_the_claim_of_a_lost_answer_is_released_as_of_any_pick(durable_dsn):
    ran: list[int] = []
    job = noting(ran)
    async with open_proxy(durable_dsn) as proxy, running(proxy.dsn, **QUIET) as run:
        await at_rest(run)
        proxy.lose_reply(after=b"pick_instances_by_id")
        number = await run.insert(job, args={"n": 1})
        await proxy.wait_lost()
        with trio.fail_after(30):  # the lease is a minute
            found = await run.ended(number)
    assert (ran, found.attempt) == ([1], 0)


@pytest.mark.parametrize("key", ["k", None])
async def test_an_instance_that_a_signal_wakes_at_rest_is_claimed_by_its_id(
    durable_dsn, monkeypatch, key: str | None
):
    """A keyed one is claimed by a full pick: at the second signal, without a pick by id before it."""
    picks = Picks(monkeypatch)

    class Waiter(da.Machine, name="waiter"):
        @da.step
        async def start(self, ctx):
            names = [signal.name for signal in ctx.awaited]
            return da.Done(names) if "end" in names else da.Await(["go", "end"])

    async with running(durable_dsn, **QUIET) as run:
        number = await run.insert(Waiter, state={}, partition_key=key)
        for name in ("go", "end"):
            await run.events.wait(
                StepCommitted, id=number, status="awaiting_signal", count=1 + (name == "end")
            )
            await at_rest(run)
            picks.by_id.clear()
            await run.engine.client.signal(number, name)
        row = await run.ended(number)
    assert (row.status, row.result) == ("done", ["go", "end"])
    assert ([number] in picks.by_id) is (key is None)
