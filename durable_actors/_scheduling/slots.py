"""`Rule`: the slots of a schedule, as instants. Pure.

A slot is an instant at which a schedule is to fire. `every` counts elapsed seconds from an anchor, so clocks that
change do not matter. A cron expression names times of day in a time zone, which some days lack or have twice:

* At fixed times (neither the minutes nor the hours begin with `*`), a time that the day lacks moves to the end of the
  gap (`gap="shift"`) or has no slot (`"skip"`); a time that the day has twice is a slot at its first occurrence
  (`fold="first"`) or at both (`"both"`). These are the rules of Debian's cron.
* An expression whose minutes or hours begin with `*` repeats in elapsed time: nothing is moved, and a repeated hour has
  its slots twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import Final, Literal
from zoneinfo import ZoneInfo

import attrs
from cronsim import CronSim, CronSimError

from durable_actors.errors import ConfigError

EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
TICK: Final = timedelta(microseconds=1)
FIRST_YEAR: Final = 1900
"""Slots before it may not be computed: a day earlier may be before the first day that Python knows."""
MACROS: Final = {
    "@hourly": "0 * * * *",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *",
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
}
LEAST_PERIOD: Final = 1.0
"""Seconds."""
_NEAR: Final = timedelta(hours=26)
"""A change of the clocks further away does not concern a slot: no zone has ever moved by more than a day."""
_BACK: Final = (
    timedelta(minutes=1),
    timedelta(hours=1),
    timedelta(days=1),
    timedelta(days=32),
    timedelta(days=366),
    timedelta(days=366 * 9),
)
"""How far back the last slot before an instant is looked for: in windows that have few slots."""


@attrs.frozen(kw_only=True)
class Rule:
    """When: a cron expression in a time zone, or a period in seconds; perhaps from and until an instant."""

    cron: str | None = None
    every: float | None = None
    tz: str = "UTC"
    gap: Literal["shift", "skip"] = "shift"
    fold: Literal["first", "both"] = "first"
    starts: datetime | None = None
    """The first slot of `every`; no slot of a cron expression comes before it."""
    ends: datetime | None = None
    """No slot comes after it."""

    def next_after(self, instant: datetime) -> datetime | None:
        """The first slot after an instant, in UTC; None if there is none within fifty years."""
        if self.starts is not None and instant < self.starts:
            instant = self.starts - TICK
        try:
            found = self._every_after(instant) if self.every is not None else self._cron_after(instant)
        except OverflowError:  # the calendar ends with the year 9999
            return None
        return found if found is not None and (self.ends is None or found <= self.ends) else None

    def between(self, after: datetime, until: datetime) -> Iterator[datetime]:
        """The slots after an instant, up to another one."""
        slot = self.next_after(after)
        while slot is not None and slot <= until:
            yield slot
            slot = self.next_after(slot)

    def last_at(self, instant: datetime, *, after: datetime) -> datetime | None:
        """The last slot up to an instant, if it comes after another one. Costs a few hundred slots at most."""
        for window in _BACK:
            begin = max(instant - window, after)
            found = max(self.between(begin, instant), default=None)
            if found is not None or begin == after:
                return found
        return None

    def count(self, after: datetime, until: datetime, *, most: int) -> int | None:
        """How many slots come after an instant, up to another one; None: more than `most`."""
        number = 0
        for number, _ in enumerate(self.between(after, until), 1):
            if number > most:
                return None
        return number

    def _every_after(self, instant: datetime) -> datetime:
        assert self.every is not None
        anchor, period = self.starts or EPOCH, timedelta(seconds=self.every)
        return anchor + ((instant - anchor) // period + 1) * period

    def _cron_after(self, instant: datetime) -> datetime | None:
        """The least of the instants that the times of day stand for, and that come after this one.

        The times of day are looked at in their order. Where clocks go back, a later one may be an earlier instant, so
        the look begins that much before, and ends when no later time of day can be an earlier instant.
        """
        assert self.cron is not None
        zone = zone_of(self.tz)
        offsets = [_offset(near.astimezone(zone)) for near in (instant - _NEAR, instant, instant + _NEAR)]
        most = max(offsets)
        wall = instant.astimezone(zone).replace(tzinfo=None, fold=0)
        best: datetime | None = None
        for time in CronSim(_expression(self.cron), wall - (most - min(offsets))):
            for found in self._instants(time, zone):
                if found > instant and (best is None or found < best):
                    best = found
            most = max(most, _offset(time.replace(tzinfo=zone)), _offset(time.replace(tzinfo=zone, fold=1)))
            if best is not None and (time - most).replace(tzinfo=UTC) > best:
                break
        return best

    def _instants(self, time: datetime, zone: ZoneInfo) -> list[datetime]:
        """The instants that a time of day stands for: none, one or two."""
        first = time.replace(tzinfo=zone).astimezone(UTC)
        second = time.replace(tzinfo=zone, fold=1).astimezone(UTC)
        repeats = _repeats(self.cron or "")
        if first == second:
            return [first]
        if first > second:  # the day lacks it: the clocks go forward between the two
            return [] if repeats or self.gap == "skip" else [_change(second, first, zone)]
        return [first, second] if repeats or self.fold == "both" else [first]


def check_rule(rule: Rule) -> None:
    """Raise `ConfigError` for an expression or a zone that nobody knows, or a rule without a slot."""
    if (rule.cron is None) == (rule.every is None):
        raise ConfigError("a schedule has either cron= or every=", option="cron", value=rule.cron)
    if rule.every is not None and rule.every < LEAST_PERIOD:
        raise ConfigError(f"every={rule.every:g} is less than a second", option="every", value=rule.every)
    try:
        zone_of(rule.tz)
    except Exception as error:  # noqa: BLE001 - zoneinfo raises what opening a file of that name raises
        raise ConfigError(
            f"tz={rule.tz!r} is not a time zone that this system knows, as 'Europe/Berlin' ({error}); "
            "the package tzdata has them for systems that have none",
            option="tz",
            value=rule.tz,
        ) from None
    if rule.cron is not None:
        try:
            CronSim(_expression(rule.cron), EPOCH.replace(tzinfo=None))
        except CronSimError as error:
            raise ConfigError(
                f"cron={rule.cron!r} is not a cron expression ({error}): it has five fields, minute, hour, day, month "
                "and day of the week, as '0 3 * * *'",
                option="cron",
                value=rule.cron,
            ) from None
    if rule.starts is not None and rule.ends is not None and rule.ends < rule.starts:
        raise ConfigError("ends= comes before starts=", option="ends", value=rule.ends)
    if rule.ends is None and rule.next_after(rule.starts or datetime(2000, 1, 1, tzinfo=UTC)) is None:
        if rule.starts is not None and rule.starts.year < FIRST_YEAR:
            raise ConfigError(
                f"starts={rule.starts.isoformat()} is too early: use a time from the year {FIRST_YEAR} on",
                option="starts",
                value=rule.starts,
            )
        option, value = ("cron", rule.cron) if rule.cron is not None else ("every", rule.every)
        since = "" if rule.starts is None else f" after starts={rule.starts.isoformat()}"
        raise ConfigError(f"{option}={value!r} has no slot in fifty years{since}", option=option, value=value)


@cache
def zone_of(name: str) -> ZoneInfo:
    """The time zone of this name. Raises what zoneinfo raises."""
    return ZoneInfo(name)


def _expression(cron: str) -> str:
    return MACROS.get(cron.strip().lower(), cron)


def _repeats(cron: str) -> bool:
    """Whether its minutes or hours begin with a star, so that it repeats in elapsed time."""
    fields = _expression(cron).split()[-5:]
    return fields[0].startswith("*") or fields[1].startswith("*")


def _offset(time: datetime) -> timedelta:
    return time.utcoffset() or timedelta()


def _change(before: datetime, after: datetime, zone: ZoneInfo) -> datetime:
    """The instant between the two at which the clocks change, to the second."""
    old = _offset(before.astimezone(zone))
    low, high = int(before.timestamp()), int(after.timestamp())
    while high - low > 1:
        middle = (low + high) // 2
        if _offset(datetime.fromtimestamp(middle, zone)) == old:
            low = middle
        else:
            high = middle
    return datetime.fromtimestamp(high, UTC)
