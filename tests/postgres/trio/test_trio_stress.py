"""Cancellations at random moments: every follow-up query gets its own answer, and nothing is left behind."""

from __future__ import annotations

import gc
import os
import random
import weakref
from contextlib import aclosing
from pathlib import Path

import pytest
import trio
from durable_actors._postgres.trio.connection import TrioConnection
from psycopg.pq import PipelineStatus, TransactionStatus

OPERATIONS = 20_000 if os.environ.get("DURABLE_TEST_LONG") else 1000
WORKERS = 4


async def query(conn, rng):
    await conn.execute("select pg_sleep(%s)", [rng.choice([0, 0.001])], prepare=rng.random() < 0.5)


async def transaction(conn, rng):
    async with conn.transaction():
        await conn.execute("insert into cancelled values (%s)", [1])
        await conn.execute("select 1")


async def savepoints(conn, rng):
    async with conn.transaction(), conn.transaction():
        await conn.execute("insert into cancelled values (%s)", [2])
        async with conn.transaction():
            await conn.execute("select pg_sleep(0.0005)")


async def executemany(conn, rng):
    await conn.cursor().executemany("insert into cancelled values (%s)", [(n,) for n in range(20)])


async def pipeline(conn, rng):
    async with conn.pipeline() as block:
        cursors = [await conn.execute("select %s::int", [n]) for n in range(5)]
        await block.sync()
        assert [await cursor.fetchone() for cursor in cursors] == [(n,) for n in range(5)]
        async with conn.transaction():
            await conn.execute("insert into cancelled values (3)")


async def copy_in(conn, rng):
    async with conn.cursor().copy("copy cancelled from stdin") as copy:
        for _ in range(20):
            await copy.write(b"4\n" * 500)
            if rng.random() < 0.2:
                await trio.sleep(0)


async def copy_out(conn, rng):
    async with conn.cursor().copy("copy (select generate_series(1, 5000)) to stdout") as copy:
        async for _ in copy:
            if rng.random() < 0.001:
                await trio.sleep(0)


async def stream(conn, rng):
    async with aclosing(conn.cursor().stream("select generate_series(1, 500)")) as rows:
        async for _ in rows:
            if rng.random() < 0.01:
                await trio.sleep(0)


async def server_cursor(conn, rng):
    async with conn.transaction(), conn.cursor("c") as cursor:
        await cursor.execute("select generate_series(1, 50)")
        await cursor.fetchmany(5)
        await cursor.fetchall()


KINDS = [
    query, transaction, savepoints, executemany, pipeline, copy_in, copy_out, stream, server_cursor,
]  # fmt: skip


async def work(dsn, rng, counts, operations, opened):
    """Cancel one operation after the other; a connection that was closed is opened again."""
    conn = None
    for number in range(operations):
        if conn is None or conn.closed:
            conn = await TrioConnection.connect(
                dsn, autocommit=True, application_name="stress", prepare_threshold=3
            )
            await conn.execute("create temp table if not exists cancelled (id int)")
            opened.add(conn)
            counts["opened"] += 1
        operation = rng.choice(KINDS)
        with trio.move_on_after(rng.expovariate(1 / 0.0015)) as scope:
            await operation(conn, rng)
        counts["cancelled"] += scope.cancelled_caught
        if not conn.closed:
            assert conn.info.transaction_status == TransactionStatus.IDLE, operation.__name__
            assert conn.pgconn.pipeline_status == PipelineStatus.OFF, operation.__name__
            assert conn._num_transactions == 0
            assert conn._pipeline is None
            assert not conn.lock.locked()
            answer = await (await conn.execute("select %s::int", [number])).fetchone()
            assert answer == (number,), operation.__name__
            counts["answered"] += 1
    await conn.close()


@pytest.mark.slow
async def test_random_cancellations(pg_dsn, probe):
    rng = random.Random(20261116)
    counts = dict.fromkeys(("opened", "cancelled", "answered"), 0)
    opened: weakref.WeakSet[TrioConnection] = weakref.WeakSet()
    await (await TrioConnection.connect(pg_dsn)).close()
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    async with trio.open_nursery() as nursery:
        for _ in range(WORKERS):
            chances = random.Random(rng.random())
            nursery.start_soon(work, pg_dsn, chances, counts, OPERATIONS // WORKERS, opened)
    assert counts["cancelled"] > OPERATIONS / 10
    assert counts["answered"] > OPERATIONS / 2
    await probe.eventually(
        "select not exists (select from pg_stat_activity where application_name = 'stress')"
    )
    assert len(list(Path("/proc/self/fd").iterdir())) <= descriptors + 4
    gc.collect()
    assert not list(opened)
    print(counts)
