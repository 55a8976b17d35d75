"""From an outcome to the whole next row. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_never

from durable_actors._store.children import Spawn
from durable_actors._store.insert import traced
from durable_actors._store.links import Graph
from durable_actors._store.rows import NULL, Claim, Raised, Transition
from durable_actors.errors import DurableError, StateError
from durable_actors.machine import (
    KEEP,
    OUTCOMES,
    Approval,
    Await,
    Child,
    Done,
    InsertPlan,
    JournalLevel,
    MachineSpec,
    Next,
    Outcome,
    Pause,
    Retry,
    ScheduleChildren,
    Signal,
    Status,
    Stop,
    current_registry,
    encode_json,
    error_type,
    plan_insert,
    reason_text,
    traceback_text,
)

MAX_BOUNDARY = 65_536
"""Bytes of JSON of a manual boundary: lists show it, and every read of its row reads it."""
MAX_ATTEMPT = 2**31 - 1
"""The column is an int: a step that retries without end must not overflow it, or its commits would be refused."""


def transition(  # noqa: PLR0911 - one per case
    claim: Claim,
    spec: MachineSpec,
    outcome: Outcome,
    *,
    handed: Sequence[Signal] = (),
    unseen: Sequence[int] = (),
    keep_claim: bool = False,
    error: BaseException | None = None,
) -> Transition:
    """Translate (claim, outcome) into the next row.

    `handed`: the awaited signals that the step was given; `unseen`: the ids of awaited signals beyond these.
    `keep_claim`: run the next step on this claim after a `Next`. `error`: what went through `handle`; a retry stores
    it. Raises `StateError` if a state or result cannot be stored.
    """
    match outcome:
        case Next():
            return _enter(claim, spec, outcome, handed=handed, keep_claim=keep_claim)
        case Done():
            return _end(claim, spec, outcome)
        case Retry():
            return Transition(
                claim,
                "runnable",
                claim.step,
                attempt=min(claim.attempt + 1, MAX_ATTEMPT),
                state=_state(spec, outcome.state, claim.step),
                delay=outcome.delay,
                last_error=None if error is None else reason_text(error),
                raised=None if error is None else _raised(error),
                keeps_awaits=True,
            )
        case Await():
            after = _park(claim, spec, outcome, handed=handed, unseen=unseen, error=error)
            return after if outcome.then is None else _relimit(after, spec.steps[outcome.then].limits)
        case Pause() | Approval():
            after = _ask(claim, spec, outcome, handed=handed, error=error)
            return _relimit(after, spec.steps[outcome.then].limits)
        case ScheduleChildren():
            after = Transition(
                claim,
                "awaiting_children",
                claim.step,
                attempt=0,
                advance=1,
                state=_state(spec, outcome.state, outcome.then),
                await_step=outcome.then,
                consumed=_consumed(handed, ()),
            )
            return _relimit(after, spec.steps[outcome.then].limits)
        case Stop():
            return _fail(claim, outcome, error)
        case _:
            assert_never(outcome)


# Most outcomes are `Next` and `Done`: their fields are set one by one, for keywords would cost 100 ns a step.


def _end(claim: Claim, spec: MachineSpec, outcome: Done) -> Transition:
    if claim.cancellation is not None:  # it compensated
        return cancellation(claim, claim.cancellation.reason)
    result = NULL if outcome.result is None else _encoded(spec, outcome.result, claim.step, "result")
    after = Transition(claim, "done", claim.step, claim.attempt)
    after.result = result
    if spec.keep == 0 and claim.parent_id is None:  # its parent reads the row of a child
        after.deletes = True
    return after


def _failed(claim: Claim) -> Status:
    """How a failure ends the instance: one that compensates was cancelled, whatever becomes of its compensation."""
    return "failed" if claim.cancellation is None else "cancelled"


def _fail(claim: Claim, outcome: Stop, error: BaseException | None) -> Transition:
    cause = outcome.reason if isinstance(outcome.reason, BaseException) else error
    return Transition(
        claim,
        _failed(claim),
        claim.step,
        attempt=claim.attempt,
        last_error=reason_text(outcome.reason),
        raised=None if cause is None else _raised(cause),
    )


def _enter(
    claim: Claim, spec: MachineSpec, outcome: Next, *, handed: Sequence[Signal], keep_claim: bool
) -> Transition:
    key = outcome.partition_key
    after = Transition(claim, "runnable", outcome.step, 0)
    after.advance = 1
    after.keep_claim = keep_claim
    after.state = _state(spec, outcome.state, outcome.step)
    if key is not KEEP and key != claim.partition_key:
        after.rekey, after.keep_claim = True, False
        after.partition_key = key if isinstance(key, str) else None
    limits = outcome.limits or spec.steps[outcome.step].limits
    if limits is not None or claim.recorded.rate_limit is not None:
        _relimit(after, limits)
    if handed or outcome.consume:
        after.consumed = _consumed(handed, outcome.consume)
    return after


def _relimit(after: Transition, limits: str | None) -> Transition:
    """Enter a step with these limits. It is claimed anew, which charges them; and a slot is free before that."""
    after.keep_claim = False
    if limits != after.claim.recorded.rate_limit:
        after.relimits, after.limits = True, limits
    return after


def _park(
    claim: Claim,
    spec: MachineSpec,
    outcome: Await,
    *,
    handed: Sequence[Signal],
    unseen: Sequence[int],
    error: BaseException | None,
) -> Transition:
    """Await: keep handed signals that are awaited again (so that they accumulate), consume the others."""
    kept = [
        signal.id for signal in handed if signal.name in outcome.names and signal.id not in outcome.consume
    ]
    consumed = _consumed([signal for signal in handed if signal.id not in kept], outcome.consume)
    entered = outcome.then is not None
    return Transition(
        claim,
        "awaiting_signal",
        claim.step,
        # After an Await from `handle`, a failing step must not start again at attempt 0, or it would fail for ever.
        attempt=0 if entered and error is None else claim.attempt,
        advance=1 if entered else 0,
        state=_state(spec, outcome.state, outcome.then or claim.step),
        last_error=None if error is None else reason_text(error),
        raised=None if error is None else _raised(error),
        awaits=outcome.names,
        await_step=outcome.then,
        timeout=outcome.timeout,
        consumed=consumed,
        # A step is handed at most one page of signals. If it consumes one of them, the next run sees a signal from
        # beyond the page, so unseen signals may wake it. If it consumes none, the next run would see the same page, so
        # unseen signals must not wake it. Ids in `consume` that were not handed do not matter here.
        kept=tuple(kept) if len(kept) < len(handed) else (*kept, *unseen),
    )


def _ask(
    claim: Claim,
    spec: MachineSpec,
    outcome: Pause | Approval,
    *,
    handed: Sequence[Signal],
    error: BaseException | None,
) -> Transition:
    """A manual boundary: parked as by `Await`, with nothing that a signal could match."""
    kind = "pause" if isinstance(outcome, Pause) else "approval"
    told: dict[str, object] = {
        "kind": kind,
        "then": outcome.then,
        "title": outcome.title,
        "data": outcome.data,
    }
    if isinstance(outcome, Approval):
        told |= {"on_reject": outcome.on_reject, "on_timeout": outcome.on_timeout}
    late = told.get("on_timeout") or told.get("on_reject")
    told = {name: value for name, value in told.items() if value is not None}
    boundary = _encoded(spec, told, claim.step, f"data of the {kind}")
    if len(boundary) > MAX_BOUNDARY:
        what = f"{spec}, step {claim.step!r}: the data of the {kind}"
        raise StateError(
            f"{what} has {len(boundary)} bytes of JSON, the limit is {MAX_BOUNDARY}",
            machine=spec.name,
            version=spec.version,
            step=claim.step,
        )
    return Transition(
        claim,
        "awaiting_signal",
        claim.step,
        attempt=0 if error is None else claim.attempt,  # as an Await of `handle`
        advance=1,
        state=_state(spec, outcome.state, outcome.then),
        last_error=None if error is None else reason_text(error),
        raised=None if error is None else _raised(error),
        awaits=(),
        # What any wake but a decision would enter: `then` is in the boundary, which only a decision reads.
        await_step=None if late is None else str(late),
        timeout=outcome.timeout if isinstance(outcome, Approval) else None,
        boundary=boundary,
        consumed=_consumed(handed, ()),
    )


def plan_children(outcome: ScheduleChildren, *, journal: JournalLevel = "auto") -> Spawn:
    """What to insert for a `ScheduleChildren`. Raises `ConfigError` or `StateError` for invalid options of a child."""
    return spawn_of(outcome, plan_some(outcome, 0, len(outcome.children), journal=journal))


def plan_some(outcome: ScheduleChildren, first: int, last: int, *, journal: JournalLevel) -> list[InsertPlan]:
    """What to insert for some of the children."""
    registry = current_registry()
    plans: list[InsertPlan] = []
    for index, child in enumerate(outcome.children[first:last], first):
        try:
            spec = registry.find(child.machine)
            plans.append(plan_insert(spec, child.options, on_duplicate="skip", journal=journal))
        except DurableError as exc:
            exc.add_note(f"in child {index} of ScheduleChildren")
            raise
    traced(plans)
    return plans


def spawn_of(outcome: ScheduleChildren, plans: list[InsertPlan]) -> Spawn:
    """The children, and when their parent continues."""
    quorum = outcome.join if isinstance(outcome.join, int) else None
    return Spawn(
        plans,
        outcome.then,
        quorum,
        outcome.join == "any_failed",
        outcome.timeout,
        outcome.rest == "cancel",
        _graph(outcome.children) if outcome.is_graph else None,
    )


def _graph(children: Sequence[Child]) -> Graph:
    return Graph(
        [child.key for child in children],
        [child.needs for child in children],
        [child.any_end for child in children],
    )


def _consumed(handed: Sequence[Signal], named: Sequence[int]) -> tuple[int, ...]:
    if not handed and not named:  # the usual case
        return ()
    return tuple(dict.fromkeys([*(signal.id for signal in handed), *named]))


def failure(claim: Claim, error: BaseException) -> Transition:
    """The transition to `failed`, after `handle` has failed, too. It can always be stored."""
    return Transition(
        claim,
        _failed(claim),
        claim.step,
        attempt=claim.attempt,
        last_error=reason_text(error),
        raised=_raised(error),
    )


def cancellation(claim: Claim, reason: str | None) -> Transition:
    """The transition to `cancelled`: an end without a result. Like a failure it keeps the inbox, for a retry."""
    return Transition(claim, "cancelled", claim.step, attempt=claim.attempt, last_error=reason)


def _raised(error: BaseException) -> Raised:
    return Raised(error_type(error), traceback_text(error))


def unrun(claim: Claim, spec: MachineSpec) -> Transition | None:
    """What becomes of a cancelled instance of which nothing runs. None: it compensates, its step runs.

    If what it comes after did not succeed, it ends; if a limit was full, it enters `on_cancel`.
    """
    told = claim.cancellation
    if told is None or not told.ends(claim.visit) or (told.limit is None and not claim.recorded.links):
        return None
    if told.limit is None or spec.on_cancel is None:
        return cancellation(claim, told.reason)
    after = Transition(claim, "runnable", spec.on_cancel, 0)
    after.advance = 1
    return _relimit(after, spec.steps[spec.on_cancel].limits)


def keep_handled(after: Transition, error: BaseException) -> None:
    """Keep the error that `handle` made this outcome of, for the journal, if the row does not keep it."""
    if after.last_error is None and after.claim.journal >= OUTCOMES:
        after.handled = _handled(error)


def _handled(error: BaseException) -> bytes:
    raised = _raised(error)
    told = {"type": raised.type, "text": reason_text(error), "traceback": raised.traceback}
    return encode_json({key: value for key, value in told.items() if value is not None}, what="an error")


def _encoded(spec: MachineSpec, value: object, step: str, what: str) -> bytes:
    try:
        return encode_json(value, what=lambda: f"{spec}, step {step!r}: the {what}")
    except StateError as error:
        error.machine, error.version, error.step = spec.name, spec.version, step
        raise


def _state(spec: MachineSpec, state: object, step: str) -> bytes | None:
    return None if state is KEEP else spec.codec.encode(state, step=step)
