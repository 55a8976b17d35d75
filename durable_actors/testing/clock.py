"""Time on a bench: durations as people write them ("3d", "1h30m"), and clocks that do not go with one."""

from __future__ import annotations

import math
import re
from typing import Final

import trio
from trio.testing import MockClock

from durable_actors._option_checks import Duration, duration, shown
from durable_actors.errors import ConfigError

_UNITS: Final = {"w": 604_800.0, "d": 86_400.0, "h": 3600.0, "m": 60.0, "min": 60.0, "s": 1.0, "ms": 0.001}
_PART: Final = re.compile(r"(\d+(?:\.\d+)?)\s*(w|d|h|min|ms|m|s)\s*")

TimeSpan = Duration | str
"""Seconds, a timedelta, or a text such as "3d" or "1h30m"."""


def parse_span(value: TimeSpan) -> float:
    """Return seconds. Raises `ConfigError` for anything else than a positive time span."""
    if not isinstance(value, str):
        return duration("by", value)
    text = value.strip()
    parts, end = list[tuple[str, str]](), 0
    while (match := _PART.match(text, end)) is not None:
        parts.append((match[1], match[2]))
        end = match.end()
    if not parts or end != len(text):
        raise ConfigError(
            f'by={shown(value)} is not a time span: write "3d", "1h30m" or "90s" (units: w d h m s ms), '
            "or pass seconds or a timedelta",
            option="by",
            value=value,
        )
    return duration("by", round(sum(float(number) * _UNITS[unit] for number, unit in parts), 6))


def refuse_autojump() -> None:
    """Raise `ConfigError` in a Trio run whose clock jumps: it would jump over every timeout while Postgres works."""
    clock = trio.lowlevel.current_clock()
    if isinstance(clock, MockClock) and clock.autojump_threshold < math.inf:
        raise ConfigError(
            "a bench does not work with trio's autojump_clock, which jumps while Postgres works: use durable.advance()",
            option="autojump_clock",
        )
