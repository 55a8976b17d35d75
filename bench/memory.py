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


async def measure(dsn: str, count: int, what: str) -> Sample:
    """The idle engine; then `count` steps that sleep, or `count` rows that wait for a slot."""
    found: dict[str, float] = {}
    most = {"concurrency": count} if what == "in_flight_bytes" else {"concurrency": 1, "prefetch": count}
    for name, queue in (("warm-up", {"concurrency": 100, "prefetch": 100}), (what, most)):
        async with workload.engine(dsn, queue) as running:
            await trio.sleep(0.3)
            before = resident()
            limits = da.Queue(**queue)
            wanted = min(limits.concurrency + (limits.prefetch or 0), count)
            await trio.to_thread.run_sync(workload.fill, dsn, "bench:sleeper", wanted)
            while len(running._node.leases.everything()) < wanted:
                await trio.sleep(0.05)
            await trio.sleep(0.3)
            found[name] = (resident() - before) / wanted
            _go.set()
            await workload.committed(running)
        globals()["_go"] = trio.Event()
    del found["warm-up"]
    return found


def run(server: Server, progress: Progress, *, quick: bool) -> list[Figure]:
    samples: list[Sample] = []
    for number in range(1 if quick else 3):
        progress(f"memory ({number + 1})")
        with server.database() as dsn:
            found: dict[str, float] = {}
            for what in (
                "in_flight_bytes",
                "buffered_bytes",
            ):  # a process each: freed memory is not given back
                order = json.dumps({"dsn": dsn, "count": 2_000 if quick else 10_000, "what": what})
                found |= run_python(sys.executable, "bench.memory", order)
            samples.append(found)
    return [Figure.of("memory", "resident bytes per step", "step", samples)]


if __name__ == "__main__":
    _order = json.loads(sys.argv[1])
    print(json.dumps(trio.run(measure, _order["dsn"], _order["count"], _order["what"])))
