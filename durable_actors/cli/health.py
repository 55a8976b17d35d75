"""The health endpoint of a worker: `/healthz`, `/readyz` and, with the extra `prometheus`, `/metrics`.

A few hundred requests a minute from probes and a scraper, so HTTP/1.1 with one request per connection is enough. A
client that is slow, sends nonsense or goes away costs one task for a few seconds and nothing else.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final

import trio

from durable_actors.errors import ConfigError
from durable_actors.telemetry import DrainStarted, Event, NodeStarted, NodeStopped, StoreDown, StoreUp

logger: Final = logging.getLogger("durable_actors.health")
MAX_HEAD: Final = 8192
"""Bytes of a request."""
PATIENCE: Final = 5.0
"""Seconds for a whole request and its answer."""
MAX_CLIENTS: Final = 32
"""Connections at a time. Others wait in the backlog of the socket."""

Reply = tuple[int, str, bytes]
"""Status, content type, body."""
_WORDS: Final = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    503: "Service Unavailable",
}


class Health:
    """An observer that knows whether the engine of this process can work."""

    def __init__(self) -> None:
        self._state = "starting"
        self._store = True

    def __call__(self, event: Event) -> None:
        """Learn from an event."""
        match event:
            case NodeStarted():
                self._state, self._store = "running", True
            case DrainStarted():
                self._state = "draining"
            case NodeStopped():
                self._state = "stopped"
            case StoreDown():
                self._store = False
            case StoreUp():
                self._store = True
            case _:
                pass

    def ready(self) -> tuple[bool, Mapping[str, object]]:
        """Whether it claims and runs work, and what it says of itself."""
        facts = {"state": self._state, "postgres": "available" if self._store else "unavailable"}
        return self._state == "running" and self._store, facts


def answer(
    request: bytes,
    ready: Callable[[], tuple[bool, Mapping[str, object]]],
    metrics: Callable[[], tuple[str, bytes]] | None,
) -> tuple[bytes, bool]:
    """Return the answer to the head of a request, and whether its method was HEAD. Pure but for the callbacks."""
    line = request.split(b"\r\n", 1)[0].decode("latin-1")
    method, _, rest = line.partition(" ")
    target, _, version = rest.rpartition(" ")
    if not version.startswith("HTTP/1.") or not target.startswith("/"):
        return _page(_text(400, "not a request of HTTP/1.1")), False
    if method not in {"GET", "HEAD"}:
        return _page(_text(405, "only GET and HEAD"), "Allow: GET, HEAD\r\n"), False
    match target.partition("?")[0]:
        case "/healthz":
            page = _json(200, {"status": "alive"})
        case "/readyz":
            fine, facts = ready()
            page = _json(200 if fine else 503, {"status": "ready" if fine else "not ready", **facts})
        case "/metrics" if metrics is not None:
            kind, body = metrics()
            page = (200, kind, body)
        case "/metrics":
            page = _text(404, "install durable-actors[prometheus] for metrics")
        case _:
            page = _text(404, "there are /healthz, /readyz and /metrics")
    return _page(page), method == "HEAD"


def _json(status: int, facts: Mapping[str, object]) -> Reply:
    return status, "application/json", json.dumps(facts).encode() + b"\n"


def _text(status: int, text: str) -> Reply:
    return status, "text/plain; charset=utf-8", text.encode() + b"\n"


def _page(page: Reply, more: str = "") -> bytes:
    status, kind, body = page
    head = (
        f"HTTP/1.1 {status} {_WORDS[status]}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n{more}"
        "Cache-Control: no-store\r\nX-Content-Type-Options: nosniff\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body


class HealthServer:
    """Answers on one address, until it is cancelled."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        ready: Callable[[], tuple[bool, Mapping[str, object]]],
        metrics: Callable[[], tuple[str, bytes]] | None,
    ) -> None:
        self._host = host
        self._port = port
        self._ready = ready
        self._metrics = metrics
        self._clients = trio.Semaphore(MAX_CLIENTS)

    async def run(self, *, task_status: trio.TaskStatus[int] = trio.TASK_STATUS_IGNORED) -> None:
        """Listen. `task_status` receives the port."""
        try:
            listeners = await trio.open_tcp_listeners(self._port, host=self._host)
        except OSError as error:
            raise ConfigError(
                f"the health endpoint cannot listen on {self._host}:{self._port}: {error.strerror or error}",
                option="health",
                value=self._port,
            ) from error
        port = int(listeners[0].socket.getsockname()[1])
        logger.info("health endpoint: http://%s:%d/readyz", self._host, port)
        task_status.started(port)
        try:
            async with trio.open_nursery() as nursery:
                for listener in listeners:
                    nursery.start_soon(self._accept, listener, nursery)
        finally:
            for listener in listeners:
                listener.socket.close()

    async def _accept(self, listener: trio.SocketListener, nursery: trio.Nursery) -> None:
        """Accept while there is room. Without a free descriptor it pauses: the engine needs the next ones."""
        while True:
            await self._clients.acquire()
            try:
                stream = await listener.accept()
            except OSError:
                self._clients.release()
                await trio.sleep(1)
            else:
                nursery.start_soon(self._serve, stream)

    async def _serve(self, stream: trio.SocketStream) -> None:
        try:
            with trio.move_on_after(PATIENCE):
                await self._exchange(stream)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass  # the client has gone
        except Exception:
            logger.exception("the health endpoint failed to answer")
        finally:
            self._clients.release()
            await trio.aclose_forcefully(stream)

    async def _exchange(self, stream: trio.SocketStream) -> None:
        head = b""
        while b"\r\n\r\n" not in head:
            chunk = await stream.receive_some(4096)
            head += chunk
            if not chunk or len(head) > MAX_HEAD:
                return
        page, bare = answer(head, self._ready, self._metrics)
        await stream.send_all(page.split(b"\r\n\r\n", 1)[0] + b"\r\n\r\n" if bare else page)
        await stream.send_eof()
        while await stream.receive_some(4096):  # or a reset could overtake the answer
            pass


def has_prometheus() -> bool:
    """Whether the extra is installed."""
    return find_spec("prometheus_client") is not None


def prometheus_observer() -> Callable[[Event], object]:
    """The bridge to the default registry of prometheus_client."""
    found: Callable[[Event], object] = import_module("durable_actors.prometheus").observe
    return found


def prometheus_page(folder: str | None = None) -> tuple[str, bytes]:
    """The metrics of this process; or of all processes whose `PROMETHEUS_MULTIPROC_DIR` is this folder."""
    library: Any = import_module("prometheus_client")
    registry = library.REGISTRY
    if folder is not None:
        registry = library.CollectorRegistry()
        import_module("prometheus_client.multiprocess").MultiProcessCollector(registry, path=folder)
    return library.CONTENT_TYPE_LATEST, library.generate_latest(registry)
