"""15. What the journal costs: the same work with nothing recorded, failed attempts, outcomes, every move."""

from __future__ import annotations

from bench.contest import Contestant, Figure, Progress, compete, in_child
from bench.server import Server
from bench.workload import BEST, GC

LEVELS = {"off": 0, "failed attempts": 1, "outcomes": 2, "every move": 3, "full": 4}


def contestants(*, jobs: int, machines: int) -> list[Contestant]:
    found = [
        Contestant(
            f"jobs, {name}",
            in_child(what="engine", count=jobs, queue=BEST, gc=GC, columns={"journal": str(level)}),
        )
        for name, level in LEVELS.items()
    ]
    return found + [
        Contestant(
            f"five steps, {name}",
            in_child(
                what="engine",
                machine="bench:five",
                count=machines,
                queue=BEST,
                gc=GC,
                columns={"journal": str(level)},
            ),
            "machine",
        )
        for name, level in LEVELS.items()
        if level != 1
    ]


def run(server: Server, progress: Progress, *, quick: bool) -> list[Figure]:
    jobs, machines, rounds = (20_000, 4_000, 3) if quick else (40_000, 10_000, 7)
    return compete(
        "journal", server, contestants(jobs=jobs, machines=machines), rounds=rounds, progress=progress
    )
