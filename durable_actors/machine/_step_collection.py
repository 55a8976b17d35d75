"""Collect the steps of a class, its bases and its mixins."""

from __future__ import annotations

import inspect
from types import FunctionType
from typing import Any, TypeGuard

from durable_actors.errors import DefinitionError
from durable_actors.machine._checks import MAX_NAME, SEPARATOR, text
from durable_actors.machine._spec import identity_of
from durable_actors.machine._step import Step
from durable_actors.machine._step_ref import StepRef

RESERVED = frozenset({"handle", "perform", "backoff", "State"})
"""Names that have another meaning in a machine and cannot be steps."""


def collect_steps(cls: type[Any], base: type[Any]) -> dict[str, Step[Any, Any, Any]]:
    """Return the steps by name, bases first; raise `DefinitionError` for invalid ones."""
    bodies = [each for each in reversed(cls.__mro__) if each not in base.__mro__]
    visible: dict[str, tuple[type[Any], Any]] = {}
    for body in bodies:
        for name, value in vars(body).items():
            hidden = visible.get(name)
            if hidden is not None and isinstance(hidden[1], Step) and not isinstance(value, StepRef):
                raise DefinitionError(
                    f"{body.__qualname__}.{name} hides the step {hidden[0].__qualname__}.{name}: decorate it "
                    "with @da.step, or rename it"
                )
            if isinstance(value, StepRef) or hidden is not None:
                visible[name] = (body, value)
    steps: dict[str, Step[Any, Any, Any]] = {}
    for name, (body, value) in visible.items():
        if isinstance(value, StepRef):
            steps[name] = _checked(body, name, value)
    return steps


def looks_like_steps(cls: type[Any]) -> str:
    """Suggest a fix for a class without steps, for the error message."""
    candidates = [
        name
        for name, value in vars(cls).items()
        if isinstance(value, FunctionType)
        and name not in RESERVED
        and not name.startswith("_")
        and len(inspect.signature(value).parameters) == 2
    ]
    if candidates:
        return f"decorate its steps with @da.step ({', '.join(candidates)}?)"
    return "give it a method start(self, ctx) decorated with @da.step, or a method perform(self, args)"


def _checked(body: type[Any], name: str, value: Any) -> Step[Any, Any, Any]:
    where = f"{body.__qualname__}.{name}"
    owner: type[Any] | None = value.owner
    if not _is_step(value) or owner is None or identity_of(owner) != identity_of(body):
        raise DefinitionError(
            f"{where} is the step {value!r} of another class; inherit from that class or define it here"
        )
    if len(value.aliases) > 1:
        raise DefinitionError(
            f"{where}: one step has several names ({', '.join(sorted(value.aliases))}); keep only one"
        )
    if name in RESERVED:
        raise DefinitionError(
            f"{where}: a step cannot be named {name}, which has another meaning in a machine"
        )
    text(name, what=f"{where}: a step's name", error=DefinitionError, maximum=MAX_NAME)
    if SEPARATOR in name:
        raise DefinitionError(f"{where}: a step's name must not contain the character U+001F")
    if name.startswith("__"):
        raise DefinitionError(
            f"{where}: a step cannot be named {name}; names with two underscores are reserved by Python"
        )
    return value


def _is_step(value: object) -> TypeGuard[Step[Any, Any, Any]]:
    return isinstance(value, Step)
