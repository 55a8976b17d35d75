"""The parts that an option's declaration in config.py is made of, and `options_of`, which reads a declaration.

An option is one field of an attrs class::

    lease_ttl: float = attrs.field(
        default=60, converter=seconds, validator=INTERVAL, metadata=about("How long …", flag="--lease")
    )

A converter brings what callers may pass into one type. It must be a plain function: type checkers take the type of the
constructor's argument from it. A validator refuses what cannot work with an error that names option and value. The
reference pages and the command line are made of the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from typing import Any, Final, Literal, cast

import attrs

from durable_actors import _option_checks as check
from durable_actors._option_checks import Duration

# -- converters


def seconds(value: Duration) -> float:
    """A duration as seconds. What is not a duration stays as it is, so that the validator can name it."""
    number = value.total_seconds() if isinstance(value, timedelta) else value
    return float(number) if check.is_seconds(number) else cast("float", value)


def optional_seconds(value: Duration | None) -> Any:
    """As `seconds`. None stays: the value comes from other options."""
    return None if value is None else seconds(value)


def seconds_or_off(value: Duration | None) -> float:
    """As `seconds`. None is 0."""
    return 0.0 if value is None else seconds(value)


# -- validators

Kind = Literal["duration", "number", "flag", "text"]
"""How the command line reads a value."""


@attrs.frozen
class Check:
    """A validator: `accept(option, value)` raises a `ConfigError`."""

    kind: Kind
    words: str
    """The values that pass, for the reference."""
    accept: Callable[[str, Any], object]

    def __call__(self, _owner: object, field: attrs.Attribute[Any], value: Any) -> None:
        """Called by attrs after all converters."""
        self.accept(field.name, value)


def whole(least: int = 0, most: int = 1_000_000) -> Check:
    """A whole number within bounds."""
    return Check("number", f"{least} to {most}", partial(check.count, least=least, most=most))


def one_of(*choices: str) -> Check:
    """One of these words."""
    words = " or ".join(f'`"{choice}"`' for choice in choices)
    return Check("text", words, lambda option, value: check.choice(option, value, *choices))


def optional(inner: Check) -> Check:
    """None, or what the other check accepts."""

    def accept(option: str, value: Any) -> None:
        if value is not None:
            inner.accept(option, value)

    return Check(inner.kind, inner.words, accept)


INTERVAL: Final = Check("duration", "seconds, at least 0.001", check.duration)
TIMEOUT: Final = Check("duration", "seconds, 0 or more", partial(check.duration, positive=False))
LONG_POLL: Final = Check("duration", "seconds, 0.001 to 1; 0: off", check.long_poll)
FLAG: Final = Check("flag", "`True` or `False`", check.flag)
NAME: Final = Check("text", "1 to 200 printable characters", check.name)
SCHEMA: Final = Check(
    "text",
    "up to 63 of `a-z`, `0-9` and `_`, not starting with a digit or `pg_`",
    lambda _option, value: check.check_schema_name(value),
)


# -- descriptions


def about(meaning: str, *, flag: str = "", default: str = "", values: str = "") -> Mapping[str, Any]:
    """The metadata of an option.

    `meaning` is one sentence, with the names of other options in backquotes. `flag`: of `durable-actors serve`; without
    one the option is not on the command line. `default`: in words, where it is no constant. `values`: what it takes,
    where no `Check` says it.
    """
    return {"about": {"meaning": meaning, "flag": flag, "default_words": default, "values": values}}


@attrs.frozen(kw_only=True)
class Option:
    """One option, as the reference and the command line show it."""

    name: str
    kind: Kind
    values: str
    """What it takes, in words."""
    default: Any
    default_words: str
    meaning: str
    flag: str


def options_of(cls: type[attrs.AttrsInstance]) -> dict[str, Option]:
    """The options that a class declares, by name."""
    return {field.name: _option(field) for field in attrs.fields(cls)}


def _option(field: attrs.Attribute[Any]) -> Option:
    told: dict[str, str] = field.metadata["about"]
    found = field.validator if isinstance(field.validator, Check) else None
    return Option(
        name=field.name,
        kind=found.kind if found else "text",
        values=told["values"] or (found.words if found else ""),
        default=field.default,
        default_words=told["default_words"] or f"`{_literal(field.default)}`",
        meaning=told["meaning"],
        flag=told["flag"],
    )


def _literal(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)
