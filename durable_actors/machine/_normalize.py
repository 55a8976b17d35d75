"""From the value that user code returned to one of the eight outcomes. Pure; raises `InvalidOutcome`.

A step must return an outcome. A job may return anything: a value is its result, `Error` and exceptions are
retried up to `max_attempts`, and `Cancel` fails it at once. What a machine's step raises is repeated if its `Backoff`
says so, else `handle` decides.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeGuard, assert_never, cast

from durable_actors._option_checks import shown
from durable_actors._wording import counted
from durable_actors.errors import InvalidOutcome, NotADependency
from durable_actors.machine._backoff import Backoff, default_backoff
from durable_actors.machine._checks import seconds
from durable_actors.machine._outcome import (
    OUTCOME_TYPES,
    Approval,
    Await,
    Cancel,
    Done,
    Error,
    Next,
    Outcome,
    Pause,
    Retry,
    ScheduleChildren,
    Stop,
)
from durable_actors.machine._reason import reason_text
from durable_actors.machine._spec import MachineSpec, StepSpec, identity_of

_DONE = Done(None)  # a frozen value
_NAMES = "Next, Retry, Await, ScheduleChildren, Pause, Approval, Done or Stop"


def normalize_outcome(
    value: object,
    spec: MachineSpec,
    *,
    step: str,
    attempt: int,
    random: Callable[[], float],
    source: str = "step",
    max_attempts: int | None = None,
) -> Outcome:
    """Return the outcome of a step (or of `handle`, with `source="handle"`); raise `InvalidOutcome`.

    `attempt` is the attempt of the run that returned `value`; `random` provides the jitter for the retry of a job.
    `max_attempts` is what the insert said, if it said something: it goes before the definition's.
    """
    if spec.kind == "job":
        # Most jobs return None: the patterns take 2.5 µs.
        return _DONE if value is None else _job_outcome(value, spec, attempt, max_attempts, random)
    if isinstance(value, Done):  # every machine ends so; the patterns take 0.3 µs
        return value
    if not isinstance(value, OUTCOME_TYPES):
        raise InvalidOutcome(f"{_where(spec, step, source)} returned {_mistake(value)}")
    match value:
        case Next(step=target) | ScheduleChildren(then=target) | Await(then=target):
            fault = None if target is None else _fault(target, value.owner, spec)
            if fault is not None:
                raise InvalidOutcome(f"{_where(spec, step, source)} goes to {fault}")
        case Pause() | Approval():
            for target, owner in value.targets:
                fault = _fault(target, owner, spec)
                if fault is not None:
                    raise InvalidOutcome(f"{_where(spec, step, source)} goes to {fault}")
        case Retry() | Done() | Stop():
            pass
        case _:
            assert_never(value)
    return value


def _where(spec: MachineSpec, step: str, source: str) -> str:
    at = f"step {shown(step)}"
    return f"{spec}, {at}" if source == "step" else f"{spec}, {source} for {at}"


def job_failure(
    error: object,
    spec: MachineSpec,
    *,
    attempt: int,
    random: Callable[[], float],
    max_attempts: int | None = None,
) -> Retry | Stop:
    """Return the outcome of a failed execution of a job: `Retry` after the back-off, or `Stop`.

    `error` is an exception that the job raised, or a reason; `max_attempts` is that of the insert. A `Cancel` ends the
    job, also inside an exception group of a nursery, and so does `NotADependency`: no later run would have that result.
    The caller must treat an error in the user's `backoff` like an error in `handle`.
    """
    cancelled = _find_cancel(error)
    if cancelled is not None:
        return Stop(cancelled.reason)
    if attempt + 1 >= _job_attempts(spec, max_attempts) or isinstance(error, NotADependency):
        return Stop(error)
    if spec.backoff is None:
        return Retry(delay=default_backoff(attempt, random()))
    if isinstance(spec.backoff, Backoff):
        return (
            Retry(delay=spec.backoff.delay(attempt, random())) if spec.backoff.covers(error) else Stop(error)
        )
    delay = spec.backoff(attempt)
    return Retry(delay=seconds(delay, what=f"{spec}: backoff({attempt})", error=InvalidOutcome))


def step_failure(
    error: BaseException | str,
    step: StepSpec,
    *,
    attempt: int,
    random: Callable[[], float],
    max_attempts: int | None = None,
) -> Retry | None:
    """Return `Retry` if the policy of a machine's step repeats the run that failed; None: `handle` decides.

    `attempt` counts every run of the visit: those that crashed, and those that returned `Retry` themselves, too.
    """
    policy = step.retry
    if policy is None or not policy.covers(error):
        return None
    most = policy.attempts if max_attempts is None else max_attempts
    return Retry(delay=policy.delay(attempt, random())) if attempt + 1 < most else None


def most_attempts(spec: MachineSpec, step: str, max_attempts: int | None) -> int | None:
    """Return how often a step may run in one visit, for people; None: nothing limits it but `handle`."""
    if spec.kind == "job":
        return spec.max_attempts if max_attempts is None else max_attempts
    found = spec.steps.get(step)
    policy = None if found is None else found.retry
    return None if policy is None else policy.attempts if max_attempts is None else max_attempts


def exhausted(spec: MachineSpec, attempt: int, max_attempts: int | None = None) -> Stop | None:
    """Return `Stop` for a claimed job that has used up its attempts, before it runs; otherwise None.

    Such a job began `attempt` executions, and none of them ended it: it probably kills its worker each time.
    """
    if spec.kind != "job" or attempt < (most := _job_attempts(spec, max_attempts)):
        return None
    return Stop(f"{spec} was executed {counted(attempt, 'time')} (max_attempts={most}) and never finished")


def _job_outcome(
    value: object, spec: MachineSpec, attempt: int, max_attempts: int | None, random: Callable[[], float]
) -> Outcome:
    match value:
        case Error(reason=reason):
            return job_failure(reason, spec, attempt=attempt, random=random, max_attempts=max_attempts)
        case Cancel():
            return Stop(value.reason)
        case Retry() if attempt + 1 >= _job_attempts(spec, max_attempts):
            return Stop(f"{spec} asked for a retry after {counted(attempt + 1, 'execution')} (max_attempts)")
        case Retry() | Done() | Stop():
            return value
        case Next() | Await() | ScheduleChildren() | Pause() | Approval():
            raise InvalidOutcome(
                f"{spec} returned {shown(value)}; a job has one step and returns its result, Retry, Error or "
                "Cancel. For more steps, signals, children or decisions write a machine"
            )
        case _:
            if inspect.isawaitable(value) or _is_outcome_class(value):
                raise InvalidOutcome(f"{spec} returned {_mistake(value)}")
            return Done(value)


def _fault(name: str, owner: type[Any] | None, spec: MachineSpec) -> str | None:
    """Describe what is wrong with the target step; None if it is valid."""
    # Compare identities, not classes: after a reload the module has a new class object.
    if owner is not None and owner is not spec.definition and identity_of(owner) not in spec.lineage:
        return f"the step {owner.__qualname__}.{name}, which belongs to another machine"
    if name not in spec.steps:
        return f"the unknown step {name!r}; the steps of the machine are {', '.join(spec.steps)}"
    return None


def _mistake(value: object) -> str:  # noqa: PLR0911 - one line per mistake
    """Describe the value that was returned instead of an outcome, and suggest what was meant."""
    if value is None:
        return f"None; return {_NAMES} (was a `return` forgotten?)"
    if inspect.iscoroutine(value):
        value.close()  # otherwise Python warns later that it was never awaited
        return "a coroutine; `await` it, or make the function around it `async def`"
    if inspect.isawaitable(value):
        return f"an awaitable {type(value).__name__}; await it"
    if _is_outcome_class(value):
        return f"the class {value.__name__}; return an object of it: {value.__name__}(...)"
    if isinstance(value, Error | Cancel):
        return f"{type(value).__name__}, which is for jobs; return Retry(delay=...) or Stop(reason)"
    if isinstance(value, BaseException):
        return f"an exception; raise it, or return Stop(error): {reason_text(value)[:200]}"
    return f"{shown(value)}; return {_NAMES}"


def _is_outcome_class(value: object) -> TypeGuard[type[Any]]:
    return isinstance(value, type) and issubclass(value, (*OUTCOME_TYPES, Error, Cancel))


def _find_cancel(error: object) -> Cancel | None:
    if isinstance(error, Cancel):
        return error
    found = None
    if isinstance(error, BaseExceptionGroup):
        group = cast("BaseExceptionGroup[BaseException]", error)
        found = next((each for each in map(_find_cancel, group.exceptions) if each is not None), None)
    return found


def _job_attempts(spec: MachineSpec, max_attempts: int | None) -> int:
    if max_attempts is not None:
        return max_attempts
    assert spec.max_attempts is not None, "every job has a limit"
    return spec.max_attempts
