"""Parameters and columns as Postgres writes them."""

from __future__ import annotations

import json
import re
from functools import lru_cache

_ELEMENT = re.compile(r'"((?:[^"\\]|\\.)*)"|([^,{}]+)', re.DOTALL)
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)


def ints(value: bytes | None) -> list[int]:
    text = (value or b"{}")[1:-1]
    return [int(each) for each in text.split(b",")] if text else []


def texts(value: bytes | None) -> list[str | None]:
    return [] if value is None or value == b"{}" else [*_texts(value)]


@lru_cache(4096)
def _texts(value: bytes) -> tuple[str | None, ...]:
    return tuple(
        _ESCAPE.sub(r"\1", match[1]) if match[1] is not None else None if match[2] == "NULL" else match[2]
        for match in _ELEMENT.finditer(value.decode()[1:-1])
    )


def numbers(value: bytes | None) -> list[int | None]:
    return [None if each is None else int(each) for each in texts(value)]


def floats(value: bytes | None) -> list[float | None]:
    return [None if each is None else float(each) for each in texts(value)]


def bools(value: bytes | None) -> list[bool]:
    return [each == "t" for each in texts(value)]


def keys(value: bytes | None) -> list[bytes | None]:
    """A bytea array in hex form."""
    return [None if each is None else bytes.fromhex(each[2:]) for each in texts(value)]


def text(value: object) -> bytes | None:
    if value is None:
        return None
    if isinstance(value, bool):
        return b"t" if value else b"f"
    return value if isinstance(value, bytes) else str(value).encode()


def int_array(values: list[int]) -> str:
    return "{" + ",".join(map(str, values)) + "}"


def text_array(values: tuple[str, ...] | None) -> bytes | None:
    return None if values is None else ("{" + ",".join(f'"{each}"' for each in values) + "}").encode()


@lru_cache(4096)
def instant(micros: int) -> str:
    """As `timestamptz` is shown in UTC: fractions without trailing zeros."""
    seconds, fraction = divmod(micros, 1_000_000)
    days, rest = divmod(seconds, 86_400)
    shown = f"2026-01-{days + 1:02d} {rest // 3600:02d}:{rest // 60 % 60:02d}:{rest % 60:02d}"
    return shown + (f".{fraction:06d}".rstrip("0") if fraction else "") + "+00"


@lru_cache(4096)
def micros(shown: str) -> int:
    """The inverse; "-infinity" is before everything."""
    if shown == "-infinity":
        return -1
    day, clock = shown.removesuffix("+00").split(" ")
    hours, minutes, seconds = clock.split(":")
    whole, _, fraction = seconds.partition(".")
    total = ((int(day[8:]) - 1) * 24 + int(hours)) * 3600 + int(minutes) * 60 + int(whole)
    return total * 1_000_000 + int(fraction.ljust(6, "0") if fraction else 0)


def jsonb(value: str | bytes) -> bytes:
    """Not the bytes it was given: as Postgres, with spaces, and shorter names first."""

    def ordered(each: object) -> object:
        if isinstance(each, dict):
            return {key: ordered(each[key]) for key in sorted(each, key=lambda name: (len(name), name))}
        return [ordered(one) for one in each] if isinstance(each, list) else each

    return json.dumps(ordered(json.loads(value))).encode()
