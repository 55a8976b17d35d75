"""Can a type be stored? Found out when the machine is defined, before any row is written."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args, get_origin

import attrs
import msgspec
from msgspec import inspect as types

from durable_actors._option_checks import shown
from durable_actors.errors import DefinitionError

_RECORDS = types.DataclassType | types.StructType | types.TypedDictType


@attrs.frozen
class TypeFacts:
    """What the codec must know of a state type."""

    is_free: bool
    """Whatever is JSON fits (`Any`), or is any JSON object (`dict`): nothing to verify by reading it back."""
    is_object: bool
    """It must be an object."""
    may_hide_nan: bool
    """Some place takes a float or anything at all, so a NaN could slip through as null."""
    record: type | None
    """The attrs class, dataclass or Struct, when the type is one; dict, when it is a TypedDict."""
    nested: bool
    """Such types are also inside of it, so an object of another class could be there."""


def inspect_type(state_type: Any, *, subject: str) -> TypeFacts:
    """Look through a state type; raise `DefinitionError` for one that cannot be stored and read back.

    A name that is not defined *yet* raises NameError: the caller tries again later.
    """
    try:
        root = types.type_info(state_type)
        msgspec.json.Decoder(state_type)  # refuses more: unions of classes, enums of tuples
    except (TypeError, ValueError, RecursionError) as error:  # the latter two by printing what is no type
        raise DefinitionError(
            f"{subject}: the state type {type_name(state_type)} cannot be stored: {error}"
        ) from error
    may_hide_nan = False
    nested = False
    for path, node in _walk(root):
        nested = nested or any(isinstance(part, _RECORDS) for _, part in _parts(path, node))
        if isinstance(node, types.CustomType | types.RawType):
            cls = getattr(node, "cls", msgspec.Raw)
            raise DefinitionError(
                f"{subject}: {type_name(cls)} at {path} of the state type {type_name(state_type)} "
                "cannot be stored; use attrs, a dataclass, a TypedDict, msgspec.Struct, dict, or a type that JSON has"
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
    """Encoding writes the private fields of dataclasses, but silently skips those of attrs classes."""
    for field in node.fields:
        if field.name.startswith("_"):
            raise DefinitionError(
                f"{subject}: the field {field.name} of {type_name(node.cls)} would not be stored "
                f"(the encoder skips private attrs fields); call it {field.name.lstrip('_')}"
            )


def _is_any_object(root: types.Type) -> bool:
    if not isinstance(root, types.DictType) or not isinstance(root.value_type, types.AnyType):
        return False
    key = root.key_type
    return isinstance(key, types.AnyType) or key == types.StrType()


def _walk(root: types.Type) -> Iterator[tuple[str, types.Type]]:
    """Every node once (types may be recursive), with the path at which it was met first."""
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
    """The types of which a type is made. All nodes are plain Structs, so their attributes tell."""
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
    """A type as people write it."""
    return value.__qualname__ if isinstance(value, type) and not get_args(value) else shown(value)
