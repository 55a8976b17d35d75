"""Somebody who looks at every page of the dashboard while a run breaks things: `--dashboard`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import attrs
import trio
from durable_actors import Dashboard
from durable_actors.dashboard.app import App
from durable_actors.dashboard.opening import open_app
from durable_actors.dashboard.views import PAGES

AWAY = frozenset({503, 504})
"""What a page may answer while the database is away. One of a single instance may also be gone: 404."""
PAUSE = 0.02


@attrs.frozen
class Onlooker:
    """What it has seen: answers by status, and what was wrong."""

    answers: Counter[int] = attrs.Factory(Counter)
    failures: list[str] = attrs.Factory(list)

    async def look(self, dsn: str) -> None:
        """Ask for every page, again and again, until cancelled."""
        async with open_app(dsn, settings=Dashboard(interval=1)) as app:
            ids: list[int] = []
            while True:
                for path in [*self._paths(ids), "/api/v1/instances"]:
                    status, body = await ask(app, path)
                    self.answers[status] += 1
                    if status not in {200, *AWAY} and not (status == 404 and path.startswith("/instances/")):
                        self.failures.append(f"the dashboard answered {status} to {path}: {body[-500:]!r}")
                    if path == "/api/v1/instances" and status == 200:
                        ids = [each["id"] for each in json.loads(body)["instances"][::10]]
                    await trio.sleep(PAUSE)

    @staticmethod
    def _paths(ids: list[int]) -> Iterator[str]:
        for page in PAGES:
            if "{" not in page.path:
                yield page.path
        yield from (f"/instances/{number}" for number in ids)
        yield from ("/instances?q=status:failed", "/instances?q=status:executing", "/metrics", "/healthz")


async def ask(app: App, url: str) -> tuple[int, bytes]:
    """The answer of the app to a request without a socket."""
    path, _, query = url.partition("?")
    scope = {
        "type": "http", "method": "GET", "path": path, "raw_path": path.encode(), "query_string": query.encode(),
        "root_path": "", "headers": [(b"host", b"localhost")], "client": ("127.0.0.1", 1),
    }  # fmt: skip
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    await app(scope, receive, send)
    return sent[0]["status"], b"".join(each.get("body", b"") for each in sent[1:])
