"""Children: spawned with the park, joined, started singly, read by barrier (H3, H32; R57 to R62)."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
import trio
from durable_actors._store.children import (
    Spawn,
    Started,
    args_digest,
    child_uid,
    read_children,
    schedule_children,
    start_child,
)
from durable_actors._store.lease import reap_claims
from durable_actors._store.rows import Claim, Committed, Transition
from durable_actors._store.signal import expire_awaits, read_inboxes, send_signals
from durable_actors.errors import Duplicate
from tests.store.kit import EXPIRE, SCHEMA, claims, connect, insert, outcome, plan, rows
from tests.store.stepping import commit, deliver

LIVE = ("runnable", "executing", "awaiting_signal", "awaiting_children")


async def spawn(
    conn: Any, claim: Claim, plans: list, *, consumed: tuple = (), **how: Any
) -> Committed | None:
    after = Transition(
        claim, "awaiting_children", claim.step, attempt=0, advance=1, state=b'{"n": 1}', consumed=consumed
    )
    options = {"quorum": None, "wake_on_failure": False, "timeout": None} | how
    return await schedule_children(conn, SCHEMA, after, Spawn(plans, "then", **options), accept_late=True)


def parent_row(db: psycopg.Connection, number: int) -> tuple:
    return rows(db, "status, step, children_pending, children_total", f"id = {number}")[0]


async def test_spawn_writes_all_of_it(db: psycopg.Connection, durable_dsn: str):
    [parent] = insert(db)
    async with connect(durable_dsn) as conn:
        await send_signals(conn, SCHEMA, [deliver(parent), deliver(parent, key="d")])
        [claim] = await claims(conn)
        signals = (await read_inboxes(conn, SCHEMA, [parent]))[parent]
        plans = [plan(), plan(queue="other", priority=-1, state=b'{"x": 2}')]
        found = await spawn(conn, claim, plans, consumed=tuple(s.id for s in signals), timeout=60.0)
        assert found is not None
        assert (found.visit, found.status) == (2, "awaiting_children")
        assert (await read_inboxes(conn, SCHEMA, [parent]))[parent] == []
    columns = "status, step, await_step, state, children_pending, children_total, await_deadline > now()"
    assert rows(db, columns, f"id = {parent}") == [("awaiting_children", "s", "then", {"n": 1}, 2, 2, True)]
    assert rows(db, "queue, priority, state, barrier", f"parent_id = {parent}") == [
        ("default", 0, {}, 2),
        ("other", -1, {"x": 2}, 2),
    ]


async def test_no_children_enter_the_step_at_once(db: psycopg.Connection, durable_dsn: str):
    async with connect(durable_dsn) as conn:
        [parent] = insert(db)
        [claim] = await claims(conn)
        await spawn(conn, claim, [], timeout=60.0)
        assert parent_row(db, parent) == ("runnable", "then", 0, 0)
        assert rows(db, "await_step, await_deadline") == [(None, None)]
        [claim] = await claims(conn)
        assert (claim.visit, claim.attempt) == (2, 0)


async def test_deduplicated_children_do_not_count(db: psycopg.Connection, durable_dsn: str):
    child = plan(unique_key=b"k", unique_scope=LIVE)
    async with connect(durable_dsn) as conn:
        [parent] = insert(db)
        [claim] = await claims(conn)
        await spawn(conn, claim, [child, child, plan()], quorum=3)
        assert parent_row(db, parent) == ("awaiting_children", "s", 2, 2), "a quorum of all there are"
        db.execute("delete from durable.gen_durable where id = %s", [parent])
        await claims(conn)
        [parent] = insert(db)
        [claim] = await claims(conn)
        await spawn(conn, claim, [child])
        assert parent_row(db, parent) == ("runnable", "then", 0, 0)


async def test_a_child_may_insist_on_its_key(db: psycopg.Connection, durable_dsn: str):
    insert(db, unique_key=b"k", unique_scope="='{" + ",".join(LIVE) + "}'")
    async with connect(durable_dsn) as conn:
        await claims(conn)
        [parent] = insert(db)
        [claim] = await claims(conn)
        child = plan(unique_key=b"k", unique_scope=LIVE, on_duplicate="raise")
        with pytest.raises(Duplicate):
            await spawn(conn, claim, [plan(), child])
        assert rows(db, "id", f"parent_id = {parent}") == [], "nothing of it was written"
        assert parent_row(db, parent)[0] == "executing"


@pytest.mark.parametrize(
    ("how", "ends", "opens_at"),
    [
        ({}, ["done"] * 3, 3),
        ({}, ["failed", "done", "failed"], 3),
        ({"quorum": 2}, ["failed", "done", "done"], 2),
        ({"quorum": 1}, ["done"] * 3, 1),
        ({"wake_on_failure": True}, ["done", "failed", "done"], 2),
        ({"wake_on_failure": True}, ["done", "cancelled", "done"], 2),
        ({}, ["cancelled", "done", "cancelled"], 3),
        ({"quorum": 2}, ["cancelled", "done", "done"], 2),
        ({"wake_on_failure": True}, ["done"] * 3, 3),
    ],
)
async def test_joins(db: psycopg.Connection, durable_dsn: str, how: dict, ends: list, opens_at: int):
    [parent] = insert(db)
    async with connect(durable_dsn) as conn:
        [claim] = await claims(conn)
        await spawn(conn, claim, [plan() for _ in ends], **how)
        for number, (child, status) in enumerate(zip(await claims(conn), ends, strict=True), 1):
            await commit(conn, outcome(child, status))
            expected = "runnable" if number >= opens_at else "awaiting_children"
            assert parent_row(db, parent)[0] == expected, number
        assert parent_row(db, parent)[1] == "then"


async def test_a_flush_counts_many_children_of_many_parents(db: psycopg.Connection, durable_dsn: str):
    parents = insert(db, 3)
    async with connect(durable_dsn) as conn:
        for claim in await claims(conn):
            await spawn(conn, claim, [plan() for _ in range(4)])
        family = await claims(conn)
        assert await commit(conn, *(outcome(child) for child in family[:-1]))
        assert [parent_row(db, each)[0] for each in parents] == ["runnable", "runnable", "awaiting_children"]
        await commit(conn, outcome(family[-1]))
        assert {claim.id for claim in await claims(conn)} == set(parents)


async def test_a_quarantined_child_opens_its_barrier(db: psycopg.Connection, durable_dsn: str):
    [parent] = insert(db)
    async with connect(durable_dsn) as conn:
        [claim] = await claims(conn)
        await spawn(conn, claim, [plan()])
        await claims(conn)
        db.execute(EXPIRE)
        _, offered = await reap_claims(conn, SCHEMA, limit=10, max_crashes=1)
        assert [each.id for each in offered] == [parent]
    assert parent_row(db, parent) == ("runnable", "then", 0, 1)


async def test_a_barrier_deadline_wakes_with_the_children_as_they_are(
    db: psycopg.Connection, durable_dsn: str
):
    [parent] = insert(db)
    async with connect(durable_dsn) as conn:
        [claim] = await claims(conn)
        await spawn(conn, claim, [plan(), plan()], timeout=0.0)
        first, second = await claims(conn)
        await commit(conn, outcome(first, "done", result=b'{"r": 1}'))
        assert len(await expire_awaits(conn, SCHEMA, "default", limit=10)) == 1
        [claim] = await claims(conn)
        assert (claim.id, claim.step, claim.children_total) == (parent, "then", 2)
        found = await read_children(conn, SCHEMA, parent, claim.visit, after=0, limit=10)
        assert [(each.id, each.status, each.result) for each in found] == [
            (first.id, "done", {"r": 1}),
            (second.id, "executing", None),
        ]
        # The straggler ends while its parent runs, and after it: nothing happens to the parent.
        before = rows(db, "gen_durable.*", f"id = {parent}")
        await commit(conn, outcome(second, "failed"))
        assert rows(db, "gen_durable.*", f"id = {parent}") == before


async def test_six_thousand_children(db: psycopg.Connection, durable_dsn: str):
    """H32: beyond the protocol's 65,535 parameters in any row-wise form; in chunks, in spawn order."""
    [parent] = insert(db)
    async with connect(durable_dsn, "client") as conn, connect(durable_dsn) as reader:
        [claim] = await claims(reader)
        plans = [plan(state=b'{"n": %d}' % n, queue="c") for n in range(6000)]
        await spawn(conn, claim, plans)
        assert parent_row(db, parent) == ("awaiting_children", "s", 6000, 6000)
        order = rows(db, "(state->>'n')::int", f"parent_id = {parent}")
        assert order == [(n,) for n in range(6000)]
        after, seen = 0, 0
        while page := await read_children(reader, SCHEMA, parent, 2, after=after, limit=1000):
            after, seen = page[-1].id, seen + len(page)
        assert seen == 6000
        for _ in range(6):
            family = await claims(reader, queue="c")
            await commit(reader, *(outcome(child) for child in family))
        assert parent_row(db, parent) == ("runnable", "then", 0, 6000)


# -- started from inside a step


async def start(
    conn: Any, claim: Claim, key: str = "k", *, child: bool = True, **columns: Any
) -> Started | None:
    uid = child_uid(claim.id, claim.step, "m", key, kind="child")
    new = plan(**columns)
    digest = args_digest(new, new.state)
    return await start_child(conn, SCHEMA, claim, new, uid=uid, as_child=child, digest=digest)


async def test_a_child_is_started_once_per_identity(db: psycopg.Connection, durable_dsn: str):
    [parent] = insert(db)
    async with connect(durable_dsn) as conn:
        [claim] = await claims(conn)
        first = await start(conn, claim)
        assert first is not None
        assert first.new
        db.execute(EXPIRE)  # a crash: the next run of the step finds it
        await reap_claims(conn, SCHEMA, limit=10)
        claim = next(each for each in await claims(conn) if each.id == parent)
        again = await start(conn, claim)
        assert again == Started(first.id, new=False, occupant=None)
        other = await start(conn, claim, "other")
        assert other is not None
        assert other.id != first.id
        assert rows(db, "parent_id, barrier", f"id in ({first.id}, {other.id})") == [(parent, None)] * 2
        free = await start(conn, claim, "free", child=False)
        assert free is not None
        assert rows(db, "parent_id", f"id = {free.id}") == [(None,)]


async def test_one_of_two_calls_at_once_with_other_arguments_is_told(
    db: psycopg.Connection, durable_dsn: str
):
    """The loser of the race finds the other's row by a second look, and its arguments there."""
    insert(db)
    found: list[Started | None] = []
    async with connect(durable_dsn, lock_timeout="0") as one, connect(durable_dsn, lock_timeout="0") as two:
        [claim] = await claims(one)

        async def call(conn: Any, state: bytes) -> None:
            found.append(await start(conn, claim, state=state))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(call, one, b'{"n": 1}')
            nursery.start_soon(call, two, b'{"n": 2}')
    assert sorted((each.new, each.conflict) for each in found if each) == [(False, True), (True, False)]
    assert len({each.id for each in found if each}) == 1


async def test_a_started_child_has_no_barrier(db: psycopg.Connection, durable_dsn: str):
    [parent] = insert(db)
    async with connect(durable_dsn) as conn:
        [claim] = await claims(conn)
        await start(conn, claim)
        await spawn(conn, claim, [plan()])
        started, spawned = await claims(conn)
        await commit(conn, outcome(started))
        assert parent_row(db, parent)[0] == "awaiting_children"
        await commit(conn, outcome(spawned))
        assert parent_row(db, parent)[0] == "runnable"


@pytest.mark.parametrize("how", ["reaped", "ended", "next visit"])
async def test_a_stale_step_starts_nothing(db: psycopg.Connection, durable_dsn: str, how: str):
    insert(db)
    async with connect(durable_dsn) as conn:
        [claim] = await claims(conn)
        if how == "ended":
            await commit(conn, outcome(claim))
        elif how == "next visit":
            db.execute("update durable.gen_durable set visit = 7")
        else:
            db.execute(EXPIRE)
            await reap_claims(conn, SCHEMA, limit=10)
        assert await start(conn, claim) is None
        assert await start(conn, claim, child=False) is None
    assert len(rows(db, "id")) == 1


async def test_two_calls_of_one_step_at_once_start_one_child(db: psycopg.Connection, durable_dsn: str):
    insert(db)
    found: list[Started | None] = []
    async with connect(durable_dsn, lock_timeout="0") as one, connect(durable_dsn, lock_timeout="0") as two:
        [claim] = await claims(one)

        async def call(conn: Any, key: str) -> None:
            found.append(await start(conn, claim, key))

        for round_ in range(10):
            found.clear()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(call, one, str(round_))
                nursery.start_soon(call, two, str(round_))
            assert sorted(each.new for each in found if each) == [False, True]
            assert len({each.id for each in found if each}) == 1


async def test_an_occupied_key_is_told_with_its_occupant(db: psycopg.Connection, durable_dsn: str):
    [other] = insert(db, unique_key=b"u", unique_scope="='{" + ",".join(LIVE) + "}'")
    insert(db)
    async with connect(durable_dsn) as conn:
        claim = (await claims(conn))[1]
        found = await start(conn, claim, unique_key=b"u", unique_scope=LIVE)
    assert found == Started(None, new=False, occupant=other)


def test_identities_differ_in_every_part():
    parts = [
        (1, "s", "m", "k"),
        (2, "s", "m", "k"),
        (1, "t", "m", "k"),
        (1, "s", "n", "k"),
        (1, "s", "m", "l"),
    ]
    tricky = [(1, "s", "m\x1fk", ""), (1, "s", "m", "\x1fk"), (1, "s\x1fm", "", "k")]
    uids = {child_uid(*each, kind=kind) for each in parts + tricky for kind in ("child", "insert")}
    assert len(uids) == 2 * len(parts + tricky)
    assert child_uid(1, "s", "m", "k", kind="child") == child_uid(1, "s", "m", "k", kind="child")
