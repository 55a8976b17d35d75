"""What a seed decides beforehand. The same kind of plan as the large simulation's, but smaller: a handful of steps.

Every seed has a theme: faults that are dense in one corner show more than all of them at once, thinly.
"""

from __future__ import annotations

from random import Random
from typing import Any

import attrs
from tests.simulation.driver import Rates
from tests.simulation.plan import Fault, Item, Kind, Plan, Strike, with_levels, with_orders

KINDS: tuple[Kind, ...] = (
    "chain", "chain", "chain", "collector", "collector", "packer", "packer", "family", "chore", "sleeper",
)  # fmt: skip
FAULTS: tuple[Fault, ...] = (
    "crash", "host", "pause", "cut", "restart", "terminate", "bug", "lock", "drain",
)  # fmt: skip
THEMES = ("any", "any", "any", "any", "calm", "late", "long", "keys", "vanished", "back", "unknown")


@attrs.frozen
class Shape:
    """What a theme decides."""

    kinds: tuple[Kind, ...] = KINDS
    faults: tuple[Fault, ...] = FAULTS
    strikes: tuple[int, int] = (0, 3)
    naps: tuple[float, ...] = (0.02, 0.3, 2.0)
    """How long a step works at most: leases."""
    rates: dict[str, float] = attrs.field(factory=dict[str, float])
    options: dict[str, Any] = attrs.field(factory=dict[str, Any])
    keyed: float = 0.2
    lasts: tuple[float, float] = (0.8, 2.0)
    """Seconds during which faults happen; also how long one lasts at most."""


QUIET = {"slow": 0.0, "lost_request": 0.0, "lost_reply": 0.0, "refused": 0.0}
SHAPES: dict[str, Shape] = {
    "any": Shape(),
    # Nothing is wrong: nothing may be taken from anybody.
    "calm": Shape(strikes=(0, 0), naps=(2.0,), rates=QUIET),
    # Messages slower than leases.
    "late": Shape(
        kinds=("chain", "collector", "packer", "packer"), strikes=(0, 1), naps=(0.02, 0.3),
        rates={"slow": 0.5, "delay": 2.0}, options={"late_commit": "reject", "lease_ttl": 1.0},
    ),
    # Steps longer than leases, nodes that are cut off or stand still.
    "long": Shape(
        kinds=("chain", "chore", "collector"), faults=("cut", "pause", "restart"), strikes=(1, 3), naps=(2.5,),
        rates={"slow": 0.3, "delay": 1.5},
    ),
    # Siblings of one key, sessions that end.
    "keys": Shape(
        kinds=("chain",), faults=("cut", "terminate", "restart", "pause", "crash"), strikes=(1, 3), naps=(0.3, 2.0),
        keyed=1.0,
    ),
    # The same, and a server that gives up the sessions of a host from which it hears nothing.
    "vanished": Shape(
        kinds=("chain",), faults=("cut", "host"), strikes=(1, 2), naps=(1.5,), keyed=1.0, lasts=(4.0, 6.0),
        options={"lease_ttl": 4.0, "dead_after": 0.9},
    ),
    # Servers that restart under leases that are long; nodes that come back.
    "back": Shape(
        kinds=("chain", "chore"), faults=("restart", "terminate", "cut"), strikes=(2, 4), naps=(1.0,),
        rates={"slow": 0.4, "delay": 0.5}, options={"lease_ttl": 4.0, "dead_after": 0.9},
    ),
    # Replies that are lost, of instances that run ahead.
    "unknown": Shape(
        kinds=("chain", "packer", "family"), strikes=(0, 1), rates={"lost_reply": 0.2, "lost_request": 0.1},
    ),
}  # fmt: skip


def make_plan(seed: int) -> Plan:
    """Draw a plan."""
    draw = Random(f"small {seed}")
    shape = SHAPES[draw.choice(THEMES)]
    options = {
        "lease_ttl": draw.choice((1.0, 2.0)),
        "reap_interval": draw.choice((1.0, 2.0)),
        "dead_after": draw.choice((0.6, 1.0)),
        "poll_interval": 0.25,
        "max_poll_interval": 2.0,
        "late_commit": draw.choice(("accept", "accept", "reject")),
        "skew": draw.choice((0.0, 3600.0, -50.0)),
    } | shape.options
    lease = options["lease_ttl"]
    lasts = draw.uniform(*shape.lasts)
    nodes = draw.choice((2, 2, 2, 3))
    faults = draw.sample(shape.faults, min(len(shape.faults), draw.randint(1, 3)))
    rates = {
        "slow": draw.choice((0.0, 0.05, 0.2)),
        "lost_request": draw.choice((0.0, 0.0, 0.03)),
        "lost_reply": draw.choice((0.0, 0.05, 0.1)),
        "refused": draw.choice((0.0, 0.0, 0.05)),
        "lag": draw.choice((0.005, 0.04)),
        "delay": draw.choice((0.3, 1.5)),
    } | shape.rates
    strikes = tuple(
        Strike(draw.uniform(0.05, lasts), draw.choice(faults), draw.randrange(nodes), draw.random() * shape.lasts[1])
        for _ in range(draw.randint(*shape.strikes))
    )  # fmt: skip
    plan = Plan(
        seed=seed, nodes=nodes, lasts=lasts, options=options, concurrency=draw.choice((1, 2, 3)),
        prefetch=draw.choice((0, 0, 1)), rates=Rates(**rates | {"delay": rates["delay"] * min(lease, 2.0)}),
        items=_items(draw, shape, lasts, lease), strikes=strikes,
    )  # fmt: skip
    return with_orders(with_levels(plan), 0.3)


def _items(draw: Random, shape: Shape, lasts: float, lease: float) -> tuple[Item, ...]:
    """Two or three instances, in the first part of the faults."""
    items: list[Item] = []
    longest = draw.choice(shape.naps) * lease
    key = "red" if draw.random() < shape.keyed else None
    for number in range(draw.choice((2, 2, 3))):
        kind: Kind = draw.choice(shape.kinds)
        name, at, size = f"{kind}-{number}", draw.random() * lasts / 3, draw.randint(1, 2)
        parcels: tuple[int, ...] = ()
        if kind in {"collector", "packer"}:
            parcels = tuple(range(number * 100, number * 100 + size))
        sent = parcels[: draw.randint(0, size)]
        nap = draw.uniform(0.2, 1.0) * longest
        mine = key if kind == "chain" else None
        items.append(
            Item(name, kind, at, size, nap, draw.choice((0, 0, 1)), mine, parcels=parcels, sent=sent)
        )
        rest = parcels[len(sent) :]
        if rest:
            items.append(
                Item(f"courier-{number}", "courier", at + 0.1, len(rest), nap, target=name, parcels=rest)
            )
    return tuple(items)
