"""The health endpoint: what it answers, and that no client can hurt it."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager

import pytest
import trio
from click import BadParameter
from durable_actors import telemetry
from durable_actors.cli import health
from durable_actors.cli.health import Health, HealthServer, answer
from durable_actors.cli.serve import address
from durable_actors.errors import ConfigError
from hypothesis import given, settings, strategies as st


def ready():
    return True, {"state": "running"}


def parts(page: bytes) -> tuple[int, dict[str, str], bytes]:
    head, _, body = page.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    return int(first.split()[1]), dict(line.split(": ", 1) for line in lines), body


def get(target: str, method: str = "GET", metrics=None, ready=ready):
    return parts(answer(f"{method} {target} HTTP/1.1\r\nHost: x\r\n\r\n".encode(), ready, metrics)[0])


def test_what_it_answers():
    status, headers, body = get("/healthz")
    assert (status, json.loads(body)) == (200, {"status": "alive"})
    assert headers["Content-Length"] == str(len(body))
    assert headers["Connection"] == "close"
    assert get("/readyz?verbose")[0] == 200
    status, _, body = get("/readyz", ready=lambda: (False, {"state": "draining"}))
    assert (status, json.loads(body)) == (503, {"status": "not ready", "state": "draining"})
    assert get("/metrics")[0] == 404
    assert get("/metrics", metrics=lambda: ("text/plain", b"m 1\n"))[2] == b"m 1\n"
    assert get("/")[0] == get("/healthz/x")[0] == get("/HEALTHZ")[0] == 404
    assert get("/healthz", "POST")[1]["Allow"] == "GET, HEAD"
    assert answer(b"HEAD /healthz HTTP/1.1\r\n\r\n", ready, None)[1]


@settings(max_examples=200)
@given(st.binary(max_size=300))
def test_any_bytes_get_an_answer(data):
    status, headers, body = parts(answer(data, ready, None)[0])
    assert status in {200, 400, 404, 405}
    assert int(headers["Content-Length"]) == len(body)


def test_ready_follows_the_engine():
    state = Health()
    told = []
    for event in (
        telemetry.NodeStarted(node="n", queues=()),
        telemetry.StoreDown(actor="a", error=OSError()),
        telemetry.StoreUp(actor="a", seconds=1),
        telemetry.DrainStarted(node="n", running=1, buffered=0),
        telemetry.NodeStopped(node="n"),
    ):
        state(event)
        told.append((state.ready()[0], state.ready()[1]["state"]))
    assert told == [
        (True, "running"), (False, "running"), (True, "running"), (False, "draining"), (False, "stopped"),
    ]  # fmt: skip


@asynccontextmanager
async def serving(**options):
    async with trio.open_nursery() as nursery:
        given = {"ready": ready, "metrics": None, **options}
        port = await nursery.start(HealthServer("127.0.0.1", 0, **given).run)
        yield port
        nursery.cancel_scope.cancel()


async def ask(port: int, request: bytes = b"GET /readyz HTTP/1.1\r\n\r\n") -> bytes:
    with trio.fail_after(20):
        stream = await trio.open_tcp_stream("127.0.0.1", port)
        async with stream:
            await stream.send_all(request)
            found = b""
            async for chunk in stream:
                found += chunk
            return found


async def test_slow_gone_and_greedy_clients(monkeypatch, caplog):
    monkeypatch.setattr(health, "PATIENCE", 0.3)
    async with serving() as port:
        silent = [await trio.open_tcp_stream("127.0.0.1", port) for _ in range(health.MAX_CLIENTS + 5)]
        gone = await trio.open_tcp_stream("127.0.0.1", port)
        await gone.send_all(b"GET /hea")
        await gone.aclose()
        # The others keep every place; when their time is over, this one is answered.
        assert parts(await ask(port))[0] == 200
        greedy = await trio.open_tcp_stream("127.0.0.1", port)
        with trio.fail_after(20), pytest.raises(trio.BrokenResourceError):
            while True:
                await greedy.send_all(b"x" * 65536)
        assert parts(await ask(port, b"GET /healthz HTTP/1.1\r\nA: b\r\n\r\n"))[0] == 200
        assert (await ask(port, b"HEAD /healthz HTTP/1.1\r\n\r\n")).endswith(b"\r\n\r\n")
        for stream in [*silent, greedy]:
            await stream.aclose()
    assert not caplog.records or "failed" not in caplog.text


async def test_an_answer_that_fails_costs_its_client_only(caplog):
    def metrics():
        raise RuntimeError("collector's own")

    async with serving(metrics=metrics) as port:
        assert await ask(port, b"GET /metrics HTTP/1.1\r\n\r\n") == b""
        assert parts(await ask(port))[0] == 200
    assert "collector's own" in caplog.text


async def test_an_address_in_use_is_one_error():
    async with serving() as port:
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}: Address already in use"):
            await HealthServer("127.0.0.1", port, ready=ready, metrics=None).run()


def test_addresses():
    assert address("8080") == ("127.0.0.1", 8080)
    assert address("0.0.0.0:80") == ("0.0.0.0", 80)
    assert address("[::1]:80") == ("::1", 80)
    for bad in ("", "x", ":80", "1:99999", "80:", "-1"):
        with pytest.raises(BadParameter):
            address(bad)
