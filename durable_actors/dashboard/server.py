"""A small HTTP/1.1 server for one ASGI app, on Trio and h11.

It lives in the tree of an engine, so it has rules that larger servers do not keep: nothing that a client sends or does
leaves `serve` as an exception, and a cancellation ends it at once, whatever its clients do. Reading and writing have
deadlines and are never shielded. It speaks plain HTTP without WebSockets; TLS is a proxy's business.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from functools import partial
from typing import Any, Final
from urllib.parse import unquote_to_bytes

import h11
import trio

from durable_actors.dashboard.limits import ServerLimits

logger = logging.getLogger("durable_actors.dashboard")

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

CHUNK: Final = 64 * 1024
"""Bytes that are written or read at a time."""
_REFUSED: Final = b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


class ClientGoneError(ConnectionError):
    """The client has closed the connection, or does not read."""


async def serve(
    app: App,
    *,
    host: str,
    port: int,
    limits: ServerLimits | None = None,
    root_path: str = "",
    task_status: trio.TaskStatus[Sequence[tuple[str, int]]] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve until cancelled. `task_status` receives the addresses that it listens on. Raises OSError if it cannot."""
    listeners = await trio.open_tcp_listeners(port, host=host)
    front = _Front(app, limits or ServerLimits(), root_path)
    addresses = [listener.socket.getsockname()[:2] for listener in listeners]
    async with trio.open_nursery() as nursery:
        # `serve_listeners` closes the listeners, and waits and goes on when the process has no descriptor left.
        await nursery.start(
            partial(trio.serve_listeners, front.connected, listeners, handler_nursery=nursery)
        )
        task_status.started(addresses)


class _Front:
    """Accepts connections up to the limit, and lets no exception of one out."""

    def __init__(self, app: App, limits: ServerLimits, root_path: str) -> None:
        self._app = app
        self._limits = limits
        self._root_path = root_path
        self._open = 0

    async def connected(self, stream: trio.SocketStream) -> None:
        self._open += 1
        try:
            if self._open > self._limits.connections:
                with trio.move_on_after(1.0):
                    await stream.send_all(_REFUSED)
                return
            await _Connection(stream, self._app, self._limits, self._root_path).run()
        except (OSError, trio.BrokenResourceError, trio.ClosedResourceError):
            pass  # the client left
        except Exception:
            logger.exception("the dashboard could not serve a connection")
        finally:
            self._open -= 1
            # Not `aclose` of a stream with data to send: closing a socket does not block.
            stream.socket.close()


class _Connection:
    """One connection: requests one after the other."""

    def __init__(self, stream: trio.SocketStream, app: App, limits: ServerLimits, root_path: str) -> None:
        self._stream = stream
        self._app = app
        self._limits = limits
        self._root_path = root_path
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=limits.header_bytes)

    async def run(self) -> None:
        wait = self._limits.header_seconds
        while True:
            request = await self._next_request(wait)
            if request is None:
                return
            exchange = _Exchange(self, request)
            try:
                await self._app(self._scope(request), exchange.receive, exchange.send)
            except (ClientGoneError, trio.BrokenResourceError, trio.ClosedResourceError):
                return
            except Exception:
                logger.exception("the dashboard could not answer %s", request.target[:200])
                if not exchange.started:
                    await self.refuse(500, "internal error")
                return
            if self._http.our_state is not h11.DONE:
                return  # the app has ended before its response: only a closed connection says so
            if self._http.their_state is h11.SEND_BODY:
                return  # a body that nobody has read
            if self._http.states != {h11.CLIENT: h11.DONE, h11.SERVER: h11.DONE}:
                return
            self._http.start_next_cycle()
            wait = self._limits.idle_seconds

    async def _next_request(self, wait: float) -> h11.Request | None:
        """Read the head of a request. None: there is none, or it was refused."""
        try:
            with trio.fail_after(wait) as deadline:
                event = self._http.next_event()
                while event is h11.NEED_DATA:
                    await self._read()
                    # From the first byte on, the whole head has this long.
                    deadline.deadline = min(
                        deadline.deadline, trio.current_time() + self._limits.header_seconds
                    )
                    event = self._http.next_event()
        except trio.TooSlowError:
            if self._http.trailing_data[0]:
                await self.refuse(408, "too slow")
            return None
        except h11.RemoteProtocolError as exc:
            await self.refuse(exc.error_status_hint, "not HTTP that this server understands")
            return None
        return event if isinstance(event, h11.Request) else None

    def _scope(self, request: h11.Request) -> Scope:
        raw_path, _, query = request.target.partition(b"?")
        peer = self._stream.socket.getpeername()[:2]
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "http_version": request.http_version.decode(),
            "method": request.method.decode(),
            "scheme": "http",
            "path": _unquoted(raw_path),
            "raw_path": raw_path,
            "query_string": query,
            "root_path": self._root_path,
            "headers": [(name.lower(), value) for name, value in request.headers],
            "client": peer,
            "server": self._stream.socket.getsockname()[:2],
        }

    async def _read(self) -> None:
        """Give h11 what the client has sent. Raises `RemoteProtocolError` for too much of it."""
        self._http.receive_data(await self._stream.receive_some(CHUNK))

    async def read_body(self) -> tuple[bytes, bool]:
        """The next part of the body, and whether there is more. Raises `ClientGoneError`."""
        try:
            if self._http.they_are_waiting_for_100_continue:
                await self.write(
                    self._http.send(h11.InformationalResponse(status_code=100, headers=[])) or b""
                )
            while True:
                event = self._http.next_event()
                if event is h11.NEED_DATA:
                    await self._read()
                elif isinstance(event, h11.Data):
                    return bytes(event.data), True
                else:
                    return b"", False
        except h11.RemoteProtocolError as exc:
            raise ClientGoneError(str(exc)) from exc

    async def wait_gone(self) -> None:
        """Wait until the client closes the connection. What it sends meanwhile waits, up to a limit."""
        kept = 0
        while kept <= self._limits.header_bytes:
            data = await self._stream.receive_some(CHUNK)
            if not data:
                return
            kept += len(data)
            self._http.receive_data(data)

    async def write(self, data: bytes) -> None:
        """Write, in parts that each have a deadline. Raises `ClientGoneError`."""
        for start in range(0, len(data), CHUNK):
            part = data[start : start + CHUNK]
            try:
                with trio.fail_after(self._limits.write_seconds):
                    await self._stream.send_all(part)
            except (trio.TooSlowError, trio.BrokenResourceError, trio.ClosedResourceError) as exc:
                raise ClientGoneError("the client does not read") from exc

    async def send(self, event: h11.Event) -> None:
        data = self._http.send(event)
        if data:
            await self.write(data)

    async def refuse(self, status: int, text: str) -> None:
        """Answer a request that does not reach the app, and close."""
        body = text.encode()
        headers = [
            ("Content-Type", "text/plain; charset=utf-8"),
            ("Content-Length", str(len(body))),
            ("Connection", "close"),
        ]
        try:
            await self.send(h11.Response(status_code=status, headers=headers))
            await self.send(h11.Data(data=body))
            await self.send(h11.EndOfMessage())
        except (h11.LocalProtocolError, ClientGoneError):
            pass  # an answer has begun, or nobody reads it

    @property
    def limits(self) -> ServerLimits:
        return self._limits


class _Exchange:
    """One request and its response, as ASGI's `receive` and `send`."""

    def __init__(self, connection: _Connection, request: h11.Request) -> None:
        self._connection = connection
        self._is_head = request.method == b"HEAD"
        self._body_left = connection.limits.body_bytes
        self._body_deadline = trio.current_time() + connection.limits.body_seconds
        self._body_ended = False
        self.started = False

    async def receive(self) -> Message:
        """Return the next part of the body; after its end, wait until the client is gone."""
        if self._body_ended:
            await self._connection.wait_gone()
            return {"type": "http.disconnect"}
        data, more = b"", False
        with trio.CancelScope(deadline=self._body_deadline) as scope:
            data, more = await self._connection.read_body()
        if scope.cancelled_caught:
            self._body_ended = True
            return {"type": "http.disconnect"}
        self._body_left -= len(data)
        self._body_ended = not more
        if self._body_left < 0:
            await self._connection.refuse(413, "the body is too large")
            raise ClientGoneError("the body is too large")
        return {"type": "http.request", "body": data, "more_body": more}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.started = True
            response = h11.Response(status_code=message["status"], headers=message.get("headers", []))
            await self._connection.send(response)
        elif message["type"] == "http.response.body":
            body = message.get("body", b"")
            if body and not self._is_head:
                await self._connection.send(h11.Data(data=body))
            if not message.get("more_body", False):
                await self._connection.send(h11.EndOfMessage())


def _unquoted(path: bytes) -> str:
    """The path as text; bytes that are not UTF-8 become U+FFFD, which matches no route."""
    return unquote_to_bytes(path).decode("utf-8", "replace")
