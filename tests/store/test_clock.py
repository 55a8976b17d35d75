"""One clock: every statement asks durable.now(), which costs what now() costs, and a bench can replace it."""

from __future__ import annotations

import re
from pathlib import Path

import durable_actors
import psycopg
import pytest
from durable_actors._store.sql import statement
from tests.store.kit import connect, insert, pick, rows

FILES = sorted((Path(durable_actors.__file__).parent / "_store" / "sql").glob("*.sql"))
BARE = re.compile(
    r"(?<![\w.])now\(\)|\b(?:current_timestamp|localtimestamp|statement_timestamp|transaction_timestamp)\b"
)
SERVER_CLOCK = {
    "claim_at_once",
    "ensure_migrations", "finish_sample", "forget_nodes", "observe_instances", "pick_fair", "pick_instances",
    "pick_instances_by_id",
    "read_expired", "read_owners", "reap_claims", "record_migration", "register_node", "renew_leases", "stop_node",
    "hand_siblings",
    "tell_dependents",
    "touch_node",
}  # fmt: skip
"""Statements that name the server's own clock: leases, nodes, migrations, samples."""
FOR_OLDER_NODES = {"judge_keys"}

THREE_DAYS_AHEAD = """
create or replace function durable.now() returns timestamptz language sql stable as
$$ select pg_catalog.now() + interval '3 days' $$
"""


def code(sql: str) -> str:
    return re.sub(r"--[^\n]*", "", sql)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_statement_asks_the_one_clock(path: Path):
    body = code(path.read_text("utf-8"))
    assert not BARE.search(body), "durable.now(), or pg_catalog.now() for leases and nodes"
    assert ("pg_catalog.now()" in body) == (path.stem in SERVER_CLOCK)


def test_functions_and_defaults_ask_the_one_clock(db: psycopg.Connection):
    found = db.execute(
        "select p.proname, p.prosrc from pg_proc p join pg_namespace n on n.oid = p.pronamespace"
        " where n.nspname = 'durable'"
    ).fetchall()
    wrong = [
        name for name, body in found if BARE.search(code(body)) and name not in FOR_OLDER_NODES | {"now"}
    ]
    assert not wrong
    defaults = db.execute(
        "select c.relname || '.' || a.attname, pg_get_expr(d.adbin, d.adrelid) from pg_attrdef d"
        " join pg_class c on c.oid = d.adrelid"
        " join pg_attribute a on a.attrelid = d.adrelid and a.attnum = d.adnum"
        " where c.relnamespace = 'durable'::regnamespace and c.relname not in ('nodes', 'migrations', 'samples')"
    ).fetchall()
    assert not [name for name, text in defaults if re.search(r"(?<!durable\.)now\(\)", text)]


@pytest.mark.parametrize(
    "name",
    [
        "pick_fair",
        "pick_instances",
        "pick_instances_by_id",
        "claim_at_once",
        "commit_outcomes",
        "commit_parks",
        "hand_siblings",
        "insert_plain",
        "insert_held",
        "insert_linked",
        "read_queue",
    ],
)
def test_the_planner_inlines_the_clock(db: psycopg.Connection, name: str):
    db.execute("set plan_cache_mode = force_generic_plan")
    db.execute(f"prepare inlined as {statement(name, 'durable').sql}", prepare=False)
    count = db.execute(
        "select cardinality(parameter_types) from pg_prepared_statements where name = 'inlined'"
    ).fetchone()
    assert count is not None
    nulls = ", ".join(["null"] * count[0])
    plan = db.execute(f"explain (verbose, costs off) execute inlined({nulls})", prepare=False).fetchall()
    text = "\n".join(line for (line,) in plan)
    assert "now()" in text
    assert "durable.now" not in text
    assert "durable.due" not in text
    assert "durable.offered" not in text
    assert "keeps_place" not in text


async def test_a_clock_that_is_ahead_moves_delays_and_records_and_no_lease(db: psycopg.Connection):
    insert(db, eligible_at="=now() + interval '2 days'")
    db.execute(THREE_DAYS_AHEAD)
    async with connect(db.info.dsn) as conn:
        claims = (await pick(conn)).claims
    assert len(claims) == 1, "due by the clock that is ahead"
    [[lease, updated]] = rows(
        db, "extract(epoch from lease_expires_at - now()), extract(epoch from updated_at - now())"
    )
    assert 0 < lease <= 60
    assert updated > 2.9 * 86400
