"""The app on a database of its own, asked without a socket."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any
from urllib.parse import urlencode

import attrs
import pytest
from durable_actors._postgres.driver.statement import Statement
from durable_actors.dashboard.app import App
from durable_actors.dashboard.desk import LANE
from durable_actors.dashboard.opening import open_app
from durable_actors.dashboard_options import Dashboard
from tests.kit import until


@attrs.frozen
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode()

    def json(self) -> Any:
        return json.loads(self.body)


@attrs.define
class Browser:
    """Asks the app as a browser on the same computer does."""

    app: App
    headers: dict[str, str] = attrs.Factory(lambda: {"host": "127.0.0.1:8765"})
    root_path: str = ""

    async def resample(self) -> None:
        """Take a sample now, as if the next interval had begun."""
        sampler = self.app.desk.sampler
        await until(lambda: sampler.latest)  # the first one, which the app takes itself
        async with self.app.desk.pool.acquire(LANE) as conn:
            await conn.run(Statement("empty", "delete from durable.samples"))
        sampler._slots.clear()
        await sampler.refresh()
        assert sampler.latest is not None

    async def get(self, url: str, **headers: str) -> Answer:
        return await self.ask("GET", url, b"", headers)

    async def post(self, url: str, form: Mapping[str, str] | None = None, **headers: str) -> Answer:
        sent = {
            "content-type": "application/x-www-form-urlencoded",
            "sec-fetch-site": "same-origin",
            **headers,
        }
        return await self.ask("POST", url, urlencode(form or {}).encode(), sent)

    async def ask(self, method: str, url: str, body: bytes, headers: Mapping[str, str]) -> Answer:
        path, _, query = url.partition("?")
        given = {**self.headers, **{name.replace("_", "-"): value for name, value in headers.items()}}
        scope = {
            "type": "http", "method": method, "path": path, "raw_path": path.encode(), "query_string": query.encode(),
            "root_path": self.root_path, "headers": [(k.encode(), v.encode()) for k, v in given.items()],
            "client": ("127.0.0.1", 1),
        }  # fmt: skip
        sent: list[Any] = []

        async def receive() -> Any:
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Any) -> None:
            sent.append(message)

        await self.app(scope, receive, send)
        head = {k.decode().lower(): v.decode() for k, v in sent[0]["headers"]}
        return Answer(sent[0]["status"], head, b"".join(each.get("body", b"") for each in sent[1:]))


OpenBrowser = Callable[..., AbstractAsyncContextManager[Browser]]


@pytest.fixture
def open_browser(request: pytest.FixtureRequest) -> OpenBrowser:
    """`async with open_browser(token="…") as browser`: a dashboard with these settings, on the bench's database."""
    bench = "durable" in request.fixturenames
    dsn = request.getfixturevalue("durable").dsn if bench else request.getfixturevalue("durable_dsn")

    @asynccontextmanager
    async def opened(**settings: Any) -> AsyncIterator[Browser]:
        # Samples are taken when a test asks for one.
        async with open_app(dsn, settings=Dashboard(**{"interval": 3600, **settings})) as app:
            await until(lambda: app.desk.sampler.latest)
            yield Browser(app)

    return opened
