"""Fields of forms as numbers and durations. Pure."""

from __future__ import annotations

import re
from typing import Final

from durable_actors.dashboard.web import HttpError

_UNITS: Final = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def duration(text: str) -> float:
    """Parse 90, 90s, 5m, 2h or 1d. Raises `HttpError`."""
    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)\s*([smhd]?)", text, re.ASCII)
    if match is None:
        raise HttpError(400, f"{text[:50]!r} is not a duration, such as 90s, 5m, 2h or 1d")
    return float(match[1]) * _UNITS[match[2] or "s"]


def number(text: str, name: str) -> float:
    """Parse a number such as 100 or 0.5. Raises `HttpError`."""
    if re.fullmatch(r"\d{1,12}(?:\.\d{1,12})?", text, re.ASCII) is None:
        raise HttpError(400, f"{name}: {text[:50]!r} is not a number")
    return float(text)


def whole(text: str, name: str) -> int:
    """Parse a whole number. Raises `HttpError`."""
    if re.fullmatch(r"\d{1,12}", text, re.ASCII) is None:
        raise HttpError(400, f"{name}: {text[:50]!r} is not a whole number")
    return int(text)
