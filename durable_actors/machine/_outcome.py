"""Outcomes: what a step returns. Frozen values, checked in the constructor, so the traceback shows the step's line.

`Outcome` is a closed union of non-generic classes. The *constructors* of `Next`, `Await`, `ScheduleChildren`,
`Pause` and `Approval` check the type of the state against the step they name. If the classes were generic, the expected
return type `Next[...]` would take part in the inference and any state would be accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum
from typing import Any, Final, Literal, Never, TypeAlias, TypeVar, overload

import attrs

from durable_actors._limits import RateLimit, Slot, text_of
from durable_actors._option_checks import shown
from durable_actors.errors import InvalidOutcome
from durable_actors.machine._checks import Duration, key_text, seconds
from durable_actors.machine._child import Child, link_children
from durable_actors.machine._context import Signal
from durable_actors.machine._outcome_parts import (
    children_of,
    join_of,
    refuse_options,
    signal_ids,
    signal_names,
    step_name,
    title_of,
)
from durable_actors.machine._spec import Defined
from durable_actors.machine._step_ref import StepRef

S = TypeVar("S")


class Keep(Enum):
    """The type of `KEEP`."""

    KEEP = "KEEP"

    def __repr__(self) -> str:
        return "KEEP"


KEEP: Final = Keep.KEEP
"""`state=KEEP` (the default everywhere) leaves the stored state as it was when the step began. Changes made to
`ctx.state` in place are *not* written; pass the new state to the outcome."""

StateOf: TypeAlias = S | Keep | Callable[[S], Never]
"""The state for a step that reads `S`. The third member accepts nothing in practice; it makes mypy infer `S` from
the step first and then check the state against it (mypy defers arguments whose type contains a callable).
Without it, mypy rejects a TypedDict literal and reports a wrong state as "cannot infer type parameter"."""

Consume = Iterable[int | Signal]
"""Signals, or their ids."""

Join = Literal["all", "any_failed"] | int
"""When a barrier opens: all children have ended, the first one failed, or this many have ended."""

Targets = tuple[tuple[str, type[Any] | None], ...]

_set = object.__setattr__  # the classes are frozen and have explicit constructors


@attrs.frozen(init=False)
class Next:
    """Enter `step` at once: attempt 0, visit + 1. Consumes the signals in `ctx.awaited`."""

    step: str
    """The name of the step to enter."""
    state: object
    """The new state, or `KEEP`."""
    partition_key: str | Keep | None
    """The new partition key, None to remove it, or `KEEP`."""
    limits: str | None
    """The limits that the step uses (`_limits.text_of`); None: those that the step declares."""
    consume: tuple[int, ...]
    """Ids of further signals to consume."""
    owner: type[Any] | None = attrs.field(eq=False, repr=False)
    """The class whose step was referenced; None when it was named by a string."""

    @overload
    def __init__(
        self,
        step: StepRef[S],
        state: StateOf[S] = KEEP,
        *,
        partition_key: str | Keep | None = KEEP,
        rate_limit: RateLimit = None,
        weight: int = 1,
        slot: Slot = None,
        consume: Consume = (),
    ) -> None: ...
    @overload
    def __init__(
        self,
        step: str,
        state: object = KEEP,
        *,
        partition_key: str | Keep | None = KEEP,
        rate_limit: RateLimit = None,
        weight: int = 1,
        slot: Slot = None,
        consume: Consume = (),
    ) -> None: ...
    def __init__(
        self,
        step: StepRef[Any] | str,
        state: object = KEEP,
        *,
        partition_key: str | Keep | None = KEEP,
        rate_limit: RateLimit = None,
        weight: int = 1,
        slot: Slot = None,
        consume: Consume = (),
    ) -> None:
        if partition_key is not KEEP and partition_key is not None:
            key_text(partition_key, what="Next(partition_key=...)", error=InvalidOutcome)
        name, owner = step_name(step, what="Next(step)")
        _set_step(self, name)
        _set_owner(self, owner)
        _set_state(self, state)
        _set_key(self, partition_key)
        _set_limits(
            self,
            None
            if rate_limit is None and slot is None and weight == 1
            else text_of(rate_limit, weight, slot, error=InvalidOutcome),
        )
        _set_consume(self, signal_ids(consume, what="Next(consume=...)") if consume else ())


# Most steps return a Next: these take half the time of `_set`.
_set_step, _set_owner, _set_state, _set_key, _set_limits, _set_consume = (
    vars(Next)[name].__set__ for name in ("step", "owner", "state", "partition_key", "limits", "consume")
)


@attrs.frozen(init=False)
class Retry:
    """Run the same step again after `delay` seconds: attempt + 1, same visit. `Replay` is another name for it."""

    state: object
    """The new state, or `KEEP`."""
    delay: float
    """Seconds to wait."""

    def __init__(self, state: object = KEEP, *, delay: Duration = 0) -> None:
        _set(self, "state", state)
        _set(self, "delay", seconds(delay, what="Retry(delay=...)", error=InvalidOutcome))


Replay = Retry


@attrs.frozen(init=False)
class Await:
    """Park the instance until a signal with one of these names arrives, or until the timeout.

    Without `then`, the same step runs again (attempt and visit unchanged); with it, the step `then` is entered.
    In both cases `ctx.awaited` contains the signals that matched. A timeout is not a failure: the step runs, and
    `ctx.awaited` is empty.
    """

    names: tuple[str, ...]
    """The names of the signals; any of them wakes the instance."""
    state: object
    """The new state, or `KEEP`."""
    then: str | None
    """The name of the step to enter; None for the same step."""
    timeout: float | None
    """The longest wait in seconds; None for no limit."""
    consume: tuple[int, ...]
    """Ids of further signals to consume."""
    owner: type[Any] | None = attrs.field(eq=False, repr=False)
    """The class whose step was referenced; None if the step was given by name or not at all."""

    @overload
    def __init__(
        self,
        names: str | Iterable[str],
        state: StateOf[S] = KEEP,
        *,
        then: StepRef[S],
        timeout: Duration | None = None,
        consume: Consume = (),
    ) -> None: ...
    @overload
    def __init__(
        self,
        names: str | Iterable[str],
        state: object = KEEP,
        *,
        then: str | None = None,
        timeout: Duration | None = None,
        consume: Consume = (),
    ) -> None: ...
    def __init__(
        self,
        names: str | Iterable[str],
        state: object = KEEP,
        *,
        then: StepRef[Any] | str | None = None,
        timeout: Duration | None = None,
        consume: Consume = (),
    ) -> None:
        name, owner = (None, None) if then is None else step_name(then, what="Await(then=...)")
        limit = None if timeout is None else seconds(timeout, what="Await(timeout=...)", error=InvalidOutcome)
        _set(self, "names", signal_names(names, what="Await(names)"))
        _set(self, "state", state)
        _set(self, "then", name)
        _set(self, "owner", owner)
        _set(self, "timeout", limit)
        _set(self, "consume", signal_ids(consume, what="Await(consume=...)") if consume else ())


@attrs.frozen(init=False)
class ScheduleChildren:
    """Start children and park the instance until their barrier opens; then enter the step `then`.

    The children are inserted and the instance is parked in one transaction. If no child is inserted (the list is
    empty, or all unique keys are occupied), `then` is entered at once. Children may come after each other
    (`Child(after=...)`); the barrier counts them like all others.
    """

    then: str
    """The name of the step to enter when the barrier opens."""
    children: tuple[Child, ...]
    """The children to start, in this order."""
    state: object
    """The new state, or `KEEP`."""
    join: Join
    """When the barrier opens: "all" children have ended, "any_failed" (also at the first failure), or a number."""
    timeout: float | None
    """Seconds after which the barrier opens in any case; None for no limit."""
    rest: Literal["leave", "cancel"]
    """What happens to unfinished children when the barrier opens early: "leave" them alone, or "cancel" them."""
    is_graph: bool = attrs.field(eq=False, repr=False)
    """Whether some child has a key, or comes after others."""
    owner: type[Any] | None = attrs.field(eq=False, repr=False)
    """The class whose step was referenced; None when it was named by a string."""

    @overload
    def __init__(
        self,
        then: StepRef[S],
        children: Iterable[Child | Defined],
        state: StateOf[S] = KEEP,
        *,
        join: Join = "all",
        timeout: Duration | None = None,
        rest: Literal["leave", "cancel"] = "leave",
    ) -> None: ...
    @overload
    def __init__(
        self,
        then: str,
        children: Iterable[Child | Defined],
        state: object = KEEP,
        *,
        join: Join = "all",
        timeout: Duration | None = None,
        rest: Literal["leave", "cancel"] = "leave",
    ) -> None: ...
    def __init__(
        self,
        then: StepRef[Any] | str,
        children: Iterable[Child | Defined],
        state: object = KEEP,
        *,
        join: Join = "all",
        timeout: Duration | None = None,
        rest: Literal["leave", "cancel"] = "leave",
        **unknown: object,
    ) -> None:
        if unknown:
            refuse_options(unknown, what="ScheduleChildren", renamed={"deadline": "timeout"})
        name, owner = step_name(then, what="ScheduleChildren(then)")
        specs = tuple(child if isinstance(child, Child) else Child(child) for child in children_of(children))
        specs, is_graph = link_children(specs)
        limit = None
        if timeout is not None:
            limit = seconds(timeout, what="ScheduleChildren(timeout=...)", error=InvalidOutcome)
        if rest not in ("leave", "cancel"):
            raise InvalidOutcome(
                f'ScheduleChildren(rest=...) must be "leave" or "cancel"; it is {shown(rest)}'
            )
        _set(self, "then", name)
        _set(self, "owner", owner)
        _set(self, "children", specs)
        _set(self, "state", state)
        _set(self, "join", join_of(join, len(specs)))
        _set(self, "timeout", limit)
        _set(self, "rest", rest)
        _set(self, "is_graph", is_graph)


@attrs.frozen(init=False)
class Pause:
    """Park the instance until a person lets it proceed (`durable_actors.proceed`); then enter the step `then`.

    No signal wakes it. In `then`, `ctx.decision` says who let it proceed, and when. Consumes the signals in
    `ctx.awaited`.
    """

    then: str
    """The name of the step to enter."""
    state: object
    """The new state, or `KEEP`."""
    title: str | None
    """What is asked, for people: one line."""
    data: Any
    """What the person should know: a JSON value, up to 64 KiB."""
    targets: Targets = attrs.field(eq=False, repr=False)
    """The steps that it names, each with the class whose step was referenced."""

    @overload
    def __init__(
        self, then: StepRef[S], state: StateOf[S] = KEEP, *, title: str | None = None, data: object = None
    ) -> None: ...
    @overload
    def __init__(
        self, then: str, state: object = KEEP, *, title: str | None = None, data: object = None
    ) -> None: ...
    def __init__(
        self,
        then: StepRef[Any] | str,
        state: object = KEEP,
        *,
        title: str | None = None,
        data: object = None,
    ) -> None:
        target = step_name(then, what="Pause(then)")
        _set(self, "then", target[0])
        _set(self, "state", state)
        _set(self, "title", title_of(title, what="Pause(title=...)"))
        _set(self, "data", data)
        _set(self, "targets", (target,))


@attrs.frozen(init=False)
class Approval:
    """Park the instance until a person approves or rejects (`durable_actors.approve`, `reject`), or until the timeout.

    Approved, it enters `then`; rejected, `on_reject`, or without that it fails. A timeout enters `on_timeout`; without
    that it is as good as a rejection, and never an approval. No signal wakes it. In the entered step `ctx.decision`
    says what was decided, by whom and when. Consumes the signals in `ctx.awaited`.
    """

    then: str
    """The name of the step to enter when it is approved."""
    state: object
    """The new state, or `KEEP`."""
    on_reject: str | None
    """The name of the step to enter when it is rejected; None: the instance fails."""
    title: str | None
    """What is asked, for people: one line."""
    data: Any
    """What the person should know: a JSON value, up to 64 KiB."""
    timeout: float | None
    """The longest wait in seconds; None for no limit."""
    on_timeout: str | None
    """The name of the step to enter after the timeout; None: as if it were rejected."""
    targets: Targets = attrs.field(eq=False, repr=False)
    """The steps that it names, each with the class whose step was referenced."""

    @overload
    def __init__(
        self,
        then: StepRef[S],
        state: StateOf[S] = KEEP,
        *,
        on_reject: StepRef[S] | str | None = None,
        title: str | None = None,
        data: object = None,
        timeout: Duration | None = None,
        on_timeout: StepRef[S] | str | None = None,
    ) -> None: ...
    @overload
    def __init__(
        self,
        then: str,
        state: object = KEEP,
        *,
        on_reject: StepRef[Any] | str | None = None,
        title: str | None = None,
        data: object = None,
        timeout: Duration | None = None,
        on_timeout: StepRef[Any] | str | None = None,
    ) -> None: ...
    def __init__(
        self,
        then: StepRef[Any] | str,
        state: object = KEEP,
        *,
        on_reject: StepRef[Any] | str | None = None,
        title: str | None = None,
        data: object = None,
        timeout: Duration | None = None,
        on_timeout: StepRef[Any] | str | None = None,
    ) -> None:
        target = step_name(then, what="Approval(then)")
        rejected = None if on_reject is None else step_name(on_reject, what="Approval(on_reject=...)")
        late = None if on_timeout is None else step_name(on_timeout, what="Approval(on_timeout=...)")
        if late is not None and timeout is None:
            raise InvalidOutcome("Approval(on_timeout=...) needs a timeout=")
        limit = timeout
        if limit is not None:
            limit = seconds(limit, what="Approval(timeout=...)", error=InvalidOutcome)
        _set(self, "then", target[0])
        _set(self, "state", state)
        _set(self, "on_reject", rejected and rejected[0])
        _set(self, "title", title_of(title, what="Approval(title=...)"))
        _set(self, "data", data)
        _set(self, "timeout", limit)
        _set(self, "on_timeout", late and late[0])
        _set(self, "targets", tuple(each for each in (target, rejected, late) if each is not None))


@attrs.frozen
class Done:
    """End the instance as `done`, with a result. The state is left as it is, and the inbox is deleted."""

    result: Any = None
    """Any JSON value; attrs classes, dataclasses and similar objects are encoded."""


@attrs.frozen
class Stop:
    """End the instance as `failed`, with a reason in `last_error`."""

    reason: Any
    """An exception or a text."""


Outcome = Next | Retry | Await | ScheduleChildren | Pause | Approval | Done | Stop
"""What a step and `handle` return."""

OUTCOME_TYPES: Final = (Next, Retry, Await, ScheduleChildren, Pause, Approval, Done, Stop)


@attrs.frozen
class Error:
    """Returned by a job: this execution failed. The job is retried as after an exception, up to `max_attempts`."""

    reason: Any
    """An exception or a text."""


class Cancel(Exception):  # noqa: N818 - the contract's name
    """Raised or returned by a job: fail at once, without further attempts."""

    def __init__(self, reason: Any = "cancelled") -> None:
        super().__init__(reason)
        self.reason = reason
        """An exception or a text."""
