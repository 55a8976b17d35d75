"""The slots of one queue: how many steps run, and how many have run and wait for their commit. Plain counting.

A step whose code has ended is in nobody's way: the next one runs while it is committed, so that the worker and Postgres
are busy at the same time. At most three times as many wait as may run (six times while rows are claimed ahead): with as
many, ten slots stood still for a third of the time, until the commit of the second ten was under way.
"""

from __future__ import annotations

from collections.abc import Iterable

from durable_actors._engine.claiming.demand import QueueLimits, demand
from durable_actors._engine.claims import ActiveClaim
from durable_actors._engine.running.prefetch import Ahead, most_ahead


def places(limits: QueueLimits) -> int:
    """Claims that a queue may have in hand at a time, beside those that are prefetched."""
    return 4 * limits.concurrency


def most_in_hand(limits: QueueLimits) -> int:
    """Steps of a queue that run or wait for their commit, at the most: while rows are claimed ahead."""
    return places(limits) + most_ahead(limits)


class Slots:
    """Counts the tasks of one queue."""

    __slots__ = ("_limits", "ahead", "ending", "running")

    def __init__(self, limits: QueueLimits) -> None:
        self._limits = limits
        self.running = 0
        """Steps whose code runs."""
        self.ending = 0
        """Steps that have run; their outcomes are on their way."""
        self.ahead = Ahead(limits)
        """Rows to claim although no slot is free for them."""

    def recount(self, started: Iterable[ActiveClaim]) -> None:
        """Begin with these: the feeder before this one has started them. An instance that stays has kept its slot."""
        for held in started:
            if held.ending:
                self.ending += 1
            else:
                self.running += 1

    @property
    def free(self) -> bool:
        """Whether another step may run."""
        limits = self._limits
        return (
            self.running < limits.concurrency
            and self.running + self.ending < places(limits) + self.ahead.rows
        )

    def full(self, eager: int) -> bool:
        """Whether as many steps wait for something as may run; so many of those that run have not waited yet."""
        return self.running - eager >= self._limits.concurrency

    @property
    def may_resume(self) -> bool:
        """Whether code of an instance whose outcome was refused may run beside the others: twice as many in all."""
        return self.running < 2 * self._limits.concurrency

    def demand(self, buffered: int) -> int:
        """How many rows to ask for, beside those that are claimed already."""
        limits, ahead = self._limits, self.ahead.rows
        wanted = demand(limits, running=self.running, buffered=buffered)
        if not wanted:
            return 0
        wanted += ahead
        room = places(limits) + limits.prefetch + ahead - self.ending - self.running - buffered
        if room >= wanted:
            return wanted
        # Too many wait for their commit. When it comes there is more room: a pick is worth its round trip then.
        return 0 if room < min(limits.min_demand, wanted) else room

    def room_beside_one(self, buffered: int) -> bool:
        """Whether, with one row more, a slot would be free and a pick be worth its round trip."""
        slot = self.running + buffered + 2 <= self._limits.concurrency
        return slot and self.demand(buffered + 1) > 0

    def excess(self, buffered: int) -> int:
        """How many of so many claimed rows have neither a slot nor a place to wait for one."""
        limits = self._limits
        return buffered - limits.prefetch - max(limits.concurrency - self.running, 0)

    def ended(self, held: ActiveClaim) -> None:
        """A step's code has ended, and its instance will not stay on this claim: one that does keeps its slot."""
        held.ending = True
        self.running -= 1
        self.ending += 1

    def resumed(self, held: ActiveClaim) -> None:
        """The outcome was refused: code of this instance runs again beside the others."""
        held.ending = False
        self.running += 1
        self.ending -= 1

    def exited(self, held: ActiveClaim) -> None:
        """A task has gone, and what it has left is settled."""
        if held.ending:
            self.ending -= 1
        else:
            self.running -= 1
