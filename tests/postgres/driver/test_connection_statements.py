"""What statements return, what is refused, and that a refusal leaves nothing behind."""

import psycopg
import pytest
import trio
from durable_actors._postgres.driver import connection, encode
from durable_actors._postgres.driver.connection import PgConn
from durable_actors._postgres.driver.statement import Statement
from durable_actors.errors import ConfigError, StoreUnavailable


async def test_rows_columns_null_and_tag(conn):
    result = await conn.run(
        Statement("mixed", "select n, nullif(n, 2)::text, '' from generate_series(1, $1::int) n"), [b"2"]
    )
    assert result.rows == [[b"1", b"1", b""], [b"2", None, b""]]
    assert result.tag == "SELECT 2"


async def test_parameters_may_be_null(conn, sql):
    assert (await conn.run(sql.echo, [None])).rows == [[None]]
    assert (await conn.run(sql.echo, [b""])).rows == [[b""]]


async def test_a_statement_is_prepared_once_and_keeps_its_name(conn, sql):
    for _ in range(3):
        await conn.run(sql.echo, [b"x"])
    names = Statement("names", "select name from pg_prepared_statements where name like 'echo%'")
    [[name]] = (await conn.run(names)).rows
    assert name == conn.prepared.names[sql.echo]


async def test_the_same_name_twice_is_two_statements(conn):
    one, two = Statement("same", "select 1"), Statement("same", "select 2")
    first, second, third = await conn.batch([(one, ()), (two, ()), (one, ())])
    assert (first.rows, second.rows, third.rows) == ([[b"1"]], [[b"2"]], [[b"1"]])


async def test_batch_is_one_transaction(conn, rows):
    xid = Statement("xid", "select pg_current_xact_id()")
    first, second = await conn.batch([(xid, ()), (xid, ())])
    assert first.rows == second.rows
    assert (await conn.run(xid)).rows != first.rows
    assert await conn.batch([]) == []


async def test_batch_is_all_or_nothing(conn, rows, watch, sql):
    with pytest.raises(psycopg.errors.UniqueViolation) as caught:
        await conn.batch([(sql.insert, [b"1"]), (sql.insert, [b"1"]), (sql.insert, [b"2"])])
    assert caught.value.diag.constraint_name == "driver_rows_pkey"
    assert "insert_row" in "".join(caught.value.__notes__)
    assert watch.ids() == []
    await conn.batch([(sql.insert, [b"1"]), (sql.insert, [b"2"])])
    assert watch.ids() == [1, 2]


async def test_refused_parse_names_its_statement_and_undoes_the_batch(conn, rows, watch, sql):
    bad = Statement("bad_sql", "selekt 1")
    with pytest.raises(psycopg.errors.SyntaxError) as caught:
        await conn.batch([(sql.insert, [b"1"]), (bad, ()), (sql.insert, [b"2"])])
    assert caught.value.__notes__ == ["while running bad_sql"]
    assert watch.ids() == []
    assert conn.pristine


async def test_too_few_parameters_is_our_mistake_not_an_outage(conn, sql):
    with pytest.raises(psycopg.errors.ProtocolViolation):
        await conn.run(sql.echo, [])
    assert (await conn.run(sql.echo, [b"fine"])).rows == [[b"fine"]]


async def test_a_parameter_that_is_not_bytes_closes_the_connection(conn, sql):
    await conn.run(sql.echo, [b"x"])
    with pytest.raises(TypeError):
        await conn.run(sql.echo, ["text"])
    assert conn.closed


async def test_what_libpq_itself_refuses_is_not_an_outage(conn, sql):
    with pytest.raises(psycopg.OperationalError, match="number of parameters"):
        await conn.run(sql.echo, [b"x"] * 70_000)
    assert conn.closed
    assert not conn.broken


async def test_forgotten_statements_heal(conn, rows, watch, sql):
    await conn.batch([(sql.echo, [b"a"]), (sql.insert, [b"1"])])
    await conn.script("deallocate all")
    assert (await conn.run(sql.echo, [b"b"])).rows == [[b"b"]]
    await conn.script("deallocate all")
    echoed, inserted = await conn.batch([(sql.echo, [b"c"]), (sql.insert, [b"2"])])
    assert (echoed.rows, inserted.tag) == ([[b"c"]], "INSERT 0 1")
    assert watch.ids() == [1, 2]


async def test_a_result_type_that_changed_heals(conn, watch):
    everything = Statement("everything", "select * from driver_wide")
    watch.conn.execute("drop table if exists driver_wide")
    watch.conn.execute("create table driver_wide as select 1 as a")
    assert (await conn.run(everything)).rows == [[b"1"]]
    watch.conn.execute("alter table driver_wide add b text default 'new'")
    assert (await conn.run(everything)).rows == [[b"1", b"new"]]


async def test_a_forgotten_statement_in_a_transaction_heals_next_time(conn, sql):
    await conn.run(sql.echo, [b"x"])
    await conn.script("deallocate all")
    with pytest.raises(psycopg.errors.InvalidSqlStatementName):
        async with conn.transaction():
            await conn.run(sql.echo, [b"x"])
    async with conn.transaction():
        assert (await conn.run(sql.echo, [b"y"])).rows == [[b"y"]]


async def test_script_is_one_transaction(conn, rows, watch):
    await conn.script("insert into driver_rows values (1); insert into driver_rows values (2)")
    with pytest.raises(psycopg.errors.UniqueViolation):
        await conn.script("insert into driver_rows values (3); insert into driver_rows values (1)")
    assert watch.ids() == [1, 2]
    assert conn.pristine


@pytest.mark.parametrize("copy", ["copy driver_rows to stdout", "copy driver_rows from stdin"])
async def test_copy_is_refused_clearly(pg_dsn, rows, copy):
    for way in ("script", "run", "batch"):
        conn = await PgConn.open(pg_dsn)
        with pytest.raises(psycopg.NotSupportedError, match="COPY"):
            if way == "script":
                await conn.script(copy)
            elif way == "run":
                await conn.run(Statement("copy", copy))
            else:
                await conn.batch([(Statement("one", "select 1"), ()), (Statement("copy", copy), ())])
        assert conn.closed


async def test_two_tasks_on_one_connection(conn, rows, watch, nursery, sql):
    answer = []

    async def first():
        answer.append((await conn.run(sql.slow_insert, [b"0.2"])).tag)
        done.set()

    done = trio.Event()
    nursery.start_soon(first)
    await watch.sleeping(conn.pid)
    with pytest.raises(trio.BusyResourceError):
        await conn.run(sql.echo, [b"x"])
    with pytest.raises(trio.BusyResourceError):
        async with conn.transaction():
            pass
    await done.wait()  # the intruder did the first task no harm
    assert answer == ["INSERT 0 1"]
    assert conn.pristine


async def test_twenty_megabytes_each_way(conn):
    big = Statement("big", "select $1::text, length($1::text)")
    text = b"x" * 20_000_000
    [[echoed, length]] = (await conn.run(big, [text])).rows
    assert (echoed == text, length) == (True, b"20000000")


async def test_other_tasks_run_while_a_large_parameter_is_sent(conn, nursery):
    ticks = 0

    async def tick():
        nonlocal ticks
        while True:
            await trio.lowlevel.checkpoint()
            ticks += 1

    length = Statement("length", "select length($1::text)", read_only=True)
    nursery.start_soon(tick)
    await conn.run(length, [b"x" * 20_000_000])
    nursery.cancel_scope.cancel()
    assert ticks > 5


async def test_many_large_answers_while_sending_do_not_deadlock(conn):
    """Both socket buffers fill up: a client that only sends would wait for ever."""
    echo = Statement("echo_big", "select $1::text", read_only=True)
    text = b"y" * 500_000
    with trio.fail_after(30):
        results = await conn.batch([(echo, [text])] * 40)
    assert all(result.rows == [[text]] for result in results)


async def test_text_does_not_depend_on_the_roles_defaults(pg_dsn, watch):
    database = watch.value("select current_database()")
    watch.conn.execute(f"alter database {database} set bytea_output = 'escape'")
    watch.conn.execute(f"alter database {database} set datestyle = 'German'")
    try:
        conn = await PgConn.open(f"{pg_dsn} client_encoding=LATIN1")
    finally:
        watch.conn.execute(f"alter database {database} reset all")
    shape = Statement("shape", "select '\\xff'::bytea, date '2026-11-16', $1::text")
    assert (await conn.run(shape, [encode.text("žluťoučký")])).rows == [
        [b"\\xff", b"2026-11-16", "žluťoučký".encode()]
    ]
    conn.close()


async def test_settings_are_applied_and_a_bad_one_is_named(pg_dsn):
    conn = await PgConn.open(pg_dsn, settings={"application_name": "lane", "timezone": "Asia/Tokyo"})
    show = Statement("show", "select current_setting('application_name'), current_setting('timezone')")
    assert (await conn.run(show)).rows == [[b"lane", b"Asia/Tokyo"]]
    conn.close()
    with pytest.raises(ConfigError, match="no_such_thing"):
        await PgConn.open(pg_dsn, settings={"no_such_thing": "1"})
    with pytest.raises(ConfigError, match="lots"):
        await PgConn.open(pg_dsn, settings={"work_mem": "lots"})


async def test_a_closed_connection_says_so(conn, sql):
    conn.close()
    conn.close()
    assert conn.closed
    assert not conn.pristine
    assert not conn.alive()
    with pytest.raises(StoreUnavailable, match="closed; echo was not sent"):
        await conn.run(sql.echo, [b"x"])
    with pytest.raises(StoreUnavailable):
        async with conn.transaction():
            raise AssertionError("unreachable")


@pytest.mark.parametrize(("at_once", "most"), [(64, 1), (2, 20)])
async def test_what_has_arrived_is_read_without_other_turns_of_the_loop(
    conn, watch, monkeypatch, at_once, most
):
    """100 kB lie in the socket: libpq takes 16 at a time, and each turn of a busy loop may be long."""
    waits = 0
    rows = Statement("rows", "select repeat('x', 90) from generate_series(1, 1000)")
    await conn.run(rows)
    wait_readable = connection.wait_readable

    async def wait(fd: int) -> None:
        nonlocal waits
        waits += 1
        await wait_readable(fd)
        await watch.idle(conn.pid)  # all of it is there

    monkeypatch.setattr(connection, "wait_readable", wait)
    monkeypatch.setattr(connection, "_MAX_READS_PER_WAIT", at_once)
    assert len((await conn.run(rows)).rows) == 1000
    assert waits <= most
    assert waits > 1 or at_once == 64
