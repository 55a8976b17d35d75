"""ClaimPlanner: what the feeder of one queue does next. Sans-I/O; time is an argument.

The feeder calls `next` until that returns `Sleep`, carries out each action, and reports the result:

================  ===========================================================  ==================
action            when                                                         reported with
================  ===========================================================  ==================
ReleaseOrphans    a pick of unknown fate may have claimed rows                 `orphans_released`
RefreshStats      before the first pick; instead of a pick when a timer ended  `refreshed`
                  the sleep and no row is expected; after a pick that found
                  less than it wanted, and now and then after a full one
Expire            the deadline of an awaiting instance has passed              `expired`
Thaw              throttled rows may have their token; and after a pick that   `throttled.found`
                  has claimed or throttled limited rows, to know the next
Pick              there is demand                                              `picked`
Sleep             no demand, nothing more to find now, or the queue is paused  `woke`
================  ===========================================================  ==================

"Statistics" are which priorities and shelved steps the queue has, and when its next row and its next deadline are due
(`read_queue.sql`); `stats_refresh` says when to read them after a pick.

A paused queue is not picked from: the statistics say so, and until when. It costs what an empty queue costs. Hints are
kept and wake nobody. The pause ends for this node when its time has passed, the long poll sees a due row (it sees none
in a paused queue), a poll reads the statistics, or a command of this process has resumed it. So does the pause of one
machine in the queue: its rows are on the shelf, and a refresh finds them there; the long poll tells which machines are
paused, and so that one is not any more.

Made before the feeder, and valid across its restarts: hints for the queue come here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping
from typing import Final, Literal

import attrs

from durable_actors._engine.claiming.cursor import PickCursor
from durable_actors._engine.claiming.fair_cursor import FairCursor
from durable_actors._engine.claiming.poll_timer import PollTimer
from durable_actors._engine.claiming.stats_refresh import StatsRefresh
from durable_actors._engine.claiming.throttled import Thaw, ThrottledRows
from durable_actors._engine.limits import QueueLimits
from durable_actors._engine.shares import FairShares
from durable_actors._store.claim import PickFrom, QueueShape
from durable_actors._store.fair import FairPick, Look, LookFrom
from durable_actors._store.pauses import ends_at
from durable_actors._store.rows import PickResult

MAX_PICK: Final = 1000
"""Rows per pick; batches beyond a few hundred save nothing more."""
LOCKED_PAUSE: Final = 0.01
"""Seconds until the next attempt at a due row that was not there to take: another session may have locked it."""
MAX_LOCKED_PAUSE: Final = 0.3
"""The same, when the row was found locked several times."""
WATCHED_SLEEP: Final = 1.0
"""Seconds that a feeder sleeps at least while the long poll watches its queue: short polls would be useless."""


@attrs.frozen
class Pick:
    """Claim up to so many rows, from where `ClaimPlanner.pick_from` says."""

    limit: int


@attrs.frozen
class RefreshStats:
    """Read the queue's statistics."""

    after_pick: bool


@attrs.frozen
class Expire:
    """Wake instances whose deadline has passed."""


@attrs.frozen
class ReleaseOrphans:
    """Release claims that a pick of unknown fate may have made."""


@attrs.frozen
class Sleep:
    """Nothing to do until then, or until a message comes. A time that is not in the future: start the next round."""

    until: float
    has_room: bool = False
    """The queue has free slots, and there was nothing more to pick: the long poll may watch it."""


Action = Pick | RefreshStats | Expire | Thaw | ReleaseOrphans | Sleep

EXPIRE: Final = Expire()
RELEASE_ORPHANS: Final = ReleaseOrphans()
REFRESH_BEFORE_PICK: Final = RefreshStats(after_pick=False)
REFRESH_AFTER_PICK: Final = RefreshStats(after_pick=True)
NOTHING_PICKED: Final = PickResult([], [], {})


class ClaimPlanner:
    """The memory of one queue's feeder between its picks, and its decisions."""

    def __init__(
        self, limits: QueueLimits, *, wake_feeder: Callable[[], object], shares: FairShares | None = None
    ) -> None:
        self._limits = limits
        self._wake_feeder = wake_feeder
        self.shares = shares
        """What the keys of the queue have used; None if it is not fair."""
        self._starts = 0
        self.on_pauses: Callable[[Mapping[str, float], float], None] = lambda _pauses, _now: None
        """Told which machines are paused until when ("" is the whole queue), and the time (`Dispatcher.pause`)."""
        self._reset()

    def _reset(self) -> None:
        self.fair = None if self.shares is None else FairCursor(self.shares)
        """Where a pick of a fair queue begins; None if it is not fair."""
        self.cursor = self.fair or PickCursor()
        self.stats = StatsRefresh()
        self._poll_timer = PollTimer(self._limits)
        self._first_pick = True
        self._may_have_orphans = False
        self._found_work = True  # by the last pick
        self._saw_all = False  # the last pick has read every row that was on offer
        self.queue_empty = False
        """No row of the queue was on offer, due or not, when the statistics were last read."""
        self._pick_again = False  # the last pick may have missed rows
        self._timer_wake = False  # awake because time has passed, not because of a message
        self._due_at = math.inf  # when the next row becomes eligible, as of the last refresh
        self._overdue_pause = 0.0  # before the next pick of rows that were due already then
        self._deadline = math.inf
        self._expire_pause = LOCKED_PAUSE
        self._expire_not_before = 0.0
        self._paused_until = -math.inf  # as of the last refresh or control look
        self._machine_pauses: dict[str, float] = {}  # machine → when its pause ends, as of then
        self._look = False  # read the statistics, whatever the demand
        self.turn_owed = False
        """A claim was started beside the feeder, and may not have had its first turn of the scheduler."""
        self.throttled = ThrottledRows()
        # The current round.
        self._wanted = 0
        self._began = 0.0
        self._one_by_id = False
        self._known: frozenset[str] = frozenset()
        self._expired = self._refreshed = self._by_id = False
        self._picked: PickResult | None = None
        self._refresh_wanted = False
        self._stats_began = 0
        self._thawed_only = False  # the pick takes throttled rows of a fair queue, and no others

    def restart(self) -> None:
        """A feeder starts. It knows nothing of the queue; the one before it may have died in a pick."""
        self._reset()
        self._may_have_orphans = self._starts > 0
        self._starts += 1

    # -- hints

    def notify(
        self,
        instance_id: int | None = None,
        priority: int | None = None,
        *,
        new_unkeyed: bool = False,
        by_signal: bool = False,
    ) -> None:
        """A row is on offer (`PickCursor.hint`)."""
        self.cursor.hint(instance_id, priority, new_unkeyed=new_unkeyed, by_signal=by_signal)
        if not self.paused:
            self._wake_feeder()

    def expect_deadline(self) -> None:
        """An instance was parked with a deadline: read when the next one is before sleeping again."""
        self.stats.request()
        self._look = self._look or self.paused
        self._wake_feeder()

    def expect_token(self, slot: str | None = None) -> None:
        """A throttled row of the queue may have its token, or this slot."""
        self.throttled.expect(slot)
        if not self.paused:
            self._wake_feeder()

    def claimed_at_once(self) -> None:
        """A call of this process has claimed the row that it made: look soon whether others have made some, too."""
        self._look = self.turn_owed = True
        self._wake_feeder()

    def pauses_changed(self) -> None:
        """A command of this process has paused or resumed the queue, or a machine in it: look at once."""
        self._look = True
        self._wake_feeder()

    @property
    def paused(self) -> bool:
        """Whether nothing is picked: the queue was paused when this was last read, and its time has not passed."""
        return self._paused_until > -math.inf

    @property
    def paused_machines(self) -> frozenset[str]:
        """The machines that were paused in the queue when this was last read."""
        return frozenset(self._machine_pauses)

    def see_paused_machines(self, machines: Container[str]) -> None:
        """The long poll has seen which machines are paused. If one of them is no longer, its rows are on the shelf."""
        if any(machine not in machines for machine in self._machine_pauses):
            self.pauses_changed()

    def learn_pauses(self, pauses: Mapping[str, float], now: float) -> None:
        """What is paused, and for how many seconds (`QueueShape.pauses`): a control look has read it."""
        was = self.paused
        self.see_paused_machines(pauses)
        self._take_pauses(pauses, now)
        if was and not self.paused:
            self.cursor.rewind()
            self._wake_feeder()

    def _take_pauses(self, pauses: Mapping[str, float], now: float) -> None:
        ends = ends_at(pauses, now)
        self._paused_until = ends.get("", -math.inf)
        self._machine_pauses = {machine: end for machine, end in ends.items() if machine}
        self.on_pauses(ends, now)

    def seen_due(self, priority: int) -> None:
        """The long poll has seen a due row: pick from the head, without a refresh before that."""
        if self.paused:
            self._end_pause()
        self.cursor.rewind()
        self.cursor.hint(priority=priority)
        self._wake_feeder()

    @property
    def drained(self) -> bool:
        """Whether no row is on offer, as far as this node knows. What comes on offer now may be claimed at once."""
        unsure = self._may_have_orphans or self._look or self._pick_again
        known = (
            (self._saw_all or self.queue_empty) and not self.cursor.hinted and not self.cursor.expects_rows
        )
        return known and not (unsure or self.paused or self._machine_pauses)

    @property
    def may_have_orphans(self) -> bool:
        """Whether the feeder is about to release claims that this node does not know: nothing may claim beside it."""
        return self._may_have_orphans

    def lost_claims(self) -> None:
        """A commit of unknown fate may have claimed rows of the queue: release them, as after such a pick."""
        self.failed(unknown_fate=True)
        self._wake_feeder()

    # -- a round: from waking up to going to sleep

    def begin(self, now: float, *, wanted: int, one_by_id: bool, known: frozenset[str]) -> None:
        """A round begins. `wanted`: rows in demand. `one_by_id`: one may be claimed by its id. `known`: known steps."""
        if self._paused_until <= now and self.paused:
            self._end_pause()
        if any(end <= now for end in self._machine_pauses.values()):
            self._machine_pauses = {name: end for name, end in self._machine_pauses.items() if end > now}
            self._look = True
        self._began = now
        self._wanted = min(wanted, MAX_PICK)
        self._one_by_id = one_by_id
        self._known = known
        self._expired = self._refreshed = self._by_id = self._refresh_wanted = False
        self.throttled.looked = False
        self._picked = None

    def next(self, now: float, *, watched: bool = False) -> Action:
        """What to do now. `watched`: the long poll watches the queue."""
        if self._look:
            return REFRESH_BEFORE_PICK
        if not self._wanted:
            return Sleep(math.inf)
        if self._picked is None:
            action = self._before_sleep(now, watched=watched)
            if action is not None:
                return action
            self._picked = NOTHING_PICKED
        if self._refresh_wanted:
            return REFRESH_AFTER_PICK
        if self.throttled.due(now) and not self.paused:
            return Thaw(self._wanted)
        return self._sleep(now, self._picked, watched=watched)

    def _before_sleep(self, now: float, *, watched: bool) -> Action | None:  # noqa: PLR0911 - one per case
        """What to do in a round that has not picked yet; None: there is nothing to pick."""
        if self._may_have_orphans:
            return RELEASE_ORPHANS
        if self._first_pick:  # without it, priority 0 would be picked before more urgent rows
            return REFRESH_BEFORE_PICK
        if self._deadline <= self._began and not self._expired:
            return EXPIRE
        if self.paused:
            looks = self._timer_wake and not self._refreshed
            return REFRESH_BEFORE_PICK if looks else self._rest(now, watched=watched)
        if self.throttled.thawed or self.throttled.due(self._began):
            return Pick(self._wanted) if self.throttled.thawed else Thaw(self._wanted)
        # No hint, and the last pick found nothing: the statistics cost a third of a pick.
        if self._timer_wake and not self._refreshed and not self.cursor.expects_rows:
            return REFRESH_BEFORE_PICK
        return None if self._refreshed and self.queue_empty else Pick(self._wanted)

    def _sleep(self, now: float, picked: PickResult, *, watched: bool) -> Sleep:
        if picked.claims:
            self._found_work = True
        if picked.window >= self._wanted or self._pick_again or self.throttled.thawed:
            self._pick_again = False
            # There may be more behind a full window, also if all of it was held or shelved.
            return Sleep(now)
        self._found_work = bool(picked.claims)
        until = self._poll_timer.polled(now, found_work=self._found_work)
        if watched:
            until = max(until, now + WATCHED_SLEEP)
        until = min(until, self._due_at, self.throttled.look_at)
        if self.stats.postponed:
            until = min(until, self.stats.not_before)
        later = self.cursor.next_pick(now)
        until = min(until, self._deadline, math.inf if later is None else now + later)
        return Sleep(min(until, *self._machine_pauses.values(), math.inf), has_room=True)

    def _rest(self, now: float, *, watched: bool) -> Sleep:
        """The queue is paused: sleep until the next poll, as in an empty queue, or until the pause is over."""
        self._found_work = self._pick_again = False
        until = self._poll_timer.polled(now, found_work=False)
        if watched:
            until = max(until, now + WATCHED_SLEEP)
        return Sleep(min(until, self._paused_until, self._deadline), has_room=True)

    def _end_pause(self) -> None:
        """The queue is not paused any more, as far as this node knows. What is paused beside it is read next."""
        self._paused_until = -math.inf
        self._machine_pauses = {}
        self.queue_empty = False
        self.stats.request()
        self.on_pauses({}, self._began)

    def woke(self, *, by: Literal["timer", "message"]) -> None:
        """The feeder has slept. A freed slot is not evidence of work if the last refresh found the queue empty."""
        if self.paused:
            self._timer_wake = by == "timer"
        else:
            self._timer_wake = (
                not self._found_work if by == "timer" else self.queue_empty and not self.cursor.hinted
            )

    def failed(self, *, unknown_fate: bool) -> None:
        """An action failed; `unknown_fate`: and may have had its effect."""
        self._may_have_orphans = self._may_have_orphans or unknown_fate
        self.queue_empty = False  # unknown after an error
        self.cursor.failed()
        self.throttled.failed()

    # -- results

    def orphans_released(self) -> None:
        """There are no orphans any more."""
        self._may_have_orphans = False

    def expired(self, count: int, now: float) -> None:
        """So many instances were woken; a full batch leaves more for the next round."""
        self._expired = True
        self.stats.request()
        # None although one is due: a transaction has locked it. A hundred attempts a second would not help.
        self._expire_pause = LOCKED_PAUSE if count else min(self._expire_pause * 2, MAX_LOCKED_PAUSE)
        self._expire_not_before = now + self._expire_pause

    def pick_from(self) -> PickFrom:
        """Where the pick begins. Call it when the connection is there: it takes the hints.

        In a fair queue only throttled rows are picked so: their tokens decide whose turn it is.
        """
        if self.shares is not None:
            self._by_id, self._thawed_only = False, True
            return PickFrom((), (), (), extras=self.throttled.thawed)
        begin = self.cursor.begin(
            self._began,
            limit=self._wanted,
            known=self._known,
            alone=self.queue_empty and self._one_by_id and not self.throttled.thawed,
        )
        self._by_id = bool(begin.by_id)
        self._saw_all = False
        if self.throttled.thawed:
            begin = attrs.evolve(begin, extras=[*dict.fromkeys([*begin.extras, *self.throttled.thawed])])
        return begin

    def look_from(self) -> LookFrom:
        """Of a fair queue: where the look before the pick begins. Call it when the connection is there."""
        assert self.fair is not None
        self._thawed_only = False
        return self.fair.look(limit=self._wanted)

    def looked(self, begin: LookFrom, look: Look, now: float) -> FairPick:
        """Of a fair queue: what to pick, after the look."""
        assert self.fair is not None
        return self.fair.take(begin, look, now, limit=self._wanted, known=self._known)

    def picked(self, picked: PickResult, now: float, *, seconds: float) -> None:
        """The pick has answered, after so many seconds."""
        self._picked = picked
        short = picked.window < self._wanted
        if self._thawed_only:  # a fair pick follows
            self._pick_again, short = True, False
        elif self.fair is not None:
            self.fair.full = not short
            self._pick_again = self.fair.more
            short = short and not self.fair.more
        if self._by_id:
            self.cursor.missed(picked)
            self._pick_again = True  # another process may have inserted rows, unless the refresh sees none
        else:
            self.cursor.advance(picked, now=now, took=seconds)
            self._saw_all = short
        if self._by_id or not short:
            self.queue_empty = False  # until the next refresh
        self.throttled.picked(picked, now)
        self._refresh_wanted = self.stats.wanted(now, short=short) and not self._refreshed
        if self._due_at <= self._began and not (self._by_id or self._refreshed or self._refresh_wanted):
            # This pick has looked for it, and no refresh says whether it is still there: the last one was slow.
            self._due_at = self._next_pick_of(0.0, now)

    def refresh_begins(self) -> None:
        """The statistics are being read."""
        self._look = False
        self._stats_began = self.stats.begin()

    def _next_pick_of(self, next_due: float | None, now: float) -> float:
        """When to pick the next row that becomes eligible, or did after the last pick was sent.

        The latter is picked at once. If it is there again after that, another session has locked it: the pause grows.
        """
        if next_due is None or next_due > 0:
            self._overdue_pause = 0.0
            return math.inf if next_due is None else now + next_due
        pause = self._overdue_pause
        self._overdue_pause = min(max(pause * 2, LOCKED_PAUSE), MAX_LOCKED_PAUSE)
        return now + pause

    def refreshed(self, shape: QueueShape, now: float) -> None:
        """The statistics were read."""
        was = self.paused
        self._take_pauses(shape.pauses, now)
        if was and not self.paused:
            self.cursor.rewind()
        self.queue_empty = not shape.priorities and self._known.isdisjoint(shape.shelved)
        self._due_at = self._next_pick_of(shape.next_due, now)
        self.throttled.refreshed(shape.next_token, now)
        # Not counted from now: refreshes that come more often would put the deadline off for ever.
        later = shape.next_deadline
        self._deadline = math.inf if later is None else max(now + later, self._expire_not_before)
        self.stats.done(self._stats_began, now)
        missed = self.cursor.learn(shape, known=self._known)
        if self._picked is not None:
            self._pick_again = missed or (self._pick_again and not self.queue_empty)
            self._refresh_wanted = False
        elif self._first_pick:
            self._first_pick = False
        else:
            self._refreshed = True
            if self.queue_empty:
                self.cursor.rewind()
