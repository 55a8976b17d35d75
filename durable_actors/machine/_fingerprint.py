"""The fingerprint of a definition: a hash of its structure, not of its code. Pure.

Two definitions with the same fingerprint can continue each other's instances as far as names and types go: the same
machine, version, steps with their options, and states of the same form. What the steps do is not part of it, nor are
the names of classes, comments or defaults.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any, Final

from msgspec import inspect as types

from durable_actors.machine._models import is_model, model_shape

SIZE: Final = 8
"""Bytes. An accident is as likely as 1 in 2**64; nobody is to be fooled."""
_FORM: Final = 1
"""The first part of what is hashed: another form of fingerprints must not look like another definition."""
_MANY: Final = frozenset({"fields", "types", "item_types", "values"})
"""The attributes of types that are tuples."""


def fingerprint(
    name: str,
    version: int,
    *,
    kind: str,
    initial: str,
    steps: Mapping[str, float | None],
    state_type: Any,
    on_cancel: str | None = None,
    tasks: Iterable[tuple[str, tuple[str, ...], bool]] = (),
) -> str:
    """Return the fingerprint of a definition as 16 hexadecimal digits. `steps` are their names and timeouts."""
    parts = [_FORM, name, version, kind, initial, sorted(steps.items()), shape_of(state_type)]
    if on_cancel is not None:
        parts.append(on_cancel)
    if edges := sorted((name, sorted(after), any_end) for name, after, any_end in tasks):
        parts.append({"tasks": edges})
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=SIZE).hexdigest()


def shape_of(state_type: Any) -> Any:
    """Return the form of a type as JSON values: fields and their types, without the names of classes."""
    return model_shape(state_type) if is_model(state_type) else _shape(types.type_info(state_type), {})


def _shape(node: types.Type, seen: dict[int, int]) -> Any:
    """A class may contain itself: from the second time on, its number stands for it."""
    if "fields" in node.__struct_fields__:
        if id(node) in seen:
            return ["again", seen[id(node)]]
        seen[id(node)] = len(seen)
    parts: dict[str, Any] = {}
    for name in node.__struct_fields__:
        value = getattr(node, name)
        if name == "cls":
            if isinstance(node, types.EnumType):
                parts["values"] = sorted(repr(each.value) for each in node.cls)
        elif name in _MANY:
            parts[name] = [_part(each, seen) for each in value]
        elif value is not None:
            parts[name] = _part(value, seen)
    return [type(node).__name__, parts]


def _part(value: Any, seen: dict[int, int]) -> Any:
    if isinstance(value, types.Type):
        return _shape(value, seen)
    if isinstance(value, types.Field):
        return [value.encode_name, value.required, _shape(value.type, seen)]
    return value if isinstance(value, bool | int | float | str) else repr(value)
