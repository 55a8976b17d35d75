"""Cancelled while it waits for, opens, holds or returns a connection: nothing is lost."""

import random

import pytest
import trio
import trio.testing
from durable_actors._postgres.driver.statement import Statement
from durable_actors._postgres.pool.pool import Lane, open_pool
from durable_actors.errors import StoreUnavailable
from tests.kit import open_files
from tests.support.faults import open_proxy

ONE = Statement("one", "select 1", read_only=True)
ECHO = Statement("echo", "select $1::text", read_only=True)
NAP = Statement("nap", "select pg_sleep($1::float8)", read_only=True)


def lane_of(pool):
    [lane] = pool.statistics().lanes
    return lane


async def test_a_thousand_cancelled_waiters(server):
    async with open_pool(server.dsn, lanes=[Lane("a", 2)]) as pool:
        async with pool.acquire("a"), pool.acquire("a"), trio.open_nursery() as nursery:

            async def wait():
                async with pool.acquire("a"):
                    raise AssertionError("unreachable")

            for _ in range(1000):
                nursery.start_soon(wait)
            await trio.testing.wait_all_tasks_blocked()
            assert lane_of(pool).waiting == 1000
            nursery.cancel_scope.cancel()
        now = lane_of(pool)
        assert (now.waiting, now.in_use, now.idle, now.opened) == (0, 0, 2, 2)


@pytest.mark.parametrize("order", ["release first", "cancel first"])
async def test_cancelled_together_with_the_hand_over(server, order):
    """The waiter is given the connection and cancelled in the same instant: it must come back."""
    scope, entered = trio.CancelScope(), []
    async with open_pool(server.dsn, lanes=[Lane("a", 1)]) as pool, trio.open_nursery() as nursery:

        async def wait():
            with scope:
                async with pool.acquire("a") as conn:
                    entered.append(conn)
                    await trio.sleep_forever()

        lease = pool.acquire("a")
        await lease.__aenter__()
        nursery.start_soon(wait)
        await trio.testing.wait_all_tasks_blocked()
        if order == "cancel first":
            scope.cancel()
        await lease.__aexit__(None, None, None)
        scope.cancel()
        await trio.testing.wait_all_tasks_blocked()
        assert len(entered) == (order == "release first")
        assert (lane_of(pool).idle, lane_of(pool).in_use) == (1, 0)
        async with pool.acquire("a") as conn:
            assert (await conn.run(ONE)).rows == [[b"1"]]


async def test_cancelled_while_opening_passes_the_place_on(server):
    async with open_proxy(server.dsn) as proxy:
        async with open_pool(proxy.dsn, lanes=[Lane("a", 1)]) as pool, trio.open_nursery() as nursery:
            proxy.blackhole()
            scope, got = trio.CancelScope(), []

            async def first():
                with scope:
                    async with pool.acquire("a"):
                        raise AssertionError("unreachable")

            async def second():
                async with pool.acquire("a") as conn:
                    got.append((await conn.run(ONE)).rows)

            nursery.start_soon(first)
            await proxy.wait_connections(1)
            nursery.start_soon(second)
            await trio.testing.wait_all_tasks_blocked()
            assert (lane_of(pool).opening, lane_of(pool).waiting) == (1, 1)
            proxy.heal()
            scope.cancel()
        assert got == [[[b"1"]]]
        await proxy.wait_connections(0)


async def test_cancelled_while_holding_gives_back(server):
    async with open_pool(server.dsn, lanes=[Lane("a", 1)]) as pool:
        with trio.CancelScope() as scope:
            async with pool.acquire("a"):
                scope.cancel()
                await trio.sleep_forever()
        with trio.move_on_after(0.02):
            async with pool.acquire("a") as conn, conn.transaction():
                await conn.run(NAP, [b"30"])
        now = lane_of(pool)
        assert (now.idle, now.opened, now.discarded) == (1, 1, 0)


async def test_an_already_cancelled_scope_takes_nothing(server):
    async with open_pool(server.dsn, lanes=[Lane("a", 1)]) as pool:
        with trio.CancelScope() as scope:
            scope.cancel()
            async with pool.acquire("a"):
                raise AssertionError("unreachable")
        assert lane_of(pool).opened == 0


async def test_closing_the_pool_reaches_everybody(server):
    """Holding, waiting, opening and coming late."""
    outcomes = []

    async def use(pool, sleep):
        with pytest.raises(StoreUnavailable) as caught:
            async with pool.acquire("a") as conn:
                await conn.run(NAP, [sleep])
        outcomes.append(str(caught.value))

    async with trio.open_nursery() as nursery:
        async with open_pool(server.dsn, lanes=[Lane("a", 1)]) as pool:
            nursery.start_soon(use, pool, b"0.5")
            await server.has(1, "active")
            nursery.start_soon(use, pool, b"0")
            await trio.testing.wait_all_tasks_blocked()
        async with open_proxy(server.dsn) as proxy:
            async with open_pool(proxy.dsn, lanes=[Lane("a", 1)]) as opening:
                proxy.blackhole()
                nursery.start_soon(use, opening, b"0")
                await proxy.wait_connections(1)
            proxy.heal()
            while len(outcomes) < 3:
                await trio.sleep(0.005)
        nursery.start_soon(use, pool, b"0")
    assert len(outcomes) == 4
    assert "the pool is closed" in outcomes[-1]
    await server.has(0)


@pytest.mark.slow
async def test_ten_thousand_random_cancellations(server):
    """Every follow-up gets its own answer; no connection, backend or descriptor is lost."""
    chance = random.Random(42)
    total, cancelled, asked = 10_000, 0, 0

    async def operation(conn, kind, mine):
        if kind == 0:
            assert (await conn.run(ECHO, [mine])).rows == [[mine]]
        elif kind == 1:
            first, _, last = await conn.batch([(ECHO, [mine]), (NAP, [b"0.0005"]), (ECHO, [mine + b"!"])])
            assert (first.rows, last.rows) == ([[mine]], [[mine + b"!"]])
        elif kind == 2:
            async with conn.transaction():
                assert (await conn.run(ECHO, [mine])).rows == [[mine]]
        else:
            await conn.run(NAP, [b"0.002"])

    async def worker(pool):
        nonlocal total, cancelled, asked
        while total > 0:
            total -= 1
            mine = str(total).encode()
            with trio.CancelScope(deadline=trio.current_time() + chance.random() * 0.0015) as scope:
                async with pool.acquire("a") as conn:
                    await operation(conn, chance.randrange(4), mine)
            cancelled += scope.cancelled_caught
            if scope.cancelled_caught and chance.random() < 0.2:
                async with pool.acquire("a") as conn:
                    assert (await conn.run(ECHO, [mine])).rows == [[mine]]
                asked += 1

    async with open_pool(server.dsn, lanes=[Lane("a", 4)], acquire_timeout=30) as pool:
        async with pool.acquire("a"), pool.acquire("a"), pool.acquire("a"), pool.acquire("a"):
            pass
        files = open_files()
        async with trio.open_nursery() as nursery:
            for _ in range(8):
                nursery.start_soon(worker, pool)
        now = lane_of(pool)
        assert (now.in_use, now.opening, now.waiting) == (0, 0, 0)
        assert (now.idle, now.opened, now.discarded) == (4, 4, 0)
        assert open_files() == files
        await server.has(4, "idle")
        assert len(server.pids()) == 4
    assert cancelled > 3000
    assert asked > 500
    await server.has(0)


async def test_an_error_beside_the_silence_loses_no_connection(server):
    """Time is up, and a task in a nursery of the block fails at that: the error passes, the connection is back."""

    async def fail():
        try:
            await trio.sleep_forever()
        finally:
            raise ValueError("beside it")

    async with open_pool(server.dsn, lanes=[Lane("a", 1)]) as pool:
        with pytest.raises(ExceptionGroup) as caught:
            async with pool.acquire("a", within=0.01), trio.open_nursery() as nursery:
                nursery.start_soon(fail)
                nursery.start_soon(trio.sleep_forever)
        assert caught.group_contains(ValueError)
        assert (lane_of(pool).in_use, lane_of(pool).idle) == (0, 1)
