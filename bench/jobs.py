"""1. One-step jobs: the ceiling, the engine at its best, at other settings, and with nothing set."""

from __future__ import annotations

from bench.contest import Contestant, Figure, Progress, compete, in_child
from bench.server import Server
from bench.workload import BEST, GC


def contestants(*, count: int, quick: bool) -> list[Contestant]:
    ours = [
        Contestant("ceiling", in_child(what="ceiling", count=count)),
        Contestant("durable_actors, best", in_child(what="engine", count=count, queue=BEST, gc=GC)),
        # As many as take as long as the others do: a stretch of a fifth of a second is mostly its beginning.
        Contestant("durable_actors, defaults", in_child(what="engine", count=count // 4)),
    ]
    if not quick:
        ours.append(
            Contestant("durable_actors, best, Python's gc", in_child(what="engine", count=count, queue=BEST))
        )
        hundred = {"concurrency": 100, "prefetch": 100, "min_demand": 50}
        ours += [
            Contestant(
                "durable_actors, concurrency 100", in_child(what="engine", count=count, queue=hundred, gc=GC)
            ),
            Contestant(
                "durable_actors, concurrency 100 alone",
                in_child(what="engine", count=count // 2, queue={"concurrency": 100}, gc=GC),
            ),
        ]
    return ours


def run(server: Server, progress: Progress, *, quick: bool) -> list[Figure]:
    count, rounds = (10_000, 3) if quick else (20_000, 5)
    return compete("jobs", server, contestants(count=count, quick=quick), rounds=rounds, progress=progress)
