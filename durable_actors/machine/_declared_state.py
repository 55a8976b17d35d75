"""The state type of a machine: the first of `state=`, `Machine[...]`, a nested `State`, the parent's type."""

from __future__ import annotations

from typing import Any, ForwardRef, TypeVar, get_args, get_origin

from durable_actors._option_checks import shown
from durable_actors.errors import DefinitionError
from durable_actors.machine._spec import MachineSpec
from durable_actors.machine._state_type import type_name


def declared_state(cls: type[Any], base: type[Any], keyword: Any, parent: MachineSpec | None) -> Any:
    """Return the declared state type, or None if there is none."""
    argument = _argument(cls, base)
    if isinstance(argument, ForwardRef | str):
        raise DefinitionError(
            f"{cls.__qualname__}: Machine[{shown(argument)}] gives the state type as a string; "
            "define the class above the machine and write it without quotes"
        )
    if keyword is not None:
        if argument is not None and argument != keyword:
            raise DefinitionError(
                f"{cls.__qualname__} has two state types, Machine[{type_name(argument)}] and "
                f"state={type_name(keyword)}: give only one of them"
            )
        return keyword
    if isinstance(argument, TypeVar):
        raise DefinitionError(
            f"{cls.__qualname__} has no state type: its base is generic in {argument.__name__}, so "
            "write the type in brackets after the base"
        )
    if argument is not None:
        return argument
    nested = cls.__dict__.get("State") if parent is not None else getattr(cls, "State", None)
    if isinstance(nested, type) and (
        parent is None or parent.codec.type is getattr(parent.definition, "State", None)
    ):
        return nested
    return None if parent is None else parent.codec.type


def _argument(cls: type[Any], base: type[Any]) -> Any:
    """Return the type in the brackets of `Machine[...]`, also through generic classes in between.

    A concrete machine in between ends the search: its definition has the state type.
    """
    for written in cls.__dict__.get("__orig_bases__", cls.__bases__):
        origin = get_origin(written) or written
        if origin is base:
            return get_args(written)[0] if get_args(written) else None
        if (
            not isinstance(origin, type)
            or not issubclass(origin, base)
            or getattr(origin, "__durable__", None)
        ):
            continue
        inner = _argument(origin, base)
        if inner is not None:
            return _substitute(
                inner, dict(zip(getattr(origin, "__parameters__", ()), get_args(written), strict=False))
            )
    return None


def _substitute(inner: Any, known: dict[Any, Any]) -> Any:
    """`list[S]` with `S = Order` is `list[Order]`."""
    if isinstance(inner, TypeVar):
        return known.get(inner, inner)
    parameters = getattr(inner, "__parameters__", ())
    return inner[tuple(known.get(each, each) for each in parameters)] if parameters and known else inner
