"""The default delay between two executions of a failed job. Pure: the random number is an argument."""

from __future__ import annotations

CEILING = 300.0
"""Seconds: the longest delay. With jitter, a job that keeps failing runs every 2.5 to 5 minutes."""


def default_backoff(attempt: int, random: float) -> float:
    """Return the seconds to wait after the execution with this `attempt` (0, 1, 2, …) failed.

    The delay is `min(2 ** attempt, 300)`, of which the upper half is random: jobs that failed together (because
    a mail server is down, for example) must not be retried all at the same moment, and none at once.

    >>> default_backoff(0, random=1.0), default_backoff(3, random=0.0), default_backoff(10_000, random=1.0)
    (1.0, 4.0, 300.0)
    """
    # The exponent is capped before the power is computed: 2 ** 10_000 does not fit a float.
    base = min(2.0 ** min(max(attempt, 0), 9), CEILING)
    return base * (0.5 + 0.5 * random)
