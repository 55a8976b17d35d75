"""Check whether a state type can be stored, when the machine is defined and before any row is written."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args, get_origin

import attrs
import msgspec
from msgspec import inspect as types

from durable_actors._option_checks import shown
from durable_actors.errors import DefinitionError
from durable_actors.machine._models import is_model

_RECORDS = types.DataclassType | types.StructType | types.TypedDictType


@attrs.frozen
class TypeFacts:
    """What the codec needs to know about a state type."""

    is_free: bool
    """Any JSON value (`Any`) or any JSON object (`dict`) is valid, so reading it back verifies nothing."""
    is_object: bool
    """It must be a JSON object."""
    may_hide_nan: bool
    """Some part may be a float or any value, so a NaN could be stored as null."""
    record: type | None
    """The attrs class, dataclass or Struct, if the type is one; dict, if it is a TypedDict."""
    nested: bool
    """It contains such types, so there could be an object of another class inside."""
    is_model: bool = False
    """It is a pydantic model, or what looks like one: it dumps and checks itself."""


def inspect_type(state_type: Any, *, subject: str, what: str = "state type") -> TypeFacts:
    """Inspect a state type, or what else `what` says; raise `DefinitionError` if it cannot be stored and read back.

    Raises NameError for a name that is not defined *yet*; the caller tries again later.
    """
    if is_model(state_type):
        return TypeFacts(False, True, may_hide_nan=True, record=state_type, nested=False, is_model=True)
    try:
        root = types.type_info(state_type)
        msgspec.json.Decoder(state_type)  # also refuses unions of classes and enums of tuples
    except (
        TypeError,
        ValueError,
        RecursionError,
    ) as error:  # the latter two come from the repr of an invalid type
        raise DefinitionError(
            f"{subject}: the {what} {type_name(state_type)} cannot be stored: {error}"
        ) from error
    may_hide_nan = False
    nested = False
    for path, node in _walk(root):
        nested = nested or any(isinstance(part, _RECORDS) for _, part in _parts(path, node))
        if isinstance(node, types.CustomType | types.RawType):
            cls = getattr(node, "cls", msgspec.Raw)
            raise DefinitionError(
                f"{subject}: {type_name(cls)} at {path} of the {what} {type_name(state_type)} "
                "cannot be stored; use attrs, a dataclass, a TypedDict, msgspec.Struct, dict, or a JSON type"
                + (" (a pydantic model must be the whole state)" if is_model(cls) else "")
            )
        if isinstance(node, types.DataclassType) and attrs.has(node.cls):
            _refuse_private_fields(node, subject)
        if isinstance(node, types.FloatType | types.AnyType):
            may_hide_nan = True
    record = None
    if isinstance(root, types.DataclassType | types.StructType):
        record = get_origin(root.cls) or root.cls  # Box[int]: isinstance wants Box
    elif isinstance(root, types.TypedDictType):
        record = dict
    return TypeFacts(
        is_free=isinstance(root, types.AnyType) or _is_any_object(root),
        is_object=not isinstance(root, types.AnyType),
        may_hide_nan=may_hide_nan,
        record=record,
        nested=nested,
    )


def _refuse_private_fields(node: types.DataclassType, subject: str) -> None:
    """Refuse private fields of attrs classes, which the encoder silently skips (it writes those of dataclasses)."""
    for field in node.fields:
        if field.name.startswith("_"):
            raise DefinitionError(
                f"{subject}: the field {field.name} of {type_name(node.cls)} would not be stored "
                f"(the encoder skips private attrs fields); rename it to {field.name.lstrip('_')}"
            )


def _is_any_object(root: types.Type) -> bool:
    if not isinstance(root, types.DictType) or not isinstance(root.value_type, types.AnyType):
        return False
    key = root.key_type
    return isinstance(key, types.AnyType) or key == types.StrType()


def _walk(root: types.Type) -> Iterator[tuple[str, types.Type]]:
    """Yield every node once (types may be recursive), with the first path that leads to it."""
    seen: set[int] = set()
    todo = [("$", root)]
    while todo:
        path, node = todo.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        yield path, node
        todo.extend(_parts(path, node))


def _parts(path: str, node: types.Type) -> Iterator[tuple[str, types.Type]]:
    """Yield the types inside a type. All nodes are Structs, so their attributes are inspected."""
    for field in getattr(node, "fields", ()):
        yield f"{path}.{field.name}", field.type
    for name in ("item_type", "value_type", "key_type", "type"):
        part = getattr(node, name, None)
        if isinstance(part, types.Type):
            yield f"{path}[...]" if name != "type" else path, part
    for name in ("item_types", "types"):
        for part in getattr(node, name, ()):
            yield f"{path}[...]" if name == "item_types" else path, part


def type_name(value: Any) -> str:
    """Return a type as it is written in code."""
    return value.__qualname__ if isinstance(value, type) and not get_args(value) else shown(value)
