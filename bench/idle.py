"""5. What an engine with nothing to do costs: statements and CPU per second, by poll interval."""

from __future__ import annotations

from typing import Any

import trio

from bench.contest import Figure, Progress, Sample
from bench.meter import Meter
from bench.server import Server
from bench.workload import engine


async def rest(server: Server, dsn: str, seconds: float, **options: Any) -> Sample:
    meter = Meter(dsn, server.postmaster)
    async with engine(dsn, {"concurrency": 10}, **options):
        await trio.sleep(1.0)
        meter.start()
        await trio.sleep(seconds)
        found = meter.stop(1)
    meter.close()
    took = found["seconds"]
    return {
        "statements_per_second": found["statements"] / took,
        "worker_percent": found["worker_us"] / 1e4 / took,
        "server_percent": found["server_us"] / 1e4 / took,
        "wal_bytes_per_second": found["wal_bytes"] / took,
    }


def run(server: Server, progress: Progress, *, quick: bool) -> list[Figure]:
    seconds, rounds = (3.0, 1) if quick else (8.0, 2)
    fast: list[Sample] = []
    plain: list[Sample] = []

    async def once(dsn: str, found: list[Sample], **options: Any) -> None:
        found.append(await rest(server, dsn, seconds, **options))

    async def polled(dsn: str) -> None:
        await once(dsn, fast, poll_interval=0.02, max_poll_interval=0.02)

    async def by_default(dsn: str) -> None:
        await once(dsn, plain)

    for number in range(rounds):
        progress(f"idle ({number + 1}/{rounds})")
        for main in (by_default, polled):
            with server.database() as dsn:
                trio.run(main, dsn)
    return [
        Figure.of("idle", "defaults", "second", plain),
        Figure.of("idle", "poll_interval = max_poll_interval = 0.02", "second", fast),
    ]
