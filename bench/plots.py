"""Bars of what a run found, as SVG. matplotlib is in the benchmarks' environment only."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl

from bench.contest import Figure

mpl.use("svg")
mpl.rcParams["svg.fonttype"] = "none"  # text stays text: a tenth of the size

from matplotlib import pyplot as plt  # noqa: E402 - after the backend is chosen

PLOTS = {
    "jobs": (("jobs", "peers"), "per_second", "one-step jobs per second", True),
    "machines": (("machines",), "per_second", "five-step machines per second", False),
    "growth": (("growth",), "pick_ms", "pick of 100 rows, ms", False),
}


def draw(figures: Sequence[Figure], folder: Path) -> list[Path]:
    """One file per plot for which there are figures."""
    paths: list[Path] = []
    for name, (benches, value, title, log) in PLOTS.items():
        rows = [each for each in figures if each.bench in benches and value in each.values and each.rounds]
        rows = [row for row in rows if name != "jobs" or row.unit == "job"]
        if not rows:
            continue
        rows.sort(key=lambda row: row.median(value))
        fig, axes = plt.subplots(figsize=(7, 0.32 * len(rows) + 0.8), layout="constrained")
        values = [row.values[value] for row in rows]
        medians = [each.median for each in values]
        errors = [[each.median - each.low for each in values], [each.high - each.median for each in values]]
        colours = ["#3b6ea5" if "durable" in row.contender else "#b0b0b0" for row in rows]
        axes.barh([row.contender for row in rows], medians, xerr=errors, color=colours, ecolor="#555555")
        if log:
            axes.set_xscale("log")
        axes.set_title(title, loc="left", fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
        path = folder / f"{name}.svg"
        fig.savefig(path)
        plt.close(fig)
        paths.append(path)
    return paths
