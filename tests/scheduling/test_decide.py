"""What a schedule does: missed slots, overlap, pauses, jitter, changes. All by tables and laws, without a database."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import attrs
import pytest
from durable_actors._scheduling.decide import (
    MOST_CAUGHT_UP,
    Fire,
    Skip,
    Standing,
    Turn,
    decide,
    fire_time,
    first_turn,
    keep_seconds,
    realigned,
    redefined,
    resumed,
)
from durable_actors._scheduling.revisions import KEPT, may_declare, with_revision
from durable_actors._scheduling.schedule import Definition
from hypothesis import given, settings, strategies as st

NOON = datetime(2026, 6, 1, 12, tzinfo=UTC)
HOUR = timedelta(hours=1)


def hourly(**options: Any) -> Definition:
    return Definition(cron="0 * * * *", **options)


def stands(definition: Definition, slot: datetime | None = NOON, **fields: Any) -> Standing:
    return Standing("s", definition, slot, **fields)


def turn(standing: Standing, now: datetime) -> Turn:
    found = decide(standing, now)
    assert found is not None
    return found


def hours(*fires: Fire) -> list[int]:
    return [each.slot.hour for each in fires]


def test_nothing_is_due() -> None:
    assert decide(stands(hourly()), NOON - timedelta(microseconds=1)) is None
    assert decide(stands(hourly(), None), NOON) is None
    assert (
        decide(stands(hourly(overlap="buffer_one"), NOON, buffered=NOON - HOUR, busy=True), NOON - HOUR)
        is None
    )


def test_a_slot_that_is_due() -> None:
    found = turn(stands(hourly()), NOON + timedelta(seconds=1))
    assert found == Turn(NOON + HOUR, NOON + HOUR, NOON, None, None, (Fire(NOON),), ())


@pytest.mark.parametrize(
    ("missed", "late", "fired", "skipped"),
    [
        ("last", timedelta(hours=5, minutes=10), [(17, "caught_up")], (12, 16, 5)),
        ("last", timedelta(hours=5), [(17, "slot")], (12, 16, 5)),
        ("last", timedelta(minutes=10), [(12, "caught_up")], None),
        ("skip", timedelta(minutes=10), [], (12, 12, 1)),
        ("skip", timedelta(seconds=60), [(12, "slot")], None),
        ("skip", timedelta(hours=3, seconds=5), [(15, "slot")], (12, 14, 3)),
        ("skip", timedelta(hours=3, minutes=5), [], (12, 15, 4)),
        (
            "all",
            timedelta(hours=3),
            [(12, "caught_up"), (13, "caught_up"), (14, "caught_up"), (15, "slot")],
            None,
        ),
    ],
)
def test_missed_slots(missed: Any, late: timedelta, fired: list[Any], skipped: Any) -> None:
    found = turn(stands(hourly(missed=missed)), NOON + late)
    assert [(each.slot.hour, each.kind) for each in found.fires] == fired
    records = [(each.first.hour, each.last.hour, each.count) for each in found.skips]
    assert records == ([] if skipped is None else [skipped])
    assert found.next_slot is not None
    assert NOON + late < found.next_slot <= NOON + late + HOUR


@pytest.mark.parametrize(("missed", "fires"), [("last", 1), ("skip", 0), ("all", 24)])
def test_a_year_off(missed: Any, fires: int) -> None:
    """Only what is within a day is made up for. The rest is one record, which costs no year of counting."""
    now = NOON + timedelta(days=365, minutes=30)
    found = turn(stands(hourly(missed=missed)), now)
    assert len(found.fires) == fires
    [record] = found.skips
    assert (record.first, record.count, record.reason) == (NOON, None, "missed")
    newest = now.replace(minute=0)
    assert record.last == newest - HOUR * fires
    assert found.next_slot == newest + HOUR


def test_not_more_than_a_hundred_are_made_up_for() -> None:
    found = turn(stands(Definition(every=1.0, missed="all")), NOON + timedelta(hours=2))
    assert len(found.fires) == MOST_CAUGHT_UP
    assert found.fires[-1].slot == NOON + timedelta(hours=2)
    assert found.skips[0].last == found.fires[0].slot - timedelta(seconds=1)


def test_nothing_is_made_up_for_without_catch_up() -> None:
    found = turn(stands(hourly(catch_up=0.0)), NOON + timedelta(minutes=30))
    assert (found.fires, found.skips[0].first) == ((), NOON)
    assert turn(stands(hourly(catch_up=0.0)), NOON + timedelta(seconds=30)).fires == (Fire(NOON),)


def test_the_clock_goes_back() -> None:
    """An hour of slots is not fired again: the next slot comes from the last one, not from the clock."""
    standing = stands(hourly(), NOON + HOUR, last_slot=NOON)
    assert decide(standing, NOON - HOUR) is None
    assert decide(standing, NOON) is None
    assert hours(*turn(standing, NOON + HOUR).fires) == [13]


@pytest.mark.parametrize(
    ("overlap", "busy", "held", "fired", "buffered", "skipped"),
    [
        ("skip", True, None, [15], None, [(12, "missed")]),  # the unique key decides
        ("allow", True, None, [15], None, [(12, "missed")]),
        ("buffer_one", False, None, [15], None, [(12, "missed")]),
        ("buffer_one", True, None, [], 15, [(12, "missed"), (15, "buffered")]),
        ("buffer_one", True, 11, [], 11, [(12, "missed"), (15, "overlap")]),
        ("buffer_one", False, 11, [11], 15, [(12, "missed"), (15, "buffered")]),
        ("cancel_running", False, None, [15], None, [(12, "missed")]),
        ("cancel_running", True, None, [], 15, [(12, "missed"), (15, "buffered")]),
        ("cancel_running", True, 11, [], 15, [(12, "missed"), (11, "overlap"), (15, "buffered")]),
        ("cancel_running", False, 11, [15], None, [(12, "missed"), (11, "overlap")]),
    ],
)
def test_overlap(overlap: Any, busy: bool, held: int | None, fired: Any, buffered: Any, skipped: Any) -> None:
    slot = None if held is None else NOON.replace(hour=held)
    found = turn(stands(hourly(overlap=overlap), NOON, busy=busy, buffered=slot), NOON + 3 * HOUR)
    assert hours(*found.fires) == fired
    assert (found.buffered and found.buffered.hour) == buffered
    assert [(each.first.hour, each.reason) for each in found.skips] == skipped
    assert found.cancels == (overlap == "cancel_running" and busy)


def test_a_slot_that_waited_fires_once_the_instance_has_ended() -> None:
    standing = stands(hourly(overlap="buffer_one"), NOON, buffered=NOON - HOUR)
    found = turn(standing, NOON - timedelta(minutes=30))
    assert (found.fires, found.buffered, found.next_slot) == ((Fire(NOON - HOUR, "caught_up"),), None, NOON)


def test_remaining() -> None:
    found = turn(stands(hourly(remaining=3), remaining=2), NOON)
    assert (found.remaining, found.next_slot) == (1, NOON + HOUR)
    last = turn(stands(hourly(remaining=3), remaining=1), NOON)
    assert (last.remaining, last.next_slot, last.fire_at) == (0, None, None)
    several = turn(stands(hourly(remaining=3, missed="all"), remaining=2), NOON + 5 * HOUR)
    assert (hours(*several.fires), several.next_slot) == ([12, 13], None)


def test_jitter_is_the_same_for_a_slot_and_ends_before_the_next() -> None:
    definition = Definition(every=60.0, jitter=3600.0)
    times = [fire_time("s", definition, NOON + timedelta(minutes=each)) for each in range(100)]
    assert times == sorted(times)
    delays = {(each - NOON).total_seconds() % 60 for each in times}
    assert len(delays) > 90
    assert max(delays) > 50
    assert min(delays) < 10
    assert fire_time("other", definition, NOON) != times[0] == fire_time("s", definition, NOON)
    assert decide(stands(definition), times[0] - timedelta(microseconds=1)) is None
    found = turn(stands(definition), times[0])
    assert (found.fires, found.fire_at) == ((Fire(NOON),), times[1])


def test_a_pause_is_no_reason_to_catch_up() -> None:
    standing = stands(hourly(missed="all"))
    found = resumed(standing, NOON - timedelta(minutes=1), NOON + timedelta(hours=3, minutes=1))
    assert found.fires == ()
    assert found.skips == (Skip(NOON, NOON + 3 * HOUR, 4, "paused"),)
    assert (found.next_slot, found.last_slot) == (NOON + 4 * HOUR, NOON + 3 * HOUR)
    quiet = resumed(standing, NOON - HOUR, NOON - timedelta(minutes=1))
    assert (quiet.skips, quiet.next_slot) == ((), NOON)


def test_slots_that_were_missed_before_a_pause() -> None:
    found = resumed(stands(hourly()), NOON + timedelta(minutes=90), NOON + timedelta(hours=3, minutes=1))
    assert [(each.first.hour, each.last.hour, each.reason) for each in found.skips] == [
        (12, 13, "missed"),
        (14, 15, "paused"),
    ]


def test_another_definition_with_the_same_times_keeps_what_is_due() -> None:
    """A deploy at noon does not lose noon."""
    found = redefined(stands(hourly()), hourly(overlap="allow"), NOON + timedelta(seconds=5))
    assert (found.next_slot, found.skips) == (NOON, ())
    changed = redefined(stands(hourly()), Definition(cron="30 * * * *"), NOON + timedelta(seconds=5))
    assert changed.next_slot == NOON + timedelta(minutes=30)
    assert [(each.first, each.reason) for each in changed.skips] == [(NOON, "changed")]
    again = redefined(stands(hourly(remaining=1), None, remaining=0), hourly(remaining=5), NOON)
    assert (again.next_slot, again.remaining) == (NOON + HOUR, 5)


def test_time_zones_that_have_changed() -> None:
    definition = Definition(cron="0 3 * * *", tz="Europe/Berlin")
    slot = definition.next_after(NOON)
    assert slot is not None
    assert realigned(stands(definition, slot), NOON) is None
    found = realigned(stands(definition, slot + HOUR), NOON)
    assert found is not None
    assert (found.next_slot, found.fires) == (slot, ())
    assert realigned(stands(definition, NOON - HOUR), NOON) is None  # it is due, and fires
    assert realigned(stands(definition, slot, last_slot=slot - HOUR * 24), NOON) is None


def test_the_first_slot_comes_after_now() -> None:
    assert first_turn("s", hourly(), NOON).next_slot == NOON + HOUR
    ended = first_turn("s", hourly(ends=NOON), NOON)
    assert (ended.next_slot, ended.fire_at) == (None, None)


@pytest.mark.parametrize(
    ("definition", "days"),
    [(Definition(every=1.0), 1), (hourly(), 1000 / 24), (Definition(cron="@monthly"), 400)],
)
def test_how_long_records_are_kept(definition: Definition, days: float) -> None:
    assert keep_seconds(definition, NOON) == pytest.approx(days * 86_400)


definitions = st.builds(
    Definition,
    every=st.sampled_from([60.0, 600.0, 3600.0, 86_400.0]),
    missed=st.sampled_from(["last", "skip", "all"]),
    catch_up=st.sampled_from([0.0, 3600.0, 86_400.0]),
    jitter=st.sampled_from([0.0, 30.0, 7200.0]),
    overlap=st.sampled_from(["skip", "allow", "buffer_one", "cancel_running"]),
)


@settings(max_examples=150, deadline=None)
@given(
    definition=definitions,
    looks=st.lists(st.tuples(st.floats(-7200, 100_000), st.booleans(), st.booleans()), max_size=12),
)
def test_every_slot_is_accounted_for_once(
    definition: Definition, looks: list[tuple[float, bool, bool]]
) -> None:
    """Whatever the times at which nodes look, also if clocks go back, and whatever is running or paused then."""
    now, latest, start = NOON, NOON, first_turn("s", definition, NOON)
    standing = Standing("s", definition, start.next_slot)
    fired: list[datetime] = []
    skipped: list[tuple[datetime, datetime]] = []
    waited: set[datetime] = set()
    for seconds, busy, pause in looks:
        before, now = now, now + timedelta(seconds=seconds)
        latest = max(latest, now)
        standing = attrs.evolve(standing, busy=busy)
        found = resumed(standing, before, now) if pause else decide(standing, now)
        if found is None:
            continue
        fired += [each.slot for each in found.fires]
        skipped += [(each.first, each.last) for each in found.skips if each.reason != "buffered"]
        waited.update(each.first for each in found.skips if each.reason == "buffered")
        assert all(
            each.slot <= latest for each in found.fires
        )  # one that waited may fire after the clock went back
        standing = Standing(
            "s", definition, found.next_slot, found.last_slot, found.remaining, found.buffered, busy
        )
    assert len(set(fired)) == len(fired)
    end = standing.next_slot
    assert end is not None
    for slot in definition.between(NOON, end - timedelta(microseconds=1)):
        inside = [each for each in skipped if each[0] <= slot <= each[1]]
        waits = slot == standing.buffered
        assert (slot in fired) + len(inside) + waits == 1, slot
    assert waited >= ({standing.buffered} if standing.buffered else set())


# -- revisions


@pytest.mark.parametrize(
    ("mine", "seen", "live", "may"),
    [
        ("a", [], [], True),  # nobody has defined it
        ("a", ["a"], ["a"], False),  # it counts already
        ("b", ["a"], ["a", "b"], True),  # new code
        ("a", ["a", "b"], ["a", "b"], False),  # an old node restarts while the deploy rolls
        ("a", ["a", "b"], ["a"], True),  # a rollback is complete
        ("a", ["a", "b", "c"], ["a", "b"], False),  # a newer one than mine lives, though not the newest
        ("b", ["a", "b", "c"], ["a", "b"], True),
    ],
)
def test_whose_definition_counts(mine: str, seen: list[str], live: list[str], may: bool) -> None:
    assert may_declare(mine, seen, live) is may


def test_revisions_are_kept_in_order() -> None:
    assert with_revision("a", ["a", "b"]) == ["b", "a"]
    many = [str(each) for each in range(100)]
    assert with_revision("x", many) == [*many[-KEPT + 1 :], "x"]


@settings(max_examples=100)
@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from("abc")), max_size=30))
def test_two_versions_do_not_fight(steps: list[tuple[int, str]]) -> None:
    """While the set of live nodes stays, at most one change of the current revision per new one, then rest."""
    nodes: dict[int, str] = {}
    seen: list[str] = []
    for node, revision in steps:
        nodes[node] = revision
        for _ in range(3):  # every node looks, again and again
            changes = 0
            for mine in nodes.values():
                if may_declare(mine, seen, set(nodes.values())):
                    seen, changes = with_revision(mine, seen), changes + 1
        assert changes == 0
        assert seen[-1] in nodes.values()


def test_a_schedule_that_ends_while_it_catches_up_ends_with_its_last_slot():
    """Those after it are none: they have no record, and are not decided."""
    first = datetime(2026, 1, 1, tzinfo=UTC)
    definition = Definition(every=1.0, missed="all", remaining=2)
    standing = Standing("clock", definition, first, remaining=2)
    turn = decide(standing, first + timedelta(seconds=4))
    assert turn is not None
    assert [fire.slot for fire in turn.fires] == [first, first + timedelta(seconds=1)]
    assert (turn.last_slot, turn.next_slot, turn.remaining) == (first + timedelta(seconds=1), None, 0)
