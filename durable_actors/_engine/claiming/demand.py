"""How many rows a feeder wants, and how long it may sleep. Pure: numbers in, numbers out."""

from __future__ import annotations

import math

import attrs


@attrs.frozen
class QueueLimits:
    """What one queue of one node may hold."""

    concurrency: int
    """Steps that run at a time."""
    prefetch: int
    """Claimed rows that wait for a slot, beyond that."""
    min_demand: int
    """So many free places make a pick worth its round trip."""
    poll_interval: float
    max_poll_interval: float
    long_poll: float = 0.0
    """Seconds between two looks of the server's while the queue is idle; 0: the feeder's own polls only."""


def demand(limits: QueueLimits, *, running: int, buffered: int) -> int:
    """How many rows to ask for now; 0 for none.

    Below `min_demand` it waits for more free places, unless nothing is claimed: an idle queue takes what there
    is. A `min_demand` above what the queue can ever want counts as that much, or it would never refill.
    """
    most = limits.concurrency + limits.prefetch
    free = most - running - buffered
    if free <= 0:
        return 0
    if free < min(limits.min_demand, most) and running + buffered > 0:
        return 0
    return free


SHAPE_SHARE = 20.0
SHAPE_CHEAP = 0.02
SHAPE_MAX = 2.0


def shape_pause(took: float) -> float:
    """Seconds from one look at the queue's shape to the next, the first having taken so many.

    The look walks dead index entries; when nothing can clean them up (an old transaction, a backup) there may be a
    million, and a busy feeder would look after every short pick. A cheap look may be repeated at once, another costs at
    most a twentieth of the time.
    """
    return 0.0 if took < SHAPE_CHEAP else min(took * SHAPE_SHARE, SHAPE_MAX)


def poll_pause(limits: QueueLimits, *, empty_polls: int) -> float:
    """Seconds from a poll to the next after so many polls in a row that found nothing.

    Doubles from `poll_interval` up to `max_poll_interval`.
    """
    doublings = min(max(empty_polls - 1, 0), 30)
    return min(limits.poll_interval * 2.0**doublings, limits.max_poll_interval)


class PollTimer:
    """When a feeder polls its queue next. Time is an argument.

    Only a poll that was due counts as an empty one. A feeder also looks when a slot becomes free; counted, fifty short
    jobs a second would be fifty empty polls, and the next poll `max_poll_interval` away although there is work.
    """

    __slots__ = ("_due", "_empty", "_limits")

    def __init__(self, limits: QueueLimits) -> None:
        self._limits = limits
        self._empty = 0
        self._due = -math.inf

    def looked(self, now: float, *, found_work: bool) -> float:
        """The feeder has looked at its queue; return when to poll next. A poke ends the wait early."""
        if found_work:
            self._empty = 0
        elif now < self._due:
            return self._due
        else:
            self._empty += 1
        self._due = now + poll_pause(self._limits, empty_polls=self._empty)
        return self._due
