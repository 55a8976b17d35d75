"""9. Graphs: tasks that come after one another beside as many free ones, children of one parent each.

"4 wide" has two readings, and both are measured: every task comes after 4 of the layer before it (many can run at a
time), and 4 chains side by side (4 can run at a time, so every task waits for a commit and a pick of its own).
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Mapping
from typing import Any

import durable_actors as da
import trio

from bench.contest import Figure, Progress, Sample
from bench.meter import Meter
from bench.server import Server
from bench.workload import BEST, QUEUE, engine

WIDE = 4
LAYERS = 20


@da.job(name="bench:task", queue=QUEUE)
async def task(args: dict[str, Any]) -> None: ...


@functools.cache
def _drawn(count: int) -> list[list[int]]:
    """Which of the layer before it each task comes after, by position. Drawn before the clock runs."""
    rng, size = random.Random(19), count // LAYERS
    return [
        rng.sample(range(at - at % size - size, at - at % size), WIDE) if at >= size else []
        for at in range(count)
    ]


def free(count: int) -> list[da.Child]:
    """Tasks that come after nothing; made one by one, as the others."""
    return [da.Child(task, args={}) for _ in range(count)]


def layers(count: int) -> list[da.Child]:
    """20 layers; every task comes after 4 of the layer before it."""
    found: list[da.Child] = []
    for after in _drawn(count):
        found.append(da.Child(task, args={}, after=[found[at] for at in after]))
    return found


def chains(count: int) -> list[da.Child]:
    """4 chains side by side."""
    found = [da.Child(task, args={}) for _ in range(WIDE)]
    while len(found) < count:
        found.append(da.Child(task, args={}, after=found[-WIDE]))
    return found


SHAPES: Mapping[str, Callable[[int], list[da.Child]]] = {
    "free": free,
    "20 layers, each task after 4": layers,
    "4 chains": chains,
}


class Graph(da.Machine[dict], name="bench:graph", queue=QUEUE):  # type: ignore[type-arg]
    @da.step(initial=True)
    async def spread(self, ctx: da.Context[dict]) -> da.Outcome:  # type: ignore[type-arg]
        return da.ScheduleChildren(self.join, SHAPES[ctx.state["shape"]](ctx.state["n"]))

    @da.step
    async def join(self, ctx: da.Context[dict]) -> da.Outcome:  # type: ignore[type-arg]
        return da.Done(dict(ctx.children_counts))


async def measure(
    server: Server, dsn: str, shape: str, count: int, queue: Mapping[str, Any] | None
) -> Sample:
    meter = Meter(dsn, server.postmaster)
    _drawn(count)
    async with engine(dsn, queue) as running:
        meter.start()
        parent = await running.client.insert(Graph, state={"shape": shape, "n": count})
        found = await running.client.result(parent, timeout=600)
        sample = dict(meter.stop(count))
    meter.close()
    if found != {"done": count}:
        raise RuntimeError(f"{shape}: {found}, not {count} tasks that are done")
    return sample


def run(server: Server, progress: Progress, *, quick: bool) -> list[Figure]:
    count, rounds = (2_000, 1) if quick else (10_000, 3)
    samples: dict[str, list[Sample]] = {}
    for number in range(rounds):
        for name, queue in (("best", BEST), ("defaults", None)):
            for shape in SHAPES:
                progress(f"graphs: {shape}, {name} ({number + 1})")
                with server.database() as dsn:
                    sample = trio.run(measure, server, dsn, shape, count, queue)
                samples.setdefault(f"{shape}, {name}", []).append(sample)
    return [Figure.of("graphs", name, "task", each) for name, each in samples.items()]
