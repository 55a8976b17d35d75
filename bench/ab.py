"""`python -m bench.ab REF`: this tree beside another commit, in turn, in one run. CPU per job and per step as ratios.

Each side migrates its databases and runs its workers from its own package; the server, the interpreter and the bench
(this tree's) are the same.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from bench.contest import ROOT, TIMEOUT, Sample
from bench.server import Server, open_server
from bench.workload import BEST, GC


def _keyed(keys: int) -> dict[str, str]:
    """Columns of rows as `insert_many` leaves them: of each key all but the first are held."""
    return {"partition_key": f"'key ' || n %% {keys}", "hold": f"(n > {keys})::int"}


ORDERS: dict[str, dict[str, Any]] = {
    "job, best settings": {"count": 40_000, "queue": BEST, "gc": GC},
    "job, defaults": {"count": 20_000},
    "job with keep=0, best settings": {"machine": "bench:brief", "count": 40_000, "queue": BEST, "gc": GC},
    "job with keep=0, defaults": {"machine": "bench:brief", "count": 20_000},
    "job, 10,000 keys, best settings": {"count": 40_000, "queue": BEST, "gc": GC, "columns": _keyed(10_000)},
    "job, 100 keys, best settings": {"count": 20_000, "queue": BEST, "gc": GC, "columns": _keyed(100)},
    "five steps, best settings": {"machine": "bench:five", "count": 10_000, "queue": BEST, "gc": GC},
    "five steps, defaults": {"machine": "bench:five", "count": 5_000},
}
FIGURES = ("worker_us", "server_us", "wal_bytes")
MIGRATE = "import sys, trio; from durable_actors import migrate; trio.run(migrate, sys.argv[1])"


@contextmanager
def checkout(ref: str) -> Generator[Path, None, None]:
    """A directory with the package of a commit, and nothing else."""
    with tempfile.TemporaryDirectory(prefix="durable-ab-") as place:
        tree = Path(place) / "tree"
        command = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*command, "add", "--quiet", "--detach", str(tree), ref], check=True)
        package = Path(place) / "package"
        package.mkdir()
        (package / "durable_actors").symlink_to(tree / "durable_actors")
        try:
            yield package
        finally:
            subprocess.run([*command, "remove", "--force", str(tree)], check=True)


def in_tree(tree: Path, *arguments: str) -> str:
    """Run Python with the package of this tree and our own bench; return what it printed."""
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        env={**os.environ, "PYTHONPATH": f"{tree}:{ROOT}", "PYTHONSAFEPATH": "1"},
        check=False,
    )
    if done.returncode:
        raise click.ClickException(f"{tree}: {done.stderr.strip()[-2000:]}")
    return done.stdout


def measure(server: Server, tree: Path, order: dict[str, Any]) -> Sample:
    """One run of one side."""
    server.settle()
    with server.database(migrated=False) as dsn:
        in_tree(tree, "-c", MIGRATE, dsn)
        text = json.dumps({"dsn": dsn, "postmaster": server.postmaster, "what": "engine", **order})
        sample: Sample = json.loads(in_tree(tree, "-m", "bench.child", text).strip().splitlines()[-1])
        return sample


@click.command()
@click.argument("ref")
@click.option("--rounds", default=7, help="Runs of each side. Default: 7.")
@click.option("--only", multiple=True, help="Only orders whose name contains this (repeatable).")
def main(ref: str, rounds: int, only: tuple[str, ...]) -> None:
    """Compare this tree (new) with REF (old): the median of the rounds' ratios, the spread, and quiet rounds alone."""
    orders = {name: each for name, each in ORDERS.items() if not only or any(part in name for part in only)}
    samples: dict[tuple[str, str], list[Sample]] = {}
    with checkout(ref) as old, open_server() as server:
        sides = {"old": old, "new": ROOT}
        for number in range(rounds):
            for name, order in orders.items():
                # Who goes first changes: the second one may find a warmer machine.
                for side in sorted(sides, reverse=bool(number % 2)):
                    click.echo(f"\r{number + 1}/{rounds} {name}: {side}        ", err=True, nl=False)
                    samples.setdefault((name, side), []).append(measure(server, sides[side], order))
    click.echo("\r", err=True)
    for name in orders:
        for figure in FIGURES:
            pairs = [
                (a[figure], b[figure])
                for a, b in zip(samples[name, "old"], samples[name, "new"], strict=True)
            ]
            ratios = sorted(new / old for old, new in pairs)
            before, after = (statistics.median(each[side] for each in pairs) for side in (0, 1))
            # What else runs on the machine only adds to a figure: the lower quarter is the least disturbed.
            low = [sorted(each[side] for each in pairs)[rounds // 4] for side in (0, 1)]
            click.echo(
                f"{name:<28} {figure:<10} old {before:7.2f}  new {after:7.2f}  "
                f"ratio {statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})  "
                f"lower quartile {low[1] / low[0]:.3f}"
            )


if __name__ == "__main__":
    main()
