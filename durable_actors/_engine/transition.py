"""From an outcome to the whole next row. Pure."""

from __future__ import annotations

from typing import assert_never

from durable_actors._store.rows import Claim, Transition
from durable_actors.errors import InvalidOutcome
from durable_actors.machine import (
    KEEP,
    Await,
    Done,
    MachineSpec,
    Next,
    Outcome,
    Retry,
    ScheduleChildren,
    Stop,
    encode_json,
    reason_text,
)

MAX_ATTEMPT = 2**31 - 1
"""The column is an int: a step that retries without end must not overflow it and poison its commits."""


def transition(
    claim: Claim,
    spec: MachineSpec,
    outcome: Outcome,
    *,
    ahead: bool = False,
    error: BaseException | None = None,
) -> Transition:
    """Translate (claim, outcome) into the next row.

    `ahead` asks to stay on this claim after a `Next`. `error` is what went through `handle`: a retry remembers it.
    Raises `StateError` when a state or result cannot be stored.
    """
    match outcome:
        case Next():
            rekey = outcome.partition_key is not KEEP and outcome.partition_key != claim.partition_key
            return Transition(
                claim,
                "runnable",
                outcome.step,
                attempt=0,
                advance=1,
                ahead=ahead and not rekey,
                state=_state(spec, outcome.state, outcome.step),
                rekey=rekey,
                partition_key=outcome.partition_key if isinstance(outcome.partition_key, str) else None,
            )
        case Retry():
            return Transition(
                claim,
                "runnable",
                claim.step,
                attempt=min(claim.attempt + 1, MAX_ATTEMPT),
                state=_state(spec, outcome.state, claim.step),
                delay=outcome.delay,
                last_error=None if error is None else reason_text(error),
            )
        case Done():
            where = f"{spec}, step {claim.step!r}: the result"
            result = encode_json(outcome.result, what=where)
            return Transition(claim, "done", claim.step, attempt=claim.attempt, result=result)
        case Stop():
            return Transition(
                claim, "failed", claim.step, attempt=claim.attempt, last_error=reason_text(outcome.reason)
            )
        case Await() | ScheduleChildren():
            raise InvalidOutcome(
                f"{spec}, step {claim.step!r}: {type(outcome).__name__} is not available yet"
            )
        case _:
            assert_never(outcome)


def failure(claim: Claim, error: BaseException) -> Transition:
    """The end of an instance whose `handle` could not help either: terminal `failed`. Can always be stored."""
    return Transition(claim, "failed", claim.step, attempt=claim.attempt, last_error=reason_text(error))


def _state(spec: MachineSpec, state: object, step: str) -> bytes | None:
    return None if state is KEEP else spec.codec.encode(state, step=step)
