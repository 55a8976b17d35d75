"""Row locks: a pick never waits and is not hindered by references; flushes never wait for each other in a circle."""

from __future__ import annotations

import random

import psycopg
import trio
from durable_actors._postgres.driver.connection import PgConn
from durable_actors._store.claim import Owner, release_claims
from durable_actors._store.commit import commit_outcomes
from tests.store.kit import SCHEMA, claims, connect, insert, outcome, pick, rows
from tests.support.interleave import open_sessions


async def test_a_signal_under_way_does_not_hide_its_target(db: psycopg.Connection, durable_dsn: str):
    """HAZARDS H30: a foreign key's check takes KEY SHARE, which FOR UPDATE would not tolerate."""
    [number] = insert(db)
    with open_sessions(durable_dsn, 1) as (sender,):
        sender.run("begin")
        sender.run("insert into durable.signals (target_id, name) values (%s, 'go')", [number])
        async with connect(durable_dsn) as conn:
            assert [claim.id for claim in await claims(conn)] == [number]


async def test_a_pick_passes_locked_rows_and_finds_them_later(db: psycopg.Connection, durable_dsn: str):
    one, two, three = insert(db, 3)
    with open_sessions(durable_dsn, 1) as (holder,):
        holder.run("begin")
        holder.run("select 1 from durable.gen_durable where id in (%s, %s) for update", [one, three])
        async with connect(durable_dsn) as conn:
            with trio.fail_after(5):
                assert [claim.id for claim in await claims(conn)] == [two]
                assert (await pick(conn)).window == 0
            holder.run("rollback")
            assert [claim.id for claim in await claims(conn)] == [one, three]


async def test_a_locked_sibling_that_executes_is_not_waited_for(db: psycopg.Connection, durable_dsn: str):
    """Its lock means that its outcome, its heartbeat or a signal is under way: the row behind it is looked at again."""
    [_, two] = insert(db, 2, partition_key="k")
    async with connect(durable_dsn) as conn:
        [first] = await claims(conn, limit=1)
        with open_sessions(durable_dsn, 1) as (holder,):
            holder.run("begin")
            holder.run("select 1 from durable.gen_durable where id = %s for update", [first.id])
            with trio.fail_after(5):
                picked = await pick(conn)
            assert [(row.id, row.what) for row in picked.seen] == [(two, "l")]
        assert rows(db, "hold", f"id = {two}") == [(0,)]


async def test_two_flushers_with_children_of_the_same_parents_never_deadlock(
    db: psycopg.Connection, durable_dsn: str
):
    """HAZARDS H31: an UPDATE locks in the plan's order; parents are shared. They are locked in id order beforehand."""
    parents = insert(
        db,
        3,
        status="awaiting_children",
        children_pending=10_000,
        children_total=10_000,
        await_step="b",
        queue="p",
    )
    insert(db, 600, parent_id=f"={parents[0]} + mod(n, 3)", barrier=1)

    async def flush(number: int, settings: str) -> None:
        chance = random.Random(number)
        async with connect(durable_dsn, "commit", lock_timeout="0") as conn:
            await set_planner(conn, settings)
            owner = Owner(SCHEMA, f"node {number}", b"", 60.0)
            while found := await claims(conn, owner=owner, limit=20):
                chance.shuffle(found)
                given_back = found[:2]
                await release_claims(conn, SCHEMA, given_back, attempts=0) if chance.random() < 0.3 else None
                outcomes = [outcome(claim) for claim in found]
                await commit_outcomes(conn, SCHEMA, outcomes, accept_late=True)

    async with trio.open_nursery() as nursery:
        for number, settings in enumerate(["enable_hashjoin", "enable_mergejoin", "enable_nestloop"]):
            nursery.start_soon(flush, number, settings)
    assert db.execute(
        "select sum(children_pending) from durable.gen_durable where queue = 'p'"
    ).fetchone() == (29_400,)
    assert db.execute(
        "select deadlocks from pg_stat_database where datname = current_database()"
    ).fetchone() == (0,)


async def set_planner(conn: PgConn, only: str) -> None:
    """Allow one kind of join: three flushers, three plans."""
    for name in ("enable_hashjoin", "enable_mergejoin", "enable_nestloop"):
        await conn.script(f"set {name} = {'on' if name == only else 'off'}")
