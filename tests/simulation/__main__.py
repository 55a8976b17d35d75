"""`python -m tests.simulation`: one seed, or as many as fit into the time; exit code 1 when one fails."""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import sys
import time
from collections import Counter
from contextlib import nullcontext

from tests.simulation.breakages import BREAKAGES
from tests.simulation.plan import make_plan
from tests.simulation.run import Report, simulate, simulate_seed
from tests.simulation.shrink import shrink, told


def main() -> int:
    """Parse, run, tell."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seed", type=int, help="run this one and show its history")
    parser.add_argument("--drop", default="", help="with --seed: leave out these elements of its plan")
    parser.add_argument("--broken", help="with --seed: break this rule, to see what that looks like")
    parser.add_argument("--seconds", type=float, default=10.0, help="run seeds for so long")
    parser.add_argument("--first", type=int, help="the first seed; default: a new one every time")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    options = parser.parse_args()
    if options.seed is not None:
        return _one(options.seed, options.drop, options.broken)
    first = int(time.time()) * 1000 if options.first is None else options.first
    return _many(first, options.seconds, options.jobs)


def _one(seed: int, drop: str, broken: str | None) -> int:
    dropped = frozenset(int(each) for each in drop.split(",") if each)
    breakage = next((each for each in BREAKAGES if each.name == broken), None)
    plan = (breakage.plan(seed) if breakage else make_plan(seed)).without(dropped)
    with breakage.applied(plan) if breakage else nullcontext(frozenset[str]()) as rules:
        report = simulate(plan, rules)
    print(told(report, dropped, last=10_000))
    print(f"digest {report.digest}")
    return report.violation is not None


def _many(first: int, seconds: float, jobs: int) -> int:
    began, schedules, virtual = time.monotonic(), 0, 0.0
    counts: Counter[str] = Counter()
    failed: Report | None = None
    with multiprocessing.get_context("spawn").Pool(jobs) if jobs > 1 else nullcontext() as pool:
        seeds = itertools.count(first)
        reports = (
            pool.imap(simulate_seed, _until(seeds, began + seconds), 8) if pool else map(simulate_seed, seeds)
        )
        for report in reports:
            schedules, virtual = schedules + 1, virtual + report.seconds
            counts.update(report.counts)
            if report.violation is not None:
                failed = report
                break
            if time.monotonic() - began > seconds:
                break
        if pool:
            pool.terminate()
    took = time.monotonic() - began
    print(
        f"{schedules} schedules in {took:.1f} s: {schedules / took * 60:.0f} a minute, {virtual:.0f} virtual seconds"
    )
    if jobs == 1:  # on a busy machine the clock on the wall tells little
        used = time.process_time()
        print(f"{used:.1f} s of processor time: {schedules / used * 60:.0f} schedules a minute of it")
    print(", ".join(f"{count} {name}" for name, count in sorted(counts.items())))
    if failed is None:
        return 0
    print(told(*shrink(failed, simulate)))
    return 1


def _until(seeds: itertools.count[int], end: float) -> list[int]:
    """Enough for the pool, which asks for all of them at once."""
    return list(itertools.islice(seeds, int((end - time.monotonic()) * 200)))


if __name__ == "__main__":
    sys.exit(main())
