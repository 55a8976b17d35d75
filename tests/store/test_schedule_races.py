"""Each slot of a schedule is decided once, whoever comes at the same time, and whoever dies on the way."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import psycopg
import pytest
import trio
from durable_actors import Conflict
from durable_actors._postgres.driver.connection import PgConn
from durable_actors._scheduling.schedule import Definition
from durable_actors._store.commands import Command
from durable_actors._store.dialogues import run_dialogue
from durable_actors._store.insert import insert_instances
from durable_actors._store.schedule_commands import (
    deleting,
    listing,
    pausing_schedule,
    putting,
    resuming_schedule,
    running_now,
)
from durable_actors._store.schedule_turns import Turned, turn_due
from durable_actors._store.schedules import Found, ScheduledPlan, read_due
from durable_actors._store.sql import statement
from durable_actors.machine import OUTCOMES
from tests.invariants.journal import journal_problems, read_journal
from tests.store.kit import ROLES, SCHEMA, claims, connect, outcome, plan, rows
from tests.store.stepping import Act, commit, orders, play
from tests.support.interleave import wait_backend_blocked
from tests.support.sql import explain

SLOT = datetime(2020, 1, 1, 12, tzinfo=UTC)
STAND = (
    "update durable.schedules set next_slot = %s, fire_at = %s, last_slot = null, buffered = null, paused = null,"
    " rev = rev + 1"
)
LOG = (
    "select slot, last_slot, slots, outcome, reason, kind, instance_id from durable.schedule_log order by id"
)


async def scheduled(conn: Any, db: psycopg.Connection, **options: Any) -> Found:
    """A schedule of which one slot is due: a day of slots lies before now, and only the last one fires."""
    db.execute("set durable_actors.journal_door = 'open'")
    db.execute("truncate durable.gen_durable cascade; truncate durable.journal")
    db.execute("reset durable_actors.journal_door")
    db.execute("truncate durable.schedules, durable.schedule_log, durable.receipts, durable.pauses")
    definition = Definition(**{"every": 3600.0, **options})
    schedule = ScheduledPlan("nightly", definition, plan(journal=OUTCOMES))
    await run_dialogue(conn, putting(SCHEMA, schedule, Command()))
    [(now,)] = db.execute("select now()").fetchall()
    slot = definition.last_at(now, after=SLOT)
    db.execute(STAND, [slot, slot])
    return await due(conn)


async def due(conn: Any) -> Found:
    [found] = (await read_due(conn, SCHEMA, ())).found
    return found


def turns(found: Found) -> Act:
    return lambda conn: turn_due(conn, SCHEMA, found)


def tells(command: Callable[[], Any]) -> Act:
    return lambda conn: run_dialogue(conn, command())


def fired(result: Turned | None) -> list[int]:
    return [] if result is None else [each.instance_id for each in result.decided if each.instance_id]


# Turns of each side: its statement, commit.
@pytest.mark.parametrize("overlap", ["skip", "allow", "buffer_one", "cancel_running"])
async def test_two_nodes_at_once(db: psycopg.Connection, durable_dsn: str, overlap: str) -> None:
    """Both have read that the slot is due. One instance, one record, whatever the order."""
    async with connect(durable_dsn) as one, connect(durable_dsn) as two:
        for order in orders(a=2, b=2):
            found = await scheduled(one, db, overlap=overlap)
            done = await play(db, order, {"a": (one, turns(found)), "b": (two, turns(found))})
            [number] = [*fired(done["a"]), *fired(done["b"])]
            assert (done["a"] is None) != (done["b"] is None), order
            [record] = db.execute(LOG).fetchall()
            slot = found.row.next_slot
            assert record == (slot, slot, 1, "fired", None, record[5], number), order
            assert rows(db, "id, inbox") == [(number, True)], order
            assert journal_problems(*read_journal(db)) == [], order
            assert (await read_due(one, SCHEMA, ())).found == ()


async def test_five_nodes_with_slots_every_second(db: psycopg.Connection, durable_dsn: str) -> None:
    """All make up for a hundred slots at once; each slot has one instance."""
    async with connect(durable_dsn) as one:
        await scheduled(one, db, every=60.0, missed="all", overlap="allow")
        db.execute("update durable.schedules set next_slot = next_slot - interval '99 min', fire_at = now()")
        conns = [await patient(durable_dsn) for _ in range(5)]
        found = [await due(conn) for conn in conns]
        results: list[Turned | None] = []

        async def turn(conn: Any, each: Found) -> None:
            results.append(await turn_due(conn, SCHEMA, each))

        async with trio.open_nursery() as nursery:
            for conn, each in zip(conns, found, strict=True):
                nursery.start_soon(turn, conn, each)
        for conn in conns:
            conn.close()
        assert sorted(len(fired(each)) for each in results) == [0, 0, 0, 0, 100]
        [(slots, total)] = db.execute(
            "select count(distinct slot), count(*) from durable.schedule_log"
        ).fetchall()
        assert (slots, total) == (100, 100)


async def patient(dsn: str) -> PgConn:
    """A connection that waits for locks for as long as it takes."""
    return await PgConn.open(dsn, settings={**ROLES["client"].settings, "lock_timeout": "0"})


async def test_a_node_dies_between_compare_and_set_and_commit(
    db: psycopg.Connection, durable_dsn: str
) -> None:
    """Its statement waits for a unique key when its session ends: nothing of it stays, and another node fires."""
    async with connect(durable_dsn, lock_timeout="0") as dies, connect(durable_dsn) as other:
        found = await scheduled(other, db)
        with psycopg.connect(durable_dsn) as holder:
            holder.execute(
                "insert into durable.gen_durable (fsm, step, unique_key, unique_scope)"
                " values ('m', 's', 'schedule:nightly', '{runnable,executing,awaiting_signal,awaiting_children}')"
            )
            async with trio.open_nursery() as nursery:
                ended = trio.Event()

                async def turn() -> None:
                    with pytest.raises(Exception, match=r"terminat|closed|lost|reached"):
                        await turn_due(dies, SCHEMA, found)
                    ended.set()

                nursery.start_soon(turn)
                await wait_backend_blocked(durable_dsn, dies.pid, by=holder.info.backend_pid)
                db.execute("select pg_terminate_backend(%s)", [dies.pid])
                await ended.wait()
            holder.rollback()
        assert db.execute(LOG).fetchall() == []
        assert rows(db, "id") == []
        again = await due(other)
        assert again.row == found.row
        [number] = fired(await turn_due(other, SCHEMA, again))
        assert rows(db, "id") == [(number,)]


async def test_a_node_dies_between_a_slot_and_the_cancel_for_it(
    db: psycopg.Connection, durable_dsn: str
) -> None:
    """That a slot waits, and that what it waits for is cancelled, is committed together, or not at all."""
    async with connect(durable_dsn, lock_timeout="0") as dies, connect(durable_dsn) as other:
        found = await scheduled(other, db, overlap="cancel_running")
        [running] = fired(await turn_due(other, SCHEMA, found))
        db.execute(STAND, [found.row.next_slot, found.row.next_slot])
        found = await due(other)
        assert found.running == running
        with psycopg.connect(durable_dsn) as holder:
            holder.execute("select 1 from durable.gen_durable where id = %s for update", [running])
            async with trio.open_nursery() as nursery:
                ended = trio.Event()

                async def turn() -> None:
                    with pytest.raises(Exception, match=r"terminat|closed|lost|reached"):
                        await turn_due(dies, SCHEMA, found)
                    ended.set()

                nursery.start_soon(turn)
                await wait_backend_blocked(durable_dsn, dies.pid, by=holder.info.backend_pid)
                db.execute("select pg_terminate_backend(%s)", [dies.pid])
                await ended.wait()
            holder.rollback()
        again = await due(other)
        assert again.row == found.row
        turned = await turn_due(other, SCHEMA, again)
        assert (fired(turned), turned and turned.cancelled) == ([], running)
        assert rows(db, "id, status") == [(running, "cancelled")]
        [number] = fired(await turn_due(other, SCHEMA, await due(other)))
        assert rows(db, "id, status", "status <> 'cancelled'") == [(number, "runnable")]


async def test_a_command_and_a_node(db: psycopg.Connection, durable_dsn: str) -> None:
    """Whoever comes second decides anew: a pause keeps what has fired, a node does not fire what is paused."""
    async with connect(durable_dsn) as one, connect(durable_dsn) as two:
        outcomes = set()
        for order in orders(n=2, p=4):
            found = await scheduled(one, db)
            done = await play(
                db,
                order,
                {
                    "n": (one, turns(found)),
                    "p": (two, tells(partial(pausing_schedule, SCHEMA, "nightly", Command(by="ada")))),
                },
            )
            [info] = await run_dialogue(one, listing(SCHEMA, None))
            assert info.state == "paused", order
            assert len(rows(db, "id")) == len(fired(done["n"])), order
            assert (await read_due(one, SCHEMA, ())).found == (), order
            assert db.execute("select count(*) from durable.receipts where command = 'pause'").fetchone() == (
                1,
            )
            outcomes.add(len(fired(done["n"])))
        assert outcomes == {0, 1}, "both happened"


async def test_run_now_and_a_slot(db: psycopg.Connection, durable_dsn: str) -> None:
    """They must not overlap: one of them starts an instance, and the other one is told why not."""
    async with connect(durable_dsn) as one, connect(durable_dsn) as two:
        for order in orders(n=2, r=4):
            found = await scheduled(one, db)

            async def run(conn: Any) -> Any:
                try:
                    return (await run_dialogue(conn, running_now(SCHEMA, "nightly", Command()))).ids
                except Conflict:
                    return ()

            done = await play(db, order, {"n": (one, turns(found)), "r": (two, run)})
            if done["n"] is None:  # the command was first: the node reads again
                done["n"] = await turn_due(one, SCHEMA, await due(one))
            assert len(fired(done["n"])) + len(done["r"]) == 1, order
            assert len(rows(db, "id")) == 1, order
            [(number,)] = rows(db, "id")
            kinds = {(each[3], each[4]): each[6] for each in db.execute(LOG)}
            assert kinds.pop(("fired", None)) == number, order
            assert set(kinds) <= {("skipped", "overlap")}, order


async def test_the_unique_key_is_the_check_for_overlap(db: psycopg.Connection, durable_dsn: str) -> None:
    async with connect(durable_dsn) as conn:
        found = await scheduled(conn, db)
        [number] = fired(await turn_due(conn, SCHEMA, found))
        slot = found.row.next_slot
        assert slot is not None
        db.execute(STAND, [slot, slot])
        assert fired(await turn_due(conn, SCHEMA, await due(conn))) == []
        assert db.execute(LOG).fetchall()[-1] == (
            slot,
            slot,
            1,
            "skipped",
            "overlap",
            "slot" if recent(slot) else "caught_up",
            None,
        )
        [claim] = await claims(conn)
        await commit(conn, outcome(claim))
        db.execute(STAND, [slot, slot])
        [other] = fired(await turn_due(conn, SCHEMA, await due(conn)))
        assert other != number


def recent(slot: datetime) -> bool:
    return datetime.now(UTC) - slot < timedelta(seconds=60)


async def test_a_paused_queue(db: psycopg.Connection, durable_dsn: str) -> None:
    async with connect(durable_dsn) as conn:
        for when, reason in (("skip", "queue_paused"), ("insert", None)):
            for machine in ("", "m"):
                found = await scheduled(conn, db, queue_paused=when)
                db.execute("insert into durable.pauses (queue, fsm) values ('default', %s)", [machine])
                await turn_due(conn, SCHEMA, found)
                [record] = db.execute(LOG).fetchall()
                assert record[4] == reason
        assert len(rows(db, "id")) == 1


async def test_records_do_not_stay_for_ever(db: psycopg.Connection, durable_dsn: str) -> None:
    """A turn deletes the old ones of its schedule, and no others."""
    async with connect(durable_dsn) as conn:
        found = await scheduled(conn, db)
        old = (
            "insert into durable.schedule_log (name, slot, last_slot, outcome, at) select %s, now(), now(), 'fired',"
            " now() - make_interval(days => n) from generate_series(1, 100) n"
        )
        for name in ("nightly", "other"):
            db.execute(old, [name])
        await turn_due(conn, SCHEMA, found)
        kept = db.execute("select name, count(*) from durable.schedule_log group by 1 order by 1").fetchall()
        assert kept == [("nightly", 41 + 1), ("other", 100)]  # a thousand hours, and the new one


async def test_pause_and_resume_without_a_burst(db: psycopg.Connection, durable_dsn: str) -> None:
    async with connect(durable_dsn) as conn:
        await scheduled(conn, db, every=60.0, missed="all", overlap="allow")
        await run_dialogue(conn, pausing_schedule(SCHEMA, "nightly", Command()))
        with pytest.raises(Conflict, match="paused already"):
            await run_dialogue(conn, pausing_schedule(SCHEMA, "nightly", Command()))
        db.execute(
            "update durable.schedules set next_slot = next_slot - interval '3 h', fire_at = fire_at - interval '3 h',"
            " paused = jsonb_build_object('at', now() - interval '4 h')"
        )
        await run_dialogue(conn, resuming_schedule(SCHEMA, "nightly", Command()))
        assert (await read_due(conn, SCHEMA, ())).found == ()
        assert rows(db, "id") == []
        [record] = db.execute(LOG).fetchall()
        assert record[2:5] in {
            (181, "skipped", "paused"),
            (182, "skipped", "paused"),
        }  # a minute may have passed


async def test_a_command_with_the_same_key_is_carried_out_once(
    db: psycopg.Connection, durable_dsn: str
) -> None:
    async with connect(durable_dsn) as conn:
        await scheduled(conn, db)
        once = Command(idempotency_key="x")
        first = await run_dialogue(conn, running_now(SCHEMA, "nightly", once))
        assert (await run_dialogue(conn, running_now(SCHEMA, "nightly", once))).ids == first.ids
        assert len(rows(db, "id")) == 1
        await run_dialogue(conn, deleting(SCHEMA, "nightly", once))
        await run_dialogue(conn, deleting(SCHEMA, "nightly", once))
        assert db.execute("select count(*) from durable.schedule_log").fetchone() == (0,)


async def test_a_schedule_is_deleted_while_a_node_turns_it(db: psycopg.Connection, durable_dsn: str) -> None:
    async with connect(durable_dsn) as one, connect(durable_dsn) as two:
        for order in orders(n=2, d=3):
            found = await scheduled(one, db)
            done = await play(
                db,
                order,
                {
                    "n": (one, turns(found)),
                    "d": (two, tells(partial(deleting, SCHEMA, "nightly", Command()))),
                },
            )
            assert len(rows(db, "id")) == len(fired(done["n"])), order
            assert db.execute("select count(*) from durable.schedules").fetchone() == (0,)


async def test_a_user_has_taken_the_key(db: psycopg.Connection, durable_dsn: str) -> None:
    """It is a unique key as any other: the slot is skipped, and the record says so."""
    async with connect(durable_dsn) as conn:
        found = await scheduled(conn, db)
        scope = ("runnable", "executing", "awaiting_signal", "awaiting_children")
        await insert_instances(conn, SCHEMA, [plan(unique_key=b"schedule:nightly", unique_scope=scope)])
        assert fired(await turn_due(conn, SCHEMA, found)) == []
        assert db.execute(LOG).fetchall()[0][4] == "overlap"


SCHEDULES = """
insert into durable.schedules (name, spec, fsm, fsm_version, step, state, queue, priority, journal, origin,
                               next_slot, fire_at, buffered)
select 's' || n, '{"every": 3600, "overlap": "buffer_one"}', 'm', 1, 's', '{}', 'default', 0, 0, 'api',
       now(), now() + interval '1 h', case when n <= 10 then now() end
  from generate_series(1, 1000) n
"""


@pytest.mark.parametrize(("name", "arguments"), [("due_schedules", [[], 50]), ("list_schedules", [None, 5])])
def test_a_look_does_not_read_the_instances(big: psycopg.Connection, name: str, arguments: list[Any]) -> None:
    """A thousand schedules, ten of which wait for their last instance, beside a big table of instances."""
    try:
        big.execute(SCHEDULES)
        big.execute("analyze durable.schedules")
        for generic in (True, False):
            found = explain(big, statement(name, SCHEMA).sql, arguments, generic=generic)  # type: ignore[arg-type]
            found.assert_no_seq_scan("gen_durable")
            found.assert_uses("gen_durable_unique")
            assert found.buffers < (200 if name == "due_schedules" else 10_000), found.text
    finally:
        big.execute("truncate durable.schedules")
