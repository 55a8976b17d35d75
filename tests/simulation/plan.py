"""The plan of a schedule: everything that a seed decides beforehand. A value, so that parts of it can be left out."""

from __future__ import annotations

from random import Random
from typing import Any, Literal

import attrs
from durable_actors._journal_level import LEVELS, JournalLevel
from tests.simulation.driver import Rates

Kind = Literal[
    "chain",
    "collector",
    "packer",
    "courier",
    "family",
    "chore",
    "sleeper",
    "stuck",
    "graph",
    "brief",
    "meter",
]
CommandName = Literal["cancel", "retry", "pause", "pause_queue", "pause_machine"]
Fault = Literal["crash", "host", "pause", "cut", "restart", "terminate", "lock", "drain", "bug"]

KINDS: tuple[Kind, ...] = (
    "chain", "chain", "collector", "collector", "packer", "packer", "family", "chore", "sleeper",
)  # fmt: skip
FAULTS: tuple[Fault, ...] = ("crash", "host", "pause", "cut", "restart", "terminate", "lock", "drain")


@attrs.frozen
class Item:
    """One instance of the workload."""

    name: str
    kind: Kind
    at: float
    size: int
    nap: float
    """Seconds that a step works at most."""
    priority: int = 0
    key: str | None = None
    target: str = ""
    parcels: tuple[int, ...] = ()
    """What it must have in the end, or deliver."""
    sent: tuple[int, ...] = ()
    """Of those, what the client sends; the rest is a courier's."""
    journal: JournalLevel = "full"
    """How much of it is recorded."""
    tenant: str = ""
    """Whose rate and slots it uses."""


@attrs.frozen
class Strike:
    """One fault: when, what, whom, for how long."""

    at: float
    fault: Fault
    node: int
    seconds: float


@attrs.frozen
class Order:
    """One command of an operator's."""

    at: float
    command: CommandName
    target: str
    """The name of an item."""
    force: bool = False
    child: bool = False
    """It is for one of the item's children."""
    again: bool = False
    """It is repeated after its answer, with the same key."""
    rest: float = 0.0
    """Of a pause: seconds until it is resumed. That of a queue, or of the item's machine in it, is of all items."""


@attrs.frozen
class Clockwork:
    """A schedule of the engines: so many slots fire, one every so many seconds."""

    every: float
    slots: int
    overlap: Literal["skip", "allow", "buffer_one", "cancel_running"]
    missed: Literal["last", "skip", "all"]
    nap: float
    """Seconds that its instances work at most."""


@attrs.frozen
class Plan:
    """A whole schedule."""

    seed: int
    nodes: int
    lasts: float
    """Seconds during which faults happen."""
    options: dict[str, Any]
    """Of every engine's Config."""
    concurrency: int
    prefetch: int
    rates: Rates
    items: tuple[Item, ...]
    strikes: tuple[Strike, ...]
    orders: tuple[Order, ...] = ()
    clockwork: Clockwork | None = None

    @property
    def fair(self) -> bool:
        """Whether the queue is fair. Not drawn: the rest of the plan stays what the seed made it."""
        return self.seed % 7 == 5

    def without(self, dropped: frozenset[int]) -> Plan:
        """The same, without some of its elements: items, then strikes, each of the rates, then orders, numbered."""
        first, second = len(self.items), len(self.items) + len(self.strikes)
        names = [field.name for field in attrs.fields(Rates)][:5]
        quiet = {name: 0.0 for number, name in enumerate(names) if second + number in dropped}
        items = tuple(item for number, item in enumerate(self.items) if number not in dropped)
        orders = tuple(
            order
            for number, order in enumerate(self.orders, second + 5)
            if number not in dropped and order.target in {item.name for item in items}
        )
        ended = {order.target for order in orders}
        items = tuple(item for item in items if item.kind != "stuck" or item.name in ended)
        kept = {item.name for item in items}
        return attrs.evolve(
            self,
            items=tuple(item for item in items if not item.target or item.target in kept),
            strikes=tuple(each for number, each in enumerate(self.strikes) if first + number not in dropped),
            rates=attrs.evolve(self.rates, **quiet),
            orders=orders,
            clockwork=None if self.elements - 1 in dropped else self.clockwork,
        )

    @property
    def elements(self) -> int:
        return len(self.items) + len(self.strikes) + 5 + len(self.orders) + (self.clockwork is not None)


def with_levels(plan: Plan) -> Plan:
    """Every second schedule records everything, the others each instance at a level of its own."""
    if plan.seed % 2 == 0:
        return attrs.evolve(plan, options={**plan.options, "journal": "full"})
    draw = Random(f"journal {plan.seed}")  # of its own: the rest of the plan stays what the seed made it
    items = tuple(attrs.evolve(item, journal=draw.choice(LEVELS)) for item in plan.items)
    return attrs.evolve(plan, items=items, options={**plan.options, "journal": draw.choice(LEVELS)})


def with_orders(plan: Plan, chance: float) -> Plan:
    """In some schedules an operator cancels and retries; in those is also an item that ends by a command alone."""
    draw = Random(f"orders {plan.seed}")  # of its own, see `with_levels`
    if draw.random() >= chance:
        return plan
    items, orders = list(plan.items), list[Order]()
    for item in draw.sample(plan.items, draw.randint(0, min(2, len(plan.items)))):
        at = item.at + draw.random() ** 2 * plan.lasts
        child = item.kind == "family" and draw.random() < 0.6
        orders.append(Order(at, "cancel", item.name, draw.random() < 0.3, child, draw.random() < 0.3))
        if item.target:  # else it would wait for ever
            orders.append(Order(at, "cancel", item.target))
        elif item.kind not in {"collector", "packer"} and not child and draw.random() < 0.6:
            at += draw.random()
            orders.append(Order(at, "retry", item.name, again=draw.random() < 0.3))
            if draw.random() < 0.4:
                orders.append(Order(at + draw.random(), "cancel", item.name, draw.random() < 0.3))
    if not orders or draw.random() < 0.5:
        at = draw.random() * plan.lasts / 2
        items.append(Item("stuck-0", "stuck", at, 1, 0.1, journal=draw.choice(LEVELS)))
        orders.append(Order(at + draw.random() * 2, "cancel", "stuck-0"))
    return attrs.evolve(plan, items=tuple(items), orders=tuple(orders))


def with_pauses(plan: Plan, chance: float) -> Plan:
    """In some schedules an operator pauses instances, their machines or the queue, and resumes them."""
    draw = Random(f"pauses {plan.seed}")  # of its own, see `with_levels`
    if draw.random() >= chance:
        return plan
    commands: tuple[CommandName, ...] = ("pause", "pause", "pause_queue", "pause_machine")
    orders = list(plan.orders)
    for item in (draw.choice(plan.items) for _ in range(draw.randint(1, 4))):
        at, rest = item.at + draw.random() ** 2 * plan.lasts, draw.random() * 3
        orders.append(Order(at, draw.choice(commands), item.name, again=draw.random() < 0.3, rest=rest))
    return attrs.evolve(plan, orders=tuple(sorted(orders, key=lambda order: order.at)))


def with_limits(plan: Plan, chance: float) -> Plan:
    """In some schedules items share a rate and slots, by tenant."""
    draw = Random(f"limits {plan.seed}")  # of its own, see `with_levels`
    if draw.random() >= chance:
        return plan
    longest = draw.choice((0.05, 0.5, plan.options["lease_ttl"]))
    items = tuple(
        Item(
            f"meter-{number}", "meter", draw.random() * plan.lasts / 2, draw.randint(1, 4),
            draw.random() * longest, draw.choice((0, 0, 1)), draw.choice((None, None, None, "red")),
            journal=draw.choice(LEVELS), tenant=draw.choice("ab"),
        )
        for number in range(draw.randint(2, 5))
    )  # fmt: skip
    return attrs.evolve(plan, items=(*plan.items, *items))


def with_clockwork(plan: Plan, chance: float) -> Plan:
    """In some schedules the engines have a schedule, a few slots of which fire."""
    draw = Random(f"clockwork {plan.seed}")  # of its own, see `with_levels`
    if draw.random() >= chance:
        return plan
    overlap = draw.choice(("skip", "allow", "buffer_one", "cancel_running"))
    missed = draw.choice(("last", "skip", "all"))
    nap = draw.choice((0.1, 0.5, 3.0))
    found = Clockwork(draw.choice((1.0, 1.0, 2.0)), draw.randint(1, 6), overlap, missed, nap)
    return attrs.evolve(plan, clockwork=found)


def make_plan(seed: int) -> Plan:
    """Draw a plan. Each seed has its own mixture: few kinds of fault often show more than all at once."""
    draw = Random(f"plan {seed}")
    lease = draw.choice((1.0, 1.5, 3.0, 6.0))
    lasts = draw.uniform(1.5, 6.0)
    nodes = draw.choice((1, 2, 2, 3))
    kinds = draw.sample(FAULTS, draw.randint(0, 4))
    rates = Rates(
        slow=draw.choice((0.0, 0.0, 0.02, 0.1)),
        lost_request=draw.choice((0.0, 0.0, 0.02)),
        lost_reply=draw.choice((0.0, 0.02, 0.1)),
        silent=draw.choice((0.0, 0.0, 0.01)),
        refused=draw.choice((0.0, 0.0, 0.03)),
        lag=draw.choice((0.001, 0.01, 0.05)),
        delay=lease * draw.choice((0.5, 1.5)),
    )
    strikes = tuple(
        Strike(
            draw.uniform(0.3, lasts),
            draw.choice(kinds),
            draw.randrange(nodes),
            draw.random() ** 2 * lease * 2,
        )
        for _ in range(draw.randint(1, 5) if kinds else 0)
    )
    options = {
        "lease_ttl": lease,
        "reap_interval": draw.choice((0.5, 2.0)),
        "dead_after": draw.choice((0.5, 2.0)),
        # The server watches idle queues, where there are connections enough; and quick ones.
        "long_poll": 0.1 if seed % 5 in {2, 3} else 0.0,
        "poll_interval": 0.05 if seed % 5 == 3 else 0.2,
        "max_poll_interval": 0.05 if seed % 5 == 3 else 1.0,
        "drain_timeout": draw.choice((0.5, 3.0)),
        "pool_size": draw.choice((3, 4, 5, 6)),
        "late_commit": draw.choice(("accept", "accept", "reject")),
    }
    plan = Plan(
        seed=seed, nodes=nodes, lasts=lasts, options=options, concurrency=draw.choice((1, 2, 4)),
        prefetch=draw.choice((0, 0, 2)), rates=rates, items=_items(draw, lasts, lease), strikes=strikes,
    )  # fmt: skip
    plan = with_pauses(with_orders(with_levels(plan), 0.4), 0.4)
    return with_clockwork(with_limits(plan, 0.35), 0.25)


def _items(draw: Random, lasts: float, lease: float) -> tuple[Item, ...]:
    """A handful of instances, in the first half of the faults."""
    items: list[Item] = []
    longest = draw.choice((0.05, 0.5, lease * 1.5))
    for number in range(draw.randint(2, 5)):
        kind: Kind = draw.choice(KINDS)
        name, at = f"{kind}-{number}", draw.random() * lasts / 2
        size = draw.randint(1, 4)
        key = draw.choice((None, None, "red", "blue")) if kind == "chain" else None
        parcels: tuple[int, ...] = ()
        sent: tuple[int, ...] = ()
        if kind in {"collector", "packer"}:
            parcels = tuple(range(number * 100, number * 100 + size))
            sent = parcels[: draw.randint(0, size)]
        nap = draw.random() * longest
        items.append(Item(name, kind, at, size, nap, draw.choice((0, 0, 1)), key, parcels=parcels, sent=sent))
        rest = parcels[len(sent) :]
        if rest:
            items.append(
                Item(f"courier-{number}", "courier", at + 0.5, len(rest), nap, target=name, parcels=rest)
            )
    return tuple(items)
