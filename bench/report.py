"""What is shown and kept: tables, JSON, plots."""

from __future__ import annotations

import datetime as dt
import os
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import attrs
import msgspec
from rich import box
from rich.console import Console
from rich.table import Table

from bench.contest import Figure, Spread
from bench.reach import Judged

RESULTS = Path(__file__).parent / "results"
BASELINE = Path(__file__).parent / "baseline.json"

UNITS = {"per_second": "/s", "worker_us": "worker µs", "server_us": "server µs", "wal_bytes": "WAL B"}
HIDDEN = {"units", "seconds"}


def figure(value: float) -> str:
    """Three significant figures, thousands separated."""
    if value == 0:
        return "0"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def spread(each: Spread) -> str:
    if each.low == each.high:
        return figure(each.median)
    return f"{figure(each.median)} ({figure(each.low)}–{figure(each.high)})"


def show(figures: Sequence[Figure], console: Console) -> None:
    """A table per benchmark: median, and the range of the rounds."""
    for bench in dict.fromkeys(each.bench for each in figures):
        rows = [each for each in figures if each.bench == bench]
        names = list(dict.fromkeys(name for row in rows for name in row.values if name not in HIDDEN))
        table = Table(title=bench, box=box.SIMPLE, title_justify="left")
        table.add_column("contender")
        for name in names:
            table.add_column(UNITS.get(name, name.replace("_", " ")), justify="right")
        table.add_column("rounds", justify="right")
        for row in rows:
            cells = [spread(row.values[name]) if name in row.values else "" for name in names]
            table.add_row(row.contender, *cells, str(row.rounds))
            if row.note:
                table.add_row(f"  [red]{row.note[-300:]}[/red]")
        console.print(table)


def show_reach(judged: Sequence[Judged], console: Console) -> None:
    table = Table(title="reach", box=box.SIMPLE, title_justify="left")
    table.add_column("measure")
    table.add_column("goal", justify="right")
    table.add_column("measured", justify="right")
    table.add_column("met")
    for each in judged:
        sign = "≥" if each.least else "≤"
        measured = "not measured" if each.value is None else figure(each.value)
        met = "" if each.met is None else "yes" if each.met else "[red]NO[/red]"
        table.add_row(each.measure, f"{sign} {figure(each.goal)}", measured, met)
    console.print(table)


def machine(server_version: str) -> Mapping[str, Any]:
    """What a figure without which is worth little."""
    cpu = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "postgres": server_version,
        "psycopg": version("psycopg"),
        "trio": version("trio"),
    }


def save(figures: Sequence[Figure], judged: Sequence[Judged], about: Mapping[str, Any], name: str) -> Path:
    """Write one JSON file per run; an unfinished one is overwritten."""
    RESULTS.mkdir(exist_ok=True)
    now = dt.datetime.now(dt.UTC)
    path = RESULTS / (f"{name}-{now:%Y%m%dT%H%M%S}.json" if name != "unfinished" else "unfinished.json")
    _write(path, figures, judged, about)
    return path


def record(figures: Sequence[Figure], judged: Sequence[Judged], about: Mapping[str, Any]) -> None:
    """Keep these figures as the baseline; benchmarks that this run left out stay as they were."""
    new = {each.bench for each in figures}
    old = [each for each in load(BASELINE) if each.bench not in new] if BASELINE.exists() else []
    _write(BASELINE, [*figures, *old], judged, about)


def _write(path: Path, figures: Sequence[Figure], judged: Sequence[Judged], about: Mapping[str, Any]) -> None:
    report = {
        "at": dt.datetime.now(dt.UTC).isoformat(),
        "machine": about,
        "figures": [attrs.asdict(each) for each in figures],
        "reach": [attrs.asdict(each) for each in judged],
    }
    path.write_bytes(msgspec.json.format(msgspec.json.encode(report)))


def load(path: Path) -> list[Figure]:
    """The figures of an earlier run."""
    raw = msgspec.json.decode(path.read_bytes())
    return [
        Figure(
            bench=each["bench"],
            contender=each["contender"],
            unit=each["unit"],
            values={name: Spread(**value) for name, value in each["values"].items()},
            rounds=each["rounds"],
            note=each["note"],
        )
        for each in raw["figures"]
    ]
