"""Starting while Postgres is not ready: what passes is waited for, what does not is told at once."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import durable_actors as da
import psycopg
import pytest
import trio
from durable_actors._postgres import starting
from durable_actors._postgres.starting import InRecovery, when_ready
from psycopg import pq
from psycopg.conninfo import make_conninfo
from tests.chaos.cluster import open_cluster

LOCK = "lock table durable.migrations in access exclusive mode"


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(starting, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(starting, "LONGEST_PAUSE", 0.05)


def warnings(caplog: Any) -> list[str]:
    found = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    return [text for text in found if "waiting for Postgres" in text]


@asynccontextmanager
async def open_either(kind: str, dsn: str, **options: Any):
    if kind == "engine":
        async with da.open_engine(dsn=dsn, queues={"default": 1}, **options) as engine:
            yield engine.client
    else:
        async with da.open_client(dsn, **options) as client:
            yield client


class Server:
    """Answers like one that is not ready, `refusals` times."""

    def __init__(self, error: Exception, refusals: int) -> None:
        self.error = error
        self.left = refusals

    async def attempt(self) -> str:
        await trio.lowlevel.checkpoint()
        if self.left:
            self.left -= 1
            raise self.error
        return "ready"


def failed_connect() -> da.StoreUnavailable:
    error = da.StoreUnavailable("cannot connect to Postgres: das Datenbanksystem startet")
    error.__cause__ = psycopg.OperationalError("das Datenbanksystem startet")
    return error


@pytest.mark.parametrize(
    "error",
    [
        failed_connect(),
        da.StoreUnavailable("Postgres cannot serve now (57P03)"),
        InRecovery("a standby"),
        psycopg.errors.LockNotAvailable("locked"),
        psycopg.errors.QueryCanceled("statement timeout"),
    ],
    ids=lambda each: type(each).__name__,
)
@pytest.mark.parametrize("status", [pq.Ping.REJECT, pq.Ping.NO_RESPONSE])
async def test_what_may_pass_is_waited_for(monkeypatch, caplog, error, status):
    asked: list[str] = []

    async def lets_in(dsns: Any) -> bool:
        asked.extend(dsns)
        return status == pq.Ping.OK

    monkeypatch.setattr(starting, "_accepts_connections", lets_in)
    server = Server(error, 5)
    assert await when_ready(server.attempt, ["x"], start_timeout=60) == "ready"
    assert len(warnings(caplog)) == 1
    assert bool(asked) == isinstance(error.__cause__, psycopg.OperationalError)


async def test_it_fails_inside_our_tree_when_the_time_is_over(monkeypatch):
    error = psycopg.errors.LockNotAvailable("locked")
    with pytest.raises(
        da.StoreUnavailable, match=r"not ready within start_timeout=0\.05 s: locked"
    ) as caught:
        await when_ready(Server(error, 10**9).attempt, ["x"], start_timeout=0.05)
    assert caught.value.__cause__ is error
    own = da.StoreUnavailable("gone")
    with pytest.raises(da.StoreUnavailable) as caught:
        await when_ready(Server(own, 10**9).attempt, ["x"], start_timeout=0)
    assert caught.value is own


async def test_a_server_that_became_ready_between_connect_and_ping_is_asked_again(monkeypatch):
    async def lets_in(_: Any) -> bool:
        await trio.lowlevel.checkpoint()
        return True

    monkeypatch.setattr(starting, "_accepts_connections", lets_in)
    assert await when_ready(Server(failed_connect(), 1).attempt, ["x"], start_timeout=60) == "ready"
    with pytest.raises(da.StoreUnavailable, match="startet"):
        await when_ready(Server(failed_connect(), 2).attempt, ["x"], start_timeout=3600)


async def test_other_refusals_are_told_at_once(caplog):
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        await when_ready(
            Server(psycopg.errors.InsufficientPrivilege("no"), 1).attempt, ["x"], start_timeout=3600
        )
    with pytest.raises(da.SchemaError, match="old"):
        await when_ready(Server(da.SchemaError("old"), 1).attempt, ["x"], start_timeout=3600)
    assert not warnings(caplog)


@pytest.mark.parametrize("kind", ["engine", "client"])
@pytest.mark.parametrize(
    "wrong", [{"dbname": "nowhere_at_all"}, {"user": "nobody_at_all"}], ids=["database", "role"]
)
async def test_what_waiting_cannot_mend_is_told_at_once(durable_dsn, caplog, kind, wrong):
    dsn = make_conninfo(durable_dsn, **wrong)
    with trio.fail_after(60), pytest.raises(da.StoreUnavailable, match="at_all"):
        async with open_either(kind, dsn, start_timeout=3600):
            pass
    assert not warnings(caplog)


@pytest.mark.parametrize("kind", ["engine", "client"])
async def test_a_bad_dsn_is_told_at_once(kind):
    with trio.fail_after(60), pytest.raises(da.ConfigError, match="dsn"):
        async with open_either(kind, "postgresql://[", start_timeout=3600):
            pass


@pytest.mark.parametrize("kind", ["engine", "client"])
async def test_nobody_there(kind, caplog, tmp_path):
    dsn = make_conninfo(host=str(tmp_path), user="x", dbname="x")
    with pytest.raises(da.StoreUnavailable, match=r"start_timeout=0\.1 s.*cannot connect"):
        async with open_either(kind, dsn, start_timeout=0.1):
            pass
    assert len(warnings(caplog)) == 1


@contextmanager
def when_it_waits(heal: Callable[[], object]) -> Iterator[None]:
    """Call it when a start has said that it waits."""

    class Healer(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "waiting for Postgres" in record.getMessage():
                heal()

    handler = Healer()
    logger = logging.getLogger("durable_actors")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


@pytest.mark.parametrize("kind", ["engine", "client"])
async def test_a_table_that_is_locked_for_a_moment(durable_dsn, caplog, kind):
    with psycopg.connect(durable_dsn) as stranger, when_it_waits(stranger.rollback):
        stranger.execute(LOCK)
        with trio.fail_after(60):
            async with open_either(kind, durable_dsn, start_timeout=3600):
                pass
    assert len(warnings(caplog)) == 1


async def test_a_server_that_starts_and_recovers(caplog):
    """Killed before, so it has its log to replay. A wrong password is told at once."""
    with open_cluster() as cluster:
        cluster.stop(signal.SIGKILL)
        (cluster.pgdata / "pg_hba.conf").write_text("local all postgres trust\nlocal all all password\n")
        with trio.fail_after(60), when_it_waits(cluster.start):
            async with open_either("engine", cluster.dsn(), start_timeout=3600):
                pass
        assert len(warnings(caplog)) == 1
        caplog.clear()
        with psycopg.connect(cluster.dsn(), autocommit=True) as admin:
            admin.execute("create role guarded login password 'right'")
        wrong = cluster.dsn(user="guarded", password="wrong")
        with trio.fail_after(60), pytest.raises(da.StoreUnavailable, match="password authentication failed"):
            async with open_either("client", wrong, start_timeout=3600):
                pass
        assert not warnings(caplog)


@pytest.mark.parametrize("kind", ["engine", "client"])
async def test_a_table_that_stays_locked(durable_dsn, kind):
    with psycopg.connect(durable_dsn) as stranger:
        stranger.execute(LOCK)
        with pytest.raises(da.StoreUnavailable, match="start_timeout="):
            async with open_either(kind, durable_dsn, start_timeout=0.2):
                pass


async def test_a_silent_server_does_not_stop_the_process(monkeypatch):
    """Who asks a server that never answers waits alone: other tasks of the process go on."""
    monkeypatch.setattr(starting, "PING_TIMEOUT", 0.5)
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            await trio.sleep(0.01)
            turns += 1

    async with trio.open_nursery() as nursery:
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")  # takes connections, and says nothing
        port = listeners[0].socket.getsockname()[1]
        nursery.start_soon(count)
        assert not await starting._accepts_connections([f"host=127.0.0.1 port={port} user=postgres dbname=x"])
        nursery.cancel_scope.cancel()
    for listener in listeners:
        await listener.aclose()
    assert turns > 10


async def test_a_server_that_lets_in_is_recognised(durable_dsn: str):
    assert await starting._accepts_connections([durable_dsn])
    assert await starting._accepts_connections([make_conninfo(durable_dsn, user="nobody_at_all")]), (
        "refused for its name, not for the hour"
    )
    assert not await starting._accepts_connections(["host=127.0.0.1 port=1"])
