"""Where the next pick begins. Sans-I/O; time is an argument.

Every claim leaves a dead entry at the head of the pick index, and a pick from the head walks these entries until vacuum
removes them. So a pick begins where the last one ended, per priority. The cursor only *hides* rows; it decides nothing
about safety or about the order within a key. Rows that appear before it (late commits, past dates, promotions, rows
that a pick passed over) are found in two ways: by their ids (`extras`) if this process knows them, and by a pick from
the head, at least every `RESET_MAX` seconds and more often if the last full scan was cheap, so that full scans take at
most a twentieth of the time.
"""

from __future__ import annotations

from typing import Final

from durable_actors._store.claim import PickFrom, QueueShape
from durable_actors._store.rows import PickResult

RESET_MIN: Final = 0.1
RESET_MAX: Final = 2.0
SCAN_SHARE: Final = 20.0
"""Full scans may take one part in so many of the time."""
LOOK_AGAIN: Final = 0.005
"""Seconds until a row that a pick passed over is tried again: the transaction that had its key is usually over then."""
LOOK_MAX: Final = 0.1
"""The pause doubles up to this: an elder sibling may be in a queue that is full, or that this node does not serve."""
MAX_EXTRAS: Final = 10_000
"""Rows to remember by id, at most. A full scan finds the others."""

HEAD: Final = ("-infinity", -(2**63))
"""Before every row, also rows that were inserted by hand with an id below 1."""


class PickCursor:
    """The memory of one feeder between its picks."""

    def __init__(self) -> None:
        self._positions: dict[int, tuple[str, int]] = {}
        self._priorities: set[int] = {0}
        self._hinted_priorities: set[int] = set()  # since the last pick
        self._shelved: tuple[str, ...] = ()
        self._extras: dict[int, float] = {}
        self._looked: list[int] = []  # the extras of the pick under way
        self._taken: dict[int, float] = {}  # what that pick has removed from `_extras`
        self._pauses: dict[int, float] = {}  # the last pause of each row that was passed over
        self._only: int | None = None  # the only row that was hinted since the last pick, if it has no key
        self._keyed = False  # the last rows that a pick has found had keys
        self._reset_at = 0.0
        self._full = False
        self.hinted = False
        """There were hints since the last pick."""

    def begin(self, now: float, *, limit: int, known: frozenset[str], alone: bool = False) -> PickFrom:
        """Where to pick from now.

        `alone`: no row was on offer at the last refresh, and there is room for more than one. Then, if exactly one row
        was hinted since and it has no key, it is claimed by its id. Rows that another process inserted are found by the
        refresh that follows this pick.
        """
        only, self._only, self.hinted = self._only, None, False
        self._hinted_priorities.clear()
        if alone and only is not None and not any(at <= now for n, at in self._extras.items() if n != only):
            self._looked = [only]
            self._take(self._looked)
            return PickFrom((), (), (), by_id=self._looked)
        if now >= self._reset_at:
            self._positions.clear()
        self._full = not self._positions
        priorities = sorted(self._priorities)
        places = [self._positions.get(priority, HEAD) for priority in priorities]
        extras = [number for number, at in self._extras.items() if at <= now][:limit]
        self._looked = extras
        self._take(extras)
        return PickFrom(
            priorities=priorities,
            eligible_ats=[at for at, _ in places],
            ids=[number for _, number in places],
            extras=extras,
            shelved=[step for step in self._shelved if step in known],
        )

    def _take(self, numbers: list[int]) -> None:
        self._taken = {number: self._extras.pop(number) for number in numbers if number in self._extras}

    def failed(self) -> None:
        """A pick may have failed: the next one looks for its extras. Nothing to do if the last pick has answered."""
        self._extras = self._taken | self._extras
        self._taken = {}

    @property
    def priorities(self) -> frozenset[int]:
        """The priorities that picks read."""
        return frozenset(self._priorities)

    @property
    def expects_rows(self) -> bool:
        """Whether the next pick has rows to look for by their ids."""
        return bool(self._extras)

    def rewind(self) -> None:
        """Begin the next pick at the head."""
        self._positions.clear()

    def missed(self, picked: PickResult) -> None:
        """After a pick by id: the next pick looks for the rows that it did not claim."""
        claimed = {claim.id for claim in picked.claims}
        missed = [number for number in self._looked if number not in claimed]
        self._extras.update((number, 0.0) for number in missed)
        self._taken = {}
        self._keyed = bool(missed)  # a guess: that is the likely reason

    def advance(self, picked: PickResult, *, now: float, took: float) -> None:
        """Take in the result of a pick that took so many seconds."""
        self._taken = {}
        for priority, position in picked.positions.items():
            self._positions[priority] = max(self._positions.get(priority, HEAD), position, key=_sortable)
        if picked.claims:
            self._keyed = picked.claims[-1].partition_key is not None
        left = {row.id for row in picked.seen if row.postponed}
        for number in self._looked:
            if number not in left:
                self._pauses.pop(number, None)
        for number in left:
            pause = self._pauses[number] = min(self._pauses.get(number, LOOK_AGAIN / 2) * 2, LOOK_MAX)
            self._extras[number] = now + pause
        if self._full:
            self._reset_at = now + min(max(took * SCAN_SHARE, RESET_MIN), RESET_MAX)

    def learn(self, shape: QueueShape, *, known: frozenset[str]) -> bool:
        """Take in which priorities and shelved steps the queue has. True: the last pick missed some of them."""
        missed = not self._priorities.issuperset(shape.priorities)
        missed |= any(step in known for step in set(shape.shelved) - set(self._shelved))
        # A row may have come while the statistics were read: they do not show it.
        self._priorities = {0, *shape.priorities, *self._hinted_priorities}
        self._shelved = shape.shelved
        return missed

    def hint(
        self,
        instance_id: int | None = None,
        priority: int | None = None,
        *,
        new_unkeyed: bool = False,
        by_signal: bool = False,
    ) -> None:
        """A row is on offer: the one with this id, or some row of this priority.

        `new_unkeyed`: it is new, due, and has no partition key, so no pick has passed it over. `by_signal`: a signal
        woke it, so it is due. Whether it has a key is unknown; the cursor guesses from the last rows.
        """
        unkeyed = new_unkeyed or (by_signal and not self._keyed)
        self._only = instance_id if unkeyed and not self.hinted else None
        self.hinted = True
        if instance_id is not None and not new_unkeyed and len(self._extras) < MAX_EXTRAS:
            self._extras[instance_id] = 0.0
            self._pauses.pop(instance_id, None)
        if priority is not None:
            self._priorities.add(priority)
            self._hinted_priorities.add(priority)

    def next_pick(self, now: float) -> float | None:
        """Seconds until a pick may find rows that the last one could not see; None if that saw everything.

        Such rows were passed over, or are before the cursor: two inserts may commit in another order than they began.
        """
        at = min(self._extras.values(), default=None)
        if self._positions:
            at = self._reset_at if at is None else min(at, self._reset_at)
        return None if at is None else max(at - now, 0.0)


def _sortable(position: tuple[str, int]) -> tuple[bool, str, int]:
    # "-infinity" first; instants are UTC in one format, where a longer fraction sorts after its own prefix.
    at, number = position
    return (at != "-infinity", at.removesuffix("+00"), number)
