"""ClaimPlanner: what holds in any order of events. Without Trio and without Postgres."""

from __future__ import annotations

import math

import attrs
from durable_actors._engine.claiming.cursor import RESET_MAX
from durable_actors._engine.claiming.planner import (
    MAX_LOCKED_PAUSE,
    WATCHED_SLEEP,
    Action,
    ClaimPlanner,
    Expire,
    Pick,
    RefreshStats,
    ReleaseOrphans,
    Sleep,
)
from durable_actors._store.claim import PickFrom, QueueShape
from durable_actors._store.rows import PickResult, Seen
from hypothesis import given, settings, strategies as st
from tests.engine.kit import claim
from tests.engine.planner_rig import HEAD, KNOWN, LIMITS, Rig, found, shape


@attrs.define(eq=False)
class Row:
    number: int
    priority: int
    due: float
    eligible_at: float
    keyed: bool
    locked: bool = False

    @property
    def position(self) -> tuple[str, int]:
        return (_text(self.eligible_at), self.number)


def _text(seconds: float) -> str:
    return f"{seconds:016.6f}+00"


class World:
    """A feeder, its planner and a queue. Events happen at any point, also while an action is under way."""

    def __init__(self, events: list[tuple[str, int, float]]) -> None:
        self.events = events
        self.message = False  # in the feeder's mailbox
        self.planner = ClaimPlanner(LIMITS, wake_feeder=self._wake)
        self.planner.restart()
        self.now = 100.0
        self.rows: dict[int, Row] = {}
        self.deadlines: list[float] = []
        self.orphans: list[Row] = []
        self.hints: list[Row] = []  # rows at which somebody has hinted since the last pick
        self.wanted, self.watched, self.fails = 10, False, ""
        self.shape: QueueShape | None = None  # of the last refresh that was answered
        self.read_at = 0.0
        self.last_expire = -math.inf
        self._numbers = 0

    def _wake(self) -> None:
        self.message = True

    # what may happen

    def happen(self) -> None:
        """The next event, if there is one left."""
        if self.events:
            kind, number, seconds = self.events.pop()
            getattr(self, f"_{kind}")(number, seconds)

    def _row(self, priority: int, due: float, eligible_at: float, *, keyed: bool = False) -> Row:
        self._numbers += 1
        row = self.rows[self._numbers] = Row(self._numbers, priority, due, eligible_at, keyed)
        return row

    def _nothing(self, number: int, seconds: float) -> None:
        pass

    def _pause(self, number: int, seconds: float) -> None:
        self.now += seconds

    def _insert(self, number: int, seconds: float) -> None:
        row = self._row(number % 3 - 1, self.now, self.now)
        self.planner.notify(row.number, row.priority, new_unkeyed=True)
        self.hints.append(row)

    def _insert_keyed(self, number: int, seconds: float) -> None:
        row = self._row(number % 3 - 1, self.now, self.now, keyed=True)
        self.planner.notify(priority=row.priority)
        self.hints.append(row)

    def _insert_for_later(self, number: int, seconds: float) -> None:
        row = self._row(number % 3 - 1, self.now + seconds, self.now + seconds)
        self.planner.notify(priority=row.priority)

    def _insert_elsewhere(self, number: int, seconds: float) -> None:
        self._row(number % 5 - 2, self.now, self.now - seconds)

    def _release(self, number: int, seconds: float) -> None:
        row = self._row(number % 3 - 1, self.now, self.now - seconds, keyed=number % 2 == 0)
        self.planner.notify(row.number)
        self.hints.append(row)

    def _signal(self, number: int, seconds: float) -> None:
        row = self._row(number % 3 - 1, self.now, self.now - seconds, keyed=number % 2 == 0)
        self.planner.notify(row.number, by_signal=True)
        self.hints.append(row)

    def _park(self, number: int, seconds: float) -> None:
        self.deadlines.append(self.now + seconds)
        self.planner.expect_deadline()

    def _lock(self, number: int, seconds: float) -> None:
        for row in list(self.rows.values())[::2]:
            row.locked = not row.locked

    def _long_poll(self, number: int, seconds: float) -> None:
        due = [row for row in self.rows.values() if row.due <= self.now]
        if due:
            self.planner.seen_due(min(row.priority for row in due))

    def _slot(self, number: int, seconds: float) -> None:
        self.message = True

    def _demand(self, number: int, seconds: float) -> None:
        self.wanted = number % 4

    def _watch(self, number: int, seconds: float) -> None:
        self.watched = not self.watched

    def _fail(self, number: int, seconds: float) -> None:
        self.fails = "unknown" if number % 2 else "known"

    def _restart(self, number: int, seconds: float) -> None:
        self.events.append(("nothing", 0, 0.0))
        self.fails = "restart"

    # the feeder

    def round(self) -> Sleep:
        """As `Feeder.run` does it."""
        planner, actions = self.planner, list[Action]()
        self.happen()
        wanted = self.wanted
        planner.begin(self.now, wanted=wanted, one_by_id=planner.queue_empty and self.wanted > 1, known=KNOWN)
        while not isinstance(action := planner.next(self.now, watched=self.watched), Sleep):
            actions.append(action)
            assert len(actions) <= 5, actions
            self.happen()  # the feeder waits for its connection
            failure, self.fails = self.fails, ""
            if failure == "restart":
                planner.restart()
                self.hints.clear()
                self.orphans += self._lost_claims(action)
                return Sleep(self.now)
            if failure:
                unknown = failure == "unknown"
                if unknown:
                    self.orphans += self._lost_claims(action)
                elif isinstance(action, Pick):
                    planner.pick_from()
                planner.failed(unknown_fate=unknown)
                return Sleep(self.now + 0.05)
            self._act(action)
        kinds = [type(action) for action in actions]
        assert wanted or not kinds
        for kind in (Pick, Expire, ReleaseOrphans):
            assert kinds.count(kind) <= 1, actions
        assert kinds.count(RefreshStats) <= 2, actions
        if wanted:
            self._check_sleep(action)
        return action

    def rest(self, sleep: Sleep) -> None:
        """Until a message comes, or the time."""
        if sleep.until <= self.now:
            self.now += 0.0001
            self.planner.woke(by="timer")
            return
        while not self.message and self.now < sleep.until:
            if self.events:
                self.happen()
            elif sleep.until == math.inf:  # there was no demand: a slot becomes free
                self.wanted, self.message = 10, True
            else:
                self.now = sleep.until
        self.planner.woke(by="message" if self.message else "timer")
        self.message = False

    def _check_sleep(self, sleep: Sleep) -> None:
        ceiling = LIMITS.max_poll_interval
        assert sleep.until <= self.now + max(ceiling, WATCHED_SLEEP if self.watched else 0.0)
        assert self.shape is not None
        if self.shape.next_due is not None:
            assert sleep.until <= self.now + max(self.shape.next_due, MAX_LOCKED_PAUSE)
        if self.shape.next_deadline is not None:
            deadline = self.read_at + self.shape.next_deadline
            assert sleep.until <= max(self.now, deadline, self.last_expire + MAX_LOCKED_PAUSE)

    def _act(self, action: Action) -> None:
        planner = self.planner
        match action:
            case Pick():
                begin = planner.pick_from()
                self._check_hints(begin)
                asked = self.now
                picked = self._claim(begin, action.limit)
                self.happen()
                planner.picked(picked, self.now, seconds=self.now - asked)
            case RefreshStats():
                planner.refresh_begins()
                shape, asked = self._read(), self.now
                self.happen()
                planner.refreshed(shape, self.now)
                self.shape, self.read_at = shape, self.now
                if action.after_pick:
                    planner.stats.took(asked, self.now - asked, alone=True)
            case Expire():
                due = [each for each in self.deadlines if each <= self.now]
                self.deadlines = [each for each in self.deadlines if each > self.now]
                for each in due:
                    self._row(0, each, each)
                self.happen()
                planner.expired(len(due), self.now)
                self.last_expire = self.now
            case ReleaseOrphans():
                self.happen()
                planner.orphans_released()
                for row in self.orphans:
                    self.rows[row.number] = row
                    planner.notify(row.number)
                    self.hints.append(row)
                self.orphans = []
            case Sleep():
                raise AssertionError

    def _lost_claims(self, action: Action) -> list[Row]:
        """What a pick claims that has its effect, and of which nobody here hears."""
        if not isinstance(action, Pick):
            return []
        rows = dict(self.rows)
        self._claim(self.planner.pick_from(), action.limit)
        return [row for number, row in rows.items() if number not in self.rows]

    def _check_hints(self, begin: PickFrom) -> None:
        """A row is among the next pick's, or starts behind where the pick starts."""
        starts = dict(zip(begin.priorities, zip(begin.eligible_ats, begin.ids, strict=True), strict=True))
        later: list[Row] = []
        for row in self.hints:
            if row.number not in self.rows or row.number in {*begin.by_id, *begin.extras}:
                continue
            if row.priority in starts and _after(row, starts[row.priority]):
                continue
            assert row.number in self.planner.cursor._extras, (row, begin)  # more than the pick may look at
            later.append(row)
        self.hints = later

    # the database

    def _claim(self, begin: PickFrom, limit: int) -> PickResult:
        """What the statements do (`pick_instances.sql`, `pick_instances_by_id.sql`)."""
        due = [row for row in self.rows.values() if row.due <= self.now]
        if begin.by_id:
            window = [row for row in due if row.number in begin.by_id and not row.keyed and not row.locked]
        else:
            starts = dict(zip(begin.priorities, zip(begin.eligible_ats, begin.ids, strict=True), strict=True))
            window = [
                row
                for row in due
                if row.number in begin.extras
                or (row.priority in starts and _after(row, starts[row.priority]))
            ]
        window = sorted(window, key=lambda row: (row.priority, row.position))[:limit]
        positions: dict[int, tuple[str, int]] = {}
        for row in window:
            positions[row.priority] = row.position
        claims = [row for row in window if not row.locked]
        for row in claims:
            del self.rows[row.number]
        return PickResult(
            [claim("k" if row.keyed else None, row.number, priority=row.priority) for row in claims],
            [Seen(row.number, row.priority, row.position[0], "l") for row in window if row.locked],
            {} if begin.by_id else positions,
        )

    def _read(self) -> QueueShape:
        later = [row.due - self.now for row in self.rows.values() if row.due > self.now]
        return QueueShape(
            tuple(sorted({row.priority for row in self.rows.values()})),
            min(later, default=None),
            (),
            min((each - self.now for each in self.deadlines), default=None),
        )


def _after(row: Row, start: tuple[str, int]) -> bool:
    return start[0] == HEAD or row.position > start


KINDS = [
    "nothing",
    "pause",
    "insert",
    "insert_keyed",
    "insert_for_later",
    "insert_elsewhere",
    "release",
    "signal",
    "park",
    "lock",
    "long_poll",
    "slot",
    "demand",
    "watch",
    "fail",
    "restart",
]
SECONDS = st.sampled_from([0.0, 0.001, 0.01, 0.05, 0.1, 0.5, 1.0, 3.0, 20.0])


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 12), SECONDS), max_size=60))
def test_in_any_order_rounds_end_and_no_hint_and_no_row_is_lost(events: list[tuple[str, int, float]]):
    world = World(events)
    settled = math.inf
    while world.now <= settled:
        sleep = world.round()
        if not world.events and settled == math.inf:
            # From here on nothing happens but what is due: all of it is found, with polls and full scans alone.
            world.wanted, world.message = 10, True
            for row in world.rows.values():
                row.locked = False
            last = max([world.now, *world.deadlines, *(row.due for row in world.rows.values())])
            settled = last + LIMITS.max_poll_interval + RESET_MAX + 1.0
        world.rest(sleep)
    assert not world.rows
    assert not world.orphans
    assert not world.deadlines


def test_a_due_row_that_is_locked_is_no_loop_of_picks_while_it_is_too_soon_for_a_refresh():
    """Another row was passed over, so a timer leads to a pick; the last refresh was slow, and the next one waits."""
    rig = Rig().rest(shape=shape(0, next_due=0.5))
    rig.planner.stats.took(rig.now, 0.2, alone=True)
    rig.planner.notify(9)
    end, rounds = rig.now + 0.5, 0
    while rig.now < end:
        rig.picks = [found(left=(9,))]
        *actions, sleep = rig.round("timer")
        assert actions == [Pick(10)]
        assert isinstance(sleep, Sleep)
        rig.now += max(sleep.until, 0.0001)
        rounds += 1
    assert rounds < 30
