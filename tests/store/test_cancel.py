"""The command `cancel`: what it writes, what a request overrules, and who ends the instance then."""

from __future__ import annotations

from typing import Any

import attrs
import durable_actors as da
import psycopg
import pytest
from durable_actors._store.children import Spawn, schedule_children
from durable_actors._store.claim import ClaimRow, read_claims, release_claims
from durable_actors._store.commands import Command, Request
from durable_actors._store.commit import commit_outcomes, overruled_by, was_committed
from durable_actors._store.dialogues import CarriedOut, cancelling
from durable_actors._store.foreign import run_dialogue
from durable_actors._store.holds import HELD, OFFERED, SHELVED
from durable_actors._store.insert import insert_instances
from durable_actors._store.lease import crash_claims, reap_claims, release_orphans
from durable_actors._store.rows import Claim, Raised, Transition
from durable_actors._store.signal import read_inboxes, send_signals
from psycopg.types.json import Jsonb
from tests.invariants.journal import journal_problems, read_journal
from tests.store.kit import EXPIRE, OWNER, SCHEMA, claims, connect, insert, outcome, pick, plan, rows
from tests.store.stepping import commit, deliver
from tests.support.commands import cancel_instance, retry_instance
from tests.support.sql import count_statements

LIVE = ("runnable", "executing", "awaiting_signal", "awaiting_children")
RICH = {"awaits": ["go"], "inbox": True, "children_total": 1}
SAID = {"by": "ada", "reason": "wrong order", "idempotency_key": "k", "data": b'{"ticket": 7}'}
PARKED = {
    "runnable": {"hold": HELD, "partition_key": "p", "attempt": 2, "last_error": "old", "error_type": "E"},
    "scheduled": {"eligible_at": "=now() + interval '1 h'"},
    "awaiting_signal": {
        "status": "awaiting_signal", "awaits": ["go"], "await_step": "t", "await_deadline": "=now()", "inbox": True,
    },
    "awaiting_children": {
        "status": "awaiting_children", "children_total": 3, "children_pending": 2, "wake_on_failure": True,
        "await_step": "t",
    },
}  # fmt: skip


def cancel(db: psycopg.Connection, target: int | str, *, force: bool = False, **said: Any) -> CarriedOut:
    dialogue = cancelling(SCHEMA, target, Command(**said), force=force)
    return run_dialogue(db, dialogue, schema=SCHEMA)


def receipts(db: psycopg.Connection) -> list[tuple[Any, ...]]:
    return db.execute("select command, target, by, result from durable.receipts order by id").fetchall()


def fits(db: psycopg.Connection) -> None:
    """Every row is what its journal says."""
    assert journal_problems(*read_journal(db)) == []


async def family(conn: Any, db: psycopg.Connection, count: int, **how: Any) -> tuple[int, list[Claim]]:
    """A parent that waits at a barrier, and its children, claimed."""
    await insert_instances(conn, SCHEMA, [plan(journal=3)])
    [claim] = await claims(conn)
    after = Transition(claim, "awaiting_children", claim.step, attempt=0, advance=1)
    options = {"quorum": None, "wake_on_failure": False, "timeout": None} | how
    spawn = Spawn([plan(journal=2)] * count, "then", **options)
    await schedule_children(conn, SCHEMA, after, spawn, accept_late=True)
    return claim.id, await claims(conn)


# -- not executing


@pytest.mark.parametrize("columns", PARKED.values(), ids=PARKED)
def test_what_does_not_run_ends_at_once(db: psycopg.Connection, columns: dict[str, Any]):
    [number] = insert(db, **columns, visit=3, round=1)
    done = cancel(db, number, **SAID)
    assert (done.id, done.result) == (number, "cancelled")
    found = (
        "status, hold, last_error, error_type, await_step, await_deadline, children_pending, wake_on_failure"
    )
    assert rows(db, found) == [("cancelled", 0, "wrong order", None, None, None, 0, False)]
    assert rows(db, "finished_at = updated_at, rev, attempt, visit, round") == [
        (True, 2, columns.get("attempt", 0), 3, 1)
    ]
    [kept] = rows(db, "awaits, inbox, children_total, claim_id, locked_by")
    assert kept == (
        columns.get("awaits"),
        columns.get("inbox", False),
        columns.get("children_total", 0),
        None,
        None,
    )
    assert receipts(db) == [("cancel", str(number), "ada", "cancelled")]
    [(request,)] = rows(db, "request - 'at'")
    said = {"kind": "cancel", "by": "ada", "reason": "wrong order", "key": "k", "metadata": {"ticket": 7}}
    assert request == said
    assert cancel(db, number, **SAID).found is None, "the same key again"
    with pytest.raises(da.Conflict, match="is cancelled, and only one that has not ended can be cancelled"):
        cancel(db, number)
    assert len(receipts(db)) == 1


@pytest.mark.parametrize("status", ["done", "failed", "cancelled"])
@pytest.mark.parametrize("force", [False, True])
def test_what_has_ended_stays_as_it_is(db: psycopg.Connection, status: str, force: bool):
    [number] = insert(db, status=status, finished_at="=now()")
    before = rows(db, "gen_durable::text")
    with pytest.raises(da.Conflict, match=f"is {status}"):
        cancel(db, number, force=force)
    with pytest.raises(da.NoTarget):
        cancel(db, number + 1)
    assert rows(db, "gen_durable::text") == before
    assert receipts(db) == []


async def test_a_retry_finds_what_it_was_handed(db: psycopg.Connection, durable_dsn: str):
    [number] = insert(db, status="awaiting_signal", awaits=["go"])
    async with connect(durable_dsn) as conn:
        await send_signals(conn, SCHEMA, [deliver(number, "other", key="d")])
        assert await cancel_instance(conn, SCHEMA, number) == "cancelled"
        [refused] = await send_signals(conn, SCHEMA, [deliver(number)])
        assert refused.outcome == "no_target"
        assert await retry_instance(conn, SCHEMA, number)
        assert [each.name for each in (await read_inboxes(conn, SCHEMA, [number]))[number]] == ["other"]
    assert rows(db, "status, request, awaits, last_error") == [("runnable", None, ["go"], None)]


def test_the_next_sibling_of_its_key_is_offered(db: psycopg.Connection):
    first, second = insert(db, 2, partition_key="p")
    db.execute("update durable.gen_durable set hold = 1 where id = %s", [second])
    done = cancel(db, first)
    assert [each.id for each in done.offered] == [second]
    assert rows(db, "id, hold", "status = 'runnable'") == [(second, 0)]


def test_a_cancel_is_one_statement_and_a_promotion(db: psycopg.Connection, durable_dsn: str):
    numbers = insert(db, 2)
    insert(db, partition_key="p")
    with count_statements(durable_dsn) as count:
        cancel(db, numbers[0])
    assert count.total == 4, str(count)  # begin, commit, what the instance is, and this one


# -- the parent's barrier


@pytest.mark.parametrize(
    ("how", "opens"), [({}, [False, True]), ({"wake_on_failure": True}, [True]), ({"quorum": 1}, [True])]
)
@pytest.mark.parametrize("way", ["at once", "by force"])
async def test_the_barrier_counts_it_once(
    db: psycopg.Connection, durable_dsn: str, way: str, how: dict[str, Any], opens: list[bool]
):
    async with connect(durable_dsn) as conn:
        parent, children = await family(conn, db, 2, **how)
        if way == "at once":
            await release_claims(conn, SCHEMA, children, attempts=0)
        for child, open_now in zip(children, opens, strict=False):
            with db.transaction(), db.transaction() as savepoint:  # where xmin is not the transaction's
                cancel(db, child.id, force=True)
                raise psycopg.Rollback(savepoint)
            assert rows(db, "status", f"id = {child.id}") != [("cancelled",)]
            with db.transaction(), db.transaction():
                done = cancel(db, child.id, force=True, idempotency_key="k")
                cancel(db, child.id, force=True, idempotency_key="k")
            assert [each.id for each in done.offered] == [parent] * open_now
            status = "runnable" if open_now else "awaiting_children"
            assert rows(db, "status, step", f"id = {parent}") == [(status, "then" if open_now else "s")]
    fits(db)


async def test_a_straggler_is_not_counted_at_another_barrier(db: psycopg.Connection, durable_dsn: str):
    async with connect(durable_dsn) as conn:
        parent, children = await family(conn, db, 2)
        db.execute("update durable.gen_durable set visit = visit + 1 where id = %s", [parent])
        before = rows(db, "gen_durable::text", f"id = {parent}")
        assert cancel(db, children[0].id, force=True).offered == ()
        assert rows(db, "gen_durable::text", f"id = {parent}") == before


# -- executing


async def test_what_runs_is_asked_and_may_be_asked_again(db: psycopg.Connection, durable_dsn: str):
    insert(db, unique_key=b"u", unique_scope="{runnable,executing,awaiting_signal,awaiting_children}")
    async with connect(durable_dsn) as conn:
        [claim] = await claims(conn)
        before = rows(db, "rev, status, claim_id, visit")
        assert cancel(db, "u", by="ada").result == "requested"
        assert cancel(db, claim.id, by="bob", reason="because").result == "requested"
        assert rows(db, "rev, status, claim_id, visit") == before
        seen = (await read_claims(conn, SCHEMA, [claim.id]))[claim.id]
        assert seen.request is not None
        assert attrs.evolve(seen.request, at=None) == Request("cancel", "bob", "because")
        assert receipts(db) == [("cancel", str(claim.id), by, "requested") for by in ("ada", "bob")]


async def test_force_takes_the_claim_away(db: psycopg.Connection, durable_dsn: str):
    insert(db, 2)
    async with connect(durable_dsn) as conn:
        first, second = await claims(conn)
        assert cancel(db, first.id).result == "requested"
        for claim in (first, second):
            assert cancel(db, claim.id, force=True).result == "cancelled"
        before = rows(db, "gen_durable::text")
        assert await commit(conn, outcome(first), outcome(second, "runnable", advance=1)) == set()
        assert not (await release_claims(conn, SCHEMA, [first, second], attempts=1)).ids
        assert rows(db, "gen_durable::text") == before


OUTCOMES: dict[str, dict[str, Any]] = {
    "next": {"status": "runnable", "step": "t", "advance": 1},
    "next, ahead": {"status": "runnable", "step": "t", "advance": 1, "keep_claim": True},
    "retry": {"status": "runnable", "attempt": 1},
    "failed": {"status": "failed", "last_error": "no"},
    "parked": {"status": "awaiting_signal", "awaits": ("go",)},
    "done": {"status": "done", "result": b"1"},
    "cancelled": {"status": "cancelled"},
}


@pytest.mark.parametrize("columns", [{}, RICH], ids=["plain", "rich"])
@pytest.mark.parametrize("kind", OUTCOMES)
async def test_a_request_overrules_every_outcome_but_done(
    db: psycopg.Connection, durable_dsn: str, columns: dict[str, Any], kind: str
):
    change = OUTCOMES[kind]
    insert(db, **columns, journal=0)
    async with connect(durable_dsn) as conn:
        [claim] = await claims(conn)
        if columns:
            await send_signals(conn, SCHEMA, [deliver(claim.id)])
        signals = [each.id for each in (await read_inboxes(conn, SCHEMA, [claim.id])).get(claim.id, [])]
        cancel(db, claim.id, reason="because")
        before = rows(db, "gen_durable::text")
        after = outcome(claim, **{"consumed": tuple(signals), **change})
        flushed = await commit_outcomes(conn, SCHEMA, [after], accept_late=True)
        row = (await read_claims(conn, SCHEMA, [claim.id]))[claim.id]
        if kind in {"done", "cancelled"}:
            assert flushed.committed[claim.id].status == kind
            assert overruled_by(after, row) is None
            return
        assert flushed.committed == {}
        assert rows(db, "gen_durable::text") == before
        assert (was_committed(after, row), overruled_by(after, row)) == (None, row.request)
        unread = (await read_inboxes(conn, SCHEMA, [claim.id])).get(claim.id, [])
        assert [each.id for each in unread] == signals, "nothing was consumed"


@pytest.mark.parametrize("request_", [{"kind": "other"}, ["cancel"], "cancel", {"kind": ["cancel"]}, {}])
async def test_another_request_overrules_nothing(db: psycopg.Connection, durable_dsn: str, request_: Any):
    insert(db)
    async with connect(durable_dsn) as conn:
        [claim] = await claims(conn)
        db.execute("update durable.gen_durable set request = %s", [Jsonb(request_)])
        assert await commit(conn, outcome(claim, "runnable", advance=1)) == {claim.id}


async def test_children_of_a_spawn_that_meets_a_request_are_not_inserted(
    db: psycopg.Connection, durable_dsn: str
):
    insert(db)
    async with connect(durable_dsn) as conn:
        [claim] = await claims(conn)
        cancel(db, claim.id)
        after = Transition(claim, "awaiting_children", claim.step, attempt=0, advance=1)
        spawn = Spawn([plan()] * 2, "then", None, wake_on_failure=False, timeout=None)
        assert await schedule_children(conn, SCHEMA, after, spawn, accept_late=True) is None
        row = (await read_claims(conn, SCHEMA, [claim.id]))[claim.id]
        assert overruled_by(after, row) is not None
    assert rows(db, "status") == [("executing",)]


def test_an_overruled_outcome_is_told_from_a_stale_one():
    claim = Claim(1, "a", "q", 0, "m", 1, "s", 0, 0, 3, b"", None, None, None, False, 0, 0, 0.0)
    after = outcome(claim, "runnable", advance=1)
    ours = ClaimRow("a", 3, "executing", b"", Request("cancel"))
    assert overruled_by(after, ours) == Request("cancel")
    for other in (
        None,
        attrs.evolve(ours, claim_id="b"),
        attrs.evolve(ours, visit=4),
        attrs.evolve(ours, status="cancelled"),
        attrs.evolve(ours, request=None),
        attrs.evolve(ours, request=Request("other")),
    ):
        assert overruled_by(after, other) is None
    assert overruled_by(outcome(claim, "done"), ours) is None


# -- claims that end without an outcome


async def end(conn: Any, db: psycopg.Connection, how: str, mine: list[Claim]) -> set[int]:
    """End these claims; return the parents and siblings that are offered."""
    match how:
        case "release" | "drain" | "held" | "shelved":
            hold = {"held": HELD, "shelved": SHELVED}.get(how, OFFERED)
            count = int(how == "drain")
            released = await release_claims(
                conn, SCHEMA, mine, attempts=1 - count, interruptions=count, hold=hold
            )
            assert released.cancelled == {each.id for each in mine}
            return {each.id for each in released.offered}
        case "orphan":
            count, offered = await release_orphans(conn, SCHEMA, owner=OWNER.name, queue="default", known=[])
            assert count == len(mine)
        case "crash":
            raised = Raised("SystemExit", "trace")
            found, offered = await crash_claims(conn, SCHEMA, mine, error="x", raised=raised, max_crashes=1)
            assert {each.status for each in found} == {"cancelled"}
        case _:
            db.execute(EXPIRE)
            found, offered = await reap_claims(conn, SCHEMA, limit=10, max_crashes=1)
            assert {each.status for each in found} == {"cancelled"}
    return {each.id for each in offered}


WAYS = ["release", "drain", "held", "shelved", "orphan", "crash", "reap"]


@pytest.mark.parametrize("how", WAYS)
async def test_the_end_of_its_claim_ends_the_instance(db: psycopg.Connection, durable_dsn: str, how: str):
    async with connect(durable_dsn) as conn:
        parent, children = await family(conn, db, 2)
        for child in children:
            cancel(db, child.id, by="ada", reason="because")
        assert await end(conn, db, how, children) == {parent}
        found = "status, hold, attempt, crashes, interruptions, last_error, error_type, claim_id, locked_by"
        ended = ("cancelled", 0, 0, 0, 0, "because", None, None, None)
        assert rows(db, found, "parent_id is not null") == [ended, ended]
        assert rows(db, "status, step, children_pending", f"id = {parent}") == [("runnable", "then", 0)]
        assert [each.id for each in await claims(conn)] == [parent]
    fits(db)
    told = db.execute(
        "select kind, by, error ->> 'text', claim_id from durable.journal where kind = 'cancelled'"
    )
    assert told.fetchall() == [("cancelled", "ada", "because", None)] * 2


@pytest.mark.parametrize("how", ["release", "crash", "reap"])
async def test_beside_claims_that_nobody_asked_about(db: psycopg.Connection, durable_dsn: str, how: str):
    insert(db, 4)
    async with connect(durable_dsn) as conn:
        mine = await claims(conn)
        for claim in mine[::2]:
            cancel(db, claim.id)
        if how == "release":
            released = await release_claims(conn, SCHEMA, mine, attempts=1)
            assert (len(released.runnable), len(released.cancelled)) == (2, 2)
        elif how == "crash":
            await crash_claims(conn, SCHEMA, mine, error="x")
        else:
            db.execute(EXPIRE)
            await reap_claims(conn, SCHEMA, limit=10)
    assert rows(db, "status, attempt") == [("cancelled", 0), ("runnable", 1)] * 2


@pytest.mark.parametrize("how", ["release", "crash", "reap"])
async def test_its_end_waits_for_its_locked_parent_and_nothing_else_does(
    db: psycopg.Connection, durable_dsn: str, how: str
):
    """Somebody has locked the parent: the claim stays, and is ended when the parent is free."""
    async with connect(durable_dsn) as conn:
        parent, [child] = await family(conn, db, 1)
        [other] = insert(db)
        [beside] = await claims(conn)
        for claim in (child, beside):
            cancel(db, claim.id)
        db.execute(EXPIRE)
        with psycopg.connect(durable_dsn) as holder:
            holder.execute("select 1 from durable.gen_durable where id = %s for update", [parent])
            if how == "release":
                assert (await release_claims(conn, SCHEMA, [child, beside], attempts=0)).cancelled == {other}
            elif how == "crash":
                found, _ = await crash_claims(conn, SCHEMA, [child, beside], error="x")
                assert [each.id for each in found] == [other]
            else:
                found, _ = await reap_claims(conn, SCHEMA, limit=10)
                assert [each.id for each in found] == [other]
        assert rows(db, "status", f"id = {child.id}") == [("executing",)]
        assert await end(conn, db, how, [child]) == {parent}


@pytest.mark.parametrize(
    "request_",
    [
        {"kind": "cancel"},
        {"kind": "cancel", "by": 7, "reason": {"a": 1}, "key": [], "metadata": "none", "at": "never"},
    ],
)
@pytest.mark.parametrize("how", WAYS)
async def test_a_request_that_a_hand_wrote(db: psycopg.Connection, durable_dsn: str, how: str, request_: Any):
    async with connect(durable_dsn) as conn:
        await insert_instances(conn, SCHEMA, [plan(journal=4)])
        mine = await claims(conn)
        db.execute("update durable.gen_durable set request = %s", [Jsonb(request_)])
        await end(conn, db, how, mine)
    assert rows(db, "status") == [("cancelled",)]
    fits(db)


async def test_a_row_that_an_older_node_left_runnable_under_a_request(
    db: psycopg.Connection, durable_dsn: str
):
    """It does not know requests, and commits its outcome. Whoever picks the row next ends it."""
    insert(db, request=Jsonb({"kind": "cancel", "reason": "because"}))
    async with connect(durable_dsn) as conn:
        [claim] = (await pick(conn)).claims
        assert await commit(conn, outcome(claim, "runnable", advance=1)) == set()
        assert (await release_claims(conn, SCHEMA, [claim], attempts=0)).cancelled == {claim.id}
