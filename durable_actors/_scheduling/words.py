"""When a schedule fires, in words: "every day at 03:00, Europe/Berlin". Pure."""

from __future__ import annotations

import re
from typing import Final

from durable_actors._scheduling.slots import MACROS, Rule
from durable_actors._wording import seconds

_DAYS: Final = ("Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday")
_SHORT: Final = {name[:3].upper(): number for number, name in enumerate(_DAYS)}
_UNITS: Final = (("day", 86_400.0), ("hour", 3600.0), ("minute", 60.0), ("second", 1.0))


def rule_words(rule: Rule) -> str | None:
    """The rule in words; None for cron expressions that are better read as they are."""
    if rule.cron is None:
        return None if rule.every is None else _period(rule.every)
    found = _cron(MACROS.get(rule.cron.strip().lower(), rule.cron).split())
    return None if found is None else f"{found}, {rule.tz}"


def _period(every: float) -> str:
    for unit, size in _UNITS:
        if every >= size and every % size == 0:
            return _every(int(every // size), unit)
    return f"every {seconds(every)}"


def _every(count: int, unit: str) -> str:
    return f"every {unit}" if count == 1 else f"every {count} {unit}s"


def _cron(fields: list[str]) -> str | None:
    if len(fields) != 5 or fields[3] != "*":
        return None
    minute, hour, day, _, weekday = fields
    times = _times(minute, hour)
    if times is not None and day == "*" and weekday == "*":
        return times if times.startswith("every") else f"every day at {times}"
    if times is None or times.startswith("every"):
        return None
    if day == "*" and (named := _weekdays(weekday)) is not None:
        return f"{named} at {times}"
    if weekday == "*" and re.fullmatch(r"[0-9]{1,2}", day, re.ASCII):
        return f"on day {int(day)} of every month at {times}"
    return None


def _times(minute: str, hour: str) -> str | None:
    """A time of day, or "every …"; None for what is neither."""
    if minute == "*" and hour == "*":
        return "every minute"
    if hour == "*" and (step := re.fullmatch(r"\*/([0-9]{1,2})", minute, re.ASCII)):
        return _every(int(step[1]), "minute") if int(step[1]) and 60 % int(step[1]) == 0 else None
    if not re.fullmatch(r"[0-9]{1,2}", minute, re.ASCII):
        return None
    if hour == "*":
        return "every hour" if int(minute) == 0 else f"every hour at minute {int(minute)}"
    if re.fullmatch(r"[0-9]{1,2}", hour, re.ASCII):
        return f"{int(hour):02}:{int(minute):02}"
    return None


def _weekdays(field: str) -> str | None:
    if field.upper() in {"1-5", "MON-FRI"}:
        return "Monday to Friday"
    named: list[str] = []
    for each in field.upper().split(","):
        number = _SHORT.get(each, int(each) % 7 if re.fullmatch(r"[0-7]", each, re.ASCII) else None)
        if number is None:
            return None
        named.append(_DAYS[number])
    return f"every {' and '.join([', '.join(named[:-1]), named[-1]] if len(named) > 1 else named)}"
