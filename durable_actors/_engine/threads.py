"""The threads of `def` steps: how many may run, which do, and when the engine stops waiting for them.

A thread cannot be cancelled. While the engine runs, a task whose step is cancelled (its claim was lost, its timeout
has passed, its lease can no longer be trusted) waits until its thread has returned, and keeps slot, key and lease. The
step may call `trio.from_thread.check_cancelled()`, which raises once the step is cancelled.

When the engine stops and `drain_timeout` has passed, threads that still run are abandoned: neither the engine nor the
process waits for them. Their rows are not released, because a thread may still have effects. The rows stay claimed
until other nodes have seen this node dead for `dead_after`, or until their leases end; then they run again, attempts
unchanged.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final, TypeVarTuple, cast

import trio

from durable_actors._store.rows import Claim

logger: Final = logging.getLogger("durable_actors.engine")

Ts = TypeVarTuple("Ts")


class Threads:
    """The threads of one engine's steps, apart from Trio's default limiter, which belongs to the host application."""

    __slots__ = ("_limiter", "_running")

    def __init__(self, limit: int) -> None:
        self._limiter: Final = trio.CapacityLimiter(limit)
        self._running: dict[str, _StepThread] = {}

    async def run(self, claim: Claim, call: Callable[[*Ts], object], *args: *Ts) -> object:
        """Run synchronous code in a thread. Cancelled, it exits when the thread has returned or was abandoned."""
        thread = _StepThread(self._limiter, self._running, claim)
        try:
            value = await trio.to_thread.run_sync(
                call, *args, limiter=cast("trio.CapacityLimiter", thread), abandon_on_cancel=True
            )
        except trio.Cancelled:
            await thread.wait_ended()
            raise
        await trio.lowlevel.checkpoint_if_cancelled()  # cancelled just now: its outcome is dropped
        return value

    def runs(self, claim: Claim) -> bool:
        """Whether a thread of this claim runs."""
        return claim.claim_id in self._running

    def is_left(self, claim: Claim) -> bool:
        """Whether a thread of this claim was abandoned and still runs."""
        thread = self._running.get(claim.claim_id)
        return thread is not None and thread.ended.is_set()

    def leave(self) -> None:
        """Abandon all running threads: the engine stops, and `drain_timeout` has passed.

        Safe to repeat: a thread may have begun since the last call, as `handle` of an outcome that Postgres refused.
        """
        now = trio.current_time()
        for thread in list(self._running.values()):
            if thread.ended.is_set():
                continue
            claim = thread.claim
            logger.warning(
                "instance %d: the thread of %s, step %s has run for %.1f s and is left behind: its row stays claimed "
                "until other nodes have seen this one gone, or until its lease ends",
                claim.id,
                claim.fsm,
                claim.step,
                now - thread.began,
            )
            thread.ended.set()


class _StepThread:
    """One thread. Trio uses it as limiter of `to_thread.run_sync`: so it learns when the thread begins and returns."""

    __slots__ = ("_limiter", "_running", "began", "claim", "ended")

    def __init__(self, limiter: trio.CapacityLimiter, running: dict[str, _StepThread], claim: Claim) -> None:
        self._limiter = limiter
        self._running = running
        self.claim = claim
        self.began = 0.0
        self.ended = trio.Event()
        """It has returned, or was abandoned."""

    async def wait_ended(self) -> None:
        """Wait for it, shielded from cancellation. Returns at once if it has not begun."""
        if self._running.get(self.claim.claim_id) is self:
            with trio.CancelScope(shield=True):
                await self.ended.wait()

    async def acquire_on_behalf_of(self, borrower: object) -> None:
        await self._limiter.acquire_on_behalf_of(borrower)
        self.began = trio.current_time()
        self._running[self.claim.claim_id] = self

    def release_on_behalf_of(self, borrower: object) -> None:
        """Called in the Trio thread when the other thread has returned; its task may have exited long before."""
        self._limiter.release_on_behalf_of(borrower)
        self._running.pop(self.claim.claim_id, None)
        if self.ended.is_set():
            claim = self.claim
            logger.info(
                "instance %d: the thread of %s, step %s that was left behind has returned after %.1f s; its outcome "
                "is dropped",
                claim.id,
                claim.fsm,
                claim.step,
                trio.current_time() - self.began,
            )
        self.ended.set()
