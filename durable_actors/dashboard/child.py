"""Dashboard: serves the dashboard inside an engine's tree.

Owns       connections of its own, its sampler and its clients' sockets.
Receives   requests over HTTP.
Sends      commands to the database, like any client; hints to the engine of this process after their commit.
Reads      what its pages show, and `samples`.
If it dies it starts again here, after a pause that grows; its supervisor never sees an error.
Never      makes the engine wait: a stop cancels it at once, whatever its clients do.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

import trio

from durable_actors._client import Client
from durable_actors.dashboard.desk import LiveEngine
from durable_actors.dashboard.opening import run_dashboard
from durable_actors.dashboard_options import Dashboard

logger = logging.getLogger("durable_actors.dashboard")

FIRST_PAUSE: Final = 1.0
LONGEST_PAUSE: Final = 30.0
LONG_RUN: Final = 60.0
"""Seconds after which a run counts as good: the next pause is short again."""


class _Announced:
    """Logs where the dashboard listens."""

    def __init__(self, root_path: str) -> None:
        self._root_path = root_path

    def started(self, value: Sequence[tuple[str, int]] | None = None) -> None:
        """Trio's `task_status`."""
        for host, port in value or ():
            name = f"[{host}]" if ":" in host else host
            logger.info("dashboard: http://%s:%s%s/", name, port, self._root_path)


async def keep_serving(
    dsn: str, settings: Dashboard, *, schema: str, engine: LiveEngine, client: Client
) -> None:
    """Serve until cancelled. A port that is taken, or a bug, is logged; then it tries again."""
    pause = FIRST_PAUSE
    while True:
        began = trio.current_time()
        error: Exception | None = None
        try:
            await run_dashboard(
                dsn,
                settings,
                schema=schema,
                engine=engine,
                engine_client=client,
                task_status=_Announced(settings.root_path),
            )
        except Exception as exc:  # noqa: BLE001 - whatever it is, the engine must not end because of it
            error = exc
        if trio.current_time() - began > LONG_RUN:
            pause = FIRST_PAUSE
        logger.error("the dashboard ended, and starts again in %g s: %s", pause, error, exc_info=error)
        await trio.sleep(pause)
        pause = min(pause * 2, LONGEST_PAUSE)
