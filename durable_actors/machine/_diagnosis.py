"""Find the part of a value that cannot be stored. Slow and thorough; runs only after an error.

The encoder reports *what* it cannot encode ("objects of type set are unsupported") but not *where*, and it
silently turns NaN into null. This walk finds the path. It keeps its own stack, so depth and cycles are no problem.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from enum import Enum
from math import isfinite
from typing import Any, cast

import attrs
import msgspec

from durable_actors._option_checks import shown
from durable_actors.machine._models import dump_model

Problem = tuple[str, str]
"""(path, what is wrong there)"""

Path = tuple[Any, str] | None
"""(path of the container, last segment); None is the root. Only the reported path is turned into text: a string
per level would be quadratic in the depth (2.4 s for 100,000 levels)."""

_END_OF_CONTAINER = object()


def find_problem(value: object) -> Problem | None:
    """Return the first path whose value JSON or jsonb cannot store, or None."""
    todo: list[tuple[object, Any]] = [(value, None)]
    above: set[int] = set()  # the containers around the current item; meeting one again is a cycle
    while todo:
        item, path = todo.pop()
        if item is _END_OF_CONTAINER:
            above.discard(path)
            continue
        parts = _parts(item)
        if parts is None:
            problem = _leaf_problem(item)
            if problem is not None:
                return path_text(path), problem
            continue
        if id(item) in above:
            return path_text(path), f"{type(item).__name__} contains itself"
        above.add(id(item))
        todo.append((_END_OF_CONTAINER, id(item)))
        found: list[tuple[object, Path]] = []
        for key, part, segment in parts:
            problem = _key_problem(key)
            if problem is not None:
                return path_text(path), problem
            found.append((part, (path, segment)))
        todo.extend(reversed(found))
    return None


def path_text(path: Path) -> str:
    """Return a path as text: `$.items[3].price`."""
    segments: list[str] = []
    while path is not None:
        path, segment = path
        segments.append(segment)
    return "$" + "".join(reversed(segments))


def _parts(item: object) -> Iterator[tuple[object, object, str]] | None:
    """Return (key, part, path segment) of each part of a container, or None for a leaf."""
    if isinstance(item, dict):
        members = cast("dict[object, object]", item)
        return ((key, part, member(key)) for key, part in members.items())
    if isinstance(item, list | tuple | set | frozenset):
        elements = cast("Iterable[object]", item)
        return (("", part, f"[{index}]") for index, part in enumerate(elements))
    names = field_names(item)
    if names is None:
        return None
    return ((name, getattr(item, name), f".{name}") for name in names if hasattr(item, name))


def field_names(item: object) -> tuple[str, ...] | None:
    """Return the field names of an attrs object, a dataclass or a Struct; None for anything else."""
    if isinstance(item, msgspec.Struct):
        return item.__struct_fields__
    if isinstance(item, type):
        return None
    kind: type[Any] = type(item)
    if attrs.has(kind):
        return tuple(field.name for field in attrs.fields(kind))
    if dataclasses.is_dataclass(item):
        return tuple(field.name for field in dataclasses.fields(item))
    return None


def member(key: object) -> str:
    """Return the path segment for a key of an object."""
    plain = isinstance(key, str) and key.isidentifier()
    return f".{key}" if plain else f"[{shown(key)}]"


def _key_problem(key: object) -> str | None:
    if isinstance(key, str):
        problem = _text_problem(key)
        return None if problem is None else f"the key {shown(key)} {problem}"
    if isinstance(key, float) and not isfinite(key):
        return f"the key {key!r} is not JSON"
    if isinstance(key, bool) or _encode_error({key: None}) is not None:
        return (
            f"the key {shown(key)} is a {type(key).__name__}; JSON keys are strings (numbers become strings)"
        )
    return None


def _leaf_problem(item: object) -> str | None:
    if isinstance(item, Enum):
        return _leaf_problem(item.value)
    if isinstance(item, float):
        return None if isfinite(item) else f"{item!r} is not JSON"
    if isinstance(item, str) and type(item) is str:
        problem = _text_problem(item)
        return None if problem is None else f"the text {problem}"
    error = "its content is not checked" if isinstance(item, msgspec.Raw) else _encode_error(item)
    return None if error is None else f"{article(type(item).__name__)} cannot be stored: {error}"


def _text_problem(text: str) -> str | None:
    if "\0" in text:
        return "contains a NUL character (\\u0000), which Postgres cannot store"
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"contains a lone surrogate (position {error.start}), which is not Unicode text"
    return None


def _encode_error(item: Any) -> str | None:
    try:
        msgspec.json.encode(item, enc_hook=dump_model)
    except Exception as error:  # noqa: BLE001 - ints of more than 4,300 digits; what a model raises that dumps itself
        return str(error)
    return None


def article(noun: str) -> str:
    """Return the noun with its indefinite article."""
    return f"an {noun}" if noun[:1].lower() in "aeiou" else f"a {noun}"


def complaint(error: Exception) -> tuple[str, str] | None:
    """Return path and text of the first thing that a validation found wrong; None if the error does not say."""
    ask = getattr(error, "errors", None)
    found = ask() if callable(ask) else None
    if not isinstance(found, list) or not found or not isinstance(found[0], dict):
        return None
    told = cast("list[dict[str, Any]]", found)
    first, more = told[0], len(told) - 1
    also = f" (and {more} more)" if more else ""
    place = cast("Iterable[object]", first.get("loc", ()))
    path = "$" + "".join(f"[{each}]" if isinstance(each, int) else member(each) for each in place)
    return path, f"{first.get('msg', error)}{also}"
