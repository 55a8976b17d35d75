"""The filter bar: `status:failed machine:Checkout older:1h`, parsed to a `Filter` and written again. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final, get_args

import attrs

from durable_actors._store.observe import Filter
from durable_actors.machine import Status

_WORD: Final = re.compile(r'(?:([a-z_]+):)?(?:"([^"]*)"|(\S+))')
_AGE: Final = re.compile(r"(\d{1,9}(?:\.\d+)?)(s|m|h|d)?", re.ASCII)
_UNITS: Final = {None: 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
QUALIFIERS: Final = {
    "status": "runnable, executing, awaiting_signal, awaiting_children, done, failed or cancelled",
    "machine": "the name of a machine or job",
    "step": "the current step, or the one in which it ended",
    "queue": "the name of a queue",
    "error": "a part of the last error",
    "tag": "a tag; several must all be there",
    "key": "a unique key",
    "parent": "the id of its parent",
    "waiting": "approval, pause, signal or children",
    "paused": "yes or no",
    "older": "not changed for so long: 90s, 5m, 2h, 1d",
    "id": "one instance",
}
"""Every qualifier, with what may follow it."""
PRESETS: Final = {
    "failed": "status:failed",
    "running": "status:executing",
    "ready or scheduled": "status:runnable",
    "waits for a person": "waiting:approval",
    "waits for a signal": "status:awaiting_signal",
    "waits for children": "status:awaiting_children",
    "paused": "paused:yes",
}


@attrs.frozen(kw_only=True)
class Query:
    """What the bar says."""

    text: str
    """As it was typed."""
    where: Filter
    id: int | None = None
    """One instance that is asked for."""
    wrong: tuple[str, ...] = ()
    """What could not be understood, for people."""

    @property
    def is_empty(self) -> bool:
        """Whether all instances are meant."""
        return self.where == Filter()


def parse_query(text: str) -> Query:
    """Parse the text of the bar. What is not understood is told, and left out."""
    given: dict[str, Any] = {}
    tags: list[str] = []
    wrong: list[str] = []
    wanted: int | None = None
    for name, value in _words(text[:2000]):
        if name in {"", "id"} and re.fullmatch(r"[0-9]{1,18}", value):
            wanted = int(value)
        elif name in {"", "key"}:
            given["unique_key"] = value
        elif name == "tag":
            tags.append(value)
        elif name in {"machine", "step", "queue", "error"}:
            given[name] = value
        else:
            problem = _checked(name, value, given)
            if problem:
                wrong.append(problem)
    if "unique_key" in given and "parent" in given:
        del given["unique_key"]
        wrong.append("key: and parent: cannot be combined")
    where = Filter(**given, tag=tuple(tags) or None)
    return Query(text=text[:2000].strip(), where=where, id=wanted, wrong=tuple(wrong))


def _words(text: str) -> Iterator[tuple[str, str]]:
    for match in _WORD.finditer(text.replace("\0", "")):
        yield match[1] or "", match[2] if match[2] is not None else match[3]


def _checked(name: str, value: str, given: dict[str, Any]) -> str | None:
    """Add a qualifier whose values are limited. Returns what is wrong with it."""
    match name:
        case "status" if value in get_args(Status):
            given["status"] = value
        case "waiting" if value in {"approval", "pause", "signal", "children"}:
            given["waiting"] = value
        case "paused" if value in {"yes", "no"}:
            given["paused"] = value == "yes"
        case "parent" if re.fullmatch(r"[1-9][0-9]{0,17}", value):
            given["parent"] = int(value)
        case "older" if (age := _AGE.fullmatch(value)) is not None:
            given["older_than"] = min(float(age[1]) * _UNITS[age[2]], 3e8)
        case _ if name in QUALIFIERS:
            return f"{name}: takes {QUALIFIERS[name]}, not {value[:60]!r}"
        case _:
            return f"there is no {name}:, only {', '.join(QUALIFIERS)}"
    return None
