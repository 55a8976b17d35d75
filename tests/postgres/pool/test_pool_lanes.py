"""Lanes: their sizes, their order, what goes back and what is discarded."""

import psycopg
import pytest
import trio
import trio.testing
from durable_actors._postgres.driver.statement import Statement
from durable_actors._postgres.pool.pool import Lane, open_pool
from durable_actors.errors import ConfigError, PoolTimeout, StoreUnavailable
from tests.kit import until

ONE = Statement("one", "select 1", read_only=True)
XID = Statement("xid", "select pg_current_xact_id()")


def lane_of(pool, name="a"):
    [found] = [lane for lane in pool.statistics().lanes if lane.name == name]
    return found


async def test_nothing_is_opened_before_it_is_needed_and_what_is_open_is_kept(server):
    async with open_pool(server.dsn, lanes=[Lane("a", 3), Lane("b", 1)]) as pool:
        assert server.pids() == []
        for _ in range(5):
            async with pool.acquire("a") as conn:
                assert (await conn.run(ONE)).rows == [[b"1"]]
        assert server.pids() == [conn.pid]
        assert lane_of(pool).opened == 1
    await server.has(0)


async def test_last_in_first_out(server):
    async with open_pool(server.dsn, lanes=[Lane("a", 2)]) as pool:
        async with pool.acquire("a") as first, pool.acquire("a") as second:
            assert first is not second
        async with pool.acquire("a") as again:  # `first` was given back last
            assert again is first


async def test_a_full_lane_does_not_touch_another(server):
    async with open_pool(server.dsn, lanes=[Lane("a", 1), Lane("b", 1)]) as pool:
        async with pool.acquire("b"):
            pass
        async with pool.acquire("a"):
            pool._acquire_timeout = 0.02  # not earlier: connecting takes as long as it takes
            with pytest.raises(PoolTimeout):
                async with pool.acquire("a"):
                    raise AssertionError("unreachable")
            async with pool.acquire("b") as conn:
                await conn.run(ONE)
        assert len(server.pids()) == 2


async def test_timeout_names_lane_size_waiters_and_option(server):
    lanes = [Lane("claim", 1, option="claim_connections")]
    async with open_pool(server.dsn, lanes=lanes) as pool:
        async with pool.acquire("claim"):
            pool._acquire_timeout = 0.05
            with pytest.raises(PoolTimeout) as caught:
                async with pool.acquire("claim"):
                    raise AssertionError("unreachable")
        assert isinstance(caught.value, StoreUnavailable)
        for part in (
            "lane 'claim'",
            "1 of 1 in use",
            "0 waiting",
            "acquire_timeout=0.05",
            "raise claim_connections",
        ):
            assert part in str(caught.value)
        assert lane_of(pool, "claim").timeouts == 1


async def test_waiting_limit(server):
    lanes = [Lane("a", 1, max_waiting=2)]
    async with open_pool(server.dsn, lanes=lanes) as pool, trio.open_nursery() as nursery:

        async def use():
            async with pool.acquire("a") as conn:
                await conn.run(ONE)

        async with pool.acquire("a"):
            for _ in range(2):
                nursery.start_soon(use)
            await trio.testing.wait_all_tasks_blocked()
            with pytest.raises(PoolTimeout, match="2 callers are waiting already"):
                async with pool.acquire("a"):
                    raise AssertionError("unreachable")


async def test_first_come_first_served(server):
    order = []
    async with open_pool(server.dsn, lanes=[Lane("a", 1)]) as pool, trio.open_nursery() as nursery:

        async def use(n):
            async with pool.acquire("a") as conn:
                order.append(n)
                await conn.run(ONE)

        async with pool.acquire("a"):
            for n in range(20):
                nursery.start_soon(use, n)
                await trio.testing.wait_all_tasks_blocked()
        async with pool.acquire("a"):  # a latecomer does not overtake
            order.append("late")
    assert order == [*range(20), "late"]


async def test_what_is_not_pristine_is_discarded(server):
    async with open_pool(server.dsn, lanes=[Lane("a", 1)]) as pool:
        async with pool.acquire("a") as conn:
            await conn.command("BEGIN")
        assert conn.closed
        with pytest.raises(psycopg.errors.SyntaxError):
            async with pool.acquire("a") as second:
                await second.run(Statement("bad", "selekt"))
        assert second is not conn
        async with pool.acquire("a") as third:  # a refused statement does no harm
            assert third is second
        assert (lane_of(pool).opened, lane_of(pool).discarded) == (2, 1)


async def test_a_terminated_idle_connection_is_replaced_before_it_is_lent(server):
    async with open_pool(server.dsn, lanes=[Lane("a", 1)]) as pool:
        async with pool.acquire("a") as conn:
            pass
        server.terminate()
        await until(lambda: not conn.alive())
        async with pool.acquire("a") as second:
            assert (await second.run(XID)).tag == "SELECT 1"
        assert second is not conn


async def test_max_lifetime_with_jitter(server):
    lanes = [Lane("a", 2)]
    async with open_pool(server.dsn, lanes=lanes, max_lifetime=0.05, jitter=lambda: 1.0) as pool:
        async with pool.acquire("a") as first, pool.acquire("a"):
            pass
        await trio.sleep(0.045)  # nine tenths of it by then: expired
        async with pool.acquire("a") as second:
            assert second is not first
            assert lane_of(pool).discarded == 2  # given back it may have expired, too
    async with open_pool(server.dsn, lanes=lanes, max_lifetime=0.02) as pool:
        async with pool.acquire("a") as conn:
            await trio.sleep(0.025)
            await conn.run(ONE)  # in use it is left alone
        assert conn.closed


async def test_a_broken_connection_retires_those_of_its_age(server):
    """After a failover idle connections to the old primary look healthy until they are used."""
    async with open_pool(server.dsn, lanes=[Lane("a", 3), Lane("b", 1)]) as pool:
        async with pool.acquire("a"), pool.acquire("a") as old, pool.acquire("b") as other:
            pass
        with pytest.raises(StoreUnavailable, match="25006"):
            async with pool.acquire("a") as conn:
                await conn.script("set session characteristics as transaction read only")
                await conn.run(Statement("write", "create table pool_never (id int)"))
        assert pool.statistics().generation == 1
        async with pool.acquire("a") as conn, pool.acquire("b") as second:
            assert conn is not old
            assert second is not other
        assert (old.closed, other.closed) == (True, True)


async def test_settings_and_dsn_of_a_lane(server):
    show = Statement("show", "select current_setting('work_mem'), current_setting('application_name')")
    lanes = [
        Lane("a", 1, settings={"work_mem": "7MB"}),
        Lane("session", 1, dsn=f"{server.dsn} application_name=direct"),
    ]
    async with open_pool(server.dsn, lanes=lanes) as pool:
        async with pool.acquire("a") as conn:
            assert (await conn.run(show)).rows == [[b"7MB", server.name.encode()]]
        async with pool.acquire("session") as conn:
            [[memory, name]] = (await conn.run(show)).rows
            assert memory != b"7MB"
            assert name == b"direct"


async def test_mistakes_are_named(server):
    with pytest.raises(ConfigError, match="lane 'a': size must be at least 1, not 0"):
        Lane("a", 0)
    with pytest.raises(ConfigError, match="two lanes"):
        async with open_pool(server.dsn, lanes=[Lane("a", 1), Lane("a", 2)]):
            pass
    async with open_pool(server.dsn, lanes=[Lane("a", 1)]) as pool:
        with pytest.raises(LookupError, match="no lane 'x', only a"):
            pool.acquire("x")
        lease = pool.acquire("a")
        async with lease:
            with pytest.raises(RuntimeError, match="in use"):
                async with lease:
                    raise AssertionError("unreachable")


async def test_statistics(server):
    async with open_pool(server.dsn, lanes=[Lane("a", 2)]) as pool, trio.open_nursery() as nursery:

        async def use():
            async with pool.acquire("a") as conn:
                await conn.run(ONE)

        async with pool.acquire("a"), pool.acquire("a"):
            nursery.start_soon(use)
            await trio.testing.wait_all_tasks_blocked()
            now = lane_of(pool)
            assert (now.size, now.in_use, now.idle, now.waiting, now.opening) == (2, 2, 0, 1, 0)
            await trio.sleep(0.01)
        await trio.testing.wait_all_tasks_blocked(0.01)
        now = lane_of(pool)
        assert (now.waiting, now.opened, now.discarded, now.failed_connects) == (0, 2, 0, 0)
        assert now.longest_wait >= 0.01
