"""A proxy between a client and Postgres that injects network faults, without root or iptables.

::

    async with open_proxy(dsn) as proxy:
        conn = await TrioConnection.connect(proxy.dsn)
        proxy.latency(0.05)                   # every message takes 50 ms longer, in both directions
        proxy.blackhole()                     # nothing arrives, without any error, until heal()
        proxy.half_open()                     # live connections silently lose the server; new ones work
        proxy.reset()                         # RST on every live connection
        proxy.lose_reply(after=b"COMMIT")     # the next COMMIT is carried out, its reply never arrives
        proxy.lose_request(before=b"COMMIT")  # the next COMMIT never reaches the server

Rules apply to existing and to new connections. A marker is compared with the bytes of the protocol: the text of a
simple query, the name of a prepared statement. TLS would hide them, so `proxy.dsn` has `sslmode=disable` unless the
given DSN sets another mode.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Final, Literal

import attrs
import trio
from psycopg import pq
from psycopg.conninfo import conninfo_to_dict, make_conninfo

Direction = Literal["both", "to_server", "to_client"]
"""The direction that a rule applies to."""
Ending = Literal["close", "reset", "silence"]
"""What the client sees after a lost message: an end of file, a reset, or nothing."""

_CHUNK: Final = 65536
_OVERLAP: Final = (
    64  # bytes kept from the last chunk, to find a marker (no longer than this) that spans two chunks
)
_READY: Final = b"Z\x00\x00\x00\x05"  # ReadyForQuery without its last byte: the reply is complete


@attrs.frozen
class _Rules:
    """How the bytes of one direction are treated."""

    latency: float = 0.0
    bytes_per_second: float | None = None
    blocked: bool = False


@attrs.frozen
class _Loss:
    """Lose the next message that contains `marker`, or the reply to it."""

    marker: bytes
    reply: bool
    then: Ending


class _Faults:
    """The current rules, shared by the proxy and its connections."""

    def __init__(self) -> None:
        self.rules: dict[str, _Rules] = {"to_server": _Rules(), "to_client": _Rules()}
        self.losses: list[_Loss] = []
        self.lost = trio.Event()
        self.changed = trio.Event()

    def announce(self) -> None:
        """Wake the tasks that wait for a change of the rules or of the connections."""
        self.changed.set()
        self.changed = trio.Event()

    def match(self, tail: bytes, data: bytes) -> _Loss | None:
        """Find and disarm the loss that matches these bytes; `tail` are the bytes before them."""
        for loss in self.losses:
            cut = max(
                0, len(tail) - len(loss.marker) + 1
            )  # a marker inside `tail` belongs to an earlier message
            if loss.marker in tail[cut:] + data:
                self.losses.remove(loss)
                return loss
        return None

    def chunk(self, direction: str) -> int:
        """How many bytes to read at once."""
        rate = self.rules[direction].bytes_per_second
        return _CHUNK if rate is None else max(1, min(_CHUNK, int(rate / 50)))

    async def hold(self, direction: str, size: int) -> None:
        """Hold a chunk, or an end of file, back for as long as the rules say."""
        rules = self.rules[direction]
        pause = rules.latency + (size / rules.bytes_per_second if rules.bytes_per_second else 0.0)
        if pause:
            await trio.sleep(pause)
        while self.rules[direction].blocked:
            await self.changed.wait()


class ProxyConnection:
    """One proxied connection: its counters, and faults for this connection only."""

    def __init__(self, faults: _Faults, client: trio.SocketStream, server: trio.SocketStream) -> None:
        self._faults = faults
        self._client = client
        self._server = server
        self._silent = False
        self._losing: Ending | None = None
        self._life = trio.CancelScope()
        self.bytes_to_server = 0
        """Bytes that were forwarded to the server."""
        self.bytes_to_client = 0
        """Bytes that were forwarded to the client."""
        self.bytes_lost = 0
        """Bytes that were read and not forwarded."""

    def reset(self) -> None:
        """Break the connection with a TCP reset to the client; the server sees an end of file."""
        _reset(self._client)
        self.close()

    def close(self) -> None:
        """Close both halves in an orderly way."""
        self._client.socket.close()
        self._server.socket.close()
        self._life.cancel()

    def half_open(self) -> None:
        """Close the server's half. The client sees no error and never gets a reply."""
        self._silent = True
        self._server.socket.close()

    async def pump(self) -> None:
        """Forward bytes in both directions until the connection is closed (the proxy's own task calls this)."""
        with self._life:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._to_server)
                nursery.start_soon(self._to_client)

    async def _to_server(self) -> None:
        faults, tail = self._faults, b""
        while data := await _receive(self._client, faults.chunk("to_server")):
            if self._silent:
                self.bytes_lost += len(data)
                continue
            loss = faults.match(tail, data)
            tail = data[-_OVERLAP:]
            if loss is not None and not loss.reply:
                self.bytes_lost += len(data)
                self._end(loss.then)
                continue
            if loss is not None:
                self._losing = loss.then
            await faults.hold("to_server", len(data))
            if await _send(self._server, data):
                self.bytes_to_server += len(data)
        # The client has closed. Its end of file is delayed like any byte, and a blackhole holds it back.
        await faults.hold("to_server", 0)
        self.close()

    async def _to_client(self) -> None:
        faults, last = self._faults, b""
        while data := await _receive(self._server, faults.chunk("to_client")):
            if self._losing is not None:
                self.bytes_lost += len(data)
                last = (last + data)[-6:]
                if last[:5] == _READY:
                    self._end(self._losing)
                continue
            await faults.hold("to_client", len(data))
            if await _send(self._client, data):
                self.bytes_to_client += len(data)
        if self._losing is not None:
            self._end(self._losing)
        elif not self._silent:
            await faults.hold("to_client", 0)
            self.close()

    def _end(self, how: Ending) -> None:
        self._faults.lost.set()
        match how:
            case "close":
                self.close()
            case "reset":
                self.reset()
            case "silence":
                self._silent = True


class FaultProxy:
    """A TCP proxy in front of one Postgres, made by `open_proxy`. Every method takes effect at once."""

    def __init__(self, dsn: str, port: int) -> None:
        self._upstream = _upstream(dsn)
        self._faults = _Faults()
        self._refusing = False
        self.port: Final = port
        """The TCP port on 127.0.0.1."""
        self.dsn: Final = _proxied(dsn, port)
        """The DSN of the server, through this proxy."""
        self.connections: Final[list[ProxyConnection]] = []
        """The live connections, oldest first. A cancel request is a connection, too."""
        self.accepted = 0
        """The number of connections accepted so far."""

    def latency(self, seconds: float, *, direction: Direction = "both") -> None:
        """Delay every chunk by this many seconds."""
        self._change(direction, partial(attrs.evolve, latency=seconds))

    def throttle(self, bytes_per_second: float, *, direction: Direction = "both") -> None:
        """Forward this many bytes per second, in small chunks."""
        self._change(direction, partial(attrs.evolve, bytes_per_second=bytes_per_second))

    def blackhole(self, *, direction: Direction = "both") -> None:
        """Hold everything back, ends of file included. As with TCP, it arrives after `heal`."""
        self._change(direction, partial(attrs.evolve, blocked=True))

    def refuse(self) -> None:
        """Reset new connections at once, as if the server were down. Live connections keep working."""
        self._refusing = True

    def heal(self) -> None:
        """Forward everything again, and disarm losses. Broken connections stay broken."""
        self._refusing = False
        self._faults.losses.clear()
        self._change("both", lambda _: _Rules())

    def reset(self) -> None:
        """Break every live connection with a TCP reset."""
        for connection in self.connections:
            connection.reset()

    def half_open(self) -> None:
        """Close the server's half of every live connection, without any sign to the client."""
        for connection in self.connections:
            connection.half_open()

    def lose_reply(self, after: bytes, *, then: Ending = "close") -> None:
        """Forward the next message that contains `after`, and drop the server's reply to it.

        `then` takes effect when the server has replied completely, so the statement has been carried out.
        """
        self._arm(_Loss(after, reply=True, then=then))

    def lose_request(self, before: bytes, *, then: Ending = "reset") -> None:
        """Drop the next message that contains `before`. The server never sees it."""
        self._arm(_Loss(before, reply=False, then=then))

    async def wait_lost(self) -> None:
        """Wait until a message was lost since the last `lose_reply` or `lose_request`."""
        await self._faults.lost.wait()

    async def wait_connections(self, count: int) -> None:
        """Wait until exactly `count` connections are live."""
        while len(self.connections) != count:
            await self._faults.changed.wait()

    async def serve(self, client: trio.SocketStream) -> None:
        """Serve one accepted connection (`open_proxy` calls this)."""
        self.accepted += 1
        if self._refusing:
            _reset(client)
            return
        async with client:
            try:
                server = await _connect(*self._upstream)
            except OSError:
                return  # the server is down; the client sees an end of file
            async with server:
                connection = ProxyConnection(self._faults, client, server)
                self.connections.append(connection)
                self._faults.announce()
                try:
                    await connection.pump()
                finally:
                    self.connections.remove(connection)
                    self._faults.announce()

    def _arm(self, loss: _Loss) -> None:
        self._faults.lost = trio.Event()
        self._faults.losses.append(loss)

    def _change(self, direction: Direction, change: Callable[[_Rules], _Rules]) -> None:
        rules = self._faults.rules
        for half in ("to_server", "to_client") if direction == "both" else (direction,):
            rules[half] = change(rules[half])
        self._faults.announce()


@asynccontextmanager
async def open_proxy(dsn: str) -> AsyncGenerator[FaultProxy, None]:
    """Open a fault proxy in front of the server of `dsn` (TCP or Unix socket) for the length of the block.

    Leaving the block closes the port and every proxied connection. An error of the body is not wrapped in a group.
    """
    [listener] = await trio.open_tcp_listeners(0, host="127.0.0.1")
    proxy = FaultProxy(dsn, listener.socket.getsockname()[1])
    # `__aexit__` does not get the error of the body: the nursery would wrap it in a group.
    manager = trio.open_nursery()
    nursery = await manager.__aenter__()
    nursery.start_soon(partial(trio.serve_listeners, proxy.serve, [listener], handler_nursery=nursery))
    try:
        yield proxy
    finally:
        nursery.cancel_scope.cancel()
        await manager.__aexit__(None, None, None)


def _reset(stream: trio.SocketStream) -> None:
    """Close with RST instead of FIN: the effect of a linger time of zero."""
    if stream.socket.fileno() >= 0:
        stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    stream.socket.close()


def _upstream(dsn: str) -> tuple[str, int]:
    """The first address that libpq would try: host (a directory for a Unix socket) and port."""
    defaults = {opt.keyword.decode(): (opt.val or b"").decode() for opt in pq.Conninfo.get_defaults()}
    parts = defaults | {key: str(value) for key, value in conninfo_to_dict(dsn).items() if value}
    host = parts.get("hostaddr") or parts.get("host") or "localhost"
    return host.split(",")[0], int((parts.get("port") or "5432").split(",")[0])


def _proxied(dsn: str, port: int) -> str:
    plain = {"sslmode": "disable", "gssencmode": "disable"} | conninfo_to_dict(dsn)
    return make_conninfo("", **plain | {"host": "127.0.0.1", "hostaddr": "127.0.0.1", "port": port})


async def _connect(host: str, port: int) -> trio.SocketStream:
    if host.startswith("/"):
        return await trio.open_unix_socket(f"{host}/.s.PGSQL.{port}")
    return await trio.open_tcp_stream(host, port)


async def _receive(stream: trio.SocketStream, size: int) -> bytes:
    """Read. Returns no bytes if this half has ended, for whatever reason."""
    try:
        return bytes(await stream.receive_some(size))
    except (trio.BrokenResourceError, trio.ClosedResourceError):
        return b""


async def _send(stream: trio.SocketStream, data: bytes) -> bool:
    """Write. Returns False if this half has ended; its reader notices that."""
    try:
        await stream.send_all(data)
    except (trio.BrokenResourceError, trio.ClosedResourceError):
        return False
    return True
