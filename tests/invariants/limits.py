"""I17: no more live holders than a limit has slots. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Final

import attrs
from tests.invariants.changes import InstanceChange, InstanceState

if TYPE_CHECKING:
    from tests.invariants.history import History, Violation

MAX_STORY: Final = 8
"""Holders that a violation shows."""


@attrs.frozen
class Slots:
    """A limit that has slots."""

    count: int
    kept: bool = False
    """Whether an instance keeps its slot until it ends (`held="instance"`)."""


def i17_slots_are_never_exceeded(history: History) -> list[Violation]:
    """At any time at most as many instances have a slot of a key as its limit has.

    Whoever executes a step that uses a slot has it; one whose limit says so keeps it from then on, until it ends or its
    step uses another one. Whoever is claimed only to be ended runs nothing, and has none.
    """
    return list(_exceeded(history))


def _exceeded(history: History) -> Iterator[Violation]:
    holders: dict[str, dict[int, InstanceChange]] = {}
    has: dict[int, str] = {}
    for change, _ in history.moves:
        number = change.instance
        before = has.get(number)
        now = _slot(change.new, before, history.slots)
        if now == before:
            continue
        if before is not None:
            del holders[before][number], has[number]
        if now is not None:
            has[number] = now
            holding = holders.setdefault(now, {})
            holding[number] = change
            limit = history.slots[now.partition(":")[0]].count
            if len(holding) > limit:
                story = [*holding.values()][-MAX_STORY:]
                sentence = (
                    f"it has a slot of {now!r}, as {len(holding) - 1} others have, and there are {limit}"
                )
                yield history.violation("I17", sentence, *story)


def _slot(row: InstanceState | None, before: str | None, slots: Mapping[str, Slots]) -> str | None:
    """The slot that it has after a change: one of a limit that is known; None: it has none."""
    if row is None or row.ended:
        return None
    uses = row.slot if row.slot is not None and row.slot.partition(":")[0] in slots else None
    if before is not None and slots[before.partition(":")[0]].kept and row.slot in {None, before}:
        return before
    if row.status != "executing" or uses is None or _only_ends(row):
        return None
    return uses


def _only_ends(row: InstanceState) -> bool:
    told = row.cancellation or {}
    return "upstream" in told or ("limit" in told and told.get("visit") == row.visit)
