"""Checks of option values: each returns the value in its normal form or raises a `ConfigError`.

Every error names the option and the value.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from difflib import get_close_matches
from functools import wraps
from typing import Any, Final, TypeVar

import attrs

from durable_actors.errors import ConfigError

Duration = float | timedelta
"""Seconds, or a timedelta."""

_SCHEMA_NAME: Final = re.compile(r"[a-z_][a-z0-9_]{0,62}")
_SECRET: Final = re.compile("dsn|token|pass|user|viewer|secret")
"""Names of options whose values may contain a password."""
_MAX_DURATION: Final = 10.0 * 365 * 86400
"""Seconds: ten years."""
_MIN_INTERVAL: Final = 0.001
"""Seconds. A shorter poll interval would be a busy loop, and a third of the smallest float is zero."""


def shown(value: object) -> str:
    """Return a short `repr` for an error message; works for objects whose own `repr` raises."""
    return _repr.repr(value)


class SafeRepr(reprlib.Repr):
    """A `repr` that is cut at `limit` characters and does not raise."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.maxstring = self.maxother = limit

    def repr_int(self, x: int, level: int) -> str:
        """Show the size of a large int: printing more than 4,300 digits raises ValueError."""
        return f"<int of {x.bit_length()} bits>" if x.bit_length() > 256 else super().repr_int(x, level)


_repr = SafeRepr(120)


def check_schema_name(schema: Any) -> str:
    """Return the schema name if it is valid; names that start with `pg_` are reserved by Postgres."""
    if not isinstance(schema, str) or not _SCHEMA_NAME.fullmatch(schema) or schema.startswith("pg_"):
        raise ConfigError(
            f"schema={shown(schema)} is not a valid schema name: use up to 63 of a-z, 0-9 and _, not starting with "
            "a digit or with pg_",
            option="schema",
            value=schema,
        )
    return schema


def is_seconds(value: Any, *, least: float = 0) -> bool:
    """Return whether this is a number of seconds, at most 10 years."""
    usable = isinstance(value, int | float) and not isinstance(value, bool)
    # NaN fails this comparison, too. It works for an int of 400 digits, for which float() and isnan() overflow.
    return usable and least <= value <= _MAX_DURATION


def duration(option: str, value: Any, *, positive: bool = True) -> float:
    """Check seconds or a timedelta; return seconds."""
    number = value.total_seconds() if isinstance(value, timedelta) else value
    if not is_seconds(number, least=_MIN_INTERVAL if positive else 0):
        least = "at least 0.001" if positive else "0 or more"
        raise ConfigError(
            f"{option}={shown(value)} must be seconds or a timedelta, {least}, at most {_MAX_DURATION:.0f} (10 years)",
            option=option,
            value=value,
        )
    return float(number)


def has_zone(instant: datetime) -> bool:
    """Whether it is an instant, and not a time of day somewhere."""
    try:
        return instant.utcoffset() is not None
    except Exception:  # noqa: BLE001 - tzinfo classes are user code
        return False


def in_utc(instant: datetime) -> datetime:
    """An instant that has a zone, in UTC. Where its year would be 0 or 10000: the first or last one of the calendar."""
    try:
        return instant.astimezone(UTC)
    except OverflowError:
        return datetime.min.replace(tzinfo=UTC) if instant.year == 1 else datetime.max.replace(tzinfo=UTC)


_MIN_AGE: Final = 1.0
"""Seconds. Ages of ended rows are compared with the clock of the database once per interval."""


def age(option: str, value: Any) -> float:
    """Check how long something is kept, or how often that is checked: seconds or a timedelta, at least a second."""
    number = value.total_seconds() if isinstance(value, timedelta) else value
    if not is_seconds(number, least=_MIN_AGE):
        raise ConfigError(
            f"{option}={shown(value)} must be seconds or a timedelta, at least 1, at most "
            f"{_MAX_DURATION:.0f} (10 years)",
            option=option,
            value=value,
        )
    return float(number)


_MAX_LONG_POLL: Final = 1.0
"""Seconds. A longer interval saves nothing compared with `poll_interval`."""


def long_poll(option: str, value: Any) -> float:
    """Check the interval of the long poll in seconds; 0 or None turns it off, as 0."""
    found = 0.0 if value is None else duration(option, value, positive=False)
    if not (found == 0.0 or _MIN_INTERVAL <= found <= _MAX_LONG_POLL):
        raise ConfigError(
            f"{option}={shown(value)} must be seconds or a timedelta from 0.001 to 1, or 0 or None for no long poll",
            option=option,
            value=value,
        )
    return found


def count(option: str, value: Any, *, least: int = 0, most: int = 1_000_000) -> int:
    """Check a whole number within bounds."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ConfigError(
            f"{option}={shown(value)} must be a whole number from {least} to {most}",
            option=option,
            value=value,
        )
    return value


def name(option: str, value: Any) -> str:
    """Check a text that can be stored and printed."""
    if not isinstance(value, str) or not 0 < len(value) <= 200 or not value.isprintable():
        raise ConfigError(
            f"{option}={shown(value)} must be a printable text of 1 to 200 characters",
            option=option,
            value=value,
        )
    return value


def queue_name(option: str, value: Any) -> str:
    """Check the name of a queue: every name that a machine or an insert may use is valid."""
    if not isinstance(value, str) or not 0 < len(value) <= 255 or "\0" in value or not _is_unicode(value):
        raise ConfigError(
            f"{option}={shown(value)} must be a text of 1 to 255 characters without NUL or lone surrogates",
            option=option,
            value=value,
        )
    return value


def _is_unicode(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def several(option: str, value: Iterable[Any]) -> tuple[Any, ...]:
    """Check an iterable of values; a text is a single value."""
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise ConfigError(f"{option}={shown(value)} must be a list of values", option=option, value=value)
    return tuple(value)


def callables(option: str, value: Any) -> tuple[Callable[[Any], object], ...]:
    """Check an iterable of functions."""
    found = several(option, value)
    for each in found:
        if not callable(each):
            raise ConfigError(f"{option}: {shown(each)} is not callable", option=option, value=value)
    return found


def function(option: str, value: Any) -> Any:
    """Check that the value can be called."""
    if not callable(value):
        raise ConfigError(
            f"{option}={shown(value)} must be an async function of one argument", option=option, value=value
        )
    return value


def flag(option: str, value: Any) -> bool:
    """Check True or False."""
    if not isinstance(value, bool):
        raise ConfigError(f"{option}={shown(value)} must be True or False", option=option, value=value)
    return value


def choice(option: str, value: Any, *choices: str) -> str:
    """Check that the value is one of these words."""
    if value not in choices:
        words = " or ".join(map(repr, choices))
        raise ConfigError(f"{option}={shown(value)} must be {words}", option=option, value=value)
    return str(value)


# -- names

_Class = TypeVar("_Class", bound=type[attrs.AttrsInstance])


def refuse_unknown_options(cls: _Class) -> _Class:
    """Decorate a class of options, above `attrs.frozen`: an option that does not exist raises `ConfigError`.

    attrs alone raises TypeError and does not name the option that was probably meant.
    """
    known = [field.alias or field.name for field in attrs.fields(cls) if field.init]
    build = vars(cls)["__init__"]

    @wraps(build)
    def checked_init(self: object, *args: Any, **options: Any) -> None:
        check_names(options, known)
        build(self, *args, **options)

    type.__setattr__(cls, "__init__", checked_init)
    return cls


def check_names(options: Mapping[str, Any], known: Sequence[str]) -> None:
    """Raise `ConfigError` for the first option that is not known. Values that may contain a password are not shown."""
    for name, value in options.items():
        if name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"the options are {', '.join(known)}"
            text = "..." if any(map(_SECRET.search, [name, *near])) else shown(value)
            raise ConfigError(f"{name}={text}: there is no such option; {hint}", option=name, value=value)
