"""Chaos: break it on purpose, and count what was lost.

    python -m tests.chaos                                     every nemesis, 20 seeds each
    python -m tests.chaos --quick                             every nemesis once, with a new seed
    python -m tests.chaos --nemesis kill --nemesis stop --seeds 5
    python -m tests.chaos --nemesis kill --seed 17 --keep     one run again, its history kept
    python -m tests.chaos --list

The seed decides what is inserted and sent, and what is done to whom after how long. It does not decide how the kernel
schedules processes: a failure may need several runs of its seed.
"""

from __future__ import annotations

import argparse
import json
import secrets
import signal
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path

import trio
from durable_actors.testing.database import DatabaseServer, open_server
from tests.chaos.nemeses import Nemesis, nemeses
from tests.chaos.onlooker import missed
from tests.chaos.run import SETTLE, Report, run_once
from tests.chaos.zygote import open_zygote

QUICK = (2.5, 0.7)
"""Seconds and scale of a quick run: all nemeses together take about three minutes."""
SHOWN = 5
"""Failures and violations that are shown of one run."""


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--nemesis", action="append", metavar="NAME", help="only these (repeatable)")
    parser.add_argument("--seeds", type=int, default=20, help="runs per nemesis (default 20)")
    parser.add_argument("--seed", type=int, help="one run with this seed; with --seeds: the first of them")
    parser.add_argument("--seconds", type=float, help="how long faults are injected in each run")
    parser.add_argument("--scale", type=float, default=1.0, help="how much work, 1.0 is about 500 commits")
    parser.add_argument("--settle", type=float, default=SETTLE, help="seconds for all work to end")
    parser.add_argument(
        "--quick", action="store_true", help="every nemesis once, with a new seed or the next one"
    )
    parser.add_argument("--keep", action="store_true", help="keep the history of runs that went well, too")
    parser.add_argument(
        "--dashboard", action="store_true", help="somebody looks at every page of the dashboard"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every report to this file")
    parser.add_argument("--list", action="store_true", help="name the nemeses and end")
    options = parser.parse_args(arguments)
    if options.quick:
        options.seeds = 1
        options.seconds = options.seconds or QUICK[0]
        options.scale = QUICK[1] if options.scale == 1.0 else options.scale
        options.seed = secrets.randbelow(1_000_000) if options.seed is None else options.seed
    elif options.seed is not None and "--seeds" not in (arguments or sys.argv):
        options.seeds = 1
    return options


def line_of(report: Report) -> str:
    """One run in one line."""
    faults = ", ".join(f"{count} {kind}" for kind, count in sorted(report.faults.items())) or "no faults"
    verdict = "ok" if report.ok else "FAILED"
    counts = [report.tally.get(name, 0) for name in ("reaped", "verified", "rebuilt")]
    checked = "{:5} commits {:4} reaps {:4} verified {:3} rebuilt".format(report.commits, *counts)
    checked += f" {report.pages:5} pages" if report.pages else ""
    return f"{report.nemesis:<18} seed {report.seed:<7} {report.seconds:5.1f} s  {checked}  {verdict:<6}  {faults}"


def explain(report: Report, options: argparse.Namespace) -> str:
    """What went wrong, where its history is, and how to do it again."""
    lines = [f"  {text}" for text in report.failures[:SHOWN]]
    if len(report.failures) > SHOWN:
        lines.append(f"  ... and {len(report.failures) - SHOWN} failures more")
    for name, count in Counter(each.invariant for each in report.violations).items():
        lines.append(f"  {name}: {count} violations")
    # The shortest story that shows it: one per invariant.
    for name in dict.fromkeys(each.invariant for each in report.violations):
        shortest = min(
            (each for each in report.violations if each.invariant == name), key=lambda v: len(v.story)
        )
        lines += [f"  {line}" for line in str(shortest).splitlines()]
    more = f" --seconds {options.seconds:g}" if options.seconds else ""
    more += f" --scale {options.scale:g}" if options.scale != 1.0 else ""
    lines.append(f"  history: {report.folder}")
    lines.append(
        f"  again:   python -m tests.chaos --nemesis {report.nemesis} --seed {report.seed}{more} --keep"
    )
    return "\n".join(lines)


def table(reports: list[Report]) -> str:
    """Per nemesis, and in all."""
    lines = [
        f"{'nemesis':<18} {'runs':>5} {'failed':>7} {'faults':>7} {'commits':>8} {'s/run':>6} {'worst':>6}"
    ]
    names = list(dict.fromkeys(each.nemesis for each in reports))
    groups = [(name, [each for each in reports if each.nemesis == name]) for name in names]
    for name, group in [*groups, ("all", reports)]:
        seconds = [each.seconds for each in group]
        lines.append(
            f"{name:<18} {len(group):>5} {sum(not each.ok for each in group):>7} "
            f"{sum(sum(each.faults.values()) for each in group):>7} {sum(each.commits for each in group):>8} "
            f"{sum(seconds) / max(1, len(group)):>6.1f} {max(seconds, default=0.0):>6.1f}"
        )
    return "\n".join(lines)


def views_table(reports: list[Report]) -> str:
    """How often each view of the dashboard was served, and which one never was."""
    views = sum((each.views for each in reports), Counter[str]())
    lines = [f"  {count:6} {view}" for view, count in sorted(views.items())]
    lines += [f"   never {view}" for view in missed(views)]
    return "\n".join([f"dashboard: {sum(each.pages for each in reports)} answers", *lines])


def as_json(report: Report) -> dict[str, object]:
    """For machines."""
    return {
        "nemesis": report.nemesis,
        "seed": report.seed,
        "ok": report.ok,
        "seconds": round(report.seconds, 2),
        "checked": dict(report.tally),
        "lag": round(report.lag, 3),
        "faults": dict(report.faults),
        "failures": report.failures,
        "violations": [str(each) for each in report.violations],
        "history": None if report.folder is None else str(report.folder),
    }


async def run_all(
    chosen: list[Nemesis], options: argparse.Namespace, server: DatabaseServer, reports: list[Report]
) -> None:
    """Seed by seed, so that every nemesis has been there early."""
    first = 1 if options.seed is None else options.seed
    run = partial(
        run_once,
        seconds=options.seconds,
        scale=options.scale,
        settle=options.settle,
        keep=options.keep,
        dashboard=options.dashboard,
    )
    async with open_zygote() as zygote:
        for seed in range(first, first + options.seeds):
            for place, each in enumerate(chosen):
                # Of a quick run, too, every second one records everything.
                report = await run(each, seed + place % 2 if options.quick else seed, server, zygote)
                reports.append(report)
                print(line_of(report), flush=True)
                if not report.ok:
                    print(explain(report, options), flush=True)
                elif options.keep:
                    print(f"  history: {report.folder}")


def main() -> int:
    """The command."""
    options = parse()
    known = nemeses()
    if options.list:
        for each in known.values():
            print(f"{each.name:<18} {each.about}")
        return 0
    unknown = [name for name in options.nemesis or () if name not in known]
    if unknown:
        print(f"no such nemesis: {', '.join(unknown)}; there are {', '.join(known)}", file=sys.stderr)
        return 2
    chosen = [known[name] for name in options.nemesis or known]
    if options.quick:
        print(f"seed {options.seed}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # take the workers with us
    reports: list[Report] = []
    began = time.monotonic()
    try:
        with open_server() as server:
            trio.run(run_all, chosen, options, server, reports)
    finally:
        print()
        print(table(reports))
        if options.dashboard:
            print(views_table(reports))
        print(f"{time.monotonic() - began:.0f} s in all")
        if options.json is not None:
            options.json.write_text(json.dumps([as_json(each) for each in reports], indent=1) + "\n")
    unseen = missed(sum((each.views for each in reports), Counter[str]())) if options.dashboard else []
    return int(bool(unseen) or any(not each.ok for each in reports))


if __name__ == "__main__":
    sys.exit(main())
