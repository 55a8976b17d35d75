"""6. Recovery after kill -9: how long until another process runs what the dead one held."""

from __future__ import annotations

from typing import Any

from bench.contest import Figure, Progress
from bench.processes import recover
from bench.server import Server


def run(server: Server, progress: Progress, *, quick: bool) -> list[Figure]:
    settings: dict[str, dict[str, Any]] = {
        "dead_after=1": {"dead_after": 1, "lease_ttl": 15, "reap_interval": 1}
    }
    if not quick:
        settings = {"defaults": {}, **settings}
    figures: list[Figure] = []
    for name, options in settings.items():
        progress(f"recovery: {name}")
        with server.database() as dsn:
            figures.append(
                Figure.of("recovery", name, "kill", [recover(dsn, 50 if quick else 200, **options)])
            )
    return figures
