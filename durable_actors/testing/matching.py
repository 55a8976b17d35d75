"""What an assertion expects, compared with what is stored. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, cast
from unittest.mock import ANY

from durable_actors._store.read import Instance
from durable_actors.machine import decode_json, encode_json, traceback_text
from durable_actors.testing.report import Ran, last_steps

__all__ = ["ANY", "describe", "matches", "same"]

_JSON: Final = (Mapping, list, tuple, str, int, float, bool, type(None))


def matches(expected: Any, actual: Any) -> bool:
    """Whether a stored value has everything that is expected: of a dict, the keys that are given."""
    if isinstance(expected, Mapping) and isinstance(actual, Mapping):
        given, found = cast("Mapping[Any, object]", expected), cast("Mapping[Any, object]", actual)
        return all(key in found and matches(value, found[key]) for key, value in given.items())
    if isinstance(expected, list | tuple) and isinstance(actual, list | tuple):
        wanted, items = cast("Sequence[object]", expected), cast("Sequence[object]", actual)
        return len(wanted) == len(items) and all(map(matches, wanted, items))
    return same(cast("Any", expected), actual)


def same(expected: object, actual: object) -> bool:
    """Whether a stored value is what is expected; `ANY` equals everything, also inside of lists and dicts.

    An object of a class (attrs, dataclass, msgspec) is compared as it would be stored.
    """
    if expected is not ANY and not isinstance(expected, _JSON):
        expected = decode_json(encode_json(expected, what="the expected value"), what="the expected value")
    if isinstance(expected, tuple):
        expected = list(cast("tuple[object, ...]", expected))
    return bool(expected == actual)


def describe(instance: Instance, why: str, ran: Sequence[Ran]) -> str:
    """An instance, its errors, and why it is where it is, for the text of a failed assertion."""
    step = f"step {instance.step!r}, attempt {instance.attempt}, visit {instance.visit}"
    lines = [
        f"{instance.machine} {instance.id}: {why}",
        f"  status   {instance.status}, {step}, queue {instance.queue!r}",
        f"  state    {instance.state!r}",
    ]
    if instance.status == "done":
        lines.append(f"  result   {instance.result!r}")
    if instance.last_error is not None:
        lines.append(f"  error    {instance.last_error}")
    own = [each for each in ran if each.id == instance.id]
    if own:
        lines += ["  ran on this bench:", *last_steps(own)]
    raised = next((each.error for each in reversed(own) if each.error is not None), None)
    trace = None if raised is None else traceback_text(raised)
    trace = trace or instance.traceback
    if trace is not None and instance.last_error is not None:
        lines += ["", trace.rstrip()]
    return "\n".join(lines)
