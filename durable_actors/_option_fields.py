"""The parts of an option's declaration in config.py, and `options_of`, which reads a declaration.

An option is one field of an attrs class::

    lease_ttl: float = attrs.field(
        default=60, converter=seconds, validator=INTERVAL, metadata=about("How long …", flag="--lease")
    )

A converter turns the values that callers may pass into one type. It must be a plain function: type checkers take the
type of the constructor's argument from it. A validator raises an error that names the option and the value. The
reference pages and the command line are generated from the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from types import MappingProxyType
from typing import Any, Final, Literal, cast

import attrs

from durable_actors import _option_checks as check
from durable_actors._option_checks import Duration
from durable_actors.errors import ConfigError

# -- converters


def seconds(value: Duration) -> float:
    """Convert a duration to seconds. Other values are unchanged, so that the validator can report them."""
    number = value.total_seconds() if isinstance(value, timedelta) else value
    return float(number) if check.is_seconds(number) else cast("float", value)


def optional_seconds(value: Duration | None) -> Any:
    """Like `seconds`, but None is unchanged: the value is derived from other options."""
    return None if value is None else seconds(value)


def seconds_or_off(value: Duration | None) -> float:
    """Like `seconds`, but None becomes 0."""
    return 0.0 if value is None else seconds(value)


def weights(value: Mapping[str, float]) -> Mapping[str, float]:
    """Check the weights of a fair queue's keys. Raises `ConfigError`."""
    given: Any = value  # untyped callers pass anything
    if not isinstance(given, Mapping):
        text = f"weights={check.shown(value)} must map values of fair_key to numbers"
        raise ConfigError(text, option="weights", value=value)
    pairs = cast("Mapping[Any, Any]", value).items()
    for key, weight in pairs:
        valid = isinstance(weight, int | float) and not isinstance(weight, bool) and 0.001 <= weight <= 1000
        if not isinstance(key, str) or not key or not valid:
            text = f"weights[{check.shown(key)}]={check.shown(weight)} must be a text and a number from 0.001 to 1000"
            raise ConfigError(text, option="weights", value=value)
    return MappingProxyType({key: float(weight) for key, weight in pairs})


# -- validators

Kind = Literal["duration", "number", "flag", "text"]
"""How the command line reads a value."""


@attrs.frozen
class Check:
    """A validator: `accept(option, value)` raises `ConfigError` for an invalid value."""

    kind: Kind
    words: str
    """The valid values, for the reference."""
    accept: Callable[[str, Any], object]

    def __call__(self, _owner: object, field: attrs.Attribute[Any], value: Any) -> None:
        """Check a value; attrs calls this after all converters."""
        self.accept(field.name, value)


def whole(least: int = 0, most: int = 1_000_000) -> Check:
    """Accept a whole number within bounds."""
    return Check("number", f"{least} to {most}", partial(check.count, least=least, most=most))


def one_of(*choices: str) -> Check:
    """Accept one of these words."""
    words = " or ".join(f'`"{choice}"`' for choice in choices)
    return Check("text", words, lambda option, value: check.choice(option, value, *choices))


def optional(inner: Check) -> Check:
    """Accept None, or what the other check accepts."""

    def accept(option: str, value: Any) -> None:
        if value is not None:
            inner.accept(option, value)

    return Check(inner.kind, inner.words, accept)


INTERVAL: Final = Check("duration", "seconds, at least 0.001", check.duration)
AGE: Final = Check("duration", "seconds, at least 1", check.age)
TIMEOUT: Final = Check("duration", "seconds, 0 or more", partial(check.duration, positive=False))
LONG_POLL: Final = Check("duration", "seconds, 0.001 to 1; 0: off", check.long_poll)
CALLABLE: Final = Check("text", "an async function of one argument", check.function)
FLAG: Final = Check("flag", "`True` or `False`", check.flag)
NAME: Final = Check("text", "1 to 200 printable characters", check.name)
SCHEMA: Final = Check(
    "text",
    "up to 63 of `a-z`, `0-9` and `_`, not starting with a digit or `pg_`",
    lambda _option, value: check.check_schema_name(value),
)


# -- descriptions


def about(meaning: str, *, flag: str = "", default: str = "", values: str = "") -> Mapping[str, Any]:
    """Return the metadata of an option.

    `meaning` is one sentence, with the names of other options in backquotes. `flag` is the option of `durable-actors
    serve`; without it the option is not on the command line. `default` describes a default that is not a constant.
    `values` describes the valid values of an option without a `Check`.
    """
    return {"about": {"meaning": meaning, "flag": flag, "default_words": default, "values": values}}


@attrs.frozen(kw_only=True)
class Option:
    """One option, as the reference and the command line show it."""

    name: str
    kind: Kind
    values: str
    """The valid values, in words."""
    default: Any
    default_words: str
    meaning: str
    flag: str


def options_of(cls: type[attrs.AttrsInstance]) -> dict[str, Option]:
    """Return the options that a class declares, by name."""
    return {field.name: _option(field) for field in attrs.fields(cls)}


def _option(field: attrs.Attribute[Any]) -> Option:
    metadata: dict[str, str] = field.metadata["about"]
    found = field.validator if isinstance(field.validator, Check) else None
    return Option(
        name=field.name,
        kind=found.kind if found else "text",
        values=metadata["values"] or (found.words if found else ""),
        default=field.default,
        default_words=metadata["default_words"] or f"`{_literal(field.default)}`",
        meaning=metadata["meaning"],
        flag=metadata["flag"],
    )


def _literal(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)
