"""PollTimer: when a feeder polls its queue next. Sans-I/O; time is an argument."""

from __future__ import annotations

import math

from durable_actors._engine.limits import QueueLimits


def poll_pause(limits: QueueLimits, *, empty_polls: int) -> float:
    """Seconds from a poll to the next, after so many polls in a row that found nothing.

    Doubles from `poll_interval` up to `max_poll_interval`.
    """
    doublings = min(max(empty_polls - 1, 0), 30)
    return min(limits.poll_interval * 2.0**doublings, limits.max_poll_interval)


class PollTimer:
    """When a feeder polls its queue next.

    Only a poll that was due counts as an empty one. A feeder also picks when a slot becomes free; if that counted,
    fifty short jobs a second would be fifty empty polls, and the next poll `max_poll_interval` away although there is
    work.
    """

    __slots__ = ("_due", "_empty", "_limits")

    def __init__(self, limits: QueueLimits) -> None:
        self._limits = limits
        self._empty = 0
        self._due = -math.inf

    def polled(self, now: float, *, found_work: bool) -> float:
        """The feeder has polled its queue; return when to poll next. A hint ends the wait early."""
        if found_work:
            self._empty = 0
        elif now < self._due:
            return self._due
        else:
            self._empty += 1
        self._due = now + poll_pause(self._limits, empty_polls=self._empty)
        return self._due
