"""One definition of what the pick takes: SQL functions that the planner inlines, so that they cost nothing."""

from __future__ import annotations

import re
from pathlib import Path

import durable_actors
import psycopg
import pytest
from durable_actors._store.sql import statement

FILES = sorted((Path(durable_actors.__file__).parent / "_store" / "sql").glob("*.sql"))
USERS = (
    "commit_outcomes",
    "hand_siblings",
    "hasten_instance",
    "match_failed",
    "match_instances",
    "claim_at_once",
    "observe_instances",
    "pick_fair",
    "pick_instances",
    "pick_instances_by_id",
    "read_fair_keys",
    "read_fair_shares",
    "read_queue",
    "read_queues",
    "sample_queues",
    "sample_steps",
    "sweep_keys",
    "tell_dependents",
)
"""The statements that ask which rows are on offer or due."""


def in_full(sql: str) -> str:
    """The statement with the expressions themselves instead of the functions."""
    sql = re.sub(
        r'"?durable"?\.offered\((\w)\.status, \1\.hold\)', r"(\1.status = 'runnable' and \1.hold = 0)", sql
    )
    return re.sub(r'"?durable"?\.due\(([a-z_.]+)\)', r"(\1 <= pg_catalog.now())", sql)


def generic_plan(db: psycopg.Connection, sql: str) -> str:
    db.execute("deallocate all")
    db.execute(f"prepare shown as {sql}", prepare=False)  # type: ignore[call-overload]
    count = db.execute("select cardinality(parameter_types) from pg_prepared_statements").fetchone()
    assert count is not None
    nulls = f"({', '.join(['null'] * count[0])})" if count[0] else ""
    plan = db.execute(f"explain (verbose, costs) execute shown{nulls}", prepare=False).fetchall()  # type: ignore[call-overload]
    return "\n".join(line for (line,) in plan if not line.startswith("Query Identifier"))


@pytest.mark.parametrize("name", USERS)
def test_the_plan_is_that_of_the_expressions(db: psycopg.Connection, name: str):
    db.execute("set plan_cache_mode = force_generic_plan")
    sql = statement(name, "durable").sql
    whole = in_full(sql)
    assert whole != sql
    assert not re.search(r"\b(offered|due)\(", whole)
    plan = generic_plan(db, sql)
    assert plan == generic_plan(db, whole)
    assert not re.search(r"\b(offered|due)\(", plan)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_nobody_else_says_what_is_on_offer_or_due(path: Path):
    body = re.sub(r"--[^\n]*", "", path.read_text("utf-8"))
    assert not re.search(r"status = 'runnable' and \w\.hold = 0", body), "durable.offered"
    assert not re.search(r"eligible_at <= durable\.now\(\)", body), "durable.due"
    assert (path.stem in USERS) == bool(re.search(r"durable\.(offered|due)\(", body))
