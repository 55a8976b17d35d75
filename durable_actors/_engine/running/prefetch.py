"""Rows that a queue claims beyond its free slots, while its steps end at once. Pure: numbers in, numbers out.

Ten slots, and steps that wait for nothing: ten rows run within a millisecond, and a pick and a commit cost as much
again. So the next pick asks for more rows than there are slots, and more again, as long as what was claimed has run
before `QUICK` is over and has not waited once. A step that waits, or takes longer, ends that, and what then has no slot
goes back: a row that was claimed ahead waits for a few milliseconds, or for nobody.
"""

from __future__ import annotations

from typing import Final

from durable_actors._engine.claiming.demand import QueueLimits

QUICK: Final = 0.005
"""Seconds in which what a pick has claimed must have run."""
MOST: Final = 3
"""Times the concurrency, prefetched rows included."""
ENOUGH: Final = 200
"""Rows: a larger batch buys nothing."""


def most_ahead(limits: QueueLimits) -> int:
    """Rows that a queue may claim beyond its slots and its `prefetch`."""
    return max(min(MOST * limits.concurrency, ENOUGH) - limits.prefetch, 0)


class Ahead:
    """How many, for one queue. Grows whenever all that was claimed has run at once, by as many rows as that were."""

    __slots__ = ("_claimed", "_most", "_since", "rows")

    def __init__(self, limits: QueueLimits) -> None:
        self._most = most_ahead(limits)
        self._claimed = 0
        self._since = 0.0
        self.rows = 0
        """To claim beyond the free slots."""

    @property
    def until(self) -> float:
        """When all that was claimed must have run."""
        return self._since + QUICK

    def late(self, now: float) -> bool:
        """Whether that is now or was before: a feeder that has slept until then has something to do."""
        return now >= self.until

    def picked(self, count: int, now: float) -> None:
        """So many rows were claimed."""
        if not self._claimed:
            self._since = now
        self._claimed += count

    def ran(self, now: float) -> None:
        """All that was claimed has run."""
        if self._claimed:
            self.rows = 0 if self.late(now) else min(self.rows + self._claimed, self._most)
            self._claimed = 0

    def waited(self) -> None:
        """A step waits for something, or takes long: so may the others."""
        self.rows = self._claimed = 0
