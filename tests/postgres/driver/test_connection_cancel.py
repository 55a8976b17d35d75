"""Cancelled at every stage: in bounded time, nothing left running, the connection pristine or closed."""

import signal
from collections.abc import Awaitable, Callable

import pytest
import trio
import trio.testing
from durable_actors._postgres.driver import waiting
from durable_actors._postgres.driver.connection import PgConn
from durable_actors._postgres.driver.statement import Statement
from durable_actors.errors import StoreUnavailable
from tests.support.faults import open_proxy


async def sleep_in_run(conn, sql):
    await conn.run(sql.sleep, [b"30"])


async def sleep_in_batch(conn, sql):
    await conn.batch([(sql.insert, [b"1"]), (sql.sleep, [b"30"]), (sql.insert, [b"2"])])


async def sleep_in_script(conn, sql):
    await conn.script("insert into driver_rows values (1); select pg_sleep(30)")


async def sleep_in_transaction_body(conn, sql):
    async with conn.transaction():
        await conn.run(sql.insert, [b"1"])
        await conn.run(sql.sleep, [b"30"])


async def sleep_in_batch_in_transaction(conn, sql):
    async with conn.transaction():
        await conn.batch([(sql.insert, [b"1"]), (sql.sleep, [b"30"])])


async def sleep_in_commit(conn, sql):
    async with conn.transaction():
        await conn.run(sql.insert, [b"-1"])  # the deferred trigger sleeps in COMMIT


async def sleep_in_a_batchs_commit(conn, sql):
    await conn.batch([(sql.insert, [b"-1"]), (sql.insert, [b"2"])])  # the trigger sleeps at the Sync


async def sleep_in_begin(conn, sql):
    async with conn.transaction(begin="do $$ begin perform pg_sleep(30); end $$"):
        raise AssertionError("unreachable")


STAGES: list[Callable[..., Awaitable[None]]] = [
    sleep_in_run,
    sleep_in_batch,
    sleep_in_script,
    sleep_in_transaction_body,
    sleep_in_batch_in_transaction,
    sleep_in_commit,
    sleep_in_a_batchs_commit,
    sleep_in_begin,
]


@pytest.mark.parametrize("warm", [False, True], ids=["first use", "prepared"])
@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.__name__)
async def test_the_connection_is_saved_and_nothing_was_done(conn, rows, watch, sql, stage, warm, nursery):
    if warm:
        await conn.batch([(sql.sleep, [b"0"]), (sql.echo, [b""])])
    cancelled = False
    with trio.CancelScope() as scope:

        async def cancel_when_sleeping():
            await watch.sleeping(conn.pid)
            scope.cancel()

        nursery.start_soon(cancel_when_sleeping)
        try:
            await stage(conn, sql)
        except trio.Cancelled:
            cancelled = True
            raise
    assert cancelled
    assert scope.cancelled_caught
    assert conn.pristine
    assert (await conn.run(sql.echo, [b"mine"])).rows == [[b"mine"]]
    assert watch.ids() == []
    await watch.idle(conn.pid)


async def test_an_already_cancelled_scope_sends_nothing(conn, rows, watch, sql):
    with trio.CancelScope() as scope:
        scope.cancel()
        await conn.run(sql.insert, [b"1"])
    assert scope.cancelled_caught
    with trio.CancelScope() as scope:
        scope.cancel()
        async with conn.transaction():
            raise AssertionError("unreachable")
    assert conn.pristine
    assert watch.ids() == []


async def test_a_body_that_is_cancelled_while_it_does_something_else_is_rolled_back(conn, rows, watch, sql):
    with trio.CancelScope() as scope:
        async with conn.transaction():
            await conn.run(sql.insert, [b"1"])
            scope.cancel()
            await trio.sleep_forever()
    assert conn.pristine
    assert not conn.in_transaction
    assert watch.ids() == []


async def test_cancelled_just_before_commit_does_not_commit(conn, rows, watch, sql):
    with trio.CancelScope() as scope:
        async with conn.transaction():
            await conn.run(sql.insert, [b"1"])
            scope.cancel()
    assert scope.cancelled_caught
    assert conn.pristine
    assert watch.ids() == []


async def test_cancelled_while_sending_a_large_parameter_closes(pg_dsn, watch, sql):
    async with open_proxy(pg_dsn) as proxy:
        conn = await PgConn.open(proxy.dsn)
        [half] = proxy.connections
        proxy.throttle(1_000_000, direction="to_server")
        sent = half.bytes_to_server
        with trio.CancelScope() as scope:

            async def cancel_when_half_sent(task_status=trio.TASK_STATUS_IGNORED):
                task_status.started()
                while half.bytes_to_server < sent + 50_000:
                    await trio.sleep(0.005)
                proxy.heal()
                scope.cancel()

            async with trio.open_nursery() as nursery:
                await nursery.start(cancel_when_half_sent)
                await conn.run(sql.echo, [b"x" * 20_000_000])
        assert scope.cancelled_caught
        assert conn.closed
        assert not conn.broken  # it was our doing, the server is fine
        await watch.gone(conn.pid)


async def test_cancelled_while_fetching_a_large_result(pg_dsn, watch, sql):
    many = Statement("many", "select repeat('x', 1000) from generate_series(1, 100000)", read_only=True)
    async with open_proxy(pg_dsn) as proxy:
        conn = await PgConn.open(proxy.dsn)
        [half] = proxy.connections
        proxy.throttle(2_000_000, direction="to_client")
        seen = half.bytes_to_client
        with trio.CancelScope() as scope:

            async def cancel_when_it_flows():
                while half.bytes_to_client < seen + 100_000:
                    await trio.sleep(0.005)
                proxy.heal()
                scope.cancel()

            async with trio.open_nursery() as nursery:
                nursery.start_soon(cancel_when_it_flows)
                await conn.run(many)
        assert scope.cancelled_caught
        assert conn.pristine
        assert (await conn.run(sql.echo, [b"mine"])).rows == [[b"mine"]]
        await watch.idle(conn.pid)
        conn.close()


@pytest.mark.parametrize("fault", ["blackhole", "half_open"])
@pytest.mark.parametrize("where", ["run", "body", "commit"])
async def test_a_deaf_server_costs_a_bounded_time(pg_dsn, rows, sql, monkeypatch, fault, where):
    monkeypatch.setattr(waiting, "CANCEL_TIMEOUT", 0.2)
    async with open_proxy(pg_dsn) as proxy:
        conn = await PgConn.open(proxy.dsn)
        start = trio.current_time()
        with trio.move_on_after(0.1) as scope:
            if where == "run":
                getattr(proxy, fault)()
                await conn.run(sql.echo, [b"x"])
            else:
                async with conn.transaction():
                    await conn.run(sql.insert, [b"1"])
                    getattr(proxy, fault)()
                    if where == "body":
                        await conn.run(sql.echo, [b"x"])
        assert scope.cancelled_caught
        assert conn.closed
        assert conn.broken
        assert trio.current_time() - start < 3  # 0.1 + 0.2 (+ 0.2), on a noisy machine
        proxy.heal()


async def test_deaf_while_rolling_back_is_bounded_too(pg_dsn, rows, sql, monkeypatch):
    monkeypatch.setattr(waiting, "CANCEL_TIMEOUT", 0.2)
    async with open_proxy(pg_dsn) as proxy:
        conn = await PgConn.open(proxy.dsn)
        with pytest.raises(ValueError, match="mine"):
            async with conn.transaction():
                await conn.run(sql.insert, [b"1"])
                proxy.blackhole()
                raise ValueError("mine")
        assert conn.closed
        proxy.heal()


async def test_closing_wakes_the_task_that_waits_for_an_answer(conn, watch, nursery, sql):
    async def close():
        await watch.sleeping(conn.pid)
        conn.close()

    nursery.start_soon(close)
    with pytest.raises(StoreUnavailable):
        await conn.run(sql.sleep, [b"30"])
    assert conn.closed


async def test_closing_wakes_the_task_that_sends(pg_dsn, nursery, sql):
    async with open_proxy(pg_dsn) as proxy:
        conn = await PgConn.open(proxy.dsn)
        proxy.blackhole()

        async def close():
            await trio.testing.wait_all_tasks_blocked(0.05)
            conn.close()

        nursery.start_soon(close)
        with trio.fail_after(10), pytest.raises(StoreUnavailable):
            await conn.run(sql.echo, [b"x" * 20_000_000])
        proxy.heal()


@pytest.mark.parametrize("stage", ["run", "transaction"])
def test_ctrl_c_closes_the_connection(pg_dsn, watch, stage):
    connections = []

    async def main():
        conn = await PgConn.open(pg_dsn)
        connections.append(conn)
        sleep = Statement("sleep", "select pg_sleep(30)")
        trio.lowlevel.spawn_system_task(interrupt, conn)
        if stage == "run":
            await conn.run(sleep)
        else:
            async with conn.transaction():
                await conn.run(sleep)

    async def interrupt(conn):
        await watch.sleeping(conn.pid)  # not in BEGIN: between two statements it is rolled back, and lives
        signal.raise_signal(signal.SIGINT)

    before = signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a background job starts with it ignored
    try:
        with pytest.raises(KeyboardInterrupt):
            trio.run(main)
    finally:
        signal.signal(signal.SIGINT, before)
    [conn] = connections
    assert conn.closed
