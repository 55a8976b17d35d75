"""crash_claims: what a step's own code does to its claim when it raises SystemExit; the same rule as the reaper's."""

from __future__ import annotations

import psycopg
import pytest
from durable_actors._store.children import Spawn, schedule_children
from durable_actors._store.lease import crash_claims, reap_claims
from durable_actors._store.rows import Transition
from tests.store.kit import EXPIRE, SCHEMA, claims, connect, insert, outcome, plan, rows
from tests.store.stepping import commit
from tests.support.interleave import open_sessions

COLUMNS = (
    "status, hold, attempt, crashes, rev, claim_id, locked_by, lease_expires_at, claim_token_hash, "
    "round(extract(epoch from eligible_at - updated_at)), finished_at is null, "
    "substring(last_error from '^quarantined: .* without an outcome ')"
)


@pytest.mark.parametrize("most", [None, 1, 3])
async def test_a_crash_is_counted_and_backed_off_as_a_reaped_one(db: psycopg.Connection, durable_dsn, most):
    counts = [0, 1, 2, 3, 9, 10, 1000, 2**31 - 1]
    found = []
    for crash in (True, False):
        db.execute("delete from durable.gen_durable")
        for crashes in counts:
            insert(db, crashes=crashes, attempt=7)
        async with connect(durable_dsn) as conn:
            held = await claims(conn)
            if crash:
                told = await crash_claims(conn, SCHEMA, held, error="SystemExit: 2", max_crashes=most)
            else:
                db.execute(EXPIRE)
                told = await reap_claims(conn, SCHEMA, limit=100, max_crashes=most)
            assert [each.status for each in told[0]] == [row[0] for row in rows(db, "status")]
        found.append(rows(db, COLUMNS))
    assert found[0] == found[1]
    assert len(found[0]) == len(counts)


async def test_it_says_what_was_raised(db: psycopg.Connection, durable_dsn):
    insert(db)
    async with connect(durable_dsn) as conn:
        await crash_claims(conn, SCHEMA, await claims(conn), error="SystemExit: 2", max_crashes=2)
        assert rows(db, "last_error") == [("crash 1: SystemExit: 2",)]
        await crash_claims(conn, SCHEMA, await claims(conn), error="SystemExit: 3", max_crashes=2)
    text = "quarantined: step s ended 2 times without an outcome (the last time: SystemExit: 3)"
    assert rows(db, "status::text, last_error") == [("failed", text)]


async def test_a_lost_claim_changes_nothing(db: psycopg.Connection, durable_dsn):
    insert(db, 2)
    async with connect(durable_dsn) as conn:
        held = await claims(conn)
        db.execute(EXPIRE)
        await reap_claims(conn, SCHEMA, limit=1)
        await commit(conn, outcome(held[1]))
        before = rows(db, "gen_durable.*")
        assert await crash_claims(conn, SCHEMA, held, error="x") == ([], [])
    assert rows(db, "gen_durable.*") == before


async def test_a_key_is_free_for_its_next_row(db: psycopg.Connection, durable_dsn):
    insert(db, 2, partition_key="k")
    async with connect(durable_dsn) as conn:
        [first] = await claims(conn)
        _, offered = await crash_claims(conn, SCHEMA, [first], error="x", max_crashes=1)
    assert [each.id for each in offered] == [
        number for (number,) in rows(db, "id", "hold = 0 and status = 'runnable'")
    ]
    assert len(offered) == 1


async def test_a_quarantined_child_counts_at_its_barrier_and_waits_for_no_lock(
    db: psycopg.Connection, durable_dsn
):
    """Its parent's row is locked by somebody: the claim stays ours, and is given back when the row is free."""
    [parent] = insert(db)
    async with connect(durable_dsn, "commit") as conn:
        [claim] = await claims(conn)
        after = Transition(claim, "awaiting_children", claim.step, attempt=0, advance=1, state=b"{}")
        await schedule_children(
            conn, SCHEMA, after, Spawn([plan()], "then", None, False, None), accept_late=True
        )
        [child] = await claims(conn)
        with open_sessions(durable_dsn, 1) as (other,):
            other.run("begin")
            other.run("select from durable.gen_durable where id = %s for update", [parent])
            assert await crash_claims(conn, SCHEMA, [child], error="x", max_crashes=1) == ([], [])
            assert rows(db, "status::text, claim_id::text", f"id = {child.id}") == [
                ("executing", child.claim_id)
            ]
            other.run("rollback")
        _, offered = await crash_claims(conn, SCHEMA, [child], error="x", max_crashes=1)
        assert [each.id for each in offered] == [parent]
    assert rows(db, "status::text, step, children_pending", f"id = {parent}") == [("runnable", "then", 0)]
