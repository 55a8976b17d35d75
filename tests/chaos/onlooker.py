"""Somebody who looks at every view of the dashboard while a run breaks things: `--dashboard`.

The dashboard's own server, on a port of its own, asked over real connections: every view and its JSON twin, with the
names that the lists show; beside it a stream of live updates, and a viewer who never reads.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import quote

import attrs
import trio
from durable_actors import Dashboard
from durable_actors.dashboard.opening import run_dashboard
from durable_actors.dashboard.views import PAGES

AWAY: Final = frozenset({503, 504})
"""What a page may answer while the database is away."""
ANSWER: Final = 20.0
"""Seconds for an answer: a page has ten."""
PAUSE: Final = 0.02
NAMES: Final[Mapping[str, tuple[str, str]]] = {
    "/queues": ("queues", "queue"),
    "/instances": ("instances", "id"),
    "/machines": ("machines", "name"),
    "/limits": ("limits", "name"),
    "/schedules": ("schedules", "name"),
    "/nodes": ("nodes", "incarnation"),
}
"""List → where its JSON twin has the names of what has a page of its own."""
MOST: Final = 5
"""Pages of one list that are looked at in each round."""
FILTERED: Final = ("/instances?q=status:failed", "/instances?q=status:executing", "/audit?command=retry")
VIEWS: Final = frozenset(page.path for page in PAGES)


@attrs.frozen
class Onlooker:
    """What it has seen: answers by status, good ones by view, and what was wrong."""

    answers: Counter[int] = attrs.Factory(Counter)
    views: Counter[str] = attrs.Factory(Counter)
    failures: list[str] = attrs.Factory(list)

    async def look(self, dsn: str) -> None:
        """Ask for every page, again and again, until cancelled."""
        async with trio.open_nursery() as nursery:

            async def serve(task_status: trio.TaskStatus[Any]) -> None:
                await run_dashboard(dsn, Dashboard(port=0, interval=1), task_status=task_status)

            [(_, port)] = await nursery.start(serve)
            nursery.start_soon(self._listen, port)
            nursery.start_soon(_never_read, port)
            names: dict[str, list[str]] = {}
            while True:
                for page in PAGES:
                    await self._visit(port, page.path, names)
                for path in (*FILTERED, "/metrics", "/healthz"):
                    await self._ask(port, path)
                status, _ = await ask(port, "/readyz")
                if status not in {200, 503}:
                    self.failures.append(f"the dashboard answered {status} to /readyz")

    async def _visit(self, port: int, view: str, names: dict[str, list[str]]) -> None:
        """Look at a view and its twin: at those of the names that its list has shown."""
        listed, has_name, _ = view.partition("/{")
        for path in [f"{listed}/{name}" for name in names.get(listed, ())] if has_name else [view]:
            page, _ = await self._ask(port, path)
            status, body = await self._ask(port, f"/api/v1{path}")
            if page == status == 200:
                self.views[view] += 1
            if status == 200 and view in NAMES:
                rows, name = NAMES[view]
                found = [quote(str(each[name]), safe="") for each in json.loads(body)[rows]]
                names[view] = found[:: max(len(found) // MOST, 1)][:MOST]

    async def _ask(self, port: int, path: str) -> tuple[int, bytes]:
        status, body = await ask(port, path)
        self.answers[status] += 1
        gone = (
            status == 404 and path.removeprefix("/api/v1").count("/") > 1
        )  # what the list showed a moment ago
        if status not in {200, *AWAY} and not gone:
            self.failures.append(f"the dashboard answered {status} to {path}: {body[-500:]!r}")
        await trio.sleep(PAUSE)
        return status, body

    async def _listen(self, port: int) -> None:
        """Keep a stream of live updates open. It ends with the server only."""
        async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
            await stream.send_all(_request("/events"))
            async for data in stream:
                self.views["/events"] += data.count(b"event:")
        self.failures.append("the stream of live updates ended")


def missed(views: Mapping[str, int]) -> list[str]:
    """The views of which no page was served. Pure."""
    return sorted(view for view in (*VIEWS, "/events") if not views.get(view))


async def _never_read(port: int) -> None:
    """A client that asks and does not read: its connection is ended, nobody else is disturbed."""
    while True:
        async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
            try:
                await stream.send_all(_request("/static/dashboard.js", close=False) * 200)
                await trio.sleep(30)
            except trio.BrokenResourceError:
                await trio.sleep(1)


def _request(path: str, *, close: bool = True) -> bytes:
    end = "Connection: close\r\n" if close else ""
    return f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n{end}\r\n".encode()


async def ask(port: int, path: str) -> tuple[int, bytes]:
    """The answer of the server; 0 if there is none in time."""
    received = b""
    with trio.move_on_after(ANSWER):
        async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
            await stream.send_all(_request(path))
            async for data in stream:
                received += data
        head, _, body = received.partition(b"\r\n\r\n")
        if b"transfer-encoding: chunked" in head.lower():
            body = _unchunked(body)
        return int(head.split(b" ", 2)[1]) if head else 0, body
    return 0, received


def _unchunked(body: bytes) -> bytes:
    found = b""
    while body:
        size, _, rest = body.partition(b"\r\n")
        length = int(size, 16)
        found, body = found + rest[:length], rest[length + 2 :]
    return found
