"""Sans-I/O: which queues of a node are idle, and which of them the long poll may watch. Time is an argument.

A queue is idle while its feeder has room for more rows than it found. Feeders report that here; the long poll reads it.
A queue stays idle while its feeder is awake for a moment because a step ended; otherwise it would miss the next
statement. If the long poll sees a due row that the feeder cannot claim (a transaction has locked it, or its key is
busy), the next statement would see it again at once: such a queue is watched again after a pause that doubles.

Feeders also report that they have claimed rows: while they do, the long poll sends short statements.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Final

from durable_actors._engine.limits import QueueLimits

LONGEST_PAUSE: Final = 1.0
"""Seconds for which a queue is not watched after a due row could not be claimed, at most."""


def _nothing() -> None:
    return None


class IdleQueue:
    """One queue, between its feeder and the long poll."""

    __slots__ = (
        "_asked", "_claimed", "_hit", "_idle", "_misses", "_on_change", "every", "name", "not_before", "watched",
    )  # fmt: skip

    def __init__(self, name: str, every: float, on_change: Callable[[], object]) -> None:
        self.name: Final = name
        self.every: Final = every
        """Seconds between two checks by the server; 0: the queue is never watched."""
        self._on_change = on_change
        self._asked = False
        self._idle = False
        self._claimed = False  # since the long poll has asked
        self._hit = False
        self._misses = 0
        self.not_before = -math.inf
        """When it may be watched again."""
        self.watched = False
        """A statement that watches it is under way."""

    # -- called by the feeder

    def rest(self, now: float) -> None:
        """The feeder goes to sleep with free slots."""
        self._idle = True
        if self._hit:  # a due row was seen, and not claimed
            self._hit = False
            self._misses = min(self._misses + 1, 20)
            self.not_before = now + min(self.every * 2.0**self._misses, LONGEST_PAUSE)
        if not (self.watched or self._asked):
            self._asked = True
            self._on_change()

    def busy(self) -> None:
        """The feeder has no free slot, or there is more to pick."""
        self._idle = False

    def claimed(self) -> None:
        """The feeder has claimed rows."""
        self._claimed = True
        self._hit = False
        self._misses = 0
        self.not_before = -math.inf

    # -- called by the long poll

    def wants(self, now: float) -> bool:
        """Whether to watch it now."""
        return self._idle and self.every > 0 and now >= self.not_before

    def wants_later(self, now: float) -> float:
        """When to watch it again, if it stays idle."""
        return self.not_before if self._idle and self.every > 0 and now < self.not_before else math.inf

    def take_claimed(self) -> bool:
        """Whether its feeder has claimed rows since the last call."""
        claimed, self._claimed = self._claimed, False
        return claimed

    def heard(self) -> None:
        """The long poll has read its state: the next change is reported again."""
        self._asked = False

    def unwatched(self, *, seen: bool) -> None:
        """The statement has ended; `seen`: regularly, and nothing was due."""
        self.watched = False
        if seen:
            self._misses = 0

    def hit(self) -> bool:
        """The server saw a due row. True: the feeder has room, so wake it."""
        self._hit = self._idle
        return self._idle


class IdleQueues:
    """The queues of one node. `on_change` is called when a queue becomes idle that is not watched."""

    def __init__(
        self, queues: Mapping[str, QueueLimits] | None = None, *, on_change: Callable[[], object] = _nothing
    ) -> None:
        self.queues: Final = {
            name: IdleQueue(name, limits.long_poll, on_change) for name, limits in (queues or {}).items()
        }

    @property
    def watchable(self) -> int:
        """How many queues may be watched at all."""
        return sum(queue.every > 0 for queue in self.queues.values())

    def of(self, name: str) -> IdleQueue:
        """The queue of that name."""
        found = self.queues.get(name)
        return IdleQueue(name, 0.0, _nothing) if found is None else found

    def choose(self, now: float) -> list[IdleQueue]:
        """The queues to watch now."""
        for queue in self.queues.values():
            queue.heard()
        return [queue for queue in self.queues.values() if queue.wants(now)]

    def take_claimed(self) -> bool:
        """Whether some feeder has claimed rows since the last call."""
        return sum([queue.take_claimed() for queue in self.queues.values()]) > 0

    def new(self, now: float) -> bool:
        """Whether some queue should be watched and is not."""
        return any(queue.wants(now) and not queue.watched for queue in self.queues.values())

    def next_at(self, now: float) -> float:
        """When the next queue is to be watched if no feeder reports anything."""
        return min((queue.wants_later(now) for queue in self.queues.values()), default=math.inf)
