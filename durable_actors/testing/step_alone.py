"""`run_step`: one step of a claimed instance, whose outcome is returned instead of committed."""

from __future__ import annotations

import contextvars
import copy
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, TypeVar, cast

import trio
from outcome import Outcome as Captured, acapture

from durable_actors._engine.claims import ActiveClaim
from durable_actors._engine.committing.queue import PendingCommit
from durable_actors._engine.node import Node
from durable_actors._engine.running.step_inputs import StepInputs
from durable_actors._engine.running.step_run import StepRun
from durable_actors._engine.running.user_code import Crashed
from durable_actors._option_checks import shown
from durable_actors._trio_inside import innermost
from durable_actors.errors import ConfigError, RateLimited
from durable_actors.machine import (
    KEEP,
    Cancellation,
    ChildView,
    Context,
    Decision,
    Done,
    MachineRef,
    MachineSpec,
    Outcome,
    Signal,
    StepRef,
    Stop,
    current_registry,
    decode_json,
    encode_json,
    spec_of,
)

T = TypeVar("T")

GivenSignal = Signal | tuple[str, object] | str
"""A signal for `run_step`: its name, its name and payload, or a `Signal`."""


def step_of(step: StepRef[Any] | MachineRef, machine: MachineRef | None) -> tuple[MachineSpec, str]:
    """The definition and the name of a step: `Checkout.charge`, a job, or a name together with its machine."""
    registry = current_registry()
    if isinstance(step, StepRef):
        owner = machine or step.owner
        name = step.name
        if owner is None or (machine is None and spec_of(owner) is None):
            raise ConfigError(
                f"{shown(step)} belongs to a base class; say which machine: machine=...", option="machine"
            )
        return registry.find(cast("MachineRef", owner)), name
    if isinstance(step, str) and machine is not None:
        return registry.find(machine), step
    spec = spec_of(step)
    if spec is not None and spec.kind == "job":
        return spec, spec.initial
    raise ConfigError(
        f"{shown(step)} is not a step: pass Machine.step, or a job, or a name with machine=", option="step"
    )


def signal_options(signal: GivenSignal) -> tuple[str, object, str | None]:
    """Name, payload and dedup key."""
    match signal:
        case Signal():
            return signal.name, signal.payload, signal.dedup_key
        case str():
            return signal, None, None
        case (str() as name, payload):
            return name, payload, None
        case _:
            raise ConfigError(
                f"a signal is given as a name, as (name, payload) or as a Signal, not as {shown(signal)}",
                option="signals",
                value=signal,
            )


def inputs_of(
    children: Iterable[ChildView], dependencies: Mapping[str, object], decision: object
) -> StepInputs:
    """What a step is given beside its state and signals, checked."""
    return StepInputs(
        decision=_decision_of(decision),
        children=tuple(_children_of(children)),
        dependencies=_dependencies_of(dependencies),
    )


def _children_of(children: Iterable[ChildView]) -> list[ChildView]:
    """The children that a step is given, checked."""
    given: list[object] = list(children)
    wrong = [each for each in given if not isinstance(each, ChildView)]
    if wrong:
        raise ConfigError(
            f"children must be instances of ChildView, not {shown(wrong[0])}",
            option="children",
            value=children,
        )
    return cast("list[ChildView]", given)


def _dependencies_of(dependencies: Mapping[str, object]) -> dict[str, ChildView]:
    """What a child is given that it comes after: a view, or the result of one that is done, which goes through JSON."""
    return {
        key: given
        if isinstance(given, ChildView)
        else ChildView(0, "", "done", _through_json(given, key), key=key)
        for key, given in dependencies.items()
    }


def _through_json(result: object, key: str) -> object:
    what = f"dependencies[{key!r}]"
    return decode_json(encode_json(result, what=what), what=what)


def _decision_of(decision: object) -> Decision | None:
    """The decision that a step is given, checked."""
    if decision is None or isinstance(decision, Decision):
        return decision
    raise ConfigError(
        f"decision must be a Decision, not {shown(decision)}", option="decision", value=decision
    )


def cancellation_of(cancellation: object) -> Cancellation | None:
    """Why the instance was cancelled, for a step that compensates; checked."""
    if cancellation is None or isinstance(cancellation, Cancellation):
        return cancellation
    raise ConfigError(
        f"cancellation must be a Cancellation, not {shown(cancellation)}",
        option="cancellation",
        value=cancellation,
    )


class _StepAlone(StepRun):
    """Keeps the outcome, and passes errors to the test instead of to `handle`."""

    __slots__ = ("handles", "outcome")

    outcome: Outcome | None
    handles: bool

    def _pending(self, outcome: Outcome, **options: Any) -> PendingCommit:
        pending = super()._pending(outcome, **options)
        self.outcome = outcome
        return pending

    def chosen(self, pending: PendingCommit) -> Outcome:
        """The outcome; a job that has used up its attempts does not run, and fails."""
        return self.outcome or Stop(pending.transition.last_error)

    def _may_run_ahead(self) -> bool:
        return False

    async def recover(self, error: Exception, ctx: Context[Any] | None = None) -> PendingCommit:
        claim, spec = self._active.claim, self._spec
        postponed = isinstance(error, RateLimited) and spec.steps[claim.step].limits is not None
        if postponed or not self.handles:  # what is postponed has no outcome: it is not for `handle`
            raise error
        pending = await super().recover(error, ctx)
        if self.outcome is None:  # `handle` itself failed
            self.outcome = Stop(pending.error)
        return pending


async def run_alone(
    node: Node,
    active: ActiveClaim,
    spec: MachineSpec,
    inputs: StepInputs,
    *,
    handles: bool,
) -> Outcome:
    """Run the step of a claim in the current task; return its outcome, its state as the next step would read it."""
    run = _StepAlone(node, cast("Any", None), active, spec, innermost(trio.lowlevel.current_task()))
    run.outcome, run.handles = None, handles
    run.inputs = inputs
    try:
        pending = await run.run()
    except Crashed as exc:
        raise exc.error from None
    finally:
        await run.tidy()
    return _as_stored(run.chosen(pending), pending, spec)


def _as_stored(outcome: Outcome, pending: PendingCommit, spec: MachineSpec) -> Outcome:
    """The outcome with the state or result that the database would return."""
    change = pending.transition
    if change.status == "cancelled":  # it compensated: nothing of its outcome is stored
        return outcome
    if isinstance(outcome, Done):
        return Done(decode_json(change.result or b"null", what="the result"))
    if isinstance(outcome, Stop) or outcome.state is KEEP or change.state is None:
        return outcome
    step = change.await_step or change.step
    stored = copy.copy(outcome)
    object.__setattr__(stored, "state", spec.codec.decode(change.state, step=step))
    return stored


async def in_task(call: Callable[[], Awaitable[T]], context: contextvars.Context) -> T:
    """Await a call in a task of its own, with these context variables; its exception is raised unwrapped."""
    ended: list[Captured[T]] = []

    async def run() -> None:
        ended.append(await acapture(call))

    async with trio.open_nursery() as nursery:
        context.run(nursery.start_soon, run)
    return ended[0].unwrap()
