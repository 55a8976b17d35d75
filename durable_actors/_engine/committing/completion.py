"""What follows the verdict of an outcome, or a run without one: events, hints, logs, and the claim's next state.

Synchronous. The flusher calls `settle` for each queued outcome. A step task calls `report` for an outcome with
children, which it commits itself, and `interrupted` or `crashed` for a run without an outcome.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from durable_actors._engine.claims import ActiveClaim
from durable_actors._engine.committing.failures import log_failure
from durable_actors._engine.committing.queue import Commits, PendingCommit
from durable_actors._engine.committing.transition import failure
from durable_actors._engine.committing.verdicts import Overruled, Refused, Verdict
from durable_actors._engine.node import Node, logger
from durable_actors._limits import slot_of
from durable_actors._store.children import Spawn
from durable_actors._store.read import Ending
from durable_actors._store.rows import Claim, Committed, Raised
from durable_actors.machine import ENDED, error_type, reason_text, shown_error, traceback_text
from durable_actors.telemetry import (
    ClaimLost,
    InstancesInserted,
    OutcomeLate,
    OutcomeStale,
    StepCommitted,
    StepCrashed,
)


class ClaimOwner(Protocol):
    """What `Completion` asks of a queue's `Dispatcher`."""

    def continue_on_claim(self, active: ActiveClaim, now: float) -> None:
        """The next step of this instance may run on the same claim."""
        ...

    def finish(self, active: ActiveClaim, now: float) -> None:
        """The claim is over."""
        ...

    def recover(self, pending: PendingCommit, now: float) -> bool:
        """Run `handle` in a task, for Postgres refused the outcome. False: that is not possible now."""
        ...

    def abandon(self, active: ActiveClaim) -> None:
        """A thread of this claim outlives the engine."""
        ...


class Completion:
    """For all queues of an engine. `owners` has the dispatcher of each."""

    def __init__(self, node: Node, commits: Commits, owners: Mapping[str, ClaimOwner]) -> None:
        self._node = node
        self._commits = commits
        self._owners = owners

    # -- after a verdict

    def settle(self, pending: PendingCommit, verdict: Verdict | None, now: float) -> None:
        """Follow up on an outcome; None: it was withdrawn. Called in the flusher, so nothing may escape from it."""
        active = pending.active
        owner = self._owners[active.claim.queue]
        try:
            if isinstance(verdict, Committed):  # first: nearly always
                self._committed(pending, verdict, now)
            elif isinstance(verdict, Refused) and not pending.final:
                if self._try_otherwise(pending, verdict, now):
                    return
                self.interrupted(active, now)
            elif isinstance(verdict, Overruled):
                self.overruled(active, verdict, now)
            elif verdict is None:
                self.interrupted(active, now)
            else:
                self.report(pending, verdict, now)
        except Exception:  # noqa: BLE001 - a user's log handler, or a bug of ours
            with contextlib.suppress(Exception):
                logger.exception("instance %d: the follow-up of its outcome failed", active.claim.id)
        if (limits := active.claim.recorded.rate_limit) is not None and (slot := slot_of(limits)) is not None:
            self._node.expect_token(active.claim.queue, slot)
        if isinstance(verdict, Committed) and verdict.state is not None and verdict.status == "executing":
            # The next step sees what is stored: jsonb returns other bytes than it was given.
            active.claim.enter(pending.transition.step, verdict.visit, verdict.state, inbox=verdict.inbox)
            owner.continue_on_claim(active, now)
        else:
            owner.finish(active, now)

    def _try_otherwise(self, pending: PendingCommit, refused: Refused, now: float) -> bool:
        """Postgres refuses the data: let `handle` choose another outcome, once; then store a plain failure."""
        instead = after_refusal(pending, refused)
        if instead is None:
            return self._owners[pending.active.claim.queue].recover(pending, now)
        self._commits.enqueue(instead)
        return True

    def report(self, pending: PendingCommit, verdict: Verdict, now: float) -> None:
        """Emit events, wake feeders, write the log."""
        if isinstance(verdict, Committed):
            self._committed(pending, verdict, now)
        else:
            self._not_committed(pending.active.claim, verdict)

    def _committed(self, pending: PendingCommit, verdict: Committed, now: float) -> None:
        node, claim, spawn = self._node, pending.active.claim, pending.spawn
        status = verdict.status
        if status == "executing":  # it runs ahead
            pass
        elif status in ENDED:
            if pending.transition.deletes:  # its row may be gone
                node.on_final(claim.id, Ending(claim.id, status, pending.transition.result, None))
            else:
                node.on_final(claim.id)
        elif status == "runnable":
            if not pending.transition.delay:
                node.notify(claim.queue, instance_id=claim.id)
            if node.wakeups is not None:
                node.wakeups.add((claim.id,))
        elif pending.transition.timeout is not None:
            node.expect_deadline(claim.queue)
        if spawn is not None:
            self.spawned(claim, spawn, verdict.children)
        if node.telemetry.active or pending.transition.last_error is not None or pending.error is not None:
            self._tell(pending, verdict, now)

    def _tell(self, pending: PendingCommit, verdict: Committed, now: float) -> None:
        """Tell whoever listens of a committed outcome, and of the failure behind it."""
        node, claim, status = self._node, pending.active.claim, verdict.status
        if node.telemetry.active:
            if pending.spawn is not None and verdict.children:
                first, count = pending.spawn.plans[0], len(verdict.children)
                node.telemetry.emit(
                    InstancesInserted(machine=first.machine, queue=first.queue, count=count, seconds=None)
                )
            node.telemetry.emit(StepCommitted(**facts(claim), status=status))
            if now > claim.trusted_until:
                node.telemetry.emit(OutcomeLate(**facts(claim)))
        if pending.transition.last_error is not None or pending.error is not None:
            log_failure(node, pending, status)

    def spawned(self, claim: Claim, spawn: Spawn, children: Sequence[int] = ()) -> None:
        """Children may have been inserted, and their parent parked. The hints are harmless if they were not.

        `children`: those that were, as far as that is known.
        """
        node = self._node
        if spawn.timeout is not None:
            node.expect_deadline(claim.queue)
        for queue, priority in {(plan.queue, plan.priority) for plan in spawn.plans}:
            node.notify(queue, priority=priority)
        if node.wakeups is not None:
            node.wakeups.add(children)

    def overruled(self, active: ActiveClaim, verdict: Overruled, now: float) -> None:
        """A request to cancel came before the outcome: the claim is released, which ends the instance."""
        self._node.claims.request(active.claim.claim_id, verdict.request)
        self.interrupted(active, now)

    def _not_committed(self, claim: Claim, verdict: Verdict) -> None:
        if isinstance(verdict, Refused):
            # Not even a plain failure can be stored: the row itself is broken. Its lease ends the claim.
            logger.error("instance %d cannot be written: %s", claim.id, verdict.error)
            return
        logger.warning(
            "instance %d: the outcome of step %s was not committed, another claim owns the instance",
            claim.id,
            claim.step,
        )
        if self._node.telemetry.active:
            self._node.telemetry.emit(OutcomeStale(**facts(claim)))

    # -- after a run without an outcome

    def interrupted(self, active: ActiveClaim, now: float) -> None:
        """A run was cancelled or an outcome withdrawn. The row is released, fenced, unless the claim is lost.

        If a command has asked for that, the release ends the instance.
        """
        node, claim = self._node, active.claim
        if node.threads.is_left(claim):
            self._owners[claim.queue].abandon(active)
            return
        if active.cancel_requested and active.lost is None:
            self._commits.release(claim, attempts=0)
            return
        reason = active.lost or active.interrupted
        if reason is None and now >= claim.trusted_until:
            reason = "its lease could not be renewed in time"
        if active.lost is None:
            # A run that a drain ended is no attempt. One that lost its key or its lease counts, also during a drain.
            drained = reason is None and node.draining.value
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

    def postponed(self, active: ActiveClaim) -> None:
        """What the step calls has told it to wait: the row is released, and that was no attempt."""
        self._commits.release(active.claim, attempts=0, interruptions=1)

    def crashed(self, active: ActiveClaim, error: BaseException) -> None:
        """User code raised what is not for `handle`: the row is released as if the worker had died."""
        node, claim = self._node, active.claim
        if active.lost is None:
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


def after_refusal(pending: PendingCommit, refused: Refused) -> PendingCommit | None:
    """Postgres refuses an outcome. Returns the plain failure to store instead; None: `handle` chooses another one."""
    with contextlib.suppress(
        Exception
    ):  # a user's log handler that raises must not cost the instance its next outcome
        logger.warning(
            "instance %d: Postgres refused its outcome: %s", pending.active.claim.id, refused.error
        )
    if pending.error is not None:  # `handle` has had its turn
        return plain_failure(pending, refused.error)
    pending.refusal = refused.error
    return None


def plain_failure(refused: PendingCommit, error: Exception) -> PendingCommit:
    """What is stored when Postgres has refused the outcome that `handle` chose, too."""
    reason = refused.refusal or error
    pending = PendingCommit(refused.active, None, failure(refused.active.claim, reason), "Stop", error=reason)
    pending.final = True
    return pending


def facts(claim: Claim) -> dict[str, Any]:
    """The fields that every event about a step has."""
    return {
        "id": claim.id,
        "machine": claim.fsm,
        "version": claim.version,
        "step": claim.step,
        "attempt": claim.attempt,
        "visit": claim.visit,
        "queue": claim.queue,
    }
