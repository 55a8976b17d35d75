"""2. Five-step machines, with run-ahead and without, beside a bare loop that commits each step in batches.

Twice: one loop runs the very steps, decodes and encodes their states; the other only writes, which is what Postgres can
do, not what a Python process can.
"""

from __future__ import annotations

from bench.contest import Contestant, Figure, Progress, compete, in_child
from bench.server import Server
from bench.workload import BEST, GC

STEPS = 5


def contestants(*, count: int) -> list[Contestant]:
    return [
        Contestant(
            "bare loop", in_child(what="ceiling", machine="bench:five", count=count, real=True), "machine"
        ),
        Contestant(
            "bare loop that only writes",
            in_child(what="ceiling", machine="bench:five", count=count, steps=STEPS),
            "machine",
        ),
        Contestant(
            "durable_actors, run-ahead",
            in_child(what="engine", machine="bench:five", count=count, queue=BEST, gc=GC),
            "machine",
        ),
        Contestant(
            "durable_actors, each step claimed",
            in_child(what="engine", machine="bench:released", count=count // 2, queue=BEST, gc=GC),
            "machine",
        ),
    ]  # fmt: skip


def run(server: Server, progress: Progress, *, quick: bool) -> list[Figure]:
    count, rounds = (4_000, 3) if quick else (10_000, 5)
    return compete("machines", server, contestants(count=count), rounds=rounds, progress=progress)
