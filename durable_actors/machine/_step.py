"""`@step`: marks a method as a step and makes it addressable by reference.

`self.ship` is a `BoundStep` and `Checkout.ship` is the `Step` itself. Both are a `StepRef[Order]`, which `Next`
takes, and both can be called, so a step can be tested like any method.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine
from types import FunctionType
from typing import Any, Generic, TypeVar, overload

import attrs

from durable_actors._limits import RateLimit, Slot, text_of
from durable_actors._option_checks import shown
from durable_actors.errors import DefinitionError
from durable_actors.machine._backoff import Backoff
from durable_actors.machine._checks import Duration, seconds
from durable_actors.machine._context import Context
from durable_actors.machine._outcome import Outcome
from durable_actors.machine._spec import identity_of
from durable_actors.machine._step_ref import StepRef

M = TypeVar("M")
S = TypeVar("S")
R = TypeVar("R", bound=Outcome | Coroutine[Any, Any, Outcome])


class BoundStep(StepRef[S], Generic[S, R]):
    """A step bound to an object of its machine: `self.ship`."""

    __slots__ = ("_machine", "_step")

    def __init__(self, step: Step[Any, S, R], machine: object) -> None:
        # StepRef.__init__ is inlined: this runs for every `self.ship` of every step.
        self.name = step.name
        self.owner = step.owner
        self._step = step
        self._machine = machine

    def __call__(self, ctx: Context[S]) -> R:
        """Call the function of the step directly, for example in a test. Nothing is committed."""
        return self._step.func(self._machine, ctx)

    def __repr__(self) -> str:
        return repr(self._step)


class Step(StepRef[S], Generic[M, S, R]):
    """A step in the body of its class, created by `@step`."""

    def __init__(
        self,
        func: Callable[[M, Context[S]], R],
        *,
        initial: bool,
        timeout: float | None,
        on_cancel: bool = False,
        retry: Backoff | None = None,
        limits: str | None = None,
    ) -> None:
        super().__init__(func.__name__, None)
        self.func = func
        """The decorated function."""
        self.initial = initial
        """Whether it is marked as the initial step."""
        self.timeout = timeout
        """The longest run in seconds; None for no limit."""
        self.on_cancel = on_cancel
        """Whether a cancelled instance enters it instead of ending."""
        self.retry = retry
        """When a failed run is repeated before `handle` is asked; None: never."""
        self.limits = limits
        """The limits that it uses (`_limits.text_of`)."""
        self.__doc__ = func.__doc__
        self.__wrapped__ = func  # for inspect.signature and help()
        self.aliases: set[str] = set()
        """Every name that the class body gave to it; more than one is a mistake."""

    @property
    def __isabstractmethod__(self) -> bool:
        return getattr(self.func, "__isabstractmethod__", False)

    def __set_name__(self, owner: type[Any], name: str) -> None:
        # Before Python 3.12, errors raised here are wrapped in RuntimeError, so `collect_steps` checks the aliases.
        if self.owner is None or identity_of(self.owner) == identity_of(owner):
            self.owner: type[Any] | None = owner
            self.name: str = name
            self.aliases.add(name)

    @overload
    def __get__(self, instance: None, owner: type[Any]) -> Step[M, S, R]: ...
    @overload
    def __get__(self, instance: M, owner: type[Any] | None = None) -> BoundStep[S, R]: ...
    def __get__(self, instance: object, owner: type[Any] | None = None) -> Step[M, S, R] | BoundStep[S, R]:
        return self if instance is None else BoundStep(self, instance)

    def __call__(self, machine: M, ctx: Context[S]) -> R:
        """Call the function of the step directly, for example in a test. Nothing is committed."""
        return self.func(machine, ctx)

    def __repr__(self) -> str:
        owner = "" if self.owner is None else f"{self.owner.__qualname__}."
        return f"<step {owner}{self.name}>"


@attrs.frozen
class StepDecorator:
    """`@step(...)` with its options, before it is applied to the method."""

    initial: bool
    timeout: float | None
    on_cancel: bool = False
    retry: Backoff | None = None
    limits: str | None = None

    def __call__(self, func: Callable[[M, Context[S]], R], /) -> Step[M, S, R]:
        """Turn the method into a step."""
        check_step_function(func)
        return Step(
            func,
            initial=self.initial,
            timeout=self.timeout,
            on_cancel=self.on_cancel,
            retry=self.retry,
            limits=self.limits,
        )


@overload
def step(func: Callable[[M, Context[S]], R], /) -> Step[M, S, R]: ...
@overload
def step(
    *,
    initial: bool = False,
    timeout: Duration | None = None,
    on_cancel: bool = False,
    retry: Backoff | None = None,
    rate_limit: RateLimit = None,
    weight: int = 1,
    slot: Slot = None,
) -> StepDecorator: ...
def step(
    func: Callable[[M, Context[S]], R] | None = None,
    /,
    *,
    initial: bool = False,
    timeout: Duration | None = None,
    on_cancel: bool = False,
    retry: Backoff | None = None,
    rate_limit: RateLimit = None,
    weight: int = 1,
    slot: Slot = None,
) -> Step[M, S, R] | StepDecorator:
    """Mark a method as a step of its machine. Use it as `@step` or with options.

    `initial` makes it the step in which instances begin (default: the one named "start"). With `timeout`, a run that
    takes longer is cancelled and `handle` receives `StepTimeout`. A plain `def` step runs in a thread, which cannot
    be cancelled: it keeps its slot until it returns, and its outcome is dropped. `on_cancel` marks the step, one per
    machine, that a cancelled instance enters instead of ending: it compensates, knows why from `ctx.cancellation`,
    may go on to other steps, and when it ends, the instance is cancelled. With `retry`, a run that raises is repeated
    after a growing delay, up to `max_attempts` runs; `handle` is asked when none is left, or the exception is not one
    that `retry` names. `rate_limit`, `weight` and `slot` are the limits that it uses, unless the `Next`
    or the insert that enters it names others. Raises `DefinitionError` if the method cannot be a step.
    """
    for option, value in (("initial", initial), ("on_cancel", on_cancel)):
        if not isinstance(value, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise DefinitionError(f"@step({option}=...) must be True or False; it is {shown(value)}")
    if retry is not None and not isinstance(retry, Backoff):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise DefinitionError(f"@step(retry=...) must be a Backoff(...); it is {shown(retry)}")
    limit = None
    if timeout is not None:
        limit = seconds(timeout, what="@step(timeout=...)", error=DefinitionError, positive=True)
    limits = text_of(rate_limit, weight, slot, error=DefinitionError)
    decorator = StepDecorator(initial, limit, on_cancel, retry, limits)
    return decorator if func is None else decorator(func)


def check_step_function(func: Any) -> None:
    """Raise a `DefinitionError` that says what to change, unless this can be a step."""
    if isinstance(func, StepRef):
        raise DefinitionError(f"{func!r} is decorated with @step twice")
    for wrapper in (staticmethod, classmethod):
        if isinstance(func, wrapper):
            raise DefinitionError(f"a step must be a plain method (self, ctx): remove @{wrapper.__name__}")
    if not isinstance(func, FunctionType):
        kind = "a class" if isinstance(func, type) else f"{type(func).__name__} {shown(func)}"
        raise DefinitionError(f"@step decorates a method, `def` or `async def`, not {kind}")
    check_call(func, 2, form=f"def {func.__name__}(self, ctx)")


def check_call(func: FunctionType, count: int, *, form: str) -> None:
    """Check that a function can be called with `count` positional arguments and does not yield."""
    if inspect.isgeneratorfunction(func) or inspect.isasyncgenfunction(func):
        raise DefinitionError(f"{func.__qualname__} is a generator; it must return its outcome: {form}")
    try:
        inspect.signature(func).bind(*[None] * count)
    except TypeError as error:
        raise DefinitionError(
            f"{func.__qualname__}{inspect.signature(func)} cannot be called ({error}); write {form}"
        ) from None
