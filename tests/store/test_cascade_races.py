"""A cascade, and a cancel that compensates, against everything else that moves a row, in every order.

Whatever the order: when all have done their work, no child that is meant lives, no cascade is left, every barrier has
counted exactly, and every row is what its journal says.
"""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
import trio
from durable_actors._store.cascade import cascading
from durable_actors._store.children import Spawn, schedule_children
from durable_actors._store.claim import PickFrom, release_claims
from durable_actors._store.dialogues import run_dialogue
from durable_actors._store.insert import insert_instances
from durable_actors._store.lease import reap_claims
from durable_actors._store.rows import Claim, OrphanedClaim, Transition
from durable_actors._store.signal import expire_awaits
from durable_actors._store.sql import statement
from tests.invariants.journal import journal_problems, read_journal
from tests.store.kit import EXPIRE, SCHEMA, claims, connect, empty, outcome, plan, rows
from tests.store.stepping import Act, commit, commits, deliver, orders, play, sends
from tests.support.commands import cancel_instance, retry_instance
from tests.support.interleave import open_sessions

FIRST = PickFrom([-1], ["-infinity"], [0])


def cascades(conn: Any) -> Any:
    return run_dialogue(conn, cascading(SCHEMA, children=10))


def cancels(number: int, **how: bool) -> Act:
    return lambda conn: cancel_instance(conn, SCHEMA, number, **how)


def retries(number: int) -> Act:
    return lambda conn: retry_instance(conn, SCHEMA, number)


def releases(claim: Claim) -> Act:
    return lambda conn: release_claims(conn, SCHEMA, [claim], attempts=0)


def spawns(claim: Claim, count: int, **how: Any) -> Act:
    after = Transition(claim, "awaiting_children", claim.step, attempt=0, advance=1)
    options = {"quorum": None, "wake_on_failure": False, "timeout": None} | how
    children = Spawn([plan(journal=3)] * count, "then", **options)
    return lambda conn: schedule_children(conn, SCHEMA, after, children, accept_late=True)


async def family(conn: Any, db: psycopg.Connection, count: int = 2, **how: Any) -> tuple[int, list[Claim]]:
    """A parent that waits for children, which are claimed; and nothing else."""
    empty(db, "receipts", "cascades", "compensations")
    db.execute("set durable_actors.journal_door = 'open'")
    db.execute("delete from durable.journal")
    await insert_instances(conn, SCHEMA, [plan(journal=3, priority=-1)])
    [claim] = await claims(conn, begin=FIRST)
    await spawns(claim, count, **how)(conn)
    return claim.id, await claims(conn)


async def cancelled_family(conn: Any, db: psycopg.Connection, count: int = 2) -> tuple[int, list[Claim]]:
    """The same, and the parent was cancelled with its children."""
    parent, children = await family(conn, db, count)
    assert await cancel_instance(conn, SCHEMA, parent, children=True) == "cancelled"
    return parent, children


async def finish(conn: Any, db: psycopg.Connection, order: str) -> None:
    """What nodes do next: carry out what is left of cascades, and end the claims that they were asked to end."""
    query = "select id, claim_id::text, partition_key, parent_id from durable.gen_durable where request is not null"
    for _ in range(9):
        db.execute("update durable.cascades set next_at = now()")
        done = await run_dialogue(conn, cascading(SCHEMA, rounds=20))
        asked = [OrphanedClaim(*row) for row in db.execute(f"{query} and status = 'executing'").fetchall()]
        if asked:
            await release_claims(conn, SCHEMA, asked, attempts=0)
        elif not done.more:
            break
    assert db.execute("select count(*) from durable.cascades").fetchone() == (0,), order
    assert journal_problems(*read_journal(db)) == [], order


def live(db: psycopg.Connection, *parents: int) -> list[tuple[Any, ...]]:
    return rows(db, "id, status", f"finished_at is null and parent_id = any (array{list(parents)})")


OUTCOMES: dict[str, dict[str, Any]] = {
    "next": {"status": "runnable", "step": "t", "advance": 1, "attempt": 0},
    "ahead": {"status": "runnable", "step": "t", "advance": 1, "attempt": 0, "keep_claim": True},
    "await": {"status": "awaiting_signal", "awaits": ("go",)},
    "done": {"status": "done", "result": b"1"},
    "stop": {"status": "failed", "last_error": "no"},
}


# Turns: o = the outcome, join_parents if it ends, commit. c = cancel_children, commit.
@pytest.mark.parametrize("kind", OUTCOMES)
async def test_a_cascade_against_an_outcome_of_a_child(db: psycopg.Connection, durable_dsn: str, kind: str):
    async with connect(durable_dsn) as one, connect(durable_dsn) as two:
        for order in orders(o=3, c=2):
            parent, [first, _] = await cancelled_family(one, db)
            sides = {"o": (one, commits(outcome(first, **OUTCOMES[kind]))), "c": (two, cascades)}
            done = await play(db, order, sides)
            await finish(one, db, order)
            assert live(db, parent) == [], order
            committed = done["o"] == {first.id}
            ended = {"done": "done", "stop": "failed"}.get(kind, "cancelled") if committed else "cancelled"
            assert rows(db, "status", f"id = {first.id}") == [(ended,)], order
            assert await claims(one) == [], order


# Turns: p = lock_parent, insert, park, journal and commit. c = cancel_children, commit.
async def test_a_cascade_against_a_child_that_spawns(db: psycopg.Connection, durable_dsn: str):
    """The snapshot of the cascade may have the child without its children: then its row has moved."""
    async with connect(durable_dsn) as one, connect(durable_dsn) as two:
        for order in orders(p=4, c=2):
            parent, [first, _] = await cancelled_family(one, db)
            await play(db, order, {"p": (one, spawns(first, 2)), "c": (two, cascades)})
            await finish(one, db, order)
            assert live(db, parent, first.id) == [], order


async def test_a_cascade_whose_snapshot_lacks_the_children_of_a_child(
    db: psycopg.Connection, durable_dsn: str
):
    """It is held between its snapshot and its locks: it meets a row that has moved, and cannot see its children."""
    text = statement("cancel_children", SCHEMA).sql
    held = text.replace(
        "clock_timestamp()", "clock_timestamp() and pg_advisory_xact_lock_shared(7) is not null", 1
    )
    held = held.replace("$1::int", "20").replace("$2::int", "10")
    assert held.count("pg_advisory") == 1
    with open_sessions(durable_dsn, 2) as (keeper, cascader):
        async with connect(durable_dsn) as conn:
            parent, [first, _] = await cancelled_family(conn, db)
            keeper.run("select pg_advisory_lock(7)")
            waiting = cascader.start(held)  # type: ignore[arg-type]
            await trio.to_thread.run_sync(lambda: waiting.wait_blocked(by=keeper))
            await spawns(first, 2)(conn)
            keeper.run("select pg_advisory_unlock(7)")
            await trio.to_thread.run_sync(waiting.result)
            assert rows(db, "status", f"id = {first.id}") == [("cancelled",)]
            assert len(live(db, first.id)) == 2
            await finish(conn, db, "")
            assert live(db, parent, first.id) == []


# Turns: o = the outcome, join_parents, commit. c = cancel_children, commit.
async def test_a_cascade_against_the_end_of_a_sibling(db: psycopg.Connection, durable_dsn: str):
    """The parent waits for both, which only a hand brings about: it counts both, once."""
    async with connect(durable_dsn) as one, connect(durable_dsn) as two:
        for order in orders(o=3, c=2):
            parent, [first, second] = await family(one, db)
            await release_claims(one, SCHEMA, [second], attempts=0)
            db.execute("select durable.cascade(%s, null, null)", [parent])
            await play(db, order, {"o": (one, commits(outcome(first))), "c": (two, cascades)})
            await finish(one, db, order)
            assert live(db, parent) == [], order
            found = rows(db, "status, step, children_pending", f"id = {parent}")
            assert found == [("runnable", "then", 0)], order


@pytest.mark.parametrize("against", ["retry", "cancel", "force", "reap", "signal"])
async def test_a_cascade_against_others(db: psycopg.Connection, durable_dsn: str, against: str):
    async with connect(durable_dsn) as one, connect(durable_dsn) as two:
        for order in orders(x=2, c=2):
            parent, [first, second] = await cancelled_family(one, db)
            if against == "signal":
                await commit(one, outcome(first, "awaiting_signal", awaits=("go",)))
            elif against == "reap":
                db.execute(EXPIRE)
            else:
                await release_claims(one, SCHEMA, [second], attempts=0)
            act: Act = {
                "retry": retries(parent),
                "cancel": cancels(first.id),
                "force": cancels(second.id, force=True),
                "reap": lambda conn: reap_claims(conn, SCHEMA, limit=10),
                "signal": sends(deliver(first.id)),
            }[against]
            await play(db, order, {"x": (one, act), "c": (two, cascades)})
            await finish(one, db, order)
            assert live(db, parent) == [], order
            status = "runnable" if against == "retry" else "cancelled"
            assert rows(db, "status", f"id = {parent}") == [(status,)], order


# Turns: a, b = the outcome, join_parents, commit. e = expire_awaits, commit.
@pytest.mark.parametrize("against", ["child", "deadline"])
async def test_a_barrier_opens_once_and_cancels_its_rest_once(
    db: psycopg.Connection, durable_dsn: str, against: str
):
    async with connect(durable_dsn) as one, connect(durable_dsn) as two:
        for order in orders(a=3, b=3) if against == "child" else orders(a=3, b=2):
            parent, [first, second, _] = await family(one, db, 3, quorum=1, timeout=60.0, cancel_rest=True)
            db.execute(
                "update durable.gen_durable set await_deadline = now() where await_deadline is not null"
            )
            other: Act = commits(outcome(second))
            if against == "deadline":
                other = lambda conn: expire_awaits(conn, SCHEMA, "default", limit=10)  # noqa: E731
            await play(db, order, {"a": (one, commits(outcome(first))), "b": (two, other)})
            assert db.execute("select count(*) from durable.cascades").fetchone() == (1,), order
            assert rows(db, "status, step", f"id = {parent}") == [("runnable", "then")], order
            await finish(one, db, order)
            assert live(db, parent) == [], order


# -- compensation

UNDO = "insert into durable.compensations values ('m', 1, 'u')"


@pytest.mark.parametrize("force", [False, True], ids=["asks", "force"])
@pytest.mark.parametrize("against", [*OUTCOMES, "spawn", "reap", "release", "signal", "cancel"])
async def test_a_compensation_is_entered_once(
    db: psycopg.Connection, durable_dsn: str, against: str, force: bool
):
    """A child of a parent that waits: whatever comes first, it is done, or it compensates and is counted at its end."""
    async with connect(durable_dsn) as one, connect(durable_dsn) as two:
        turns = 4 if against == "spawn" else 3 if against in OUTCOMES else 2
        for order in orders(x=turns, c=2):
            parent, [child] = await family(one, db, 1)
            db.execute(UNDO)
            if against == "signal":
                await commit(one, outcome(child, "awaiting_signal", awaits=("go",)))
            elif against == "reap":
                db.execute(EXPIRE)
            act: Act = {
                "spawn": spawns(child, 2),
                "reap": lambda conn: reap_claims(conn, SCHEMA, limit=10),
                "release": releases(child),
                "signal": sends(deliver(child.id)),
                "cancel": cancels(child.id),
            }.get(against) or commits(outcome(child, **OUTCOMES[against]))
            done = await play(db, order, {"x": (one, act), "c": (two, cancels(child.id, force=force))})
            await finish(one, db, order)
            [(status, step, visit)] = rows(db, "status, step, visit", f"id = {child.id}")
            if against in {"done", "stop"} and done["x"] == {child.id}:
                assert status == {"done": "done", "stop": "failed"}[against], order
                continue
            if against == "cancel" and force and status == "cancelled":
                pass  # the first entered it, the second ended it
            else:
                assert (status, step) == ("runnable", "u"), order
                assert rows(db, "status", f"id = {parent}") == [("awaiting_children",)], order
                undo = next(each for each in await claims(one) if each.id == child.id)
                assert undo.cancellation is not None, order
                assert undo.visit == visit, order
                assert await commit(one, outcome(undo, "cancelled")) == {child.id}, order
            assert rows(db, "status, children_pending", f"id = {parent}") == [("runnable", 0)], order
            assert journal_problems(*read_journal(db)) == [], order
