"""ClaimPlanner: its decisions as a table. Without Trio and without Postgres."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import attrs
import pytest
from durable_actors._engine.claiming.cursor import RESET_MIN
from durable_actors._engine.claiming.planner import (
    EXPIRE,
    LOCKED_PAUSE,
    MAX_LOCKED_PAUSE,
    MAX_PICK,
    REFRESH_AFTER_PICK,
    REFRESH_BEFORE_PICK,
    RELEASE_ORPHANS,
    WATCHED_SLEEP,
    Action,
    Pick,
    RefreshStats,
    ReleaseOrphans,
    Sleep,
)
from durable_actors._engine.claiming.stats_refresh import REFRESH_INTERVAL
from durable_actors._store.claim import PickFrom, QueueShape
from tests.engine.planner_rig import EMPTY, FULL, HEAD, LIMITS, Rig, found, shape

REST = Sleep(2.0, has_room=True)
"""The second poll of an empty queue: the next one is two seconds away."""
SOON = Sleep(1.0, has_room=True)
AGAIN = Sleep(0.0)
PICK = Pick(10)
HOLDS_CURSOR = Sleep(RESET_MIN, has_room=True)
"""Rows that commit late may lie before the cursor."""


@attrs.frozen
class Case:
    before: Callable[[Rig], object]
    """What has happened before the round."""
    expected: list[Action]
    by: Literal["timer", "message"] | None = "timer"
    begins: PickFrom | None = None
    """Where the pick begins."""
    wanted: int = 10
    one_by_id: bool = True
    watched: bool = False


def nothing(rig: Rig) -> None:
    """The feeder has just started."""


def feeder_died(rig: Rig) -> None:
    rig.planner.restart()


def at_rest(rig: Rig) -> None:
    rig.rest()


def rows_for_later(rig: Rig) -> None:
    rig.rest(shape=shape(0, next_due=30.0))
    rig.shapes = [shape(0, next_due=29.0)]


def rest_until_rows_came(rig: Rig) -> None:
    rig.rest()
    rig.shapes = [shape(0)]


def claimed_something(rig: Rig) -> None:
    rig.picks = [found(5)]
    rig.rest()


def row_was_left(rig: Rig) -> None:
    rig.picks = [found(left=(4,))]
    rig.rest()


def new_row(rig: Rig) -> None:
    rig.rest()
    rig.planner.notify(7, 0, new_unkeyed=True)
    rig.picks = [found(7)]


def new_row_beside_rows_from_elsewhere(rig: Rig) -> None:
    new_row(rig)
    rig.shapes = [shape(0)]


def two_new_rows(rig: Rig) -> None:
    new_row(rig)
    rig.planner.notify(8, 0, new_unkeyed=True)


def new_row_beside_rows_for_later(rig: Rig) -> None:
    rows_for_later(rig)
    rig.planner.notify(7, 0, new_unkeyed=True)


def row_that_was_not_claimed_by_id(rig: Rig) -> None:
    new_row(rig)
    rig.picks = []
    assert rig.round("message")[-1] == Sleep(0.0, has_room=True)


def offered_row(rig: Rig) -> None:
    rig.rest()
    rig.planner.notify(7)


def signalled_row(rig: Rig) -> None:
    rig.rest()
    rig.planner.notify(7, by_signal=True)
    rig.picks = [found(7)]


def seen_by_the_long_poll(rig: Rig) -> None:
    rig.picks = [found(5)]
    rig.rest()
    rig.now -= 0.95  # the cursor is not reset yet
    rig.planner.seen_due(3)


def full_window(rig: Rig) -> None:
    rig.rest(shape=shape(0))
    rig.picks = [FULL]


def full_window_of_held_rows(rig: Rig) -> None:
    rig.rest(shape=shape(0))
    rig.picks = [found(seen=10)]


def full_window_and_old_statistics(rig: Rig) -> None:
    full_window(rig)
    rig.now += REFRESH_INTERVAL


def slow_statistics(rig: Rig) -> None:
    """A refresh took 50 ms, so that the next one waits for a second."""
    rig.rest(shape=shape(0))
    rig.planner.stats.took(rig.now - 0.25, 0.05, alone=True)
    rig.planner.notify(priority=0)


def refresh_was_postponed(rig: Rig) -> None:
    slow_statistics(rig)
    rig.round("message")
    rig.now += 0.75
    rig.shapes = [EMPTY]


def one_was_claimed_by_id_and_the_refresh_was_postponed(rig: Rig) -> None:
    new_row(rig)
    rig.planner.stats.took(rig.now - 0.25, 0.05, alone=True)
    assert rig.round("message") == [PICK, AGAIN]
    assert list(rig.froms[-1].by_id) == [7]
    rig.planner.notify(8, 0, new_unkeyed=True)


def one_came_after_a_full_window(rig: Rig) -> None:
    """The statistics before it had no row."""
    rig.rest()
    rig.planner.notify(priority=0)
    rig.picks = [FULL]
    assert rig.round("message") == [PICK, AGAIN]
    rig.now += 2 * RESET_MIN
    rig.planner.notify(11, 0, new_unkeyed=True)


def slow_statistics_and_a_deadline(rig: Rig) -> None:
    slow_statistics(rig)
    rig.planner.expect_deadline()


def priority_that_the_pick_did_not_know(rig: Rig) -> None:
    rig.rest(shape=shape(0))
    rig.planner.notify()
    rig.shapes = [shape(0, 5)]


def deadline_is_due(rig: Rig) -> None:
    rig.rest(shape=shape(next_deadline=0.5))
    rig.expires = 1
    rig.shapes = [shape(0)]
    rig.picks = [found(7)]


def deadline_is_due_and_rows_were_offered(rig: Rig) -> None:
    deadline_is_due(rig)
    rig.planner.notify(9)
    rig.shapes = [EMPTY]


def deadline_is_due_while_rows_wait(rig: Rig) -> None:
    rig.rest(shape=shape(0, next_deadline=0.5))
    rig.expires = 1
    rig.picks = [FULL]
    rig.shapes = [shape(0)]


def deadline_is_due_and_locked(rig: Rig) -> None:
    rig.rest(shape=shape(next_deadline=0.5))
    rig.shapes = [shape(next_deadline=-0.5)]


def deadline_later(rig: Rig) -> None:
    rig.rest(shape=shape(next_deadline=1.25))
    rig.shapes = [shape(next_deadline=0.25)]


def deadline_set_here(rig: Rig) -> None:
    rig.rest()
    rig.planner.expect_deadline()
    rig.shapes = [shape(next_deadline=0.25)]


def deadline_set_here_while_rows_wait(rig: Rig) -> None:
    rig.rest(shape=shape(0))
    rig.planner.expect_deadline()
    rig.picks = [FULL]
    rig.shapes = [shape(0, next_deadline=0.25)]


def pick_of_unknown_fate(rig: Rig) -> None:
    new_row(rig)
    rig.fails[Pick] = True
    assert rig.round("message") == [PICK]
    rig.during[ReleaseOrphans] = lambda: rig.planner.notify(7)


def pick_that_did_not_happen(rig: Rig) -> None:
    pick_of_unknown_fate(rig)
    rig.during = {}


def failed_refresh(rig: Rig) -> None:
    rig.rest()
    rig.fails[RefreshStats] = False
    assert rig.round("timer") == [REFRESH_BEFORE_PICK]


def shelved_step_that_is_known(rig: Rig) -> None:
    rig.rest()
    rig.shapes = [shape(shelved=("m/1",))]


def shelved_step_that_is_unknown(rig: Rig) -> None:
    rig.rest()
    rig.shapes = [shape(shelved=("strange/1",))]


def row_of_another_priority_came_during_a_refresh(rig: Rig) -> None:
    """The answer does not show it yet."""
    rig.rest()
    rig.during[RefreshStats] = lambda: rig.planner.notify(priority=5)
    assert rig.round("timer") == [REFRESH_BEFORE_PICK, REST]
    assert rig.woken == 1


def new_row_came_during_a_refresh(rig: Rig) -> None:
    rig.rest()
    rig.during[RefreshStats] = lambda: rig.planner.notify(7, 0, new_unkeyed=True)
    assert rig.round("timer") == [REFRESH_BEFORE_PICK, REST]
    rig.picks = [found(7)]


def offered_row_came_during_a_refresh(rig: Rig) -> None:
    rig.rest()
    rig.during[RefreshStats] = lambda: rig.planner.notify(7)
    assert rig.round("timer") == [REFRESH_BEFORE_PICK, Sleep(0.0, has_room=True)]


def new_row_came_during_a_pick(rig: Rig) -> None:
    rig.rest(shape=shape(0))
    rig.during[Pick] = lambda: rig.planner.notify(7, 5, new_unkeyed=True)
    rig.shapes = [shape(0, 5)]
    assert rig.round("message") == [PICK, REFRESH_AFTER_PICK, REST]


def deadline_was_set_during_a_refresh(rig: Rig) -> None:
    rig.rest(shape=shape(0))
    rig.during[RefreshStats] = rig.planner.expect_deadline
    assert rig.round("message") == [PICK, REFRESH_AFTER_PICK, REST]
    rig.picks = [FULL]


def from_head(*priorities: int, extras: tuple[int, ...] = (), shelved: tuple[str, ...] = ()) -> PickFrom:
    heads = [HEAD] * len(priorities)
    return PickFrom(list(priorities), heads, [-(2**63)] * len(priorities), list(extras), list(shelved))


BY_ID = PickFrom((), (), (), by_id=[7])

CASES = {
    "the first round reads the priorities before it picks": Case(
        nothing,
        [REFRESH_BEFORE_PICK, PICK, REFRESH_AFTER_PICK, SOON],
        by=None,
        begins=from_head(0),
    ),
    "a feeder whose predecessor died releases orphans first": Case(
        feeder_died, [RELEASE_ORPHANS, REFRESH_BEFORE_PICK, PICK, REFRESH_AFTER_PICK, SOON], by=None
    ),
    "no demand": Case(at_rest, [Sleep(math.inf)], wanted=0),
    "no demand, whatever is due": Case(deadline_is_due_and_rows_were_offered, [Sleep(math.inf)], wanted=0),
    "no demand, whatever the last pick may have claimed": Case(
        pick_of_unknown_fate, [Sleep(math.inf)], wanted=0
    ),
    "more demand than a pick may claim": Case(
        new_row, [Pick(MAX_PICK), REFRESH_AFTER_PICK, SOON], by="message", wanted=MAX_PICK + 1
    ),
    "a timer at rest: the statistics, and no pick": Case(at_rest, [REFRESH_BEFORE_PICK, REST]),
    "a free slot at rest is no evidence of work": Case(at_rest, [REFRESH_BEFORE_PICK, REST], by="message"),
    "a timer at rest, and rows from elsewhere": Case(
        rest_until_rows_came, [REFRESH_BEFORE_PICK, PICK, REST], begins=from_head(0)
    ),
    "a timer, and a step that this node knows is on the shelf": Case(
        shelved_step_that_is_known,
        [REFRESH_BEFORE_PICK, PICK, REST],
        begins=from_head(0, shelved=("m/1",)),
    ),
    "a timer, and an unknown step is on the shelf": Case(
        shelved_step_that_is_unknown, [REFRESH_BEFORE_PICK, REST]
    ),
    "a timer with rows for later": Case(rows_for_later, [REFRESH_BEFORE_PICK, PICK, REST]),
    "a free slot, and rows for later were seen": Case(
        rows_for_later, [PICK, REFRESH_AFTER_PICK, REST], by="message"
    ),
    "a timer after a pick that found work": Case(claimed_something, [PICK, REFRESH_AFTER_PICK, SOON]),
    "a timer, and a row was left": Case(
        row_was_left, [PICK, REFRESH_AFTER_PICK, REST], begins=from_head(0, extras=(4,))
    ),
    "one new row at rest is claimed by its id": Case(
        new_row, [PICK, REFRESH_AFTER_PICK, SOON], by="message", begins=BY_ID
    ),
    "one new row at rest, and the refresh sees others": Case(
        new_row_beside_rows_from_elsewhere, [PICK, REFRESH_AFTER_PICK, AGAIN], by="message", begins=BY_ID
    ),
    "one new row at rest, and a slot must be left for others": Case(
        new_row,
        [PICK, REFRESH_AFTER_PICK, HOLDS_CURSOR],
        by="message",
        one_by_id=False,
        begins=from_head(0),
    ),
    "two new rows at rest": Case(
        two_new_rows, [PICK, REFRESH_AFTER_PICK, HOLDS_CURSOR], by="message", begins=from_head(0)
    ),
    "one new row beside rows for later": Case(
        new_row_beside_rows_for_later,
        [PICK, REFRESH_AFTER_PICK, REST],
        by="message",
        begins=from_head(0),
    ),
    "a row that could not be claimed by its id": Case(
        row_that_was_not_claimed_by_id,
        [PICK, REFRESH_AFTER_PICK, REST],
        begins=from_head(0, extras=(7,)),
    ),
    "a row that a signal has woken at rest": Case(
        signalled_row, [PICK, REFRESH_AFTER_PICK, SOON], by="message", begins=BY_ID
    ),
    "a row that is on offer again": Case(
        offered_row, [PICK, REFRESH_AFTER_PICK, REST], by="message", begins=from_head(0, extras=(7,))
    ),
    "the long poll has seen a row: from the head, without a refresh before": Case(
        seen_by_the_long_poll,
        [PICK, REFRESH_AFTER_PICK, Sleep(0.95, has_room=True)],
        by="message",
        begins=from_head(0, 3),
    ),
    "a full window: there may be more": Case(full_window, [PICK, AGAIN], by="message"),
    "a full window of held rows": Case(full_window_of_held_rows, [PICK, AGAIN], by="message"),
    "a full window, and old statistics": Case(
        full_window_and_old_statistics, [PICK, REFRESH_AFTER_PICK, AGAIN], by="message"
    ),
    "a refresh too soon after a slow one is postponed": Case(
        slow_statistics, [PICK, Sleep(0.75, has_room=True)], by="message"
    ),
    "a refresh that was postponed is made when its time has come": Case(
        refresh_was_postponed, [REFRESH_BEFORE_PICK, Sleep(1.25, has_room=True)]
    ),
    "one was claimed by its id, and nobody has looked for others since": Case(
        one_was_claimed_by_id_and_the_refresh_was_postponed,
        [PICK, Sleep(0.75, has_room=True)],
        begins=from_head(0),
    ),
    "a new row after a full window does not overtake the others": Case(
        one_came_after_a_full_window, [PICK, REFRESH_AFTER_PICK, REST], begins=from_head(0)
    ),
    "a deadline that was set here is read even so": Case(
        slow_statistics_and_a_deadline, [PICK, REFRESH_AFTER_PICK, REST], by="message"
    ),
    "a priority that the pick did not know": Case(
        priority_that_the_pick_did_not_know, [PICK, REFRESH_AFTER_PICK, AGAIN], by="message"
    ),
    "a deadline is due": Case(deadline_is_due, [EXPIRE, REFRESH_BEFORE_PICK, PICK, HOLDS_CURSOR]),
    "a deadline is due, and rows are expected": Case(
        deadline_is_due_and_rows_were_offered,
        [EXPIRE, PICK, REFRESH_AFTER_PICK, HOLDS_CURSOR],
        begins=from_head(0, extras=(9,)),
    ),
    "a deadline is due while rows wait: the next one is read": Case(
        deadline_is_due_while_rows_wait, [EXPIRE, PICK, REFRESH_AFTER_PICK, AGAIN], by="message"
    ),
    "a deadline is due, and its row is locked": Case(
        deadline_is_due_and_locked,
        [EXPIRE, REFRESH_BEFORE_PICK, Sleep(2 * LOCKED_PAUSE, has_room=True)],
    ),
    "a deadline bounds the sleep": Case(deadline_later, [REFRESH_BEFORE_PICK, Sleep(0.25, has_room=True)]),
    "a deadline was set here at rest": Case(
        deadline_set_here, [REFRESH_BEFORE_PICK, Sleep(0.25, has_room=True)], by="message"
    ),
    "a deadline was set here while rows wait": Case(
        deadline_set_here_while_rows_wait, [PICK, REFRESH_AFTER_PICK, AGAIN], by="message"
    ),
    "a pick of unknown fate: its claims are released first": Case(
        pick_of_unknown_fate,
        [RELEASE_ORPHANS, PICK, REFRESH_AFTER_PICK, HOLDS_CURSOR],
        begins=from_head(0, extras=(7,)),
    ),
    "a pick of unknown fate has claimed nothing": Case(
        pick_that_did_not_happen, [RELEASE_ORPHANS, REFRESH_BEFORE_PICK, REST]
    ),
    "an error: the queue may have rows by now": Case(
        failed_refresh, [PICK, REFRESH_AFTER_PICK, REST], by="message"
    ),
    "an error, and the timer": Case(failed_refresh, [REFRESH_BEFORE_PICK, REST]),
    "a row of another priority came while the statistics were read": Case(
        row_of_another_priority_came_during_a_refresh,
        [PICK, REFRESH_AFTER_PICK, REST],
        by="message",
        begins=from_head(0, 5),
    ),
    "a new row came while the statistics were read": Case(
        new_row_came_during_a_refresh, [PICK, REFRESH_AFTER_PICK, SOON], by="message", begins=BY_ID
    ),
    "a row on offer again came while the statistics were read": Case(
        offered_row_came_during_a_refresh,
        [PICK, REFRESH_AFTER_PICK, REST],
        begins=from_head(0, extras=(7,)),
    ),
    "a new row came during a pick": Case(
        new_row_came_during_a_pick,
        [PICK, REFRESH_AFTER_PICK, REST],
        by="message",
        begins=from_head(0, 5),
    ),
    "a deadline was set while the statistics were read": Case(
        deadline_was_set_during_a_refresh, [PICK, REFRESH_AFTER_PICK, AGAIN], by="message"
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_decisions(name: str):
    case, rig = CASES[name], Rig()
    case.before(rig)
    picks = len(rig.froms)
    actions = rig.round(case.by, wanted=case.wanted, one_by_id=case.one_by_id, watched=case.watched)
    assert actions == case.expected
    assert len(rig.froms) - picks == sum(isinstance(action, Pick) for action in actions)
    if case.begins is not None:
        assert _lists(rig.froms[-1]) == _lists(case.begins)


def _lists(begin: PickFrom) -> dict[str, list[object]]:
    return {name: list(values) for name, values in attrs.asdict(begin, recurse=False).items()}


@pytest.mark.parametrize(
    ("of", "watched", "until"),
    [
        (EMPTY, False, 0.01),
        (EMPTY, True, WATCHED_SLEEP),
        (shape(0, next_due=0.3), True, 0.3),
        (shape(0, next_due=-0.3), True, 0.0),
        (shape(next_deadline=0.2), True, 0.2),
        (shape(0, next_due=0.3, next_deadline=0.2), True, 0.2),
        (shape(0, next_due=30.0), False, 0.01),
    ],
)
def test_how_long_a_feeder_sleeps(of: QueueShape, until: float, *, watched: bool):
    """Polls are rare while the long poll watches the queue. Due times and deadlines hold whoever watches."""
    rig = Rig(attrs.evolve(LIMITS, poll_interval=0.01, max_poll_interval=0.01)).rest()
    rig.shapes = [of]
    assert rig.round("timer", watched=watched)[-1] == Sleep(until, has_room=True)


def test_polls_of_an_empty_queue_become_rare_and_work_resets_that():
    rig, pauses = Rig(), list[float]()
    for _ in range(6):
        sleep = rig.round("timer")[-1]
        assert isinstance(sleep, Sleep)
        pauses.append(sleep.until)
        rig.now += sleep.until
    assert pauses == [1.0, 2.0, 4.0, 8.0, 8.0, 8.0]
    rig.planner.notify(7, 0, new_unkeyed=True)
    rig.picks = [found(7)]
    assert rig.round("message")[-1] == SOON


def test_a_deadline_whose_row_is_locked_is_tried_ever_more_rarely():
    rig = Rig().rest(shape=shape(next_deadline=0.5))
    rig.shapes = [shape(next_deadline=-0.5)]
    pauses: list[float] = []
    for _ in range(7):
        actions = rig.round("timer")
        assert actions[:-1] == [EXPIRE, REFRESH_BEFORE_PICK]
        sleep = actions[-1]
        assert isinstance(sleep, Sleep)
        pauses.append(sleep.until)
        early = rig.now + sleep.until / 2  # a poll that comes sooner neither tries it nor puts it off
        rig.now, after = early, rig.now + sleep.until
        assert rig.round("timer")[0] == REFRESH_BEFORE_PICK
        rig.now = after
    assert pauses == [0.02, 0.04, 0.08, 0.16, MAX_LOCKED_PAUSE, MAX_LOCKED_PAUSE, MAX_LOCKED_PAUSE]
    rig.expires = 1
    rig.round("timer")
    rig.expires, rig.now = 0, rig.now + 1.0
    assert rig.round("timer")[-1] == Sleep(2 * LOCKED_PAUSE, has_room=True)


def test_a_deadline_is_expired_once_per_round():
    rig = Rig().rest(shape=shape(0, next_deadline=0.5))
    rig.planner.notify(9)
    actions = rig.round("message")
    assert actions.count(EXPIRE) == 1


def test_a_pick_that_fails_after_it_was_by_id_is_followed_by_a_full_one():
    rig = Rig()
    pick_that_did_not_happen(rig)
    assert list(rig.froms[-1].by_id) == [7]
    rig.shapes = [shape(0)]
    assert PICK in rig.round("timer")
    assert _lists(rig.froms[-1]) == _lists(from_head(0))


def test_a_pick_that_fails_takes_no_hints():
    """The cursor may hide the rows: they would wait for the next pick from the head."""
    rig = Rig().rest(shape=shape(0))
    rig.picks = [FULL]
    rig.round("timer")
    rig.planner.notify(7)
    rig.planner.notify(8)
    rig.now += 0.01
    for unknown in (False, True):
        rig.fails[Pick] = unknown
        rig.round("message")
        assert sorted(rig.froms[-1].extras) == [7, 8]
    rig.fails[RefreshStats] = False
    rig.planner.expect_deadline()
    rig.round("message")
    assert sorted(rig.froms[-1].extras) == [7, 8]
    rig.round("message")
    assert list(rig.froms[-1].extras) == []  # that pick has answered: it was the refresh that failed


def test_a_row_that_a_signal_woke_is_not_lost_with_a_failed_pick_by_its_id():
    rig = Rig().rest()
    rig.planner.notify(7, by_signal=True)
    rig.fails[Pick] = False
    rig.round("message")
    assert list(rig.froms[-1].by_id) == [7]
    rig.round("message")
    assert list(rig.froms[-1].extras) == [7]


def test_every_hint_wakes_the_feeder():
    rig = Rig()
    rig.planner.notify(7)
    rig.planner.expect_deadline()
    rig.planner.seen_due(3)
    assert rig.woken == 3


def test_a_restart_forgets_what_was_known():
    rig = Rig().rest(shape=shape(0, 5))
    assert list(rig.planner.pick_from().priorities) == [0, 5]
    rig.planner.restart()
    rig.shapes = [EMPTY]
    assert rig.round()[:2] == [RELEASE_ORPHANS, REFRESH_BEFORE_PICK]
    assert list(rig.froms[-1].priorities) == [0]
