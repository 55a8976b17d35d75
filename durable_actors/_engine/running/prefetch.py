"""Adaptive prefetch: how many rows a queue claims beyond its free slots, while its steps end at once.

With ten slots and steps that wait for nothing, ten rows run within a millisecond, and a pick and a commit cost as much
again. So the next pick asks for more rows than there are slots, and the one after it for more again, as long as all
claimed rows have run within `MAX_BATCH_SECONDS` and no step has waited. A step that waits or takes longer ends that,
and rows without a slot are released: a prefetched row waits for a few milliseconds, or not at all.
"""

from __future__ import annotations

from typing import Final

from durable_actors._engine.limits import QueueLimits, max_adaptive_prefetch

MAX_BATCH_SECONDS: Final = 0.005
"""Seconds within which the rows of a pick must have run."""


class AdaptivePrefetch:
    """The prefetch of one queue: it grows by the size of a batch whenever that batch has run at once. Sans-I/O."""

    __slots__ = ("_claimed", "_most", "_since", "rows")

    def __init__(self, limits: QueueLimits) -> None:
        self._most = max_adaptive_prefetch(limits)
        self._claimed = 0
        self._since = 0.0
        self.rows = 0
        """Rows to claim beyond the free slots."""

    @property
    def until(self) -> float:
        """When all claimed rows must have run."""
        return self._since + MAX_BATCH_SECONDS

    def late(self, now: float) -> bool:
        """Whether that moment has come."""
        return now >= self.until

    def picked(self, count: int, now: float) -> None:
        """So many rows were claimed."""
        if not self._claimed:
            self._since = now
        self._claimed += count

    def all_ran(self, now: float) -> None:
        """All claimed rows have run."""
        if self._claimed:
            self.rows = 0 if self.late(now) else min(self.rows + self._claimed, self._most)
            self._claimed = 0

    def waited(self) -> None:
        """A step waits for something or takes long, so others may, too."""
        self.rows = self._claimed = 0
