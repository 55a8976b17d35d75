"""Sans-I/O: which queues of a node are idle, and which of them the long poll may watch. Time is an argument.

A queue is idle while its feeder has room for more than there was to pick. The feeders say so here; the long poll reads
it. A feeder that wakes up for a moment, because a step has ended, leaves its queue idle: it would miss the next
statement. What the long poll has seen due, and the feeder could not claim (somebody has the row locked, or its
key), is seen again at once: such a queue is watched again after a pause that doubles.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Final

from durable_actors._engine.limits import QueueLimits

LONGEST_PAUSE: Final = 1.0
"""Seconds for which a queue is not watched when what was seen due could not be claimed."""


def _nothing() -> None:
    return None


class IdleQueue:
    """One queue, between its feeder and the long poll."""

    __slots__ = ("_asked", "_hit", "_idle", "_misses", "_on_change", "every", "name", "not_before", "watched")

    def __init__(self, name: str, every: float, on_change: Callable[[], object]) -> None:
        self.name: Final = name
        self.every: Final = every
        """Seconds between two looks of the server's; 0: it is not watched."""
        self._on_change = on_change
        self._asked = False
        self._idle = False
        self._hit = False
        self._misses = 0
        self.not_before = -math.inf
        """When it may be watched again."""
        self.watched = False
        """The server does, now."""

    # -- told by the feeder

    def rest(self, now: float) -> None:
        """The feeder goes to sleep, and has room."""
        self._idle = True
        if self._hit:  # and it was not claimed
            self._hit = False
            self._misses = min(self._misses + 1, 20)
            self.not_before = now + min(self.every * 2.0**self._misses, LONGEST_PAUSE)
        if not (self.watched or self._asked):
            self._asked = True
            self._on_change()

    def busy(self) -> None:
        """The feeder has no room, or more to pick."""
        self._idle = False

    def claimed(self) -> None:
        """The feeder has found work."""
        self._hit = False
        self._misses = 0
        self.not_before = -math.inf

    # -- told by the long poll

    def wants(self, now: float) -> bool:
        """Whether it is to be watched now."""
        return self._idle and self.every > 0 and now >= self.not_before

    def wants_later(self, now: float) -> float:
        """When it will want to be watched, as far as known."""
        return self.not_before if self._idle and self.every > 0 and now < self.not_before else math.inf

    def heard(self) -> None:
        """What it has asked for is being looked at: it may ask again."""
        self._asked = False

    def unwatched(self, *, seen: bool) -> None:
        """The server's watch is over; `seen`: to its end, and nothing was due."""
        self.watched = False
        if seen:
            self._misses = 0

    def hit(self) -> bool:
        """A due row was seen. True: its feeder has room, and is to be told."""
        self._hit = self._idle
        return self._idle


class IdleQueues:
    """The queues of one node. `on_change` is called when one has become idle that is not watched."""

    def __init__(
        self, queues: Mapping[str, QueueLimits] | None = None, *, on_change: Callable[[], object] = _nothing
    ) -> None:
        self.queues: Final = {
            name: IdleQueue(name, limits.long_poll, on_change) for name, limits in (queues or {}).items()
        }

    @property
    def watchable(self) -> int:
        """How many may ever be watched."""
        return sum(queue.every > 0 for queue in self.queues.values())

    def of(self, name: str) -> IdleQueue:
        """The queue of that name."""
        found = self.queues.get(name)
        return IdleQueue(name, 0.0, _nothing) if found is None else found

    def choose(self, now: float) -> list[IdleQueue]:
        """Those that are to be watched now."""
        for queue in self.queues.values():
            queue.heard()
        return [queue for queue in self.queues.values() if queue.wants(now)]

    def new(self, now: float) -> bool:
        """Whether one is to be watched that is not."""
        return any(queue.wants(now) and not queue.watched for queue in self.queues.values())

    def next_at(self, now: float) -> float:
        """When another one is to be watched although nothing changes."""
        return min((queue.wants_later(now) for queue in self.queues.values()), default=math.inf)
