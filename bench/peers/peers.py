"""14. Peers in the same run, on the same Postgres, each in an environment of its own (make bench builds them)."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from bench import workload
from bench.contest import ROOT, Contestant, Failed, Figure, Progress, Sample, compete, in_child, run_python
from bench.reach import BEST, BRIEF, DEFAULTS, GRAPHILE, PG_BOSS
from bench.server import Server

ENVIRONMENTS = {"oban": ".venv-bench-oban"}
OTHERS = ".venv-bench-peers"
NODE = ".venv-bench-node"

# name, peer, jobs, jobs when quick, settings
PEERS: list[tuple[str, str, int, int, dict[str, Any]]] = [
    ("PgQueuer, batch 500, uvloop", "pgqueuer", 20_000, 5_000, {"batch": 500}),
    ("PgQueuer, defaults", "pgqueuer", 5_000, 1_000, {"uv": False}),
    ("Oban, best", "oban", 3_000, 1_000, {"limit": 100}),
    ("Oban, defaults", "oban", 2_000, 500, {}),
    ("absurd, best", "absurd", 1_000, 200, {"concurrency": 20}),
    ("absurd, defaults", "absurd", 300, 100, {}),
    ("Procrastinate, best", "procrastinate", 1_000, 200, {"concurrency": 50}),
    ("Procrastinate, defaults", "procrastinate", 500, 100, {}),
    ("DBOS, best", "dbos", 500, 100, {"poll": 0.05, "worker_concurrency": 50, "pool": 30}),
    ("DBOS, defaults", "dbos", 300, 100, {}),
    ("absurd, five steps", "absurd", 300, 60, {"steps": 5, "concurrency": 20}),
    ("DBOS, five steps", "dbos", 100, 30, {"steps": 5, "poll": 0.05, "worker_concurrency": 50, "pool": 30}),
]  # fmt: skip


# The same, of peers that run on Node.
NODE_PEERS: list[tuple[str, str, int, int, dict[str, Any]]] = [
    (GRAPHILE, "graphile", 40_000, 10_000, {"concurrency": 100, "localQueue": 2000, "completions": 5}),
    ("Graphile Worker, its perfTest", "graphile", 40_000, 10_000,
     {"concurrency": 24, "localQueue": 500, "completions": 0}),
    ("Graphile Worker, defaults", "graphile", 2_000, 500, {}),
    (PG_BOSS, "pgboss", 40_000, 10_000,
     {"localConcurrency": 2, "batchSize": 2000, "burstWhenBatchFull": True, "pollingIntervalSeconds": 0.5}),
    ("pg-boss, defaults", "pgboss", 3, 3, {}),  # one job every two seconds
]  # fmt: skip


def python_of(peer: str) -> Path:
    return ROOT / ENVIRONMENTS.get(peer, OTHERS) / "bin" / "python"


def contestant(name: str, peer: str, count: int, settings: dict[str, Any]) -> Contestant:
    def run(server: Server, dsn: str) -> Sample:
        python = python_of(peer)
        if not python.exists():
            raise Failed(f"{python.parent.parent.name} is missing: see bench/README.md")
        order = {
            "peer": peer, "dsn": dsn, "postmaster": server.postmaster, "count": count, "settings": settings,
        }  # fmt: skip
        return run_python(python, "bench.peers.run", json.dumps(order))

    unit = "workflow" if settings.get("steps") else "job"
    return Contestant(name, run, unit, migrated=False)


def on_node(name: str, peer: str, count: int, settings: dict[str, Any]) -> Contestant:
    def run(server: Server, dsn: str) -> Sample:
        modules = ROOT / NODE / "node_modules"
        if not modules.exists():
            raise Failed(f"{NODE} is missing: see bench/README.md")
        order = {
            "peer": peer, "dsn": dsn, "postmaster": server.postmaster, "count": count, "settings": settings,
            "modules": str(modules),
        }  # fmt: skip
        return run_python(sys.executable, "bench.peers.node_peer", json.dumps(order))

    return Contestant(name, run, migrated=False, rounds=1 if count < 100 else None)


def run(server: Server, progress: Progress, *, quick: bool) -> list[Figure]:
    count = 10_000 if quick else 40_000
    # As `insert` writes them: a job records its failed attempts.
    best = {
        "count": count, "queue": workload.BEST, "gc": workload.GC, "columns": {"journal": "1", "rev": "1"},
    }  # fmt: skip
    contestants = [  # ours among them, so that the same minute is compared
        Contestant(BEST, in_child(what="engine", **best)),
        Contestant(BRIEF, in_child(what="engine", machine="bench:brief", **best)),
        Contestant(DEFAULTS, in_child(what="engine", count=count // 4)),
    ]
    contestants += [
        on_node(name, peer, small if quick else count, settings)
        for name, peer, count, small, settings in NODE_PEERS
    ]
    contestants += [
        contestant(name, peer, small if quick else count, settings)
        for name, peer, count, small, settings in PEERS
    ]
    return compete("peers", server, contestants, rounds=1 if quick else 3, progress=progress)
