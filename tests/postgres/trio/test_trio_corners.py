"""Corners found by attacking it: several tasks on one connection, foreign cursors, Ctrl-C, forgotten generators."""

from __future__ import annotations

import gc
import signal
import subprocess
import sys
from contextlib import aclosing

import psycopg
import pytest
import trio
import trio.testing
from durable_actors._postgres.trio.connection import TrioConnection
from tests.postgres.trio.kit import answers


async def test_what_we_cancelled_ourselves_does_not_surface_as_an_error(conn, probe):
    with trio.CancelScope() as scope:
        async with conn.pipeline():
            await conn.execute("select pg_sleep(30)")
            await probe.busy(conn)
            scope.cancel()
    assert scope.cancelled_caught
    await answers(conn)


async def test_close_while_a_pipeline_ends(conn, probe):
    async with trio.open_nursery() as nursery:

        async def wait():
            with pytest.raises(psycopg.OperationalError):
                async with conn.pipeline():
                    await conn.execute("select pg_sleep(0.3)")

        nursery.start_soon(wait)
        await probe.busy(conn)
        await conn.close()
    gc.collect()  # a generator left to the collector would print its error, which fails the test


@pytest.mark.parametrize("way", ["copy in", "copy out", "stream", "fetch"])
async def test_psycopgs_own_cursor_is_cancelled_safely_too(pg_dsn, probe, scratch, way):
    async with await TrioConnection.connect(
        pg_dsn, autocommit=True, cursor_factory=psycopg.AsyncCursor
    ) as conn:
        pid = conn.info.backend_pid
        cursor = conn.cursor()
        with trio.move_on_after(0.05) as scope:
            if way == "copy in":
                async with cursor.copy("copy scratch from stdin") as copy:
                    await copy.write("1\n" * 5000)
                    await trio.sleep_forever()
            elif way == "copy out":
                async with cursor.copy("copy (select generate_series(1, 1000000)) to stdout") as copy:
                    await copy.read()
                    await trio.sleep_forever()
            elif way == "stream":
                async with aclosing(cursor.stream("select generate_series(1, 1000000)")) as rows:
                    async for _ in rows:
                        await trio.sleep_forever()
            else:
                await cursor.execute("select pg_sleep(30)")
        assert scope.cancelled_caught
        await probe.idle(pid)
        if not conn.closed:
            await answers(conn)
    assert probe.value("select count(*) from scratch") == 0


async def test_pipelines_and_plain_statements_of_several_tasks(conn):
    async def plain(number):
        for _ in range(20):
            assert await (await conn.execute("select %s::int", [number])).fetchone() == (number,)

    async def pipelined(number):
        for _ in range(10):
            async with conn.pipeline():
                cursors = [await conn.execute("select %s::int", [number + n]) for n in range(3)]
                for n, cursor in enumerate(cursors):
                    assert await cursor.fetchone() == (number + n,)

    async with trio.open_nursery() as nursery:
        for number in range(5):
            nursery.start_soon(plain, number)
            nursery.start_soon(pipelined, 10 * number)
    assert conn._pipeline is None
    await answers(conn)


async def test_an_error_of_the_callers_iterator_is_the_callers(conn):
    def rows():
        yield (1,)
        raise FileNotFoundError("mine")

    with pytest.raises(FileNotFoundError):
        await conn.cursor().executemany("select %s", rows())
    await answers(conn)


async def test_wait_with_a_timeout(conn):
    with pytest.raises(trio.TooSlowError):
        await conn.wait(conn._exec_command(b"select pg_sleep(30)"), timeout=0.05)
    await answers(conn)


async def test_an_error_next_to_a_cancelled_transaction_is_not_lost(conn, probe, scratch):
    async def fail():
        raise ZeroDivisionError

    with pytest.RaisesGroup(ZeroDivisionError, flatten_subgroups=True):
        async with conn.transaction(), trio.open_nursery() as nursery:
            await conn.execute("insert into scratch values (1)")
            nursery.start_soon(fail)
            await conn.execute("select pg_sleep(30)")
    await answers(conn)
    assert probe.value("select count(*) from scratch") == 0


async def test_a_forgotten_stream_gives_the_connection_back(conn):
    async def forget():
        async for _ in conn.cursor().stream("select generate_series(1, 1000000)"):
            return

    with pytest.warns(ResourceWarning, match="aclosing"):
        await forget()
    with trio.fail_after(5):
        await conn.execute("select 1")  # waits for the lock until Trio has closed the generator
    await answers(conn)


async def test_objects_do_not_pile_up(pg_dsn):
    async def use():
        async with await TrioConnection.connect(pg_dsn, autocommit=True) as conn:
            async with conn.transaction():
                await conn.cursor().executemany("select %s", [(1,), (2,)])
            for delay in (0, 0.002):
                with trio.move_on_after(delay):
                    await conn.execute("select pg_sleep(1)")

    async def count(times):
        for _ in range(times):
            await use()
        gc.collect()
        return len(gc.get_objects())

    await count(5)
    before = await count(5)
    assert await count(30) < before + 30  # not one object per round


SCRIPT = """
import signal, sys, trio
from durable_actors._postgres.trio.connection import TrioConnection

async def main():
    conn = await TrioConnection.connect(sys.argv[1], autocommit=True)
    try:
        print("ready", flush=True)
        await conn.execute("select pg_sleep(3)")
    finally:
        print("closed" if conn.closed else "open", flush=True)
        await conn.close()

signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job starts with it ignored
try:
    trio.run(main)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


def test_ctrl_c_in_a_query(pg_dsn, probe):
    with subprocess.Popen(
        [sys.executable, "-W", "error", "-c", SCRIPT, pg_dsn], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        while not probe.value(
            "select count(*) from pg_stat_activity where wait_event = 'PgSleep'"
            " and datname = current_database() and query = 'select pg_sleep(3)'"
        ):
            pass
        process.send_signal(signal.SIGINT)
        assert process.stdout.read().split() == ["closed", "interrupted"]
    assert process.returncode == 0
