"""Which keys of a fair queue are served: the decision as a table, and whole queues in virtual time."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Mapping

import attrs
import pytest
from durable_actors._engine.claiming.fair_cursor import FairCursor
from durable_actors._engine.shares import HALF_LIFE, MAX_KEYS, FairShares, Standing, choose
from durable_actors._store.fair import Entry, Look
from durable_actors._store.rows import PickResult, Seen


@attrs.frozen
class Case:
    """Debts and steps, rows to share out, and who gets how many."""

    name: str
    keys: Mapping[str, tuple[float, float]]
    rows: int
    expected: list[tuple[str, int]]


CASES = [
    Case("nobody", {}, 5, []),
    Case("alone, whatever its debt", {"a": (900, 1)}, 5, [("a", 5)]),
    Case("equal ones", {"a": (0, 1), "b": (0, 1)}, 10, [("a", 5), ("b", 5)]),
    Case("the lowest goes first", {"a": (3, 1), "b": (0, 1)}, 1, [("b", 1), ("a", 0)]),
    Case("until it has caught up", {"a": (3, 1), "b": (0, 1)}, 5, [("b", 4), ("a", 1)]),
    Case("far behind: everything", {"a": (100, 1), "b": (0, 1)}, 10, [("b", 10), ("a", 0)]),
    Case("short jobs: as many as long ones cost", {"a": (0, 34), "b": (0, 1)}, 35, [("a", 1), ("b", 34)]),
    Case("a weight of 9", {"a": (0, 1 / 9), "b": (0, 1)}, 10, [("a", 9), ("b", 1)]),
    Case(
        "one row: the first of equals",
        {"a": (0, 1), "b": (0, 1), "c": (0, 1)},
        1,
        [("a", 1), ("b", 0), ("c", 0)],
    ),
    Case("negative debts are owed", {"a": (-5, 1), "b": (0, 1)}, 5, [("a", 5), ("b", 0)]),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_choose(case: Case):
    standings = [Standing(key, debt, step) for key, (debt, step) in case.keys.items()]
    assert choose(standings, case.rows) == case.expected


class World:
    """A queue of so many slots in virtual time; tenants send jobs, each of so many seconds."""

    def __init__(self, *, slots: int, weights: Mapping[str, float] | None = None) -> None:
        self.shares = FairShares(weights or {})
        self.slots = slots
        self.now = 0.0
        self.backlog: dict[str, int | float] = {}
        self.lasts: dict[str, Callable[[int], float]] = {}
        self.used: Counter[str] = Counter()
        self.begun: Counter[str] = Counter()
        self._running: list[tuple[float, str, str]] = []
        self._number = 0

    def send(self, key: str, lasts: float | Callable[[int], float], count: float = math.inf) -> None:
        self.backlog[key] = self.backlog.get(key, 0) + count
        self.lasts[key] = lasts if callable(lasts) else lambda _: lasts

    def pick(self) -> list[str]:
        free = self.slots - len(self._running)
        due = [(0, key) for key in sorted(self.backlog) if self.backlog[key] > 0]
        self.shares.seen({key for _, key in due})
        entries = self.shares.plan(due, free, self.now) if free else []
        taken: list[str] = []
        for rows in ([entry.rows for entry in entries], [free] * len(entries)):
            for entry, wanted in zip(entries, rows, strict=True):
                for _ in range(wanted):
                    if len(taken) < free and self.backlog[entry.key] > 0:
                        self.backlog[entry.key] -= 1
                        taken.append(entry.key)
        claims = {f"c{self._number + index}": key for index, key in enumerate(taken)}
        self._number += len(claims)
        self.shares.claimed(claims, self.now)
        for claim_id, key in claims.items():
            self.shares.started(claim_id, self.now)
            self.begun[key] += 1
            end = self.now + self.lasts[key](self.begun[key])
            heapq.heappush(self._running, (end, claim_id, key))
        return taken

    def run(self, seconds: float) -> None:
        until = self.now + seconds
        began = {claim_id: self.now for _, claim_id, _ in self._running}
        while self.now < until:
            for _ in self.pick():
                pass
            began |= {claim_id: self.now for _, claim_id, _ in self._running if claim_id not in began}
            if not self._running or self._running[0][0] > until:
                break
            self.now, claim_id, key = heapq.heappop(self._running)
            self.used[key] += self.now - began.pop(claim_id)  # type: ignore[assignment]
            self.shares.ended(claim_id, self.now)
        self.now = until
        for _, claim_id, key in self._running:
            self.used[key] += until - began[claim_id]  # type: ignore[assignment]

    def share(self, key: str) -> float:
        return self.used[key] / sum(self.used.values())


@pytest.mark.parametrize("slots", [1, 2, 10, 50])
@pytest.mark.parametrize("long", [34.0, 3.0, 0.01])
def test_seconds_are_shared_and_not_jobs(slots: int, long: float):
    world = World(slots=slots)
    world.send("a", long)
    world.send("b", long / 34)
    world.run(max(200 * long / slots, 10 * long))
    assert world.share("a") == pytest.approx(0.5, abs=0.05)


def test_weights_are_respected():
    world = World(slots=8, weights={"gold": 3})
    world.send("gold", 2.0)
    world.send("iron", 0.5)
    world.run(300)
    assert world.share("gold") == pytest.approx(0.75, abs=0.05)


def test_jobs_of_changing_length_are_paid_for_as_they_were():
    world = World(slots=4)
    world.send("a", lambda n: 20.0 if n % 10 == 0 else 0.1)
    world.send("b", 1.0)
    world.run(2000)
    assert world.share("a") == pytest.approx(0.5, abs=0.05)


def test_a_tenant_that_is_alone_gets_everything():
    world = World(slots=10)
    world.send("a", 1.0)
    world.run(50)
    assert world.used == {"a": 500}


def test_who_comes_later_is_served_at_once_and_owes_nothing():
    world = World(slots=10)
    world.send("a", 5.0)
    world.run(1002)
    world.send("b", 5.0, count=1)
    world.run(2.9)
    assert world.begun["b"] == 0  # every slot is taken
    world.run(0.2)
    assert world.begun["b"] == 1
    world.send("b", 5.0)
    before = Counter(world.used)
    world.run(500)
    gained = {key: world.used[key] - before[key] for key in "ab"}
    assert gained["a"] == pytest.approx(gained["b"], rel=0.1)


def test_sleep_earns_no_credit():
    world = World(slots=4)
    world.send("a", 1.0)
    world.send("b", 1.0, count=40)
    world.run(1000)  # b is done soon, and sleeps
    world.send("b", 1.0)
    before = Counter(world.used)
    world.run(20)
    gained = {key: world.used[key] - before[key] for key in "ab"}
    assert gained["a"] == pytest.approx(gained["b"], rel=0.15)


def test_long_steps_that_never_end_do_not_take_every_slot():
    world = World(slots=10)
    world.send("a", 1e9)
    world.send("b", 0.5)
    world.run(100)
    assert (
        world.begun["a"] <= 7
    )  # what a step costs is known when it has run for so long, and nothing stops it then
    assert world.share("b") >= 0.3


def test_a_debt_is_forgotten_in_time():
    shares = FairShares({})
    shares.claimed({"c": "a"}, 0.0)
    shares.started("c", 0.0)
    shares.ended("c", 3600.0)
    [a, b] = shares.standings(["a", "b"], 3600.0)
    assert a.debt - b.debt == pytest.approx(3600)
    [a, b] = shares.standings(["a", "b"], 3600.0 + HALF_LIFE)
    assert a.debt - b.debt == pytest.approx(1800)


def test_a_claim_that_never_had_a_slot_costs_nothing():
    shares = FairShares({})
    shares.claimed({"c": "a", "d": "b"}, 0.0)
    shares.ended("c", 100.0)
    [a, b] = shares.standings(["a", "b"], 100.0)
    assert a.debt < b.debt


def test_keys_without_work_are_forgotten():
    shares = FairShares({})
    for number in range(2 * MAX_KEYS):
        shares.claimed({"c": f"k{number}"}, float(number))
        shares.started("c", float(number))
        shares.ended("c", number + 0.5)
        shares.seen(set())
    shares.standings(["x"], 1e6)
    assert len(shares._debts) <= MAX_KEYS + 1


# -- the cursor


def result(claims: int = 0, *seen: Seen) -> PickResult:
    return (
        PickResult([None] * 0, list(seen), {})
        if not claims
        else PickResult([], [*seen, Seen(1, 0, "", "h")], {})
    )


def test_a_queue_of_few_keys_is_seen_as_a_whole_each_time():
    cursor = FairCursor(FairShares({}))
    begin = cursor.look(limit=3)
    assert (begin.priorities, begin.keys, begin.due_keys) == ([0], [""], 64)
    picked = cursor.take(begin, Look([(0, "a")], {0: ""}, {0: []}), 0.0, limit=3, known=frozenset())
    assert (picked.entries, cursor.more) == ([Entry(0, "a", 3)], False)


def test_many_keys_take_turns_and_the_lap_ends():
    """A lap in which nothing was found is the last one; else there is another."""
    cursor = FairCursor(FairShares({}))
    for end, found, more in [("m", True, True), ("", False, True), ("m", False, True), ("", False, False)]:
        begin = cursor.look(limit=3)
        assert begin.keys == ["" if end == "m" else "m"]
        cursor.take(begin, Look([], {0: end}, {0: []}), 0.0, limit=3, known=frozenset())
        assert cursor.more is more
        cursor.advance(result(int(found)), now=0.0, took=0.0)


def test_rows_without_a_key_are_remembered_until_they_are_taken():
    cursor = FairCursor(FairShares({}))
    begin = cursor.look(limit=2)
    picked = cursor.take(begin, Look([], {0: ""}, {0: [7, 8, 9]}), 0.0, limit=2, known=frozenset())
    assert picked.plain == [7, 8]
    cursor.full = True
    cursor.advance(PickResult([], [Seen(7, 0, "", "h"), Seen(8, 0, "", "h")], {}), now=0.0, took=0.0)
    begin = cursor.look(limit=1)
    assert begin.plain == {}  # it knows one
    assert cursor.take(begin, Look([], {0: ""}), 0.0, limit=1, known=frozenset()).plain == [9]


def test_a_row_that_was_left_is_skipped_for_a_while():
    cursor = FairCursor(FairShares({}))
    begin = cursor.look(limit=2)
    cursor.take(begin, Look([(0, "a")], {0: ""}, {0: []}), 0.0, limit=2, known=frozenset())
    cursor.advance(PickResult([], [Seen(5, 0, "", "l")], {}), now=0.0, took=0.0)
    look = Look([(0, "a")], {0: ""}, {0: []})
    assert cursor.take(begin, look, 0.0, limit=2, known=frozenset()).skip == [5]
    assert cursor.take(begin, look, 1.0, limit=2, known=frozenset()).skip == []
