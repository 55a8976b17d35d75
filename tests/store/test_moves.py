"""A row changes only by the moves of `_store/moves.py`: every statement is run, and every change is looked at."""

from __future__ import annotations

from typing import get_args

import psycopg
import pytest
from durable_actors._store.move_parts import ALWAYS, MAX_REV, MoveName
from durable_actors._store.moves import MOVES, move_of
from durable_actors.machine import ENDED, Status
from tests.store import moving_cancel, moving_fair, moving_graphs, moving_keys, moving_pauses, moving_runners  # noqa: F401 - their scenarios
from tests.store.kit import SCHEMA, claims, connect, empty, insert, outcome, rows
from tests.store.moving import SCENARIOS, Recorder, World
from tests.store.stepping import commit

STATUSES = frozenset(get_args(Status))


async def test_every_statement_makes_the_moves_that_it_declares_and_no_others(
    db: psycopg.Connection, durable_dsn: str
):
    recorder = Recorder(db)
    async with connect(durable_dsn) as conn:
        for scenario in SCENARIOS:
            empty(db)
            await scenario(World(conn, db))
    assert recorder.faults() == []
    made = {(each.statement, each.move.name) for each in recorder.by_statements() if each.move is not None}
    declared = {(statement, move.name) for move in MOVES for statement in move.statements}
    assert declared - made == set(), "no scenario drives it, or the statement does not do it"
    assert {name for _, name in made} == {move.name for move in MOVES}


async def test_the_functions_for_other_languages_make_the_same_moves(db: psycopg.Connection):
    recorder = Recorder(db)
    parked = {"status": "awaiting_signal", "awaits": ["go"], "await_step": "t"}
    [number] = insert(db, **parked)
    db.execute("select durable.signal(%s, 'noise')", [number])
    db.execute("select durable.signal(%s, 'go')", [number])
    moves = [each.move.name if each.move else None for each in recorder.changes()[1:]]
    assert moves == ["signalled", "woken"]


def test_an_ended_row_may_be_deleted(db: psycopg.Connection):
    recorder = Recorder(db)
    insert(db, status="done", finished_at="=now()")
    insert(db)
    db.execute("delete from durable.gen_durable")
    found = [each.move.name if each.move else None for each in recorder.changes() if each.new is None]
    assert sorted(found, key=str) == [None, "deleted"], "a live one may not"


BREAKAGES = {
    "forgets rev": "update durable.gen_durable set hold = 0",
    "counts twice": "update durable.gen_durable set hold = 0, rev = rev + 2",
    "another column": "update durable.gen_durable set hold = 0, rev = rev + 1, priority = 9",
    "another move": "update durable.gen_durable set rev = rev + 1, hold = 2, shelved_step = step",
    "no move at all": "update durable.gen_durable set rev = rev + 1",
    "a row is gone": "delete from durable.gen_durable",
}


@pytest.mark.parametrize("breakage", BREAKAGES)
def test_the_recorder_finds_a_statement_that_does_something_else(db: psycopg.Connection, breakage: str):
    recorder = Recorder(db)
    header = "-- promote_siblings: offer the first held row of each key\n"
    insert(db, hold=1, partition_key="key")
    db.execute(header + "update durable.gen_durable set hold = 0, rev = rev + 1")
    assert recorder.faults() == []
    db.execute("update durable.gen_durable set hold = 1")
    db.execute(header + BREAKAGES[breakage])
    assert len(recorder.faults()) == 1


def test_a_statement_that_declares_nothing_may_change_nothing(db: psycopg.Connection):
    recorder = Recorder(db)
    insert(db, hold=1, partition_key="key")
    db.execute("-- read_queue: priorities\nupdate durable.gen_durable set hold = 0, rev = rev + 1")
    assert len(recorder.faults()) == 1


async def test_rev_stays_at_its_end(db: psycopg.Connection, durable_dsn: str):
    """A row written by hand does not refuse the statements that move it."""
    recorder = Recorder(db)
    insert(db, rev=MAX_REV)
    async with connect(durable_dsn) as conn:
        await commit(conn, outcome((await claims(conn))[0]))
    assert rows(db, "status, rev") == [("done", MAX_REV)]
    assert recorder.faults() == []


def test_the_list(db: psycopg.Connection):
    """Names, statuses and columns are those of the schema."""
    columns = {
        name
        for (name,) in db.execute(
            "select column_name from information_schema.columns"
            " where table_schema = %s and table_name = 'gen_durable'",
            [SCHEMA],
        )
    }
    labels = {
        label for (label,) in db.execute("select unnest(enum_range(null::durable.durable_status))::text")
    }
    assert [move.name for move in MOVES] == list(get_args(MoveName))
    assert labels == STATUSES
    assert {name for move in MOVES for name in move.columns} | ALWAYS < columns
    assert {status for move in MOVES for status in move.before | move.after} == STATUSES
    assert {move.name for move in MOVES if not move.counts} == {
        "renewed",
        "signalled",
        "requested",
        "rebuilt",
    }
    assert [move.name for move in MOVES if not move.statements] == []
    never = columns - ALWAYS - {name for move in MOVES for name in move.columns}
    assert never == {
        "id", "parent_id", "inserted_at", "fsm", "fsm_version", "queue", "priority", "weight", "rerun_of",
        "unique_key", "unique_scope", "barrier", "child_uid", "child_args", "tags", "meta", "journal", "fingerprint",
        "child_key", "links", "max_attempts", "fair_key",
    }, "no move changes these"  # fmt: skip


def test_what_has_ended_changes_only_by_a_retry_or_its_deletion():
    changes = [move.name for move in MOVES if move.before & ENDED]
    assert changes == ["revived", "deleted", "rebuilt", "snapshot"], (
        "the last two change no healthy row, but its rev"
    )


def test_a_row_that_no_move_explains():
    row = {"status": "done", "rev": 3, "claim_id": "a", "visit": 2}
    engine = [
        move for move in MOVES if move.name != "snapshot"
    ]  # a row that a hand has changed, and its repair
    assert move_of(row, row | {"status": "runnable", "rev": 4}, engine) is None
    assert move_of(row, row | {"rev": 4}, engine) is None
    assert move_of(None, {"status": "executing", "rev": 1}) is None
    restored = move_of(None, {"status": "runnable", "rev": 2})
    assert restored is not None
    assert restored.statements == ("restore_instance",), "no insert begins with another rev than 1"
