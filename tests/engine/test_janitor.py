"""Janitor: fronts and laps, small batches, one line in the log; nothing else waits for it."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import durable_actors as da
import psycopg
import pytest
import trio
from durable_actors._engine.maintenance import janitor as janitor_module, truncation as truncation_module
from durable_actors._engine.maintenance.janitor import BATCH, FIRST_LOOK, Janitor, Walk, fronts_of
from durable_actors._engine.node import Node
from durable_actors._store.retention import Ages, Swept
from durable_actors.otp import ActorChild, Address, Supervisor, open_tree
from durable_actors.telemetry import InstancesDeleted, JournalsTruncated
from tests.engine.kit import Db, events_of, make_node, running
from tests.kit import until

ENDED = (
    "update durable.gen_durable set status = 'done', finished_at = %s, inserted_at = %s where id = any(%s)"
)


def swept(looked: int, last: int | None, last_old: int | None) -> Swept:
    return Swept(looked, last, last_old, 0, 0, 0, 0)


def test_the_fronts_are_the_ages():
    assert fronts_of(Ages(7.0, 7.0, 30.0, 1.0), [0.0, 30.0]) == [0.0, 7.0, 30.0]
    assert fronts_of(Ages(None, None, None, 1.0), []) == []
    assert len(fronts_of(Ages(7.0, 7.0, 30.0, 1.0), range(100))) == janitor_module.MOST_FRONTS


def test_a_walk_looks_at_few_rows_first_and_stops_at_the_young_ones():
    walk = Walk(100.0)
    assert walk.size == FIRST_LOOK
    assert walk.saw(swept(FIRST_LOOK, 20, 20)), "all of them are old: there may be more"
    assert (walk.position, walk.size) == (20, FIRST_LOOK * 5)
    assert not walk.saw(swept(FIRST_LOOK * 5, 120, 100)), "the young ones begin"
    assert walk.position == 100
    assert not walk.saw(swept(FIRST_LOOK, 120, None))
    assert walk.position == 100
    walk.size = BATCH
    assert not walk.saw(swept(7, 107, 107)), "the end of the table"
    assert walk.position == 107


@asynccontextmanager
async def janitor_of(node: Node) -> AsyncIterator[Address[object]]:
    """The node's janitor. Its first round begins with a message."""
    address: Address[object] = Address("janitor", capacity=1)
    async with open_tree(Supervisor("test", [ActorChild(address, lambda: Janitor(node))], intensity=0)):
        yield address


class Sweeps:
    """Counts the statements of all janitors, and lets some of them fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.limits: list[int] = []
        self.looked = 0
        self.errors: list[Exception] = []
        self._real = janitor_module.delete_ended
        monkeypatch.setattr(janitor_module, "delete_ended", self._delete)

    async def _delete(self, *arguments: Any, **options: Any) -> Swept:
        self.limits.append(options["limit"])
        if self.errors:
            raise self.errors.pop()
        found = await self._real(*arguments, **options)
        self.looked += found.looked
        return found


def ended(db: Db, count: int, ago: str = "8 days", **columns: Any) -> list[int]:
    numbers = [db.insert(**columns) for _ in range(count)]
    db.execute(
        "update durable.gen_durable set status = 'done', finished_at = now() - %s::interval,"
        " inserted_at = now() - %s::interval where id = any(%s)",
        ago, ago, numbers,
    )  # fmt: skip
    return numbers


def count(db: Db) -> int:
    found: int = db.value("select count(*) from durable.gen_durable")
    return found


async def test_a_round_deletes_what_is_old_and_tells_it(db: Db):
    ended(db, 150)
    kept = [*ended(db, 30, "6 days"), db.insert()]
    async with make_node(db.dsn) as node, janitor_of(node) as address:
        events = events_of(node)
        address.cast(None)
        await until(lambda: events)
        assert events == [InstancesDeleted(done=150, cancelled=0, failed=0, records=0)]
    assert db.execute("select array_agg(id order by id) from durable.gen_durable") == [(kept,)]


async def test_one_line_a_minute_tells_what_was_deleted(db: Db, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, "durable_actors")
    ended(db, 2)
    async with make_node(db.dsn) as node:
        janitor = Janitor(node)
        await janitor._round(node.config.retention)  # type: ignore[arg-type]
        janitor._report()
        janitor._log(Swept(9, None, None, 3, 1, 0, 7))
        janitor._next_line -= janitor_module.LINE_EVERY
        janitor._report()  # nothing was deleted since; but there is something to tell
        janitor._next_line -= janitor_module.LINE_EVERY
        janitor._report()
    assert [each.getMessage() for each in caplog.records if "deleted" in each.getMessage()] == [
        "retention: deleted 2 instances (2 done, 0 cancelled, 0 failed) and 0 records",
        "retention: deleted 4 instances (3 done, 1 cancelled, 0 failed) and 7 records",
    ]


async def test_an_idle_round_looks_at_a_few_rows(db: Db, monkeypatch: pytest.MonkeyPatch):
    ended(db, 300, "1 day")
    sweeps = Sweeps(monkeypatch)
    async with make_node(db.dsn) as node, janitor_of(node) as address:
        address.cast(None)
        await until(lambda: len(sweeps.limits) >= 3)
    assert sweeps.limits == [FIRST_LOOK] * 3, "two fronts and the lap"


async def test_the_next_round_begins_where_the_last_one_ended(db: Db, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(janitor_module, "LAP_MOST", 0)
    ended(db, 200, "31 days")
    kept = [db.insert() for _ in range(200)]  # long-lived ones: the fronts pass them once
    db.execute(
        "update durable.gen_durable set inserted_at = now() - interval '40 days' where finished_at is null"
    )
    sweeps = Sweeps(monkeypatch)
    async with make_node(db.dsn) as node, janitor_of(node) as address:
        events = events_of(node)
        address.cast(None)
        await until(lambda: len(events) == 1)
        sweeps.looked = 0
        ended(db, 5)
        address.cast(None)
        await until(lambda: len(events) == 2)
        assert sweeps.looked == 5
    assert count(db) == len(kept)


async def test_the_lap_finds_who_ended_late(db: Db, monkeypatch: pytest.MonkeyPatch):
    late = db.insert()
    db.execute("update durable.gen_durable set inserted_at = now() - interval '40 days'")
    ended(db, 30)
    async with make_node(db.dsn) as node, janitor_of(node) as address:
        events = events_of(node)
        address.cast(None)
        await until(lambda: len(events) == 1)
        assert count(db) == 1
        db.execute(
            "update durable.gen_durable set status = 'done', finished_at = now() - interval '8 days' where id = %s",
            late,
        )
        address.cast(None)
        await until(lambda: len(events) == 2)
    assert count(db) == 0


@pytest.mark.parametrize(
    "error", [psycopg.errors.LockNotAvailable, psycopg.errors.QueryCanceled, psycopg.errors.DeadlockDetected]
)
async def test_a_batch_that_is_refused_is_halved(
    db: Db, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
):
    ended(db, 50)
    sweeps = Sweeps(monkeypatch)
    sweeps.errors = [error("no") for _ in range(5)]
    async with make_node(db.dsn) as node, janitor_of(node) as address:
        events = events_of(node)
        address.cast(None)
        await until(lambda: events)
    assert sweeps.limits[:7] == [20, 20, 20, 20, 20, 15, 30]
    assert count(db) == 0


async def test_a_row_that_somebody_refers_to_stays_and_is_no_obstacle(
    db: Db, caplog: pytest.LogCaptureFixture
):
    _, first, *_, second = ended(db, 60)
    db.execute("create table public.invoices (instance bigint references durable.gen_durable (id))")
    db.execute("insert into public.invoices values (%s), (%s)", first, second)
    async with make_node(db.dsn) as node, janitor_of(node) as address:
        events = events_of(node)
        address.cast(None)
        await until(lambda: any(isinstance(each, InstancesDeleted) for each in events))
    assert db.execute("select id from durable.gen_durable order by id") == [(first,), (second,)]
    told = [each.message for each in caplog.records if "cannot be deleted" in each.message]
    assert len(told) == 1
    assert f"instance {first} cannot be deleted, and stays: " in told[0]


async def test_an_outage_is_survived(db: Db, monkeypatch: pytest.MonkeyPatch):
    ended(db, 50)
    sweeps = Sweeps(monkeypatch)
    sweeps.errors = [da.StoreUnavailable("away")]
    async with make_node(db.dsn) as node, janitor_of(node) as address:
        events = events_of(node)
        address.cast(None)
        await until(lambda: any(isinstance(each, InstancesDeleted) for each in events))
    assert count(db) == 0


async def test_no_row_lock_holds_it_up(db: Db):
    locked, *_ = ended(db, 50)
    with psycopg.connect(db.dsn) as other:
        other.execute("select 1 from durable.gen_durable where id = %s for update", [locked])
        async with make_node(db.dsn) as node, janitor_of(node) as address:
            events = events_of(node)
            address.cast(None)
            await until(lambda: events)
        assert db.execute("select id from durable.gen_durable") == [(locked,)]


async def test_without_retention_it_deletes_nothing_and_tells_what_machines_say(db: Db, registry: Any):
    @da.job(name="short", keep=5)
    async def short() -> None: ...

    ended(db, 5, "900 days")
    async with running(db.dsn, retention=None) as run:
        await until(lambda: db.execute("select fsm, seconds from durable.keeps") == [("short", 5.0)])
        await run.insert(short)
    assert db.value("select count(*) from durable.gen_durable where fsm = 'm'") == 5


async def test_an_engine_says_once_what_it_keeps(db: Db, caplog: pytest.LogCaptureFixture, registry: Any):
    with caplog.at_level(logging.INFO):
        async with running(db.dsn):
            pass
        async with running(db.dsn, retention=None):
            pass
        async with running(db.dsn, queues={}):
            pass
    told = [each.message for each in caplog.records if each.message.startswith("retention: ")]
    assert told == [
        (
            "retention: ended instances are kept: done ones for 7 d, cancelled ones for 7 d, failed ones for 30 d; "
            "machines with keep= say otherwise; live ones keep the history of their last 10000 moves"
        ),
        "retention: this node deletes no ended instance",
    ]


async def test_an_engine_with_ages_of_a_second(db: Db, registry: Any):
    @da.job(name="quick")
    async def quick() -> None: ...

    async with running(db.dsn, retention=da.Retention(done=1, interval=1)) as run:
        for _ in range(20):
            await run.insert(quick)
        with trio.fail_after(30):
            while count(db):
                await trio.sleep(0.05)


def long_journal(db: Db, moves: int, *, snapshots: tuple[int, ...] = ()) -> int:
    """A live row with a record of every move."""
    number = db.insert(journal=2, rev=moves, fsm="m")
    db.execute(
        "insert into durable.journal (instance_id, rev, kind, step, visit, attempt, data) select %s, n,"
        " case when n = any(%s) then 'snapshot' else 'next' end, 's', 1, 0, '{}' from generate_series(1, %s) n",
        number, list(snapshots), moves,
    )  # fmt: skip
    return number


def records(db: Db, number: int) -> tuple[int, int, int]:
    query = "select count(*), min(rev), max(rev) from durable.journal where instance_id = %s"
    [found] = db.execute(query, number)
    return found


def kept(moves: int | None) -> da.Retention:
    """A retention with a shorter history than users may have."""
    found = da.Retention()
    object.__setattr__(found, "history", moves)
    return found


async def test_a_long_history_is_shortened_round_by_round(db: Db, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(truncation_module, "BATCH", 7)
    number, short = long_journal(db, 100), long_journal(db, 40)
    async with make_node(db.dsn, retention=kept(50)) as node, janitor_of(node) as address:
        events = events_of(node)
        address.cast(None)
        await until(lambda: events)
        assert events == [JournalsTruncated(snapshots=1, records=0)]
        assert records(db, number) == (101, 1, 101)
        db.execute("update durable.gen_durable set rev = rev + 50 where id = %s", number)
        address.cast(None)
        await until(lambda: len(events) == 2)
        assert events[1:] == [JournalsTruncated(snapshots=1, records=100)]
        assert records(db, number) == (2, 101, 152)
        assert records(db, short) == (40, 1, 40)


async def test_a_known_long_history_is_seen_to_in_every_round_wherever_the_walk_is(
    db: Db, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(janitor_module, "LAP_MOST", 2)
    monkeypatch.setattr(truncation_module, "LOOK", 2)
    number = long_journal(db, 100)
    for _ in range(9):
        db.insert()
    async with make_node(db.dsn, retention=kept(50)) as node, janitor_of(node) as address:
        events = events_of(node)
        address.cast(None)
        await until(lambda: len(events) == 1)
        db.execute("update durable.gen_durable set rev = rev + 50 where id = %s", number)
        address.cast(None)
        await until(lambda: len(events) == 2)
        assert records(db, number) == (2, 101, 152)


async def test_a_long_history_far_behind_the_walk_is_found_by_its_records(
    db: Db, monkeypatch: pytest.MonkeyPatch
):
    """Also beside a long one that has ended, and was found as well."""
    monkeypatch.setattr(janitor_module, "LAP_MOST", 2)
    monkeypatch.setattr(truncation_module, "LOOK", 2)
    for _ in range(9):
        db.insert()
    gone, number = long_journal(db, 100), long_journal(db, 100)
    db.execute("update durable.gen_durable set status = 'done', finished_at = now() where id = %s", gone)
    async with make_node(db.dsn, retention=kept(50)) as node, janitor_of(node) as address:
        events = events_of(node)
        address.cast(None)
        await until(lambda: events)
        assert events == [JournalsTruncated(snapshots=1, records=0)]
        assert (records(db, number)[2], records(db, gone)[2]) == (101, 100)


async def test_a_journal_that_cannot_be_shortened_is_no_obstacle(db: Db, caplog: pytest.LogCaptureFixture):
    first, second = long_journal(db, 100), long_journal(db, 100)
    db.execute(
        "create function public.refuse() returns trigger language plpgsql as $$ begin raise 'not this one'; end $$;"
        f" create trigger refuse before update on durable.gen_durable for each row when (old.id = {first})"
        " execute function public.refuse()"
    )
    async with make_node(db.dsn, retention=kept(50)) as node, janitor_of(node) as address:
        events = events_of(node)
        address.cast(None)
        await until(lambda: events)
    assert records(db, second)[2] == 101
    [told] = [each.message for each in caplog.records if "cannot be shortened" in each.message]
    assert f"the journal of instance {first} cannot be shortened: not this one" in told


async def test_histories_that_are_kept_for_ever(db: Db):
    number = long_journal(db, 100)
    ended(db, 5)
    async with make_node(db.dsn, retention=kept(None)) as node, janitor_of(node) as address:
        events = events_of(node)
        address.cast(None)
        await until(lambda: events)
    assert records(db, number) == (100, 1, 100)
