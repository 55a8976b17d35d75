"""`durable-actors dashboard --demo`: a shop with work of every kind, and the dashboard in its engine."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final

import click
import trio

from durable_actors._postgres.target import open_target
from durable_actors._store.migrate import uninstall
from durable_actors.config import Config, Queue
from durable_actors.dashboard_options import Dashboard
from durable_actors.engine import open_engine

QUEUES: Final[dict[str, int | Queue]] = {
    "orders": 8,
    "mail": 4,
    "images": Queue(6, fair=True),
    "reports": 4,
    "payments": 6,
}
"""Not `legacy`: somebody should see that nobody serves it."""


async def serve_demo(
    dsn: str,
    settings: Dashboard,
    wait: Callable[[trio.CancelScope], Awaitable[object]],
    *,
    quiet: bool = True,
) -> None:
    """Run the shop in a schema of its own, which is dropped at the beginning and at the end."""
    shop: Any = importlib.import_module("durable_actors.cli.demo_shop")  # only the demo knows its machines
    if quiet:
        logging.getLogger("durable_actors.engine").setLevel(logging.CRITICAL)  # its orders fail on purpose
    async with open_target(dsn) as target:
        await uninstall(target.dsn, schema=shop.SCHEMA)
        config = Config(
            dsn=target.dsn,
            schema=shop.SCHEMA,
            node="shop",
            queues=QUEUES,
            limits=shop.LIMITS,
            dashboard=settings,
            name="shop",
        )
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(wait, nursery.cancel_scope)
                async with open_engine(config):
                    await shop.fill()
                    click.echo(
                        f"dashboard: http://{settings.host}:{settings.port}{settings.root_path}/  (Ctrl-C ends it)"
                    )
                    await shop.go_on()
        finally:
            with trio.move_on_after(10, shield=True):
                await uninstall(target.dsn, schema=shop.SCHEMA)
