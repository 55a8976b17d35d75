"""`python -m bench [names...] [--seconds N]`: run the benchmarks, print a table, write bench/results/*.json."""

from __future__ import annotations

import datetime as dt
import platform
from importlib.metadata import version
from pathlib import Path

import attrs
import click
import msgspec
from rich import box
from rich.console import Console
from rich.table import Table

from bench import driver

BENCHES = {"driver": driver.run}
RESULTS = Path(__file__).parent / "results"


def show(figures: list[driver.Figure], console: Console) -> None:
    table = Table(box=box.SIMPLE)
    for name in ("workload", "contender"):
        table.add_column(name, no_wrap=True)
    for name in ("CPU µs", "best", "ratio", "goal", "slices"):
        table.add_column(name, justify="right", no_wrap=True)
    for figure in figures:
        goal = "" if figure.goal is None else f"≤ {figure.goal} {'yes' if figure.met else 'NO'}"
        table.add_row(
            figure.workload, figure.contender, f"{figure.median:.1f}", f"{figure.best:.1f}",
            f"{figure.ratio:.2f}", goal, str(figure.slices),
        )  # fmt: skip
    console.print(table)


def save(name: str, figures: list[driver.Figure]) -> Path:
    RESULTS.mkdir(exist_ok=True)
    now = dt.datetime.now(dt.UTC)
    path = RESULTS / f"{name}-{now:%Y%m%dT%H%M%S}.json"
    report = {
        "bench": name,
        "at": now.isoformat(),
        "python": platform.python_version(),
        "psycopg": version("psycopg"),
        "trio": version("trio"),
        "figures": [attrs.asdict(figure) for figure in figures],
    }
    path.write_bytes(msgspec.json.format(msgspec.json.encode(report)))
    return path


@click.command()
@click.argument("names", nargs=-1, type=click.Choice(sorted(BENCHES)))
@click.option("--seconds", default=15.0, show_default=True, help="How long to measure, each.")
@click.option("--check", is_flag=True, help="Exit with 1 when a goal is missed.")
def main(names: tuple[str, ...], seconds: float, *, check: bool) -> None:
    """Measure, as ratios within one run."""
    console = Console()
    missed = False
    for name in names or sorted(BENCHES):
        figures = BENCHES[name](seconds=seconds)
        show(figures, console)
        path = save(name, figures)
        console.print(f"{path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}")
        missed = missed or not all(figure.met for figure in figures)
    raise SystemExit(1 if check and missed else 0)


if __name__ == "__main__":
    main()
