"""Where instances stand, for the dashboard: how many in each step of each machine, and for how long."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Final, Literal, cast

import attrs

from durable_actors._postgres.driver import encode
from durable_actors._postgres.driver.connection import PgConn
from durable_actors._postgres.driver.statement import Row
from durable_actors._store.sql import statement

CAP: Final = 5000
"""Rows of each source that are counted."""
WINDOW: Final = 10_000
"""The newest instances, among which those are counted that wait without a deadline."""

StepKind = Literal[
    "ready", "scheduled", "held", "shelved", "limited", "paused", "running", "waiting", "failed"
]
KINDS: Final[tuple[StepKind, ...]] = (
    "running", "ready", "waiting", "scheduled", "held", "shelved", "limited", "paused", "failed",
)  # fmt: skip
"""In the order of the tables. "waiting": for signals, children, a person, or what it comes after."""


@attrs.frozen(kw_only=True)
class StepCount:
    """The instances of one kind in one step."""

    machine: str
    version: int
    step: str
    kind: StepKind
    count: int
    oldest: float | None = None
    """Seconds since the first of them could run, began to run, to wait, or failed; None for what is not due."""
    p95: float | None = None
    """Seconds that 95 of 100 do not exceed; of several sources the longest."""


@attrs.frozen(kw_only=True)
class Steps:
    """What was counted."""

    counts: tuple[StepCount, ...]
    capped: frozenset[str]
    """Kinds of which there are more than were counted."""
    partly: bool
    """Whether there are more instances than the window: older ones that wait without a deadline are not counted."""

    def of(self, machine: str) -> tuple[StepCount, ...]:
        """The counts of one machine."""
        return tuple(each for each in self.counts if each.machine == machine)


async def read_steps(conn: PgConn, schema: str, *, cap: int = CAP, window: int = WINDOW) -> Steps:
    """Count the instances that have not ended, and those that failed, by step."""
    params = [encode.number(cap), encode.number(window)]
    rows = (await conn.run(statement("sample_steps", schema, read_only=True), params)).rows
    return steps_of(rows, cap=cap, window=window)


def steps_of(rows: Iterable[Row], *, cap: int, window: int) -> Steps:
    """Read the rows of sample_steps.sql. Pure."""
    found: dict[tuple[str, int, str, StepKind], StepCount] = {}
    seen: Counter[str] = Counter()
    kinds: dict[str, set[str]] = {}
    looked = 0
    for row in rows:
        source, kind = (row[0] or b"").decode(), (row[1] or b"").decode()
        if source == "window":
            looked = int(row[5] or 0)
            continue
        one = _count(row, cast("StepKind", kind))
        seen[source] += one.count
        kinds.setdefault(source, set()).add(kind)
        key = (one.machine, one.version, one.step, one.kind)
        found[key] = one if key not in found else _sum(found[key], one)
    full = {
        kind
        for source, count in seen.items()
        if count >= cap and source != "newest"
        for kind in kinds[source]
    }
    return Steps(counts=tuple(found.values()), capped=frozenset(full), partly=looked >= window)


def _count(row: Row, kind: StepKind) -> StepCount:
    return StepCount(
        machine=(row[2] or b"").decode(),
        version=int(row[3] or 0),
        step=(row[4] or b"").decode(),
        kind=kind,
        count=int(row[5] or 0),
        oldest=None if row[6] is None else float(row[6]),
        p95=None if row[7] is None else float(row[7]),
    )


def _sum(one: StepCount, other: StepCount) -> StepCount:
    return attrs.evolve(
        one,
        count=one.count + other.count,
        oldest=longest(one.oldest, other.oldest),
        p95=longest(one.p95, other.p95),
    )


def longest(*ages: float | None) -> float | None:
    """The longest of some ages; None if there is none. Pure."""
    return max((each for each in ages if each is not None), default=None)
