"""When a feeder looks at its queue: which priorities it has, what is due next. Plain bookkeeping.

A look follows a pick that found less than it wanted, and now and then a full one. It walks dead index entries, so a
dear one is not repeated at once (`shape_pause`). How dear it is can be told only when nothing else ran on the loop:
what the pick has claimed begins before the look, and its computing must not be taken for the server's.
"""

from __future__ import annotations

from typing import Final

from durable_actors._engine.claiming.demand import SHAPE_CHEAP, shape_pause

EVERY: Final = 2.0
"""Seconds between looks of a busy queue; an idle one looks whenever it finds nothing."""


class Looks:
    """The looks of one feeder."""

    __slots__ = ("_asked", "_due", "doubted", "not_before", "old")

    def __init__(self) -> None:
        self.old = False
        """The last pick wanted a look, and it was too soon for one."""
        self.doubted = False
        """The last look took long, or what ran beside it did: the next one is made before anything begins."""
        self.not_before = 0.0
        """Too soon until then for a look after a short pick."""
        self._asked = 0
        self._due = 0.0

    def ask(self) -> None:
        """Look after the next pick, whatever it finds."""
        self._due = 0.0
        self._asked += 1

    def wanted(self, now: float, *, short: bool) -> bool:
        """After a pick: look now? `short`: it found less than it wanted."""
        self.old = short and now < min(self.not_before, self._due)
        return now >= self._due or (short and not self.old)

    def begin(self) -> int:
        """What to give to `learned` when the answer is there."""
        return self._asked

    def learned(self, begun: int, now: float) -> None:
        """The answer is there. Who asked while it was on its way may have done what it does not show yet."""
        self._due = now + EVERY if begun == self._asked else 0.0
        self.old = False  # else an idle feeder would sleep until a look that is over: not at all

    def took(self, began: float, seconds: float, *, alone: bool) -> None:
        """A look after a pick took so long; `alone`: the pick had begun nothing beside it."""
        if alone:
            self.not_before = began + shape_pause(seconds)
        self.doubted = seconds >= SHAPE_CHEAP
