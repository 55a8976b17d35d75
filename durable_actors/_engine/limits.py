"""How many rows one queue of one node may hold. Pure: numbers in, numbers out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import attrs

MAX_PREFETCH_FACTOR: Final = 3
"""Rows that a queue may claim beyond its free slots, as a multiple of its concurrency; `prefetch` included."""
MAX_PREFETCH_ROWS: Final = 200
"""The same as a number of rows: a larger batch saves nothing more."""


@attrs.frozen
class QueueLimits:
    """The settings of one queue of one node."""

    concurrency: int
    """Steps that run at a time."""
    prefetch: int
    """Claimed rows that wait for a slot, beyond that."""
    min_demand: int
    """The number of free places that makes a pick worth its round trip."""
    poll_interval: float
    max_poll_interval: float
    long_poll: float = 0.0
    """Seconds between two looks of the server while the queue is idle; 0: the feeder polls by itself."""
    run_ahead: bool = True
    """Whether an instance may run its next step on the same claim."""
    weights: Mapping[str, float] | None = None
    """Of a fair queue the weights of its keys, if they are not 1; None: the queue is not fair."""


def demand(limits: QueueLimits, *, running: int, buffered: int) -> int:
    """How many rows to ask for now; 0 for none.

    Below `min_demand` the feeder waits for more free places, unless nothing is claimed: an idle queue takes what there
    is. A `min_demand` above what the queue can ever want counts as that much, or the queue would never refill.
    """
    most = limits.concurrency + limits.prefetch
    free = most - running - buffered
    if free <= 0:
        return 0
    if free < min(limits.min_demand, most) and running + buffered > 0:
        return 0
    return free


def max_inflight(limits: QueueLimits) -> int:
    """Steps of a queue that run or wait for their commit, at the most.

    A step whose code has ended frees its slot: the next one runs while it is committed, so that the worker and Postgres
    work at the same time. At most three times as many wait as may run. With as many, ten slots stood still for a third
    of the time, until the commit of the second ten was under way.
    """
    return 4 * limits.concurrency


def max_adaptive_prefetch(limits: QueueLimits) -> int:
    """Rows that a queue may claim beyond its slots and its `prefetch`, while its steps end at once."""
    return max(min(MAX_PREFETCH_FACTOR * limits.concurrency, MAX_PREFETCH_ROWS) - limits.prefetch, 0)


def max_inflight_burst(limits: QueueLimits) -> int:
    """`max_inflight` while rows are claimed ahead of free slots."""
    return max_inflight(limits) + max_adaptive_prefetch(limits)
