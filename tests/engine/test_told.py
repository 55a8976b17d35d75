"""Rows that were inserted here into a queue at rest are claimed by their ids; others are not forgotten for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import durable_actors as da
import psycopg
import pytest
import trio
from durable_actors._engine import feeder
from durable_actors._engine.cursor import MAX_TOLD, PickCursor
from durable_actors._store.claim import PickFrom
from durable_actors._store.rows import Picked
from durable_actors.testing.faults import open_proxy
from tests.engine.engine_kit import QUIET, Gate, running, until

pytestmark = pytest.mark.usefixtures("registry")

KNOWN = frozenset({"m/1"})
INSERT = "insert into durable.gen_durable (fsm, step, state, priority) values ('noted', 'perform', %s, %s)"


def begin(cursor: PickCursor, *, limit: int = 10, nothing: bool = True, now: float = 1.0) -> PickFrom:
    return cursor.begin(now, limit=limit, known=KNOWN, nothing=nothing)


def cursor_told_of(*ids: int) -> PickCursor:
    cursor = PickCursor()
    for number in ids:
        cursor.hint(number, 0, plain=True)
    return cursor


# -- the cursor


def test_what_it_was_told_of_is_picked_by_id_and_once():
    cursor = cursor_told_of(7, 8)
    assert cursor.hinted
    first = begin(cursor)
    assert (list(first.told), first.priorities, first.extras) == ([7, 8], (), ())
    assert not cursor.hinted
    then = begin(cursor)
    assert not then.told
    assert list(then.priorities) == [0]


@pytest.mark.parametrize(
    ("limit", "nothing"),
    [(2, True), (1, True), (10, False)],
    ids=["no place left", "too many", "not at rest"],
)
def test_otherwise_the_whole_queue_is_picked_from(limit: int, *, nothing: bool):
    cursor = cursor_told_of(7, 8)
    found = begin(cursor, limit=limit, nothing=nothing)
    assert not found.told
    assert list(found.priorities) == [0]
    assert not begin(cursor).told  # that pick has found them, or somebody else has


def test_rows_that_are_to_be_looked_at_come_first():
    cursor = cursor_told_of(7)
    cursor.hint(3)
    found = begin(cursor)
    assert (list(found.told), list(found.extras)) == ([], [3])


def test_what_was_not_claimed_is_looked_at_by_the_next_pick():
    cursor = cursor_told_of(7, 8)
    begin(cursor)
    cursor.missed(Picked([], [], {}))
    assert cursor.next_look(1.0) == 0.0
    assert list(begin(cursor).extras) == [7, 8]


def test_it_remembers_so_many_and_no_more():
    cursor = cursor_told_of(*range(1, 3 * MAX_TOLD))
    assert len(begin(cursor, limit=10**6).told) == MAX_TOLD


# -- the engine


class Picks:
    """What each pick of a feeder was told, and what it claimed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.told: list[Sequence[int]] = []
        self.claimed: list[list[int]] = []
        real = feeder.pick_instances

        async def noted(*args: Any, **options: Any) -> Picked:
            picked = await real(*args, **options)
            self.told.append(list(options["begin"].told))
            self.claimed.append([claim.id for claim in picked.claims])
            return picked

        monkeypatch.setattr(feeder, "pick_instances", noted)


def noting(ran: list[Any]) -> Any:
    @da.job(name="noted")
    async def noted(args: dict[str, Any]) -> None:
        ran.append(args["n"])

    return noted


async def at_rest(run: Any) -> None:
    """Until the feeder has seen an empty queue, and sleeps."""
    of = run.engine._node.feeders["default"]
    await until(lambda: of._nothing and of.mailbox._in.statistics().tasks_waiting_receive == 1)


async def test_an_insert_into_a_queue_at_rest_is_claimed_by_its_id(durable_dsn, monkeypatch):
    picks, ran = Picks(monkeypatch), []
    job = noting(ran)
    async with running(durable_dsn, **QUIET) as run:
        for n in range(3):
            await at_rest(run)
            number = await run.insert(job, args={"n": n})
            await run.ended(number)
            at = next(index for index, ids in enumerate(picks.claimed) if number in ids)
            assert list(picks.told[at]) == [number]
    assert ran == [0, 1, 2]


@pytest.mark.parametrize("priority", [0, -3])
async def test_somebody_elses_row_is_found_beside_it(durable_dsn, monkeypatch, priority: int):
    """No poll would find it, nor a slot that becomes free: the look that follows does."""
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
        assert [number] in picks.told
    assert ran == ["ours", "theirs"]


async def test_it_does_not_overtake_where_a_pick_has_left_rows(durable_dsn, monkeypatch):
    """A full window: there may be more. What the last look said of the queue is no longer so."""
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
        assert not run.engine._node.feeders["default"]._nothing
        gate.open()
        await run.ended(last)
    assert ran == list(range(7))
    assert not any(picks.told)


@pytest.mark.parametrize("options", [{"partition_key": "k"}, {"schedule_in": 0.05}], ids=["keyed", "later"])
async def test_what_is_not_plain_goes_the_other_way(durable_dsn, monkeypatch, options: dict[str, Any]):
    picks, ran = Picks(monkeypatch), []
    job = noting(ran)
    async with running(durable_dsn, **QUIET) as run:
        await at_rest(run)
        await run.ended(await run.insert(job, args={"n": 1}, **options))
    assert (ran, any(picks.told)) == ([1], False)


async def test_a_row_that_cannot_be_claimed_by_its_id_is_picked_as_before(durable_dsn, monkeypatch):
    """Somebody has given it a key after all: the pick that knows of keys comes next, without a poll."""
    picks, ran = Picks(monkeypatch), []
    job = noting(ran)
    async with running(durable_dsn, **QUIET) as run:
        await at_rest(run)
        number = await run.insert(job, args={"n": 0}, schedule_in=3600)
        with psycopg.connect(durable_dsn, autocommit=True) as elsewhere:
            elsewhere.execute(
                "update durable.gen_durable set partition_key = 'k', eligible_at = now() where id = %s",
                [number],
            )
        node = run.engine._node
        node.feeders["default"]._nothing = True
        node.poke("default", number=number, priority=0, plain=True)
        await run.ended(number)
        assert [number] in picks.told
    assert ran == [0]


async def test_a_lost_answer_is_made_good_as_of_any_pick(durable_dsn):
    ran: list[int] = []
    job = noting(ran)
    async with open_proxy(durable_dsn) as proxy, running(proxy.dsn, **QUIET) as run:
        await at_rest(run)
        proxy.lose_reply(after=b"pick_instances_told")
        number = await run.insert(job, args={"n": 1})
        await proxy.wait_lost()
        with trio.fail_after(30):  # the lease is a minute
            found = await run.ended(number)
    assert (ran, found.attempt) == ([1], 0)
