"""Cascades: which children are cancelled, who writes a cascade, what is left for later; the rest of a barrier."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
from durable_actors._store.cascade import Cascaded, cascading
from durable_actors._store.children import Spawn, child_uid, schedule_children, start_child
from durable_actors._store.claim import PickFrom, WorkSeen, release_claims, wait_for_work
from durable_actors._store.dialogues import run_dialogue
from durable_actors._store.insert import insert_instances
from durable_actors._store.lease import crash_claims, reap_claims
from durable_actors._store.rows import Claim, Transition
from durable_actors._store.signal import expire_awaits
from psycopg.types.json import Json
from tests.invariants.journal import journal_problems, read_journal
from tests.store.kit import EXPIRE, SCHEMA, claims, connect, insert, outcome, plan, rows
from tests.store.stepping import commit
from tests.support.commands import cancel_instance, retry_instance


async def spawn(conn: Any, claim: Claim, count: int, **how: Any) -> None:
    after = Transition(claim, "awaiting_children", claim.step, attempt=0, advance=1)
    options = {"quorum": None, "wake_on_failure": False, "timeout": None} | how
    assert await schedule_children(
        conn, SCHEMA, after, Spawn([plan(journal=3)] * count, "then", **options), accept_late=True
    )


async def family(conn: Any, count: int, **how: Any) -> int:
    """A parent that waits for so many children."""
    await insert_instances(conn, SCHEMA, [plan(journal=3, priority=-1)])
    [claim] = await claims(conn, limit=1, begin=PickFrom([-1], ["-infinity"], [0]))
    await spawn(conn, claim, count, **how)
    return claim.id


async def cascade(conn: Any, *, rounds: int = 50, **how: int) -> Cascaded:
    return await run_dialogue(conn, cascading(SCHEMA, rounds=rounds, **how))


def children_of(db: psycopg.Connection, parent: int) -> dict[str, int]:
    query = "select status::text, count(*) from durable.gen_durable where parent_id = %s group by 1"
    return dict(db.execute(query, [parent]).fetchall())


def cascades(db: psycopg.Connection) -> list[tuple[Any, ...]]:
    return db.execute("select parent_id, barrier, request ->> 'reason' from durable.cascades").fetchall()


def fits(db: psycopg.Connection) -> None:
    assert journal_problems(*read_journal(db)) == []


async def test_the_whole_tree_in_pages(db: psycopg.Connection, durable_dsn: str):
    """Parked, due and running ones, ones that ended, and grandchildren of those that it ends."""
    async with connect(durable_dsn) as conn:
        root = await family(conn, 5)
        first, second, third = await claims(conn, limit=3)
        await spawn(conn, first, 3)
        await commit(conn, outcome(second))
        assert await cancel_instance(conn, SCHEMA, root, children=True) == "cancelled"
        assert cascades(db) == [(root, None, f"its parent, instance {root}, was cancelled")]
        done = await cascade(conn, children=2)
        assert done.asked == (third.id,)
        assert len(done.ended) == 3 + 3
        assert children_of(db, root) == {"cancelled": 3, "done": 1, "executing": 1}
        assert children_of(db, first.id) == {"cancelled": 3}
        assert cascades(db) == []
        assert not done.more
        request = rows(db, "request ->> 'parent', request ->> 'children'", f"id = {third.id}")
        assert request == [(str(root), "cancel")]
        assert (await cascade(conn)).ended == ()
        released = await release_claims(conn, SCHEMA, [third], attempts=0)
        assert released.cascades, "its own children, if it had any"
        assert (await cascade(conn)).asked == ()
        assert await claims(conn) == []
    fits(db)


async def test_with_leave_nothing_follows(db: psycopg.Connection, durable_dsn: str):
    async with connect(durable_dsn) as conn:
        root = await family(conn, 2)
        assert await cancel_instance(conn, SCHEMA, root) == "cancelled"
        assert cascades(db) == []
        assert await cascade(conn) == Cascaded()
        assert children_of(db, root) == {"runnable": 2}


@pytest.mark.parametrize("ends", ["release", "crash", "reap", "done", "asked twice"])
async def test_a_step_that_was_asked_decides_when_it_ends(
    db: psycopg.Connection, durable_dsn: str, ends: str
):
    """Children that its step starts meanwhile are among them; of one that is done none is cancelled."""
    insert(db)
    async with connect(durable_dsn) as conn:
        [claim] = await claims(conn)
        assert await cancel_instance(conn, SCHEMA, claim.id, children=True) == "requested"
        if ends == "asked twice":
            assert await cancel_instance(conn, SCHEMA, claim.id) == "requested"
        assert cascades(db) == []
        uid = child_uid(claim.id, "s", "m", "k", kind="child")
        await start_child(conn, SCHEMA, claim, plan(), uid=uid, as_child=True)
        if ends == "crash":
            [[ended], _] = await crash_claims(conn, SCHEMA, [claim], error="E")
            assert ended.cascades
        elif ends == "reap":
            db.execute(EXPIRE)
            [[ended], _] = await reap_claims(conn, SCHEMA, limit=10)
            assert ended.cascades
        elif ends == "done":
            await commit(conn, outcome(claim))
        else:
            assert (await release_claims(conn, SCHEMA, [claim], attempts=0)).cascades
        await cascade(conn)
        assert children_of(db, claim.id) == {"runnable" if ends == "done" else "cancelled": 1}


async def test_a_locked_child_is_left_for_the_next_lap(db: psycopg.Connection, durable_dsn: str):
    async with connect(durable_dsn) as conn:
        root = await family(conn, 5)
        await cancel_instance(conn, SCHEMA, root, children=True)
        [(first,), *_] = rows(db, "id", f"parent_id = {root}")
        with psycopg.connect(durable_dsn) as other:
            other.execute("select from durable.gen_durable where id = %s for update", [first])
            done = await cascade(conn, children=2)
            assert len(done.ended) == 4
            assert not done.more, "it rests"
        assert (await cascade(conn)).ended == ()
        assert await wait_for_work(conn, SCHEMA, ["x"], every=0.0, patience=0.0) == WorkSeen()
        db.execute("update durable.cascades set next_at = now()")
        assert await wait_for_work(conn, SCHEMA, ["x"], every=0.0, patience=0.0) == WorkSeen(cascades=True)
        assert (await cascade(conn)).ended == (first,)
        assert cascades(db) == []


async def test_two_nodes_work_on_different_cascades(db: psycopg.Connection, durable_dsn: str):
    async with connect(durable_dsn) as conn:
        roots = [await family(conn, 1) for _ in range(2)]
        for root in roots:
            await cancel_instance(conn, SCHEMA, root, children=True)
        with psycopg.connect(durable_dsn) as other:
            other.execute("select from durable.cascades where parent_id = %s for update", [roots[0]])
            assert len((await cascade(conn)).ended) == 1
        assert len((await cascade(conn)).ended) == 1


async def test_children_of_a_retried_parent_are_not_meant(db: psycopg.Connection, durable_dsn: str):
    async with connect(durable_dsn) as conn:
        root = await family(conn, 2)
        await cancel_instance(conn, SCHEMA, root, children=True)
        assert await retry_instance(conn, SCHEMA, root)
        [again] = await claims(conn, limit=1, begin=PickFrom([-1], ["-infinity"], [0]))
        await spawn(conn, again, 3)
        await cascade(conn)
        assert children_of(db, root) == {"cancelled": 2, "runnable": 3}
        assert rows(db, "status, children_pending", f"id = {root}") == [("awaiting_children", 3)]


# -- which children, and how


UNDO = "insert into durable.compensations values ('m', 1, 'u')"
LONG_KEY = "(select string_agg(md5(n::text), '') from generate_series(1, 300) n)"
"""A partition key that no index row can hold: a hand has written it."""


async def test_a_running_child_that_was_asked_alone_takes_its_children_along(
    db: psycopg.Connection, durable_dsn: str
):
    """Its own request stays, but for what it says of children; who was asked for those already is passed by."""
    async with connect(durable_dsn) as conn:
        root = await family(conn, 2)
        alone, whole = await claims(conn, limit=2)
        assert await cancel_instance(conn, SCHEMA, alone.id) == "requested"
        assert await cancel_instance(conn, SCHEMA, whole.id, children=True) == "requested"
        await cancel_instance(conn, SCHEMA, root, children=True)
        before = rows(db, "request - 'children'", f"id = {alone.id}")
        assert (await cascade(conn)).asked == (alone.id,)
        assert rows(db, "request - 'children'", f"id = {alone.id}") == before
        assert rows(db, "request ->> 'children'", f"id = {alone.id}") == [("cancel",)]
        assert cascades(db) == []
        assert (await release_claims(conn, SCHEMA, [alone], attempts=0)).cascades
    fits(db)


async def test_a_child_of_two_cascades_compensates_once(db: psycopg.Connection, durable_dsn: str):
    """The rest of a barrier, and its parent, which is cancelled afterwards: both are looked at together."""
    async with connect(durable_dsn) as conn:
        root = await family(conn, 3, quorum=1, cancel_rest=True)
        db.execute(UNDO)
        await by_quorum(conn, db)
        db.execute("delete from durable.compensations")
        await cancel_instance(conn, SCHEMA, root, children=True)
        db.execute(UNDO)
        assert len(cascades(db)) == 2
        assert len((await cascade(conn)).offered) == 2
        left = f"parent_id = {root} and status <> 'done'"
        assert rows(db, "step, visit, status", left) == [("u", 2, "runnable")] * 2
        told = Json({"kind": "cancel", "children": "cancel"})
        db.execute(
            "insert into durable.cascades (parent_id, up_to, request) values (%s, 99, %s)", [root, told]
        )
        assert await cascade(conn) == Cascaded(), "they compensate, and are passed by"
        assert rows(db, "step, visit, status", left) == [("u", 2, "runnable")] * 2
    fits(db)


async def test_a_running_child_is_told_what_compensates(db: psycopg.Connection, durable_dsn: str):
    async with connect(durable_dsn) as conn:
        root = await family(conn, 1)
        [claim] = await claims(conn)
        db.execute(UNDO)
        await cancel_instance(conn, SCHEMA, root, children=True)
        assert (await cascade(conn)).asked == (claim.id,)
        await release_claims(conn, SCHEMA, [claim], attempts=0)
        assert rows(db, "status, step", f"id = {claim.id}") == [("runnable", "u")]
    fits(db)


async def test_the_rest_of_a_barrier_is_its_children_alone(db: psycopg.Connection, durable_dsn: str):
    """One that a step has started beside them goes on."""
    async with connect(durable_dsn) as conn:
        await insert_instances(conn, SCHEMA, [plan(journal=3, priority=-1)])
        [claim] = await claims(conn, limit=1, begin=PickFrom([-1], ["-infinity"], [0]))
        uid = child_uid(claim.id, "s", "m", "k", kind="child")
        await start_child(conn, SCHEMA, claim, plan(priority=1), uid=uid, as_child=True)
        await spawn(conn, claim, 3, quorum=1, cancel_rest=True)
        await by_quorum(conn, db)
        await cascade(conn)
        assert children_of(db, claim.id) == {"cancelled": 2, "done": 1, "runnable": 1}
        assert rows(db, "status", f"parent_id = {claim.id} and barrier is null") == [("runnable",)]
    fits(db)


async def test_what_a_child_was_asked_what_was_decided_and_why_it_failed(
    db: psycopg.Connection, durable_dsn: str
):
    """A decision stays for who reads it; a question nobody will answer goes, and so does the error of an attempt."""
    asks = Json({"kind": "approval", "then": "s"})
    decided = Json({"kind": "approval", "then": "s", "decision": {"verb": "approve"}})
    async with connect(durable_dsn) as conn:
        root = await family(conn, 3)
        first, second, third = (number for (number,) in rows(db, "id", f"parent_id = {root}"))
        for number, manual in ((first, asks), (second, decided)):
            db.execute("update durable.gen_durable set manual = %s where id = %s", [manual, number])
        db.execute("update durable.gen_durable set error_type = 'E', traceback = 'T' where id = %s", [third])
        await cancel_instance(conn, SCHEMA, root, children=True)
        assert len((await cascade(conn)).ended) == 3
    found = rows(db, "manual, error_type, traceback", f"parent_id = {root}")
    assert found == [(None, None, None), (decided.obj, None, None), (None, None, None)]


async def test_a_child_whose_key_is_too_long_ends_instead_of_compensating(
    db: psycopg.Connection, durable_dsn: str
):
    """No index takes its key while it is runnable: to enter a step would be refused, with all of the cascade."""
    async with connect(durable_dsn) as conn:
        root = await family(conn, 2)
        [claim] = await claims(conn, limit=1)
        await commit(conn, outcome(claim, "awaiting_signal", awaits=("go",)))
        db.execute(f"update durable.gen_durable set partition_key = {LONG_KEY} where id = %s", [claim.id])
        await cancel_instance(conn, SCHEMA, root, children=True)
        db.execute(UNDO)
        done = await cascade(conn)
        assert done.ended == (claim.id,)
        assert rows(db, "step", f"parent_id = {root} and status = 'runnable'") == [("u",)]
        assert cascades(db) == []


# -- the rest of a barrier


async def by_quorum(conn: Any, db: psycopg.Connection) -> None:
    [claim, *_] = await claims(conn, limit=1)
    await commit(conn, outcome(claim))


async def by_failure(conn: Any, db: psycopg.Connection) -> None:
    [claim, *_] = await claims(conn, limit=1)
    await commit(conn, outcome(claim, "failed", last_error="no"))


async def by_cancel(conn: Any, db: psycopg.Connection) -> None:
    [(child,), *_] = rows(db, "id", "parent_id is not null")
    assert await cancel_instance(conn, SCHEMA, child) == "cancelled"


async def by_timeout(conn: Any, db: psycopg.Connection) -> None:
    db.execute("update durable.gen_durable set await_deadline = now() where await_deadline is not null")
    expired = await expire_awaits(conn, SCHEMA, "default", limit=10)
    assert expired.cascades == bool(rows(db, "id", f"id = {expired.woken[0]} and cancel_rest"))


OPENS = {
    "quorum": ({"quorum": 1}, by_quorum),
    "any_failed": ({"wake_on_failure": True}, by_failure),
    "cancelled child": ({"quorum": 1}, by_cancel),
    "timeout": ({"timeout": 60.0}, by_timeout),
}


@pytest.mark.parametrize("rest", [False, True])
@pytest.mark.parametrize("how", OPENS)
async def test_the_rest_of_a_barrier(db: psycopg.Connection, durable_dsn: str, how: str, rest: bool):
    options, opens = OPENS[how]
    async with connect(durable_dsn) as conn:
        parent = await family(conn, 3, **options, cancel_rest=rest)
        await opens(conn, db)
        assert rows(db, "status, step", f"id = {parent}") == [("runnable", "then")]
        reason = f"its parent, instance {parent}, goes on without it"
        assert cascades(db) == ([(parent, 2, reason)] if rest else [])
        before = rows(db, "gen_durable::text", f"id = {parent}")
        await cascade(conn)
        left = 3 if how == "timeout" else 2
        found = children_of(db, parent)
        assert found["cancelled" if rest else "runnable"] == left + (rest and how == "cancelled child")
        assert rows(db, "gen_durable::text", f"id = {parent}") == before, "its barrier is open"
    fits(db)


async def test_a_barrier_forgets_what_an_earlier_one_did_with_its_rest(
    db: psycopg.Connection, durable_dsn: str
):
    async with connect(durable_dsn) as conn:
        parent = await family(conn, 1, cancel_rest=True)
        await by_quorum(conn, db)
        await cascade(conn)
        [claim] = await claims(conn, begin=PickFrom([-1], ["-infinity"], [0]))
        assert claim.id == parent
        await spawn(conn, claim, 2, quorum=1)
        await by_quorum(conn, db)
        assert cascades(db) == []
    fits(db)


async def test_runners_alone_finish_a_cascade(db: psycopg.Connection, durable_dsn: str):
    """More children than one call takes, keys whose next row is offered, a grandchild; a queue that is paused."""
    async with connect(durable_dsn) as conn:
        root = await family(conn, 130)
        db.execute("update durable.gen_durable set partition_key = 'k' where id = %s", [root + 1])
        [held] = insert(db, partition_key="k", hold=1, queue="behind")
        [grandchild] = insert(db, parent_id=root + 130)
        db.execute("insert into durable.pauses (queue) values ('default')")
        assert await cancel_instance(conn, SCHEMA, root, children=True) == "cancelled"
        calls = 0
        while cascades(db):
            calls += 1
            assert db.execute("select * from durable.claim_next('default', '{m/s}', 'r')").fetchall() == []
            assert calls < 10
        assert calls >= 3, "each call does a piece"
        assert children_of(db, root) == {"cancelled": 130}
        assert rows(db, "status::text", f"id = {grandchild}") == [("cancelled",)]
        assert rows(db, "hold", f"id = {held}") == [(0,)]
