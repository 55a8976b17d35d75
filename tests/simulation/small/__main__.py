"""`python -m tests.simulation.small`: one seed, or as many as fit into the time; exit code 1 when one fails."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

from tests.simulation.run import Report
from tests.simulation.shrink import shrink, told
from tests.simulation.small.breakages import BREAKAGES
from tests.simulation.small.plan import make_plan
from tests.simulation.small.run import simulate

PROGRAM = "tests.simulation.small"
EVERY = 10.0
"""Seconds between lines of progress."""


def main() -> int:
    """Parse, run, tell."""
    parser = argparse.ArgumentParser(prog=f"python -m {PROGRAM}", description=__doc__)
    parser.add_argument("--seed", type=int, help="run this one and show its history")
    parser.add_argument("--drop", default="", help="with --seed: leave out these elements of its plan")
    parser.add_argument("--broken", help="with --seed: break this rule, to see what that looks like")
    parser.add_argument("--seconds", type=float, default=10.0, help="run seeds for so long")
    parser.add_argument("--first", type=int, help="the first seed; default: a new one every time")
    options = parser.parse_args()
    if options.seed is not None:
        return _one(options.seed, options.drop, options.broken)
    return _many(int(time.time()) * 1000 if options.first is None else options.first, options.seconds)


def _one(seed: int, drop: str, broken: str | None) -> int:
    dropped = frozenset(int(each) for each in drop.split(",") if each)
    breakage = next((each for each in BREAKAGES if each.name == broken), None)
    if breakage is None:
        report = simulate(make_plan(seed).without(dropped))
    else:
        report = breakage.simulate(breakage.plan(seed).without(dropped))
    print(told(report, dropped, last=10_000, program=PROGRAM))
    print(f"digest {report.digest}")
    return report.violation is not None


def _many(first: int, seconds: float) -> int:
    began, used, told_at = time.monotonic(), time.process_time(), time.monotonic()
    schedules, virtual = 0, 0.0
    counts: Counter[str] = Counter()
    failed: Report | None = None
    while failed is None and time.monotonic() - began < seconds:
        report = simulate(make_plan(first + schedules))
        schedules, virtual = schedules + 1, virtual + report.seconds
        counts.update(report.counts)
        failed = report if report.violation is not None else None
        if time.monotonic() - told_at > EVERY:
            told_at = time.monotonic()
            print(f"{schedules} schedules, up to seed {first + schedules - 1}: all is well", flush=True)
    took, cpu = time.monotonic() - began, time.process_time() - used
    print(
        f"{schedules} schedules in {took:.1f} s: {schedules / took * 60:.0f} a minute, {virtual:.0f} virtual seconds"
    )
    print(f"{cpu:.1f} s of processor time: {schedules / cpu * 60:.0f} schedules a minute of it")
    print(", ".join(f"{count} {name}" for name, count in sorted(counts.items())))
    if failed is None:
        return 0
    smaller, dropped = shrink(failed, simulate)
    print(told(smaller, dropped, program=PROGRAM))
    return 1


if __name__ == "__main__":
    sys.exit(main())
