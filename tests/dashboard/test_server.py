"""The server: what clients may do to it, and that nothing of it leaves `serve`. Each test has real sockets."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import attrs
import pytest
import trio
from durable_actors.dashboard.events import BellStream
from durable_actors.dashboard.limits import ServerLimits
from durable_actors.dashboard.sampler import Bell
from durable_actors.dashboard.server import App, serve
from hypothesis import HealthCheck, given, settings, strategies as st

LIMITS = ServerLimits(
    header_bytes=4096, body_bytes=10_000, header_seconds=0.3, body_seconds=0.3, idle_seconds=5, write_seconds=0.3,
    connections=5,
)  # fmt: skip
LARGE = 30_000_000
"""More than the buffers of two sockets take."""
GET = b"GET /hello HTTP/1.1\r\nHost: localhost\r\n\r\n"


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Answers with the path and the size of the body; some paths misbehave."""
    if scope["path"] == "/raise":
        raise RuntimeError("a bug")
    if scope["path"] == "/hang":
        await trio.sleep_forever()
    if scope["path"] == "/nothing":
        return
    size, more = 0, scope["path"] != "/unread"
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        size, more = size + len(message.get("body", b"")), message["more_body"]
    body = b"x" * LARGE if scope["path"] == "/large" else f"{scope['path']} {size}".encode()
    await send(
        {
            "type": "http.response.start",
            "status": 200,
            "headers": [(b"content-length", str(len(body)).encode())],
        }
    )
    await send({"type": "http.response.body", "body": body})


@asynccontextmanager
async def serving(app: App = echo, limits: ServerLimits = LIMITS) -> AsyncIterator[int]:
    """The port of a server. Its end must not take time, whatever its clients do."""
    async with trio.open_nursery() as nursery:

        async def run(task_status: Any) -> None:
            await serve(app, host="127.0.0.1", port=0, limits=limits, task_status=task_status)

        [(_, port)] = await nursery.start(run)
        yield port
        began = trio.current_time()
        nursery.cancel_scope.cancel()
    assert trio.current_time() - began < 2
    while OPENED:
        OPENED.pop().socket.close()


OPENED: list[trio.SocketStream] = []


async def connect(port: int) -> trio.SocketStream:
    OPENED.append(await trio.open_tcp_stream("127.0.0.1", port))
    return OPENED[-1]


async def read_all(stream: trio.SocketStream) -> bytes:
    found = b""
    with trio.fail_after(10):
        try:
            async for part in stream:
                found += part
        except trio.BrokenResourceError:
            pass
    return found


async def read_until(stream: trio.SocketStream, part: bytes) -> bytes:
    found = b""
    with trio.fail_after(10):
        while part not in found:
            found += await stream.receive_some()
    return found


async def ask(port: int, data: bytes) -> bytes:
    """What a connection answers until it is closed."""
    stream = await connect(port)
    with suppress(trio.BrokenResourceError):
        await stream.send_all(data)
    return await read_all(stream)


async def works(port: int) -> bool:
    answer = await ask(port, GET.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
    return answer.endswith(b"/hello 0")


async def test_several_requests_on_one_connection():
    async with serving() as port:
        stream = await connect(port)
        for _ in range(3):
            await stream.send_all(GET)
            await read_until(stream, b"/hello 0")


async def test_a_body_is_read_in_parts_and_limited():
    async with serving() as port:
        head = b"POST /p HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
        assert (await ask(port, head % 9000 + b"y" * 9000)).endswith(b"/p 9000")
        assert b" 413 " in await ask(port, head % 20_000 + b"y" * 20_000)
        assert await works(port)


async def test_a_body_that_nobody_reads_ends_the_connection():
    async with serving() as port:
        sent = b"POST /unread HTTP/1.1\r\nHost: a\r\nContent-Length: 50\r\n\r\n" + GET
        assert (await ask(port, sent)).count(b"HTTP/1.1") == 1


HOSTILE = {
    "tls": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(100),
    "http2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "junk": bytes(range(256)) * 10,
    "long header": b"GET / HTTP/1.1\r\nX: " + b"a" * 70_000 + b"\r\n\r\n",
    "websocket": GET.replace(b"\r\n\r\n", b"\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
                             b"Sec-WebSocket-Key: eA==\r\nSec-WebSocket-Version: 13\r\n\r\n") + b"\x81\x05hello",
    "two lengths": b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
    "no host": b"GET / HTTP/1.1\r\n\r\n",
    "raises": GET.replace(b"/hello", b"/raise"),
    "no answer": GET.replace(b"/hello", b"/nothing"),
    "nul in the path": b"GET /%00%ff HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n",
}  # fmt: skip


@pytest.mark.parametrize("sent", HOSTILE.values(), ids=HOSTILE)
async def test_it_survives(sent: bytes, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.CRITICAL)
    async with serving() as port:
        stream = await connect(port)
        try:
            await stream.send_all(sent)
            await stream.send_eof()
        except trio.BrokenResourceError:
            pass
        await read_all(stream)
        assert await works(port)


async def test_a_slow_head_is_ended():
    async with serving() as port:
        answer = await ask(port, b"GET / HTTP/1.1\r\nHost:")
        assert b" 408 " in answer


async def test_a_slow_body_is_ended():
    async with serving() as port:
        answer = await ask(port, b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 10\r\n\r\nab")
        assert answer == b""
        assert await works(port)


async def test_half_closed_connections_are_answered():
    async with serving() as port:
        stream = await connect(port)
        await stream.send_all(GET)
        await stream.send_eof()
        assert (await read_all(stream)).endswith(b"/hello 0")


async def test_a_client_that_does_not_read_is_dropped():
    async with serving() as port:
        stream = await connect(port)
        await stream.send_all(GET.replace(b"/hello", b"/large"))
        await trio.sleep(0.6)
        assert len(await read_all(stream)) < LARGE
        assert await works(port)


async def test_connections_are_limited():
    async with serving() as port:
        held = [await connect(port) for _ in range(LIMITS.connections)]
        for each in held:
            await each.send_all(GET)
            await each.receive_some()  # it is served
        assert b" 503 " in await ask(port, GET)
        for each in held:
            await each.aclose()
        with trio.fail_after(5):
            while not await works(port):
                await trio.sleep(0.01)


async def ringing(bell: Bell) -> App:
    async def app(_scope: Any, receive: Any, send: Any) -> None:
        await BellStream(bell).send_to(receive, send)

    return app


async def test_a_stop_does_not_wait_for_clients():
    """A stream, a request that hangs, an idle connection, a page that nobody reads: `serving` has two seconds."""
    bell = Bell()
    app = await ringing(bell)

    async def both(scope: Any, receive: Any, send: Any) -> None:
        await (app if scope["path"] == "/events" else echo)(scope, receive, send)

    async with serving(both, attrs.evolve(LIMITS, write_seconds=60)) as port:
        for path in (b"/events", b"/events", b"/hang", b"/hello", b"/large"):
            stream = await connect(port)
            await stream.send_all(GET.replace(b"/hello", path))
            if path == b"/large":
                await trio.lowlevel.wait_readable(stream.socket)  # it writes, and nobody reads
            if path == b"/events":
                await read_until(stream, b"retry")
        for _ in range(100):
            bell.ring()
            await trio.lowlevel.checkpoint()


async def test_the_bell_is_heard_once_for_many_rings_and_forgets_who_leaves():
    bell = Bell()
    async with serving(await ringing(bell)) as port:
        stream = await connect(port)
        await stream.send_all(GET)
        text = await read_until(stream, b"retry")
        with trio.fail_after(5):
            while not bell.listeners:
                await trio.sleep(0.005)
        for _ in range(50):
            bell.ring()
        while text.count(b"event: ring") < 1:
            text += await stream.receive_some()
        assert text.count(b"event: ring") == 1
        await stream.aclose()
        with trio.fail_after(5):
            while bell.listeners:
                bell.ring()
                await trio.sleep(0.01)


PIECES = st.lists(
    st.sampled_from([GET, b"POST / HTTP/1.1\r\n", b"HEAD / HTTP/1.1\r\n", b"Host: a\r\n", b"Content-Length: 3\r\n",
                     b"Transfer-Encoding: chunked\r\n", b"Expect: 100-continue\r\n", b"\r\n", b"3\r\nabc\r\n",
                     b"0\r\n\r\n", b"abc"])
    | st.binary(max_size=40),
    max_size=8,
)  # fmt: skip


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(pieces=PIECES, half_close=st.booleans())
def test_fuzzed_bytes_end_neither_the_server_nor_the_next_request(pieces: list[bytes], half_close: bool):
    async def main() -> None:
        async with serving(
            limits=ServerLimits(header_seconds=0.05, body_seconds=0.05, idle_seconds=0.05)
        ) as port:
            stream = await connect(port)
            try:
                for piece in pieces:
                    if piece:
                        await stream.send_all(piece)
                if half_close:
                    await stream.send_eof()
            except trio.BrokenResourceError:
                pass
            await read_all(stream)
            assert await works(port)

    logging.disable(logging.CRITICAL)
    try:
        trio.run(main)
    finally:
        logging.disable(logging.NOTSET)
