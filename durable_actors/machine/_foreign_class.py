"""Find objects in a state whose class differs from the declared type.

Such an object would be read back as the declared type, without the fields that this type does not have. For the state
itself the check is one comparison of classes (`StateCodec.encode`). The parts inside are walked, which takes 10 to
50 µs, only if the cheaper `may_be_foreign` cannot rule such objects out.
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
    """Describe an object whose class is not `expected`; None if it is, or if the object is not a record."""
    kind: type[Any] = type(given)
    if kind is expected or field_names(given) is None or same_class(kind, expected):
        return None
    ours, theirs = kind.__qualname__, expected.__qualname__
    if ours == theirs:
        ours, theirs = f"{kind.__module__}.{ours}", f"{expected.__module__}.{theirs}"
    if expected is not dict and issubclass(kind, expected):
        return (
            f"{article(ours)} and would be read back as {article(theirs)}, without the fields of the subclass"
        )
    return f"{article(ours)}, not {article(theirs)}"


def may_be_foreign(given: object, read: object, data: bytes) -> bool:
    """Return whether `given`, stored as `data` and read back as `read`, may contain an object of another class."""
    try:
        # Same bytes: nothing is lost. Equal: objects of different classes never are (1 and 1.0 are).
        if _encode(read) == data or read == given:
            return False
        if isinstance(given, dict | list):
            _encode_plain(given)  # refuses every object
            return False
    except Exception:  # noqa: BLE001 - __eq__ is the user's
        return True
    return True


def find_foreign(given: object, read: object) -> Problem | None:
    """Return the first path at which `given` and `read` (stored and read back) have different classes."""
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
        # Where any object is accepted, every field is kept; a TypedDict keeps only its own.
        kept = cast("dict[object, object]", after)
        written = cast("dict[object, object]", msgspec.to_builtins(before))
        return None if written.keys() <= kept.keys() else foreign_class(before, dict)
    return None if field_names(after) is None else foreign_class(before, type(after))


def _pairs(before: object, after: object) -> Iterator[tuple[object, object, str]]:
    """Yield the corresponding parts of both."""
    ours, theirs = _elements(before), _elements(after)
    if ours is not None and theirs is not None:
        if isinstance(after, set | frozenset):
            # The pairing is unknown, but all elements read back have the declared class.
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


def same_class(one: type[Any], other: type[Any]) -> bool:
    """Compare by name: after a reload the module has a new class object, while running code still uses the old one."""
    return (one.__module__, one.__qualname__) == (other.__module__, other.__qualname__)
