"""11. Resident memory per step in flight and per buffered row, above the idle engine. In a process of its own."""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

import durable_actors as da
import trio

from bench import workload
from bench.contest import Figure, Progress, Sample, run_python
from bench.server import Server
from bench.workload import QUEUE

_running = 0
_go = trio.Event()


@da.job(name="bench:sleeper", queue=QUEUE)
async def sleeper(args: dict[str, Any]) -> None:  # noqa: ARG001 - a job has arguments
    global _running
    _running += 1
    await _go.wait()


workload.MACHINES["bench:sleeper"] = "perform"


def resident() -> int:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


async def measure(dsn: str, count: int, what: str) -> None:
    """The idle engine; then `count` steps that sleep, or `count` rows that wait for a slot. Does not return."""
    most = {"concurrency": count} if what == "in_flight_bytes" else {"concurrency": 1, "prefetch": count}
    async with workload.engine(dsn, most) as running:
        # A few rows first: what the engine allocates once is not per step.
        for rows in (200, count):
            before = resident()
            await trio.to_thread.run_sync(workload.fill, dsn, "bench:sleeper", min(rows, count - 200))
            while len(running._node.claims.all()) < rows:
                await trio.sleep(0.05)
            await trio.sleep(0.3)
        print(json.dumps({what: (resident() - before) / (count - 200)}), flush=True)
        os._exit(0)  # 10,000 rows through one slot would take a minute, and nobody needs them


def run(server: Server, progress: Progress, *, quick: bool) -> list[Figure]:
    samples: list[Sample] = []
    for number in range(1 if quick else 3):
        progress(f"memory ({number + 1})")
        found: dict[str, float] = {}
        for what in ("in_flight_bytes", "buffered_bytes"):  # a process each: freed memory is not given back
            with server.database() as dsn:
                order = json.dumps({"dsn": dsn, "count": 2_000 if quick else 10_000, "what": what})
                found |= run_python(sys.executable, "bench.memory", order)
        samples.append(found)
    return [Figure.of("memory", "resident bytes per step", "step", samples)]


if __name__ == "__main__":
    _order = json.loads(sys.argv[1])
    trio.run(measure, _order["dsn"], _order["count"], _order["what"])
