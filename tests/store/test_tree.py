"""The family of an instance: complete, or it says what is missing; two statements whatever its size."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import durable_actors as da
import psycopg
import pytest
from durable_actors._store.dialogues import climbing, run_dialogue
from durable_actors._store.tree import ANCESTORS
from tests.store.kit import SCHEMA, connect, insert
from tests.support.sql import count_statements


async def tree(conn: Any, target: int | str, **limits: int) -> da.Tree:
    return await run_dialogue(
        conn, climbing(SCHEMA, target, **{"depth": 10, "children": 100, "limit": 1000, **limits})
    )


@asynccontextmanager
async def client(dsn: str) -> AsyncIterator[Any]:
    async with connect(dsn, "client") as conn:
        yield conn


def shape(node: da.TreeNode) -> Any:
    return node.id, [shape(each) for each in node.children]


async def test_the_whole_family_of_any_member(db: psycopg.Connection, durable_dsn: str):
    [root] = insert(db, status="awaiting_children", children_pending=1, children_total=2, unique_key=b"top")
    left, right = insert(db, 2, parent_id=root, barrier=1, status="awaiting_signal", awaits=["go", "stop"])
    [leaf] = insert(db, parent_id=left, finished_at="=now()", status="failed", last_error="no\nstock")
    [other] = insert(db)
    async with client(durable_dsn) as conn:
        for target in (root, left, leaf, right, "top"):
            with count_statements(durable_dsn) as count:
                found = await tree(conn, target)
            assert count.total == 2 + isinstance(target, str), str(count)
            assert shape(found.root) == (root, [(left, [(leaf, [])]), (right, [])])
            assert (found.target, found.shown, found.truncated) == (
                root if target == "top" else target,
                4,
                False,
            )
        assert shape((await tree(conn, other)).root) == (other, [])
        with pytest.raises(da.NoTarget):
            await tree(conn, 10**9)
    top, first, last = found.root, found.find(left), found.find(leaf)
    assert first is not None
    assert last is not None
    assert found.find(other) is None
    assert [node.id for node in found.walk()] == [root, left, leaf, right]
    assert (top.counts, top.hidden, top.parent_run) == ({"awaiting_signal": 2}, 0, None)
    assert top.waits_for == "waits for 1 more of 2 children"
    assert first.waits_for == "awaits a signal named 'go', 'stop'"
    assert (first.machine, first.version, first.step, first.queue) == ("m", 1, "s", "default")
    assert first.parent_run == da.ParentRun(root, "m")
    assert (last.status, last.waits_for) == ("failed", "no stock")


async def test_what_each_waits_for(db: psycopg.Connection, durable_dsn: str):
    [root] = insert(db)
    insert(db, parent_id=root, eligible_at="=now() + interval '1 day'")
    insert(
        db,
        parent_id=root,
        status="executing",
        locked_by="n:1",
        claim_id="=gen_random_uuid()",
        lease_expires_at="=now()",
    )
    insert(db, parent_id=root, hold=1, partition_key="k")
    insert(
        db,
        parent_id=root,
        status="awaiting_signal",
        awaits=["a"],
        await_deadline="=now() + interval '1 hour'",
    )
    insert(
        db,
        parent_id=root,
        status="awaiting_signal",
        awaits=["a"],
        await_deadline="=now() - interval '1 hour'",
    )
    insert(db, parent_id=root, status="done", result="1", finished_at="=now()")
    async with client(durable_dsn) as conn:
        found = await tree(conn, root)
    assert [found.root.waits_for, *(each.waits_for for each in found.root.children)] == [
        "is due in queue 'default'",
        "due in 24 h",
        "runs on n:1",
        "it waits for its partition key: another instance of the key runs first",
        "awaits a signal named 'a' until its deadline in 60 min",
        "awaits a signal named 'a', its deadline passed 60 min ago",
        "",
    ]


async def test_ten_thousand_children(db: psycopg.Connection, durable_dsn: str):
    """First those that have not ended, then those that failed; the rest is counted. The target is always there."""
    [root] = insert(db)
    ids = insert(db, 10_000, parent_id=root, status="done", result="1", finished_at="=now()")
    db.execute(
        "update durable.gen_durable set status = 'failed', result = null, last_error = 'x' where id = any (%s)",
        [ids[7000:7003]],
    )
    db.execute(
        "update durable.gen_durable set status = 'runnable', finished_at = null, result = null where id = %s",
        [ids[9000]],
    )
    async with client(durable_dsn) as conn:
        with count_statements(durable_dsn) as count:
            found = await tree(conn, root, children=6)
        assert count.total == 2
        shown = [each.id for each in found.root.children]
        assert shown == [ids[0], ids[1], *ids[7000:7003], ids[9000]]
        assert found.root.counts == {"done": 9996, "failed": 3, "runnable": 1}
        assert (found.root.hidden, found.root.hidden_counts) == (9994, {"done": 9994})
        assert (found.truncated, found.shown) == (True, 7)
        found = await tree(conn, ids[5000], children=2, limit=1)
        assert [each.id for each in found.root.children] == [ids[5000]]
        assert (found.root.hidden, found.truncated) == (9999, True)
        assert (await tree(conn, root, children=10_000, limit=10_000)).shown == 10_000, (
            "the root is one of them"
        )


async def test_a_deep_family_is_cut_and_says_so(db: psycopg.Connection, durable_dsn: str):
    ids = insert(db)
    for _ in range(ANCESTORS + 30):
        ids += insert(db, parent_id=ids[-1])
    async with client(durable_dsn) as conn:
        found = await tree(conn, ids[0], depth=3)
        assert [node.id for node in found.walk()] == ids[:4]
        assert found.truncated
        assert [*found.walk()][-1].hidden == 1
        found = await tree(conn, ids[50], depth=3, limit=1)
        assert [node.id for node in found.walk()] == ids[:51], "the line of the target, whatever the limits"
        found = await tree(conn, ids[-1])
        assert found.root.id == ids[-1 - ANCESTORS]
        assert found.root.parent_run == da.ParentRun(ids[-2 - ANCESTORS], "m")
        assert found.truncated
        assert (await tree(conn, ids[5], depth=0)).shown == 6


async def test_rows_that_a_hand_has_damaged(db: psycopg.Connection, durable_dsn: str):
    one, two, three = insert(db, 3)
    for child, parent in ((one, three), (two, one), (three, two)):
        db.execute("update durable.gen_durable set parent_id = %s where id = %s", [parent, child])
    [orphan] = insert(db, parent_id=one)
    db.execute("alter table durable.gen_durable drop constraint if exists gen_durable_parent_id_fkey")
    db.execute("update durable.gen_durable set parent_id = 999999 where id = %s", [orphan])
    async with client(durable_dsn) as conn:
        found = await tree(conn, two)
        assert sorted(node.id for node in found.walk()) == [one, two, three]
        assert found.truncated
        found = await tree(conn, orphan)
        assert (shape(found.root), found.root.parent_run) == ((orphan, []), da.ParentRun(999_999))
        assert found.truncated


@pytest.mark.parametrize("limits", [{"depth": -1}, {"children": 0}, {"limit": 10_001}, {"depth": True}])
async def test_limits_are_checked(durable_dsn: str, limits: dict[str, int]):
    async with client(durable_dsn) as conn:
        with pytest.raises(da.ConfigError):
            await tree(conn, 1, **limits)


async def test_every_kind_of_caller(db: psycopg.Connection, durable_dsn: str):
    [root] = insert(db)
    insert(db, 2, parent_id=root)
    async with da.open_client(durable_dsn):
        expected = await da.tree(root, children=1)
    assert (expected.shown, expected.root.hidden) == (2, 1)
    found = da.sync.tree(db, root, children=1)
    assert [node.id for node in found.walk()] == [node.id for node in expected.walk()]
    assert found.root.counts == {"runnable": 2}
