"""`@task`: marks a method of a workflow as a task, which other tasks may come after.

`self.fetch` is a `BoundTask` and `Report.fetch` is the `Task` itself. Both are a `TaskRef[Sales]`, which
`ctx.result_of` takes, and both can be called, so a task can be tested like any method.
"""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Coroutine, Iterable, Mapping
from types import FunctionType, SimpleNamespace
from typing import Any, Generic, TypeVar, overload

import attrs

from durable_actors._journal_level import JournalLevel
from durable_actors._limits import RateLimit, Slot, text_of
from durable_actors._option_checks import shown
from durable_actors.errors import DefinitionError
from durable_actors.machine._backoff import DEFAULT_MAX_ATTEMPTS, Backoff
from durable_actors.machine._checks import Duration, Keep, seconds
from durable_actors.machine._child import When
from durable_actors.machine._context import Context
from durable_actors.machine._definition import check_backoff, job_attempts
from durable_actors.machine._outcome import Cancel, Done, Error, Retry, Stop
from durable_actors.machine._spec import MachineSpec, identity_of
from durable_actors.machine._state_type import inspect_type
from durable_actors.machine._step import check_call
from durable_actors.machine._step_ref import StepRef
from durable_actors.machine._task_ref import TaskRef

M = TypeVar("M")
S = TypeVar("S")
R = TypeVar("R")
T = TypeVar("T")

After = TaskRef[Any] | str


@attrs.frozen
class TaskOptions:
    """The options of `@task`. None means: what the workflow says."""

    after: tuple[After, ...] = ()
    when: When = "succeeded"
    queue: str | None = None
    max_attempts: int = DEFAULT_MAX_ATTEMPTS
    backoff: Callable[[int], Duration] | Backoff | None = None
    name: str | None = None
    timeout: float | None = None
    journal: JournalLevel | None = None
    keep: Keep = "default"
    limits: str | None = None
    """The limits that it uses (`_limits.text_of`)."""


class BoundTask(TaskRef[T], Generic[S, R, T]):
    """A task bound to an object of its workflow: `self.fetch`."""

    __slots__ = ("_task", "_workflow")

    def __init__(self, task: Task[Any, S, R, T], workflow: object) -> None:
        super().__init__(task.name, task.owner, task.result_type)
        self._task = task
        self._workflow = workflow

    def __call__(self, ctx: Context[S]) -> R:
        """Call the function of the task directly, for example in a test. Nothing is stored."""
        return self._task.func(self._workflow, ctx)

    def __repr__(self) -> str:
        return repr(self._task)


class Task(TaskRef[T], Generic[M, S, R, T]):
    """A task in the body of its workflow, created by `@task`. Once the class is defined, it is a job as well."""

    __durable__: MachineSpec | None = None

    def __init__(self, func: Callable[[M, Context[S]], R], options: TaskOptions, result_type: Any) -> None:
        super().__init__(func.__name__, None, result_type)
        self.func = func
        """The decorated function."""
        self.options = options
        """What `@task` was given."""
        self.__doc__ = func.__doc__
        self.__wrapped__ = func  # for inspect.signature and help()
        self.aliases: set[str] = set()
        """Every name that the class body gave to it; more than one is a mistake."""

    @property
    def __isabstractmethod__(self) -> bool:
        return getattr(self.func, "__isabstractmethod__", False)

    def __set_name__(self, owner: type[Any], name: str) -> None:
        # As for steps: errors raised here are wrapped before Python 3.12, so `collect_tasks` checks the aliases.
        if self.owner is None or identity_of(self.owner) == identity_of(owner):
            self.owner: type[Any] | None = owner
            self.name: str = name
            self.aliases.add(name)

    def inherited_by(self, owner: type[Any]) -> Task[M, S, R, T]:
        """Return the same task for a subclass, where it is another job."""
        task: Task[M, S, R, T] = Task(self.func, self.options, self.result_type)
        task.name, task.owner = self.name, owner
        task.aliases.add(self.name)
        return task

    @overload
    def __get__(self, instance: None, owner: type[Any]) -> Task[M, S, R, T]: ...
    @overload
    def __get__(self, instance: M, owner: type[Any] | None = None) -> BoundTask[S, R, T]: ...
    def __get__(
        self, instance: object, owner: type[Any] | None = None
    ) -> Task[M, S, R, T] | BoundTask[S, R, T]:
        return self if instance is None else BoundTask(self, instance)

    def __call__(self, workflow: M, ctx: Context[S]) -> R:
        """Call the function of the task directly, for example in a test. Nothing is stored."""
        return self.func(workflow, ctx)

    def __repr__(self) -> str:
        owner = "" if self.owner is None else f"{self.owner.__qualname__}."
        return f"<task {owner}{self.name}>"


@attrs.frozen
class TaskDecorator:
    """`@task(...)` with its options, before it is applied to the method."""

    options: TaskOptions

    @overload
    def __call__(
        self, func: Callable[[M, Context[S]], Coroutine[Any, Any, T]], /
    ) -> Task[M, S, Coroutine[Any, Any, T], T]: ...
    @overload
    def __call__(self, func: Callable[[M, Context[S]], T], /) -> Task[M, S, T, T]: ...
    def __call__(self, func: Callable[[M, Context[S]], Any], /) -> Task[M, S, Any, Any]:
        """Turn the method into a task."""
        return _make(func, self.options, _names_of_caller(2))


@overload
def task(
    func: Callable[[M, Context[S]], Coroutine[Any, Any, T]], /
) -> Task[M, S, Coroutine[Any, Any, T], T]: ...
@overload
def task(func: Callable[[M, Context[S]], T], /) -> Task[M, S, T, T]: ...
@overload
def task(
    *,
    after: After | Iterable[After] = (),
    when: When = "succeeded",
    queue: str | None = None,
    max_attempts: int = DEFAULT_MAX_ATTEMPTS,
    backoff: Callable[[int], Duration] | Backoff | None = None,
    name: str | None = None,
    timeout: Duration | None = None,
    journal: JournalLevel | None = None,
    keep: Keep = "default",
    rate_limit: RateLimit = None,
    weight: int = 1,
    slot: Slot = None,
) -> TaskDecorator: ...
def task(
    func: Callable[[M, Context[S]], Any] | None = None,
    /,
    *,
    after: After | Iterable[After] = (),
    when: When = "succeeded",
    queue: str | None = None,
    max_attempts: int = DEFAULT_MAX_ATTEMPTS,
    backoff: Callable[[int], Duration] | Backoff | None = None,
    name: str | None = None,
    timeout: Duration | None = None,
    journal: JournalLevel | None = None,
    keep: Keep = "default",
    rate_limit: RateLimit = None,
    weight: int = 1,
    slot: Slot = None,
) -> Task[M, S, Any, Any] | TaskDecorator:
    """Mark a method as a task of its `Workflow`. Use it as `@task` or with options.

    `after` are the tasks that must have ended first: those defined above it, or names. If one of them fails or is
    cancelled, this task is cancelled; with `when="ended"` it runs in any case. The other options are those of `@job`;
    `queue`, `journal` and `keep` are those of the workflow by default, the name is the workflow's with the task's, and
    the version is the workflow's. Raises `DefinitionError` if the method cannot be a task.
    """
    if when not in ("succeeded", "ended"):
        raise DefinitionError(f'@task(when=...) must be "succeeded" or "ended"; it is {shown(when)}')
    limit = None
    if timeout is not None:
        limit = seconds(timeout, what="@task(timeout=...)", error=DefinitionError, positive=True)
    check_backoff(backoff, "@task")
    executions = job_attempts(max_attempts, backoff, "@task")
    limits = text_of(rate_limit, weight, slot, error=DefinitionError)
    options = TaskOptions(_after(after), when, queue, executions, backoff, name, limit, journal, keep, limits)
    return TaskDecorator(options) if func is None else _make(func, options, _names_of_caller(2))


def _make(
    func: Callable[[M, Context[S]], Any], options: TaskOptions, names: Mapping[str, Any]
) -> Task[M, S, Any, Any]:
    given: object = func
    if isinstance(given, TaskRef | StepRef):
        raise DefinitionError(f"{given!r} is decorated twice: a task is neither a step nor another task")
    if not isinstance(given, FunctionType):
        kind = "a class" if isinstance(given, type) else f"{type(given).__name__} {shown(given)}"
        raise DefinitionError(f"@task decorates a method, `def` or `async def`, not {kind}")
    check_call(given, 2, form=f"async def {given.__name__}(self, ctx)")
    return Task(func, options, _result_type(given, names))


def _after(after: After | Iterable[After]) -> tuple[After, ...]:
    if isinstance(after, TaskRef | str):
        return (after,)
    value: object = after
    if not isinstance(value, Iterable) or isinstance(value, bytes | Mapping | type):
        raise DefinitionError(f"@task(after=...) must be tasks or their names, not {shown(after)}")
    given = tuple(after)
    for each in given:
        _check_after(each)
    return given


def _check_after(each: object) -> None:
    if not isinstance(each, TaskRef | str):
        remedy = "; decorate it with @da.task" if callable(each) else ""
        raise DefinitionError(f"@task(after=...) must be tasks or their names, not {shown(each)}{remedy}")


def _result_type(func: FunctionType, names: Mapping[str, Any]) -> Any:
    """Return the type of the result from the annotation; Any without one. Outcomes of a job are not results."""
    written = func.__annotations__.get("return", Any)
    holder = SimpleNamespace(__annotations__={"result": written})
    try:
        hints = typing.get_type_hints(holder, func.__globals__, dict(names), include_extras=True)
    except NameError as error:
        raise DefinitionError(
            f"{func.__qualname__}: the annotation {written!r} of its result cannot be resolved ({error}); define or "
            "import that class above the workflow, at run time (not under TYPE_CHECKING)"
        ) from error
    except (TypeError, SyntaxError) as error:
        raise DefinitionError(
            f"{func.__qualname__}: the annotation {written!r} of its result is not a type: {error}"
        ) from error
    found = _without_outcomes(hints["result"])
    try:
        inspect_type(found, subject=func.__qualname__, what="result type")
    except NameError as error:
        raise DefinitionError(
            f"{func.__qualname__}: an annotation of its result type cannot be resolved: {error}"
        ) from error
    return found


def _without_outcomes(found: Any) -> Any:
    if found is Done:
        return Any
    if found in _OUTCOMES:
        return None
    if typing.get_origin(found) not in {typing.Union, types.UnionType}:
        return found
    members = typing.get_args(found)
    if Done in members:
        return Any  # its result is of any type
    kept = tuple(each for each in members if each not in _OUTCOMES)
    return typing.Union[kept] if kept else None  # noqa: UP007 - of a tuple


_OUTCOMES = (Retry, Stop, Error, Cancel)


def _names_of_caller(depth: int) -> dict[str, Any]:
    """Return the local names at the decorator, in the class body and around it, for string annotations."""
    frame = inspect.currentframe()
    for _ in range(depth):
        frame = frame and frame.f_back
    if frame is None:
        return {}
    around = {} if frame.f_back is None else frame.f_back.f_locals
    return {**around, **frame.f_locals}
