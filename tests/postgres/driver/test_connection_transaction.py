"""Explicit transactions: committed when the body ends, rolled back when it raises, never left open."""

import psycopg
import pytest
import trio
from durable_actors._postgres.driver.statement import Statement
from durable_actors.errors import StoreUnavailable


async def test_commits(conn, rows, watch, sql):
    async with conn.transaction() as same:
        assert same is conn
        assert conn.in_transaction
        await conn.run(sql.insert, [b"1"])
        assert watch.ids() == []
        await conn.batch([(sql.insert, [b"2"]), (sql.insert, [b"3"])])
        assert watch.ids() == []
    assert watch.ids() == [1, 2, 3]
    assert not conn.in_transaction
    assert conn.pristine


async def test_rolls_back_and_lets_the_error_through(conn, rows, watch, sql):
    with pytest.raises(ValueError, match="mine"):
        async with conn.transaction():
            await conn.run(sql.insert, [b"1"])
            raise ValueError("mine")
    assert watch.ids() == []
    assert conn.pristine


async def test_a_refused_statement_rolls_back(conn, rows, watch, sql):
    with pytest.raises(psycopg.errors.UniqueViolation):
        async with conn.transaction():
            await conn.run(sql.insert, [b"1"])
            await conn.run(sql.insert, [b"1"])
    assert watch.ids() == []
    assert conn.pristine


async def test_a_swallowed_error_does_not_pass_for_a_commit(conn, rows, watch, sql):
    with pytest.raises(psycopg.errors.InFailedSqlTransaction, match="rolled back"):
        async with conn.transaction():
            await conn.run(sql.insert, [b"1"])
            with pytest.raises(psycopg.errors.UniqueViolation):
                await conn.run(sql.insert, [b"1"])
    assert watch.ids() == []
    assert conn.pristine


async def test_a_constraint_that_fails_at_commit(conn, watch):
    watch.conn.execute("drop table if exists driver_deferred")
    watch.conn.execute("create table driver_deferred (id int unique deferrable initially deferred)")
    insert = Statement("insert_deferred", "insert into driver_deferred values ($1::int)")
    twice = Statement("insert_twice", "insert into driver_deferred values (1), (1)")

    with pytest.raises(psycopg.errors.UniqueViolation) as caught:
        async with conn.transaction():
            await conn.run(insert, [b"1"])
            await conn.run(insert, [b"1"])
    assert caught.value.__notes__ == ["while running COMMIT"]
    assert conn.pristine

    # Outside a transaction it fails at the Sync, after every statement was completed: one result too many.
    for _ in range(2):
        with pytest.raises(psycopg.errors.UniqueViolation):
            await conn.run(twice)
        with pytest.raises(psycopg.errors.UniqueViolation, match="duplicate key") as caught:
            await conn.batch([(insert, [b"1"]), (insert, [b"1"])])
    assert caught.value.__notes__ == ["while running the commit of insert_deferred"]
    assert conn.pristine
    assert watch.value("select count(*) from driver_deferred") == 0
    assert (await conn.run(insert, [b"1"])).tag == "INSERT 0 1"


async def test_modes(conn):
    level = Statement("level", "select current_setting('transaction_isolation')", read_only=True)
    async with conn.transaction(begin="BEGIN ISOLATION LEVEL SERIALIZABLE"):
        assert (await conn.run(level)).rows == [[b"serializable"]]


async def test_a_refused_begin(conn):
    with pytest.raises(psycopg.errors.SyntaxError):
        async with conn.transaction(begin="BEGIN NONSENSE"):
            raise AssertionError("unreachable")
    assert conn.pristine


async def test_transactions_do_not_nest(conn, rows, watch, sql):
    async with conn.transaction():
        await conn.run(sql.insert, [b"1"])
        with pytest.raises(RuntimeError, match="nest"):
            async with conn.transaction():
                raise AssertionError("unreachable")
        await conn.run(sql.insert, [b"2"])
    assert watch.ids() == [1, 2]


async def test_a_body_that_leaves_a_statement_running_is_closed_not_committed(conn, rows, watch, sql):
    """Nobody may wait for that statement: its task and this one would share a connection."""

    async def stray():
        with pytest.raises(StoreUnavailable):
            await conn.run(sql.sleep, [b"30"])

    async with trio.open_nursery() as nursery:
        with pytest.raises(trio.BusyResourceError):
            async with conn.transaction():
                await conn.run(sql.insert, [b"1"])
                nursery.start_soon(stray)
                await watch.sleeping(conn.pid)
        assert conn.closed
    await watch.gone(conn.pid)  # the server stops by itself, long before the 30 seconds
    assert watch.ids() == []
