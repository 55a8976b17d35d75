"""Where the next pick of a fair queue begins. Sans-I/O; time is an argument.

A pick of a fair queue is two statements: a look at the keys that have due rows (`look`), and the pick of so many rows
of each (`take`), as `FairShares` decides. A look begins at the first key, if the queue has no more keys than one look
reads. Else it goes on where the last one ended, and the keys take turns.

Rows without a key share one place, as if they had the same key. No index has them alone: a look reads on through the
queue's own order, from a position of its own, and remembers those that it meets.
"""

from __future__ import annotations

from typing import Final

from durable_actors._engine.claiming.cursor import HEAD, PickCursor
from durable_actors._engine.shares import FairShares
from durable_actors._store.fair import FairPick, Look, LookFrom
from durable_actors._store.rows import PickResult

MIN_KEYS: Final = 64
"""Keys with due rows that a look finds at least, if there are so many."""
KEYS_PER_ROW: Final = 4
"""The same, for each row in demand."""
MAX_SKIP: Final = 200
"""Rows to leave alone by id, at most. The others are looked at again, and left again."""


class FairCursor(PickCursor):
    """The memory of a fair queue's feeder between its picks."""

    def __init__(self, shares: FairShares) -> None:
        super().__init__()
        self._shares = shares
        self._keys: dict[int, str] = {}  # priority → the key after which the next look begins
        self._plain_at: dict[int, tuple[str, int]] = {}  # the same, for rows without a key
        self._plain: dict[
            int, list[int]
        ] = {}  # priority → rows without a key that were met, and not yet taken
        self._offered_plain: list[int] = []  # those that the pick under way may take
        # A lap: from the first key of every priority to the last one, in one look or in several.
        self._ended: set[tuple[str, int]] = set()
        self._lap_over = False  # with the last look
        self._fruitful = False  # a pick of an earlier look of this lap has found rows
        self.more = False
        """There may be due rows that no look of this lap has come to, or that its picks have left."""
        self.full = False
        """The pick whose result comes next has found as many rows as it wanted."""

    def look(self, *, limit: int) -> LookFrom:
        """What to look at."""
        self._only, self.hinted = None, False
        self._hinted_priorities.clear()
        priorities = sorted(self._priorities)
        return LookFrom(
            priorities,
            [self._keys.get(priority, "") for priority in priorities],
            due_keys=max(KEYS_PER_ROW * limit, MIN_KEYS),
            plain={
                priority: self._plain_at.get(priority, HEAD)
                for priority in priorities
                if len(self._plain.get(priority, ())) < limit
            },
        )

    def take(self, begin: LookFrom, look: Look, now: float, *, limit: int, known: frozenset[str]) -> FairPick:
        """What to pick, after a look."""
        self._looked_at(begin, look)
        extras = [number for number, at in self._extras.items() if at <= now][:limit]
        self._looked = extras
        self._take(extras)
        self._offered_plain = [number for rows in self._plain.values() for number in rows[:limit]]
        keyless = [priority for priority in begin.priorities if extras or self._plain.get(priority)]
        entries = self._shares.plan([*look.due, *((priority, "") for priority in keyless)], limit, now)
        shelved = [step for step in self._shelved if step in known]
        places = len({entry.key for entry in entries}) + 1  # what comes from the shelf has one of them
        return FairPick(
            entries,
            plain=list(dict.fromkeys([*extras, *self._offered_plain])),
            skip=list(self._extras)[:MAX_SKIP],
            shelved=shelved,
            from_shelf=max(limit // places, 1) if shelved else 0,
        )

    def _looked_at(self, begin: LookFrom, look: Look) -> None:
        """Remember where this look has ended, and what it has found."""
        self._keys |= look.ends
        for priority, rows in look.plain.items():
            met = self._plain.setdefault(priority, [])
            met += [number for number in rows if number not in set(met)]
            self._plain_at[priority] = look.positions.get(priority, HEAD)
        self._ended |= {("keys", priority) for priority, end in look.ends.items() if not end}
        self._ended |= {("plain", priority) for priority in look.plain if priority not in look.positions}
        whole = {(kind, priority) for kind in ("keys", "plain") for priority in begin.priorities}
        self._lap_over = self._ended >= whole
        self.more = not self._lap_over or self._fruitful
        if self._lap_over:
            self._ended = set()
            self._fruitful = False
        if not any(begin.keys) and [*look.ends.values()] == [""] * len(begin.keys):
            self._shares.seen({key for _, key in look.due} | {""})

    def advance(self, picked: PickResult, *, now: float, took: float) -> None:
        """Take in the result of a pick."""
        super().advance(picked, now=now, took=took)
        if not self._lap_over:
            self._fruitful |= bool(picked.claims) or any(not row.postponed for row in picked.seen)
        found = {claim.id for claim in picked.claims} | {row.id for row in picked.seen}
        # Of a pick that has found nothing more, the rest were somebody else's.
        gone = found if self.full else found.union(self._offered_plain)
        if gone:
            self._plain = {
                priority: [number for number in rows if number not in gone]
                for priority, rows in self._plain.items()
            }

    def rewind(self) -> None:
        """Begin the next look for rows without a key at the head."""
        super().rewind()
        self._plain_at.clear()
