"""Invalid rows are uncommittable: each constraint of the schema refuses its case."""

from __future__ import annotations

import re
from pathlib import Path

import psycopg
import pytest

INSERT = "insert into durable.gen_durable (fsm, step, {}) values ('m', 's', {}) returning id"


def insert(db: psycopg.Connection, **columns: object) -> int:
    names = ", ".join(columns) or "queue"
    values = ", ".join(["%s"] * len(columns)) or "'default'"
    row = db.execute(INSERT.format(names, values), list(columns.values())).fetchone()
    assert row is not None
    return row[0]


def test_defaults_make_a_runnable_row(db: psycopg.Connection):
    row = db.execute(
        "select status::text, visit, rev, attempt, crashes, priority, queue, state, unique_guard, weight"
        " from durable.gen_durable where id = %s",
        [insert(db)],
    ).fetchone()
    assert row == ("runnable", 1, 1, 0, 0, 0, "default", {}, None, 1)


@pytest.mark.parametrize(
    ("columns", "constraint"),
    [
        ({"status": "executing"}, "gen_durable_claimed"),
        ({"status": "executing", "locked_by": "n", "lease_expires_at": "now"}, "gen_durable_claimed"),
        ({"locked_by": "n"}, "gen_durable_claimed"),
        ({"lease_expires_at": "now"}, "gen_durable_claimed"),
        ({"status": "awaiting_signal"}, "gen_durable_awaits"),
        ({"status": "done"}, "gen_durable_finished"),
        ({"status": "failed"}, "gen_durable_finished"),
        ({"finished_at": "now"}, "gen_durable_finished"),
        ({"visit": 0}, "gen_durable_counts"),
        ({"attempt": -1}, "gen_durable_counts"),
        ({"crashes": -1}, "gen_durable_counts"),
        ({"children_pending": -1}, "gen_durable_counts"),
        ({"hold": 6}, "gen_durable_counts"),
        ({"status": "cancelled"}, "gen_durable_finished"),
        ({"unique_key": b"k", "unique_scope": ["runnable"]}, "gen_durable_scope"),
        ({"unique_key": b"k", "unique_scope": ["done"]}, "gen_durable_scope"),
        ({"unique_scope": ["runnable", "executing", "awaiting_signal", "done"]}, "gen_durable_scope"),
    ],
    ids=str,
)
def test_an_impossible_row_is_refused(db: psycopg.Connection, columns: dict[str, object], constraint: str):
    with pytest.raises(psycopg.errors.CheckViolation) as caught:
        insert(db, **columns)
    assert caught.value.diag.constraint_name == constraint


LIVE = ["runnable", "executing", "awaiting_signal", "awaiting_children"]


def test_a_key_is_occupied_within_its_scope_and_free_after_it(db: psycopg.Connection):
    first = insert(db, unique_key=b"k", unique_scope=LIVE)
    with pytest.raises(psycopg.errors.UniqueViolation):
        insert(db, unique_key=b"k", unique_scope=LIVE)
    insert(db, unique_key=b"k")  # an empty scope occupies nothing
    db.execute("update durable.gen_durable set status = 'done', finished_at = now() where id = %s", [first])
    insert(db, unique_key=b"k", unique_scope=LIVE)


def test_a_scope_with_done_keeps_the_key_for_good(db: psycopg.Connection):
    first = insert(db, unique_key=b"k", unique_scope=[*LIVE, "done"])
    db.execute("update durable.gen_durable set status = 'done', finished_at = now() where id = %s", [first])
    with pytest.raises(psycopg.errors.UniqueViolation):
        insert(db, unique_key=b"k", unique_scope=LIVE)


def test_one_executing_row_per_partition_key(db: psycopg.Connection):
    claimed = {
        "status": "executing",
        "locked_by": "n",
        "lease_expires_at": "now",
        "claim_id": "5b8f2c1e-6f0e-4b5e-9a51-0c8e8b1b8f11",
    }
    insert(db, partition_key="a", **claimed)
    insert(db, partition_key="b", **claimed)
    insert(db, partition_key="a")
    with pytest.raises(psycopg.errors.UniqueViolation):
        insert(db, partition_key="a", **claimed)


def test_signals_are_deduplicated_also_after_consumption_and_go_with_their_target(db: psycopg.Connection):
    target = insert(db)
    send = "insert into durable.signals (target_id, name, dedup_key) values (%s, 'paid', %s)"
    db.execute(send, [target, "evt-1"])
    db.execute(send, [target, None])
    db.execute(send, [target, None])
    db.execute("update durable.signals set consumed_at = now()")
    with pytest.raises(psycopg.errors.UniqueViolation):
        db.execute(send, [target, "evt-1"])
    db.execute("delete from durable.signals where dedup_key is null")  # as a commit consumes one
    db.execute(send, [target, None])
    db.execute("update durable.gen_durable set inbox = true")  # as whoever sends one
    db.execute("delete from durable.gen_durable where id = %s", [target])
    assert db.execute("select count(*) from durable.signals").fetchone() == (0,)


def test_the_queue_tables_are_tuned(db: psycopg.Connection):
    row = db.execute("select reloptions from pg_class where oid = 'durable.gen_durable'::regclass").fetchone()
    assert row is not None
    options = dict(option.split("=") for option in row[0])
    assert options["fillfactor"] == "70"
    assert options["autovacuum_vacuum_scale_factor"] == "0.01"


def test_renewing_a_lease_touches_no_index(db: psycopg.Connection):
    """HOT: lease_expires_at is in no index; the reaper's index is on the owner."""
    rows = db.execute(
        "select indexdef from pg_indexes where schemaname = 'durable' and tablename = 'gen_durable'"
    ).fetchall()
    assert not [
        definition for (definition,) in rows if "lease_expires_at" in definition or "updated_at" in definition
    ]


@pytest.mark.parametrize(
    "column", ["step", "state", "visit", "round", "attempt", "rev", "updated_at", "last_error"]
)
def test_what_every_transition_changes_is_in_no_index(durable_dsn: str, column: str):
    """An update that changes a column of any index, also a partial one, is not HOT: each step would pay for that."""
    with psycopg.connect(durable_dsn) as db:
        found = db.execute(
            "select indexdef from pg_indexes where schemaname = 'durable' and tablename = 'gen_durable'"
        ).fetchall()
    assert not [text for (text,) in found if re.search(rf"\b{column}\b", text.partition(" USING ")[2])]


@pytest.mark.parametrize("table", ["gen_durable", "journal", "receipts"])
def test_the_reference_names_every_column(db: psycopg.Connection, table: str):
    """Once each; and none that is not there."""
    text = (Path(__file__).parents[2] / "docs" / "reference" / "schema.md").read_text("utf-8")
    heading = "## Columns" if table == "gen_durable" else f"Columns of `{table}`:"
    rows = text.partition(heading)[2].partition("|---|---|\n")[2].partition("\n\n")[0].splitlines()
    named = [name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])]
    query = "select column_name from information_schema.columns where table_schema = 'durable' and table_name = %s"
    assert sorted(named) == sorted(name for (name,) in db.execute(query, [table]))
