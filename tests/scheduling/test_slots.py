"""`Rule`: which instants are slots, also where clocks change. A slow model of it decides what is right."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import islice, pairwise
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from durable_actors import ConfigError
from durable_actors._scheduling.slots import EPOCH, TICK, Rule, check_rule, zone_of
from hypothesis import given, settings, strategies as st


def at(text: str) -> datetime:
    return datetime.fromisoformat(text).astimezone(UTC)


def first(rule: Rule, after: str, count: int) -> list[str]:
    """The first slots after an instant, as clocks show them."""
    begin = at(after)
    slots = islice(rule.between(begin, begin + timedelta(days=4000)), count)
    return [slot.astimezone(zone_of(rule.tz)).strftime("%m-%d %H:%M %z") for slot in slots]


BERLIN, NEW_YORK, LORD_HOWE = "Europe/Berlin", "America/New_York", "Australia/Lord_Howe"


@pytest.mark.parametrize(
    ("options", "after", "slots"),
    [
        # The clocks of Berlin go from 02:00 to 03:00 on 29 March 2026, and back on 25 October.
        ({"cron": "30 2 * * *", "tz": BERLIN}, "2026-03-28T02:00Z",
         ["03-29 03:00 +0200", "03-30 02:30 +0200"]),
        ({"cron": "30 2 * * *", "tz": BERLIN, "gap": "skip"}, "2026-03-28T02:00Z",
         ["03-30 02:30 +0200", "03-31 02:30 +0200"]),
        ({"cron": "0,15,30 2 * * *", "tz": BERLIN}, "2026-03-28T02:00Z",
         ["03-29 03:00 +0200", "03-30 02:00 +0200"]),
        ({"cron": "30 2 * * *", "tz": BERLIN}, "2026-10-24T02:00Z", ["10-25 02:30 +0200", "10-26 02:30 +0100"]),
        ({"cron": "30 2 * * *", "tz": BERLIN, "fold": "both"}, "2026-10-24T02:00Z",
         ["10-25 02:30 +0200", "10-25 02:30 +0100", "10-26 02:30 +0100"]),
        ({"cron": "0 3 * * *", "tz": BERLIN}, "2026-03-28T03:00Z", ["03-29 03:00 +0200", "03-30 03:00 +0200"]),
        ({"cron": "*/30 * * * *", "tz": BERLIN}, "2026-10-25T00:00Z",
         ["10-25 02:30 +0200", "10-25 02:00 +0100", "10-25 02:30 +0100", "10-25 03:00 +0100"]),
        ({"cron": "*/30 * * * *", "tz": BERLIN}, "2026-03-29T00:00Z",
         ["03-29 01:30 +0100", "03-29 03:00 +0200", "03-29 03:30 +0200"]),
        ({"cron": "30 * * * *", "tz": BERLIN}, "2026-03-29T00:00Z", ["03-29 01:30 +0100", "03-29 03:30 +0200"]),
        # New York: from 02:00 to 03:00 on 8 March 2026, and back on 1 November.
        ({"cron": "15 2 * * *", "tz": NEW_YORK}, "2026-03-07T08:00Z", ["03-08 03:00 -0400", "03-09 02:15 -0400"]),
        ({"cron": "30 1 * * *", "tz": NEW_YORK}, "2026-10-31T06:00Z", ["11-01 01:30 -0400", "11-02 01:30 -0500"]),
        ({"cron": "30 1 * * *", "tz": NEW_YORK, "fold": "both"}, "2026-10-31T06:00Z",
         ["11-01 01:30 -0400", "11-01 01:30 -0500", "11-02 01:30 -0500"]),
        # Lord Howe moves its clocks by half an hour: 02:00 to 02:30 on 4 October 2026, and back on 5 April.
        ({"cron": "15 2 * * *", "tz": LORD_HOWE}, "2026-10-02T20:00Z", ["10-04 02:30 +1100", "10-05 02:15 +1100"]),
        ({"cron": "45 1 * * *", "tz": LORD_HOWE, "fold": "both"}, "2026-04-03T16:00Z",
         ["04-05 01:45 +1100", "04-05 01:45 +1030", "04-06 01:45 +1030"]),
        ({"cron": "*/15 * * * *", "tz": LORD_HOWE}, "2026-04-04T14:30Z",
         ["04-05 01:45 +1100", "04-05 01:30 +1030", "04-05 01:45 +1030", "04-05 02:00 +1030"]),
        # Samoa had no 30 December 2011.
        ({"cron": "0 12 * * *", "tz": "Pacific/Apia"}, "2011-12-29T00:00Z",
         ["12-29 12:00 -1000", "12-31 00:00 +1400", "12-31 12:00 +1400"]),
        ({"cron": "@weekly", "tz": "UTC"}, "2026-11-18T00:00Z", ["11-22 00:00 +0000", "11-29 00:00 +0000"]),
        ({"cron": "0 0 29 2 *"}, "2026-01-01T00:00Z", ["02-29 00:00 +0000"]),
        ({"cron": "0 9 L * *"}, "2026-02-01T00:00Z", ["02-28 09:00 +0000", "03-31 09:00 +0000"]),
        ({"every": 5400.0}, "1970-01-01T00:00Z", ["01-01 01:30 +0000", "01-01 03:00 +0000"]),
        ({"every": 86400.0, "starts": at("2026-05-01T10:20Z")}, "2026-01-01T00:00Z",
         ["05-01 10:20 +0000", "05-02 10:20 +0000"]),
        ({"cron": "0 3 * * *", "starts": at("2026-05-01T03:00Z"), "ends": at("2026-05-02T03:00Z")},
         "2026-01-01T00:00Z", ["05-01 03:00 +0000", "05-02 03:00 +0000"]),
    ],
)  # fmt: skip
def test_slots(options: dict[str, Any], after: str, slots: list[str]) -> None:
    assert first(Rule(**options), after, len(slots)) == slots


def test_a_rule_ends() -> None:
    rule = Rule(every=60.0, ends=at("2026-05-01T00:01Z"))
    assert rule.next_after(at("2026-05-01T00:00:30Z")) == rule.ends
    assert rule.next_after(at("2026-05-01T00:01Z")) is None
    assert Rule(cron="0 0 1 1 *").next_after(datetime(9999, 6, 1, tzinfo=UTC)) is None


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "either cron= or every="),
        ({"cron": "* * * * *", "every": 5.0}, "either cron= or every="),
        ({"cron": "61 * * * *"}, "Bad minute"),
        ({"cron": "* * *"}, "five fields"),
        ({"cron": ""}, "five fields"),
        ({"cron": "0 0 30 2 *"}, "Bad day-of-month"),
        ({"cron": "0 0 31 2,4 1#5"}, None),
        (
            {"every": 3600.0, "starts": at("9999-12-31T23:59:59Z")},
            r"every=3600.0 has no slot .* starts=9999-12-31",
        ),
        ({"cron": "0 3 * * *", "starts": at("0001-01-01T00:00Z")}, "starts=0001-01-01.* is too early"),
        ({"cron": "0 3 * * *", "tz": "Europe/Atlantis"}, "not a time zone"),
        ({"cron": "0 3 * * *", "tz": "../../etc/passwd"}, "not a time zone"),
        ({"cron": "0 3 * * *", "starts": at("2026-05-02T00:00Z"), "ends": at("2026-05-01T00:00Z")}, "before"),
    ],
)
def test_checks(options: dict[str, Any], text: str | None) -> None:
    if text is None:
        check_rule(Rule(**options))
    else:
        with pytest.raises(ConfigError, match=text):
            check_rule(Rule(**options))


# -- a model: every minute of some days is looked at


ZONES = [BERLIN, NEW_YORK, LORD_HOWE, "UTC", "Asia/Kolkata", "America/St_Johns", "Africa/Casablanca"]
MINUTES = ["0", "30", "15,45", "*/20", "*", "7"]
DAYS = ["2026-03-07", "2026-03-28", "2026-04-04", "2026-10-03", "2026-10-24", "2026-10-31", "2026-06-01"]
HOURS = ["*", "2", "1-3", "*/2", "0,23", "3"]


def matches(field: str, value: int) -> bool:
    def one(part: str) -> bool:
        span, _, step = part.partition("/")
        low, _, high = span.partition("-")
        if span == "*":
            return value % int(step or 1) == 0
        return int(low) <= value <= int(high or low)

    return any(map(one, field.split(",")))


def model(rule: Rule, begin: datetime, end: datetime) -> set[datetime]:
    """All slots, found the slow way: from every minute that passes, and from every time of day that clocks show."""
    assert rule.cron is not None
    zone = ZoneInfo(rule.tz)
    minute, hour, *_ = rule.cron.split()
    repeats = minute.startswith("*") or hour.startswith("*")
    shown: dict[datetime, list[datetime]] = {}
    instant = begin - timedelta(hours=4)
    while instant <= end + timedelta(hours=4):
        shown.setdefault(instant.astimezone(zone).replace(tzinfo=None, fold=0), []).append(instant)
        instant += timedelta(minutes=1)
    found: set[datetime] = set()
    wall, last = min(shown), max(shown)
    while wall <= last:
        if matches(minute, wall.minute) and matches(hour, wall.hour):
            times = shown.get(wall, [])
            if repeats or rule.fold == "both":
                found.update(times)
            else:
                found.update(times[:1])
            if not times and not repeats and rule.gap == "shift":
                after = wall
                while after not in shown:
                    after += timedelta(minutes=1)
                found.add(shown[after][0])
        wall += timedelta(minutes=1)
    return {slot for slot in found if begin < slot <= end}


@settings(max_examples=30, deadline=None)
@given(
    minute=st.sampled_from(MINUTES), hour=st.sampled_from(HOURS), zone=st.sampled_from(ZONES),
    gap=st.sampled_from(["shift", "skip"]), fold=st.sampled_from(["first", "both"]),
    day=st.sampled_from(DAYS),
    offset=st.integers(0, 1439),
)  # fmt: skip
def test_the_model(minute: str, hour: str, zone: str, gap: Any, fold: Any, day: str, offset: int) -> None:
    rule = Rule(cron=f"{minute} {hour} * * *", tz=zone, gap=gap, fold=fold)
    begin = at(f"{day}T00:00Z") + timedelta(minutes=offset)
    end = begin + timedelta(days=2)
    assert list(rule.between(begin, end)) == sorted(model(rule, begin, end))


rules = st.one_of(
    st.builds(
        Rule,
        cron=st.builds("{} {} * * *".format, st.sampled_from(MINUTES), st.sampled_from(HOURS)),
        tz=st.sampled_from(ZONES),
    ),
    st.builds(Rule, every=st.sampled_from([1.0, 7.0, 90.0, 3600.0, 86_400.0, 1e6])),
)
instants = st.floats(0, 3e8).map(lambda each: datetime(2020, 1, 1, tzinfo=UTC) + timedelta(seconds=each))


@settings(max_examples=100, deadline=None)
@given(rule=rules, instant=instants, gap=st.floats(0, 5_000_000))
def test_the_laws(rule: Rule, instant: datetime, gap: float) -> None:
    """Slots ascend; the last one before an instant is the one after which it is the next."""
    slots = list(islice(rule.between(instant, datetime.max.replace(tzinfo=UTC)), 5))
    assert all(one < other for one, other in pairwise([instant, *slots]))
    assert rule.next_after(slots[0] - TICK) == slots[0]
    last = rule.last_at(slots[3], after=EPOCH)
    assert last == slots[3]
    assert rule.last_at(slots[3] - TICK, after=instant) == slots[2]
    assert rule.last_at(slots[0] - TICK, after=instant) is None
    assert rule.count(instant, slots[4], most=10) == 5
    assert rule.count(instant, slots[4], most=3) is None
    later = slots[0] + timedelta(seconds=gap)
    before = rule.last_at(later, after=instant)
    assert before is not None
    assert before <= later < (rule.next_after(before) or datetime.max.replace(tzinfo=UTC))
