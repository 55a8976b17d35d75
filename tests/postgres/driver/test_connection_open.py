"""Connecting: libpq's DSN features, clear errors, no frozen event loop, nothing left open."""

import socket
from pathlib import Path

import psycopg
import pytest
import trio
from durable_actors._postgres.driver import conninfo, waiting
from durable_actors._postgres.driver.connection import PgConn
from durable_actors._postgres.driver.statement import Statement
from durable_actors.errors import ConfigError, StoreUnavailable
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from tests.kit import open_files
from tests.support.faults import open_proxy

ONE = Statement("one", "select 1", read_only=True)


@pytest.fixture
def dead_port() -> int:
    """A port where nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


async def works(dsn: str) -> bool:
    conn = await PgConn.open(dsn)
    try:
        return (await conn.run(ONE)).rows == [[b"1"]]
    finally:
        conn.close()


@pytest.mark.parametrize(
    "dsn",
    [
        "host=db password=s3cr et user=x",
        "host=db password='s3cr et",
        "postgresql://user:s3cret@[::1/db",
        "postgresql://user:s3cret%zz@db/x",
        "host=db password=s3cret nonsense=1",
        "password=s3cret connect_timeout=soon",
    ],
)
async def test_malformed_dsn_is_a_config_error_without_the_password(dsn):
    with pytest.raises(ConfigError) as caught:
        await PgConn.open(dsn)
    assert caught.value.option == "dsn"
    assert caught.value.__suppress_context__
    for secret in ("s3cr", "et user"):
        assert secret not in str(caught.value)
        assert secret not in repr(caught.value)


async def test_malformed_dsn_without_password_tells_the_word():
    with pytest.raises(ConfigError, match="hots"):
        await PgConn.open("hots=db")


async def test_nobody_listens(dead_port):
    with pytest.raises(StoreUnavailable, match=f"cannot connect.*{dead_port}"):
        await PgConn.open(f"host=127.0.0.1 port={dead_port}")


async def test_no_such_database(pg_dsn):
    with pytest.raises(StoreUnavailable, match="no_such_database"):
        await PgConn.open(make_conninfo(pg_dsn, dbname="no_such_database"))


async def test_server_without_tls_and_sslmode_require(pg_dsn, watch):
    if watch.value("select current_setting('ssl')::bool"):
        assert await works(make_conninfo(pg_dsn, sslmode="require"))
        return
    async with open_proxy(pg_dsn) as proxy:  # TCP: a Unix socket never asks for TLS
        with pytest.raises(StoreUnavailable, match="SSL"):
            await PgConn.open(make_conninfo(proxy.dsn, sslmode="require"))


async def test_tcp_and_the_given_way(pg_dsn):
    assert await works(pg_dsn)
    async with open_proxy(pg_dsn) as proxy:
        assert await works(proxy.dsn)
        parts = {k: str(v) for k, v in conninfo_to_dict(proxy.dsn).items()}
        assert await works(
            f"postgresql://{parts['user']}@127.0.0.1:{proxy.port}/{parts['dbname']}?sslmode=disable"
        )


async def test_unix_socket(pg_dsn, watch, monkeypatch):
    directory = watch.value("select split_part(current_setting('unix_socket_directories'), ',', 1)")
    if not Path(directory).is_dir():  # a server in a container: its socket is not ours
        directory = None
    port = watch.value("select current_setting('port')")
    assert directory is None or await works(make_conninfo(pg_dsn, host=directory, port=port))


async def test_multi_host_skips_the_dead_and_wants_read_write(pg_dsn, dead_port):
    async with open_proxy(pg_dsn) as proxy:
        dsn = make_conninfo(
            proxy.dsn,
            host="127.0.0.1,127.0.0.1",
            hostaddr="127.0.0.1,127.0.0.1",
            port=f"{dead_port},{proxy.port}",
            target_session_attrs="read-write",
        )
        assert await works(dsn)
        assert proxy.accepted == 1


async def test_service_file(pg_dsn, tmp_path, monkeypatch):
    service = tmp_path / "services.conf"
    parts = {k: v for k, v in conninfo_to_dict(pg_dsn).items() if v is not None}
    service.write_text("[here]\n" + "".join(f"{k}={v}\n" for k, v in parts.items()))
    monkeypatch.setenv("PGSERVICEFILE", str(service))
    assert await works("service=here")
    with pytest.raises(StoreUnavailable, match="elsewhere"):
        await PgConn.open("service=elsewhere")


async def test_a_deaf_server_times_out_and_the_loop_goes_on(pg_dsn, nursery):
    """PQconnectdb would hold the GIL for the whole time."""
    gaps, stop = [], trio.Event()

    async def tick():
        last = trio.current_time()
        while not stop.is_set():
            await trio.sleep(0.01)
            now = trio.current_time()
            gaps.append(now - last)
            last = now

    async with open_proxy(pg_dsn) as proxy:
        proxy.blackhole()
        nursery.start_soon(tick)
        start = trio.current_time()
        with pytest.raises(StoreUnavailable, match="timeout"):
            await PgConn.open(make_conninfo(proxy.dsn, connect_timeout="2"))  # libpq's least
        elapsed = trio.current_time() - start
        stop.set()
    assert 1.5 < elapsed < 6
    assert len(gaps) > 20
    assert max(gaps) < 1.5


async def test_connect_timeout_is_ours_unless_said(pg_dsn, monkeypatch):
    seen = []

    def connect(dsn: str, **options: object) -> None:
        seen.append(conninfo_to_dict(dsn).get("connect_timeout"))
        raise psycopg.OperationalError("enough")

    monkeypatch.setattr(psycopg.Connection, "connect", connect)
    for dsn in (pg_dsn, make_conninfo(pg_dsn, connect_timeout=3)):
        with pytest.raises(StoreUnavailable):
            await PgConn.open(dsn)
    monkeypatch.setenv("PGCONNECT_TIMEOUT", "4")
    with pytest.raises(StoreUnavailable):
        await PgConn.open(pg_dsn)
    assert [value and int(value) for value in seen] == [conninfo.CONNECT_TIMEOUT, 3, None]


async def test_cancelled_connects_leave_nothing(pg_dsn, watch):
    name = "driver_cancelled_connects"
    before = open_files()
    async with open_proxy(make_conninfo(pg_dsn, application_name=name)) as proxy:
        for n in range(40):
            proxy.latency(0.0005 * (n % 5))
            with trio.move_on_after(0.001 * (n % 10)):
                (await PgConn.open(proxy.dsn)).close()
        proxy.heal()
        # The threads that were left alone finish and close what they got.
        await proxy.wait_connections(0)
    await watch.eventually("select count(*) = 0 from pg_stat_activity where application_name = %s", name)
    assert open_files() <= before + 2


async def test_cancelled_on_a_deaf_server_returns_at_once(pg_dsn):
    async with open_proxy(pg_dsn) as proxy:
        proxy.blackhole()
        start = trio.current_time()
        with trio.move_on_after(0.05) as scope:
            await PgConn.open(make_conninfo(proxy.dsn, connect_timeout="2"))
        assert scope.cancelled_caught
        assert trio.current_time() - start < 1
        proxy.reset()  # lets the abandoned thread end


async def test_a_refused_setting_closes_the_connection(pg_dsn, watch):
    dsn = make_conninfo(pg_dsn, application_name="driver_refused_setting")
    with pytest.raises(ConfigError):
        await PgConn.open(dsn, settings={"no_such_thing": "1"})
    await watch.eventually(
        "select count(*) = 0 from pg_stat_activity where application_name = 'driver_refused_setting'"
    )


async def test_a_set_up_that_is_cut_off_may_pass(pg_dsn, watch, monkeypatch):
    """By a role's time-out or somebody's cancel: a `ConfigError` would end the actor that connects again."""

    async def cut_off(*_: object) -> None:
        raise psycopg.errors.QueryCanceled("canceling statement due to statement timeout")

    monkeypatch.setattr(PgConn, "batch", cut_off)
    with pytest.raises(StoreUnavailable, match="statement timeout"):
        await PgConn.open(make_conninfo(pg_dsn, application_name="driver_cut_off"))
    await watch.eventually(
        "select count(*) = 0 from pg_stat_activity where application_name = 'driver_cut_off'"
    )


def test_old_libpq_is_refused():
    waiting.require_libpq(170000)
    with pytest.raises(ConfigError, match="libpq 17 or newer, this process has 15"):
        waiting.require_libpq(150018)
