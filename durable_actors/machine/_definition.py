"""From a class body to a `MachineSpec`. Mistakes in a definition are found here, when the class is created.

Pure: reads the class, and returns a value or raises a `DefinitionError` that says what to change.
"""

from __future__ import annotations

import abc
import inspect
from collections.abc import Callable, Iterable
from types import FunctionType
from typing import Any

import attrs

from durable_actors._journal_level import JournalLevel, check_journal
from durable_actors._option_checks import shown
from durable_actors.errors import DefinitionError
from durable_actors.machine._backoff import DEFAULT_MAX_ATTEMPTS, MAX_INT4, Backoff
from durable_actors.machine._checks import MAX_NAME, SEPARATOR, Duration, Keep, keep_seconds, text, whole
from durable_actors.machine._codec import StateCodec
from durable_actors.machine._declared_state import declared_state
from durable_actors.machine._job_form import job_call, job_form
from durable_actors.machine._spec import HandleSpec, Kind, MachineSpec, StepSpec, identity_of, spec_of
from durable_actors.machine._step import Step, check_call
from durable_actors.machine._step_collection import collect_steps, looks_like_steps
from durable_actors.machine._step_ref import StepRef


@attrs.frozen
class ClassKeywords:
    """The keywords in `class Checkout(da.Machine[Order], queue="checkout")`. None means not given."""

    name: str | None = None
    version: int | None = None
    queue: str | None = None
    initial: str | StepRef[Any] | None = None
    state: Any = None
    run_ahead: bool | None = None
    journal: JournalLevel | None = None
    max_attempts: int | None = None
    keep: Keep = "default"
    base_initial: str | StepRef[Any] | None = None
    base_state: Any = None

    def over(self, bases: Iterable[ClassKeywords]) -> ClassKeywords:
        """Return these keywords, completed with those of the bases, nearest first.

        Name and version are never inherited. The `initial` and `state` of a base are kept in separate fields, because
        `@step(initial=True)`, `Machine[...]` and a nested `State` of the class itself take precedence over them.
        """
        filled = self
        for base in bases:
            filled = attrs.evolve(
                filled,
                queue=_first(filled.queue, base.queue),
                run_ahead=_first(filled.run_ahead, base.run_ahead),
                journal=_first(filled.journal, base.journal),
                max_attempts=_first(filled.max_attempts, base.max_attempts),
                keep=base.keep if filled.keep == "default" else filled.keep,
                base_initial=_first(filled.base_initial, base.initial),
                base_state=_first(filled.base_state, base.state),
            )
        return filled


def _first(mine: Any, base: Any) -> Any:
    return base if mine is None else mine


@attrs.frozen
class _Parts:
    """The parts of a definition that differ between a machine with steps and a job class."""

    kind: Kind
    initial: str
    steps: dict[str, StepSpec]
    state_type: Any
    max_attempts: int | None = None
    backoff: Callable[[int], Duration] | Backoff | None = None
    on_cancel: str | None = None


def define(cls: type[Any], base: type[Any], given: ClassKeywords) -> MachineSpec:
    """Return the definition of a machine class. `base` is `Machine`."""
    subject = cls.__qualname__
    parent = parent_of(cls)
    check_complete(cls)
    steps = collect_steps(cls, base)
    perform = inspect.getattr_static(cls, "perform", None)
    if steps and perform is not None:
        raise DefinitionError(
            f"{subject} has both steps ({', '.join(steps)}) and perform: "
            "remove perform for a machine, or the steps for a job"
        )
    if not steps and perform is None:
        raise DefinitionError(
            f"{subject} has neither a step nor perform: {looks_like_steps(cls)}. "
            "(A base class without steps must also inherit from abc.ABC.)"
        )
    handle = handle_of(cls, base)
    if perform is not None and not handle.is_default:
        raise DefinitionError(
            f"{subject} has both perform and handle; errors of a job are retried (max_attempts=, "
            "backoff(attempt)), so remove handle, or write a machine with steps"
        )
    check_constructor(cls)
    name = check_name(default_name(cls) if given.name is None else given.name, subject)
    version = check_version(1 if given.version is None else given.version, subject)
    state_type = declared_state(cls, base, given.state, parent)
    state_type = given.base_state if state_type is None else state_type
    if perform is None:
        parts = _machine_parts(cls, steps, given, parent, state_type)
    else:
        parts = _job_parts(cls, perform, given, state_type)
    return MachineSpec(
        name=name,
        version=version,
        kind=parts.kind,
        queue=check_queue("default" if given.queue is None else given.queue, subject),
        initial=parts.initial,
        steps=parts.steps,
        codec=StateCodec(parts.state_type, machine=name, version=version),
        handle=handle,
        max_attempts=parts.max_attempts,
        backoff=parts.backoff,
        run_ahead=check_run_ahead(True if given.run_ahead is None else given.run_ahead, subject),
        journal=optional_journal(given.journal, subject),
        keep=keep_seconds(given.keep, what=f"{subject}: keep=", error=DefinitionError),
        on_cancel=parts.on_cancel,
        definition=cls,
        identity=identity_of(cls),
        lineage=frozenset(identity_of(each) for each in cls.__mro__),
    )


def default_name(definition: Any) -> str:
    """Return the default name of a machine or job, `module:QualName`."""
    if definition.__name__ == "<lambda>":
        raise DefinitionError("a lambda has no name of its own, so the next one would replace it: give name=")
    return ":".join(identity_of(definition))


def check_name(name: object, subject: str) -> str:
    """Check the name of a machine or job."""
    checked = text(name, what=f"{subject}: name=", error=DefinitionError, maximum=MAX_NAME)
    if SEPARATOR in checked:
        raise DefinitionError(f"{subject}: name= must not contain the character U+001F: {shown(name)}")
    return checked


def check_version(version: object, subject: str) -> int:
    """Check the version of a machine or job."""
    return whole(version, what=f"{subject}: version=", error=DefinitionError, minimum=1, maximum=MAX_INT4)


def check_queue(queue: object, subject: str) -> str:
    """Check the queue of a machine or job."""
    return text(queue, what=f"{subject}: queue=", error=DefinitionError, maximum=MAX_NAME)


def check_max_attempts(number: object, subject: str) -> int:
    """Check how often a job may be executed."""
    return whole(number, what=f"{subject}: max_attempts=", error=DefinitionError, minimum=1, maximum=MAX_INT4)


def check_backoff(backoff: object, subject: str) -> None:
    """Check the back-off of a job: a `Backoff` or a function; None means the default."""
    if backoff is None or isinstance(backoff, Backoff):
        return
    if not callable(backoff) or inspect.iscoroutinefunction(backoff) or isinstance(backoff, type):
        raise DefinitionError(
            f"{subject}: backoff= must be a Backoff(...), or a plain function of the attempt (0, 1, 2, …) that returns "
            f"seconds; it is {shown(backoff)}"
        )


def job_attempts(max_attempts: object, backoff: object, subject: str) -> int:
    """Return how often a job may be executed: its `max_attempts`, or that of its `Backoff`."""
    number = check_max_attempts(max_attempts, subject)
    named = backoff.max_attempts if isinstance(backoff, Backoff) else None
    if named is None:
        return number
    if number not in {DEFAULT_MAX_ATTEMPTS, named}:
        raise DefinitionError(
            f"{subject}: max_attempts={number}, but its Backoff has max_attempts={named}: keep only one of them"
        )
    return named


def optional_journal(level: object, subject: str) -> JournalLevel | None:
    """Check how much of the history is recorded; None: not given."""
    return None if level is None else check_journal(level, what=f"{subject}: journal=", error=DefinitionError)


def parent_of(cls: type[Any]) -> MachineSpec | None:
    """Return the nearest concrete machine among the bases: the initial step and the state type come from it."""
    return next((spec for spec in map(spec_of, cls.__mro__[1:]) if spec is not None), None)


def check_run_ahead(value: object, subject: str) -> bool:
    """Check whether the next step may run on the same claim."""
    if not isinstance(value, bool):
        raise DefinitionError(f"{subject}: run_ahead= must be True or False; it is {shown(value)}")
    return value


def check_complete(cls: type[Any]) -> None:
    """Refuse abstract methods now. `abc` itself raises only when an object is created: when the first step runs."""
    if isinstance(cls, abc.ABCMeta):
        static = inspect.getattr_static
        names = [name for name in dir(cls) if getattr(static(cls, name), "__isabstractmethod__", False)]
        if names:
            raise DefinitionError(
                f"{cls.__qualname__} leaves {', '.join(names)} abstract: define it, or also inherit from abc.ABC"
            )


def check_constructor(cls: type[Any]) -> None:
    """Refuse a constructor with arguments: every run of a step gets a new object, so that `self` carries no state."""
    init = inspect.getattr_static(cls, "__init__")
    if isinstance(init, FunctionType):
        try:
            inspect.signature(init).bind(None)
        except TypeError:
            raise DefinitionError(
                f"{cls.__qualname__}.__init__ takes arguments, but a new object is created for every step; "
                "keep data in the state"
            ) from None


def _machine_parts(
    cls: type[Any],
    steps: dict[str, Step[Any, Any, Any]],
    given: ClassKeywords,
    parent: MachineSpec | None,
    state_type: Any,
) -> _Parts:
    if given.max_attempts is not None:
        raise DefinitionError(
            f"{cls.__qualname__}: max_attempts= is for jobs; give a step retry=da.Backoff(max_attempts=...), or check "
            "ctx.attempt in handle()"
        )
    initial = _initial(cls, steps, given, parent)
    return _Parts(
        kind="machine",
        initial=initial,
        steps={name: _step_spec(cls, name, each) for name, each in steps.items()},
        state_type=dict if state_type is None else state_type,
        on_cancel=_on_cancel(cls, steps, initial),
    )


def _on_cancel(cls: type[Any], steps: dict[str, Step[Any, Any, Any]], initial: str) -> str | None:
    """Return the step that a cancelled instance enters: the class's own `@step(on_cancel=True)`, else a base's."""
    marked = [name for name, each in steps.items() if each.on_cancel]
    chosen = [name for name in marked if name in cls.__dict__] or marked
    if len(chosen) > 1:
        raise DefinitionError(
            f"{cls.__qualname__} has {len(chosen)} steps with on_cancel=True ({', '.join(chosen)}): "
            "mark only one of them"
        )
    if initial in chosen:
        raise DefinitionError(
            f"{cls.__qualname__}.{initial} is the initial step, so it cannot be the one for on_cancel=True"
        )
    return chosen[0] if chosen else None


def _step_spec(cls: type[Any], name: str, step: Step[Any, Any, Any]) -> StepSpec:
    func = step.func
    return StepSpec(
        name=name,
        func=func,
        call=lambda ctx: func(cls(), ctx),
        is_async=inspect.iscoroutinefunction(func),
        timeout=step.timeout,
        retry=step.retry,
        limits=step.limits,
    )


def _initial(
    cls: type[Any], steps: dict[str, Step[Any, Any, Any]], given: ClassKeywords, parent: MachineSpec | None
) -> str:
    """Return the initial step: the keyword, the class's own `@step(initial=True)`, the parent's, a mixin's, "start"."""
    subject = cls.__qualname__
    marked = [name for name, each in steps.items() if each.initial]
    own = [name for name in marked if name in cls.__dict__]
    chosen = own or (marked if parent is None else [])
    if len(chosen) > 1:
        raise DefinitionError(
            f"{subject} has {len(chosen)} initial steps ({', '.join(chosen)}): mark only one of them"
        )
    name = _step_name(given.initial, subject)
    if name is not None and own and own != [name]:
        raise DefinitionError(
            f"{subject} has initial={shown(name)} and marks {own[0]} as initial: keep only one of them"
        )
    if name is None and chosen:
        name = chosen[0]
    if name is None:
        name = parent.initial if parent is not None else _step_name(given.base_initial, subject) or "start"
    if name not in steps:
        raise DefinitionError(
            f"{subject} has no initial step {shown(name)}; its steps are {', '.join(steps)}. Mark one with "
            "@da.step(initial=True), name it start, or give its name as initial="
        )
    return name


def _step_name(keyword: object, subject: str) -> str | None:
    if keyword is None:
        return None
    if isinstance(keyword, StepRef):
        return keyword.name
    return text(keyword, what=f"{subject}: initial=", error=DefinitionError)


def _job_parts(
    cls: type[Any],
    perform: object,
    given: ClassKeywords,
    state_type: Any,
) -> _Parts:
    subject = cls.__qualname__
    if given.initial is not None:
        raise DefinitionError(f"{subject}: initial= is for machines with steps; a job begins with perform")
    form = job_form(perform, method=True, typed=state_type is not None)
    assert isinstance(perform, FunctionType)
    backoff = _backoff(cls)
    max_attempts = DEFAULT_MAX_ATTEMPTS if given.max_attempts is None else given.max_attempts
    bound = job_call(lambda *arguments: perform(cls(), *arguments), form)
    step = StepSpec(
        name="perform",
        func=perform,
        call=bound,
        is_async=inspect.iscoroutinefunction(perform),
        wants_ctx=form.wants_ctx,
    )
    return _Parts(
        kind="job",
        initial="perform",
        steps={"perform": step},
        state_type=form.args_type if state_type is None else state_type,
        max_attempts=job_attempts(max_attempts, backoff, subject),
        backoff=backoff,
    )


def _backoff(cls: type[Any]) -> Callable[[int], Duration] | Backoff | None:
    method = inspect.getattr_static(cls, "backoff", None)
    if method is None or isinstance(method, Backoff):
        return method
    form = "def backoff(self, attempt)"
    if not isinstance(method, FunctionType) or inspect.iscoroutinefunction(method):
        raise DefinitionError(
            f"{cls.__qualname__}.backoff must be a Backoff(...), or a plain method that returns seconds: {form}"
        )
    check_call(method, 2, form=form)
    return lambda attempt: method(cls(), attempt)


def handle_of(cls: type[Any], base: type[Any]) -> HandleSpec:
    """Return the `handle` of a machine class."""
    method = inspect.getattr_static(cls, "handle")
    form = "async def handle(self, error, ctx)"
    if not isinstance(method, FunctionType):
        raise DefinitionError(f"{cls.__qualname__}.handle must be a method: {form}")
    check_call(method, 3, form=form)
    return HandleSpec(
        call=lambda error, ctx: method(cls(), error, ctx),
        is_async=inspect.iscoroutinefunction(method),
        is_default=method is inspect.getattr_static(base, "handle"),
    )
