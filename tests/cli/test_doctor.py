"""`doctor`: each check finds what it is for, and says what to do about it."""

from __future__ import annotations

import importlib
import json

import attrs
import psycopg
import pytest
from durable_actors._store.examine import Holder, ServerFacts, TableFacts, expected_indexes
from durable_actors._store.migrate import SchemaVersion
from durable_actors._store.sql import migrations
from durable_actors.cli.doctor_checks import (
    Finding,
    check_bloat,
    check_clock,
    check_holders,
    check_server,
    check_versions,
)
from tests.cli.conftest import Shell

FINE = ServerFacts(
    version=160004,
    clock=1000.0,
    standby=False,
    settings={
        "autovacuum": "on", "track_counts": "on", "fsync": "on", "synchronous_commit": "on", "max_connections": "100",
        "idle_in_transaction_session_timeout": "10min", "default_transaction_isolation": "read committed",
    },
    connections=10,
    sees_others=True,
)  # fmt: skip


def levels(found: list[Finding]) -> dict[str, str]:
    assert all((each.remedy is None) == (each.level == "ok") for each in found), "each finding has a remedy"
    return {each.check: each.level for each in found}


def by_check(shell: Shell) -> dict[str, list[dict]]:
    """What it finds, but for `fsync`, which the servers of the tests have switched off."""
    result = shell.run("doctor", "--json")
    every = json.loads(result.stdout)
    assert result.exit_code == any(each["level"] == "problem" for each in every)
    found: dict[str, list[dict]] = {}
    for each in every:
        if "fsync is off" not in each["found"]:
            found.setdefault(each["check"], []).append(each)
    return found


def test_a_healthy_database(shell: Shell):
    shell.conn.execute("analyze")
    found = by_check(shell)
    assert set(found) == {
        "database", "clock", "postgres", "settings", "connections", "schema", "indexes", "bloat", "vacuum", "workers",
    }  # fmt: skip
    bad = [each for group in found.values() for each in group if each["level"] == "problem"]
    assert bad == []
    text = shell.run("doctor").stdout
    assert "ok      database    it answers" in text
    assert text.splitlines()[-1][1:].startswith((" problem, ", " problems, "))


def test_the_indexes_that_the_migrations_make(durable_dsn: str):
    query = (
        "select indexname from pg_indexes where schemaname = 'durable' and indexname not in"
        " (select conname from pg_constraint)"
    )
    with psycopg.connect(durable_dsn) as conn:
        made = {name for (name,) in conn.execute(query).fetchall()}
    assert expected_indexes(migrations()[-1].version) == made
    assert expected_indexes(0) == frozenset()


def test_missing_and_invalid_indexes(shell: Shell):
    shell.conn.execute("drop index durable.gen_durable_held")
    shell.conn.execute(
        "update pg_index set indisvalid = false where indexrelid = 'durable.gen_durable_pick'::regclass"
    )
    found = [(each["level"], each["found"].partition(":")[0]) for each in by_check(shell)["indexes"]]
    assert found == [
        ("problem", "index gen_durable_held is missing"),
        ("problem", "index gen_durable_pick is invalid"),
    ]
    assert "reindex index concurrently" in shell.run("doctor").stdout


def test_work_that_nobody_does(shell: Shell):
    shell.add(queue="alone")
    shell.add(queue="served", hold=2, shelved_step="charge")
    shell.node("w:1", queues={"served": 3}, machines=["shop:Other/1"])
    found = [(each["level"], each["found"]) for each in by_check(shell)["workers"]]
    assert found == [
        ("problem", "queue 'alone' has 1 instance waiting, and no live worker serves it"),
        ("problem", "no live worker of queue 'served' knows step 'charge' of shop:Checkout/1"),
    ]


def test_a_paused_queue_and_a_lost_node(shell: Shell):
    shell.node("w:1", queues={"q": 3}, machines=["shop:Checkout/1"])
    shell.node("lost:1", queues={"q": 3}, machines=[], alive=False)
    shell.add(queue="q")
    shell.add(queue="q", status="executing", locked_by="lost:1")
    shell.ok("queue", "pause", "q", "--reason", "flood")
    found = [each["found"] for each in by_check(shell)["workers"]]
    assert found == [
        "queue 'q' is paused and has 1 instance due",
        "worker lost:1 was lost and still holds 1 claim",
    ]


@pytest.mark.parametrize(
    ("level", "does"),
    [
        (psycopg.IsolationLevel.REPEATABLE_READ, "select 1"),  # has a snapshot
        (psycopg.IsolationLevel.READ_COMMITTED, "create temp table forgotten ()"),  # has written, and is idle
    ],
)
def test_an_old_transaction(shell: Shell, durable_dsn: str, monkeypatch: pytest.MonkeyPatch, level, does):
    monkeypatch.setattr(importlib.import_module("durable_actors.cli.doctor"), "OLD", 0.0)
    with psycopg.connect(durable_dsn, application_name="forgotten") as conn:
        conn.isolation_level = level
        conn.execute(does)
        pid = conn.info.backend_pid
        [holder] = [each for each in by_check(shell)["vacuum"] if f"process {pid}," in each["found"]]
    assert "forgotten" in holder["found"]
    assert holder["remedy"] == f"end it: select pg_terminate_backend({pid})"


def test_no_database_is_a_finding(shell: Shell):
    result = shell.run("doctor", "--json", "--dsn", "host=/nowhere connect_timeout=1")
    assert result.exit_code == 1
    [found] = json.loads(result.stdout)
    assert (found["check"], found["level"]) == ("database", "problem")
    assert found["remedy"]


def test_no_schema_is_a_finding(shell: Shell):
    result = shell.run("doctor", "--schema", "elsewhere")
    assert result.exit_code == 1
    assert "schema elsewhere is at version 0" in result.stdout
    assert "durable-actors migrate" in result.stdout


def test_clocks():
    assert check_clock(1000.0, 999.99, 1000.01).level == "ok"
    assert check_clock(1000.0, 990.0, 1010.0).level == "ok"  # a slow answer tells nothing
    ahead = check_clock(1010.0, 1000.0, 1000.1)
    assert (ahead.level, ahead.found) == ("warning", "the database's clock is 9.9 s ahead of this computer's")
    assert check_clock(1000.0, 2000.0, 2000.1).level == "problem"


@pytest.mark.parametrize(
    ("change", "check", "level"),
    [
        ({}, "settings", "ok"),
        ({"version": 130009}, "postgres", "problem"),
        ({"version": 190000}, "postgres", "warning"),
        ({"standby": True}, "database", "problem"),
        ({"connections": 95}, "connections", "warning"),
        ({"settings": {**FINE.settings, "autovacuum": "off"}}, "settings", "problem"),
        ({"settings": {**FINE.settings, "idle_in_transaction_session_timeout": "0"}}, "settings", "warning"),
        ({"settings": {}}, "settings", "ok"),
    ],
)
def test_servers(change, check, level):
    assert levels(check_server(attrs.evolve(FINE, **change)))[check] == level


def test_dead_rows():
    fine = TableFacts("signals", 100, 9999, 1000, None)
    bad = TableFacts("gen_durable", 20_000, 15_000, 1000, None)
    big = TableFacts("journal", 10**7, 10**6, 1000, 3.0)
    [found] = check_bloat([fine, bad, big], "durable")
    assert found.found == "gen_durable has 15,000 dead rows beside 20,000 live ones; last vacuum: never"
    assert found.remedy is not None
    assert 'vacuum analyze "durable".gen_durable' in found.remedy
    assert levels(check_bloat([fine, big], "durable")) == {"bloat": "ok"}


def test_holders():
    found = check_holders(
        [
            Holder("transaction", "42", 4000.0, 9, "ada, idle in transaction"),
            Holder("prepared", "it's", 4000.0, 9, "ada"),
            Holder("slot", "replica", None, 2_000_000, "inactive"),
        ],
        sees_others=False,
    )
    assert [each.remedy for each in found] == [
        "end it: select pg_terminate_backend(42)",
        "rollback prepared 'it''s', or commit it",
        "let its consumer catch up, or: select pg_drop_replication_slot('replica')",
        "grant pg_read_all_stats to the role of the operators",
    ]
    assert levels(check_holders([], sees_others=True)) == {"vacuum": "ok"}


def test_versions():
    now = SchemaVersion("durable", 5, 5, 0, ())
    assert levels(check_versions(now, "0.2", [])) == {"schema": "ok"}
    assert levels(check_versions(attrs.evolve(now, current=6), "0.2", [])) == {"schema": "warning"}
    pending = attrs.evolve(now, current=4, pending=migrations()[:1])
    assert levels(check_versions(pending, "0.2", [])) == {"schema": "problem"}


def test_it_changes_nothing(shell: Shell):
    shell.add()
    counts = (
        "select sum(n_tup_ins + n_tup_upd + n_tup_del) from pg_stat_user_tables where schemaname = 'durable'"
    )
    before = shell.conn.execute(counts).fetchall()
    shell.run("doctor")
    assert shell.conn.execute(counts).fetchall() == before
