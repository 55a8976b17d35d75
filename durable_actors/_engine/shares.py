"""FairShares: which keys of a fair queue are served next, and what each has used. Sans-I/O; time is an argument.

Every key has a *debt*: the worker-seconds that it has used on this node, divided by its weight. A pick serves the keys
with the lowest debts. A worker-second is a slot that is taken for a second, so long steps count for what they cost.

- A claim is charged at once with what a claim of its key usually takes (`usual`), and with the real time when it has
  run longer than that, or has ended. Else a key could take every slot before its first step ends.
- A key that is new, or had nothing to do, starts at the *floor*: the debt of the key that was served last. It gets no
  credit for its sleep, and the others no advantage from what they used while it slept.
- What a key has used beyond the floor, or is owed, halves every `HALF_LIFE` seconds: there is no penalty for life.

`choose` decides: a pure function of debts. A key that waits alone gets every slot, whatever its debt.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final

import attrs

from durable_actors._store.fair import Entry

HALF_LIFE: Final = 600.0
"""Seconds after which half of a debt is forgotten."""
DECAY_INTERVAL: Final = 10.0
"""Seconds between two reckonings of that."""
SMOOTHING: Final = 0.2
"""How much the last run of a key counts for what its next one is expected to take."""
MIN_SECONDS: Final = 1e-6
"""The least that a claim is expected to take."""
MAX_KEYS: Final = 10_000
"""Keys to remember, at most. One that is forgotten starts at the floor."""
FORGET: Final = 0.001
"""Debts that are nearer to the floor than so many seconds are forgotten while their keys have nothing to do."""


@attrs.frozen
class Standing:
    """What counts for a key when rows are shared out."""

    key: str
    debt: float
    """Worker-seconds that it has used, divided by its weight."""
    step: float
    """What one more row of it is expected to add to that."""


def choose(standings: Iterable[Standing], rows: int) -> list[tuple[str, int]]:
    """Share so many rows out: the keys in the order in which they are served, each with its number of rows. Pure.

    The rows are given out one by one, each to the key with the lowest debt, which grows by its step. Keys that come too
    late for a row get 0: the pick goes to them if the first have fewer rows than they may take.
    """
    ranked = sorted(standings, key=lambda each: each.debt)
    given = [0] * len(ranked)
    lowest = [(each.debt, index) for index, each in enumerate(ranked)]  # sorted, so a heap
    for _ in range(rows if ranked else 0):
        debt, index = lowest[0]
        given[index] += 1
        heapq.heapreplace(lowest, (debt + ranked[index].step, index))
    return [(each.key, count) for each, count in zip(ranked, given, strict=True)]


@attrs.define(eq=False)
class Charge:
    """What a claim costs its key."""

    key: str
    expected: float
    """Seconds."""
    spent: float = 0.0
    """Seconds for which it has had a slot, until `since`."""
    since: float | None = None
    """Since when it has a slot; None: it has none."""

    def seconds(self, now: float) -> float:
        """Seconds for which it has had a slot."""
        return self.spent if self.since is None else self.spent + now - self.since

    def cost(self, now: float) -> float:
        """What it is charged with: the expected time, or what it has used, if that is more or its step has ended."""
        if self.since is None and self.spent:
            return self.spent
        return max(self.expected, self.seconds(now))


class FairShares:
    """What the keys of one queue have used on this node."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = weights
        self._debts: dict[str, float] = {}  # of claims that have ended
        self._usual: dict[str, float] = {}  # seconds of a claim
        self._any = 1.0  # the same, of a key that is not known
        self._charges: dict[str, Charge] = {}  # by claim id
        self._awake: set[str] = set()  # keys that had a due row when this was last read, or have a claim
        self._floor = 0.0
        self._decayed_at: float | None = None

    @property
    def awake(self) -> int:
        """How many keys have due or claimed rows, as far as this node has seen."""
        return len(self._awake)

    # -- deciding

    def standings(self, keys: Collection[str], now: float) -> list[Standing]:
        """The standings of keys that have due rows. One that had none starts at the floor, or higher."""
        self._decay(now)
        pending = self._pending(now)
        for key in keys:
            if key not in self._awake:
                self._awake.add(key)
                self._debts[key] = max(self._debts.get(key, self._floor), self._floor)
        return [
            Standing(key, self._debts[key] + pending.get(key, 0.0), self._expected(key) / self.weight(key))
            for key in keys
        ]

    def plan(self, due: Sequence[tuple[int, str]], rows: int, now: float) -> list[Entry]:
        """Decide how many rows of which key to take, most urgent priority first. `due`: priority and key."""
        by_priority: dict[int, list[str]] = {}
        for priority, key in due:
            by_priority.setdefault(priority, []).append(key)
        return [
            Entry(priority, key, count)
            for priority, keys in sorted(by_priority.items())
            for key, count in choose(self.standings(keys, now), rows)[: 2 * rows]
        ]

    def seen(self, keys: Collection[str]) -> None:
        """A look at the whole queue has found due rows of these keys only: the others have nothing to do."""
        busy = {charge.key for charge in self._charges.values()}
        self._awake = {key for key in self._awake if key in keys or key in busy}

    def weight(self, key: str) -> float:
        """The weight of a key; 1 by default."""
        return self._weights.get(key, 1.0)

    # -- charging

    def claimed(self, keys: Mapping[str, str], now: float) -> None:
        """Rows of these keys were claimed; by claim id. The floor rises to the lowest of their debts.

        Without what is only expected: else a key that comes now would pay for a guess that is too high.
        """
        self._awake.update(keys.values())
        used = {key: self._debts.setdefault(key, self._floor) for key in keys.values()}
        for charge in self._charges.values():
            if charge.key in used:
                used[charge.key] += charge.seconds(now) / self.weight(charge.key)
        if used:
            self._floor = max(self._floor, min(used.values()))
        for claim_id, key in keys.items():
            self._charges[claim_id] = Charge(key, self._expected(key))

    def order(self, keys: Mapping[str, str], now: float) -> dict[str, float]:
        """For each of these claims, which are not charged yet, the debt of its key before it: the lowest runs first."""
        pending = self._pending(now)
        found: dict[str, float] = {}
        for claim_id, key in keys.items():
            debt = self._debts.get(key, self._floor) + pending.get(key, 0.0)
            found[claim_id] = debt
            pending[key] = pending.get(key, 0.0) + self._expected(key) / self.weight(key)
        return found

    def started(self, claim_id: str, now: float) -> None:
        """The claim has a slot."""
        charge = self._charges.get(claim_id)
        if charge is not None and charge.since is None:
            charge.since = now

    def stopped(self, claim_id: str, now: float) -> None:
        """The claim has no slot any more; it may get one again."""
        charge = self._charges.get(claim_id)
        if charge is not None:
            charge.spent, charge.since = charge.seconds(now), None

    def ended(self, claim_id: str, now: float) -> None:
        """The claim is over: its key pays for the time that it has used, and for none if it never had a slot."""
        charge = self._charges.pop(claim_id, None)
        if charge is None:
            return
        key, seconds = charge.key, charge.seconds(now)
        self._debts[key] = self._debts.get(key, self._floor) + seconds / self.weight(key)
        if seconds:
            usual = self._usual.get(key)
            self._usual[key] = seconds if usual is None else usual + (seconds - usual) * SMOOTHING
            self._any += (seconds - self._any) * SMOOTHING

    def _expected(self, key: str) -> float:
        return max(self._usual.get(key, self._any), MIN_SECONDS)

    def _pending(self, now: float) -> dict[str, float]:
        """What the claims of each key are charged with."""
        found: dict[str, float] = {}
        for charge in self._charges.values():
            found[charge.key] = found.get(charge.key, 0.0) + charge.cost(now) / self.weight(charge.key)
        return found

    def _decay(self, now: float) -> None:
        """Halve what is above or below the floor, and forget keys that are near it and have nothing to do."""
        if self._decayed_at is None:
            self._decayed_at = now
        elapsed = now - self._decayed_at
        if elapsed < DECAY_INTERVAL and len(self._debts) <= MAX_KEYS:
            return
        self._decayed_at = now
        floor, part = self._floor, 0.5 ** (elapsed / HALF_LIFE)
        asleep = [key for key in self._debts if key not in self._awake]
        for key in self._debts:
            self._debts[key] = floor + (self._debts[key] - floor) * part
        asleep.sort(key=lambda key: self._debts[key])
        beyond = len(self._debts) - MAX_KEYS
        for index, key in enumerate(asleep):
            if index < beyond or self._debts[key] < floor + FORGET:
                del self._debts[key]
                self._usual.pop(key, None)
