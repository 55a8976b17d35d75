"""How a job is called: with its arguments, with a context, both or neither. Read once from its signature."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping
from types import FunctionType, SimpleNamespace
from typing import Any

import attrs

from durable_actors.errors import DefinitionError
from durable_actors.machine._context import Context

CONTEXT_NAMES = frozenset({"ctx", "context"})


@attrs.frozen
class JobForm:
    """What a job function takes."""

    wants_args: bool
    wants_ctx: bool
    args_type: Any
    """From the annotation of the first parameter; `Any` without one."""


def job_form(
    func: object, *, method: bool, names: Mapping[str, Any] | None = None, typed: bool = False
) -> JobForm:
    """Read the signature of a job function (after `self` for a `method`); refuse one that cannot be called.

    `names` are the local names where it is defined, to resolve string annotations. With `typed`, the type of the
    arguments is already known and the annotation is ignored.
    """
    what = "perform(self, args, ctx)" if method else "a function (args, ctx)"
    if not isinstance(func, FunctionType):
        raise DefinitionError(
            f"a job must be {what}, `def` or `async def`, not {type(func).__name__} {func!r:.100}"
        )
    head = f"{func.__name__}(self, args" if method else f"{func.__name__}(args"
    write = f"write {head}) or {head}, ctx)"
    if inspect.isgeneratorfunction(func) or inspect.isasyncgenfunction(func):
        raise DefinitionError(f"{func.__qualname__} yields; a job returns its result: {write}")
    parameters = list(inspect.signature(func).parameters.values())
    if method:
        if not parameters or parameters[0].kind not in _POSITIONAL:
            raise DefinitionError(f"{func.__qualname__} has no self; {write}")
        parameters = parameters[1:]
    elif parameters and parameters[0].name in {"self", "cls"}:
        raise DefinitionError(
            f"{func.__qualname__} is a method; @da.job decorates functions. For a class write "
            "`class Name(da.Machine[Args])` with a method `perform(self, args, ctx)`"
        )
    for each in parameters:
        if each.kind is each.KEYWORD_ONLY and each.default is each.empty:
            raise DefinitionError(
                f"{func.__qualname__}: a job is called without the keyword argument {each.name}; {write}"
            )
    positional = [each for each in parameters if each.kind in _POSITIONAL]
    if parameters and not positional:
        raise DefinitionError(
            f"{func.__qualname__}: a job is called with one value, not with *args or **kwargs; {write}"
        )
    return _form(func, positional, write, names or {}, typed=typed)


def job_call(func: Callable[..., Any], form: JobForm) -> Callable[[Any], Any]:
    """Return a function of the context that calls the job with the arguments it takes."""
    if form.wants_args and form.wants_ctx:
        return lambda ctx: func(ctx.state, ctx)
    if form.wants_args:
        return lambda ctx: func(ctx.state)
    if form.wants_ctx:
        return func
    return lambda ctx: func()  # noqa: ARG005 - all four take a context


_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def _form(
    func: FunctionType,
    positional: list[inspect.Parameter],
    write: str,
    names: Mapping[str, Any],
    *,
    typed: bool,
) -> JobForm:
    if not positional:
        return JobForm(wants_args=False, wants_ctx=False, args_type=Any)
    first, rest = positional[0], positional[1:]
    annotation = None if typed else _resolve(func, first, names)
    if len(positional) == 1 and (_is_context(annotation) or first.name in CONTEXT_NAMES):
        inner = typing.get_args(annotation)
        return JobForm(wants_args=False, wants_ctx=True, args_type=inner[0] if inner else Any)
    wants_ctx = False
    if rest:
        second = rest[0]
        looks_like_ctx = second.name.lstrip("_") in {*CONTEXT_NAMES, ""} or "Context" in str(
            second.annotation
        )
        if second.default is second.empty and not looks_like_ctx:
            raise DefinitionError(
                f"{func.__qualname__}: the second parameter of a job is its context, and {second.name!r} does "
                f"not look like one; {write}, and put several arguments into one attrs class or dataclass"
            )
        wants_ctx = looks_like_ctx
    for each in rest[1:]:
        if each.default is each.empty:
            raise DefinitionError(f"{func.__qualname__} takes too many arguments; {write}")
    return JobForm(wants_args=True, wants_ctx=wants_ctx, args_type=Any if annotation is None else annotation)


def _is_context(annotation: Any) -> bool:
    return annotation is Context or typing.get_origin(annotation) is Context


def _resolve(func: FunctionType, parameter: inspect.Parameter, names: Mapping[str, Any]) -> Any:
    """Return the annotation as a type; None without one. Other annotations are not evaluated."""
    written = parameter.annotation
    if written is parameter.empty:
        return None
    holder = SimpleNamespace(__annotations__={"args": written})
    try:
        hints = typing.get_type_hints(holder, func.__globals__, dict(names), include_extras=True)
    except NameError as error:
        raise DefinitionError(
            f"{func.__qualname__}: the annotation {written!r} of {parameter.name} cannot be resolved "
            f"({error}); define or import that class above the job, at run time (not under TYPE_CHECKING)"
        ) from error
    except (TypeError, SyntaxError) as error:
        raise DefinitionError(
            f"{func.__qualname__}: the annotation {written!r} of {parameter.name} is not a type: {error}"
        ) from error
    return hints["args"]
