"""The window of a pick: rows after the cursor, single rows before it, each once; and what its commit waits for."""

from __future__ import annotations

import psycopg
import pytest
from durable_actors._postgres.driver.connection import PgConn
from durable_actors._postgres.driver.statement import Statement
from durable_actors._store.claim import PickFrom
from tests.store.kit import HEAD, connect, insert, pick, rows

SHOW = Statement("show", "show synchronous_commit", read_only=True)


def after(db: psycopg.Connection, number: int, *extras: int) -> PickFrom:
    """A cursor that has passed this row, and extra rows."""
    [(at,)] = rows(db, "eligible_at", f"id = {number}")
    return PickFrom([0], [at.isoformat()], [number], extras=extras)


async def test_extra_rows_before_and_after_the_cursor_are_in_the_window_once(
    db: psycopg.Connection, durable_dsn: str
):
    """Keyed rows: one that is there twice would be both claimed and held behind itself."""
    before, first, behind, other = insert(db, 4, partition_key="=(array['a', 'b', 'b', 'c'])[n]")
    async with connect(durable_dsn) as conn:
        picked = await pick(conn, limit=4, begin=after(db, before, before, first, behind, other))
    assert [claim.id for claim in picked.claims] == [before, first, other]
    assert [(row.id, row.what) for row in picked.seen] == [(behind, "h")]
    assert rows(db, "status, hold") == [("executing", 0)] * 2 + [("runnable", 1), ("executing", 0)]


async def test_an_extra_row_takes_its_place_in_the_order(db: psycopg.Connection, durable_dsn: str):
    """The most urgent rows are claimed, wherever they were found. Of a priority that is not read, too."""
    late, first, second = insert(db, 3)
    [urgent] = insert(db, priority=-1)
    async with connect(durable_dsn) as conn:
        picked = await pick(conn, limit=2, begin=after(db, late, late, second, urgent))
        assert sorted(claim.id for claim in picked.claims) == sorted([urgent, late])
        picked = await pick(conn, limit=2, begin=after(db, late, second))
        assert sorted(claim.id for claim in picked.claims) == [first, second]


async def test_extra_rows_that_are_future_held_or_of_another_queue_are_not_claimed(
    db: psycopg.Connection, durable_dsn: str
):
    [future] = insert(db, eligible_at="=now() + interval '1 hour'")
    [held] = insert(db, partition_key="k", hold=1)
    [other] = insert(db, queue="other")
    async with connect(durable_dsn) as conn:
        begin = PickFrom([0], ["infinity"], [0], extras=[future, held, other, 10**12])
        assert (await pick(conn, begin=begin)).window == 0


@pytest.mark.parametrize(
    ("key", "step", "expected"),
    [(None, "s", b"off"), ("k", "s", b"on"), (None, "unknown", b"off"), ("k", "unknown", b"on")],
)
async def test_the_commit_of_a_pick_waits_for_the_disk_if_there_are_keys(
    db: psycopg.Connection, durable_dsn: str, key: str | None, step: str, expected: bytes
):
    insert(db, 2)
    db.execute("update durable.gen_durable set partition_key = %s, step = %s where id = 2", [key, step])
    async with connect(durable_dsn, synchronous_commit="on") as conn:
        async with conn.transaction():
            assert (await pick(conn, begin=HEAD)).window == 2
            assert await shown(conn) == expected
        assert await shown(conn) == b"on", "only of that transaction"


async def shown(conn: PgConn) -> bytes | None:
    return (await conn.run(SHOW, [])).rows[0][0]
