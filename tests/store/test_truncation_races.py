"""Records that go while somebody appends to them, reads them or rebuilds a row from them; two janitors."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import durable_actors as da
import psycopg
import pytest
import trio
from durable_actors import _history
from durable_actors._postgres.driver.connection import PgConn
from durable_actors._postgres.driver.statement import Params, Result, Statement
from durable_actors._store import history as history_module, rebuild as rebuild_module
from durable_actors._store.commands import plan_command
from durable_actors._store.rebuild import rebuilding
from durable_actors._store.retention import snapshot_journal
from durable_actors._store.sql import statement
from durable_actors._store.verify import SNAPSHOT, InstanceCheck, check_long, feed_pages
from tests.store.kit import SCHEMA, claims, connect, outcome, rows
from tests.store.stepping import commit
from tests.store.test_truncation import kinds, move, revs, snapshot, start, truncate
from tests.support.interleave import wait_backend_blocked

GATE = 19


class Gated:
    """A connection whose statement stops at a gate: its snapshot is taken, and the row is not locked yet."""

    def __init__(self, conn: PgConn) -> None:
        self._conn = conn

    async def run(self, statement: Statement, params: Params) -> Result:
        head = f"with gate as materialized (select pg_advisory_xact_lock({GATE})), seen as"
        sql = statement.sql.replace("with seen as", head, 1)
        gated = sql.replace("from seen s\n", "from gate cross join seen s\n", 1)
        assert gated != sql != statement.sql
        return await self._conn.run(Statement("gated", gated, typed=statement.typed), params)


async def snapshot_late(
    db: psycopg.Connection, dsn: str, number: int, meanwhile: Callable[[PgConn], Awaitable[object]]
) -> int | None:
    """Let something happen between the snapshot of the statement and its lock."""
    found: list[int | None] = []
    db.execute("select pg_advisory_lock(%s)", [GATE])
    async with (
        connect(dsn, "client", lock_timeout="0") as conn,  # it waits for the gate as long as the test wants
        connect(dsn) as other,
        trio.open_nursery() as nursery,
    ):

        async def late() -> None:
            gated: Any = Gated(conn)
            found.append(await snapshot_journal(gated, SCHEMA, number, moves=0))

        nursery.start_soon(late)
        await wait_backend_blocked(dsn, conn.pid, by=db.info.backend_pid)
        await meanwhile(other)
        db.execute("select pg_advisory_unlock(%s)", [GATE])
    return found[0]


async def test_a_commit_between_snapshot_and_lock_goes_first(db: psycopg.Connection, durable_dsn: str):
    async with connect(durable_dsn) as conn:
        number = await start(conn)
        [claim] = await claims(conn)
        await_ = outcome(claim, "runnable", attempt=0, advance=1)
        assert await snapshot_late(db, durable_dsn, number, lambda other: commit(other, await_)) is None
        assert kinds(db, number) == ["started", "claimed", "next"]
        assert await snapshot(conn, number, moves=0) == 4
        assert await check_long(conn, SCHEMA, number) == []


async def test_another_janitor_between_snapshot_and_lock(db: psycopg.Connection, durable_dsn: str):
    async with connect(durable_dsn) as conn:
        number = await start(conn)
        assert (
            await snapshot_late(db, durable_dsn, number, lambda other: snapshot(other, number, moves=0))
            is None
        )
        assert kinds(db, number) == ["started", "snapshot"]


async def test_a_commit_that_waits_for_the_snapshot_is_recorded_after_it(
    db: psycopg.Connection, durable_dsn: str
):
    async with connect(durable_dsn, lock_timeout="0") as conn, connect(durable_dsn) as other:
        number = await start(conn)
        [claim] = await claims(conn)
        async with trio.open_nursery() as nursery, other.transaction():
            assert await snapshot(other, number, moves=0) == 3
            nursery.start_soon(commit, conn, outcome(claim))
            await wait_backend_blocked(durable_dsn, conn.pid, by=other.pid)
        assert kinds(db, number) == ["started", "claimed", "snapshot", "done"]
        assert rows(db, "rev, status") == [(4, "done")]
        assert await check_long(conn, SCHEMA, number) == []


async def test_two_janitors_at_one_journal(db: psycopg.Connection, durable_dsn: str):
    """The second neither waits nor deletes elsewhere in the same history: the first may be taken back."""
    async with connect(durable_dsn) as one, connect(durable_dsn) as two:
        number = await long(one)
        with pytest.raises(ZeroDivisionError):
            async with one.transaction():
                assert await truncate(one, number, most=2) == 2
                with trio.fail_after(10):
                    assert await truncate(two, number, most=2) is None
                raise ZeroDivisionError
        assert revs(db, number) == list(range(1, 12))
        async with one.transaction():
            assert await snapshot(one, number, moves=0)
            with trio.fail_after(10):
                assert await snapshot(two, number, moves=0) is None
        assert await truncate(two, number, moves=0) == 10


async def long(conn: Any) -> int:
    """Two snapshots, at 6 and 11; five records may go."""
    number = await start(conn, state=b'{"n": 1}')
    for _ in range(2):
        await move(conn, 2)
        assert await snapshot(conn, number)
    return number


async def test_records_are_appended_while_others_go(db: psycopg.Connection, durable_dsn: str):
    async with connect(durable_dsn) as one, connect(durable_dsn) as two:
        number = await long(one)
        async with one.transaction():
            assert await truncate(one, number, most=3) == 3
            with trio.fail_after(10):
                await move(two)
                [claim] = await claims(two)
                assert await commit(two, outcome(claim))
        assert revs(db, number) == [1, 2, *range(6, 16)]
        assert await truncate(one, number) == 0, "it has ended: the rest goes with the row"
        assert await check_long(one, SCHEMA, number) == []


async def test_a_history_that_is_read_in_pages_while_records_go(
    db: psycopg.Connection, durable_dsn: str, monkeypatch: pytest.MonkeyPatch
):
    """After each page some more are gone. What comes next is a snapshot, and no gap."""
    monkeypatch.setattr(_history, "PAGE", 2)
    for most in (1, 2, 3, 5):
        async with connect(durable_dsn) as conn, da.open_client(durable_dsn) as client:
            number, found = await long(conn), list[int]()
            async for record in client.iter_history(number):
                found.append(record.rev)
                if len(found) % 2 == 0:
                    await truncate(conn, number, most=most)
            assert found[0] == 1
            assert found[-6:] == list(range(6, 12))
            assert found == sorted(found)
        db.execute("delete from durable.gen_durable")


async def test_a_row_is_rebuilt_while_records_go(
    db: psycopg.Connection, durable_dsn: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(rebuild_module, "PAGE", 2)
    async with connect(durable_dsn) as conn:
        number = await long(conn)
        db.execute("update durable.gen_durable set state = '3'")
        dialogue = rebuilding(SCHEMA, number, plan_command())
        call = next(dialogue)
        with pytest.raises(StopIteration) as over:
            while True:
                found = (await conn.run(*call)).rows
                await truncate(conn, number, most=1)
                call = dialogue.send(found)
        assert over.value.value.changed == ("state",)
        assert revs(db, number) == list(range(6, 13))
        assert rows(db, "state, rev") == [({"n": 1}, 12)]
        assert await check_long(conn, SCHEMA, number) == []


async def test_a_snapshot_of_a_wrong_row_while_it_is_rebuilt_is_refused(
    db: psycopg.Connection, durable_dsn: str
):
    """The rebuild reads again, and the journal contradicts itself: it does not tell any more what the row is."""
    async with connect(durable_dsn) as conn:
        number = await long(conn)
        db.execute("update durable.gen_durable set state = '3'")
        dialogue, writes = rebuilding(SCHEMA, number, plan_command()), 0
        call = next(dialogue)
        with pytest.raises(da.Conflict, match="run_snapshot is conflicting_snapshot"):
            while True:
                if call[0].name == statement("rebuild_instance", SCHEMA).name:
                    writes += 1
                    assert await snapshot(conn, number, moves=0)
                call = dialogue.send((await conn.run(*call)).rows)
        assert writes == 1
        assert rows(db, "state, rev") == [(3, 12)]


async def test_verify_reads_one_snapshot(
    db: psycopg.Connection, durable_dsn: str, monkeypatch: pytest.MonkeyPatch
):
    """Pages of a long history, of which the second is read when its records are gone."""
    async with connect(durable_dsn) as one, connect(durable_dsn) as two:
        number = await long(one)
        [row] = db.execute("select to_jsonb(g) from durable.gen_durable g").fetchall()
        async with two.transaction(begin=SNAPSHOT):
            check = InstanceCheck(number, row[0])
            await two.run(*history_module.HistoryReader(number).call(SCHEMA))
            assert await truncate(one, number) == 5
            await feed_pages(two, SCHEMA, check)
        assert (check.last, check.finish()) == (11, [])
        assert revs(db, number) == list(range(6, 12))
