"""4. Pick-up latency at rest: from the call of insert to the first line of the step, beside commits as yardstick.

In-process an insert pokes the feeder. A row inserted elsewhere is found by polling, so the second part inserts by
plain SQL, as another process would.
"""

from __future__ import annotations

import json
import statistics
import time
from typing import Any

import durable_actors as da
import psycopg
import trio

from bench.contest import Figure, Progress, Sample
from bench.server import Server
from bench.workload import QUEUE, engine

_started: trio.MemorySendChannel[float]


@da.job(name="bench:stamp", queue=QUEUE)
async def stamp(args: dict[str, Any]) -> None:  # noqa: ARG001 - a job has arguments
    _started.send_nowait(time.perf_counter())


def quantiles(seconds: list[float]) -> Sample:
    """Milliseconds at the median, at the 99th percentile, and of the slowest."""
    ordered = sorted(seconds)
    return {
        "p50_ms": statistics.median(ordered) * 1e3,
        "p99_ms": ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))] * 1e3,
        "max_ms": ordered[-1] * 1e3,
    }


class Yardstick:
    """One-row commits on the same server, taken between the samples: what the disk and the machine do just now."""

    def __init__(self, dsn: str) -> None:
        self._conn = psycopg.connect(dsn, autocommit=True)
        self._conn.execute("create table if not exists yardstick (n int)")
        self.seconds: list[float] = []

    def take(self) -> None:
        begin = time.perf_counter()
        self._conn.execute("insert into yardstick values (1)", prepare=True)
        self.seconds.append(time.perf_counter() - begin)

    def close(self) -> None:
        self._conn.close()


async def in_process(dsn: str, count: int) -> tuple[Sample, Sample]:
    global _started
    _started, receive = trio.open_memory_channel[float](10)
    yardstick = Yardstick(dsn)
    seconds: list[float] = []
    async with engine(dsn, {"concurrency": 10}):
        for n in range(count + 20):
            await trio.sleep(0.01)
            begin = time.perf_counter()
            await da.insert(stamp, args={"n": n})
            took = await receive.receive() - begin
            await trio.sleep(0.01)
            yardstick.take()
            if n >= 20:  # the first ones prepare statements
                seconds.append(took)
    yardstick.close()
    return quantiles(seconds), quantiles(yardstick.seconds[20:])


async def elsewhere(dsn: str, count: int, **options: Any) -> Sample:
    global _started
    _started, receive = trio.open_memory_channel[float](10)
    seconds: list[float] = []
    with psycopg.connect(dsn, autocommit=True) as connection:
        async with engine(dsn, {"concurrency": 10}, **options):
            await trio.sleep(0.1)
            for n in range(count):
                # Not in step with the polls.
                await trio.sleep(0.013 + 0.001 * (n % 17))
                begin = time.perf_counter()
                connection.execute(
                    "insert into durable.gen_durable (fsm, step, queue, state)"
                    f" values ('bench:stamp', 'perform', '{QUEUE}', %s)",
                    [json.dumps({"n": n})],
                )
                seconds.append(await receive.receive() - begin)
    return quantiles(seconds)


def run(server: Server, progress: Progress, *, quick: bool) -> list[Figure]:
    count = 60 if quick else 300
    rounds = 1 if quick else 5
    samples: dict[str, list[Sample]] = {
        "insert → step": [],
        "one commit": [],
        "another process, poll 0.02": [],
    }
    for number in range(rounds):
        progress(f"latency ({number + 1}/{rounds})")
        with server.database() as dsn:
            ours, commit = trio.run(in_process, dsn, count)
        samples["insert → step"].append(ours)
        samples["one commit"].append(commit)
        with server.database() as dsn:
            polled = trio.run(_fast_poll, dsn, count // 2)
        samples["another process, poll 0.02"].append(polled)
    if not quick:
        progress("latency: another process, defaults")
        with server.database() as dsn:
            samples["another process, defaults"] = [trio.run(elsewhere, dsn, 40)]
    return [Figure.of("latency", name, "start", each) for name, each in samples.items()]


async def _fast_poll(dsn: str, count: int) -> Sample:
    return await elsewhere(dsn, count, poll_interval=0.02, max_poll_interval=0.02)
