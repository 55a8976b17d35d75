"""Opens a dashboard: its own connections, its sampler and the app; and serves it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Final

import trio

from durable_actors._client import Client
from durable_actors._postgres.pool.lane import Lane
from durable_actors._postgres.pool.lock_retry import CLIENT_SETTINGS
from durable_actors._postgres.pool.pool import open_pool
from durable_actors.dashboard.app import App
from durable_actors.dashboard.desk import LANE, Desk, LiveEngine
from durable_actors.dashboard.redaction import Redactor
from durable_actors.dashboard.sampler import Sampler, sampling
from durable_actors.dashboard.server import serve
from durable_actors.dashboard_options import Dashboard

CONNECTIONS: Final = 3
"""Connections of a dashboard, beside those of an engine in the same process: its pages never wait for the engine's, nor
the engine for them."""
_SETTINGS: Final = {
    **CLIENT_SETTINGS,
    "statement_timeout": "8s",
    "application_name": "durable_actors dashboard",
}


@asynccontextmanager
async def open_app(
    dsn: str,
    *,
    schema: str = "durable",
    settings: Dashboard | None = None,
    engine: LiveEngine | None = None,
    engine_client: Client | None = None,
) -> AsyncGenerator[App, None]:
    """Open the ASGI app of a dashboard: it connects when it is first asked, and waits for a database that is away."""
    chosen = settings or Dashboard()
    lane = Lane(LANE, CONNECTIONS, settings=_SETTINGS, max_waiting=100, answer_within=9.0)
    async with open_pool(dsn, lanes=[lane]) as pool:
        # Not among the clients that helpers such as `durable_actors.insert` find.
        client = Client("dashboard", pool, LANE, schema)
        if engine_client is not None:
            client.notify, client.wakeups = engine_client.notify, engine_client.wakeups
            client.pauses_changed, client.cascade = engine_client.pauses_changed, engine_client.cascade
        sampler = Sampler(pool, LANE, schema, interval=chosen.interval)
        desk = Desk(
            settings=chosen,
            schema=schema,
            pool=pool,
            client=client,
            sampler=sampler,
            redactor=Redactor(chosen),
            engine=engine,
        )
        async with sampling(sampler):
            yield App(desk)


async def run_dashboard(
    dsn: str,
    settings: Dashboard,
    *,
    schema: str = "durable",
    engine: LiveEngine | None = None,
    engine_client: Client | None = None,
    task_status: trio.TaskStatus[Sequence[tuple[str, int]]] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve a dashboard until cancelled. `task_status` receives its addresses."""
    async with open_app(
        dsn, schema=schema, settings=settings, engine=engine, engine_client=engine_client
    ) as app:
        await serve(
            app, host=settings.host, port=settings.port, root_path=settings.root_path, task_status=task_status
        )
