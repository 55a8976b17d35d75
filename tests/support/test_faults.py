"""The fault proxy: bytes with plain sockets, lost requests and replies with Postgres."""

import psycopg
import pytest
import trio
from durable_actors._postgres.driver.connection import PgConn
from durable_actors._postgres.driver.statement import Statement
from durable_actors.errors import CommitUnknown, StoreUnavailable
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from tests.support.faults import FaultProxy, open_proxy

ONE = Statement("one", "select 1", read_only=True)


@pytest.fixture
async def echo(nursery):
    """A server that sends everything back; its DSN."""

    async def handler(stream):
        async with stream:
            async for data in stream:
                await stream.send_all(data)

    listeners = await nursery.start(trio.serve_tcp, handler, 0)
    port = listeners[0].socket.getsockname()[1]
    return f"host=127.0.0.1 port={port}"


async def connect(proxy: FaultProxy) -> trio.SocketStream:
    before = proxy.accepted
    stream = await trio.open_tcp_stream("127.0.0.1", proxy.port)
    while proxy.accepted == before or not proxy.connections:
        await trio.lowlevel.checkpoint()
    return stream


async def test_forwards_and_counts(echo):
    async with open_proxy(echo) as proxy, await connect(proxy) as stream:
        await stream.send_all(b"hello")
        assert await stream.receive_some() == b"hello"
        [connection] = proxy.connections
        await stream.aclose()
        await proxy.wait_connections(0)
        assert (connection.bytes_to_server, connection.bytes_to_client, connection.bytes_lost) == (5, 5, 0)


async def test_blackhole_holds_back_and_heal_delivers(echo):
    async with open_proxy(echo) as proxy, await connect(proxy) as stream:
        proxy.blackhole()
        await stream.send_all(b"late")
        with trio.move_on_after(0.05) as scope:
            await stream.receive_some()
        assert scope.cancelled_caught
        proxy.heal()
        assert await stream.receive_some() == b"late"


async def test_blackhole_of_one_direction_lets_the_other_through(echo):
    async with open_proxy(echo) as proxy, await connect(proxy) as stream:
        proxy.blackhole(direction="to_client")
        await stream.send_all(b"x")
        [connection] = proxy.connections
        while not connection.bytes_to_server:
            await trio.sleep(0.001)
        assert connection.bytes_to_client == 0


async def test_blackhole_holds_the_end_of_file_back(echo):
    async with open_proxy(echo) as proxy:
        stream = await connect(proxy)
        proxy.blackhole()
        await stream.aclose()
        with trio.move_on_after(0.05) as scope:
            await proxy.wait_connections(0)
        assert scope.cancelled_caught
        proxy.heal()
        await proxy.wait_connections(0)


async def test_reset_is_a_reset(echo):
    async with open_proxy(echo) as proxy, await connect(proxy) as stream:
        proxy.reset()
        with pytest.raises(trio.BrokenResourceError):
            await stream.receive_some()
        await proxy.wait_connections(0)
        proxy.reset()  # nothing left: harmless


async def test_reset_reaches_a_blackholed_connection(echo):
    async with open_proxy(echo) as proxy, await connect(proxy) as stream:
        proxy.blackhole()
        await stream.send_all(b"x")
        proxy.reset()
        await proxy.wait_connections(0)
        with pytest.raises(trio.BrokenResourceError):
            await stream.receive_some()


async def test_half_open_is_silent_and_new_connections_work(echo):
    async with open_proxy(echo) as proxy, await connect(proxy) as stream:
        proxy.half_open()
        await stream.send_all(b"anybody?")
        with trio.move_on_after(0.05) as scope:
            await stream.receive_some()
        assert scope.cancelled_caught
        async with await connect(proxy) as second:
            await second.send_all(b"yes")
            assert await second.receive_some() == b"yes"


async def test_refuse_then_heal(echo):
    async with open_proxy(echo) as proxy:
        proxy.refuse()
        async with await trio.open_tcp_stream("127.0.0.1", proxy.port) as stream:
            with pytest.raises(trio.BrokenResourceError):
                await stream.receive_some()
        proxy.heal()
        async with await connect(proxy) as stream:
            await stream.send_all(b"x")
            assert await stream.receive_some() == b"x"


async def test_latency_and_throttle_take_their_time(echo):
    async with open_proxy(echo) as proxy, await connect(proxy) as stream:
        proxy.latency(0.02)
        start = trio.current_time()
        await stream.send_all(b"x")
        await stream.receive_some()
        assert trio.current_time() - start >= 0.04

        proxy.heal()
        proxy.throttle(10_000, direction="to_client")
        start, got = trio.current_time(), 0
        await stream.send_all(bytes(1000))
        while got < 1000:
            got += len(await stream.receive_some())
        assert trio.current_time() - start >= 0.1


async def test_a_marker_cut_in_two_is_found_and_an_old_one_is_not(echo):
    async with open_proxy(echo) as proxy, await connect(proxy) as stream:
        await stream.send_all(b"COMMIT")
        await stream.receive_some()
        proxy.lose_request(b"COMMIT")
        await stream.send_all(b"-COM")
        assert await stream.receive_some() == b"-COM"
        await stream.send_all(b"MIT")
        await proxy.wait_lost()
        with pytest.raises(trio.BrokenResourceError):
            await stream.receive_some()


async def test_upstream_that_is_down_is_an_end_of_file():
    [listener] = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port = listener.socket.getsockname()[1]
    await listener.aclose()
    async with (
        open_proxy(f"host=127.0.0.1 port={port}") as proxy,
        await trio.open_tcp_stream("127.0.0.1", proxy.port) as stream,
    ):
        assert await stream.receive_some() == b""


async def test_the_bodys_error_is_not_wrapped(echo):
    with pytest.raises(ValueError, match="plain"):
        async with open_proxy(echo):
            raise ValueError("plain")


# ---------------------------------------------------------------------- with Postgres


async def test_dsn_leads_through_the_proxy_and_keeps_the_rest(pg_dsn):
    async with open_proxy(make_conninfo(pg_dsn, application_name="kept")) as proxy:
        parts = conninfo_to_dict(proxy.dsn)
        assert (parts["hostaddr"], parts["port"]) == ("127.0.0.1", str(proxy.port))
        assert (parts["application_name"], parts["sslmode"]) == ("kept", "disable")
        conn = await PgConn.open(proxy.dsn)
        assert (await conn.run(ONE)).rows == [[b"1"]]
        conn.close()


async def test_lost_reply_means_done(pg_dsn):
    async with open_proxy(pg_dsn) as proxy:
        conn = await PgConn.open(proxy.dsn)
        await conn.script("create table if not exists lost_reply (n int); truncate lost_reply")
        insert = Statement("insert_lost_reply", "insert into lost_reply values (1)")
        proxy.lose_reply(after=b"insert_lost_reply")
        with pytest.raises(CommitUnknown):
            await conn.run(insert)
        await proxy.wait_lost()
        assert count(pg_dsn, "lost_reply") == 1


async def test_lost_request_means_not_done_and_nobody_can_tell(pg_dsn):
    async with open_proxy(pg_dsn) as proxy:
        conn = await PgConn.open(proxy.dsn)
        await conn.script("create table if not exists lost_request (n int); truncate lost_request")
        insert = Statement("insert_lost_request", "insert into lost_request values (1)")
        proxy.lose_request(before=b"insert_lost_request")
        with pytest.raises(CommitUnknown):
            await conn.run(insert)
        assert count(pg_dsn, "lost_request") == 0
        assert conn.closed
        with pytest.raises(StoreUnavailable, match="closed"):
            await conn.run(insert)


def count(dsn: str, table: str) -> int:
    with psycopg.connect(dsn) as conn:
        row = conn.execute(f"select count(*) from {table}").fetchone()
        assert row
        return row[0]
