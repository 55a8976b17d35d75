"""explain on a real database: who holds the key, which children are missing and why, on every kind of connection."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

import durable_actors as da
import psycopg
import pytest
from durable_actors._store.sql import statement
from tests.store.kit import OWNER, connect, insert, pick
from tests.support.sql import count_statements, explain


@contextmanager
def node(
    db: psycopg.Connection, name: str = "n:1", *, queues: str = "default", steps: str = "s"
) -> Iterator[None]:
    """A live node that serves a queue and has a step of m/1."""
    about = {"queues": {queues: 5}, "machines": ["m/1"], "steps": {"m/1": [steps]}, "version": da.__version__}
    db.execute(
        "insert into durable.nodes (incarnation, node, about) values (%s, 'n', %s)", [name, json.dumps(about)]
    )
    with psycopg.connect(db.info.dsn, autocommit=True) as session:
        session.execute("select pg_advisory_lock(hashtextextended('durable' || chr(2) || %s, 0))", [name])
        yield


async def test_on_every_kind_of_connection(db: psycopg.Connection):
    [number] = insert(db, unique_key=b"order:1")
    async with da.open_client(db.info.dsn) as client:
        found = await client.explain(number)
        assert await da.explain("order:1") == found
        with pytest.raises(da.NoTarget):
            await da.explain(99)
        with pytest.raises(da.NoTarget):
            await da.explain("nobody")
    assert found.reason == "unserved"
    assert found.summary == "it waits: no live node serves queue 'default'"
    with psycopg.connect(db.info.dsn) as conn:
        assert da.sync.explain(conn, number) == found
        assert da.sync.explain(conn, b"order:1") == found
        with pytest.raises(da.NoTarget):
            da.sync.explain(conn, 99)


async def test_two_statements_that_lock_nothing(db: psycopg.Connection):
    [number] = insert(db)
    with psycopg.connect(db.info.dsn) as other:
        other.execute("lock table durable.gen_durable in exclusive mode")
        other.execute("select 1 from durable.gen_durable for update")
        async with da.open_client(db.info.dsn) as client:
            with count_statements(db.info.dsn) as count:
                await client.explain(number)
    assert count.total == 2, str(count)


async def test_who_holds_the_key_and_who_goes_first(db: psycopg.Connection):
    first, second, third = insert(db, 3, partition_key="k")
    with node(db, OWNER.name), psycopg.connect(db.info.dsn, autocommit=True) as conn:
        found = [da.sync.explain(conn, each) for each in (first, second, third)]
        assert [each.reason for each in found] == ["ready", "waiting_for_key", "waiting_for_key"]
        assert [[each.id for each in one.blockers] for one in found] == [[], [first], [first]]
        async with connect(db.info.dsn) as picker:
            assert [each.id for each in (await pick(picker)).claims] == [first]
        found = [da.sync.explain(conn, each) for each in (first, second, third)]
    assert [each.reason for each in found] == ["executing", "waiting_for_key", "waiting_for_key"]
    assert found[1].summary == f"it waits for partition key 'k', which instance {first} holds on node"
    assert [[each.id for each in one.blockers] for one in found] == [[], [first], [first, second]]
    assert (found[0].evidence["locked_by"], found[0].evidence["rev"]) == ("node", 2)
    assert found[1].evidence["hold"] == "held"


async def test_paused_elders_give_up_their_place(db: psycopg.Connection):
    paused, waiting, last = insert(db, 3, partition_key="k")
    db.execute("update durable.gen_durable set hold = 4 where id = %s", [paused])
    db.execute("update durable.gen_durable set hold = 5 where id = %s", [waiting])
    with node(db), psycopg.connect(db.info.dsn) as conn:
        reasons = [da.sync.explain(conn, each).reason for each in (paused, waiting, last)]
    assert reasons == ["paused", "awaiting_dependencies", "ready"]


def test_children_are_explained_recursively(db: psycopg.Connection):
    """The first three that are missing, and theirs; not those of an earlier barrier, and not those that have ended."""
    parked = {"status": "awaiting_children", "visit": 2}
    [top] = insert(db, **parked, children_pending=5, children_total=7)
    insert(db, parent_id=top, barrier=1)
    insert(db, parent_id=top, barrier=2, status="done", finished_at="=now()")
    [middle] = insert(db, **parked, parent_id=top, barrier=2, children_pending=1, children_total=1)
    [signal] = insert(db, parent_id=top, barrier=2, status="awaiting_signal", awaits=["paid"])
    [ready, *_] = insert(db, 3, parent_id=top, barrier=2)
    [leaf] = insert(db, parent_id=middle, barrier=2, queue="nobody's")
    with node(db), psycopg.connect(db.info.dsn) as conn:
        found = da.sync.explain(conn, top)
    assert found.summary == "it waits for 5 more of 7 children, then runs step 's'"
    assert [each.id for each in found.blockers] == [middle, signal, ready]
    because = [each.because for each in found.blockers]
    assert [each and each.reason for each in because] == ["awaiting_children", "awaiting_signal", "ready"]
    assert because[0] is not None
    [below] = because[0].blockers
    assert below.id == leaf
    assert below.text == f'child {leaf} (m/1) has not ended: it waits: no live node serves queue "nobody\'s"'
    assert f"durable-actors why {middle}" in [each.command for each in found.next_actions]


def test_receipts_are_evidence(db: psycopg.Connection):
    [number] = insert(db, status="failed", finished_at="=now()")
    with psycopg.connect(db.info.dsn, autocommit=True) as conn:
        assert da.sync.explain(conn, number).reason == "failed"
        da.sync.retry(conn, number, by="ada", reason="fixed")
        [receipt] = da.sync.explain(conn, number).evidence["receipts"]
    assert (receipt["command"], receipt["by"], receipt["reason"]) == ("retry", "ada", "fixed")


def test_a_row_behind_thousands_of_siblings_has_its_index(db: psycopg.Connection):
    """Whose elders it reads, up to 10,000: their step decides which nodes pass them by."""
    insert(db, 3000, partition_key="k", hold=1)
    insert(db, 20_000, status="done", finished_at="=now()")
    [number] = insert(db, partition_key="k", hold=1)
    db.execute("vacuum analyze durable.gen_durable")
    plan = explain(db, statement("observe_instances", "durable").sql, [[number], False, 3], generic=True)  # type: ignore[arg-type]
    plan.assert_no_seq_scan("gen_durable")
    plan.assert_uses("gen_durable_key", "gen_durable_key_executing")
    assert plan.buffers < 4000
