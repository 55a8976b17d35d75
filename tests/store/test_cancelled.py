"""The status `cancelled`: an end like `failed`, for fences, barriers, keys, the inbox and retries."""

from __future__ import annotations

from collections import Counter
from typing import Any

import psycopg
import pytest
from durable_actors._engine.committing.transition import cancellation
from durable_actors._store.children import Spawn, count_children, read_children, schedule_children
from durable_actors._store.claim import read_claims, release_claims
from durable_actors._store.commit import commit_outcomes, was_committed
from durable_actors._store.insert import insert_instances
from durable_actors._store.lease import reap_claims
from durable_actors._store.observe import Filter, count_statuses, list_instances
from durable_actors._store.rows import Claim, Transition
from durable_actors._store.signal import read_inboxes, send_signals
from tests.store.kit import EXPIRE, SCHEMA, claims, connect, insert, outcome, plan, rows
from tests.store.stepping import commit, deliver
from tests.support.commands import retry_instance

LIVE = ("runnable", "executing", "awaiting_signal", "awaiting_children")
RICH = {"awaits": ["go"], "inbox": True, "await_step": None, "children_total": 1}
STATEMENTS = pytest.mark.parametrize(
    ("statement", "columns"), [("commit_outcomes", {}), ("commit_parks", RICH)]
)


async def family(conn: Any, db: psycopg.Connection, count: int, **how: Any) -> tuple[int, list[Claim]]:
    """A parent that waits at a barrier, and its children, claimed."""
    [parent] = insert(db)
    [claim] = await claims(conn)
    after = Transition(claim, "awaiting_children", claim.step, attempt=0, advance=1)
    options = {"quorum": None, "wake_on_failure": False, "timeout": None} | how
    await schedule_children(conn, SCHEMA, after, Spawn([plan()] * count, "then", **options), accept_late=True)
    return parent, await claims(conn)


@STATEMENTS
async def test_what_it_writes(db: psycopg.Connection, durable_dsn: str, statement: str, columns: dict):
    insert(db, attempt=3, crashes=1, visit=5, state='{"n": 1}', **columns)
    async with connect(durable_dsn) as conn:
        [claim] = await claims(conn)
        change = cancellation(claim, "not wanted")
        assert change.plain == (statement == "commit_outcomes")
        flushed = await commit_outcomes(conn, SCHEMA, [change], accept_late=False)
        assert flushed.committed[claim.id].status == "cancelled"
        seen = (await read_claims(conn, SCHEMA, [claim.id]))[claim.id]
        before = was_committed(change, seen)
        assert before is not None, "recognised after an unknown fate"
        assert (before.visit, before.status) == (5, "cancelled")
        assert await commit(conn, change) == set(), "and not written twice"
    found = "status, attempt, crashes, visit, round, rev, state, result, last_error, awaits, locked_by"
    awaits = columns.get("awaits")
    assert rows(db, found) == [("cancelled", 3, 1, 5, 1, 3, {"n": 1}, None, "not wanted", awaits, None)]
    assert rows(db, "finished_at = updated_at, claim_id is not null") == [(True, True)]


@STATEMENTS
@pytest.mark.parametrize("lost", ["reaped", "released", "expired", "an older visit"])
async def test_a_stale_claim_changes_nothing(
    db: psycopg.Connection, durable_dsn: str, statement: str, columns: dict, lost: str
):
    insert(db, **columns)
    async with connect(durable_dsn) as conn:
        [claim] = await claims(conn)
        match lost:
            case "reaped":
                db.execute(EXPIRE)
                await reap_claims(conn, SCHEMA, limit=10)
            case "released":
                await release_claims(conn, SCHEMA, [claim], attempts=0)
            case "expired":
                db.execute(EXPIRE)
            case _:
                claim.visit -= 1
        before = rows(db, "gen_durable.*")
        change = cancellation(claim, None)
        assert (await commit_outcomes(conn, SCHEMA, [change], accept_late=False)).committed == {}
    assert rows(db, "gen_durable.*") == before


@pytest.mark.parametrize(
    ("how", "opens"),
    [({}, False), ({"quorum": 1}, True), ({"wake_on_failure": True}, True)],
    ids=["all", "quorum", "any_failed"],
)
async def test_a_barrier_counts_it_as_ended(db: psycopg.Connection, durable_dsn: str, how: dict, opens: bool):
    async with connect(durable_dsn) as conn:
        parent, [first, second] = await family(conn, db, 2, **how)
        flushed = await commit_outcomes(conn, SCHEMA, [cancellation(first, "why")], accept_late=True)
        assert [each.id for each in flushed.offered] == ([parent] if opens else [])
        pending = 0 if "quorum" in how else 1
        assert rows(db, "status, children_pending", f"id = {parent}") == [
            ("runnable" if opens else "awaiting_children", pending)
        ]
        await commit(conn, cancellation(second, None))
        assert rows(db, "status, step", f"id = {parent}") == [("runnable", "then")]
        counts = await count_children(conn, SCHEMA, parent, 2)
        assert counts == Counter({"cancelled": 2})
        children = await read_children(conn, SCHEMA, parent, 2, after=0, limit=9)
        assert [(each.status, each.last_error) for each in children] == [
            ("cancelled", "why"),
            ("cancelled", None),
        ]


async def test_its_partition_key_is_free_and_the_next_is_offered(db: psycopg.Connection, durable_dsn: str):
    first, second = insert(db, 2, partition_key="k")
    async with connect(durable_dsn) as conn:
        [claim] = await claims(conn)
        assert rows(db, "hold", f"id = {second}") == [(1,)]
        flushed = await commit_outcomes(conn, SCHEMA, [cancellation(claim, None)], accept_late=True)
        assert (claim.id, [each.id for each in flushed.offered]) == (first, [second])
        assert [each.id for each in await claims(conn)] == [second]


@pytest.mark.parametrize(
    ("more", "occupied"), [((), False), (("done", "failed"), False), (("cancelled",), True)]
)
async def test_its_unique_key(db: psycopg.Connection, durable_dsn: str, more: tuple, occupied: bool):
    async with connect(durable_dsn) as conn:
        new = plan(unique_key=b"k", unique_scope=(*LIVE, *more))
        [number] = await insert_instances(conn, SCHEMA, [new])
        await commit(conn, *(cancellation(claim, None) for claim in await claims(conn)))
        [again] = await insert_instances(conn, SCHEMA, [new])
        assert (again is None) == occupied
        if again is not None:
            with pytest.raises(psycopg.errors.UniqueViolation):
                await retry_instance(conn, SCHEMA, number or 0)
        else:
            assert await retry_instance(conn, SCHEMA, number or 0)


async def test_its_inbox_stays_and_it_gets_no_more(db: psycopg.Connection, durable_dsn: str):
    [number] = insert(db, unique_key=b"k", unique_scope=[*LIVE, "cancelled"])
    async with connect(durable_dsn) as conn:
        await send_signals(conn, SCHEMA, [deliver(number), deliver(number, key="d")])
        [claim] = await claims(conn)
        await commit(conn, cancellation(claim, None))
        assert len((await read_inboxes(conn, SCHEMA, [number]))[number]) == 2
        sent = await send_signals(conn, SCHEMA, [deliver(number), deliver("k"), deliver(number, key="d")])
        assert [each.outcome for each in sent] == ["no_target"] * 3
        assert len((await read_inboxes(conn, SCHEMA, [number]))[number]) == 2


async def test_a_retry_finds_what_it_was_handed(db: psycopg.Connection, durable_dsn: str):
    [number] = insert(db, attempt=4, crashes=2)
    async with connect(durable_dsn) as conn:
        [claim] = await claims(conn)
        await commit(conn, outcome(claim, "awaiting_signal", awaits=("go",)))
        await send_signals(conn, SCHEMA, [deliver(number, payload=b"7")])
        [claim] = await claims(conn)
        await commit(conn, cancellation(claim, "not wanted"))
        assert await retry_instance(conn, SCHEMA, number)
        assert not await retry_instance(conn, SCHEMA, number)
        assert rows(db, "status, attempt, crashes, finished_at, claim_id") == [("runnable", 0, 0, None, None)]
        [claim] = await claims(conn)
        assert (claim.awaits, claim.visit) == (("go",), 1)
        assert [each.payload for each in (await read_inboxes(conn, SCHEMA, [number]))[number]] == [7]


async def test_a_barrier_waits_again_for_a_child_that_is_retried(db: psycopg.Connection, durable_dsn: str):
    async with connect(durable_dsn) as conn:
        parent, [first, second] = await family(conn, db, 2)
        await commit(conn, cancellation(first, None))
        assert await retry_instance(conn, SCHEMA, first.id)
        await commit(conn, outcome(second))
        assert rows(db, "status, children_pending", f"id = {parent}") == [("awaiting_children", 1)]
        await commit(conn, *(cancellation(each, None) for each in await claims(conn)))
        assert rows(db, "status, children_pending", f"id = {parent}") == [("runnable", 0)]


async def test_it_is_listed_and_counted(db: psycopg.Connection, durable_dsn: str):
    insert(db, 3)
    async with connect(durable_dsn) as conn:
        first, second, _ = await claims(conn)
        await commit(conn, cancellation(first, "why"), outcome(second))
        found = await list_instances(conn, SCHEMA, Filter(status="cancelled"), limit=10)
        assert [(each.id, each.status) for each in found.instances] == [(first.id, "cancelled")]
        assert await count_statuses(conn, SCHEMA) == {"default": {"cancelled": 1, "done": 1, "executing": 1}}
