"""Failed instances grouped by what went wrong, for the dashboard: machine, step and error are the fingerprint."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Final, Literal

import attrs

from durable_actors._postgres.driver import encode
from durable_actors._postgres.driver.connection import PgConn
from durable_actors._postgres.driver.decode import decode_instant, decode_text_array
from durable_actors._postgres.driver.statement import Row
from durable_actors._store.observe import Filter
from durable_actors._store.sql import statement

WINDOW: Final = 10_000
"""Failed rows that are looked at, the newest: some 30 ms."""
MOST_GROUPS: Final = 60

Grouping = Literal["all", "error", "machine"]
"""By machine, step and error; by the error alone; by the machine alone."""


@attrs.frozen(kw_only=True)
class FailureGroup:
    """Failed instances that look alike."""

    machine: str | None
    """None if the group has several."""
    step: str | None
    """None if the group has several."""
    error_type: str | None
    """The class of the exception; None if there was none, or if the group has several."""
    error: str | None
    """A part of `last_error` that all of the group have; None if the group has several."""
    count: int
    """How many of those that were looked at."""
    first: datetime | None
    """When the first of them failed."""
    last: datetime | None
    versions: tuple[int, ...]
    """The versions of the machine."""
    newest: int
    """The id of the newest one."""
    text: str | None
    """The start of its error."""
    machines: tuple[str, ...]
    """All machines of the group."""

    @property
    def where(self) -> Filter:
        """All failed instances of this group, also those that were not looked at."""
        return Filter(status="failed", machine=self.machine, step=self.step, error=self.error)


@attrs.frozen(kw_only=True)
class Failures:
    """The groups, the largest first."""

    groups: tuple[FailureGroup, ...]
    looked: int
    """Failed instances that were looked at."""
    capped: bool
    """Whether there are older ones that were not."""
    left_out: int
    """Groups that are too small to be shown."""


async def read_failures(conn: PgConn, schema: str, *, window: int = WINDOW) -> Failures:
    """Group the newest failed instances by machine, step and error."""
    params = [encode.number(window), encode.number(MOST_GROUPS)]
    rows = (await conn.run(statement("group_failures", schema, read_only=True), params)).rows
    if not rows:
        return Failures(groups=(), looked=0, capped=False, left_out=0)
    looked, groups = int(rows[0][10] or 0), int(rows[0][11] or 0)
    found = tuple(_group(row) for row in rows)
    return Failures(groups=found, looked=looked, capped=looked >= window, left_out=groups - len(found))


def _group(row: Row) -> FailureGroup:
    def text(index: int) -> str | None:
        value = row[index]
        return None if value is None else value.decode()

    return FailureGroup(
        machine=text(0),
        step=text(1),
        error_type=text(2),
        error=text(3),
        count=int(row[4] or 0),
        first=decode_instant(row[5]),
        last=decode_instant(row[6]),
        versions=tuple(map(int, decode_text_array(row[7] or b"{}"))),
        newest=int(row[8] or 0),
        text=text(9),
        machines=(text(0) or "",),
    )


def merged(groups: Iterable[FailureGroup], by: Grouping) -> tuple[FailureGroup, ...]:
    """Put groups together: by their error alone, or by their machine alone. The largest first. Pure."""
    if by == "all":
        return tuple(groups)
    found: dict[object, list[FailureGroup]] = {}
    for each in groups:
        found.setdefault((each.error_type, each.error) if by == "error" else each.machine, []).append(each)
    return tuple(sorted(map(_together, found.values()), key=lambda each: (-each.count, -each.newest)))


def _together(groups: Sequence[FailureGroup]) -> FailureGroup:
    newest = max(groups, key=lambda each: each.newest)
    firsts = [each.first for each in groups if each.first is not None]
    lasts = [each.last for each in groups if each.last is not None]
    return FailureGroup(
        machine=_one({each.machine for each in groups}),
        step=_one({each.step for each in groups}),
        error_type=_one({each.error_type for each in groups}),
        error=_one({each.error for each in groups}),
        count=sum(each.count for each in groups),
        first=min(firsts, default=None),
        last=max(lasts, default=None),
        versions=tuple(sorted({version for each in groups for version in each.versions})),
        newest=newest.newest,
        text=newest.text,
        machines=tuple(sorted({name for each in groups for name in each.machines})),
    )


def _one(values: set[str | None]) -> str | None:
    return next(iter(values)) if len(values) == 1 else None
