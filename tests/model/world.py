"""What the store must do, in plain Python: instances, inboxes, barriers. No SQL, no clock, no connection."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
from durable_actors.machine import Await, Done, Next, Outcome, Retry, ScheduleChildren, Stop

LIVE = {"runnable", "executing", "awaiting_signal", "awaiting_children"}


@attrs.define
class Row:
    """One instance."""

    id: int
    status: str = "runnable"
    step: str = "start"
    visit: int = 1
    round: int = 0
    attempt: int = 0
    crashes: int = 0
    claim: int | None = None
    """Number of the claim that the row shows: its holder's, or that of the commit that was the last."""
    due: bool = True
    awaits: tuple[str, ...] | None = None
    await_step: str | None = None
    deadline: bool = False
    kept: frozenset[int] = frozenset()
    """What its last park ignored."""
    key: str | None = None
    parent: int | None = None
    barrier: int | None = None
    pending: int = 0
    total: int = 0
    wake_on_failure: bool = False

    def wake(self) -> None:
        self.status, self.step = "runnable", self.await_step or self.step
        self.await_step, self.deadline, self.due = None, False, True

    @property
    def ended(self) -> bool:
        return self.status not in LIVE


@attrs.define
class Letter:
    """One signal: unread, or consumed and remembered for its dedup key."""

    id: int
    target: int
    name: str
    dedup: str | None
    unread: bool = True


@attrs.define
class Hold:
    """A claim in a worker's hands, stale or not."""

    number: int
    id: int
    visit: int
    awaits: tuple[str, ...] | None
    handed: frozenset[int] | None = None
    """None until its step has started."""


@attrs.define
class World:
    """Everything."""

    rows: dict[int, Row] = attrs.field(factory=dict)
    letters: dict[int, Letter] = attrs.field(factory=dict)
    consumed: set[int] = attrs.field(factory=set)

    def is_current(self, hold: Hold) -> bool:
        row = self.rows[hold.id]
        return (row.status, row.claim, row.visit) == ("executing", hold.number, hold.visit)

    def unread(self, target: int, names: Sequence[str] | None = None) -> set[int]:
        return {
            letter.id
            for letter in self.letters.values()
            if letter.target == target and letter.unread and (names is None or letter.name in names)
        }

    def occupant(self, key: str | None) -> int | None:
        return next(
            (r.id for r in self.rows.values() if key is not None and r.key == key and not r.ended), None
        )

    # -- signals and time

    def expect_signal(self, target: int, name: str, dedup: str | None) -> str:
        """What becomes of a signal; see `deliver`, which makes it so."""
        if target not in self.rows or self.rows[target].ended:
            return "no_target"
        known = any(
            (each.target, each.dedup) == (target, dedup)
            for each in self.letters.values()
            if dedup is not None
        )
        return "duplicate" if known else "sent"

    def deliver(self, letter: Letter) -> None:
        self.letters[letter.id] = letter
        row = self.rows[letter.target]
        if row.status == "awaiting_signal" and letter.name in (row.awaits or ()):
            row.wake()

    def expire(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self.rows[number].wake()

    # -- claims

    def pick(self, hold: Hold) -> None:
        row = self.rows[hold.id]
        assert row.status == "runnable"
        assert row.due
        row.status, row.claim = "executing", hold.number

    def give_back(self, hold: Hold, *, attempts: int) -> bool:
        if not self.is_claimed(hold):
            return False
        row = self.rows[hold.id]
        row.status, row.claim, row.due = "runnable", None, True
        row.attempt += attempts
        return True

    def is_claimed(self, hold: Hold) -> bool:
        """Heartbeats and releases are fenced by the claim alone."""
        row = self.rows[hold.id]
        return row.status == "executing" and row.claim == hold.number

    def crash(self, numbers: Sequence[int], *, max_crashes: int | None) -> None:
        for number in numbers:
            row = self.rows[number]
            row.crashes += 1
            row.claim = None
            if max_crashes is not None and row.crashes >= max_crashes:
                self.end(row, "failed")
            else:
                row.attempt += 1
                row.status, row.due = "runnable", True
        self.join([self.rows[number] for number in numbers if self.rows[number].ended])

    # -- outcomes

    def commit(self, group: Sequence[tuple[Hold, Outcome]]) -> set[int]:
        """A group commit: fenced one by one; then joins, counted together."""
        current = [(hold, outcome) for hold, outcome in group if self.is_current(hold)]
        ended: list[Row] = []
        for hold, outcome in current:
            row = self.rows[hold.id]
            self.apply(row, hold, outcome)
            if row.ended:
                ended.append(row)
        self.join(ended)
        return {hold.id for hold, _ in current}

    def apply(self, row: Row, hold: Hold, outcome: Outcome) -> None:
        handed = set(hold.handed or ())
        row.due = True
        row.round += 1
        match outcome:
            case Next():
                self.consume(row, handed | set(outcome.consume))
                self.enter(row, outcome.step)
                row.status = "runnable"
            case Retry():
                row.status, row.due = "runnable", not outcome.delay
                row.attempt += 1
            case Await():
                self.park(row, handed, outcome)
            case Done():
                self.end(row, "done")
            case Stop():
                self.end(row, "failed")
            case ScheduleChildren():
                raise AssertionError("see schedule")

    def enter(self, row: Row, step: str) -> None:
        row.step, row.attempt, row.crashes, row.awaits = step, 0, 0, None
        row.visit += 1
        row.round = 0
        row.total = row.pending = 0

    def park(self, row: Row, handed: set[int], outcome: Await) -> None:
        again = {number for number in handed if self.letters[number].name in outcome.names}
        kept = again - set(outcome.consume)
        self.consume(row, (handed - kept) | set(outcome.consume))
        if outcome.then is not None:
            self.enter(row, row.step)
        row.awaits, row.await_step, row.deadline = outcome.names, outcome.then, outcome.timeout is not None
        row.status, row.kept = "awaiting_signal", frozenset(kept)
        if self.unread(row.id, outcome.names) - kept:
            row.wake()

    def schedule(self, hold: Hold, outcome: ScheduleChildren, children: Sequence[int]) -> None:
        row = self.rows[hold.id]
        self.consume(row, set(hold.handed or ()))
        self.enter(row, row.step)
        for number in children:
            self.rows[number] = Row(number, parent=row.id, barrier=row.visit)
        quorum = outcome.join if isinstance(outcome.join, int) else len(children)
        row.total, row.pending = len(children), min(quorum, len(children))
        row.wake_on_failure = outcome.join == "any_failed"
        row.await_step, row.deadline, row.due = outcome.then, outcome.timeout is not None, True
        row.status = "awaiting_children"
        if not row.pending:
            row.wake()

    def end(self, row: Row, status: str) -> None:
        row.status, row.deadline, row.await_step = status, False, None
        if status == "done":
            row.awaits = None
            self.letters = {number: each for number, each in self.letters.items() if each.target != row.id}

    def consume(self, row: Row, numbers: set[int]) -> None:
        for number in numbers:
            letter = self.letters.get(number)
            if letter is None or letter.target != row.id or not letter.unread:
                continue
            assert number not in self.consumed, "consumed twice"
            self.consumed.add(number)
            letter.unread = False
            if letter.dedup is None:
                del self.letters[number]

    def join(self, ended: Sequence[Row]) -> None:
        for parent in {row.parent for row in ended if row.barrier is not None}:
            row = self.rows[parent]  # type: ignore[index]
            count = [each for each in ended if each.parent == parent and each.barrier == row.visit]
            if row.status != "awaiting_children" or not count:
                continue
            row.pending = max(row.pending - len(count), 0)
            if not row.pending or (row.wake_on_failure and any(each.status == "failed" for each in count)):
                row.wake()
