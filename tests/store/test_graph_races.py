"""Ends, retries, pauses and cancels in a graph, against each other, in every order.

Whatever the order: a child that waits is owed exactly as many tells as it counts, one that does not wait is on offer, a
dependent is told once, and every row is what its journal says.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import psycopg
import pytest
import trio
from durable_actors._store.children import Spawn, schedule_children
from durable_actors._store.commands import plan_command
from durable_actors._store.dialogues import run_dialogue
from durable_actors._store.graph import telling, telling_untold
from durable_actors._store.lease import crash_claims, reap_claims
from durable_actors._store.pausing import RESUME, carrying_out, pausing
from durable_actors._store.rows import Claim, Status, Transition
from tests.invariants.journal import journal_problems, read_journal
from tests.store.graph_kit import Family, ending, family, graph_of
from tests.store.kit import EXPIRE, SCHEMA, claims, connect, insert, plan, rows
from tests.store.stepping import PATIENT, POLL, Act, Stepped, commit, commits, orders, play
from tests.support.commands import cancel_instance, retry_instance
from tests.support.interleave import Observer, wait_backend_blocked

EMPTY = "truncate durable.gen_durable, durable.receipts cascade"
JOIN = {"c": "ab", "a": "", "b": ""}
"""The dependent has the smallest id: the order of ids is not that of the graph."""


def tells(conn: Any) -> Any:
    return run_dialogue(conn, telling_untold(SCHEMA))


def retries(number: int) -> Act:
    return lambda conn: retry_instance(conn, SCHEMA, number)


def cancels(number: int) -> Act:
    return lambda conn: cancel_instance(conn, SCHEMA, number)


def pauses(number: int) -> Act:
    return lambda conn: run_dialogue(conn, pausing(SCHEMA, number, plan_command()))


def resumes(number: int) -> Act:
    return lambda conn: run_dialogue(conn, carrying_out(RESUME, SCHEMA, number, plan_command()))


def ends(claim: Claim, status: Status = "done") -> Act:
    return commits(ending(claim, status))


def reaps(conn: Any) -> Any:
    return reap_claims(conn, SCHEMA, limit=10, max_crashes=1)


async def fresh(
    db: psycopg.Connection, conn: Any, edges: dict[str, str] = JOIN, *, journal: int = 3, **how: Any
) -> Family:
    db.execute(EMPTY)
    db.execute("set durable_actors.journal_door = 'open'")
    db.execute("delete from durable.journal")
    return await family(db, conn, edges, columns={"journal": journal}, parent={"journal": 0}, **how)


def check(db: psycopg.Connection, order: str) -> None:
    waiting = db.execute(
        "select g.child_key, g.hold, e.waits, (select count(*) from durable.graph u where g.id = any (u.owed))"
        " from durable.gen_durable g join durable.graph e using (id)"
        " where g.status = 'runnable' and g.cancellation is null and g.links in (1, 3)"
    ).fetchall()
    for key, hold, waits, owed in waiting:
        assert waits == owed, (key, order)
        assert hold == 4 or (hold == 5) == (waits > 0), (key, order)
    assert journal_problems(*read_journal(db)) == [], order
    assert db.execute("select count(*) from durable.untold").fetchone() == (0,), order


async def finish(all_of: Family, order: str) -> dict[str, str]:
    """What nodes do next: tell, resume, run what is offered to its end. Returns how all have ended."""
    await reaps(all_of.conn)  # a parent that was locked has left its child for the next round
    await all_of.tell()
    check(all_of.db, order)
    for _ in range(9):
        paused = rows(all_of.db, "id", "hold = 4")
        for (number,) in paused:
            await run_dialogue(all_of.conn, carrying_out(RESUME, SCHEMA, number, plan_command()))
        found = await claims(all_of.conn)
        found = [each for each in found if each.parent_id is not None]
        if not found:
            break
        await commit(all_of.conn, *(ending(each, "done") for each in found))
        await all_of.tell()
        check(all_of.db, order)
    return all_of.statuses()


async def race(
    db: psycopg.Connection,
    dsn: str,
    prepare: Any,
    *,
    turns: tuple[int, int],
    edges: dict[str, str] = JOIN,
    journal: int = 3,
) -> set[tuple[str, ...]]:
    """Play two sides in every order; the ends that are possible."""
    seen: set[tuple[str, ...]] = set()
    async with connect(dsn) as one, connect(dsn) as other, connect(dsn) as third:
        for order in orders(x=turns[0], y=turns[1]):
            all_of = await fresh(db, third, edges, journal=journal)
            left, right = await prepare(all_of)
            await play(db, order, {"x": (one, left), "y": (other, right)})
            seen.add(tuple((await finish(all_of, order)).values()))
    return seen


@pytest.mark.slow
async def test_two_upstreams_end_at_once(db: psycopg.Connection, durable_dsn: str):
    async def prepare(all_of: Family) -> tuple[Act, Act]:
        found = await all_of.claim()
        return ends(found["a"]), ends(found["b"])

    assert await race(db, durable_dsn, prepare, turns=(4, 3)) == {("done",) * 3}


async def test_one_upstream_fails_while_the_other_is_done(db: psycopg.Connection, durable_dsn: str):
    async def prepare(all_of: Family) -> tuple[Act, Act]:
        found = await all_of.claim()
        return ends(found["a"], "failed"), ends(found["b"])

    assert await race(db, durable_dsn, prepare, turns=(3, 3)) == {("cancelled", "failed", "done")}


@pytest.mark.slow
async def test_a_dependent_is_paused_and_resumed_while_its_upstream_ends(
    db: psycopg.Connection, durable_dsn: str
):
    for paused in (False, True):

        async def prepare(all_of: Family) -> tuple[Act, Act]:
            found = await all_of.claim()
            await commit(all_of.conn, ending(found["a"], "done"))
            if paused:  # noqa: B023 - awaited in this round
                await pauses(all_of.ids["c"])(all_of.conn)
            return ends(found["b"]), (resumes if paused else pauses)(all_of.ids["c"])  # noqa: B023

        assert await race(db, durable_dsn, prepare, turns=(4, 3)) == {("done",) * 3}


async def test_a_dependent_is_cancelled_while_its_upstream_ends(db: psycopg.Connection, durable_dsn: str):
    async def prepare(all_of: Family) -> tuple[Act, Act]:
        found = await all_of.claim()
        await commit(all_of.conn, ending(found["a"], "done"))
        return ends(found["b"]), cancels(all_of.ids["c"])

    assert await race(db, durable_dsn, prepare, turns=(5, 2)) == {("cancelled", "done", "done")}


@pytest.mark.parametrize("status", ["done", "failed"])
@pytest.mark.slow
async def test_a_dependent_is_retried_while_its_upstream_ends(
    db: psycopg.Connection, durable_dsn: str, status: Status
):
    """Either the retry sees the end, or the end finds the dependent: it never waits for what has ended well."""

    async def prepare(all_of: Family) -> tuple[Act, Act]:
        await cancel_instance(all_of.conn, SCHEMA, all_of.ids["c"])
        found = await all_of.claim()
        await commit(all_of.conn, ending(found["a"], "done"))
        return ends(found["b"], status), retries(all_of.ids["c"])

    seen = await race(db, durable_dsn, prepare, turns=(5, 2))
    if status == "done":
        assert seen == {("done", "done", "done")}
    else:  # doomed by this end; or retried after it, to wait until it is retried
        assert seen == {("cancelled", "done", "failed"), ("runnable", "done", "failed")}


async def test_an_upstream_is_reaped_while_its_dependent_is_retried(db: psycopg.Connection, durable_dsn: str):
    async def prepare(all_of: Family) -> tuple[Act, Act]:
        await cancel_instance(all_of.conn, SCHEMA, all_of.ids["c"])
        found = await all_of.claim()
        await commit(all_of.conn, ending(found["a"], "done"))
        db.execute(EXPIRE)
        return reaps, retries(all_of.ids["c"])

    seen = await race(db, durable_dsn, prepare, turns=(3, 2))
    assert seen <= {("cancelled", "done", "failed"), ("runnable", "done", "failed")}


async def test_two_nodes_tell_what_is_untold_while_it_is_retried(db: psycopg.Connection, durable_dsn: str):
    async def prepare(all_of: Family) -> tuple[Act, Act]:
        found = await all_of.claim()
        await commit(all_of.conn, ending(found["a"], "done"))
        db.execute(EXPIRE)
        await reaps(all_of.conn)
        return tells, retries(all_of.ids["b"])

    seen = await race(db, durable_dsn, prepare, turns=(2, 2))
    assert seen == {("cancelled", "done", "done"), ("done", "done", "done")}


# Turns: x = the outcome, lock, tell, join, commit. y = reap or crash, join, commit; or cancel, commit.
@pytest.mark.slow
@pytest.mark.parametrize("other", ["reaped", "crashed", "cancelled"])
async def test_one_upstream_is_committed_while_the_other_ends_in_another_way(
    db: psycopg.Connection, durable_dsn: str, other: str
):
    """Only the first tells in its own transaction. The dependent is doomed once, and runs nothing."""

    async def prepare(all_of: Family) -> tuple[Act, Act]:
        found = await all_of.claim()
        if other == "cancelled":
            return ends(found["a"]), lambda conn: cancel_instance(conn, SCHEMA, all_of.ids["b"], force=True)
        db.execute(f"{EXPIRE} and id = %s", [all_of.ids["b"]])
        if other == "reaped":
            return ends(found["a"]), reaps
        crash = partial(crash_claims, claims=[found["b"]], error="SystemExit", max_crashes=1)
        return ends(found["a"]), lambda conn: crash(conn, SCHEMA)

    seen = await race(db, durable_dsn, prepare, turns=(5, 2 if other == "cancelled" else 3))
    assert seen == {("cancelled", "done", "cancelled" if other == "cancelled" else "failed")}


# Turns: x = the outcome, commit. y = retry, commit.
async def test_an_upstream_is_retried_while_its_doomed_dependent_ends(
    db: psycopg.Connection, durable_dsn: str
):
    """The dependent was doomed by the first end of its upstream, and its own end is told to nobody twice."""

    async def prepare(all_of: Family) -> tuple[Act, Act]:
        found = await all_of.claim()
        await commit(all_of.conn, ending(found["a"], "done"), ending(found["b"], "failed"))
        await all_of.tell()
        doomed = await all_of.claim()
        return ends(doomed["c"]), retries(all_of.ids["b"])

    assert await race(db, durable_dsn, prepare, turns=(3, 2)) == {("cancelled", "done", "done")}


# Turns: x = lock the parent, insert children, insert the graph, park, commit. y = cancel or reap, commit.
@pytest.mark.parametrize("other", ["asked to cancel", "cancelled", "reaped"])
async def test_a_graph_is_spawned_while_its_parent_ends(db: psycopg.Connection, durable_dsn: str, other: str):
    """All of it is there, or nothing: no child without its row of `graph`, no row of `graph` without its child."""
    spawn = Spawn([plan()] * 3, "then", None, False, None, graph=graph_of(JOIN))
    async with connect(durable_dsn) as one, connect(durable_dsn) as two:
        for order in orders(x=5, y=2):
            db.execute(EMPTY)
            [number] = insert(db)
            [claim] = await claims(one)
            if other == "reaped":
                db.execute(EXPIRE)
            after = Transition(claim, "awaiting_children", claim.step, attempt=0, advance=1)
            sides: dict[str, tuple[Any, Act]] = {
                "x": (one, partial(_schedule, after=after, spawn=spawn)),
                "y": (two, reaps if other == "reaped" else _cancels_parent(number, other)),
            }
            done = await play(db, order, sides)
            spawned = 0 if done["x"] is None else 3
            assert len(rows(db, "id", f"parent_id = {number}")) == spawned, order
            assert db.execute("select count(*), sum(waits) from durable.graph").fetchone() == (
                spawned,
                2 if spawned else None,
            ), order
            offered = rows(db, "child_key", "parent_id is not null and durable.offered(status, hold)")
            assert sorted(offered) == ([("a",), ("b",)] if spawned else []), order


async def _schedule(conn: Any, *, after: Transition, spawn: Spawn) -> Any:
    return await schedule_children(conn, SCHEMA, after, spawn, accept_late=True)


def _cancels_parent(number: int, other: str) -> Act:
    return lambda conn: cancel_instance(conn, SCHEMA, number, force=other == "cancelled")


async def test_two_nodes_tell_at_once(db: psycopg.Connection, durable_dsn: str):
    async def prepare(all_of: Family) -> tuple[Act, Act]:
        found = await all_of.claim()
        db.execute(EXPIRE)
        await reaps(all_of.conn)
        assert set(found) == {"a", "b"}
        return tells, tells

    assert await race(db, durable_dsn, prepare, turns=(2, 2)) == {("cancelled", "failed", "failed")}


@pytest.mark.slow
async def test_a_tell_without_the_lock_before_it_loses_a_revived_dependent(
    db: psycopg.Connection, durable_dsn: str, monkeypatch: pytest.MonkeyPatch
):
    """Why `lock_owed` is a statement of its own: the teeth of the test above."""
    from durable_actors._store import commit as committing  # noqa: PLC0415

    monkeypatch.setattr(
        committing,
        "telling",
        lambda *args: {"tell_dependents": telling(*args)["tell_dependents"]},
    )

    async def prepare(all_of: Family) -> tuple[Act, Act]:
        await cancel_instance(all_of.conn, SCHEMA, all_of.ids["c"])
        found = await all_of.claim()
        await commit(all_of.conn, ending(found["a"], "done"), ending(found["b"], "failed"))
        await all_of.tell()
        await retry_instance(all_of.conn, SCHEMA, all_of.ids["b"])
        again = await all_of.claim()
        return ends(again["b"]), retries(all_of.ids["c"])

    with pytest.raises((AssertionError, BaseExceptionGroup)):
        assert await race(db, durable_dsn, prepare, turns=(5, 2)) == {("done", "done", "done")}


async def test_a_tell_that_is_late_and_the_end_of_a_doomed_row_wait_for_each_other(
    db: psycopg.Connection, durable_dsn: str
):
    """The one deadlock that is left: Postgres ends one of the two, and what its flush sends again is all right.

    The tell of x has taken its snapshot when c still waited. Meanwhile c is doomed by a, claimed, and about to
    end: it holds its own row of `graph` and wants that of d, which the tell of x has by then.
    """
    edges = {"w": "ux", "d": "cx", "c": "ax", "a": "", "x": "", "u": ""}  # in the order of their ids
    failed: list[str] = []

    async def flush(name: str, conn: Any, change: Transition) -> None:
        try:
            await commit(conn, change)
        except psycopg.errors.DeadlockDetected:
            failed.append(name)

    async with connect(durable_dsn) as third, connect(durable_dsn) as late, connect(durable_dsn) as other:
        all_of = await family(db, third, edges)
        found = await all_of.claim()
        for conn in (late, other):
            await conn.run(PATIENT)
        ending_c = Stepped(other)
        with psycopg.connect(durable_dsn) as stranger, trio.fail_after(30):
            stranger.execute("select 1 from durable.graph where id = %s for update", [all_of.ids["w"]])
            async with trio.open_nursery() as nursery:
                nursery.start_soon(flush, "x", late, ending(found["x"], "done"))
                await wait_backend_blocked(durable_dsn, late.pid)
                await commit(third, ending(found["a"], "failed"))
                doomed = (await all_of.claim())["c"]
                nursery.start_soon(flush, "c", ending_c, ending(doomed, "done"))
                for _ in ("commit_outcomes", "lock_owed"):
                    ending_c.turns.release()
                while ending_c.names[-1:] != ["lock_owed"] or not ending_c.stopped:
                    await trio.sleep(POLL)
                stranger.rollback()
                while other.pid not in Observer(db).blockers(late.pid):
                    await trio.sleep(POLL)
                for _ in range(5):
                    ending_c.turns.release()
        assert len(failed) == 1
        await commit(late, ending(found["x"], "done"))
        await commit(other, ending(doomed, "done"))
        await commit(third, ending(found["u"], "done"))
        check(db, "deadlock")
        ends = {"w": "done", "d": "cancelled", "c": "cancelled", "a": "failed", "x": "done", "u": "done"}
        assert await finish(all_of, "deadlock") == ends
