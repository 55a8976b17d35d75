"""Flat or not: what a soak has measured, compared between its second quarter and its last. Pure.

The first quarter is the warm-up: caches fill, pools open, the first vacuums run. The medians of the second and of the
last quarter are half the run apart; a leak shows as a difference that noise does not explain. Each measure says how
much may be explained: a part of what it was, and some of its unit on top. Less is never bad.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import attrs

LEAST: Final = 3
"""Samples that a quarter must have, or there is no verdict."""


@attrs.frozen
class Sample:
    """What was read at one moment."""

    at: float
    """Seconds since the load began."""
    values: Mapping[str, float]
    """By measure."""


@attrs.frozen
class Limit:
    """How much a measure may grow between the second and the last quarter."""

    unit: str
    ratio: float
    """A part of its value in the second quarter."""
    slack: float
    """And so much on top, in its unit."""
    why: str
    """What the limit must let pass."""

    def __str__(self) -> str:
        return f"+{self.ratio:.0%} +{self.slack:g}" if self.ratio else f"+{self.slack:g}"


LIMITS: Final[Mapping[str, Limit]] = {
    "memory": Limit("MB", 0.05, 3, "pages that the allocator keeps"),
    "descriptors": Limit(
        "", 0, 2, "a connection that is being replaced, a client's that is opened on demand"
    ),
    "connections of": Limit("", 0, 2, "the same"),
    "connections": Limit("", 0, 4, "backends of the killed, for the moment until they notice"),
    "backend memory": Limit(
        "MB", 0.1, 2, "plans and catalog caches, filled by the first use of each statement"
    ),
    "dead rows of gen_durable": Limit("", 0.5, 1000, "autovacuum begins at 1,000 and 1 % of the table"),
    "dead rows of signals": Limit("", 0.5, 1000, "the same"),
    "dead rows of nodes": Limit("", 0.5, 100, "autovacuum begins at 50 and 20 % of the table"),
    "live indexes": Limit("kB", 0.25, 512, "index pages wait for vacuum before they are used again"),
    "inbox": Limit("kB", 0.25, 512, "pages of consumed signals wait for vacuum before they are used again"),
    "bytes per row": Limit("B", 0.1, 20, "page splits of the indexes that hold finished rows, too"),
    "pages per pick of 20": Limit("", 0.25, 60, "dead index entries since the last vacuum"),
    "CPU per pick of 20": Limit("ms", 0.5, 0.3, "other work on the machine: caches are shared"),
    "pages per worker's pick": Limit("", 0.5, 20, "picks claim more or fewer rows"),
    "live instances": Limit("", 0.5, 100, "work that a killed worker has held up"),
}
"""By measure, or by its beginning: `memory w1` is a `memory`."""


@attrs.frozen(kw_only=True)
class Verdict:
    """One measure."""

    measure: str
    early: float | None
    """Median of the second quarter."""
    late: float | None
    """Median of the last."""
    limit: Limit | None
    """None: it is told, not judged."""

    @property
    def allowed(self) -> float | None:
        """What the last quarter may be at most."""
        if self.limit is None or self.early is None:
            return None
        return self.early * (1 + self.limit.ratio) + self.limit.slack

    @property
    def flat(self) -> bool | None:
        """None: nobody judges, or there is too little to judge."""
        return None if self.allowed is None or self.late is None else self.late <= self.allowed

    @property
    def word(self) -> str:
        """For people."""
        if self.limit is None:
            return "told"
        return {True: "flat", False: "GROWS", None: "too short"}[self.flat]


def limit_of(measure: str) -> Limit | None:
    """The limit whose name begins this measure's, the longest one."""
    names = [name for name in LIMITS if measure == name or measure.startswith(f"{name} ")]
    return LIMITS[max(names, key=len)] if names else None


def judge(samples: Sequence[Sample]) -> list[Verdict]:
    """A verdict per measure, in the order in which they appeared."""
    end = samples[-1].at if samples else 0.0
    names = dict.fromkeys(name for sample in samples for name in sample.values)
    return [
        Verdict(
            measure=name,
            early=_median(samples, name, end * 0.25, end * 0.5),
            late=_median(samples, name, end * 0.75, end),
            limit=limit_of(name),
        )
        for name in names
    ]


def _median(samples: Iterable[Sample], name: str, begin: float, end: float) -> float | None:
    found = [each.values[name] for each in samples if begin <= each.at <= end and name in each.values]
    return statistics.median(found) if len(found) >= LEAST else None


def table(verdicts: Iterable[Verdict]) -> str:
    """In Markdown."""
    rows = [("measure", "second quarter", "last quarter", "limit", "verdict")]
    for each in verdicts:
        unit = f" {each.limit.unit}" if each.limit is not None and each.limit.unit else ""
        limit = "" if each.limit is None else f"{each.limit}{unit}"
        rows.append(
            (each.measure, f"{_shown(each.early)}{unit}", f"{_shown(each.late)}{unit}", limit, each.word)
        )
    widths = [max(len(row[n]) for row in rows) for n in range(len(rows[0]))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        for row in rows
    ]
    return "\n".join([lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]])


def _shown(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.2f}"


def as_json(verdict: Verdict) -> dict[str, Any]:
    """For machines."""
    limit = None if verdict.limit is None else attrs.asdict(verdict.limit)
    return {
        "measure": verdict.measure,
        "early": verdict.early,
        "late": verdict.late,
        "allowed": verdict.allowed,
        "limit": limit,
        "verdict": verdict.word,
    }
