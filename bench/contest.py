"""Contestants, run in turn in one session, each in a process and a database of its own; medians and spreads."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from bench.server import Server

ROOT = Path(__file__).parent.parent
TIMEOUT = 300.0

Sample = Mapping[str, float]
Progress = Callable[[str], None]


@attrs.frozen
class Spread:
    """A figure over the rounds."""

    median: float
    low: float
    high: float
    each: Sequence[float] = ()
    """Round by round."""

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values), tuple(values))

    def ratio(self, other: Spread) -> float:
        """How many times the other: the median of the rounds' ratios, whose two sides had the same minute.

        The medians of two contestants may come from different minutes, and these machines have neighbours.
        """
        if len(self.each) != len(other.each) or not self.each:
            return self.median / other.median
        return statistics.median(one / two for one, two in zip(self.each, other.each, strict=True))


@attrs.frozen
class Figure:
    """What one contestant did in one benchmark."""

    bench: str
    contender: str
    unit: str
    """What is counted: job, machine, row, pick."""
    values: Mapping[str, Spread]
    rounds: int
    note: str = ""

    @classmethod
    def of(cls, bench: str, contender: str, unit: str, samples: Sequence[Sample], note: str = "") -> Figure:
        names = samples[0].keys() if samples else ()
        values = {name: Spread.of([sample[name] for sample in samples]) for name in names}
        return cls(bench, contender, unit, values, len(samples), note)

    def median(self, name: str) -> float:
        return self.values[name].median


@attrs.frozen
class Contestant:
    """A name and how to run it once on a database: from its DSN to a sample."""

    name: str
    run: Callable[[Server, str], Sample]
    unit: str = "job"
    migrated: bool = True
    """Whether its database has the engine's schema."""
    rounds: int | None = None
    """Fewer than the others get: the slow ones."""


class Failed(Exception):  # noqa: N818 - a verdict, not a bug
    """A contestant did not finish; its last words are the text."""


def in_child(**order: Any) -> Callable[[Server, str], Sample]:
    """Run `bench.child` with this order."""

    def run(server: Server, dsn: str) -> Sample:
        text = json.dumps({"dsn": dsn, "postmaster": server.postmaster, **order})
        return run_python(sys.executable, "bench.child", text)

    return run


def run_python(python: str | Path, module: str, *args: str) -> Sample:
    """Run a module of this repository and read the JSON that it prints last."""
    command = [str(python), "-m", module, *args]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT, cwd=ROOT, env=environment, check=False
        )
    except subprocess.TimeoutExpired as exc:
        raise Failed(f"{module} {args[:1]} took longer than {TIMEOUT:.0f} s") from exc
    if done.returncode:
        raise Failed(done.stderr.strip()[-2000:])
    sample: Sample = json.loads(done.stdout.strip().splitlines()[-1])
    return sample


def compete(
    bench: str, server: Server, contestants: Iterable[Contestant], *, rounds: int, progress: Progress
) -> list[Figure]:
    """Every contestant once per round, in turn: what the machine does meanwhile happens to all of them."""
    contestants = list(contestants)
    samples: dict[str, list[Sample]] = {each.name: [] for each in contestants}
    notes: dict[str, str] = {}
    for number in range(rounds):
        for each in contestants:
            if each.name in notes or number >= (each.rounds or rounds):
                continue
            progress(f"{bench}: {each.name} ({number + 1}/{each.rounds or rounds})")
            server.settle()
            with server.database(migrated=each.migrated) as dsn:
                try:
                    samples[each.name].append(each.run(server, dsn))
                except Failed as exc:
                    notes[each.name] = f"failed: {exc}"
    return [
        Figure.of(bench, each.name, each.unit, samples[each.name], notes.get(each.name, ""))
        for each in contestants
    ]
