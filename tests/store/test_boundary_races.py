"""A decision against everything else that moves an instance which waits for a person, in every order of the statements.

Whatever the order: one of them counts, the other one is refused or comes after it, and the journal tells the row.
"""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
from durable_actors._store.boundaries import Verb, decide_instance
from durable_actors._store.children import Spawn, schedule_children
from durable_actors._store.insert import insert_instances
from durable_actors._store.rows import Claim, Transition
from durable_actors._store.signal import Expired, expire_awaits
from tests.invariants.journal import journal_problems, read_journal
from tests.store.kit import SCHEMA, claims, connect, empty, outcome, plan, rows
from tests.store.stepping import Act, commit, deliver, orders, play, sends
from tests.support.commands import cancel_instance
from tests.support.sql import count_statements

ROUTES = b'{"kind": "approval", "then": "t", "on_reject": "u"}'
NONE = b'{"kind": "approval", "then": "t"}'


def decides(number: int, verb: Verb) -> Act:
    return lambda conn: decide_instance(conn, SCHEMA, number, verb)


def cancels(number: int) -> Act:
    return lambda conn: cancel_instance(conn, SCHEMA, number)


EXPIRES: Act = lambda conn: expire_awaits(conn, SCHEMA, "default", limit=10)  # noqa: E731


def asking(claim: Claim, boundary: bytes = ROUTES, **columns: Any) -> Transition:
    parked = {"awaits": (), "await_step": "u" if boundary == ROUTES else None, "advance": 1, "attempt": 0}
    return outcome(claim, "awaiting_signal", boundary=boundary, **parked, **columns)


def clear(db: psycopg.Connection) -> None:
    empty(db, "receipts")
    db.execute("set durable_actors.journal_door = 'open'")
    db.execute("delete from durable.journal")


async def asked(conn: Any, db: psycopg.Connection, boundary: bytes = ROUTES, **columns: Any) -> Claim:
    """One instance that waits for a person, and nothing else."""
    clear(db)
    await insert_instances(conn, SCHEMA, [plan(journal=3)])
    [claim] = await claims(conn)
    await commit(conn, asking(claim, boundary, **columns))
    return claim


def now(db: psycopg.Connection, number: int) -> tuple[Any, ...]:
    """Status, step and decision of the row; its journal says the same."""
    assert journal_problems(*read_journal(db)) == []
    [found] = rows(db, "status, step, manual #>> '{decision,kind}'", f"id = {number}")
    return found


# Turns: a, r = decide, commit.
async def test_two_decisions_at_once(db: psycopg.Connection, durable_dsn: str):
    async with connect(durable_dsn) as one, connect(durable_dsn) as two:
        for order in orders(a=2, r=2):
            claim = await asked(one, db)
            sides = {"a": (one, decides(claim.id, "approve")), "r": (two, decides(claim.id, "reject"))}
            done = await play(db, order, sides)
            first = order[0]
            assert (done["a"], done["r"]) == (first == "a", first == "r"), order
            expected = ("runnable", "t", "approved") if first == "a" else ("runnable", "u", "rejected")
            assert now(db, claim.id) == expected, order
            assert [*db.execute("select command from durable.receipts")] == [
                ("approve" if first == "a" else "reject",)
            ]


# Turns: d = decide, commit. c = cancel, commit.
@pytest.mark.parametrize("verb", ["approve", "reject"])
@pytest.mark.parametrize("boundary", [ROUTES, NONE], ids=["routes", "none"])
async def test_a_decision_against_a_cancel(
    db: psycopg.Connection, durable_dsn: str, verb: Verb, boundary: bytes
):
    async with connect(durable_dsn) as one, connect(durable_dsn) as two:
        for order in orders(d=2, c=2):
            claim = await asked(one, db, boundary)
            sides = {"d": (one, decides(claim.id, verb)), "c": (two, cancels(claim.id))}
            done = await play(db, order, sides)
            ended = order[0] == "d" and verb == "reject" and boundary == NONE
            assert done["d"] == (order[0] == "d"), order
            assert done["c"] == (None if ended else "cancelled"), order
            assert now(db, claim.id)[0] == ("failed" if ended else "cancelled"), order
            assert await claims(one) == [], "nothing of it runs"


# Turns: d = decide, commit. e = the deadline, commit.
@pytest.mark.parametrize("boundary", [ROUTES, NONE], ids=["routes", "none"])
async def test_a_decision_against_the_deadline(db: psycopg.Connection, durable_dsn: str, boundary: bytes):
    async with connect(durable_dsn) as one, connect(durable_dsn) as two:
        for order in orders(d=2, e=2):
            claim = await asked(one, db, boundary, timeout=0.0)
            sides = {"d": (one, decides(claim.id, "approve")), "e": (two, EXPIRES)}
            done = await play(db, order, sides)
            expired = done["e"]
            assert isinstance(expired, Expired)
            if order[0] == "d":
                assert (done["d"], len(expired)) == (True, 0), (
                    "the deadline skips a locked row, and a resolved one"
                )
                assert now(db, claim.id) == ("runnable", "t", "approved"), order
            else:
                assert (done["d"], len(expired)) == (False, 1), "never an approval after it"
                late = ("runnable", "u", "timed_out") if boundary == ROUTES else ("failed", "s", None)
                assert now(db, claim.id) == late, order


# Turns: d = decide, commit. s = signal, commit.
async def test_a_decision_against_a_signal(db: psycopg.Connection, durable_dsn: str):
    async with connect(durable_dsn) as one, connect(durable_dsn) as two:
        for order in orders(d=2, s=2):
            claim = await asked(one, db)
            sides = {
                "d": (one, decides(claim.id, "approve")),
                "s": (two, sends(deliver(claim.id, "approve"))),
            }
            done = await play(db, order, sides)
            [sent] = done["s"]
            assert (done["d"], sent.outcome, sent.woken) == (True, "sent", False), order
            assert now(db, claim.id) == ("runnable", "t", "approved"), order


async def family(
    conn: Any, db: psycopg.Connection, count: int, *, timeout: float | None
) -> tuple[int, list[int]]:
    """A parent that waits for children which wait for a person."""
    clear(db)
    await insert_instances(conn, SCHEMA, [plan(journal=3)])
    [parent] = await claims(conn)
    after = Transition(parent, "awaiting_children", parent.step, attempt=0, advance=1)
    children = Spawn([plan(journal=3)] * count, "then", None, wake_on_failure=False, timeout=None)
    await schedule_children(conn, SCHEMA, after, children, accept_late=True)
    found = await claims(conn)
    await commit(conn, *(asking(each, NONE, timeout=timeout) for each in found))
    return parent.id, [each.id for each in found]


# Turns: a = reject a child, commit. b = the same of its sibling; or both by the deadline.
@pytest.mark.parametrize("how", ["reject", "deadline"])
async def test_the_last_two_children_are_rejected_at_once(db: psycopg.Connection, durable_dsn: str, how: str):
    """The barrier counts each of them once, and opens once."""
    async with connect(durable_dsn) as one, connect(durable_dsn) as two:
        for order in orders(a=2, b=2):
            late = how == "deadline"
            parent, children = await family(one, db, 2, timeout=0.0 if late else None)
            acts = [EXPIRES] * 2 if late else [decides(each, "reject") for each in children]
            done = await play(db, order, {"a": (one, acts[0]), "b": (two, acts[1])})
            if late:
                await EXPIRES(one)  # what a lock of the other one kept from it
                ended = [*done["a"].ended, *done["b"].ended]
                assert len(set(ended)) == len(ended), order
            assert {now(db, each)[0] for each in children} == {"failed"}, order
            assert rows(db, "status, step, children_pending", f"id = {parent}") == [
                ("runnable", "then", 0)
            ], order


async def test_a_deadline_waits_for_nobody(db: psycopg.Connection, durable_dsn: str):
    """A parent that is locked, or whose own deadline has passed, leaves its child for the next call."""
    async with connect(durable_dsn) as one:
        parent, [child] = await family(one, db, 1, timeout=0.0)
        with psycopg.connect(durable_dsn) as other:
            other.execute("select 1 from durable.gen_durable where id = %s for update", [parent])
            assert len(await expire_awaits(one, SCHEMA, "default", limit=10)) == 0
        db.execute("update durable.gen_durable set await_deadline = now() where id = %s", [parent])
        assert (await expire_awaits(one, SCHEMA, "default", limit=10)).woken == [parent]
        found = await expire_awaits(one, SCHEMA, "default", limit=10)
        assert (found.ended, found.offered) == ([child], []), "nobody waits for it any more"
        assert now(db, child)[0] == "failed"


async def test_a_decision_is_one_statement(db: psycopg.Connection, durable_dsn: str):
    """Case 52."""
    async with connect(durable_dsn) as one:
        claim = await asked(one, db)
        with count_statements(durable_dsn) as count:
            assert await decide_instance(one, SCHEMA, claim.id, "approve")
        assert count.total == 1, str(count)
