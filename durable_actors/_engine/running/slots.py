"""Slots: how many claims of one queue are in which state, and whether a slot is free. The base of `Dispatcher`."""

from __future__ import annotations

from durable_actors._engine.claims import ActiveClaim, ClaimState
from durable_actors._engine.limits import QueueLimits, max_inflight
from durable_actors._engine.running.prefetch import AdaptivePrefetch

_, _, RUNNING, COMMITTING, CONTINUING, READY, RECOVERING, _ = ClaimState


class Slots:
    """The states of the claims of one queue, counted."""

    def __init__(self, limits: QueueLimits) -> None:
        self._limits = limits
        self._max_inflight = max_inflight(limits)
        self._counts = [0] * len(ClaimState)
        self._suspended: set[ActiveClaim] = set()  # RUNNING, and their own code waits for something
        self.prefetch = AdaptivePrefetch(limits)

    def _move(self, active: ActiveClaim, state: ClaimState) -> None:
        """Move a claim to another state (`claims.MOVES`). Nothing else writes a state or a count."""
        counts = self._counts
        old = active.state
        counts[old] -= 1
        counts[state] += 1
        active.state = state
        if old is RUNNING and self._suspended:
            self._suspended.discard(active)

    def count(self, state: ClaimState) -> int:
        """How many claims are in this state."""
        return self._counts[state]

    @property
    def running(self) -> int:
        """Slots that are taken."""
        counts = self._counts
        return counts[RUNNING] + counts[CONTINUING] + counts[READY] + counts[RECOVERING]

    def _has_free_slot(self) -> bool:
        counts = self._counts  # `running`, in place:
        running = counts[RUNNING] + counts[CONTINUING] + counts[READY] + counts[RECOVERING]
        return (
            running < self._limits.concurrency
            and running + counts[COMMITTING] < self._max_inflight + self.prefetch.rows
        )

    @property
    def may_recover(self) -> bool:
        """Whether `handle` of a refused outcome may run beside the other steps: at most twice as many run in all."""
        return self.running < 2 * self._limits.concurrency

    def _all_suspended(self, eager: int) -> bool:
        """Whether as many steps wait as may run; `eager` of the running ones have not waited yet."""
        return self.running - eager >= self._limits.concurrency
