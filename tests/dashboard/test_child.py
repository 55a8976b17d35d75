"""The dashboard inside an engine: it shares nothing that the engine needs, and its faults stay its own."""

from __future__ import annotations

import logging
import socket
from typing import Any

import durable_actors as da
import durable_actors.engine as engines
import psycopg
import pytest
import trio
from durable_actors.dashboard import child
from tests.kit import until


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


async def get(port: int, path: str) -> bytes:
    stream = await trio.open_tcp_stream("127.0.0.1", port)
    async with stream:
        await stream.send_all(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        return b"".join([part async for part in stream])


async def until_served(port: int, path: str = "/readyz") -> bytes:
    with trio.fail_after(20):
        while True:
            try:
                answer = await get(port, path)
            except OSError:
                answer = b""
            if b" 200 " in answer[:20]:
                return answer
            await trio.sleep(0.02)


@pytest.fixture
def ping(registry: object) -> Any:
    @da.job
    async def ping(args: int) -> int:
        return args

    return ping


async def test_it_is_a_child_of_the_engine_with_connections_of_its_own(durable_dsn: str, ping: Any):
    port = free_port()
    async with da.open_engine(dsn=durable_dsn, dashboard=da.Dashboard(port=port)) as engine:
        await until_served(port)
        assert "dashboard" in [each.name for each in engine.snapshot().children]
        with psycopg.connect(durable_dsn) as conn:
            [[own]] = conn.execute(
                "select count(*) from pg_stat_activity where application_name = 'durable_actors dashboard'"
            ).fetchall()
        assert own >= 1
        assert (
            await da.result(await da.insert(ping, args=1), timeout=20) == 1
        )  # one client is open: the engine's
        assert b"ping" in await get(port, "/instances")


async def test_a_stop_does_not_wait_for_viewers(durable_dsn: str, ping: Any):
    port = free_port()
    async with da.open_engine(dsn=durable_dsn, dashboard=da.Dashboard(port=port, interval=1)) as engine:
        await until_served(port)
        streams = [await trio.open_tcp_stream("127.0.0.1", port) for _ in range(3)]
        for each in streams:  # two listen and never read, one says nothing
            if each is not streams[0]:
                await each.send_all(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        began = trio.current_time()
        await engine.stop()
        assert trio.current_time() - began < 4
        for each in streams:
            await each.aclose()


async def test_a_port_that_is_taken_does_not_end_the_engine(
    durable_dsn: str, ping: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(child, "FIRST_PAUSE", 0.05)
    port = free_port()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        async with da.open_engine(dsn=durable_dsn, dashboard=da.Dashboard(port=port)):
            await until(lambda: "the dashboard ended, and starts again" in caplog.text)
            assert await da.result(await da.insert(ping, args=2), timeout=20) == 2
            taken.close()
            await until_served(port)


async def test_a_bug_of_it_does_not_end_the_engine(
    durable_dsn: str, ping: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    calls: list[object] = []

    async def broken(*args: object, **options: object) -> None:
        calls.append(args)
        raise ExceptionGroup("several", [RuntimeError("a bug")])

    monkeypatch.setattr(child, "run_dashboard", broken)
    monkeypatch.setattr(child, "FIRST_PAUSE", 0.01)
    caplog.set_level(logging.ERROR)
    async with da.open_engine(dsn=durable_dsn, dashboard=da.Dashboard()) as engine:
        await until(lambda: len(calls) > 3)
        assert await da.result(await da.insert(ping, args=3), timeout=20) == 3
        assert engine.snapshot().restarts == 0


async def test_without_its_packages_the_engine_says_so(
    durable_dsn: str, ping: Any, monkeypatch: pytest.MonkeyPatch
):
    real = engines.importlib.import_module

    def missing(name: str, package: str | None = None) -> Any:
        if name.startswith("durable_actors.dashboard"):
            raise ModuleNotFoundError("no jinja2", name="jinja2")
        return real(name, package)

    monkeypatch.setattr(engines.importlib, "import_module", missing)
    with pytest.raises(da.ConfigError, match=r"durable-actors\[dashboard\]"):
        async with da.open_engine(dsn=durable_dsn, dashboard=da.Dashboard()):
            pass
