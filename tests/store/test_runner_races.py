"""Runners beside senders, reapers, keepers and each other: every interleaving is forced (docs/explanation/races.md)."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import psycopg
import pytest
from tests.store.kit import EXPIRE, insert, rows
from tests.store.test_runner_functions import Claim, claim, complete, heartbeat, taken
from tests.support.interleave import Pending, Session, open_sessions

TAKE = "select row_to_json(c) from durable.claim_next('default', '{m/s}', 'test') c"
KEY = "hashtextextended('durable' || chr(1) || 'k', 0)"


def completing(session: Session, mine: Claim, outcome: object) -> Pending:
    values = [mine["id"], mine["claim_id"], mine["token"], json.dumps(outcome)]
    return session.start("select verdict from durable.complete(%s, %s, %s, %s)", values)


def test_a_signal_that_comes_while_a_runner_parks_wakes_it(db: psycopg.Connection, durable_dsn: str):
    insert(db)
    mine = taken(db)
    with open_sessions(durable_dsn) as (sender, worker):
        sender.run("begin")
        sender.run("select durable.signal(%s::bigint, 'go')", [mine["id"]])
        parking = completing(worker, mine, {"await": "go"})
        parking.wait_blocked(by=sender)
        sender.run("commit")
        assert parking.result() == [("committed",)]
    assert rows(db, "status, attempt, visit") == [("runnable", 0, 1)]
    assert [each["name"] for each in taken(db)["awaited"]] == ["go"]


def test_a_runner_that_comes_too_late_learns_it_from_the_one_that_reaps(
    db: psycopg.Connection, durable_dsn: str
):
    insert(db)
    mine = taken(db)
    db.execute(EXPIRE)
    with open_sessions(durable_dsn) as (other, worker):
        other.run("begin")
        assert other.run(TAKE)[0][0]["attempt"] == 1
        ending = completing(worker, mine, {"done": 1})
        ending.wait_blocked(by=other)
        other.run("commit")
        with pytest.raises(psycopg.Error) as caught:
            ending.result()
        assert caught.value.sqlstate == "RD001"
    assert rows(db, "status, result") == [("executing", None)]


def test_a_claim_waits_for_nobody(db: psycopg.Connection, durable_dsn: str):
    """Neither for an expired claim whose owner is committing, nor for a row that somebody has locked."""
    expired, locked, free = insert(db)[0], insert(db)[0], None
    mine = taken(db)
    db.execute(EXPIRE)
    [free] = insert(db)
    assert mine["id"] == expired
    with open_sessions(durable_dsn) as (worker, other):
        worker.run("begin")
        assert completing(worker, mine, {"next": "t"}).result() == [("committed",)]
        worker.run("select 1 from durable.gen_durable where id = %s for update", [locked])
        assert claim(db) is not None
        assert rows(db, "id", "status = 'executing' and lease_expires_at > now()") == [(free,)]
        assert claim(db) is None
        other.run("begin")
        worker.run("rollback")


def test_a_heartbeat_waits_for_nobody(db: psycopg.Connection, durable_dsn: str):
    insert(db)
    mine = taken(db)
    with open_sessions(durable_dsn, 1) as (other,):
        other.run("begin")
        other.run("select 1 from durable.gen_durable for update")
        assert heartbeat(db, mine) == (False, None), "it is not lost, and not extended"
        other.run("commit")
    assert heartbeat(db, mine) == (True, None)


def test_the_last_two_children_open_their_barrier_once(db: psycopg.Connection, durable_dsn: str):
    insert(db, fsm_version=2)
    complete(db, taken(db, "m@2/s"), {"children": [{"machine": "m", "step": "s"}] * 2, "then": "t"})
    one, two = taken(db), taken(db)
    with open_sessions(durable_dsn) as (a, b):
        a.run("begin")
        assert completing(a, one, {"done": 1}).result() == [("committed",)]
        last = completing(b, two, {"done": 2})
        last.wait_blocked(by=a)
        a.run("commit")
        assert last.result() == [("committed",)]
    assert rows(db, "status, step, children_pending, rev", "parent_id is null") == [("runnable", "t", 0, 5)]


def test_of_many_claims_at_once_one_gets_the_row(durable_dsn: str, db: psycopg.Connection):
    insert(db)
    ready = Barrier(12)

    def race(_: int) -> Any:
        with psycopg.connect(durable_dsn, autocommit=True) as own:
            ready.wait(10)
            return claim(own)

    with ThreadPoolExecutor(12) as threads:
        got = [each for each in threads.map(race, range(12)) if each is not None]
    assert len(got) == 1
    assert rows(db, "claim_id::text, rev") == [(got[0]["claim_id"], 2)]


# -- partition keys


def test_a_key_runs_one_step_at_a_time(db: psycopg.Connection, durable_dsn: str):
    first, second = insert(db, 2, partition_key="k")
    with open_sessions(durable_dsn, 1) as (a,):
        a.run("begin")
        mine = a.run(TAKE)[0][0]
        assert mine["id"] == first
        assert claim(db) is None, "the other claim is not committed: its lock on the key decides"
        a.run("commit")
    assert claim(db) is None, "the executing row decides"
    assert rows(db, "hold") == [(0,), (1,)]
    complete(db, mine, {"next": "t"})
    assert taken(db, "m/s", "m/t")["id"] == second


def test_a_key_that_a_keeper_holds_is_left_alone(db: psycopg.Connection, durable_dsn: str):
    """An engine's step still runs, although its claim was taken back. The claim is undone, as if it had never been."""
    [keyed] = insert(db, partition_key="k", journal=4)
    [plain] = insert(db, eligible_at="=now()")
    with open_sessions(durable_dsn, 1) as (keeper,):
        keeper.run(f"select pg_advisory_lock({KEY})")
        before = rows(db, "gen_durable.*", f"id = {keyed}")
        assert taken(db)["id"] == plain, "the rows behind it are not held up"
        assert claim(db) is None
        assert rows(db, "gen_durable.*", f"id = {keyed}") == before
        assert db.execute("select count(*) from durable.journal").fetchone() == (0,)
        keeper.run(f"select pg_advisory_unlock({KEY})")
    assert taken(db)["id"] == keyed


def test_a_claim_keeps_a_keeper_from_the_key_until_it_is_committed(db: psycopg.Connection, durable_dsn: str):
    insert(db, partition_key="k")
    with open_sessions(durable_dsn) as (a, keeper):
        a.run("begin")
        assert a.run(TAKE)
        assert keeper.run(f"select pg_try_advisory_lock({KEY})") == [(False,)]
        a.run("commit")
        assert keeper.run(f"select pg_try_advisory_lock({KEY})") == [(True,)]


def test_a_crowd_behind_a_busy_key_is_passed(db: psycopg.Connection):
    insert(db, 1500, partition_key="k")
    [behind] = insert(db)
    taken(db)
    assert taken(db)["id"] == behind


def test_a_key_whose_rows_nothing_offers_is_swept(db: psycopg.Connection):
    [number] = insert(db, partition_key="k", hold=1)
    assert taken(db)["id"] == number
