"""The log record of a step that failed, written once its outcome is committed.

================================================  =======  ===========================
the instance                                      level    traceback
================================================  =======  ===========================
failed, because its code raised or kept crashing  ERROR    of the exception
failed, because its code chose so: it returned    WARNING  none
`Stop` or `Cancel`, or raised `Cancel`
runs again                                        WARNING  in a DEBUG record of its own
goes on: `handle` returned `Next`, `Done`, …      INFO     the same
================================================  =======  ===========================

The records name their step, like those of the step's own code (`telemetry.StepLogFilter`).
"""

from __future__ import annotations

import attrs

from durable_actors._engine.committing.queue import PendingCommit
from durable_actors._engine.node import Node, logger
from durable_actors._step_log import current_step
from durable_actors.machine import Cancel, Status, exhausted, most_attempts, reason_text, shown_error

SHOWN: int = 300
"""Characters of the reason in a log line; the row stores more."""


@attrs.frozen
class _Step:
    """The step, as a log record shows it."""

    id: int
    machine: str
    step: str
    attempt: int


def log_failure(node: Node, pending: PendingCommit, status: Status) -> None:
    """Log a failed run in one line; when it ends the instance, with the traceback."""
    claim = pending.active.claim
    spec = node.catalog.find(claim.fsm, claim.version)
    limit = None if spec is None else most_attempts(spec, claim.step, claim.max_attempts)
    over = spec is not None and exhausted(spec, claim.attempt, claim.max_attempts) is not None
    run = f"run {claim.attempt + (not over)}" + ("" if limit is None else f" of {limit}")
    change, error = pending.transition, pending.error
    text = change.last_error or ("" if error is None else reason_text(error))
    reason = text.partition("\n")[0][:SHOWN]
    about = (claim.id, spec or claim.fsm, claim.step, run)
    token = current_step.set(_Step(claim.id, claim.fsm, claim.step, claim.attempt))
    try:
        if status == "failed":
            if (error is None and not over) or isinstance(error, Cancel):
                logger.warning("instance %d failed: %s, step %s stopped it (%s): %s", *about, reason)
            else:
                logger.error(
                    "instance %d failed: %s, step %s (%s): %s", *about, reason, exc_info=shown_error(error)
                )
        elif (
            status == "cancelled" and claim.cancellation is not None and claim.cancellation.ends(claim.visit)
        ):
            logger.info("instance %d was cancelled: %s, step %s did not run: %s", *about[:3], reason)
        elif status == "cancelled":  # it compensated
            failed = "" if error is None and pending.outcome != "Stop" else ": it failed"
            logger.info(
                "instance %d was cancelled: %s, step %s compensated (%s)%s: %s", *about, failed, reason
            )
        elif pending.outcome == "Retry":
            logger.warning(
                "instance %d: %s, step %s failed (%s), next run in %s s: %s",
                *about,
                f"{change.delay:.2f}".rstrip("0").rstrip("."),
                reason,
            )
        else:
            logger.info(
                "instance %d: %s, step %s failed (%s), and handle returned %s: %s",
                *about,
                pending.outcome,
                reason,
            )
    finally:
        current_step.reset(token)
