"""The SQL functions of runners: fences, duplicates, outcomes, and that their parts are the engine's statements."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from durable_actors import sync
from durable_actors._store.move_parts import AS_FUNCTIONS
from durable_actors._store.sql import statement
from tests.store.kit import EXPIRE, insert, rows

Claim = dict[str, Any]
COPIES = sorted(AS_FUNCTIONS | {"journal_outcomes", "consume_signals", "sweep_keys"})
STALE = "4a1b0f6e-0000-4000-8000-000000000000"


def claim(
    db: psycopg.Connection, *steps: str, queue: str = "default", lease: str = "1 minute"
) -> Claim | None:
    """Claim as a worker in another language does; the columns by name."""
    query = "select row_to_json(c) from durable.claim_next(%s, %s, 'test', %s::interval) c"
    found = db.execute(query, [queue, list(steps) or ["m/s"], lease]).fetchone()
    return None if found is None else found[0]


def taken(db: psycopg.Connection, *steps: str) -> Claim:
    found = claim(db, *steps)
    assert found is not None
    return found


def complete(db: psycopg.Connection, mine: Claim, outcome: object, *, late: bool = True) -> str:
    """Complete a claim; the verdict."""
    query = "select verdict from durable.complete(%s, %s, %s, %s, %s)"
    values = [mine["id"], mine["claim_id"], mine["token"], json.dumps(outcome), late]
    [verdict] = db.execute(query, values).fetchone() or [None]
    return verdict


def fail(db: psycopg.Connection, mine: Claim, error: object, options: str = "") -> str:
    query = f"select verdict from durable.fail(%s, %s, %s, %s{options})"
    [verdict] = db.execute(
        query, [mine["id"], mine["claim_id"], mine["token"], json.dumps(error)]
    ).fetchone() or [None]
    return verdict


def heartbeat(db: psycopg.Connection, mine: Claim) -> tuple[Any, ...]:
    query = "select lease_until > now() + interval '4 minutes', request from durable.heartbeat(%s, %s, %s)"
    found = db.execute(query, [mine["id"], mine["claim_id"], mine["token"]]).fetchone()
    assert found is not None
    return found


def refused(code: str, call: Callable[[], object]) -> str:
    with pytest.raises(psycopg.Error) as caught:
        call()
    assert caught.value.sqlstate == code, caught.value
    return str(caught.value)


# -- the parts


@pytest.mark.parametrize("name", COPIES)
def test_a_part_has_the_text_of_the_statement(db: psycopg.Connection, name: str):
    """If this fails because a file has changed: add a migration that replaces the function."""
    text = statement(name, "durable").sql
    body = text[re.search(r"^(?!--)", text, re.MULTILINE).start() :].strip()  # type: ignore[union-attr]
    query = "select prosrc from pg_proc where pronamespace = 'durable'::regnamespace and proname = %s"
    [[source]] = db.execute(query, [name]).fetchall()
    assert body in source
    assert len(source) - len(body) < 100


# -- what a claim tells


def test_a_claim_tells_all_that_a_step_needs(db: psycopg.Connection):
    [number] = insert(db, state='{"n": 1}', partition_key="k")
    mine = taken(db)
    assert (mine["id"], mine["machine"], mine["version"], mine["step"]) == (number, "m", 1, "s")
    assert (mine["state"], mine["attempt"], mine["visit"]) == ({"n": 1}, 0, 1)
    assert (mine["idempotency_key"], mine["partition_key"], mine["parent_id"]) == (f"{number}/1/s", "k", None)
    assert (mine["awaited"], mine["signals"], mine["more_signals"]) == ([], [], False)
    assert (mine["children"], mine["children_counts"]) == ([], {})
    assert rows(db, "status, locked_by") == [("executing", "runner:test")]


def test_the_database_has_the_hash_of_the_token_alone(db: psycopg.Connection):
    insert(db, 2, journal=4)
    one, other = taken(db), taken(db)
    assert re.fullmatch("[0-9a-f]{64}", one["token"])
    assert one["token"] != other["token"]
    complete(db, one, {"done": 1})
    tables = db.execute("select tablename from pg_tables where schemaname = 'durable'").fetchall()
    for (table,) in tables:
        for mine in (one, other):
            found = db.execute(
                f"select 1 from durable.{table} t where t::text like %s", [f"%{mine['token']}%"]
            )
            assert found.fetchall() == [], table
    hashes = rows(
        db, "claim_token_hash = sha256(convert_to(%s, 'UTF8'))".replace("%s", f"'{other['token']}'")
    )
    assert hashes == [(False,), (True,)]


def test_rows_at_other_steps_are_left_as_they_are(db: psycopg.Connection):
    insert(db, 3, fsm_version=2)
    [number] = insert(db, eligible_at="=now()")
    insert(db, queue="other")
    before = rows(db, "id, rev, hold, status", f"id <> {number}")
    assert taken(db)["id"] == number
    assert claim(db) is None
    assert rows(db, "id, rev, hold, status", f"id <> {number}") == before
    assert taken(db, "m@2/s")["version"] == 2


def test_what_a_node_has_shelved_is_found(db: psycopg.Connection):
    [number] = insert(db, hold=2, shelved_step="s")
    assert claim(db, "m/t") is None
    assert taken(db, "m/t", "m/s")["id"] == number


def test_the_most_urgent_comes_first(db: psycopg.Connection):
    late, urgent, shelved = (
        insert(db)[0],
        insert(db, priority=-1)[0],
        insert(db, hold=2, shelved_step="s", priority=-2)[0],
    )
    insert(db, priority=-9, eligible_at="=now() + interval '1 day'")
    assert [taken(db)["id"] for _ in range(3)] == [shelved, urgent, late]
    assert claim(db) is None


@pytest.mark.parametrize(
    "arguments",
    ["null, '{m/s}', 'me'", "'q', '{}', 'me'", "'q', null, 'me'", "'q', '{m}', 'me'", "'q', '{m/s}', ''",
     "'q', '{m/s}', null",     "'q', '{m/s}', 'me', '0 s'", "'q', '{m/s}', 'me', '11 years'", "'q', '{m/s,x}', 'me'"],
)  # fmt: skip
def test_bad_arguments_of_a_claim(db: psycopg.Connection, arguments: str):
    refused("RD004", lambda: db.execute(f"select * from durable.claim_next({arguments})"))


# -- fences


def test_a_claim_that_is_not_current_changes_nothing(db: psycopg.Connection):
    insert(db)
    old = taken(db)
    db.execute(EXPIRE)
    new = taken(db)
    assert (new["id"], new["attempt"], new["idempotency_key"]) == (old["id"], 1, old["idempotency_key"])
    strangers = [
        old,
        new | {"token": old["token"]},
        new | {"token": ""},
        new | {"claim_id": STALE},
        new | {"token": None},
    ]
    before = rows(db, "gen_durable.*")
    for mine in strangers:
        refused("RD001", lambda mine=mine: heartbeat(db, mine))  # type: ignore[misc]
        refused("RD001", lambda mine=mine: complete(db, mine, {"done": 1}))  # type: ignore[misc]
        refused("RD001", lambda mine=mine: fail(db, mine, "no"))  # type: ignore[misc]
    assert rows(db, "gen_durable.*") == before
    assert complete(db, new, {"done": 1}) == "committed"
    refused("RD001", lambda: heartbeat(db, new))
    refused("RD005", lambda: complete(db, new | {"id": 99}, {"done": 1}))


def test_an_expired_claim_may_still_complete_unless_late_outcomes_are_refused(db: psycopg.Connection):
    insert(db, journal=4)
    mine = taken(db)
    db.execute(EXPIRE)
    refused("RD002", lambda: complete(db, mine, {"done": 1}, late=False))
    assert rows(db, "status") == [("executing",)]
    assert heartbeat(db, mine) == (True, None), "as an engine's: it is renewed while it is current"
    db.execute(EXPIRE)
    assert complete(db, mine, {"done": 1}) == "committed"
    assert db.execute("select data->'late' from durable.journal where kind = 'done'").fetchall() == [(True,)]


def test_a_heartbeat_tells_what_a_command_asks(db: psycopg.Connection):
    insert(db)
    mine = taken(db)
    assert heartbeat(db, mine) == (True, None)
    db.execute("""update durable.gen_durable set request = '{"kind": "cancel"}'""")
    assert heartbeat(db, mine) == (True, {"kind": "cancel"})


def test_neither_an_old_snapshot_nor_a_savepoint(db: psycopg.Connection):
    """The recheck of an await needs a new snapshot, and riders know rows of their transaction by xmin."""
    insert(db, 2)
    mine = taken(db)
    for level in ("repeatable read", "serializable"):
        with db.transaction():
            db.execute(f"set transaction isolation level {level}")
            with pytest.raises(psycopg.errors.InvalidTransactionState), db.transaction():
                complete(db, mine, {"done": 1})
            with pytest.raises(psycopg.errors.InvalidTransactionState), db.transaction():
                claim(db)
    with db.transaction():
        for outcome in ({"done": 1}, {"children": [{"machine": "m"}], "then": "t"}):
            with pytest.raises(psycopg.errors.InvalidTransactionState), db.transaction():
                complete(db, mine, outcome)
    assert rows(db, "status") == [("executing",), ("runnable",)]
    with db.transaction():
        assert complete(db, mine, {"done": 1}) == "committed"


def test_a_claim_leaves_the_settings_of_the_transaction_alone(db: psycopg.Connection):
    insert(db)
    with db.transaction():
        db.execute("set local synchronous_commit = on")
        taken(db)
        assert db.execute("select current_setting('synchronous_commit')").fetchone() == ("on",)


# -- duplicates


def test_without_a_journal_a_second_completion_was_completed_already(db: psycopg.Connection):
    insert(db)
    mine = taken(db)
    assert complete(db, mine, {"next": "t"}) == "committed"
    assert complete(db, mine, {"next": "t"}) == "already_completed"
    assert complete(db, mine, {"done": 1}) == "already_completed"
    assert fail(db, mine, "no") == "already_completed"
    assert rows(db, "status, step, visit, rev") == [("runnable", "t", 2, 3)]


@pytest.mark.parametrize("level", [2, 3, 4])
def test_with_a_journal_another_outcome_is_a_conflict(db: psycopg.Connection, level: int):
    insert(db, journal=level)
    mine = taken(db)
    first = {"next": "t", "state": {"n": 1}}
    complete(db, mine, first)
    for other in (
        {"next": "u", "state": {"n": 1}},
        {"next": "t", "state": {"n": 2}},
        {"done": 1},
        {"retry": 1},
    ):
        assert "another outcome" in refused("RD003", lambda other=other: complete(db, mine, other))  # type: ignore[misc]
    refused("RD003", lambda: fail(db, mine, "no"))
    assert complete(db, mine, first) == "already_completed"
    last = taken(db, "m/t")
    complete(db, last, {"done": [1]})
    assert complete(db, last, {"done": [1]}) == "already_completed"
    refused("RD003", lambda: complete(db, last, {"done": [2]}))
    assert complete(db, mine, first) == "already_completed", "also when others have claimed it since"
    assert db.execute("select count(*) from durable.journal where kind in ('next', 'done')").fetchone() == (
        2,
    )


@pytest.mark.parametrize("level", [2, 3, 4])
def test_how_long_a_runner_had_its_claim(db: psycopg.Connection, level: int):
    """It is known where the claim is recorded: the row does not have its time."""
    insert(db, journal=level)
    for end in (
        lambda mine: fail(db, mine, "no", ", retry_in => '0'"),
        lambda mine: complete(db, mine, {"done": 1}),
    ):
        mine = taken(db)
        db.execute("set durable_actors.journal_door = 'open'")
        db.execute("update durable.journal set at = at - interval '7 s' where kind = 'claimed'")
        db.execute("reset durable_actors.journal_door")
        heartbeat(db, mine)
        assert end(mine) == "committed"
    query = "select kind, round(seconds) from durable.journal where kind in ('retry', 'done') order by rev"
    told = None if level == 2 else 7
    assert db.execute(query).fetchall() == [("retry", told), ("done", told)]


def test_without_a_journal_a_claim_is_forgotten_when_the_next_one_is_taken(db: psycopg.Connection):
    insert(db)
    mine = taken(db)
    complete(db, mine, {"next": "t"})
    taken(db, "m/t")
    refused("RD001", lambda: complete(db, mine, {"next": "t"}))


# -- outcomes


@pytest.mark.parametrize(
    "outcome",
    [None, [], {}, "done", {"done": 1, "stop": "x"}, {"finished": 1}, {"done": 1, "state": 2}, {"next": 5},
     {"next": ""}, {"next": "x" * 256}, {"next": "a\x1fb"}, {"next": "t", "partition_key": ""},
     {"next": "t", "partition_key": "k" * 2001},
     {"next": "t", "consume": 5}, {"retry": -1}, {"retry": "soon"}, {"retry": 1e12}, {"await": []}, {"await": [""]},
     {"await": None}, {"await": "a", "timeout": -1}, {"await": "a", "then": 5}, {"children": [], "then": None},
     {"children": {}, "then": "t"}, {"children": [1], "then": "t"}, {"children": [{}], "then": "t"},
     {"children": [{"machine": "m", "stat": {}}], "then": "t"}, {"children": [], "then": "t", "join": 0},
     {"children": [], "then": "t", "join": "some"}, {"pause": ""}, {"pause": "t", "timeout": 1},
     {"pause": "t", "title": 5}, {"approval": "t", "title": ""}, {"approval": "t", "on_reject": ""},
     {"approval": "t", "on_timeout": "u"},
     {"approval": "t", "timeout": -1}, {"approval": "t", "data": "x" * 65_536}],
    ids=repr,
)  # fmt: skip
def test_an_invalid_outcome_is_refused_and_changes_nothing(db: psycopg.Connection, outcome: object):
    insert(db)
    mine = taken(db)
    before = rows(db, "gen_durable.*")
    refused("RD004", lambda: complete(db, mine, outcome))
    assert rows(db, "gen_durable.*") == before
    assert complete(db, mine, {"done": None}) == "committed"


def test_a_failure_is_retried_and_then_final(db: psycopg.Connection):
    insert(db, journal=1)
    mine = taken(db)
    assert fail(db, mine, {"text": "no", "type": "IOError", "traceback": "x" * 20_000}) == "committed"
    [(status, attempt, error, kind, trace, early, late)] = rows(
        db, "status, attempt, last_error, error_type, length(traceback), eligible_at > now() + interval '0.1 s', "
        "eligible_at > now() + interval '1 s'"
    )  # fmt: skip
    assert (status, attempt, error, kind, trace, early, late) == (
        "runnable",
        1,
        "no",
        "IOError",
        16003,
        True,
        False,
    )
    db.execute("update durable.gen_durable set eligible_at = now()")
    fail(db, taken(db), "again", ", retry_in => '1 hour'")
    assert rows(db, "attempt, eligible_at > now() + interval '59 minutes'") == [(2, True)]
    db.execute("update durable.gen_durable set eligible_at = now()")
    fail(db, taken(db), "at last", ", max_attempts => 3")
    assert rows(db, "status, attempt, last_error") == [("failed", 2, "at last")]
    assert db.execute("select kind, error->>'text' from durable.journal order by rev").fetchall() == [
        ("retry", "no"), ("retry", "again"), ("failed", "at last"),
    ]  # fmt: skip


def signal(db: psycopg.Connection, number: int, name: str) -> None:
    db.execute("select durable.signal(%s, %s, to_jsonb(%s::text))", [number, name, name])


def inbox(db: psycopg.Connection) -> list[str]:
    query = "select name from durable.signals where consumed_at is null order by id"
    return [name for (name,) in db.execute(query)]


def test_a_step_consumes_the_signals_that_it_was_handed_and_no_others(db: psycopg.Connection):
    [number] = insert(db)
    complete(db, taken(db), {"await": ["a", "b"], "then": "t"})
    for name in ("noise", "a"):
        signal(db, number, name)
    mine = taken(db, "m/t")
    assert [each["name"] for each in mine["awaited"]] == ["a"]
    assert [each["payload"] for each in mine["signals"]] == ["noise", "a"]
    signal(db, number, "b")  # while the step runs
    complete(db, mine, {"next": "u"})
    assert inbox(db) == ["noise", "b"]
    mine = taken(db, "m/u")
    complete(db, mine, {"next": "s", "consume": [mine["signals"][0]["id"]]})
    assert inbox(db) == ["b"]
    complete(db, taken(db), {"done": 1})
    assert inbox(db) == []


def test_a_runner_asks_a_person_and_is_told_the_decision(db: psycopg.Connection):
    [number] = insert(db)
    asked = {
        "approval": "t",
        "state": [1],
        "title": "ok?",
        "data": {"a": None},
        "on_reject": "u",
        "timeout": 60,
    }
    mine = taken(db)
    assert mine["decision"] is None
    assert complete(db, mine, asked) == "committed"
    assert complete(db, mine, asked) == "already_completed"
    signal(db, number, "approve")
    assert claim(db, "m/t") is None, "no signal decides"
    sync.reject(db, number, by="ada", comment="no", data=[None])
    mine = taken(db, "m/u")
    assert {**mine["decision"], "at": ""} == {
        "kind": "rejected",
        "by": "ada",
        "comment": "no",
        "data": [None],
        "at": "",
    }
    complete(db, mine, {"retry": 0})
    assert taken(db, "m/u")["decision"] == mine["decision"], "in every run of the visit"


def test_signals_accumulate_until_a_pack_is_complete(db: psycopg.Connection):
    [number] = insert(db)
    complete(db, taken(db), {"await": "a"})
    for count in (1, 2, 3):
        signal(db, number, "a")
        mine = taken(db)
        assert len(mine["awaited"]) == count
        complete(db, mine, {"await": ["a"]})
        assert claim(db) is None, "what it has seen does not wake it"
    signal(db, number, "a")
    complete(db, taken(db), {"children": [], "then": "t"})
    assert inbox(db) == []


def test_more_signals_than_a_step_is_handed(db: psycopg.Connection):
    [number] = insert(db)
    complete(db, taken(db), {"await": "a"})
    db.execute("select durable.signal(%s, 'a') from generate_series(1, 1002)", [number])
    mine = taken(db)
    assert (len(mine["awaited"]), len(mine["signals"]), mine["more_signals"]) == (1000, 1000, True)
    complete(db, mine, {"await": "a"})
    assert claim(db) is None, "it would be handed the same ones"
    signal(db, number, "a")
    complete(db, taken(db), {"next": "t"})
    assert len(inbox(db)) == 3


def test_children_and_their_barrier(db: psycopg.Connection):
    insert(db, journal=3)
    children = [
        {"machine": "c", "state": [1], "queue": "k", "priority": 3, "unique_key": "one", "tags": ["a", "b"]},
        {"machine": "c", "version": 2, "step": "go", "queue": "k", "meta": {"x": 1}, "schedule_in": 0},
        {"machine": "c", "queue": "k", "unique_key": "one"},
    ]
    complete(db, taken(db), {"children": children, "then": "t", "join": "any_failed", "timeout": 60})
    columns = "fsm, fsm_version, step, state, priority, unique_key, tags, meta, journal, barrier"
    assert rows(db, columns, "parent_id = 1") == [
        ("c", 1, "start", [1], 3, b"one", ["a", "b"], None, 3, 2), ("c", 2, "go", {}, 0, None, None, {"x": 1}, 3, 2),
    ]  # fmt: skip
    assert rows(db, "status, children_total, children_pending", "id = 1") == [("awaiting_children", 2, 2)]
    child = claim(db, "c/start", "c@2/go", queue="k")
    assert child is not None
    fail(db, child, "no", ", max_attempts => 1")
    mine = taken(db, "m/t")
    told = [(each["id"] == child["id"], each["status"], each["last_error"]) for each in mine["children"]]
    assert sorted(told) == [(False, "runnable", None), (True, "failed", "no")]
    assert mine["children_counts"] == {"failed": 1, "runnable": 1}
