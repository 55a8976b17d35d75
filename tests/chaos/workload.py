"""What a run is asked to do, made from its seed, and what each part of it must come to. Pure.

Every insert has a unique key that stays occupied after the end, every signal a dedup key: senders repeat until they are
told that it is done, so at the end everything is there exactly once, whatever happened in between.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any, Final, get_args

import attrs
from durable_actors._journal_level import LEVELS, JournalLevel
from durable_actors.machine import Status
from tests.chaos.graphs import expected, random_graph, to_state

SENDERS: Final = 2
NOBODY: Final = -1
ALWAYS: Final = get_args(Status)
"""A unique scope that is never left."""


@attrs.frozen(kw_only=True)
class Insert:
    """One instance to insert."""

    at: float
    """Seconds after the start."""
    sender: int
    """Which sender; SENDERS: all of them, and one instance must come of it; NOBODY: its first signal starts it."""
    key: str
    machine: str
    state: Mapping[str, Any]
    priority: int = 0
    partition_key: str | None = None
    schedule_in: float | None = None
    status: str = "done"
    """How it must end."""
    result: object = None
    children: int = 0
    """Rows that it makes, directly."""
    journal: JournalLevel = "full"
    """How much of its history is recorded."""


@attrs.frozen(kw_only=True)
class Send:
    """One signal to send."""

    at: float
    sender: int
    target: str
    name: str
    payload: int
    dedup_key: str
    hold: float = 0.0
    """Seconds for which the sender's transaction stays open, and the target's row locked."""
    start: Insert | None = None
    """What it starts, should nobody have done so."""


@attrs.frozen
class Plan:
    """A run's work."""

    inserts: tuple[Insert, ...]
    sends: tuple[Send, ...]

    def of(self, sender: int) -> list[Insert | Send]:
        """What one sender does, in time's order."""
        mine = [each for each in (*self.inserts, *self.sends) if each.sender in {sender, SENDERS}]
        return sorted(mine, key=lambda each: each.at)


def make_plan(seed: int, seconds: float, *, scale: float = 1.0) -> Plan:
    """The work of a run, spread over so many seconds."""
    maker = _Maker(random.Random(f"workload {seed}"), seconds)
    for make, count in (
        (maker.chain, 24),
        (maker.tally, 12),
        (maker.pack, 6),
        (maker.sleeper, 10),
        (maker.family, 8),
        (maker.courier, 8),
        (maker.job, 20),
        (maker.hopeless, 5),
        (maker.contended, 6),
        (maker.started, 5),
    ):
        for n in range(max(1, round(count * scale))):
            make(n)
    for n in range(4):
        maker.lane(n, max(2, round(7 * scale)))
    for n in range(max(1, round(6 * scale))):
        maker.graph(n)
    for n in range(max(1, round(10 * scale))):
        maker.limited(n)
    return _with_levels(Plan(tuple(maker.inserts), tuple(maker.sends)), seed)


def default_level(seed: int) -> JournalLevel:
    """How much is recorded of what workers insert: by every second seed everything."""
    return "full" if seed % 2 == 0 else random.Random(f"default level {seed}").choice(LEVELS)


def _with_levels(plan: Plan, seed: int) -> Plan:
    """By every second seed everything is recorded, by the others each instance has a level of its own."""
    if seed % 2 == 0:
        return plan
    draw = random.Random(f"levels {seed}")  # of its own: the rest of the plan stays what the seed made it
    inserts = {each.key: attrs.evolve(each, journal=draw.choice(LEVELS)) for each in plan.inserts}
    sends = (
        each if each.start is None else attrs.evolve(each, start=inserts[each.target]) for each in plan.sends
    )
    return Plan(tuple(inserts.values()), tuple(sends))


class _Maker:
    def __init__(self, rng: random.Random, seconds: float) -> None:
        self.rng = rng
        self.seconds = seconds
        self.inserts: list[Insert] = []
        self.sends: list[Send] = []

    def _insert(self, machine: str, key: str, state: Mapping[str, Any], **fields: Any) -> Insert:
        fields.setdefault("at", self.rng.random() * self.seconds)
        fields.setdefault("sender", self.rng.randrange(SENDERS))
        insert = Insert(machine=f"chaos.{machine}", key=key, state=state, **fields)
        self.inserts.append(insert)
        return insert

    def _send(self, insert: Insert, name: str, payload: int) -> None:
        start = insert if insert.sender == NOBODY else None
        self.sends.append(
            Send(
                at=insert.at + self.rng.random() * (self.seconds - insert.at),
                sender=self.rng.randrange(SENDERS),
                target=insert.key,
                name=name,
                payload=payload,
                dedup_key=f"{name}:{len(self.sends)}",
                hold=0.3 if start is None and self.rng.random() < 0.1 else 0.0,
                start=start,
            )
        )

    def chain(self, n: int) -> None:
        rng, hops = self.rng, self.rng.randint(2, 6)
        fails = [rng.choice((0, 0, 0, 1, 2)) for _ in range(hops)]
        threads = [hop for hop in range(hops) if rng.random() < 0.2]
        state = {"hops": hops, "fails": fails, "threads": threads, "path": [], "long": n % 6 == 0}
        delay = rng.random() if rng.random() < 0.2 else None
        priority = rng.choice((-1, 0, 0, 1))
        self._insert(
            "Chain",
            f"chain:{n}",
            state,
            at=rng.random() * self.seconds * (0.3 if state["long"] else 1.0),
            schedule_in=delay,
            priority=priority,
            result=list(range(hops)),
        )

    def _tally(self, key: str, ticks: list[int], tocks: list[int], **fields: Any) -> Insert:
        state = {"ticks": len(ticks), "tocks": len(tocks), "tick": 0, "tock": 0, "sum": 0}
        state["timeout"] = self.rng.choice((0.3, 1.0, 60.0, 60.0))
        result = {"tick": len(ticks), "tock": len(tocks), "sum": sum(ticks) + sum(tocks)}
        return self._insert("Tally", key, state, result=result, **fields)

    def tally(self, n: int) -> None:
        ticks = [self.rng.randrange(1000) for _ in range(self.rng.randint(1, 5))]
        tocks = [self.rng.randrange(1000) for _ in range(self.rng.randint(0, 3))]
        insert = self._tally(f"tally:{n}", ticks, tocks)
        for name, payloads in (("tick", ticks), ("tock", tocks)):
            for payload in payloads:
                self._send(insert, name, payload)

    def pack(self, n: int) -> None:
        cards = [self.rng.randrange(1000) for _ in range(self.rng.randint(1, 4))]
        insert = self._insert("Pack", f"pack:{n}", {"size": len(cards)}, result=sorted(cards))
        for card in cards:
            self._send(insert, "card", card)

    def sleeper(self, n: int) -> None:
        self._insert("Sleeper", f"sleeper:{n}", {"timeout": self.rng.random() * 2}, result=0)

    def family(self, n: int) -> None:
        good, bad = self.rng.randint(1, 4), self.rng.randint(0, 2)
        state: dict[str, Any] = {"good": good, "bad": bad, "generation": 0}
        if n % 4 == 3:
            state["quorum"] = self.rng.randint(1, good + bad)
            self._insert("Family", f"family:{n}", state, result=True, children=good + bad)
        elif n % 4 == 2:
            state["deadline"] = self.rng.random() * 0.3
            self._insert("Family", f"family:{n}", state, result="in time", children=good + bad)
        else:
            each = [sum(range(good)), good + bad]
            self._insert("Family", f"family:{n}", state, result=[each, each], children=2 * (good + bad))

    def courier(self, n: int) -> None:
        ticks = [self.rng.randrange(1000) for _ in range(self.rng.randint(1, 3))]
        target = self._tally(f"receiver:{n}", ticks, [])
        self._insert(
            "Courier",
            f"courier:{n}",
            {"ticks": ticks, "target": target.key},
            at=target.at + 0.001,  # by the same sender, and so after its target
            sender=target.sender,
            result="delivered",
            children=2,
        )

    def job(self, n: int) -> None:
        self._insert("job", f"job:{n}", {"n": n, "fails": self.rng.choice((0, 0, 1, 3))}, result=n)

    def hopeless(self, n: int) -> None:
        self._insert("hopeless", f"hopeless:{n}", {"cancel": n % 2 == 0}, status="failed")

    def contended(self, n: int) -> None:
        self._insert("job", f"contended:{n}", {"n": n}, sender=SENDERS, result=n)

    def started(self, n: int) -> None:
        ticks = [self.rng.randrange(1000) for _ in range(self.rng.randint(1, 4))]
        insert = self._tally(f"started:{n}", ticks, [], sender=NOBODY)
        for payload in ticks:
            self._send(insert, "tick", payload)

    def graph(self, n: int) -> None:
        rng = random.Random(f"graph {n} {self.rng.random()}")
        tasks = random_graph(rng, rng.randint(1, 12))
        state = {"tasks": to_state(tasks)}
        self._insert("Graph", f"graph:{n}", state, result=expected(tasks), children=len(tasks))

    def limited(self, n: int) -> None:
        draw = random.Random(f"limited {n} {self.rng.random()}")
        state = {
            "tenant": f"t{n % 2}",
            "weight": draw.randint(1, 30),
            "fails": draw.choice((0, 0, 1)),
            "told": n % 4 == 0,
        }
        self._insert("Limited", f"limited:{n}", state, result="through")

    def lane(self, key: int, count: int) -> None:
        sender, at = self.rng.randrange(SENDERS), 0.0
        for n in range(count):
            at += self.rng.random() * 2 * self.seconds / count * 0.9
            self._insert(
                "Lane",
                f"lane:{key}:{n}",
                {"n": n},
                at=min(at, self.seconds),
                sender=sender,
                partition_key=f"key:{key}",
                result=n,
            )


@attrs.frozen(kw_only=True)
class Ack:
    """What a sender was told: this is done."""

    sender: int
    key: str
    """Unique key, or dedup key of a signal."""
    id: int | None
    """The instance's id; None for a signal."""
