"""psycopg's comfort, on Trio: what works without anything going wrong."""

from __future__ import annotations

import asyncio
import gc
import weakref
from contextlib import aclosing

import psycopg
import pytest
import trio
from durable_actors._postgres.trio.connection import TrioConnection
from durable_actors._postgres.trio.cursor import TrioCursor, TrioServerCursor
from psycopg import AsyncClientCursor, AsyncRawCursor, Rollback, postgres
from psycopg.adapt import AdaptersMap
from psycopg.copy import AsyncQueuedLibpqWriter
from psycopg.pq import TransactionStatus
from psycopg.rows import dict_row, namedtuple_row, scalar_row
from psycopg.types.json import set_json_loads


async def one(conn, query, *params):
    row = await (await conn.execute(query, params)).fetchone()
    return row[0]


async def test_connect_takes_psycopgs_options(pg_dsn):
    async with await TrioConnection.connect(
        pg_dsn, autocommit=True, row_factory=dict_row, prepare_threshold=None, application_name="trio"
    ) as conn:
        assert conn.autocommit
        assert conn.prepare_threshold is None
        cursor = await conn.execute("select current_setting('application_name') as name")
        assert await cursor.fetchone() == {"name": "trio"}
        assert type(cursor) is TrioCursor
    assert conn.closed
    assert not conn.broken


async def test_no_asyncio_is_running(conn):
    with pytest.raises(RuntimeError):
        asyncio.get_running_loop()
    assert await one(conn, "select 1") == 1


async def test_connect_with_a_context(pg_dsn):
    class Context:
        adapters = AdaptersMap(postgres.adapters)
        connection = None

    set_json_loads(lambda data: "mine", context=Context)
    async with await TrioConnection.connect(pg_dsn, context=Context) as conn:
        assert await one(conn, "select '{}'::json") == "mine"


@pytest.mark.parametrize("factory", [AsyncClientCursor, AsyncRawCursor])
async def test_other_cursors(pg_dsn, factory):
    async with await TrioConnection.connect(pg_dsn, cursor_factory=factory) as conn:
        placeholder = "$1" if factory is AsyncRawCursor else "%s"
        assert await one(conn, f"select {placeholder}::int + 1", 1) == 2


async def test_a_refused_connection_is_psycopgs_error():
    with pytest.raises(psycopg.OperationalError):
        await TrioConnection.connect("host=127.0.0.1 port=1 connect_timeout=2")
    with pytest.raises(psycopg.ProgrammingError):
        await TrioConnection.connect("no dsn at all")


async def test_the_block_commits_or_rolls_back_and_closes(pg_dsn, probe, scratch):
    async with await TrioConnection.connect(pg_dsn) as conn:
        await conn.execute("insert into scratch values (1)")
    assert conn.closed
    with pytest.raises(ZeroDivisionError):
        async with await TrioConnection.connect(pg_dsn) as conn:
            await conn.execute("insert into scratch values (2)")
            raise ZeroDivisionError
    assert conn.closed
    assert probe.value("select array_agg(id) from scratch") == [1]


async def test_rows_and_fetching(conn):
    cursor = conn.cursor(row_factory=scalar_row)
    await cursor.execute("select generate_series(1, 10)")
    assert await cursor.fetchone() == 1
    assert await cursor.fetchmany(2) == [2, 3]
    await cursor.scroll(1)
    assert [row async for row in cursor] == [5, 6, 7, 8, 9, 10]
    assert await cursor.fetchall() == []
    cursor = conn.cursor(row_factory=scalar_row, binary=True)
    await cursor.execute("select 1.5::float8")
    assert await cursor.fetchone() == 1.5
    cursor = await conn.execute("select 1; select 2")
    assert [await c.fetchone() async for c in cursor.results()] == [(1,), (2,)]
    with pytest.raises(psycopg.errors.SyntaxError):
        await conn.execute("selec 1")
    row = await (await conn.cursor(row_factory=namedtuple_row).execute("select 1 as a")).fetchone()
    assert row.a == 1


async def test_transactions_savepoints_and_rollback(conn, probe, scratch):
    async with conn.transaction():
        await conn.execute("insert into scratch values (1)")
        with pytest.raises(psycopg.errors.UndefinedTable):
            async with conn.transaction():
                await conn.execute("insert into scratch values (2)")
                await conn.execute("insert into nowhere values (2)")
        async with conn.transaction() as inner:
            await conn.execute("insert into scratch values (3)")
            raise Rollback(inner)
        async with conn.transaction(force_rollback=True):
            await conn.execute("insert into scratch values (4)")
        async with conn.transaction("named"):
            await conn.execute("insert into scratch values (5)")
    assert probe.value("select array_agg(id order by id) from scratch") == [1, 5]
    assert conn.info.transaction_status == TransactionStatus.IDLE


async def test_a_block_is_used_once(conn):
    async with conn.transaction() as block:
        pass
    with pytest.raises(TypeError):
        await block.__aenter__()


async def test_pipeline(conn, probe, scratch):
    async with conn.pipeline() as pipeline:
        first = await conn.execute("insert into scratch values (1) returning id")
        second = await conn.execute("select 2")
        assert await second.fetchone() == (2,)
        assert await first.fetchone() == (1,)
        await pipeline.sync()
        async with conn.transaction():
            await conn.execute("insert into scratch values (2)")
        with pytest.raises(psycopg.errors.DivisionByZero):
            async with conn.transaction():
                await conn.execute("insert into scratch values (3)")
                await conn.execute("select 1/0")
    assert await one(conn, "select 4") == 4
    assert probe.value("select array_agg(id order by id) from scratch") == [1, 2]


async def test_executemany(conn, probe, scratch):
    cursor = conn.cursor()
    await cursor.executemany("insert into scratch values (%s)", [(i,) for i in range(1000)])
    assert cursor.rowcount == 1000
    await cursor.executemany("select %s::int", [(1,), (2,)], returning=True)
    assert [await c.fetchone() async for c in cursor.results()] == [(1,), (2,)]
    assert probe.value("select count(*) from scratch") == 1000


async def test_copy_in_and_out(conn, probe, scratch):
    cursor = conn.cursor()
    async with cursor.copy("copy scratch from stdin") as copy:
        for i in range(5000):
            await copy.write_row((i,))
        await copy.write("".join(f"{i}\n" for i in range(200_000)))  # larger than one chunk
    assert cursor.rowcount == 205_000
    async with cursor.copy("copy (select id from scratch where id < 3) to stdout") as copy:
        copy.set_types(["int4"])
        rows = [row async for row in copy.rows()]
    assert sorted(rows) == [(0,), (0,), (1,), (1,), (2,), (2,)]


async def test_a_copy_that_makes_the_server_talk_does_not_deadlock(conn, scratch):
    # 40 MB of notices come back while the data goes out: both sides would wait for room.
    await conn.execute(
        "create or replace function talk() returns trigger language plpgsql as"
        " $$ begin raise notice '%', repeat('x', 8000); return new; end $$"
    )
    await conn.execute("create temp table talks (t text)")
    await conn.execute("create trigger talk before insert on talks for each row execute function talk()")
    cursor = conn.cursor()
    with trio.fail_after(30):
        async with cursor.copy("copy talks from stdin") as copy:
            for _ in range(5000):
                await copy.write(b"y" * 4000 + b"\n")
    assert cursor.rowcount == 5000


async def test_copy_in_refused_by_an_exception(conn, probe, scratch):
    with pytest.raises(ZeroDivisionError):
        async with conn.cursor().copy("copy scratch from stdin") as copy:
            await copy.write_row((1,))
            raise ZeroDivisionError
    assert await one(conn, "select count(*) from scratch") == 0


async def test_copy_out_left_before_its_end(conn):
    async with conn.cursor().copy("copy (select generate_series(1, 1000000)) to stdout") as copy:
        assert await copy.read()
    assert await one(conn, "select 1") == 1


async def test_copy_of_a_bad_row_is_the_servers_error(conn, scratch):
    with pytest.raises(psycopg.errors.InvalidTextRepresentation):
        async with conn.cursor().copy("copy scratch from stdin") as copy:
            await copy.write("one\n")
    assert await one(conn, "select 1") == 1


async def test_copy_with_asyncios_writer_is_refused(conn, scratch):
    cursor = conn.cursor()
    with pytest.raises(psycopg.NotSupportedError):
        async with cursor.copy("copy scratch from stdin", writer=AsyncQueuedLibpqWriter(cursor)):
            pass


async def test_stream(conn):
    cursor = conn.cursor()
    assert [row async for row in cursor.stream("select generate_series(1, 3)")] == [(1,), (2,), (3,)]
    assert len([row async for row in cursor.stream("select generate_series(1, 100)", size=10)]) == 100
    async with aclosing(cursor.stream("select generate_series(1, 1000000)")) as rows:
        async for _ in rows:
            break
    assert await one(conn, "select 1") == 1


async def test_server_cursor(conn):
    async with conn.transaction():
        async with conn.cursor("page") as cursor:
            assert type(cursor) is TrioServerCursor
            await cursor.execute("select generate_series(1, 250)")
            assert await cursor.fetchmany(2) == [(1,), (2,)]
            assert len([row async for row in cursor]) == 248
        assert await one(conn, "select count(*) from pg_cursors") == 0


async def test_settings(conn):
    await conn.set_autocommit(False)
    await conn.set_isolation_level(psycopg.IsolationLevel.SERIALIZABLE)
    await conn.set_read_only(True)
    assert await one(conn, "select current_setting('transaction_isolation')") == "serializable"
    with pytest.raises(psycopg.errors.ReadOnlySqlTransaction):
        await conn.execute("create table no ()")
    await conn.rollback()
    assert conn.info.transaction_status == TransactionStatus.IDLE


async def test_notifications_are_refused(conn):
    with pytest.raises(psycopg.NotSupportedError, match="banned"):
        conn.notifies(timeout=1)
    with pytest.raises(psycopg.NotSupportedError, match="banned"):
        conn.add_notify_handler(print)


async def test_tasks_queue_up_for_one_connection(conn):
    answers = []

    async def ask(number):
        answers.append(await one(conn, "select %s::int", number))

    async with trio.open_nursery() as nursery:
        for number in range(20):
            nursery.start_soon(ask, number)
    assert sorted(answers) == list(range(20))


async def test_a_large_parameter_and_a_large_answer(conn):
    assert await one(conn, "select length(%s)", "x" * 20_000_000) == 20_000_000
    assert len(await one(conn, "select repeat('x', 20000000)")) == 20_000_000


async def watch_stalls(stalls, *, task_status):
    """Record how long the event loop was not ours; started once it runs."""
    task_status.started()
    while True:
        before = trio.current_time()
        await trio.sleep(0)
        stalls.append(trio.current_time() - before)


@pytest.mark.parametrize("what", ["copy in", "fetch", "executemany", "stream", "copy out"])
async def test_long_work_lets_other_tasks_run(conn, scratch, what):
    cursor = conn.cursor()
    many = "select generate_series(1, 50000)"
    turns: list[float] = []
    async with trio.open_nursery() as nursery:
        await nursery.start(watch_stalls, turns)
        if what == "copy in":
            async with cursor.copy("copy scratch from stdin") as copy:
                for i in range(50_000):
                    await copy.write(b"%d\n" % i)
        elif what == "copy out":
            async with cursor.copy(f"copy ({many}) to stdout") as copy:
                while await copy.read():
                    pass
        elif what == "executemany":
            await cursor.executemany("select %s::int", ((i,) for i in range(10_000)))
        elif what == "stream":
            assert len([row async for row in cursor.stream(many)]) == 50_000
        else:
            await cursor.execute(many)
            turns.clear()
            assert len([row async for row in cursor]) == 50_000
        nursery.cancel_scope.cancel()
    # Each takes some 30 ms or more without a single wait for the network; a turn per ms is promised.
    assert len(turns) > 10


async def test_an_open_connection_that_is_forgotten_warns_once(pg_dsn):
    async def forget():
        conn = await TrioConnection.connect(pg_dsn)
        await conn.execute("select 1")
        pgconn = conn.pgconn
        del conn
        gc.collect()
        return pgconn

    with pytest.warns(ResourceWarning, match="TrioConnection") as caught:
        pgconn = await forget()
    assert len(caught) == 1
    pgconn.finish()


async def test_a_closed_connection_is_collected(pg_dsn):
    async def use():
        async with await TrioConnection.connect(pg_dsn) as conn:
            async with conn.transaction(), conn.pipeline():
                await conn.execute("select 1")
            await conn.cursor().executemany("select %s", [(1,), (2,)])
        return weakref.ref(conn)

    used = await use()
    await trio.testing.wait_all_tasks_blocked()
    gc.collect()
    assert used() is None
