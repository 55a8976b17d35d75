"""The slots of one queue: how many steps run, and how many have run and wait for their commit. Plain counting.

A step whose code has ended is in nobody's way: the next one runs while it is committed, so that the worker and Postgres
are busy at the same time. At most as many wait as may run.
"""

from __future__ import annotations

from collections.abc import Iterable

from durable_actors._engine.demand import QueueLimits, demand
from durable_actors._engine.leases import Held


def places(limits: QueueLimits) -> int:
    """Tasks that a queue may have at a time."""
    return 2 * limits.concurrency


class Slots:
    """Counts the tasks of one queue."""

    __slots__ = ("_limits", "ending", "running")

    def __init__(self, limits: QueueLimits) -> None:
        self._limits = limits
        self.running = 0
        """Steps whose code runs."""
        self.ending = 0
        """Steps that have run; their outcomes are on their way."""

    def recount(self, started: Iterable[Held]) -> None:
        """Begin with these: the feeder before this one has started them."""
        for held in started:
            held.ending = held.ending or held.left
            if held.ending:
                self.ending += 1
            else:
                self.running += 1

    @property
    def free(self) -> bool:
        """Whether another step may run."""
        return self.running < self._limits.concurrency and self.running + self.ending < places(self._limits)

    def demand(self, buffered: int) -> int:
        """How many rows to ask for, beside those that are claimed already."""
        limits = self._limits
        wanted = demand(limits, running=self.running, buffered=buffered)
        room = places(limits) + limits.prefetch - self.ending - self.running - buffered
        if room >= wanted:
            return wanted
        # Too many wait for their commit. When it comes there is more room: a pick is worth its round trip then.
        return 0 if room < min(limits.min_demand, wanted) else room

    def ended(self, held: Held) -> None:
        """A step's code has ended, and its instance will not go on here."""
        held.ending = True
        self.running -= 1
        self.ending += 1

    def resumed(self, held: Held) -> None:
        """The outcome was refused: code of this instance runs again beside the others, at most `places` in all."""
        held.ending = False
        self.running += 1
        self.ending -= 1

    def exited(self, held: Held) -> None:
        """A task has gone, and what it has left is settled."""
        if held.ending:
            self.ending -= 1
        else:
            self.running -= 1
