from __future__ import annotations

import attrs
import pytest
from durable_actors._engine.claiming.cursor import LOOK_AGAIN, RESET_MAX, RESET_MIN, PickCursor
from durable_actors._store.claim import PickFrom, QueueShape
from durable_actors._store.rows import PickResult, Seen
from hypothesis import given, settings, strategies as st

KNOWN = frozenset({"m/1"})
HEAD = ("-infinity", -(2**63))


def at(second: float) -> str:
    """As the server writes it: fractions vary in length."""
    text = f"{second:09.3f}".rstrip("0").rstrip(".")
    return f"2026-01-01 00:00:{text}+00"


def begin(cursor: PickCursor, now: float, limit: int = 10) -> PickFrom:
    return cursor.begin(now, limit=limit, known=KNOWN)


def picked(positions: dict[int, tuple[str, int]] | None = None, left: list[int] | None = None) -> PickResult:
    return PickResult([], [Seen(number, 0, at(1), "l") for number in left or []], positions or {})


def shape(*priorities: int, shelved: tuple[str, ...] = ()) -> QueueShape:
    return QueueShape(priorities, None, shelved, None)


def test_the_first_pick_begins_at_the_head():
    first = begin(PickCursor(), 0.0)
    assert (list(first.priorities), list(first.eligible_ats), list(first.ids)) == (
        [0],
        ["-infinity"],
        [HEAD[1]],
    )


def test_the_next_one_begins_where_the_last_ended_until_the_reset():
    cursor = PickCursor()
    begin(cursor, 10.0)
    cursor.advance(picked({0: (at(5), 7)}), now=10.0, took=0.001)
    then = begin(cursor, 10.0 + RESET_MIN / 2)
    assert (list(then.eligible_ats), list(then.ids)) == ([at(5)], [7])
    cursor.advance(
        picked({0: (at(4), 3)}), now=10.05, took=0.001
    )  # an extra from before it does not turn it back
    then = begin(cursor, 10.06)
    assert list(then.ids) == [7]
    assert list(begin(cursor, 10.0 + RESET_MIN).ids) == [HEAD[1]]


def test_dear_scans_are_rare_but_never_later_than_the_ceiling():
    for took, reset in [(0.0, RESET_MIN), (0.02, 0.4), (60.0, RESET_MAX)]:
        cursor = PickCursor()
        begin(cursor, 0.0)
        cursor.advance(picked({0: (at(5), 7)}), now=0.0, took=took)
        assert list(begin(cursor, reset - 0.001).ids) == [7]
        assert list(begin(cursor, reset).ids) == [HEAD[1]]


def test_fractions_of_a_second_sort_by_time():
    cursor = PickCursor()
    begin(cursor, 0.0)
    for position in [(at(5), 9), (at(5.25), 1), (at(5.5), 1), (at(5.125), 8)]:
        cursor.advance(picked({0: position}), now=0.0, took=0.0)
    assert list(begin(cursor, 0.0).eligible_ats) == [at(5.5)]


def test_a_row_that_was_left_is_looked_at_soon_and_ever_more_rarely():
    cursor = PickCursor()
    begin(cursor, 0.0)
    cursor.advance(picked(left=[4]), now=1.0, took=0.0)
    assert list(begin(cursor, 1.0).extras) == []
    pause = cursor.next_pick(1.0)
    assert pause == pytest.approx(LOOK_AGAIN)
    assert list(begin(cursor, 1.1).extras) == [4]
    cursor.advance(picked(left=[4]), now=2.0, took=0.0)
    assert (cursor.next_pick(2.0) or 0) > pause
    cursor.hint(4)  # offered again: at once
    assert list(begin(cursor, 2.0).extras) == [4]


def test_hints():
    cursor = PickCursor()
    cursor.hint(12)
    cursor.hint(priority=-3)
    assert cursor.hinted
    first = begin(cursor, 0.0)
    assert not cursor.hinted
    assert (list(first.extras), list(first.priorities)) == ([12], [-3, 0])
    assert list(begin(cursor, 0.0).extras) == []  # once
    for number in range(30):
        cursor.hint(number)
    assert len(begin(cursor, 0.0, limit=20).extras) == 20
    assert len(begin(cursor, 0.0, limit=20).extras) == 10


def test_learning_tells_what_was_missed():
    cursor = PickCursor()
    assert cursor.learn(shape(0, 5), known=KNOWN)  # a priority that the last pick did not look at
    assert not cursor.learn(shape(0, 5), known=KNOWN)
    assert not cursor.learn(shape(0), known=KNOWN)
    assert not cursor.learn(shape(shelved=("strange/1",)), known=KNOWN)  # somebody else's
    assert cursor.learn(shape(shelved=("m/1",)), known=KNOWN)
    assert list(begin(cursor, 0.0).shelved) == ["m/1"]


def test_a_cursor_that_hides_nothing_wants_no_further_pick():
    cursor = PickCursor()
    begin(cursor, 0.0)
    cursor.advance(picked(), now=0.0, took=0.0)
    assert cursor.next_pick(0.0) is None
    begin(cursor, 0.0)
    cursor.advance(picked({0: (at(1), 1)}), now=0.0, took=0.0)
    assert cursor.next_pick(0.0) == RESET_MIN


@attrs.frozen
class Row:
    second: int
    number: int
    priority: int

    @property
    def position(self) -> tuple[str, int]:
        return (at(self.second), self.number)


def answer(rows: set[Row], start: PickFrom, limit: int) -> list[Row]:
    """What the statement would claim."""
    found: list[Row] = [row for row in rows if row.number in start.extras]
    for priority, instant, number in zip(start.priorities, start.eligible_ats, start.ids, strict=True):
        low = (-1, 0) if instant == "-infinity" else (int(instant[17:19]), number)
        found += [row for row in rows if row.priority == priority and (row.second, row.number) > low]
    return sorted(set(found), key=lambda row: (row.priority, row.second, row.number))[:limit]


inserts = st.lists(
    st.lists(st.tuples(st.integers(0, 59), st.integers(-2, 2)), max_size=6), min_size=1, max_size=12
)


@settings(max_examples=200)
@given(inserts, st.integers(1, 8), st.floats(0.0, 0.2))
def test_nothing_stays_hidden(batches, limit, took):
    """Rows appear anywhere, also before the cursor. A feeder that obeys `next_pick` soon claims them all."""
    cursor, rows, now, number = PickCursor(), set(), 0.0, 0

    def pick() -> bool:
        """True: there may be more at once."""
        start = begin(cursor, now, limit)
        got = answer(rows, start, limit)
        rows.difference_update(got)
        positions: dict[int, tuple[str, int]] = {}
        for row in got:
            positions[row.priority] = max(positions.get(row.priority, HEAD), row.position)
        cursor.advance(picked(positions), now=now, took=took)
        missed = cursor.learn(shape(*{row.priority for row in rows}), known=KNOWN)
        return len(got) == limit or missed

    for batch in batches:
        for second, priority in batch:
            number += 1
            rows.add(Row(second, number, priority))
        while pick():
            now += took
        now += 0.01
    deadline = now + RESET_MAX + 1.0
    while True:
        if pick():
            continue
        later = cursor.next_pick(now)
        if later is None:
            break
        now += max(later, 0.001)
        assert now < deadline
    assert not rows
