"""Barriers against ends, parks and the reaper, in every order of their statements (H3, H4, H31; I4, I11)."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
import trio
from durable_actors._store.children import Spawn, schedule_children
from durable_actors._store.lease import reap_claims
from durable_actors._store.rows import Claim, Committed, Transition
from durable_actors._store.signal import expire_awaits
from tests.store.kit import EXPIRE, SCHEMA, claims, connect, empty, insert, outcome, plan, rows
from tests.store.stepping import Act, commit, commits, orders, play


def spawn(
    claim: Claim,
    count: int = 2,
    *,
    quorum: int | None = None,
    wake_on_failure: bool = False,
    timeout: float | None = None,
) -> Act:
    after = Transition(claim, "awaiting_children", claim.step, attempt=0, advance=1)
    children = Spawn([plan() for _ in range(count)], "then", quorum, wake_on_failure, timeout)

    async def run(conn: Any) -> Committed | None:
        return await schedule_children(conn, SCHEMA, after, children, accept_late=True)

    return run


def reaps(conn: Any) -> Any:
    return reap_claims(conn, SCHEMA, limit=10)


def children(db: psycopg.Connection, parent: int) -> list[int]:
    return [number for (number,) in rows(db, "id", f"parent_id = {parent}")]


# Turns: p = lock the parent, insert the children, park, commit. r = reap, commit.
async def test_children_and_park_are_all_or_nothing_against_the_reaper(
    db: psycopg.Connection, durable_dsn: str
):
    async with connect(durable_dsn) as one, connect(durable_dsn) as two:
        for order in orders(p=4, r=2):
            empty(db)
            [parent] = insert(db)
            [claim] = await claims(one)
            db.execute(EXPIRE)
            done = await play(db, order, {"p": (one, spawn(claim)), "r": (two, reaps)})
            [row] = rows(db, "status, children_pending, children_total, attempt", f"id = {parent}")
            reaped = [each.id for each in done["r"][0]]
            if done["p"] is None:
                assert row == ("runnable", 0, 0, 1), order
                assert reaped == [parent], order
                assert children(db, parent) == [], order
            else:
                assert row == ("awaiting_children", 2, 2, 0), order
                assert reaped == [], order
                assert len(children(db, parent)) == 2, order


# Turns: a, b = end of a child, join, commit.
@pytest.mark.parametrize("failing", ["", "a", "ab"])
async def test_two_last_children_open_the_barrier_once(
    db: psycopg.Connection, durable_dsn: str, failing: str
):
    async with connect(durable_dsn) as one, connect(durable_dsn) as two:
        for order in orders(a=3, b=3):
            empty(db)
            [parent] = insert(db)
            [claim] = await claims(one)
            await spawn(claim)(one)
            first, second = await claims(one)
            ends = {
                "a": (one, commits(outcome(first, "failed" if "a" in failing else "done"))),
                "b": (two, commits(outcome(second, "failed" if "b" in failing else "done"))),
            }
            before = rows(db, "visit", f"id = {parent}")
            await play(db, order, ends)
            columns = "status, step, await_step, children_pending, children_total"
            assert rows(db, columns, f"id = {parent}") == [("runnable", "then", None, 0, 2)], order
            assert rows(db, "visit", f"id = {parent}") == before, order


async def test_many_last_children_at_once(db: psycopg.Connection, durable_dsn: str):
    """Not stepped: many connections, as they come. Every round opens its barrier exactly once."""
    async with (
        connect(durable_dsn, lock_timeout="0") as one,
        connect(durable_dsn, lock_timeout="0") as two,
        connect(durable_dsn, lock_timeout="0") as three,
    ):
        for _ in range(25):
            empty(db)
            [parent] = insert(db)
            [claim] = await claims(one)
            await spawn(claim, 6)(one)
            six = await claims(one)
            async with trio.open_nursery() as nursery:
                for conn, pair in zip((one, two, three), (six[:2], six[2:4], six[4:]), strict=True):
                    nursery.start_soon(commit, conn, *(outcome(each, "done") for each in pair))
            columns = "status, children_pending"
            assert rows(db, columns, f"id = {parent}") == [("runnable", 0)]
            assert [each.id for each in await claims(one)] == [parent], "and is there to be claimed, once"


# Turns: p = lock, insert, park, commit: the parent's second barrier. c = end of a straggler of the first, join, commit.
async def test_a_straggler_does_not_count_for_the_next_barrier(db: psycopg.Connection, durable_dsn: str):
    async with connect(durable_dsn) as one, connect(durable_dsn) as two:
        for order in orders(p=4, c=3):
            empty(db)
            [parent] = insert(db)
            [claim] = await claims(one)
            await spawn(claim, 2, quorum=1)(one)
            first, straggler = await claims(one)
            await commit(one, outcome(first, "done"))
            [again] = await claims(one)
            assert again.id == parent
            sides = {"p": (one, spawn(again, 1)), "c": (two, commits(outcome(straggler, "done")))}
            await play(db, order, sides)
            columns = "status, children_pending, children_total, visit"
            assert rows(db, columns, f"id = {parent}") == [("awaiting_children", 1, 1, 3)], order


# Turns: c = end of the last child, join, commit. e = the barrier's deadline, commit.
async def test_a_barrier_deadline_and_the_last_child_open_it_once(db: psycopg.Connection, durable_dsn: str):
    async with connect(durable_dsn) as one, connect(durable_dsn) as two:
        for order in orders(c=3, e=2):
            empty(db)
            [parent] = insert(db)
            [claim] = await claims(one)
            await spawn(claim, 1, timeout=60)(one)
            db.execute(
                "update durable.gen_durable set await_deadline = now() where await_deadline is not null"
            )
            [child] = await claims(one)
            rev = rows(db, "rev", f"id = {parent}")[0][0]
            await play(
                db,
                order,
                {
                    "c": (one, commits(outcome(child, "done"))),
                    "e": (two, lambda conn: expire_awaits(conn, SCHEMA, "default", limit=10)),
                },
            )
            columns = "status, step, await_deadline"
            assert rows(db, columns, f"id = {parent}") == [("runnable", "then", None)], order
            assert rows(db, "rev", f"id = {parent}")[0][0] - rev <= 1, order


# Turns: a, b = ends of a child of each parent, join, commit.
@pytest.mark.parametrize("setting", ["enable_nestloop", "enable_indexscan", "enable_material"])
async def test_two_flushes_lock_their_parents_in_one_order(
    db: psycopg.Connection, durable_dsn: str, setting: str
):
    """H31: children of the same two parents in two flushes, in opposite orders, under other plans: no deadlock."""
    async with connect(durable_dsn) as one, connect(durable_dsn) as two:
        for conn in (one, two):
            await conn.script(f"set {setting} = off")
        for order in orders(a=3, b=3):
            empty(db)
            low, high = insert(db, 2)
            parents = await claims(one)
            for claim in parents:
                await spawn(claim, 2)(one)
            family = await claims(one)
            of = {parent: [each for each in family if each.parent_id == parent] for parent in (low, high)}
            await play(
                db,
                order,
                {
                    "a": (one, commits(outcome(of[low][0]), outcome(of[high][0]))),
                    "b": (two, commits(outcome(of[high][1]), outcome(of[low][1]))),
                },
            )
            columns = "status, children_pending"
            assert rows(db, columns, "parent_id is null") == [("runnable", 0)] * 2, order


async def test_a_straggler_does_not_wait_for_its_running_parent(db: psycopg.Connection, durable_dsn: str):
    """Two flushes, each with a parent's own outcome and a straggler of the other's parent: they must not meet."""
    async with connect(durable_dsn) as one, connect(durable_dsn) as two:
        insert(db, 2)
        for claim in await claims(one):
            await spawn(claim, 2, quorum=1)(one)
        family = await claims(one)
        stragglers = {}
        for child in family:
            if child.parent_id in stragglers:
                await commit(one, outcome(child, "done"))
            else:
                stragglers[child.parent_id] = child
        p, q = await claims(one)
        sides = {
            "a": (one, commits(outcome(p, "done"), outcome(stragglers[q.id], "done"))),
            "b": (two, commits(outcome(q, "done"), outcome(stragglers[p.id], "done"))),
        }
        await play(db, "abababab", sides)
        assert {status for (status,) in rows(db, "status")} == {"done"}
