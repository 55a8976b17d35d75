"""Limits: what `Config(limits=...)` declares, and how steps say which of them they use. Pure.

A step uses rates (`rate_limit=`, each with a weight) and at most one slot (`slot=`). The column `rate_limit` of its row
has all of them, as one text: `text_of` writes it, `uses_of` and `durable.uses_of` read it.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Final, Literal, TypeAlias, cast

import attrs

from durable_actors._option_checks import refuse_unknown_options, shown
from durable_actors.errors import ConfigError, DurableError

MAX_KEY: Final = 255
MAX_WEIGHT: Final = 999_999_999
MAX_USES: Final = 16
"""Limits that one step may use at once."""
MAX_SLOTS: Final = 10_000
_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
_PART, _WEIGHT = "\x1f", "\x1e"


@refuse_unknown_options
@attrs.frozen
class Limit:
    """A limit that steps share over all nodes: a rate, a number of slots, or both.

    `Limit(rate=100, per=60)` lets 100 steps begin in a minute, `Limit(slots=20)` lets 20 run at a time.
    """

    rate: float | None = None
    """Steps that may begin in `per` seconds, in the long run; None: any number."""
    per: float = attrs.field(default=1.0, kw_only=True)
    """Seconds, or a timedelta."""
    burst: int | None = attrs.field(default=None, kw_only=True)
    """Steps that may begin at once after a rest. Default: `rate`, rounded up."""
    slots: int | None = attrs.field(default=None, kw_only=True)
    """Steps that may run at a time, for `slot=`; None: any number."""
    on_full: Literal["wait", "drop"] = attrs.field(default="wait", kw_only=True)
    """What becomes of a step that finds no token or no slot: it waits, or its instance ends as cancelled."""
    held: Literal["step", "instance"] = attrs.field(default="step", kw_only=True)
    """How long a slot is held: until its step ends, or until the instance ends or enters a step with another slot."""

    def __attrs_post_init__(self) -> None:
        rate: object = self.rate
        per: object = self.per
        if isinstance(per, timedelta):
            object.__setattr__(self, "per", per.total_seconds())
        if rate is None and self.slots is None:
            raise ConfigError("Limit() needs a rate, slots, or both", option="limits")
        for name, most in (("rate", 1e6), ("per", 1e8)):
            value: object = getattr(self, name)
            if value is None and name == "rate":
                continue
            if (
                isinstance(value, bool)
                or not isinstance(value, int | float)
                or not math.isfinite(value)
                or not 0 < value <= most
            ):
                raise ConfigError(
                    f"Limit({name}=...) must be a number above 0, at most {most:g}; it is {shown(value)}",
                    option="limits",
                    value=value,
                )
        for name, most in (("burst", 1_000_000), ("slots", MAX_SLOTS)):
            value = getattr(self, name)
            if value is not None and (
                isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most
            ):
                raise ConfigError(
                    f"Limit({name}=...) must be a whole number from 1 to {most}; it is {shown(value)}",
                    option="limits",
                    value=value,
                )
        self._check_policies()

    def _check_policies(self) -> None:
        if self.burst is not None and self.rate is None:
            raise ConfigError("Limit(burst=...) needs a rate", option="limits", value=self.burst)
        for name, allowed in (("on_full", ("wait", "drop")), ("held", ("step", "instance"))):
            chosen: object = getattr(self, name)
            if not isinstance(chosen, str) or chosen not in allowed:
                raise ConfigError(
                    f"Limit({name}=...) must be {allowed[0]!r} or {allowed[1]!r}; it is {shown(chosen)}",
                    option="limits",
                    value=chosen,
                )
        if self.held == "instance" and self.slots is None:
            raise ConfigError('Limit(held="instance") needs slots', option="limits", value=self.held)

    @property
    def interval(self) -> float | None:
        """Seconds for one token; None: there is no rate."""
        return None if self.rate is None else self.per / self.rate

    @property
    def depth(self) -> int:
        """How many tokens a key at rest has."""
        return self.burst if self.burst is not None else max(1, math.ceil(self.rate or 1))

    @property
    def declaration(self) -> dict[str, Any]:
        """As the database keeps it."""
        plain = {"on_full": "wait", "held": "step"}
        return {
            name: value
            for name, value in attrs.asdict(self).items()
            if value is not None and plain.get(name) != value
        }

    @property
    def revision(self) -> str:
        """Equal for equal declarations."""
        return hashlib.sha256(json.dumps(self.declaration, sort_keys=True).encode()).hexdigest()[:16]


@attrs.frozen
class Use:
    """One use of a limit by a step: `Use("openai.tpm", tenant, weight=1800)`."""

    name: str
    """The limit's name."""
    key: str | None = None
    """Each key has a rate and slots of its own; None: one for all."""
    weight: int = 1
    """How many tokens the step costs."""

    @property
    def target(self) -> str:
        """Name and key, as the database has them."""
        return self.name if self.key is None else f"{self.name}:{self.key}"


RateLimit: TypeAlias = "str | tuple[str, str] | Use | list[Use | str | tuple[str, str]] | None"
"""`"stripe"`, `("stripe", tenant)`, or a list of `Use`, names and pairs."""
Slot: TypeAlias = "str | tuple[str, str] | None"


def check_limit_name(name: object, *, what: str, error: type[DurableError]) -> str:
    """Return the name of a limit, or raise."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise error(
            f"{what}: the name of a limit has 1 to 100 letters, digits, dots, hyphens and underscores; "
            f"it is {shown(name)}"
        )
    return name


def _use(given: object, weight: int, *, what: str, error: type[DurableError]) -> Use:
    pair: Any = given
    if isinstance(given, tuple):
        if len(pair) != 2:
            raise error(f"{what} must be a name or a pair of name and key; it is {shown(pair)}")
        given = Use(pair[0], pair[1], weight)
    elif isinstance(given, str):
        given = Use(given, None, weight)
    if not isinstance(given, Use):
        raise error(f"{what} must be a name, a pair of name and key, or a list of Use; it is {shown(given)}")
    check_limit_name(given.name, what=what, error=error)
    key: object = given.key
    if key is not None and (
        not isinstance(key, str) or not 0 < len(key) <= MAX_KEY or any(c < " " for c in key)
    ):
        raise error(
            f"{what}: a key has 1 to {MAX_KEY} characters, none of them a control character; it is {shown(key)}"
        )
    cost: object = given.weight
    if isinstance(cost, bool) or not isinstance(cost, int) or not 1 <= cost <= MAX_WEIGHT:
        raise error(f"{what}: a weight is a whole number from 1 to {MAX_WEIGHT}; it is {shown(cost)}")
    return given


def text_of(rate_limit: object, weight: object, slot: object, *, error: type[DurableError]) -> str | None:
    """The column `rate_limit` of a step that uses these limits; None: none. Raises `error` if they cannot be used."""
    if weight != 1 and (rate_limit is None or isinstance(rate_limit, Use | list)):
        raise error(
            f"weight={shown(weight)} is that of a single rate_limit; several have their own: Use(name, weight=...)"
        )
    named: Any = rate_limit
    given: list[Any] = [] if rate_limit is None else named if isinstance(rate_limit, list) else [named]
    cost: Any = weight
    uses = [_use(each, cost, what="rate_limit", error=error) for each in given]
    if len(uses) > MAX_USES or len({use.target for use in uses}) < len(uses):
        raise error(
            f"rate_limit must name at most {MAX_USES} limits, none of them twice; it is {shown(given)}"
        )
    parts = [use.target + (f"{_WEIGHT}{use.weight}" if use.weight != 1 else "") for use in uses]
    if slot is not None:
        if isinstance(slot, Use):
            raise error(f"slot must be a name or a pair of name and key; it is {shown(slot)}")
        parts.append("!" + _use(slot, 1, what="slot", error=error).target)
    return _PART.join(parts) or None


@attrs.frozen
class Uses:
    """The limits that a claimed step uses."""

    rates: tuple[tuple[str, int], ...]
    """Name and key, and the weight that was charged."""
    slot: str | None
    """The slot that it has."""


def names_of(text: str | None) -> tuple[str, ...]:
    """The names of the limits in the column `rate_limit`, without keys: few, whatever the number of tenants."""
    if not text:
        return ()
    uses = uses_of(text)
    targets = [*(target for target, _ in uses.rates), *([] if uses.slot is None else [uses.slot])]
    return tuple(dict.fromkeys(target.partition(":")[0] for target in targets))


def uses_of(text: str, weight: int = 1) -> Uses:
    """Read the column `rate_limit`, as `durable.uses_of` does."""
    rates: list[tuple[str, int]] = []
    slot: str | None = None
    for part in text[:12000].split(_PART)[:32]:
        target, _, cost = part.partition(_WEIGHT)
        if target.startswith("!"):
            slot = slot or target.lstrip("!")[:360]
        else:
            own = int(cost) if re.fullmatch(r"[0-9]{1,9}", cost, re.ASCII) else weight
            rates.append((target[:360], max(own, 1)))
    return Uses(tuple(rates), slot)


def slot_of(text: str) -> str | None:
    """The slot in the column `rate_limit`, as `durable.slot_of` reads it."""
    return uses_of(text).slot if "!" in text else None


def limits_of(limits: object) -> dict[str, Limit]:
    """Check `Config(limits=...)`. Raises `ConfigError`."""
    if not isinstance(limits, Mapping):
        raise ConfigError(
            f"limits must be a dict of names and Limit; it is {shown(limits)}", option="limits", value=limits
        )
    given: dict[Any, Any] = dict(cast("Any", limits))
    for name, limit in given.items():
        check_limit_name(name, what="limits", error=ConfigError)
        if not isinstance(limit, Limit):
            raise ConfigError(
                f"limits[{name!r}] must be a Limit; it is {shown(limit)}", option="limits", value=limit
            )
    return given
