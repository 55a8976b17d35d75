"""Unwinding in a cancelled scope: what is true when a block ends, and what takes the place of what."""

from __future__ import annotations

import time

import psycopg
import pytest
import trio
from durable_actors._postgres.driver.waiting import send_cancel
from durable_actors._postgres.trio import wait as trio_wait
from durable_actors._postgres.trio.connection import TrioConnection
from tests.postgres.trio.kit import SLEEP, answers, execute


async def test_a_block_whose_scope_is_cancelled_at_its_end_is_rolled_back(conn, probe, scratch):
    for nested in (False, True):
        with trio.CancelScope() as scope:
            async with conn.transaction():
                await conn.execute("insert into scratch values (1)")
                if nested:
                    async with conn.transaction():
                        await conn.execute("insert into scratch values (2)")
                        scope.cancel()
                scope.cancel()
        assert scope.cancelled_caught
        await answers(conn)
    with trio.CancelScope() as scope:
        async with conn.cursor().copy("copy scratch from stdin") as copy:
            await copy.write("1\n")
            scope.cancel()
    assert scope.cancelled_caught
    await answers(conn)
    with trio.CancelScope() as scope:
        async with conn.pipeline():
            scope.cancel()
    assert scope.cancelled_caught
    await answers(conn)
    assert probe.ids() == []


async def test_a_savepoint_timed_out_leaves_the_outer_block_usable(conn, probe, scratch):
    async with conn.transaction():
        await conn.execute("insert into scratch values (1)")
        with trio.move_on_after(0.05):
            async with conn.transaction():
                await conn.execute("insert into scratch values (2)")
                await conn.execute(SLEEP)
        await conn.execute("insert into scratch values (3)")
    assert probe.ids() == [1, 3]


async def test_the_connections_own_block_rolls_back_and_closes(pg_dsn, probe, scratch):
    conn = await TrioConnection.connect(pg_dsn)
    pid = conn.info.backend_pid
    async with trio.open_nursery() as nursery:

        async def block():
            async with conn:
                await conn.execute("insert into scratch values (1)")
                await conn.execute(SLEEP)

        nursery.start_soon(block)
        await probe.busy(conn)
        nursery.cancel_scope.cancel()
    assert nursery.cancel_scope.cancelled_caught
    assert conn.closed
    await probe.eventually("select not exists (select from pg_stat_activity where pid = %s)", pid)
    assert probe.ids() == []


# ---------------------------------------------------------------------------------- before anything is sent


async def test_in_a_cancelled_scope_nothing_is_sent(conn, probe, scratch):
    async def fill():
        await conn.cursor().executemany("insert into scratch values (%s)", [(1,)])

    async def copy():
        async with conn.cursor().copy("copy scratch from stdin") as copy:
            await copy.write("1\n")

    async def block():
        async with conn.transaction():
            await conn.execute("insert into scratch values (1)")

    async def insert():
        await conn.execute("insert into scratch values (1)")

    for operation in (insert, block, fill, copy):
        with trio.CancelScope() as scope:
            scope.cancel()
            await operation()
        assert scope.cancelled_caught
        await answers(conn)
    assert probe.ids() == []


async def test_cancelled_while_waiting_for_the_lock(conn, probe):
    async with trio.open_nursery() as nursery:
        nursery.start_soon(execute, conn)
        await probe.busy(conn)
        with trio.move_on_after(0.02) as scope:
            await conn.execute("select 1")
        assert scope.cancelled_caught
        nursery.cancel_scope.cancel()
    await answers(conn)


async def test_an_answered_statement_is_not_lost_to_a_cancellation(conn):
    # Rule 3: what has ended is returned, even when the scope was cancelled by then.
    with trio.CancelScope() as scope:
        cursor = await conn.execute("select 1")
        conn._checkpointed_at = 0.0
        async with conn.pipeline():
            scope.cancel()
        pytest.fail("not reached")
    assert await cursor.fetchone() == (1,)
    await answers(conn)


async def test_prepared_statements_survive_a_cancelled_deallocate(conn, cancelled):
    await conn.execute("select 1 + %s", [1], prepare=True)
    await cancelled(conn, execute)
    await conn.execute("select 1 + %s", [1], prepare=True)
    await answers(conn)


# ---------------------------------------------------------------------------------- errors and ends


async def test_errors_of_unwinding_do_not_replace_cancelled(conn, probe, scratch):
    with trio.CancelScope() as scope:
        async with conn.transaction():
            await conn.execute("insert into scratch values (1)")
            probe.conn.execute("select pg_terminate_backend(%s)", [conn.info.backend_pid])
            scope.cancel()
            await trio.sleep_forever()
    assert scope.cancelled_caught
    assert conn.closed


async def test_blocks_left_out_of_order_while_cancelled_close_the_connection(conn):
    with trio.CancelScope() as scope:
        outer, inner = conn.transaction(), conn.transaction()
        await outer.__aenter__()
        await inner.__aenter__()
        scope.cancel()
        try:
            await trio.sleep_forever()
        except trio.Cancelled as cancelled:
            for block in (outer, inner):
                swallowed = await block.__aexit__(type(cancelled), cancelled, None)
                if swallowed:
                    pytest.fail("a Cancelled was lost")
            raise
    assert scope.cancelled_caught
    assert conn.closed


async def test_an_error_of_the_body_survives_its_rollback_in_a_cancelled_scope(conn):
    with trio.CancelScope() as scope, pytest.raises(ZeroDivisionError):
        async with conn.transaction():
            scope.cancel()
            raise ZeroDivisionError
    await answers(conn)


async def in_pipeline(conn):
    async with conn.pipeline():
        await (await conn.execute(SLEEP)).fetchone()


async def in_body_of_pipeline(conn):
    async with conn.pipeline():
        await conn.execute(SLEEP)
        await trio.sleep_forever()


@pytest.mark.parametrize("operation", [execute, in_pipeline, in_body_of_pipeline])
async def test_a_cancel_request_that_came_too_early_is_repeated(conn, cancelled, monkeypatch, operation):
    # The request may overtake the statement; an idle server drops it. Here the first one is lost for sure.
    requests = []

    async def lose_the_first(pgconn):
        requests.append(pgconn)
        if len(requests) > 1:
            await send_cancel(pgconn)

    monkeypatch.setattr(trio_wait, "send_cancel", lose_the_first)
    await cancelled(conn, operation)
    assert len(requests) == 1


async def test_close_wakes_the_task_that_waits(conn, probe):
    async with trio.open_nursery() as nursery:

        async def wait():
            with pytest.raises(psycopg.OperationalError, match="closed"):
                await conn.execute("select pg_sleep(0.5)")

        nursery.start_soon(wait)
        await probe.busy(conn)
        await conn.close()


async def test_cancel_safe_stops_the_query_of_another_task(conn, probe):
    async with trio.open_nursery() as nursery:

        async def wait():
            with pytest.raises(psycopg.errors.QueryCanceled):
                await conn.execute(SLEEP)

        nursery.start_soon(wait)
        await probe.busy(conn)
        await conn.cancel_safe()
    await answers(conn)


async def test_unwinding_that_waits_for_another_task_is_bounded(conn, probe, monkeypatch):
    monkeypatch.setattr(trio_wait, "CANCEL_TIMEOUT", 0.2)
    async with trio.open_nursery() as nursery:

        async def hold():
            with pytest.raises(psycopg.OperationalError):
                await conn.execute("select pg_sleep(1)")

        with trio.CancelScope() as scope:
            async with conn.transaction():
                nursery.start_soon(hold)
                await probe.busy(conn)
                started = time.monotonic()
                scope.cancel()
                await trio.sleep_forever()
        assert time.monotonic() - started < 0.9
    assert conn.closed
