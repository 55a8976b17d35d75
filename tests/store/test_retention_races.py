"""Retention against a retry, a start by key, a parent that reads its children, another janitor, and verify."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import psycopg
import pytest
import trio
from durable_actors._postgres.driver.connection import PgConn
from durable_actors._postgres.driver.statement import Params, Result, Statement
from durable_actors._store.children import read_children
from durable_actors._store.insert import insert_instances
from durable_actors._store.retention import Ages, Swept, delete_ended
from durable_actors._store.signal import send_signals
from durable_actors._store.verify import Which, check_long, check_rows, find_orphans, read_rows
from tests.store.kit import SCHEMA, connect, insert, plan, rows
from tests.store.stepping import deliver
from tests.support.commands import retry_instance
from tests.support.interleave import wait_backend_blocked

GATE = 18
AGES = Ages(1, 1, 1, 1)
LIVE = ("runnable", "executing", "awaiting_signal", "awaiting_children")
OLD: dict[str, Any] = {"finished_at": "=now() - interval '1 h'", "inserted_at": "=now() - interval '1 h'"}


class Gated:
    """A connection whose statement stops at a gate: its snapshot is taken, and no row is locked yet."""

    def __init__(self, conn: PgConn) -> None:
        self._conn = conn

    async def run(self, statement: Statement, params: Params) -> Result:
        head = f"with gate as materialized (select pg_advisory_xact_lock({GATE})), looked as"
        sql = statement.sql.replace("with looked as", head, 1)
        gated = sql.replace("from ripe r\n", "from gate cross join ripe r\n", 1)
        assert gated != sql != statement.sql
        return await self._conn.run(Statement("gated", gated, typed=statement.typed), params)


async def sweep(conn: Any) -> Swept:
    return await delete_ended(conn, SCHEMA, AGES, after=0, limit=100, old=0)


async def sweep_late(
    db: psycopg.Connection, dsn: str, meanwhile: Callable[[PgConn], Awaitable[object]]
) -> Swept:
    """Let something happen between the snapshot of the statement and its locks."""
    found: list[Swept] = []
    db.execute("select pg_advisory_lock(%s)", [GATE])
    async with (
        connect(dsn, "client", lock_timeout="0") as conn,  # it waits for the gate as long as the test wants
        connect(dsn, "client") as other,
        trio.open_nursery() as nursery,
    ):

        async def late() -> None:
            found.append(await sweep(Gated(conn)))

        nursery.start_soon(late)
        await wait_backend_blocked(dsn, conn.pid, by=db.info.backend_pid)
        await meanwhile(other)
        db.execute("select pg_advisory_unlock(%s)", [GATE])
    return found[0]


async def test_a_retry_between_snapshot_and_lock(db: psycopg.Connection, durable_dsn: str):
    [number] = insert(db, status="failed", **OLD)
    swept = await sweep_late(db, durable_dsn, lambda conn: retry_instance(conn, SCHEMA, number))
    assert swept.deleted == 0
    assert rows(db, "id, status") == [(number, "runnable")]


async def test_a_retry_that_failed_again_between_snapshot_and_lock(db: psycopg.Connection, durable_dsn: str):
    [number] = insert(db, status="failed", **OLD)

    async def again(conn: PgConn) -> None:
        assert await retry_instance(conn, SCHEMA, number)
        db.execute("update durable.gen_durable set status = 'failed', finished_at = now()")

    assert (await sweep_late(db, durable_dsn, again)).deleted == 0, "it begins to be old anew"
    assert rows(db, "id, status") == [(number, "failed")]


async def test_a_retry_that_is_not_committed_is_passed_by(db: psycopg.Connection, durable_dsn: str):
    retried, free = insert(db, 2, status="failed", **OLD)
    async with (
        connect(durable_dsn, "client") as conn,
        connect(durable_dsn, "client") as other,
        other.transaction(),
    ):
        assert await retry_instance(other, SCHEMA, retried)
        with trio.fail_after(10):
            assert (await sweep(conn)).deleted == 1
    assert rows(db, "id, status") == [(retried, "runnable")]
    assert free not in {number for (number,) in rows(db, "id")}


async def test_a_retry_after_the_deletion_finds_nothing(db: psycopg.Connection, durable_dsn: str):
    [number] = insert(db, status="failed", **OLD)
    async with (
        connect(durable_dsn, "client", lock_timeout="0") as conn,
        connect(durable_dsn) as other,
        trio.open_nursery() as nursery,
    ):
        found: list[bool] = []

        async def retry() -> None:
            found.append(bool(await retry_instance(conn, SCHEMA, number)))

        async with other.transaction():
            assert (await sweep(other)).deleted == 1
            nursery.start_soon(retry)
            await wait_backend_blocked(durable_dsn, conn.pid, by=other.pid)
    assert found == [False]
    assert db.execute("select count(*) from durable.receipts").fetchone() == (0,)


async def test_a_parent_that_is_retried_between_snapshot_and_lock_keeps_its_children(
    db: psycopg.Connection, durable_dsn: str
):
    [parent] = insert(db, status="failed", visit=2, children_total=2, **OLD)
    children = insert(db, 2, status="done", parent_id=parent, barrier=2, **OLD)
    swept = await sweep_late(db, durable_dsn, lambda conn: retry_instance(conn, SCHEMA, parent))
    assert swept.deleted == 0
    async with connect(durable_dsn) as conn:
        found = await read_children(conn, schema=SCHEMA, parent=parent, barrier=2, after=0, limit=10)
    assert [child.id for child in found] == children


async def test_a_locked_parent_keeps_its_children(db: psycopg.Connection, durable_dsn: str):
    """Who has locked it may be about to retry it."""
    [parent] = insert(db, status="failed", visit=2, **OLD)
    insert(db, status="done", parent_id=parent, barrier=2, **OLD)
    with db.transaction():
        db.execute("select 1 from durable.gen_durable where id = %s for no key update", [parent])
        async with connect(durable_dsn, "client") as conn:
            assert (await sweep(conn)).deleted == 0


@pytest.mark.parametrize("before", [True, False], ids=["before", "between snapshot and lock"])
async def test_a_start_by_the_key_of_a_row_that_goes(
    db: psycopg.Connection, durable_dsn: str, *, before: bool
):
    """The key is free, so the new instance has it, whether the old row is there or not; signals find the new one."""
    [old] = insert(db, status="done", unique_key=b"k", unique_scope=list(LIVE), **OLD)
    started: list[int | None] = []

    async def start(conn: PgConn) -> None:
        started.extend(await insert_instances(conn, SCHEMA, [plan(unique_key=b"k", unique_scope=LIVE)]))
        await send_signals(conn, SCHEMA, [deliver("k")])

    if before:
        async with connect(durable_dsn, "client") as conn:
            await start(conn)
            assert (await sweep(conn)).deleted == 1
    else:
        assert (await sweep_late(db, durable_dsn, start)).deleted == 1
    assert rows(db, "id, inbox") == [(started[0], True)]
    assert db.execute("select target_id from durable.signals").fetchall() == [(started[0],)]
    assert started[0] != old


async def test_a_signal_to_a_row_that_goes_has_no_target(db: psycopg.Connection, durable_dsn: str):
    [number] = insert(db, status="failed", inbox=True, **OLD)
    async with (
        connect(durable_dsn, "client", lock_timeout="0") as conn,
        connect(durable_dsn) as other,
        trio.open_nursery() as nursery,
    ):
        found: list[Any] = []

        async def send() -> None:
            found.extend(await send_signals(conn, SCHEMA, [deliver(number)]))

        async with other.transaction():
            assert (await sweep(other)).deleted == 1
            nursery.start_soon(send)
            await wait_backend_blocked(durable_dsn, conn.pid, by=other.pid)
    assert [each.outcome for each in found] == ["no_target"]
    assert db.execute("select count(*) from durable.signals").fetchone() == (0,)


async def test_two_janitors_share_the_work(db: psycopg.Connection, durable_dsn: str):
    insert(db, 10, status="done", **OLD)
    async with connect(durable_dsn, "client") as one, connect(durable_dsn, "client") as two:
        async with one.transaction():
            first = await delete_ended(one, SCHEMA, AGES, after=0, limit=4, old=0)
            with trio.fail_after(10):
                assert (await sweep(two)).deleted == 6
        assert first.deleted == 4
    assert rows(db, "id") == []


async def test_verify_sees_all_of_a_row_or_nothing(db: psycopg.Connection, durable_dsn: str):
    """In every state of the deletion: before it, while it is not committed, and after it."""
    numbers = insert(db, 3, status="done", journal=3, rev=1, **OLD)
    for number in numbers:
        db.execute(
            "select durable.note(id, 1, 'started', 's', 's', 1, 0, 0, further => jsonb_build_object('row', "
            "jsonb_build_object('fsm', fsm, 'fsm_version', 1, 'step', 's', 'queue', queue, 'journal', 3, "
            "'inserted_at', inserted_at, 'eligible_at', eligible_at))) from durable.gen_durable where id = %s",
            [number],
        )

    async def verify(conn: PgConn) -> tuple[int, list[str]]:
        async def long(number: int) -> list[Any]:
            return await check_long(conn, SCHEMA, number)

        found = await check_rows(await read_rows(conn, SCHEMA, Which(), after=0), long)
        lost = await find_orphans(conn, SCHEMA, Which(), after=0)
        return found.checked, [each.reason for each in lost.problems]

    async with connect(durable_dsn, "client") as conn, connect(durable_dsn, "client") as other:
        assert await verify(conn) == (3, [])
        async with other.transaction():
            assert (await sweep(other)).records == 3
            assert await verify(conn) == (3, [])
        assert await verify(conn) == (0, [])
        assert await check_long(conn, SCHEMA, numbers[0]) == []
