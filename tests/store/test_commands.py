"""A command and its receipt are one statement: done once per key, in every interleaving; nothing without the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import durable_actors as da
import psycopg
import pytest
from durable_actors._store.claim import read_requests
from durable_actors._store.commands import Command, Request
from durable_actors._store.dialogues import RETRY, CarriedOut, carrying_out, listing_receipts
from durable_actors._store.foreign import Dialogue, execute, run_dialogue
from durable_actors._store.observe import NEWEST
from durable_actors._store.sql import statement
from psycopg.types.json import Jsonb
from tests.store.kit import ROLES, SCHEMA, connect, insert, rows
from tests.support.interleave import open_sessions
from tests.support.sql import count_statements, explain

FAILED = {"status": "failed", "finished_at": "=now()"}
FAIL = "update durable.gen_durable set status = 'failed', finished_at = now(), last_error = 'again' where id = %s"
RETRY_SQL = statement("retry_instance", SCHEMA).sql
LIVE = "{runnable,executing,awaiting_signal,awaiting_children}"


def retry(db: psycopg.Connection, number: int, **said: Any) -> CarriedOut:
    return run_dialogue(db, carrying_out(RETRY, SCHEMA, number, Command(**said)), schema=SCHEMA)


def receipts(db: psycopg.Connection) -> list[tuple[Any, ...]]:
    return db.execute(
        "select command, scope, target, by, reason, idempotency_key, data, result from durable.receipts order by id"
    ).fetchall()


def test_effect_and_receipt(db: psycopg.Connection):
    [number] = insert(db, **FAILED, attempt=3, crashes=2, claim_id="=gen_random_uuid()")
    done = retry(db, number, by="ada", reason="r", idempotency_key="k", data=b'{"a": 1}')
    assert (done.id, done.result) == (number, number)
    assert done.found is not None
    assert done.found.status == "failed"
    assert rows(db, "status, attempt, crashes, claim_id, finished_at, rev") == [
        ("runnable", 0, 0, None, None, 2)
    ]
    assert receipts(db) == [("retry", "instance", str(number), "ada", "r", "k", {"a": 1}, number)]


def test_a_command_is_one_statement(db: psycopg.Connection, durable_dsn: str):
    """Beside the reads that precede it. So there is no moment in which only one of the two is written."""
    [number] = insert(db, **FAILED)
    with count_statements(durable_dsn) as count:
        retry(db, number, idempotency_key="k")
    assert count.calls("receipts as r (") == count.calls("children_pending + ") == 1
    assert count.total == 5, str(
        count
    )  # begin, commit, what the instance is, whether the key was used, and this one


@pytest.mark.parametrize("status", ["cancelled", "failed"])
def test_a_retry_ends_the_request(db: psycopg.Connection, status: str):
    [number] = insert(db, status=status, finished_at="=now()", request=Jsonb({"kind": "cancel"}))
    retry(db, number)
    assert rows(db, "status, request") == [("runnable", None)]


def test_a_retried_child_is_waited_for_again_and_only_once(db: psycopg.Connection):
    """What the barrier gets derives from RETURNING: a call that is repeated adds nothing, in a savepoint or not."""
    [parent] = insert(
        db, status="awaiting_children", visit=3, children_pending=1, children_total=2, await_step="t"
    )
    [child] = insert(db, **FAILED, parent_id=parent, barrier=3)
    with db.transaction(), db.transaction():
        retry(db, child, idempotency_key="k")
        retry(db, child, idempotency_key="k")
    retry(db, child, idempotency_key="k")
    assert rows(db, "children_pending", f"id = {parent}") == [(2,)]


@pytest.mark.parametrize(
    "columns",
    [
        {},
        {"status": "done", "finished_at": "=now()"},
        {"status": "awaiting_signal", "awaits": ["a"]},
        {
            "status": "executing",
            "claim_id": "=gen_random_uuid()",
            "locked_by": "n",
            "lease_expires_at": "=now()",
        },
    ],
    ids=lambda columns: columns.get("status", "runnable"),
)
def test_a_state_that_does_not_allow_it(db: psycopg.Connection, columns: dict[str, Any]):
    [number] = insert(db, **columns)
    before = rows(db, "g::text".replace("g", "gen_durable"))
    with pytest.raises(da.Conflict, match=f"instance {number} is {columns.get('status', 'runnable')}"):
        retry(db, number, idempotency_key="k")
    assert receipts(db) == []
    assert rows(db, "gen_durable::text") == before


def test_nobody_and_an_occupied_key(db: psycopg.Connection):
    with pytest.raises(da.NoTarget):
        retry(db, 7, idempotency_key="k")
    [failed] = insert(db, **FAILED, unique_key=b"u", unique_scope=LIVE)
    [holder] = insert(db, unique_key=b"u", unique_scope=LIVE)
    with pytest.raises(da.Duplicate) as raised:
        retry(db, failed, idempotency_key="k")
    assert raised.value.existing_id == holder
    assert receipts(db) == []


def test_the_same_key_is_harmless_for_ever(db: psycopg.Connection):
    [number, other] = insert(db, 2, **FAILED)
    assert retry(db, number, idempotency_key="k").found is not None
    again = retry(db, number, idempotency_key="k", by="eve")
    assert (again.id, again.result, again.found) == (number, number, None)
    db.execute(FAIL, [number])
    assert retry(db, number, idempotency_key="k").found is None
    assert rows(db, "status", f"id = {number}") == [("failed",)], "it was not carried out again"
    db.execute("delete from durable.gen_durable where id = %s", [number])
    assert retry(db, number, idempotency_key="k").result == number
    assert len(receipts(db)) == 1
    assert retry(db, other, idempotency_key="k").found is not None, "another target is another command"
    assert len(receipts(db)) == 2


def test_another_key_is_another_command(db: psycopg.Connection):
    [number] = insert(db, **FAILED)
    for key in ("a", "b", None, None):
        assert retry(db, number, idempotency_key=key).found is not None
        db.execute(FAIL, [number])
    assert [each[5] for each in receipts(db)] == ["a", "b", None, None]


# -- two at once


def stepwise(
    dsn: str, dialogue: Dialogue[Any], *, at: int, meanwhile: Callable[[], object]
) -> tuple[Any, int]:
    """Run a dialogue; before its statement number `at`, something else happens. Returns its value and its length."""
    count = 0
    with psycopg.connect(dsn, autocommit=True) as conn:
        try:
            call, params = next(dialogue)
            while True:
                if count == at:
                    meanwhile()
                count += 1
                try:
                    answer = execute(conn, call, params, schema=SCHEMA)
                except psycopg.errors.UniqueViolation as exc:
                    call, params = dialogue.throw(exc)
                else:
                    call, params = dialogue.send(answer)
        except StopIteration as end:
            return end.value, count


@pytest.mark.parametrize("then", ["goes on", "fails again"])
@pytest.mark.parametrize("at", [0, 1, 2])
def test_the_same_key_twice_at_once(db: psycopg.Connection, durable_dsn: str, at: int, then: str):
    """Before each statement of one call the other one is carried out as a whole, and the instance may fail again."""
    [number] = insert(db, **FAILED)

    def meanwhile() -> None:
        assert retry(db, number, idempotency_key="k", by="the other").found is not None
        if then == "fails again":
            db.execute(FAIL, [number])

    dialogue = carrying_out(RETRY, SCHEMA, number, Command(idempotency_key="k"))
    done, count = stepwise(durable_dsn, dialogue, at=at, meanwhile=meanwhile)
    assert count > at, "the other call came before its end"
    assert (done.result, done.found) == (number, None)
    assert [each[3] for each in receipts(db)] == ["the other"]
    assert rows(db, "status") == [("failed",) if then == "fails again" else ("runnable",)]


@pytest.mark.parametrize("at", [0, 1])
def test_a_retry_against_another_retry(db: psycopg.Connection, durable_dsn: str, at: int):
    [number] = insert(db, **FAILED)
    dialogue = carrying_out(RETRY, SCHEMA, number, Command(by="second"))
    with pytest.raises(da.Conflict, match="runnable"):
        stepwise(durable_dsn, dialogue, at=at, meanwhile=lambda: retry(db, number, by="first"))
    assert [each[3] for each in receipts(db)] == ["first"]


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_the_second_call_waits_for_the_first(db: psycopg.Connection, durable_dsn: str, end: str):
    [number] = insert(db, **FAILED)
    call = RETRY_SQL.replace("$1", str(number)).replace("$4", "'k'").replace("$5", "'{}'")
    call = call.replace("$2", "'a'").replace("$3", "null")
    with open_sessions(durable_dsn) as (a, b):
        a.run("begin")
        assert a.run(call) == [(number,)]  # type: ignore[arg-type]
        waiting = b.start(call.replace("'a'", "'b'"))  # type: ignore[arg-type]
        waiting.wait_blocked(by=a)
        a.run("commit" if end == "commit" else "rollback")
        assert waiting.result() == ([] if end == "commit" else [(number,)])
    assert [each[3] for each in receipts(db)] == ["a" if end == "commit" else "b"]


def test_the_index_refuses_a_second_effect(db: psycopg.Connection, durable_dsn: str):
    """The row is failed again when the second call gets its lock: only the receipt tells the two apart."""
    [number] = insert(db, **FAILED)
    call = RETRY_SQL.replace("$1", str(number)).replace("$4", "'k'").replace("$5", "'{}'")
    call = call.replace("$2", "null").replace("$3", "null")
    with open_sessions(durable_dsn) as (a, b):
        a.run("begin")
        a.run(call)  # type: ignore[arg-type]
        a.run(FAIL, [number])
        waiting = b.start(call)  # type: ignore[arg-type]
        waiting.wait_blocked(by=a)
        a.run("commit")
        with pytest.raises(psycopg.errors.UniqueViolation) as raised:
            waiting.result()
    assert raised.value.diag.constraint_name == "receipts_once"
    assert rows(db, "status") == [("failed",)], "nothing of the second call is left"
    assert len(receipts(db)) == 1


def test_two_callers_block_each_other_and_agree(db: psycopg.Connection, durable_dsn: str):
    """The whole call, on two connections: the second one waits in its statement, and finds the receipt."""
    [number] = insert(db, **FAILED)
    with open_sessions(durable_dsn) as (a, b):
        a.connection.autocommit = False
        assert da.sync.retry(a.connection, number, idempotency_key="k") == number
        second = b._executor.submit(da.sync.retry, b.connection, number, idempotency_key="k")
        while a.pid not in a.observer.blockers(b.pid):
            assert not second.done()
        a.connection.commit()
        assert second.result(30) == number
    assert len(receipts(db)) == 1


# -- savepoints


def test_a_savepoint_that_is_rolled_back_takes_both_along(db: psycopg.Connection):
    [number] = insert(db, **FAILED)
    with db.transaction():
        with db.transaction() as savepoint:
            retry(db, number, idempotency_key="k")
            assert len(receipts(db)) == 1
            raise psycopg.Rollback(savepoint)
        assert rows(db, "status") == [("failed",)]
        assert receipts(db) == []
        assert retry(db, number, idempotency_key="k").found is not None, "it can be given again"
    assert len(receipts(db)) == 1


# -- reading


def listed(db: psycopg.Connection, target: int | None, **options: Any) -> list[int]:
    page = {"command": None, "before": NEWEST, "limit": 10, **options}
    return [each.id for each in run_dialogue(db, listing_receipts(SCHEMA, target, **page), schema=SCHEMA)]


def test_receipts_are_listed_newest_first_in_pages(db: psycopg.Connection):
    query = "insert into durable.receipts (command, scope, target) values (%s, %s, %s) returning id, at is not null"
    made = [
        ("retry", "instance", "1"),
        ("cancel", "instance", "1"),
        ("retry", "instance", "11"),
        ("x", "queue", "1"),
    ]
    first, second, third, fourth = (db.execute(query, each).fetchone()[0] for each in made)  # type: ignore[index]
    assert listed(db, None) == [fourth, third, second, first]
    assert listed(db, None, limit=2) == [fourth, third]
    assert listed(db, None, limit=2, before=third) == [second, first]
    assert listed(db, None, command="retry") == [third, first]
    assert listed(db, 1) == [second, first]
    assert listed(db, 1, command="retry") == [first]
    assert listed(db, 1, before=second) == [first]
    assert listed(db, 7) == []


def test_receipts_have_their_indexes(db: psycopg.Connection):
    db.execute(
        "insert into durable.receipts (command, scope, target, idempotency_key)"
        " select 'retry', 'instance', (n % 2000)::text, 'k' || n from generate_series(1, 20000) n"
    )
    db.execute("vacuum analyze durable.receipts")
    calls: dict[str, tuple[list[Any], str]] = {
        "find_receipt": (["retry", "instance", "7", "k7"], "receipts_once"),
        "list_receipts_of": (["instance", "7", NEWEST, 20, None], "receipts_target"),
        "list_receipts": ([NEWEST, 20, None], "receipts_pkey"),
    }
    for name, (arguments, index) in calls.items():
        plan = explain(db, statement(name, SCHEMA).sql, arguments, generic=True)  # type: ignore[arg-type]
        plan.assert_no_seq_scan()
        plan.assert_uses(index)
        assert plan.buffers < 15, name


# -- requests

EXECUTING = {
    "status": "executing",
    "claim_id": "=gen_random_uuid()",
    "lease_expires_at": "=now() + interval '1 h'",
}


async def test_the_requests_of_a_node(db: psycopg.Connection, durable_dsn: str):
    [mine] = insert(db, **EXECUTING, locked_by="me", request=Jsonb({"kind": "cancel", "by": "ada"}))
    insert(db, **EXECUTING, locked_by="me")
    insert(db, **EXECUTING, locked_by="me", request=Jsonb(["not", "one"]))
    insert(db, **EXECUTING, locked_by="you", request=Jsonb({"kind": "cancel"}))
    insert(db, request=Jsonb({"kind": "cancel"}))
    [(claim_id,)] = rows(db, "claim_id::text", f"id = {mine}")
    async with connect(durable_dsn, "heartbeat") as conn:
        assert await read_requests(conn, SCHEMA, "me") == {claim_id: Request("cancel", "ada")}
        assert await read_requests(conn, SCHEMA, "nobody") == {}


@pytest.mark.parametrize("requests", [0, 3])
def test_a_look_is_a_page_or_two_of_an_index(db: psycopg.Connection, requests: int):
    """With 100,000 executing rows, which the index of the executing ones would have to read."""
    insert(
        db, 100_000, **EXECUTING, locked_by="=case when mod(n, 2) = 0 then 'me' else 'n' || mod(n, 10) end"
    )
    db.execute("vacuum analyze durable.gen_durable")
    request = Jsonb({"kind": "cancel"})
    db.execute(
        "update durable.gen_durable set request = %s where id = any (array(select id from durable.gen_durable"
        " where locked_by = 'me' order by id limit %s))",
        [request, requests],
    )
    call = statement("read_requests", SCHEMA).sql
    plan = explain(db, call, ["me"], settings=ROLES["heartbeat"].settings)  # type: ignore[arg-type]
    plan.assert_no_seq_scan()
    plan.assert_uses("gen_durable_requests")
    assert plan.buffers <= 2 + 2 * requests
