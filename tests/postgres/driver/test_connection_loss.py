"""The server or the network goes away: "not done" where that is proved, "unknown" where it is not."""

import os
import signal
import tempfile
import uuid
from pathlib import Path

import psycopg
import pytest
import trio
from durable_actors._postgres.driver.connection import PgConn
from durable_actors._postgres.driver.statement import Statement
from durable_actors._postgres.embedded import server as embedded
from durable_actors.errors import CommitUnknown, StoreUnavailable
from tests.kit import until
from tests.support.faults import open_proxy


@pytest.fixture
async def proxied(pg_dsn, rows):
    async with open_proxy(pg_dsn) as proxy:
        conn = await PgConn.open(proxy.dsn)
        yield proxy, conn
        conn.close()


def not_done(error: pytest.ExceptionInfo[StoreUnavailable], conn: PgConn) -> bool:
    return type(error.value) is StoreUnavailable and conn.closed and conn.broken


async def terminate_when_sleeping(watch, conn):
    await watch.sleeping(conn.pid)
    watch.terminate(conn.pid)


# ---------------------------------------------------------------------- the server says so


async def test_backend_terminated_in_a_statement_is_not_done(conn, rows, watch, nursery, sql):
    nursery.start_soon(terminate_when_sleeping, watch, conn)
    with pytest.raises(StoreUnavailable, match=r"slow_insert, nothing was done.*57P01") as caught:
        await conn.run(sql.slow_insert, [b"30"])
    assert not_done(caught, conn)
    assert watch.ids() == []


async def test_backend_terminated_in_a_batch_is_not_done(conn, rows, watch, nursery, sql):
    nursery.start_soon(terminate_when_sleeping, watch, conn)
    with pytest.raises(StoreUnavailable) as caught:
        await conn.batch([(sql.insert, [b"1"]), (sql.insert, [b"2"]), (sql.sleep, [b"30"])])
    assert not_done(caught, conn)
    assert watch.ids() == []


async def test_backend_terminated_while_the_batch_commits_is_unknown(conn, rows, watch, nursery, sql):
    """Every statement was completed: from here on only the server knows. (Here, it did not.)"""
    await conn.run(sql.insert, [b"1"])
    nursery.start_soon(terminate_when_sleeping, watch, conn)
    # The first answer is larger than the server's buffer, so that the client has seen every completion.
    big = Statement("big", "select repeat('x', 100000)")
    with pytest.raises(StoreUnavailable) as caught:
        await conn.batch([(sql.insert, [b"-1"]), (big, ())])
    assert conn.closed
    assert isinstance(caught.value, CommitUnknown) or "nothing was done" in str(caught.value)
    assert watch.ids() == [1]


async def test_backend_terminated_in_a_transactions_body_is_not_done(conn, rows, watch, nursery, sql):
    nursery.start_soon(terminate_when_sleeping, watch, conn)
    with pytest.raises(StoreUnavailable) as caught:
        async with conn.transaction():
            await conn.run(sql.insert, [b"1"])
            await conn.run(sql.sleep, [b"30"])
    assert not_done(caught, conn)
    assert watch.ids() == []


async def test_backend_terminated_in_commit_is_unknown(conn, rows, watch, nursery, sql):
    nursery.start_soon(terminate_when_sleeping, watch, conn)
    with pytest.raises(CommitUnknown, match=r"COMMIT.*57P01"):
        async with conn.transaction():
            await conn.run(sql.insert, [b"-1"])
    assert conn.closed


async def test_backend_terminated_in_a_script_is_unknown(conn, rows, watch, nursery):
    """A script may hold its own COMMITs, and completes after it has committed."""
    nursery.start_soon(terminate_when_sleeping, watch, conn)
    with pytest.raises(CommitUnknown):
        await conn.script("begin; insert into driver_rows values (1); commit; select pg_sleep(30)")
    assert watch.ids() == [1]


async def test_backend_terminated_while_idle_is_seen_without_a_round_trip(conn, watch, sql):
    assert conn.alive()
    watch.terminate(conn.pid)
    await until(lambda: not conn.alive())
    assert conn.closed
    assert conn.broken


async def test_backend_terminated_while_idle_and_used_is_not_done(conn, rows, watch, sql):
    await conn.run(sql.insert, [b"1"])
    watch.terminate(conn.pid)
    with pytest.raises(StoreUnavailable) as caught:
        await conn.run(sql.insert, [b"2"])
    assert not_done(caught, conn)
    assert watch.ids() == [1]


async def test_a_server_that_became_a_standby_is_left(conn, rows, watch, sql):
    """What a write meets after a failover, on a connection to the old primary."""
    await conn.script("set session characteristics as transaction read only")
    with pytest.raises(StoreUnavailable, match="25006") as caught:
        await conn.run(sql.insert, [b"1"])
    assert not_done(caught, conn)


async def test_statement_timeout_is_the_statements_error(conn, sql):
    await conn.script("set statement_timeout = '20ms'")
    with pytest.raises(psycopg.errors.QueryCanceled):
        await conn.run(sql.sleep, [b"30"])
    assert conn.pristine


# ---------------------------------------------------------------------- the network goes away


async def test_lost_reply_is_unknown_and_was_done(proxied, watch, sql):
    proxy, conn = proxied
    await conn.run(sql.insert, [b"1"])
    for ending in ("close", "reset"):
        proxy.lose_reply(after=b"insert_row", then=ending)
        with pytest.raises(CommitUnknown, match=r"insert_row.*it may have happened or not"):
            await conn.run(sql.insert, [b"2" if ending == "close" else b"3"])
        assert conn.broken
        conn = await PgConn.open(proxy.dsn)
    conn.close()
    assert watch.ids() == [1, 2, 3]


async def test_lost_reply_of_a_read_is_not_done(proxied, sql):
    proxy, conn = proxied
    proxy.lose_reply(after=b"echo")
    with pytest.raises(StoreUnavailable) as caught:
        await conn.run(sql.echo, [b"x"])
    assert not_done(caught, conn)


async def test_lost_reply_in_a_transactions_body_is_not_done(proxied, watch, sql):
    proxy, conn = proxied
    proxy.lose_reply(after=b"insert_row")
    with pytest.raises(StoreUnavailable) as caught:
        async with conn.transaction():
            await conn.run(sql.insert, [b"1"])
    assert not_done(caught, conn)
    await watch.gone(conn.pid)
    assert watch.ids() == []


async def test_lost_reply_to_commit_is_unknown_and_was_done(proxied, watch, sql):
    proxy, conn = proxied
    proxy.lose_reply(after=b"COMMIT")
    with pytest.raises(CommitUnknown):
        async with conn.transaction():
            await conn.run(sql.insert, [b"1"])
    assert watch.ids() == [1]


async def test_lost_request_to_commit_is_unknown_and_was_not_done(proxied, watch, sql):
    proxy, conn = proxied
    proxy.lose_request(before=b"COMMIT")
    with pytest.raises(CommitUnknown):
        async with conn.transaction():
            await conn.run(sql.insert, [b"1"])
    await watch.gone(conn.pid)
    assert watch.ids() == []


async def test_lost_reply_of_a_batch_is_unknown(proxied, watch, sql):
    proxy, conn = proxied
    proxy.lose_reply(after=b"insert_row")
    with pytest.raises(CommitUnknown):
        await conn.batch([(sql.insert, [b"1"]), (sql.insert, [b"2"])])
    assert watch.ids() == [1, 2]


async def test_reset_before_anything_was_sent_is_not_done(proxied, sql):
    """Known before the statement is sent: not "unknown"."""
    proxy, conn = proxied
    await conn.run(sql.insert, [b"1"])
    proxy.reset()
    await proxy.wait_connections(0)
    with pytest.raises(StoreUnavailable) as caught:
        await conn.run(sql.insert, [b"2"])
    assert not_done(caught, conn)


async def test_reset_while_sending_is_not_done(proxied, nursery, sql):
    proxy, conn = proxied
    proxy.throttle(1_000_000, direction="to_server")
    [half] = proxy.connections
    sent = half.bytes_to_server

    async def reset():
        while half.bytes_to_server < sent + 50_000:
            await trio.sleep(0.005)
        proxy.reset()

    nursery.start_soon(reset)
    upsert = Statement("upsert", "insert into driver_rows select length($1::text)")
    with pytest.raises(StoreUnavailable) as caught:
        await conn.run(upsert, [b"x" * 20_000_000])
    assert not_done(caught, conn)


async def test_lost_while_connecting_is_not_unknown(pg_dsn):
    async with open_proxy(pg_dsn) as proxy:
        proxy.lose_reply(after=b"set_config")
        with pytest.raises(StoreUnavailable, match="cannot connect") as caught:
            await PgConn.open(proxy.dsn)
        assert type(caught.value) is StoreUnavailable


# ---------------------------------------------------------------------- the whole server dies


@pytest.fixture
async def own_server():
    """A server that a test may kill. Its supervisor deletes the directory."""
    directory = Path(tempfile.gettempdir()) / f"durable-kill-{uuid.uuid4().hex[:8]}"
    with await trio.to_thread.run_sync(lambda: embedded.start(directory, throwaway=True)) as server:
        yield server


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGQUIT, signal.SIGKILL])
async def test_server_killed_in_mid_query(own_server, how):
    """Fast shutdown, immediate shutdown, kill -9."""
    conn = await PgConn.open(own_server.dsn())
    idle = await PgConn.open(own_server.dsn())
    await conn.script("create table driver_rows (id int)")
    postmaster = embedded.status(own_server.data_dir).postmaster
    assert postmaster
    sleepers = Statement("sleepers", "select count(*) from pg_stat_activity where wait_event = 'PgSleep'")

    async def kill():
        while (await idle.run(sleepers)).rows == [[b"0"]]:
            await trio.sleep(0.003)
        os.kill(postmaster, how)

    slow = Statement("slow", "insert into driver_rows select 1 from pg_sleep(60)")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(kill)
        with trio.fail_after(20), pytest.raises(StoreUnavailable):
            await conn.run(slow)
    assert conn.closed
    await until(lambda: not idle.alive())
