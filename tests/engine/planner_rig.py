"""A `ClaimPlanner` and the answers that a test gives it. Without Trio and without Postgres."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from durable_actors._engine.claiming.planner import (
    NOTHING_PICKED,
    Action,
    ClaimPlanner,
    Expire,
    Pick,
    RefreshStats,
    ReleaseOrphans,
    Sleep,
)
from durable_actors._engine.limits import QueueLimits
from durable_actors._store.claim import PickFrom, QueueShape
from durable_actors._store.rows import PickResult, Seen
from tests.engine.kit import claim

KNOWN = frozenset({"m/1"})
LIMITS = QueueLimits(concurrency=10, prefetch=0, min_demand=1, poll_interval=1.0, max_poll_interval=8.0)
EMPTY = QueueShape((), None, (), None)
HEAD = "-infinity"


def shape(
    *priorities: int,
    next_due: float | None = None,
    shelved: tuple[str, ...] = (),
    next_deadline: float | None = None,
) -> QueueShape:
    return QueueShape(priorities, next_due, shelved, next_deadline)


def at(second: float) -> str:
    return f"2026-01-01 00:00:{second:09.6f}+00"


def found(*ids: int, seen: int = 0, left: tuple[int, ...] = (), key: str | None = None) -> PickResult:
    """A pick that has claimed these rows, and has seen others that are not to be claimed now."""
    return PickResult(
        [claim(key, number) for number in ids],
        [Seen(1000 + number, 0, at(1), "h") for number in range(seen)]
        + [Seen(number, 0, at(1), "l") for number in left],
        {0: (at(1), max(ids))} if ids else {},
    )


FULL = found(*range(1, 11))
"""As many as were wanted."""


class Rig:
    """A planner, and what the database answers."""

    def __init__(self, limits: QueueLimits = LIMITS) -> None:
        self.woken = 0
        self.planner = ClaimPlanner(limits, wake_feeder=self._wake)
        self.planner.restart()
        self.now = 100.0
        self.shapes: list[QueueShape] = []
        """What the next refreshes answer; the last one from then on."""
        self.picks: list[PickResult] = []
        """What the next picks find; later ones find nothing."""
        self.expires = 0
        self.froms: list[PickFrom] = []
        """Where the picks began."""
        self.during: dict[type[Action], Callable[[], object]] = {}
        """What happens while such an action is under way, once."""
        self.fails: dict[type[Action], bool] = {}
        """Such an action fails, once; True: with unknown fate."""
        self._shape = EMPTY

    def _wake(self) -> None:
        self.woken += 1

    def round(
        self,
        by: Literal["timer", "message"] | None = None,
        *,
        wanted: int = 10,
        one_by_id: bool = True,
        watched: bool = False,
    ) -> list[Action]:
        """What the planner wants in a round; the time of the last action, `Sleep`, counts from now."""
        planner, actions = self.planner, list[Action]()
        if by is not None:
            planner.woke(by=by)
        planner.begin(self.now, wanted=wanted, one_by_id=one_by_id, known=KNOWN)
        while True:
            action = planner.next(self.now, watched=watched)
            if isinstance(action, Sleep):
                until = round(action.until - self.now, 6)
                return [*actions, Sleep(until, has_room=action.has_room)]
            actions.append(action)
            assert len(actions) <= 5, actions
            kind = type(action)
            if kind in self.fails:
                if isinstance(action, Pick):
                    self.froms.append(planner.pick_from())
                planner.failed(unknown_fate=self.fails.pop(kind))
                return actions
            self._act(action)

    def _act(self, action: Action) -> None:
        planner, meanwhile = self.planner, self.during.pop(type(action), lambda: None)
        match action:
            case Pick():
                self.froms.append(planner.pick_from())
                meanwhile()
                picked = self.picks.pop(0) if self.picks else NOTHING_PICKED
                planner.picked(picked, self.now, seconds=0.001)
            case RefreshStats():
                planner.refresh_begins()
                meanwhile()
                self._shape = self.shapes.pop(0) if self.shapes else self._shape
                planner.refreshed(self._shape, self.now)
            case Expire():
                meanwhile()
                planner.expired(self.expires, self.now)
            case ReleaseOrphans():
                meanwhile()
                planner.orphans_released()
            case Sleep():
                raise AssertionError

    def rest(self, **of: QueueShape) -> Rig:
        """The first round is over, and the poll after it is due."""
        self.shapes = [of.get("shape", EMPTY)]
        self.round()
        self.now += 1.0
        return self
