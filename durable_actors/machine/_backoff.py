"""The default delay between two executions of a failed job. Pure: the random number is an argument."""

from __future__ import annotations

CEILING = 300.0
"""Seconds; a job that keeps failing is tried again every 2.5 to 5 minutes."""


def default_backoff(attempt: int, random: float) -> float:
    """Seconds to wait after the execution with this `attempt` (0, 1, 2, …) failed.

    `min(2 ** attempt, 300)`, of which the upper half is random: a burst of jobs that failed together (one
    dead mail server) must not come back together, and yet none may come back at once.

    >>> default_backoff(0, random=1.0), default_backoff(3, random=0.0), default_backoff(10_000, random=1.0)
    (1.0, 4.0, 300.0)
    """
    # The exponent is capped before the power is taken: 2 ** 10_000 is a 3,000-digit int that no float holds.
    base = min(2.0 ** min(max(attempt, 0), 9), CEILING)
    return base * (0.5 + 0.5 * random)
