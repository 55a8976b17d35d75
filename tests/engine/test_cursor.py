"""Where picks begin, and how often rows and queues are looked at again. Pure."""

from __future__ import annotations

import pytest
from durable_actors._engine.cursor import LOOK_AGAIN, LOOK_MAX, RESET_MAX, RESET_MIN, PickCursor
from durable_actors._engine.demand import shape_pause
from durable_actors._store.claim import PickFrom, QueueShape, read_pick
from durable_actors._store.rows import Picked, Seen

KNOWN = frozenset({"m/1"})


def left(number: int) -> Picked:
    return Picked([], [Seen(number, 0, "2026-01-01 00:00:00+00", "l")], {})


def at(priority: int, instant: str, number: int) -> Picked:
    return Picked([], [], {priority: (instant, number)})


def begin(cursor: PickCursor, now: float = 0.0) -> PickFrom:
    return cursor.begin(now, limit=10, known=KNOWN)


def test_a_pick_begins_where_the_last_one_ended():
    cursor = PickCursor()
    assert begin(cursor) == PickFrom([0], ["-infinity"], [0], [], [])
    cursor.advance(at(0, "2026-01-01 00:00:00.5+00", 7), now=0.0, took=0.001)
    found = begin(cursor, 0.01)
    assert (found.eligible_ats, found.ids) == (["2026-01-01 00:00:00.5+00"], [7])


def test_the_cursor_does_not_go_back_while_it_stands():
    """A row that was looked at by its id lies before it; fractions of a second come in any length."""
    cursor = PickCursor()
    begin(cursor)
    cursor.advance(at(0, "2026-01-01 00:00:00.25+00", 7), now=0.0, took=0.001)
    for earlier in (
        ("2026-01-01 00:00:00.2+00", 9),
        ("2026-01-01 00:00:00+00", 9),
        ("2026-01-01 00:00:00.25+00", 6),
    ):
        begin(cursor, 0.01)
        cursor.advance(at(0, *earlier), now=0.01, took=0.001)
        assert begin(cursor, 0.01).ids == [7]


@pytest.mark.parametrize(("took", "pause"), [(0.0, RESET_MIN), (0.02, 0.4), (9.0, RESET_MAX)])
def test_it_begins_at_the_head_again_as_often_as_that_is_cheap(took: float, pause: float):
    cursor = PickCursor()
    begin(cursor)
    cursor.advance(at(0, "2026-01-01 00:00:00+00", 7), now=5.0, took=took)
    assert begin(cursor, 5.0 + pause - 0.01).ids == [7]
    assert cursor.next_look(5.0) == pytest.approx(pause)
    assert begin(cursor, 5.0 + pause).ids == [0]


def test_a_row_that_stays_where_it_is_is_looked_at_ever_less():
    """Its elder sibling may wait in a queue that is full: 200 picks a second would not bring it on."""
    cursor, now, pauses = PickCursor(), 100.0, list[float]()
    for _ in range(8):
        begin(cursor, now)
        cursor.advance(left(7), now=now, took=0.0)
        pauses.append(cursor.next_look(now) or 0.0)
        now += pauses[-1]
    assert pauses[:3] == pytest.approx([LOOK_AGAIN, 2 * LOOK_AGAIN, 4 * LOOK_AGAIN])
    assert pauses[-1] == pytest.approx(LOOK_MAX)
    assert begin(cursor, now).extras == [7]
    cursor.advance(Picked([], [], {}), now=now, took=0.0)  # somebody has it
    begin(cursor, now)
    cursor.advance(left(7), now=now, took=0.0)
    assert cursor.next_look(now) == pytest.approx(LOOK_AGAIN), "another story"


def test_a_hint_ends_the_pause():
    cursor = PickCursor()
    for _ in range(5):
        begin(cursor)
        cursor.advance(left(7), now=0.0, took=0.0)
        cursor.hint(7)
    assert begin(cursor).extras == [7]
    cursor.advance(left(7), now=0.0, took=0.0)
    assert cursor.next_look(0.0) == pytest.approx(LOOK_AGAIN)


def test_what_the_queue_has_is_told_and_missed_once():
    cursor = PickCursor()
    shape = QueueShape((3, 5), None, ("m/1", "m/2"), None)
    assert cursor.learn(shape, known=KNOWN)
    assert not cursor.learn(shape, known=KNOWN)
    found = begin(cursor)
    assert (found.priorities, found.shelved) == ([0, 3, 5], ["m/1"])
    cursor.hint(priority=-1)
    assert begin(cursor).priorities == [-1, 0, 3, 5]


def test_a_look_at_the_shape_costs_a_twentieth_at_most():
    assert shape_pause(0.001) == 0.0, "cheap enough for every short pick"
    assert shape_pause(0.05) == pytest.approx(1.0)
    assert shape_pause(10.0) == 2.0


def test_a_window_gives_the_last_position_of_each_priority():
    """In no order, and fractions vary in length: 53 comes before 53.1."""

    def row(number: int, priority: int, instant: str, what: str) -> list[bytes | None]:
        return [b"%d" % number, b"%d" % priority, instant.encode(), what.encode(), *[None] * 13]

    picked = read_pick(
        [
            row(3, 0, "2026-01-01 00:00:53.1+00", "h"),
            row(4, 1, "2026-01-01 00:00:10+00", "s"),
            row(2, 0, "2026-01-01 00:00:53+00", "l"),
            row(5, 0, "2026-01-01 00:00:53.1+00", "h"),
        ],
        queue="q",
        trusted_until=0.0,
    )
    assert picked.positions == {0: ("2026-01-01 00:00:53.1+00", 5), 1: ("2026-01-01 00:00:10+00", 4)}
    assert [(each.id, each.what) for each in picked.seen] == [(2, "l"), (3, "h"), (5, "h"), (4, "s")]
