"""Every move of a row leaves the record that its level asks for, in its transaction, and nobody changes a record."""

from __future__ import annotations

from functools import partial
from typing import Any

import psycopg
import pytest
from durable_actors._store.children import Spawn, schedule_children
from durable_actors._store.commit import commit_outcomes
from durable_actors._store.insert import insert_instances
from durable_actors._store.lease import reap_claims
from durable_actors._store.rows import Raised, Transition
from durable_actors._store.signal import send_signals
from durable_actors.journal import KINDS, decode_record, is_recorded, level_of
from tests.invariants.journal import journal_problems, read_journal
from tests.store import (
    graph_kit,
    moving,
    moving_cancel,  # noqa: F401 - its scenarios
    moving_fair,  # noqa: F401 - its scenarios
    moving_graphs,  # noqa: F401 - its scenarios
    moving_pauses,
    moving_runners,  # noqa: F401 - its scenarios
)
from tests.store.kit import EXPIRE, SCHEMA, claims, connect, empty, outcome, plan
from tests.store.moving import (
    SCENARIOS,
    Recorded,
    Recorder,
    World,
    rows_written_as_their_journals_say,
    waits_and_barriers_that_a_hand_has_changed,
)
from tests.store.stepping import commit, deliver
from tests.support.commands import retry_instance

Records = dict[tuple[int, int], dict[str, Any]]

HANDLED = b'{"type": "ValueError", "text": "ValueError: no", "traceback": "trace"}'


def journal(db: psycopg.Connection) -> Records:
    _, records = read_journal(db)
    return {(each["instance_id"], each["rev"]): dict(each) for each in records}


def kinds(db: psycopg.Connection, number: int) -> list[str]:
    return [record["kind"] for (instance, _), record in journal(db).items() if instance == number]


def fits(db: psycopg.Connection) -> None:
    """The records of every row fold into it."""
    assert journal_problems(*read_journal(db)) == []


def due(change: Recorded, level: int) -> bool:
    """Whether the level asks for a record of this change."""
    move, new = change.move, change.new
    if move is None or new is None or not move.counts:
        return False
    failed = new["status"] == "failed" and change.old is not None
    return is_recorded(move.name, level_of(level), job=level == 1, failed=failed)


@pytest.mark.parametrize("level", range(5))
async def test_every_move_leaves_the_record_that_its_level_asks_for_and_nothing_else_does(
    db: psycopg.Connection, durable_dsn: str, level: int, monkeypatch: pytest.MonkeyPatch
):
    for module in (moving, graph_kit):
        monkeypatch.setattr(module, "plan", partial(plan, journal=level))
    db.execute(f"alter table durable.gen_durable alter column journal set default {level}")
    recorder = Recorder(db)
    async with connect(durable_dsn) as conn:
        for scenario in SCENARIOS:
            if scenario in REPAIRS:
                continue
            empty(db)
            await scenario(World(conn, db, level))
    records = journal(db)
    expected: set[tuple[int, int]] = set()
    made = recorder.by_statements()
    gone = {change.old["id"] for change in made if change.old is not None and change.new is None}
    assert gone.isdisjoint(number for number, _ in records), "the records of a deleted row go with it"
    for change in made:
        own = (change.new or {}).get("journal", level)  # a scenario may need one of its own
        if not due(change, own) or (change.new or {}).get("id") in gone:
            continue
        assert change.move is not None
        assert change.new is not None
        before, key = change.old or change.new, (change.new["id"], change.new["rev"])
        assert key not in expected, f"counted twice: {change}"
        expected.add(key)
        assert key in records, f"not recorded: {change.move.name}, {change}"
        record = decode_record(records[key], instance_id=key[0], rev=key[1])
        assert record.kind == change.move.name, str(change)
        assert (record.step, record.visit, record.attempt) == (
            before["step"],
            before["visit"],
            before["attempt"],
        )
        assert record.data.get("round", 0) == (before["round"] if change.old else 0)
        if "claim_id" in KINDS[record.kind].fields:
            claim = change.new["claim_id"] if record.kind == "claimed" else before["claim_id"]
            assert record.claim_id == str(claim)
            assert record.kind in {
                "next",
                "parked",
                "asked",
                "spawned",
                "retry",
                "done",
                "failed",
            } or record.node in {
                "node",
                "runner:test",
                "runner:x",
            }
        if record.to_step is not None and record.kind not in {"parked", "asked", "spawned", "started"}:
            assert record.to_step == change.new["step"]
        under_claim = (
            record.kind not in {"cancelled", "paused"} or record.claim_id is not None
        )  # a command takes the row from it
        assert ("folded" in record.data) == (
            own < 3 and under_claim and "folded" in KINDS[record.kind].data.__struct_fields__
        )
    assert set(records) == expected
    made = {change.move.name for change in recorder.by_statements() if due(change, level) and change.move}
    if level >= 3:  # the scenarios make every move
        assert made == {name for name in KINDS if name not in NOT_YET}


REPAIRS = (
    rows_written_as_their_journals_say,
    waits_and_barriers_that_a_hand_has_changed,
    moving_pauses.paused_rows_that_are_repaired,
    moving_pauses.paused_rows_that_are_rebuilt,
)
"""Scenarios that change rows by hand, or repair them."""
NOT_YET = {"snapshot"}
"""Kinds of moves that no statement makes yet."""


async def test_what_is_recorded_only_from_full_on(db: psycopg.Connection, durable_dsn: str):
    async with connect(durable_dsn) as conn:
        for level in (3, 4):
            await insert_instances(conn, SCHEMA, [plan(journal=level, state=b'{"a": 1}')])
        first, second = await claims(conn)
        await commit(conn, outcome(first, "done", result=b"7"), outcome(second, "done", result=b"7"))
    claimed, full = (
        [record["data"] for (number, _), record in journal(db).items() if number == claim.id]
        for claim in (first, second)
    )
    assert "state" not in claimed[0]["row"]
    assert "result" not in claimed[-1]
    assert full[0]["row"]["state"] == {"a": 1}
    assert full[-1]["result"] == 7
    fits(db)


async def test_a_stale_outcome_leaves_no_record(db: psycopg.Connection, durable_dsn: str):
    async with connect(durable_dsn) as conn:
        [number] = await insert_instances(conn, SCHEMA, [plan(journal=3)])
        [claim] = await claims(conn)
        db.execute(EXPIRE)
        await reap_claims(conn, SCHEMA, limit=10, dead={"node": 0.0})
        before = kinds(db, claim.id)
        assert (await commit_outcomes(conn, SCHEMA, [outcome(claim)], accept_late=True)).committed == {}
        spawn = Spawn([plan()], "t", None, wake_on_failure=False, timeout=None)
        after = Transition(claim, "awaiting_children", claim.step, attempt=0, advance=1)
        assert await schedule_children(conn, SCHEMA, after, spawn, accept_late=True) is None
    assert number == claim.id
    assert kinds(db, claim.id) == before == ["started", "claimed", "reaped"]


@pytest.mark.parametrize("level", [3, 4])
async def test_a_lease_that_ended_sooner_than_the_claim_says(
    db: psycopg.Connection, durable_dsn: str, level: int
):
    """A renewal after the server's clock was set back, or a bench: the reap tells when the lease was over."""
    async with connect(durable_dsn) as conn:
        await insert_instances(conn, SCHEMA, [plan(journal=level)])
        [claim] = await claims(conn)
        db.execute(EXPIRE)
        await reap_claims(conn, SCHEMA, limit=10)
        [_, claimed, reaped] = [record["data"] for record in journal(db).values()]
        assert reaped["proof"] == "lease"
        assert reaped["renewed_until"] < claimed["lease_until"]
        fits(db)
        [again] = await claims(conn)
        assert again.attempt == claim.attempt + 1
        db.execute("update durable.gen_durable set lease_expires_at = '-infinity' where id = %s", [claim.id])
        await reap_claims(conn, SCHEMA, limit=10)
    fits(db)


async def test_an_outcome_that_is_repeated_is_recorded_once(db: psycopg.Connection, durable_dsn: str):
    async with connect(durable_dsn) as conn:
        [number] = await insert_instances(conn, SCHEMA, [plan(journal=4)])
        [claim] = await claims(conn)
        for _ in range(2):
            await commit(conn, outcome(claim))
    assert number is not None
    assert kinds(db, number) == ["started", "claimed", "done"]
    fits(db)


async def test_an_outcome_that_is_rolled_back_leaves_no_record(db: psycopg.Connection, durable_dsn: str):
    """The record is written by the transaction of the move."""
    db.execute("""
        create function refuse() returns trigger language plpgsql as $$ begin raise exception 'no'; end $$;
        create trigger refuse before insert on durable.journal for each row when (new.kind = 'done')
            execute function refuse();
    """)
    async with connect(durable_dsn) as conn:
        [number] = await insert_instances(conn, SCHEMA, [plan(journal=4)])
        [claim] = await claims(conn)
        with pytest.raises(psycopg.errors.RaiseException):
            await commit(conn, outcome(claim))
    assert number is not None
    assert db.execute("select status, rev from durable.gen_durable").fetchall() == [("executing", 2)]
    assert kinds(db, number) == ["started", "claimed"]


async def test_a_late_outcome_says_so(db: psycopg.Connection, durable_dsn: str):
    async with connect(durable_dsn) as conn:
        await insert_instances(conn, SCHEMA, [plan(journal=3)] * 2)
        first, second = await claims(conn)
        over = "2020-01-01 00:00:00+00"
        for claim in (first, second):
            claim.recorded.lease_until = over
        await commit(conn, outcome(first))
        after = Transition(second, "awaiting_children", second.step, attempt=0, advance=1)
        spawn = Spawn([plan(journal=3)], "t", None, wake_on_failure=False, timeout=None)
        assert await schedule_children(conn, SCHEMA, after, spawn, accept_late=True) is not None
    found = journal(db)
    assert found[first.id, 3]["data"]["late"] is True
    assert found[second.id, 3]["data"]["late"] is True
    fits(db)


@pytest.mark.parametrize("level", [2, 4])
async def test_an_error_that_handle_settled_is_kept_where_the_row_forgets_it(
    db: psycopg.Connection, durable_dsn: str, level: int
):
    async with connect(durable_dsn) as conn:
        await insert_instances(conn, SCHEMA, [plan(journal=level)] * 3)
        first, second, third = await claims(conn)
        await commit(
            conn,
            outcome(first, "runnable", step="t", advance=1, attempt=0, handled=HANDLED),
            outcome(second, "done", handled=HANDLED),
        )
        after = Transition(third, "awaiting_children", third.step, attempt=0, advance=1, handled=HANDLED)
        spawn = Spawn([plan()], "t", None, wake_on_failure=False, timeout=None)
        assert await schedule_children(conn, SCHEMA, after, spawn, accept_late=True) is not None
    errors = [record["error"]["text"] for record in journal(db).values() if "error" in record]
    assert errors == ["ValueError: no"] * 3
    fits(db)


async def test_a_job_that_had_no_run_left_tells_its_last_attempt(db: psycopg.Connection, durable_dsn: str):
    async with connect(durable_dsn) as conn:
        [number] = await insert_instances(conn, SCHEMA, [plan(journal=3)])
        [claim] = await claims(conn)
        await commit(conn, outcome(claim, "runnable", attempt=1, last_error="no"))
        [claim] = await claims(conn)
        await commit(conn, outcome(claim, "failed", attempt=0, last_error="no"))
    assert number is not None
    assert journal(db)[number, 5]["data"]["to_attempt"] == 0
    fits(db)


async def test_a_revived_row_is_recorded_as_it_was_before(db: psycopg.Connection, durable_dsn: str):
    async with connect(durable_dsn) as conn:
        [number] = await insert_instances(conn, SCHEMA, [plan(journal=3)])
        [claim] = await claims(conn)
        await commit(conn, outcome(claim, "runnable", attempt=1, last_error="no", raised=Raised("E", None)))
        [claim] = await claims(conn)
        await commit(conn, outcome(claim, "failed", attempt=1, last_error="no"))
        assert number is not None
        assert await retry_instance(conn, SCHEMA, number)
    assert journal(db)[number, 6]["attempt"] == 1
    fits(db)


@pytest.mark.parametrize(
    "change",
    [
        "update durable.journal set step = 'x'",
        "delete from durable.journal",
        "truncate durable.journal",
        (
            "insert into durable.journal (instance_id, rev, kind) values (1, 1, 'x')"
            " on conflict (instance_id, rev) do update set kind = 'x'"
        ),
    ],
)
async def test_a_record_is_never_changed(db: psycopg.Connection, durable_dsn: str, change: str):
    async with connect(durable_dsn) as conn:
        await insert_instances(conn, SCHEMA, [plan(journal=4)])
    before = journal(db)
    with pytest.raises(psycopg.errors.RestrictViolation, match="append-only"):
        db.execute(change)
    assert journal(db) == before != {}


async def test_retention_has_a_door_of_its_own(db: psycopg.Connection, durable_dsn: str):
    async with connect(durable_dsn) as conn:
        first, second = await insert_instances(conn, SCHEMA, [plan(journal=4)] * 2)
        await claims(conn)
    forget = "select durable.forget_journal(%s, %s)"
    assert db.execute(forget, [[first], 1]).fetchone() == (1,)
    assert sorted(journal(db)) == [(first, 2), (second, 1), (second, 2)]
    with pytest.raises(psycopg.errors.RestrictViolation):  # the door is closed again
        db.execute("delete from durable.journal")
    assert db.execute("select durable.forget_journal(%s)", [[first, second]]).fetchone() == (3,)
    assert journal(db) == {}


async def test_a_record_that_is_there_already_stops_nobody(db: psycopg.Connection, durable_dsn: str):
    """A hand has set `rev` back: the records stay, execution goes on, and the fold finds the damage."""
    async with connect(durable_dsn) as conn:
        [number] = await insert_instances(conn, SCHEMA, [plan(journal=4)])
        [claim] = await claims(conn)
        await commit(conn, outcome(claim, "runnable", step="t", advance=1, attempt=0))
        before = journal(db)
        db.execute("update durable.gen_durable set rev = 1")
        [claim] = await claims(conn)
        await commit(conn, outcome(claim, "done"))
    assert db.execute("select status, rev from durable.gen_durable").fetchall() == [("done", 3)]
    assert journal(db) == before
    assert number is not None
    assert len(journal_problems(*read_journal(db))) == 1


async def test_an_outcome_that_is_repeated_after_a_move_that_is_not_recorded_is_recorded_once(
    db: psycopg.Connection, durable_dsn: str
):
    """The claim is still in the row, and its revision has no record: only the transaction tells."""
    async with connect(durable_dsn) as conn:
        [number] = await insert_instances(conn, SCHEMA, [plan(journal=2)])
        assert number is not None
        [claim] = await claims(conn)
        park = outcome(claim, "awaiting_signal", awaits=("go",), await_step="t", advance=1, attempt=0)
        await commit(conn, park)
        await send_signals(conn, SCHEMA, [deliver(number)])
        assert await commit(conn, park) == set()
    assert kinds(db, number) == ["started", "parked"]
    fits(db)
