"""The server is down, deaf, full or back again: clear errors, no storm, no hanging."""

import os
import signal
import tempfile
import uuid
from pathlib import Path

import pytest
import trio
import trio.testing
from durable_actors._postgres.driver import conninfo, waiting
from durable_actors._postgres.driver.statement import Statement
from durable_actors._postgres.embedded import server as embedded
from durable_actors._postgres.pool.pool import Lane, open_pool
from durable_actors.errors import ConfigError, PoolTimeout, StoreUnavailable
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from tests.kit import until
from tests.support.faults import open_proxy

ONE = Statement("one", "select 1", read_only=True)


async def ask(pool, lane="a"):
    async with pool.acquire(lane) as conn:
        return (await conn.run(ONE)).rows


async def test_down_and_up_again(server):
    async with open_proxy(server.dsn) as proxy, open_pool(proxy.dsn, lanes=[Lane("a", 2)]) as pool:
        assert await ask(pool) == [[b"1"]]
        proxy.refuse()
        proxy.reset()
        await proxy.wait_connections(0)
        for _ in range(3):
            with pytest.raises(StoreUnavailable) as caught:
                await ask(pool)
            assert not isinstance(caught.value, PoolTimeout)
        assert pool.statistics().connect_failures == 3
        proxy.heal()
        assert await ask(pool) == [[b"1"]]  # waits for the pause, then gets in
        now = pool.statistics()
        assert (now.connect_failures, now.lanes[0].failed_connects) == (0, 3)


async def test_many_callers_in_all_lanes_are_no_storm(server):
    """A hundred callers in two lanes, all refused; each place knocks once, then one for all."""
    refused = 0

    async def caller(pool, lane):
        nonlocal refused
        for _ in range(2):
            with pytest.raises(StoreUnavailable):
                await ask(pool, lane)
            refused += 1

    async with open_proxy(server.dsn) as proxy:
        proxy.refuse()
        lanes = [Lane("a", 3), Lane("b", 2)]
        async with open_pool(proxy.dsn, lanes=lanes) as pool, trio.open_nursery() as nursery:
            for n in range(100):
                nursery.start_soon(caller, pool, "ab"[n % 2])
        assert refused == 200
        assert proxy.accepted <= 5 + 3
        [a, b] = pool.statistics().lanes
        assert (a.waiting, a.opening, b.waiting, b.opening) == (0, 0, 0, 0)


async def test_a_deaf_server_is_bounded_by_the_acquire_timeout_and_backs_off(server):
    async with open_proxy(server.dsn) as proxy:
        proxy.blackhole()
        dsn = make_conninfo(proxy.dsn, connect_timeout=2)
        async with open_pool(dsn, lanes=[Lane("a", 1)], acquire_timeout=0.2) as pool:
            start = trio.current_time()
            with pytest.raises(
                StoreUnavailable, match=r"cannot connect to Postgres within acquire_timeout=0.2 s"
            ):
                await ask(pool)
            assert trio.current_time() - start < 1.5
            assert pool.statistics().connect_failures == 1
            proxy.heal()
            pool._acquire_timeout = 10
            assert await ask(pool) == [[b"1"]]


async def test_callers_in_line_hear_that_there_is_nothing_to_wait_for(server):
    async with open_proxy(server.dsn) as proxy, open_pool(proxy.dsn, lanes=[Lane("a", 1)]) as pool:
        proxy.blackhole()
        heard = []

        async def caller():
            with pytest.raises(StoreUnavailable, match="cannot connect"):
                await ask(pool)
            heard.append(trio.current_time())

        async with trio.open_nursery() as nursery:
            nursery.start_soon(caller)
            await proxy.wait_connections(1)
            for _ in range(5):
                nursery.start_soon(caller)
            await trio.testing.wait_all_tasks_blocked()
            proxy.refuse()
            proxy.reset()
        assert max(heard) - min(heard) < 1


async def test_a_full_server_leaves_the_line_to_the_connections_that_are_out(server):
    """A connect is refused while one connection works: it serves the line, and one of the line tries again."""
    async with open_proxy(server.dsn) as proxy, open_pool(proxy.dsn, lanes=[Lane("a", 2)]) as pool:
        answers = []

        async def caller():
            answers.append(await ask(pool))

        async with trio.open_nursery() as nursery, pool.acquire("a"):
            proxy.blackhole(direction="to_client")

            async def refused():
                with pytest.raises(StoreUnavailable):
                    await ask(pool)

            nursery.start_soon(refused)
            await proxy.wait_connections(2)
            for _ in range(3):
                nursery.start_soon(caller)
            await trio.testing.wait_all_tasks_blocked()
            proxy.refuse()
            proxy.connections[1].reset()
            with trio.fail_after(15):
                while True:  # it connects in a thread: no event
                    [lane] = pool.statistics().lanes
                    if (lane.waiting, lane.opening) == (2, 1):
                        break
                    await trio.sleep(0.001)
            proxy.heal()
        assert answers == [[[b"1"]]] * 3


async def test_places_left_empty_by_an_outage_are_filled_again(server):
    """One connection is held for long, the line waits; Postgres is back: nobody must wait for that one."""
    async with open_proxy(server.dsn) as proxy, open_pool(proxy.dsn, lanes=[Lane("a", 3)]) as pool:
        answers = []

        async def caller():
            with trio.fail_after(5):
                answers.append(await ask(pool))

        async def refused():
            with pytest.raises(StoreUnavailable):
                await ask(pool)

        async with pool.acquire("a"), trio.open_nursery() as nursery:
            proxy.blackhole(direction="to_client")
            for _ in range(2):
                nursery.start_soon(refused)
            await proxy.wait_connections(3)
            for _ in range(4):
                nursery.start_soon(caller)
            await trio.testing.wait_all_tasks_blocked()
            proxy.refuse()
            for connection in proxy.connections[1:]:
                connection.reset()
            await proxy.wait_connections(1)
            proxy.heal()
        assert answers == [[[b"1"]]] * 4


async def test_half_open_connections_are_replaced_after_the_first(server, monkeypatch):
    """The old primary is gone without a word; one caller pays, the others get fresh connections."""
    monkeypatch.setattr(waiting, "CANCEL_TIMEOUT", 0.2)
    async with open_proxy(server.dsn) as proxy, open_pool(proxy.dsn, lanes=[Lane("a", 3)]) as pool:
        async with pool.acquire("a"), pool.acquire("a"), pool.acquire("a"):
            pass
        proxy.half_open()
        with trio.move_on_after(0.05) as scope:
            await ask(pool)
        assert scope.cancelled_caught
        with trio.fail_after(10):
            for _ in range(3):
                assert await ask(pool) == [[b"1"]]


async def test_a_bad_dsn_is_a_config_error_for_each_caller():
    async with open_pool("hots=nowhere", lanes=[Lane("a", 1)]) as pool:
        for _ in range(2):
            with pytest.raises(ConfigError, match="hots"):
                await ask(pool)
        assert pool.statistics().lanes[0].opening == 0


async def test_a_lane_with_its_own_dsn_has_its_own_gate(server):
    lanes = [Lane("a", 1), Lane("direct", 1, dsn=server.dsn)]
    async with open_proxy(server.dsn) as proxy, open_pool(proxy.dsn, lanes=lanes) as pool:
        proxy.refuse()
        with pytest.raises(StoreUnavailable):
            await ask(pool)
        assert await ask(pool, "direct") == [[b"1"]]


async def test_a_server_that_crashes_and_comes_back():
    """A server of its own, started again by its supervisor; the pool only sees errors for a while."""
    directory = Path(tempfile.gettempdir()) / f"durable-crash-{uuid.uuid4().hex[:8]}"
    with await trio.to_thread.run_sync(lambda: embedded.start(directory, throwaway=True)) as server:
        async with open_pool(server.dsn(), lanes=[Lane("a", 3)]) as pool:
            async with pool.acquire("a"), pool.acquire("a"), pool.acquire("a") as held:
                postmaster = embedded.status(server.data_dir).postmaster
                assert postmaster
                os.kill(postmaster, signal.SIGQUIT)
                await until(lambda: not held.alive())
            with trio.fail_after(30):
                while True:
                    try:
                        assert await ask(pool) == [[b"1"]]
                        break
                    except StoreUnavailable:
                        pass  # the gate paces this loop
            assert pool.statistics().connect_failures == 0


async def test_a_first_host_that_is_deaf_does_not_hide_the_second(server, monkeypatch):
    """A machine that is gone answers nothing at all: the timeout for it must leave time for the next one."""
    monkeypatch.setattr(conninfo, "CONNECT_TIMEOUT", 4)
    async with open_proxy(server.dsn) as gone, open_proxy(server.dsn) as there:
        gone.blackhole()
        ports = f"{gone.port},{there.port}"
        dsn = make_conninfo(there.dsn, host="127.0.0.1,127.0.0.1", hostaddr="127.0.0.1,127.0.0.1", port=ports)
        async with open_pool(dsn, lanes=[Lane("a", 1)], acquire_timeout=4) as pool:
            assert await ask(pool) == [[b"1"]]
        gone.heal()


@pytest.mark.parametrize(
    ("dsn", "seconds"),
    [
        ("host=a", "10"),
        ("dbname=x", "10"),
        ("host=a,b", "5"),
        ("hostaddr=1.1.1.1,1.1.1.2,1.1.1.3 host=a,b,c", "3"),
        ("postgresql://a,b,c,d,e,f,g/db", "2"),
        ("host=a,b connect_timeout=7", "7"),
    ],
)
def test_the_hosts_share_the_time_to_connect(dsn, seconds, monkeypatch):
    for name in ("PGHOST", "PGHOSTADDR", "PGCONNECT_TIMEOUT"):
        monkeypatch.delenv(name, raising=False)
    assert conninfo_to_dict(conninfo.with_connect_timeout(dsn))["connect_timeout"] == seconds
