"""What becomes of an outcome once its verdict is known, and of a claim that is given up: told, hinted, let go.

Synchronous. Called by the flusher, or by the step task that has waited for the verdict.
"""

from __future__ import annotations

from typing import Any

import trio

from durable_actors._engine.claims import ActiveClaim
from durable_actors._engine.committing.queue import Commits
from durable_actors._engine.committing.verdicts import Refused, Verdict
from durable_actors._engine.keys.keeper import Keys
from durable_actors._engine.node import Node, logger
from durable_actors._engine.running.step_run import Ran
from durable_actors._store.rows import Claim, Committed, Raised
from durable_actors.machine import error_type, reason_text, shown_error, traceback_text
from durable_actors.telemetry import ClaimLost, OutcomeLate, OutcomeStale, StepCommitted, StepCrashed


class Settling:
    """The ends of claims, for all step tasks of an engine."""

    def __init__(self, node: Node, commits: Commits, keys: Keys) -> None:
        self._node = node
        self._commits = commits
        self._keys = keys

    def committed(self, ran: Ran, held: ActiveClaim, verdict: Committed) -> None:
        """It is in the database: tell those who wait for it."""
        node, claim = self._node, held.claim
        status = verdict.status
        if status == "executing":  # it runs ahead
            pass
        elif status in {"done", "failed"}:
            node.on_final(claim.id)
        elif status == "runnable":
            if not ran.transition.delay:
                node.poke(claim.queue, number=claim.id)
        elif ran.transition.timeout is not None or (ran.spawn is not None and ran.spawn.timeout is not None):
            node.expect_deadline(claim.queue)
        if ran.spawn is not None:
            for queue, priority in {(plan.queue, plan.priority) for plan in ran.spawn.plans}:
                node.poke(queue, priority=priority)
        if node.telemetry.active:
            node.telemetry.emit(StepCommitted(**facts(claim), status=verdict.status))
            if trio.current_time() > claim.trusted_until:
                node.telemetry.emit(OutcomeLate(**facts(claim)))

    def not_committed(self, held: ActiveClaim, verdict: Verdict) -> None:
        """Nothing of it was written."""
        claim = held.claim
        if isinstance(verdict, Refused):
            # Not even a plain failure can be stored: the row itself is broken. Its lease ends the claim.
            logger.error("instance %d cannot be written: %s", claim.id, verdict.error)
            return
        logger.warning(
            "instance %d: the outcome of step %s was refused, another claim owns the instance",
            claim.id,
            claim.step,
        )
        if self._node.telemetry.active:
            self._node.telemetry.emit(OutcomeStale(**facts(claim)))

    def given_up(self, held: ActiveClaim) -> None:
        """Lost, without its key, no longer trusted, or drained. What is ours still goes back, fenced."""
        node, claim = self._node, held.claim
        if node.threads.is_left(claim):
            held.left = True  # its key and its lease are not let go while this engine lives
            return
        reason = held.lost or held.interrupted
        if reason is None and trio.current_time() >= claim.trusted_until:
            reason = "its lease could not be renewed in time"
        if held.lost is None:
            # A run that a drain ended is no attempt. One that lost its key or its lease counts, also while it drains.
            drained = reason is None and node.draining
            self._commits.release(claim, attempts=0 if drained else 1, interruptions=1 if drained else 0)
            if drained:
                logger.info(
                    "instance %d: %s, step %s was interrupted by the drain; attempts unchanged",
                    claim.id,
                    claim.fsm,
                    claim.step,
                )
        if reason is not None:
            logger.warning("instance %d: step %s was cancelled: %s", claim.id, claim.step, reason)
            if node.telemetry.active:
                node.telemetry.emit(ClaimLost(**facts(claim), reason=reason))

    def crashed(self, held: ActiveClaim, error: BaseException) -> None:
        """User code raised what is for no `handle`: it goes back as if its worker had died, but for the worker."""
        node, claim = self._node, held.claim
        if held.lost is None:
            self._commits.crash(claim, reason_text(error), Raised(error_type(error), traceback_text(error)))
        logger.error(
            "instance %d: %s v%d, step %s crashed: it raised %s, which is no Exception. It runs again after a pause; "
            "max_crashes limits that",
            claim.id,
            claim.fsm,
            claim.version,
            claim.step,
            type(error).__name__,
            exc_info=shown_error(error),
        )
        if node.telemetry.active:
            node.telemetry.emit(StepCrashed(**facts(claim), error=error))

    def let_go(self, held: ActiveClaim) -> None:
        """Renew it no longer; its key is for others.

        Not before its task or thread has ended: one that outlives its claim keeps its key until it has really returned.
        """
        if held.claim.partition_key is not None:
            self._keys.free(held.claim)
        self._node.claims.drop(held)


def facts(claim: Claim) -> dict[str, Any]:
    """What every event about a step tells."""
    return {
        "id": claim.id,
        "machine": claim.fsm,
        "version": claim.version,
        "step": claim.step,
        "attempt": claim.attempt,
        "visit": claim.visit,
        "queue": claim.queue,
    }
