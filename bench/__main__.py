"""`python -m bench [names...] [--quick]`: measure, show a table, write JSON and plots into bench/results/."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path

import click
from rich.console import Console

from bench import (
    audit,
    children,
    driver,
    fair,
    graphs,
    grown,
    growth,
    idle,
    inserts,
    jobs,
    journal,
    keys,
    latency,
    machines,
    memory,
    processes,
    recovery,
    report,
    retention,
    signals,
)
from bench.contest import Figure, Progress, Spread
from bench.peers import peers
from bench.reach import judge
from bench.server import Server, open_server


def _driver(server: Server, progress: Progress, *, quick: bool) -> list[Figure]:  # noqa: ARG001
    """CPU per statement, our driver beside psycopg on asyncio. On the tests' server: it counts no disk."""
    progress("driver")
    return [
        Figure(
            "driver",
            f"{each.workload}: {each.contender}",
            "statement",
            {
                "worker_us": Spread(each.median, each.best, each.median),
                "ratio": Spread(each.ratio, each.ratio, each.ratio),
            },
            each.slices,
        )
        for each in driver.run(seconds=3.0 if quick else 15.0)
    ]


Bench = Callable[..., list[Figure]]
BENCHES: dict[str, Bench] = {
    "jobs": jobs.run,
    "peers": peers.run,
    "machines": machines.run,
    "inserts": inserts.run,
    "latency": latency.run,
    "signals": signals.run,
    "idle": idle.run,
    "memory": memory.run,
    "keys": keys.run,
    "processes": processes.run,
    "recovery": recovery.run,
    "children": children.run,
    "fair": fair.run,
    "graphs": graphs.run,
    "growth": growth.run,
    "grown": grown.run,
    "driver": _driver,
    "journal": journal.run,
    "audit": audit.run,
    "retention": retention.run,
}
QUICK = ("jobs", "machines", "inserts", "latency")
"""What `--quick` measures when nothing is named: about a minute."""


def compare(figures: Sequence[Figure], console: Console) -> None:
    """Ratios to the ceiling, now and in the recorded run: the machine's mood is in both terms."""
    if not report.BASELINE.exists():
        return
    before = {(each.bench, each.contender): each for each in report.load(report.BASELINE)}
    for ours, base in (
        (("jobs", "durable_actors, best"), ("jobs", "ceiling")),
        (("jobs", "durable_actors, defaults"), ("jobs", "ceiling")),
        (("machines", "durable_actors, run-ahead"), ("machines", "bare loop")),
        (("inserts", "insert_many, 1,000 rows a call"), ("inserts", "bare INSERT … SELECT unnest")),
    ):
        now = {(each.bench, each.contender): each for each in figures}
        if {ours, base} <= now.keys() & before.keys():
            ratio = now[ours].median("per_second") / now[base].median("per_second")
            recorded = before[ours].median("per_second") / before[base].median("per_second")
            console.print(
                f"{ours[0]}: {ours[1]} is {ratio:.2f} × {base[1]}; {ratio / recorded:.2f} × the recorded run "
                f"({recorded:.2f}); worker {now[ours].median('worker_us'):.0f} µs, "
                f"recorded {before[ours].median('worker_us'):.0f}"
            )


@click.command()
@click.argument("names", nargs=-1, type=click.Choice(list(BENCHES)))
@click.option("--quick", is_flag=True, help="Small sizes and few rounds.")
@click.option("--check", is_flag=True, help="Exit with 1 when a goal is missed.")
@click.option("--record", is_flag=True, help="Keep the result as bench/baseline.json.")
def main(names: tuple[str, ...], *, quick: bool, check: bool, record: bool) -> None:
    """Measure, as ratios within one run."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=170)
    figures: list[Figure] = []
    chosen = names or (QUICK if quick else tuple(BENCHES))
    with open_server() as server, contextlib.ExitStack() as stack:
        about = report.machine(server.version)
        console.print(" · ".join(f"{name} {value}" for name, value in about.items()))
        status = stack.enter_context(console.status("starting"))

        def progress(text: str) -> None:
            if console.is_terminal:
                status.update(text)
            else:
                console.print(text, style="dim")

        for name in chosen:
            found = BENCHES[name](server, progress, quick=quick)
            figures += found
            report.show(found, console)
            report.save(figures, judge(figures), about, "unfinished")  # half a run is better than none
    judged = judge(figures)
    report.show_reach([each for each in judged if each.value is not None], console)
    path = report.save(figures, judged, about, "quick" if quick else "bench")
    console.print(f"written: {path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}")
    if not quick:
        _draw(figures, console)
    compare(figures, console)
    if record:
        report.record(figures, judged, about)
    raise SystemExit(1 if check and any(each.met is False for each in judged) else 0)


def _draw(figures: Sequence[Figure], console: Console) -> None:
    try:
        # Imported here: only the benchmarks' own environment has matplotlib.
        from bench.plots import draw  # noqa: PLC0415
    except ModuleNotFoundError:
        console.print("no plots: matplotlib is not installed (make bench installs it)")
        return
    for path in draw(figures, report.RESULTS):
        console.print(f"drawn: {path.name}")


if __name__ == "__main__":
    main()
