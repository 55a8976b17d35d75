"""Objects of another class than the state's type says, and where they are.

Such an object would come back as that type, without the fields that the type does not have. The check of the state
itself is one comparison of classes (`StateCodec.encode`). What is inside is walked only when a cheaper look at what was
stored and read back cannot rule it out (`may_be_foreign`): walking takes 10 to 50 µs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, cast

import msgspec

from durable_actors.machine._diagnosis import Path, Problem, article, field_names, member, path_text

_encode = msgspec.json.Encoder().encode
_encode_plain = json.JSONEncoder().encode


def foreign_class(given: object, expected: type[Any]) -> str | None:
    """What to say of an object whose class is not `expected`; None when it is, or is no record at all."""
    kind: type[Any] = type(given)
    if kind is expected or field_names(given) is None or _same(kind, expected):
        return None
    ours, theirs = kind.__qualname__, expected.__qualname__
    if ours == theirs:
        ours, theirs = f"{kind.__module__}.{ours}", f"{expected.__module__}.{theirs}"
    if expected is not dict and issubclass(kind, expected):
        return f"{article(ours)} and would come back as {article(theirs)}, without what the subclass adds"
    return f"{article(ours)}, not {article(theirs)}"


def may_be_foreign(given: object, read: object, data: bytes) -> bool:
    """Whether `given`, which was stored as `data` and comes back as `read`, may hold an object of another class."""
    try:
        # Written as it was: nothing is lost. Equal: objects of two classes are not (1 and 1.0 are).
        if _encode(read) == data or read == given:
            return False
        if isinstance(given, dict | list):
            _encode_plain(given)  # refuses every object
            return False
    except Exception:  # noqa: BLE001 - __eq__ is the user's
        return True
    return True


def find_foreign(given: object, read: object) -> Problem | None:
    """Return the first place where `read`, which is `given` stored and read back, is of another class."""
    todo: list[tuple[object, object, Path]] = [(given, read, None)]
    while todo:
        before, after, path = todo.pop()
        problem = _problem(before, after)
        if problem is not None:
            return path_text(path), f"this is {problem}"
        todo.extend(reversed([(a, b, (path, segment)) for a, b, segment in _pairs(before, after)]))
    return None


def _problem(before: object, after: object) -> str | None:
    names = field_names(before)
    if names is None:
        return None
    if isinstance(after, dict):
        # A place that takes any object keeps every field; a TypedDict keeps its own.
        kept = cast("dict[object, object]", after)
        written = cast("dict[object, object]", msgspec.to_builtins(before))
        return None if written.keys() <= kept.keys() else foreign_class(before, dict)
    return None if field_names(after) is None else foreign_class(before, type(after))


def _pairs(before: object, after: object) -> Iterator[tuple[object, object, str]]:
    """The parts of both, as far as they correspond."""
    ours, theirs = _elements(before), _elements(after)
    if ours is not None and theirs is not None:
        if isinstance(after, set | frozenset):
            # Which became which is not known; all of them are of the right class.
            theirs = theirs[:1] * len(ours)
        both = zip(ours, theirs, strict=False)
        yield from ((a, b, f"[{index}]") for index, (a, b) in enumerate(both))
        return
    read = _members(after)
    for key, part in _members(before).items():
        if key in read:
            yield part, read[key], member(key)


def _elements(value: object) -> list[object] | None:
    return list(cast("list[object]", value)) if isinstance(value, list | tuple | set | frozenset) else None


def _members(value: object) -> dict[object, object]:
    if isinstance(value, dict):
        return cast("dict[object, object]", value)
    return {name: getattr(value, name) for name in field_names(value) or () if hasattr(value, name)}


def _same(one: type[Any], other: type[Any]) -> bool:
    """By name: after a reload the module's class is another object than the one that running code was written with."""
    return (one.__module__, one.__qualname__) == (other.__module__, other.__qualname__)
