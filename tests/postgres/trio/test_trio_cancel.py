"""Cancelled at each stage: the connection is fit for use or closed, and the server runs nothing for us."""

from __future__ import annotations

from contextlib import aclosing

import psycopg
import pytest
import trio
from tests.postgres.trio.kit import SLEEP, answers, execute

# ---------------------------------------------------------------------------------- one statement


async def execute_prepared(conn):
    await conn.execute("select pg_sleep(%s)", [30], prepare=True)


async def execute_two(conn):
    await conn.execute("select 1; " + SLEEP + "; select 2")


async def execute_after_parse(conn):
    conn.prepare_threshold = 0
    await conn.execute("insert into scratch values (%s)", [-1])


async def stream(conn):
    async with aclosing(conn.cursor().stream("select 1 union all select 2 from pg_sleep(30)")) as rows:
        async for _ in rows:
            pass


async def server_cursor_execute(conn):
    async with conn.transaction(), conn.cursor("c", withhold=True) as cursor:
        await cursor.execute(SLEEP)
        await cursor.fetchone()


async def in_transaction(conn):
    async with conn.transaction():
        await conn.execute("insert into scratch values (1)")
        await conn.execute(SLEEP)


async def in_savepoint(conn):
    async with conn.transaction():
        await conn.execute("insert into scratch values (1)")
        async with conn.transaction():
            await conn.execute("insert into scratch values (2)")
            await conn.execute(SLEEP)


async def in_commit(conn):
    async with conn.transaction():
        await conn.execute("insert into scratch values (1)")
        await conn.execute("insert into deferred values (-1)")


async def in_explicit_commit(conn):
    await conn.set_autocommit(False)
    try:
        await conn.execute("insert into scratch values (1)")
        await conn.execute("insert into deferred values (-1)")
        await conn.commit()
    finally:
        async with conn.unwinding():
            await conn.rollback()
            await conn.set_autocommit(True)


async def copy_in_finish(conn):
    async with conn.cursor().copy("copy scratch from stdin") as copy:
        await copy.write("-1\n")


@pytest.mark.parametrize(
    "operation",
    [
        execute, execute_prepared, execute_two, execute_after_parse, stream, server_cursor_execute,
        in_transaction, in_savepoint, in_commit, in_explicit_commit, copy_in_finish,
    ],
)  # fmt: skip
async def test_cancelled_and_fit_for_use(conn, cancelled, probe, scratch, operation):
    await cancelled(conn, operation)
    assert not conn.closed
    await answers(conn)
    assert probe.ids() == []
    assert probe.value("select count(*) from pg_cursors") == 0


# ---------------------------------------------------------------------------------- half a conversation


async def executemany(conn):
    await conn.cursor().executemany("insert into scratch values (%s)", [(1,), (-1,), (2,)])


async def pipeline_sync(conn):
    async with conn.pipeline() as pipeline:
        await conn.execute("insert into scratch values (1)")
        await conn.execute("insert into scratch values (-1)")
        await pipeline.sync()


async def pipeline_exit(conn):
    async with conn.pipeline():
        await conn.execute("insert into scratch values (1)")
        await conn.execute("insert into scratch values (-1)")


async def pipeline_fetch(conn):
    async with conn.pipeline():
        await (await conn.execute(SLEEP)).fetchone()


async def pipeline_transaction(conn):
    async with conn.pipeline(), conn.transaction():
        await conn.execute("insert into scratch values (1)")
        await conn.execute("insert into scratch values (-1)")


async def copy_in_write(conn):
    async with conn.cursor().copy("copy scratch from stdin") as copy:
        await copy.write("-1\n")
        while True:
            await copy.write(b"1\n" * 100_000)


async def copy_out_read(conn):
    async with conn.cursor().copy("copy (" + SLEEP + ") to stdout") as copy:
        await copy.read()


@pytest.mark.parametrize(
    "operation",
    [
        executemany, pipeline_sync, pipeline_exit, pipeline_fetch, pipeline_transaction, copy_in_write,
        copy_out_read,
    ],
)  # fmt: skip
async def test_cancelled_and_closed(conn, cancelled, probe, scratch, operation):
    await cancelled(conn, operation)
    assert conn.broken
    await probe.eventually("select not exists (select from scratch)")
    with pytest.raises(psycopg.OperationalError):
        await conn.execute("select 1")


# ---------------------------------------------------------------------------------- in the body of a block


async def body_of_transaction(conn):
    async with conn.transaction():
        await conn.execute("insert into scratch values (1)")
        await trio.sleep_forever()


async def body_of_savepoint(conn):
    async with conn.transaction(), conn.transaction("s"):
        await conn.execute("insert into scratch values (1)")
        await trio.sleep_forever()


async def body_of_pipeline(conn):
    async with conn.pipeline():
        await conn.execute("select 1")
        await trio.sleep_forever()


async def body_of_slow_pipeline(conn):
    async with conn.pipeline():
        await conn.execute(SLEEP)
        await trio.sleep_forever()


async def body_of_slow_copy_in(conn):
    async with conn.cursor().copy("copy scratch from stdin") as copy:
        await copy.write("-1\n" * 5_000)
        await trio.sleep_forever()


async def body_of_pipelined_transaction(conn):
    async with conn.pipeline(), conn.transaction():
        await conn.execute("insert into scratch values (1)")
        await trio.sleep_forever()


async def body_of_copy_in(conn):
    async with conn.cursor().copy("copy scratch from stdin") as copy:
        await copy.write("1\n")
        await trio.sleep_forever()


async def body_of_copy_out(conn):
    async with conn.cursor().copy("copy (select generate_series(1, 1000000)) to stdout") as copy:
        await copy.read()
        await trio.sleep_forever()


async def body_of_stream(conn):
    async with aclosing(conn.cursor().stream("select generate_series(1, 1000000)")) as rows:
        async for _ in rows:
            await trio.sleep_forever()


async def body_of_server_cursor(conn):
    async with conn.cursor("c", withhold=True) as cursor:
        await cursor.execute("select 1")
        await trio.sleep_forever()


BODIES = [
    body_of_slow_pipeline, body_of_slow_copy_in,
    body_of_transaction, body_of_savepoint, body_of_pipeline, body_of_pipelined_transaction, body_of_copy_in,
    body_of_copy_out, body_of_stream, body_of_server_cursor,
]  # fmt: skip


@pytest.mark.parametrize("body", BODIES)
async def test_cancelled_in_the_body_of_a_block(conn, probe, scratch, body):
    async with trio.open_nursery() as nursery:
        nursery.start_soon(body, conn)
        await trio.testing.wait_all_tasks_blocked(0.1)
        nursery.cancel_scope.cancel()
    await probe.idle(conn.info.backend_pid)
    await answers(conn)
    assert probe.ids() == []
    assert conn._pipeline is None
    assert await (await conn.execute("select count(*) from pg_cursors")).fetchone() == (0,)
