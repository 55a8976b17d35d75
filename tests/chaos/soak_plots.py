"""A soak's measures over time, as SVG and PNG. matplotlib is in the benchmarks' environment only."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import matplotlib as mpl
from tests.chaos.soak_verdicts import Sample, Verdict

mpl.use("svg")
mpl.rcParams["svg.fonttype"] = "none"  # text stays text: a tenth of the size

from matplotlib import pyplot as plt  # noqa: E402 - after the backend is chosen

PANELS: Final = (
    ("memory of surviving workers, MB", ("memory ",)),
    ("their file descriptors", ("descriptors ",)),
    ("connections", ("connections",)),
    ("largest backend, MB", ("backend memory",)),
    ("dead rows", ("dead rows",)),
    ("indexes of live rows, and inbox, kB", ("live indexes", "inbox")),
    ("table and its other indexes, bytes per row", ("bytes per row",)),
    ("pages per pick of 20", ("pages per pick",)),
    ("server's CPU per pick of 20, ms", ("CPU per pick",)),
    ("pages per worker's pick", ("pages per worker",)),
    ("live instances", ("live instances",)),
    ("all rows (finished ones stay)", ("rows  ",)),
)
COLUMNS: Final = 3


def draw(samples: Sequence[Sample], verdicts: Sequence[Verdict], folder: Path) -> list[Path]:
    """One picture with a panel per group of measures, in two formats."""
    lines = -(-len(PANELS) // COLUMNS)
    figure, grid = plt.subplots(lines, COLUMNS, figsize=(12, 2.3 * lines), layout="constrained", sharex=True)
    for axes, (title, beginnings) in zip(grid.flat, PANELS, strict=True):
        _panel(
            axes, title, samples, [each for each in verdicts if f"{each.measure}  ".startswith(beginnings)]
        )
    for axes in grid[-1]:
        axes.set_xlabel("minutes" if samples[-1].at > 300 else "seconds", fontsize=8)
    paths = [folder / f"soak.{kind}" for kind in ("svg", "png")]
    for path in paths:
        figure.savefig(path)
    plt.close(figure)
    return paths


def _panel(axes: Any, title: str, samples: Sequence[Sample], verdicts: Sequence[Verdict]) -> None:
    end = samples[-1].at
    scale = 60 if end > 300 else 1
    for first, last in ((0.25, 0.5), (0.75, 1.0)):  # what is compared
        axes.axvspan(end * first / scale, end * last / scale, color="#f2f2f2", linewidth=0)
    for verdict in verdicts:
        name = verdict.measure
        found = [(each.at / scale, each.values[name]) for each in samples if name in each.values]
        [line] = axes.plot(*zip(*found, strict=True), linewidth=1, label=name)
        for value, first, last in ((verdict.early, 0.25, 0.5), (verdict.late, 0.75, 1.0)):
            if value is not None:
                axes.hlines(
                    value, end * first / scale, end * last / scale, color=line.get_color(), linewidth=2.5
                )
    grows = [each for each in verdicts if each.flat is False]
    axes.set_title(
        title + (": GROWS" if grows else ""), loc="left", fontsize=9, color="#b00020" if grows else "black"
    )
    settled = [
        each.values[verdict.measure]
        for verdict in verdicts
        for each in samples
        if each.at >= end / 20 and verdict.measure in each.values
    ]
    axes.set_ylim(
        0, 1.15 * max(settled, default=0) or 1
    )  # the first moments of an empty table would hide the rest
    axes.tick_params(labelsize=7)
    axes.spines[["top", "right"]].set_visible(False)
    if len(verdicts) > 1:
        axes.legend(fontsize=6, frameon=False, loc="best")
