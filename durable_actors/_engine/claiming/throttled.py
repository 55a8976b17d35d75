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

    __slots__ = ("_pause", "look_at", "looked", "thawed")

    def __init__(self) -> None:
        self.look_at = math.inf
        """When throttled rows may have a token; infinity: nothing is throttled, as far as this node knows."""
        self.thawed: list[int] = []
        """Rows for the next pick."""
        self.looked = False
        """A look was made in this round, and since its pick."""
        self._pause = 0.0

    def due(self, now: float) -> bool:
        """Whether to look now."""
        return self.look_at <= now and not self.looked

    def expect(self) -> None:
        """A token or a slot may be there."""
        self.look_at = -math.inf

    def found(self, ids: list[int], next_in: float | None, now: float) -> None:
        """A look has found these rows; others are due in so many seconds."""
        self.looked = True
        self.thawed = ids
        self.look_at = math.inf if next_in is None else now + next_in

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
