"""The server or the network fails: known or unknown fate, bounded time, nothing left behind."""

from __future__ import annotations

import time
from pathlib import Path

import psycopg
import pytest
import trio
import trio.testing
from durable_actors._postgres.trio import wait as trio_wait
from durable_actors._postgres.trio.connection import TrioConnection
from durable_actors.errors import CommitUnknown, StoreUnavailable
from psycopg.pq import TransactionStatus
from tests.support.faults import open_proxy


@pytest.fixture
def impatient(monkeypatch):
    """Half a second instead of several: a dead network is waited for in many tests here."""
    monkeypatch.setattr(trio_wait, "CANCEL_TIMEOUT", 0.3)
    monkeypatch.setattr(trio_wait, "CLEANUP_TIMEOUT", 0.5)


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


# ---------------------------------------------------------------------------------- COMMIT


async def test_reply_lost_after_commit(pg_dsn, probe, scratch):
    async with open_proxy(pg_dsn) as proxy:
        conn = await TrioConnection.connect(proxy.dsn, autocommit=True)
        proxy.lose_reply(after=b"COMMIT")
        with pytest.raises(CommitUnknown) as caught:
            async with conn.transaction():
                await conn.execute("insert into scratch values (1)")
        assert isinstance(caught.value, StoreUnavailable)
        assert isinstance(caught.value.__cause__, psycopg.Error)
        assert conn.closed
    assert probe.value("select count(*) from scratch") == 1  # it was done, this time


async def test_commit_lost_on_its_way(pg_dsn, probe, scratch):
    async with open_proxy(pg_dsn) as proxy:
        conn = await TrioConnection.connect(proxy.dsn)
        await conn.execute("insert into scratch values (1)")
        proxy.lose_request(before=b"COMMIT")
        with pytest.raises(CommitUnknown):
            await conn.commit()
    assert probe.value("select count(*) from scratch") == 0  # and this time not: nobody here can know


async def test_reply_lost_after_the_commit_of_the_connections_block(pg_dsn, scratch):
    async with open_proxy(pg_dsn) as proxy:
        with pytest.raises(CommitUnknown):
            async with await TrioConnection.connect(proxy.dsn) as conn:
                await conn.execute("insert into scratch values (1)")
                proxy.lose_reply(after=b"COMMIT")
        assert conn.closed


async def test_reply_lost_after_a_pipelined_commit(pg_dsn, scratch):
    async with open_proxy(pg_dsn) as proxy:
        conn = await TrioConnection.connect(proxy.dsn, autocommit=True)
        with pytest.raises(CommitUnknown):
            async with conn.pipeline(), conn.transaction():
                await conn.execute("insert into scratch values (1)")
                proxy.lose_reply(after=b"COMMIT")
        assert conn.closed


async def test_a_session_that_ended_before_commit_is_known_not_to_have_committed(pg_dsn, probe, scratch):
    for explicit in (False, True):
        conn = await TrioConnection.connect(pg_dsn)
        await conn.execute("insert into scratch values (1)")
        if not explicit:
            await conn.rollback()
        with pytest.raises(psycopg.errors.AdminShutdown):
            if explicit:
                await end(conn, probe)
                await conn.commit()
            else:
                async with conn.transaction():
                    await conn.execute("insert into scratch values (1)")
                    await end(conn, probe)
        assert conn.closed
    assert probe.value("select count(*) from scratch") == 0


async def end(conn, probe):
    pid = conn.info.backend_pid
    probe.conn.execute("select pg_terminate_backend(%s)", [pid])
    await probe.eventually("select not exists (select from pg_stat_activity where pid = %s)", pid)
    await trio.lowlevel.wait_readable(conn.fileno())


async def test_a_refused_commit_is_the_servers_error(conn, scratch):
    await conn.execute("create table parent (id int primary key)")
    try:
        await conn.execute("create temp table u (id int unique deferrable initially deferred)")
        with pytest.raises(psycopg.errors.UniqueViolation):
            async with conn.transaction():
                await conn.execute("insert into u values (1), (1)")
        assert conn.info.transaction_status == TransactionStatus.IDLE
    finally:
        await conn.execute("drop table parent")


async def test_a_failed_transaction_does_not_pretend_to_commit(conn, probe, scratch):
    with pytest.raises(psycopg.errors.InFailedSqlTransaction):
        async with conn.transaction():
            await conn.execute("insert into scratch values (1)")
            with trio.move_on_after(0.05):
                await conn.execute("select pg_sleep(30)")
    assert conn.info.transaction_status == TransactionStatus.IDLE
    await conn.set_autocommit(False)
    await conn.execute("insert into scratch values (1)")
    with pytest.raises(psycopg.errors.DivisionByZero):
        await conn.execute("select 1/0")
    with pytest.raises(psycopg.errors.InFailedSqlTransaction):
        await conn.commit()
    assert conn.info.transaction_status == TransactionStatus.IDLE
    assert probe.value("select count(*) from scratch") == 0


async def test_a_failed_savepoint_leaves_the_outer_block_usable(conn, probe, scratch):
    async with conn.transaction():
        with pytest.raises(psycopg.errors.InFailedSqlTransaction):
            async with conn.transaction():
                await conn.execute("insert into scratch values (1)")
                with pytest.raises(psycopg.errors.DivisionByZero):
                    await conn.execute("select 1/0")
        await conn.execute("insert into scratch values (2)")
    assert probe.value("select array_agg(id) from scratch") == [2]


# ---------------------------------------------------------------------------------- the server ends


async def test_backend_terminated_in_a_query(conn, probe):
    async with trio.open_nursery() as nursery:

        async def wait():
            with pytest.raises(psycopg.errors.AdminShutdown):
                await conn.execute("select pg_sleep(30)")

        nursery.start_soon(wait)
        await probe.busy(conn)
        probe.conn.execute("select pg_terminate_backend(%s)", [conn.info.backend_pid])
    assert conn.broken


async def test_backend_terminated_while_idle(conn, probe):
    await end(conn, probe)
    with pytest.raises(psycopg.OperationalError):
        await conn.execute("select 1")
    assert conn.broken
    with pytest.raises(psycopg.OperationalError, match=r"closed|lost"):
        await conn.execute("select 1")


@pytest.mark.parametrize("what", ["copy in", "pipeline", "stream", "transaction"])
async def test_connection_reset_in_the_middle(pg_dsn, scratch, what):
    async with open_proxy(pg_dsn) as proxy:
        conn = await TrioConnection.connect(proxy.dsn, autocommit=True)
        with pytest.raises(psycopg.OperationalError):
            if what == "copy in":
                async with conn.cursor().copy("copy scratch from stdin") as copy:
                    await copy.write("1\n")
                    proxy.reset()
                    await copy.write("2\n")
            elif what == "pipeline":
                async with conn.pipeline() as pipeline:
                    await conn.execute("select 1")
                    proxy.reset()
                    await pipeline.sync()
            elif what == "stream":
                async for _ in conn.cursor().stream("select generate_series(1, 100000000)"):
                    proxy.reset()
            else:
                async with conn.transaction():
                    proxy.reset()
                    await conn.execute("insert into scratch values (1)")
        assert conn.closed


# ---------------------------------------------------------------------------------- the network is dead


async def stuck_query(conn):
    await conn.execute("select 1")


async def stuck_begin(conn):
    async with conn.transaction():
        pass


async def stuck_pipeline(conn):
    async with conn.pipeline():
        await (await conn.execute("select 1")).fetchone()


async def stuck_copy(conn):
    async with conn.cursor().copy("copy scratch from stdin") as copy:
        await copy.write("1\n")


async def stuck_connection_block(conn):
    async with conn:
        await conn.execute("select 1")


@pytest.mark.parametrize(
    "stuck", [stuck_query, stuck_begin, stuck_pipeline, stuck_copy, stuck_connection_block]
)
async def test_half_open_is_bounded(pg_dsn, scratch, impatient, stuck):
    async with open_proxy(pg_dsn) as proxy:
        conn = await TrioConnection.connect(proxy.dsn, autocommit=True)
        proxy.blackhole()
        started = time.monotonic()
        with trio.move_on_after(0.1) as scope:
            await stuck(conn)
        assert scope.cancelled_caught
        assert time.monotonic() - started < 2
        assert conn.closed
        proxy.reset()


async def test_a_rollback_into_a_dead_network_is_bounded(pg_dsn, scratch, impatient):
    async with open_proxy(pg_dsn) as proxy:
        conn = await TrioConnection.connect(proxy.dsn, autocommit=True)
        started = time.monotonic()
        with pytest.raises(ZeroDivisionError):
            async with conn.transaction():
                proxy.blackhole()
                raise ZeroDivisionError
        assert time.monotonic() - started < 2
        assert conn.closed
        proxy.reset()


@pytest.mark.slow
async def test_cancelled_with_latency_still_settles(pg_dsn, probe, scratch):
    # BEGIN, Parse and COMMIT are on their way for 60 ms: the cancellation comes in the middle of each.
    async with open_proxy(pg_dsn) as proxy:
        conn = await TrioConnection.connect(proxy.dsn, autocommit=True, prepare_threshold=0)
        proxy.latency(0.03)
        for after in (0.03, 0.09, 0.15, 0.21, 0.27):
            with trio.move_on_after(after):
                async with conn.transaction():
                    await conn.execute("insert into scratch values (%s)", [1])
                    await conn.execute("insert into scratch values (%s)", [-1])
            assert not conn.closed
            assert conn.info.transaction_status == TransactionStatus.IDLE
            assert await (await conn.execute("select %s::int", [7])).fetchone() == (7,)
        await conn.close()
    assert probe.value("select count(*) from scratch") == 0


async def test_an_insert_is_not_sent_after_its_parse_was_cancelled(pg_dsn, probe, scratch):
    # psycopg on asyncio sends and commits it: the interrupted generator is resumed.
    async with open_proxy(pg_dsn) as proxy:
        conn = await TrioConnection.connect(proxy.dsn, autocommit=True)
        proxy.latency(0.05)
        with trio.move_on_after(0.02) as scope:
            await conn.execute("insert into scratch values (%s)", [1], prepare=True)
        assert scope.cancelled_caught
        await conn.execute("select 1")
        await conn.close()
    assert probe.value("select count(*) from scratch") == 0


# ---------------------------------------------------------------------------------- connecting


async def test_connect_to_a_deaf_server_is_cancelled_at_once(pg_dsn):
    async with open_proxy(pg_dsn) as proxy:
        proxy.blackhole()
        started = time.monotonic()
        with trio.move_on_after(0.1) as scope:
            await TrioConnection.connect(proxy.dsn, connect_timeout=2)
        assert scope.cancelled_caught
        assert time.monotonic() - started < 1
        proxy.reset()


async def test_cancelled_connects_leave_nothing_open(pg_dsn, probe):
    async def connect(delay):
        with trio.move_on_after(delay):
            await (await TrioConnection.connect(pg_dsn, application_name="cancelled")).close()

    await connect(10)  # what the first connect opens for good
    before = open_descriptors()
    async with trio.open_nursery() as nursery:
        for number in range(60):
            nursery.start_soon(connect, number / 4000)
    with trio.fail_after(10):  # abandoned threads finish by themselves; nobody hears of it
        while open_descriptors() > before or probe.value(
            "select count(*) from pg_stat_activity where application_name = 'cancelled'"
        ):
            await trio.sleep(0.01)
