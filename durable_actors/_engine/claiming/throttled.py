"""ThrottledRows: when a feeder looks for throttled rows whose token has come. Sans-I/O; time is an argument."""

from __future__ import annotations

import math
from typing import Final

import attrs

from durable_actors._store.rows import PickResult

FIRST_PAUSE: Final = 0.01
"""Seconds until the next look at rows about which somebody else decides."""
LONGEST_PAUSE: Final = 0.3


@attrs.frozen
class Thaw:
    """Read which throttled rows may run, at most so many."""

    limit: int


class ThrottledRows:
    """What the planner of one queue knows of its throttled rows."""

    __slots__ = ("_asked", "_ended", "_expected", "_pause", "look_at", "looked", "thawed")

    def __init__(self) -> None:
        self.look_at = math.inf
        """When throttled rows may have a token; infinity: nothing is throttled, as far as this node knows."""
        self.thawed: list[int] = []
        """Rows for the next pick."""
        self.looked = False
        """A look was made in this round, and since its pick."""
        self._pause = 0.0
        self._ended: set[str] = set()  # slots of steps that have ended since the last look was sent
        self._asked: frozenset[str] = frozenset()  # those that the look under way was told of
        self._expected = False  # since it was sent

    def due(self, now: float) -> bool:
        """Whether to look now."""
        return self.look_at <= now and not self.looked

    def expect(self, slot: str | None = None) -> None:
        """A token may be there, or this slot."""
        self.look_at = -math.inf
        self._expected = True
        if slot is not None:
            self._ended.add(slot)

    def look(self) -> frozenset[str]:
        """A look is being sent: slots of steps that have ended, which it must not miss."""
        self._asked, self._expected = frozenset(self._ended), False
        self._ended.clear()
        return self._asked

    def failed(self) -> None:
        """It may have failed: the next one is told of the same slots."""
        self._ended |= self._asked
        self._asked = frozenset()

    def found(self, ids: list[int], next_in: float | None, now: float) -> None:
        """A look has found these rows; others are due in so many seconds. It may have missed what came meanwhile."""
        self.looked = True
        self.thawed = ids
        self._asked = frozenset()
        self.look_at = -math.inf if self._expected else math.inf if next_in is None else now + next_in

    def picked(self, picked: PickResult, now: float) -> None:
        """If the pick has met limits, the time of the next token has changed."""
        thawed, self.thawed = self.thawed, []
        if thawed and not picked.claims:  # another node decides about the same keys
            self._pause = min(max(self._pause * 2, FIRST_PAUSE), LONGEST_PAUSE)
            self.look_at = now + self._pause
        elif thawed or any(row.what == "t" for row in picked.seen):
            self._pause = 0.0
            self.looked = False
            self.expect()

    def refreshed(self, next_in: float | None, now: float) -> None:
        """The statistics say when to look."""
        if next_in is not None and not self._pause:
            self.look_at = min(self.look_at, now + next_in)
