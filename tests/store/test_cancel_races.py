"""Cancel against everything else that moves a row, in every order of their statements.

Whatever the order: after "cancelled" nothing of the instance is committed, and after "requested" only `Done` is.
"""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
from durable_actors._store.children import Spawn, schedule_children
from durable_actors._store.claim import release_claims
from durable_actors._store.insert import insert_instances
from durable_actors._store.lease import crash_claims, reap_claims
from durable_actors._store.rows import Claim, Transition
from durable_actors._store.signal import expire_awaits
from tests.invariants.journal import journal_problems, read_journal
from tests.store.kit import EXPIRE, SCHEMA, claims, connect, empty, outcome, plan, rows
from tests.store.stepping import Act, commit, commits, deliver, orders, play, sends
from tests.support.commands import cancel_instance, retry_instance

pytestmark = pytest.mark.parametrize("force", [False, True], ids=["asks", "force"])


def cancels(number: int, *, force: bool) -> Act:
    return lambda conn: cancel_instance(conn, SCHEMA, number, force=force)


def spawns(claim: Claim, count: int = 2) -> Act:
    after = Transition(claim, "awaiting_children", claim.step, attempt=0, advance=1)
    children = Spawn([plan(journal=3)] * count, "then", None, wake_on_failure=False, timeout=None)
    return lambda conn: schedule_children(conn, SCHEMA, after, children, accept_late=True)


async def fresh(conn: Any, db: psycopg.Connection) -> Claim:
    """One claimed instance, and nothing else."""
    empty(db, "receipts")
    db.execute("set durable_actors.journal_door = 'open'")
    db.execute("delete from durable.journal")
    await insert_instances(conn, SCHEMA, [plan(journal=3)])
    [claim] = await claims(conn)
    return claim


async def settle(conn: Any, db: psycopg.Connection, claim: Claim, said: str | None, order: str) -> str:
    """What the node does next: it releases a claim that is still its own. Returns the final status."""
    [(status, request)] = rows(db, "status, request is not null", f"id = {claim.id}")
    if status == "executing":
        assert said == "requested", order
        assert request, order
        assert (await release_claims(conn, SCHEMA, [claim], attempts=0)).cancelled == {claim.id}, order
        status = "cancelled"
    assert journal_problems(*read_journal(db)) == [], order
    return status


OUTCOMES: dict[str, tuple[dict[str, Any], int]] = {
    "next": ({"status": "runnable", "step": "t", "advance": 1, "attempt": 0}, 2),
    "ahead": ({"status": "runnable", "step": "t", "advance": 1, "attempt": 0, "keep_claim": True}, 2),
    "retry": ({"status": "runnable", "attempt": 1}, 2),
    "await": ({"status": "awaiting_signal", "awaits": ("go",)}, 3),
    "stop": ({"status": "failed", "last_error": "no"}, 2),
    "done": ({"status": "done", "result": b"1"}, 2),
}


# Turns: o = the outcome, its riders, commit. c = cancel, commit.
@pytest.mark.parametrize("kind", OUTCOMES)
async def test_cancel_against_an_outcome(db: psycopg.Connection, durable_dsn: str, force: bool, kind: str):
    columns, turns = OUTCOMES[kind]
    async with connect(durable_dsn) as one, connect(durable_dsn) as two:
        for order in orders(o=turns + 1, c=2):
            claim = await fresh(one, db)
            sides = {
                "o": (one, commits(outcome(claim, **columns))),
                "c": (two, cancels(claim.id, force=force)),
            }
            done = await play(db, order, sides)
            committed, said = done["o"] == {claim.id}, done["c"]
            if kind == "ahead" and committed and said == "requested":
                claim.enter("t", claim.visit + 1, b"{}", inbox=False)  # it runs on, and is asked there
            final = await settle(one, db, claim, said, order)
            if kind in {"done", "stop"} and committed:
                assert final == {"done": "done", "stop": "failed"}[kind], order
                assert said in ({None} if kind == "stop" else {None, "requested"}), order
            else:
                assert final == "cancelled", order
            if kind != "done" and said == "requested" and kind != "ahead":
                assert not committed, order
            if force and said == "cancelled" and not committed:
                assert await commit(one, outcome(claim)) == set(), "fenced out"
            assert await claims(one) == [], "nothing of it runs again"


# Turns: p = lock the parent, insert the children, park, commit. c = cancel, commit.
async def test_cancel_against_a_spawn(db: psycopg.Connection, durable_dsn: str, force: bool):
    async with connect(durable_dsn) as one, connect(durable_dsn) as two:
        for order in orders(p=4, c=2):
            claim = await fresh(one, db)
            done = await play(
                db, order, {"p": (one, spawns(claim)), "c": (two, cancels(claim.id, force=force))}
            )
            assert await settle(one, db, claim, done["c"], order) == "cancelled", order
            children = rows(db, "status", f"parent_id = {claim.id}")
            assert children == ([] if done["p"] is None else [("runnable",)] * 2), order


# Turns: s = signal, commit. c = cancel, commit.
async def test_cancel_against_a_signal(db: psycopg.Connection, durable_dsn: str, force: bool):
    async with connect(durable_dsn) as one, connect(durable_dsn) as two:
        for order in orders(s=2, c=2):
            claim = await fresh(one, db)
            await commit(one, outcome(claim, "awaiting_signal", awaits=("go",)))
            done = await play(
                db, order, {"s": (one, sends(deliver(claim.id))), "c": (two, cancels(claim.id, force=force))}
            )
            [sent] = done["s"]
            assert done["c"] == "cancelled", order
            assert await settle(one, db, claim, done["c"], order) == "cancelled", order
            unread = db.execute("select count(*) from durable.signals where consumed_at is null").fetchone()
            assert unread == (int(sent.outcome == "sent"),), "it is kept, or was refused"


# Turns: e = the deadline, commit. c = cancel, commit.
async def test_cancel_against_a_deadline(db: psycopg.Connection, durable_dsn: str, force: bool):
    async with connect(durable_dsn) as one, connect(durable_dsn) as two:
        for order in orders(e=2, c=2):
            claim = await fresh(one, db)
            await commit(one, outcome(claim, "awaiting_signal", awaits=("go",), timeout=0.0))
            expires: Act = lambda conn: expire_awaits(conn, SCHEMA, "default", limit=10)  # noqa: E731
            await play(db, order, {"e": (one, expires), "c": (two, cancels(claim.id, force=force))})
            assert await settle(one, db, claim, "cancelled", order) == "cancelled", order


ENDS: dict[str, Act] = {
    "release": lambda conn: release_claims(conn, SCHEMA, MINE, attempts=1),
    "crash": lambda conn: crash_claims(conn, SCHEMA, MINE, error="x", max_crashes=1),
    "reap": lambda conn: reap_claims(conn, SCHEMA, limit=10, max_crashes=1),
}
MINE: list[Claim] = []


# Turns: e = the end of the claim, its riders, commit. c = cancel, commit. The instance is the only child of a parent.
@pytest.mark.parametrize("how", ENDS)
async def test_cancel_against_the_end_of_its_claim(
    db: psycopg.Connection, durable_dsn: str, force: bool, how: str
):
    async with connect(durable_dsn) as one, connect(durable_dsn) as two:
        for order in orders(e=3, c=2):
            parent = await fresh(one, db)
            await spawns(parent, 1)(one)
            [child] = await claims(one)
            MINE[:] = [child]
            if how == "reap":
                db.execute(EXPIRE)
            done = await play(db, order, {"e": (one, ENDS[how]), "c": (two, cancels(child.id, force=force))})
            if rows(db, "status", f"id = {child.id}") == [
                ("executing",)
            ]:  # its row was locked: it is tried again
                await ENDS[how](one)
            [(status,)] = rows(db, "status", f"id = {child.id}")
            crashed = how != "release" and done["c"] is None
            assert status == ("failed" if crashed else "cancelled"), order
            assert rows(db, "status, children_pending", f"id = {parent.id}") == [("runnable", 0)], order
            assert [each.id for each in await claims(one)] == [parent.id], order
            if how != "reap":  # its record tells another end of the lease than that of the hand
                assert journal_problems(*read_journal(db)) == [], order


# Turns: a, b = cancel, commit.
@pytest.mark.parametrize("executing", [False, True])
async def test_cancel_against_another_cancel(
    db: psycopg.Connection, durable_dsn: str, force: bool, executing: bool
):
    async with connect(durable_dsn) as one, connect(durable_dsn) as two:
        for order in orders(a=2, b=2):
            parent = await fresh(one, db)
            await spawns(parent, 2)(one)
            child, _ = await claims(one)
            if not executing:
                await release_claims(one, SCHEMA, [child], attempts=0)
            act = cancels(child.id, force=force)
            done = await play(db, order, {"a": (one, act), "b": (two, act)})
            if executing and not force:
                assert done == {"a": "requested", "b": "requested"}, order
                await release_claims(one, SCHEMA, [child], attempts=0)
            else:
                assert sorted(map(str, done.values())) == ["None", "cancelled"], order
            assert rows(db, "children_pending", f"id = {parent.id}") == [(1,)], "counted once"
            receipts = db.execute("select count(*) from durable.receipts").fetchone()
            assert receipts == (sum(each is not None for each in done.values()),), order


# Turns: r = retry, commit. c = cancel, commit. It has failed: one of the two comes too late, or it is cancelled again.
async def test_cancel_against_a_retry(db: psycopg.Connection, durable_dsn: str, force: bool):
    async with connect(durable_dsn) as one, connect(durable_dsn) as two:
        for order in orders(r=2, c=2):
            claim = await fresh(one, db)
            await commit(one, outcome(claim, "failed", last_error="no"))
            retries: Act = lambda conn: retry_instance(conn, SCHEMA, claim.id)  # noqa: B023, E731
            done = await play(db, order, {"r": (one, retries), "c": (two, cancels(claim.id, force=force))})
            assert done["r"] is True, order
            expected = "runnable" if done["c"] is None else "cancelled"
            assert rows(db, "status", f"id = {claim.id}") == [(expected,)], order
            assert journal_problems(*read_journal(db)) == [], order


# Turns: j = the last child's end, join, commit. c = cancel of its parent, commit.
async def test_cancel_against_the_join_of_its_barrier(db: psycopg.Connection, durable_dsn: str, force: bool):
    async with connect(durable_dsn) as one, connect(durable_dsn) as two:
        for order in orders(j=3, c=2):
            parent = await fresh(one, db)
            await spawns(parent, 1)(one)
            [child] = await claims(one)
            sides = {"j": (one, commits(outcome(child))), "c": (two, cancels(parent.id, force=force))}
            done = await play(db, order, sides)
            assert (done["j"], done["c"]) == ({child.id}, "cancelled"), order
            assert await settle(one, db, parent, "cancelled", order) == "cancelled", order
            assert await claims(one) == [], order


# Turns: a = end of one child, join, commit. c = cancel of the other one, which counts at the same barrier, commit.
async def test_cancel_against_the_end_of_a_sister(db: psycopg.Connection, durable_dsn: str, force: bool):
    async with connect(durable_dsn) as one, connect(durable_dsn) as two:
        for order in orders(a=3, c=2):
            parent = await fresh(one, db)
            await spawns(parent, 2)(one)
            first, second = await claims(one)
            await release_claims(one, SCHEMA, [second], attempts=0)
            sides = {"a": (one, commits(outcome(first))), "c": (two, cancels(second.id, force=force))}
            await play(db, order, sides)
            assert rows(db, "status, children_pending", f"id = {parent.id}") == [("runnable", 0)], order
            assert journal_problems(*read_journal(db)) == [], order
