"""What the log says of a step that failed, once its outcome is committed.

================================================  =======  ===========================
the instance                                      level    traceback
================================================  =======  ===========================
failed, because its code raised or kept crashing  ERROR    of the exception
failed, because its code chose so: it returned    WARNING  none
`Stop` or `Cancel`, or raised `Cancel`
runs again                                        WARNING  in a DEBUG record of its own
goes on: `handle` returned `Next`, `Done`, …      INFO     the same
================================================  =======  ===========================

The records carry their step, like those of the step's own code (`telemetry.StepLogFilter`).
"""

from __future__ import annotations

import attrs

from durable_actors._engine.node import Node, logger
from durable_actors._engine.running.step_run import Ran
from durable_actors._store.rows import Claim, Status
from durable_actors.machine import Cancel, exhausted, reason_text, shown_error
from durable_actors.telemetry import current_step

SHOWN: int = 300
"""Characters of the reason in a line; the row has more."""


@attrs.frozen
class _Step:
    """What a log record is told of the step."""

    id: int
    machine: str
    step: str
    attempt: int


def tell_failure(node: Node, ran: Ran, claim: Claim, status: Status) -> None:
    """Log a failed run; one line, and for the end of an instance the traceback."""
    spec = node.catalog.find(claim.fsm, claim.version)
    limit = None if spec is None else spec.max_attempts
    over = spec is not None and claim.attempt > 0 and exhausted(spec, claim.attempt) is not None
    run = f"run {claim.attempt + (not over)}" + ("" if limit is None else f" of {limit}")
    change, error = ran.transition, ran.error
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
        elif ran.outcome == "Retry":
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
                ran.outcome,
                reason,
            )
    finally:
        current_step.reset(token)
