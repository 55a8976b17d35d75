"""Checks of values that users pass: durations, names, keys and whole numbers.

Each function returns the value in its normal form, or raises the given error class with a message that names
the parameter and the value. Invalid values must not reach SQL, where one would abort a whole group commit.
"""

from __future__ import annotations

from datetime import timedelta
from math import inf, isfinite
from typing import Literal

from durable_actors._option_checks import shown
from durable_actors.errors import DurableError

Duration = float | timedelta
"""Seconds (int or float), or a `timedelta`."""

MAX_DURATION = 100 * 365.25 * 86_400.0
"""Seconds: a hundred years. `now() + delay` overflows `timestamptz` at about 9e12 seconds; a delay that long is
a mistake (`2 ** attempt` without a limit) long before that."""

MAX_NAME = 255
"""The longest name of a machine, queue, step or signal, in characters. Names are index keys (btree: 2,704 bytes)."""

SEPARATOR = "\x1f"
"""Separates the parts of a step's address (`step_address`). Names of machines and steps must not contain it."""

MAX_KEY = 2_000
"""The longest partition or unique key, in bytes. Keys are index keys, too."""


def seconds(value: object, *, what: str, error: type[DurableError], positive: bool = False) -> float:
    """Return a duration as float seconds.

    Zero is allowed unless `positive`. NaN, infinity, negative values and more than 100 years never are.
    """
    if isinstance(value, timedelta):
        result = value.total_seconds()
    elif isinstance(value, int | float) and not isinstance(value, bool):
        result = _as_float(value)
    else:
        raise error(
            f"{what} must be seconds (a number) or a timedelta, not {type(value).__name__}: {shown(value)}"
        )
    if not isfinite(result) or result < 0 or (positive and result == 0):
        floor = "greater than 0" if positive else "0 or more"
        raise error(f"{what} must be a finite number of seconds, {floor}; it is {shown(value)}")
    if result > MAX_DURATION:
        raise error(f"{what} must be at most {MAX_DURATION:.0f} seconds (100 years); it is {shown(value)}")
    return result


Keep = Duration | None | Literal["default"]
"""How long ended instances of a machine are kept: a duration after their end, None for ever, "default" what the
engine's `Retention` says. 0: an instance that is done is deleted by its own commit."""


def keep_seconds(value: object, *, what: str, error: type[DurableError]) -> float | Literal["default"] | None:
    """Return `keep=` with its duration in seconds: 0, or at least a second."""
    if value is None or (isinstance(value, str) and value == "default"):
        return None if value is None else "default"
    result = seconds(value, what=what, error=error)
    if 0 < result < 1:
        raise error(f"{what} must be 0 or at least a second; it is {shown(value)}")
    return result


def text(value: object, *, what: str, error: type[DurableError], maximum: int | None = None) -> str:
    """Return a string that a Postgres text column can store: not empty, no NUL, no lone surrogate."""
    if not isinstance(value, str):
        raise error(f"{what} must be a str, not {type(value).__name__}: {shown(value)}")
    if not value:
        raise error(f"{what} must not be empty")
    if "\0" in value or not _is_unicode(value):
        raise error(f"{what} must not contain NUL characters or lone surrogates: {shown(value)}")
    if maximum is not None and len(value) > maximum:
        raise error(f"{what} must have at most {maximum} characters, it has {len(value)}: {shown(value)}")
    return value


def key_text(value: object, *, what: str, error: type[DurableError]) -> str:
    """Return a partition or unique key: text that fits an index entry."""
    key = text(value, what=what, error=error)
    size = len(key.encode())
    if size > MAX_KEY:
        raise error(
            f"{what} must have at most {MAX_KEY} bytes, it has {size}; use a hash of it instead: {shown(value)}"
        )
    return key


def whole(value: object, *, what: str, error: type[DurableError], minimum: int, maximum: int) -> int:
    """Return an int in the closed range. A bool is not a number here."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise error(f"{what} must be an int, not {type(value).__name__}: {shown(value)}")
    if not minimum <= value <= maximum:
        raise error(f"{what} must be between {minimum} and {maximum}; it is {shown(value)}")
    return value


def _as_float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:  # an int beyond 1.8e308
        return inf if value > 0 else -inf


def _is_unicode(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
