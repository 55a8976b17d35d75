"""Where boxes and lines of a drawing lie: layers from top to bottom, few crossings, straight lines. Pure.

1. Layers (`layers.py`). If edges have labels, there is a layer between any two, in which a label takes the place of a
   box.
2. An edge over several layers passes through a *bend* in each: a box without content.
3. The order within the layers: barycentre sweeps; of all orders that occur the one with the fewest crossings.
4. Coordinates: sweeps that pull each box towards its neighbours; within a layer the least squares solution that keeps
   the order and the gaps.

All of it depends on the order of nodes and edges only: the same diagram is drawn the same way.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Sequence
from itertools import pairwise
from typing import Final

import attrs

from durable_actors.diagrams.layers import acyclic, longest_paths

SWEEPS: Final = 12
STRAIGHTENING: Final = 80
"""Sweeps over the coordinates of a small drawing."""
MOST_BENDS: Final = 20_000
"""Longer edges than these allow are drawn as one line, behind the boxes."""
GAP_X: Final = 28.0
GAP_Y: Final = 44.0
GAP_LABEL: Final = 24.0
_BEND_GAP: Final = 14.0
_STRAIGHT: Final = 30.0
"""How much more a long line wants to be straight than a box wants to be in the middle of its neighbours."""
_PORT: Final = 14.0
"""Between two lines that end at the same box, at most."""

Point = tuple[float, float]


@attrs.frozen
class Size:
    """The size of a box or a label; nothing is drawn of one without a size."""

    width: float = 0.0
    height: float = 0.0


@attrs.frozen
class Wire:
    """An edge to be placed."""

    source: int
    target: int
    label: Size = Size()


@attrs.frozen
class Course:
    """How an edge runs: vertical at every point, from the first to the last."""

    points: tuple[Point, ...]
    label: Point | None = None
    """The centre of its label."""
    loop: bool = False
    """Whether it leads from a box to itself; `points` are where it leaves and enters on the right side."""


@attrs.frozen
class Placement:
    """Where everything lies. The drawing begins at (0, 0)."""

    width: float
    height: float
    centres: tuple[Point, ...]
    courses: tuple[Course, ...]


@attrs.define
class _Item:
    """A box, a label or a bend in its layer."""

    layer: int
    left: float
    """How far it reaches to the left of its centre."""
    right: float
    height: float
    bend: bool = False
    above: list[int] = attrs.field(factory=list[int])
    below: list[int] = attrs.field(factory=list[int])
    x: float = 0.0


@attrs.frozen
class _Chain:
    """The items of an edge, from top to bottom."""

    items: list[int]
    label: int | None
    turned: bool


def place(sizes: Sequence[Size], wires: Sequence[Wire], *, loop_room: float = 30.0) -> Placement:
    """Place boxes of these sizes and the edges between them."""
    pairs = [(wire.source, wire.target) for wire in wires]
    straight, turned = acyclic(len(sizes), pairs)
    labelled = any(wire.label.width for wire in wires if wire.source != wire.target)
    step = 2 if labelled else 1
    layers = [step * layer for layer in longest_paths(len(sizes), straight)]
    items = [_Item(layer, s.width / 2, s.width / 2, s.height) for layer, s in zip(layers, sizes, strict=True)]
    for wire in wires:
        if wire.source == wire.target:  # its loop and label lie to the right of the box
            item = items[wire.source]
            item.right = max(item.right, sizes[wire.source].width / 2 + loop_room + wire.label.width)
    chains = _chains(items, straight, turned, wires)
    order = _ordered(items)
    _set_x(items, order)
    tops, bottoms = _set_y(items, order, GAP_LABEL if labelled else GAP_Y)
    left = min((item.x - item.left for item in items), default=0.0)
    for item in items:
        item.x -= left
    width = max((item.x + item.right for item in items), default=0.0)
    ends = _ports(items, chains, sizes)
    centres = tuple((item.x, (tops[item.layer] + bottoms[item.layer]) / 2) for item in items[: len(sizes)])
    courses = tuple(
        _loop(centres[wire.source], sizes[wire.source], wire, loop_room)
        if chain is None
        else _course(chain, items, ends[at], (tops, bottoms), (centres, sizes))
        for at, (wire, chain) in enumerate(zip(wires, chains, strict=True))
    )
    return Placement(width, bottoms[-1] if bottoms else 0.0, centres, courses)


def _chains(
    items: list[_Item], straight: Sequence[tuple[int, int]], turned: Sequence[bool], wires: Sequence[Wire]
) -> list[_Chain | None]:
    """Add the bends of all edges, the short ones first; None for an edge from a box to itself."""
    found: list[_Chain | None] = [None] * len(wires)
    bends = MOST_BENDS
    spans = [items[target].layer - items[source].layer for source, target in straight]
    for at in sorted(range(len(wires)), key=lambda each: (spans[each], each)):
        source, target = straight[at]
        if source == target:
            continue
        chain, label = [source], None
        bends -= spans[at] - 1
        if bends < 0:
            found[at] = _Chain([source, target], None, turned[at])
            continue
        size = wires[at].label
        middle = items[target].layer - 1 if turned[at] else items[source].layer + 1
        for layer in range(items[source].layer + 1, items[target].layer):
            item = _Item(layer, 1.0, 1.0, 0.0, bend=True)
            if size.width and layer == middle:
                item = _Item(layer, size.width / 2, size.width / 2, size.height)
                label = len(items)
            chain.append(len(items))
            items.append(item)
        chain.append(target)
        for upper, lower in pairwise(chain):
            items[upper].below.append(lower)
            items[lower].above.append(upper)
        found[at] = _Chain(chain, label, turned[at])
    return found


def _ordered(items: Sequence[_Item]) -> list[list[int]]:
    """Return the items of each layer from left to right."""
    layers: list[list[int]] = [[] for _ in range(max((item.layer for item in items), default=-1) + 1)]
    for at, item in enumerate(items):
        layers[item.layer].append(at)
    best, fewest = [list(layer) for layer in layers], _crossings(items, layers)
    for sweep in range(SWEEPS):
        if not fewest:
            break
        down = sweep % 2 == 0
        where = {at: rank for layer in layers for rank, at in enumerate(layer)}
        for layer in layers if down else reversed(layers):
            pull: dict[int, float] = {}
            for rank, at in enumerate(layer):
                near = items[at].above if down else items[at].below
                pull[at] = sum(where[each] for each in near) / len(near) if near else float(rank)
            layer.sort(key=pull.__getitem__)
            where.update((at, rank) for rank, at in enumerate(layer))
        crossings = _crossings(items, layers)
        if crossings < fewest:
            best, fewest = [list(layer) for layer in layers], crossings
    return best


def _crossings(items: Sequence[_Item], layers: Sequence[Sequence[int]]) -> int:
    """How many lines cross between neighbouring layers."""
    found = 0
    for upper, lower in pairwise(layers):
        where = {at: rank for rank, at in enumerate(lower)}
        seen: list[int] = []
        for at in upper:
            ends = sorted(where[each] for each in items[at].below if each in where)
            found += sum(len(seen) - bisect_right(seen, end) for end in ends)
            for end in ends:
                insort(seen, end)
    return found


def _set_x(items: Sequence[_Item], order: Sequence[Sequence[int]]) -> None:
    for layer in order:
        x = 0.0
        for at in layer:
            item = items[at]
            item.x = x + item.left
            x = item.x + item.right + GAP_X
    sweeps = max(SWEEPS, min(STRAIGHTENING, MOST_BENDS // max(len(items), 1)) // 2 * 2)
    for sweep in range(sweeps):
        both = sweep >= sweeps // 2  # at last to the neighbours on both sides
        for layer in order if sweep % 2 == 0 else reversed(order):
            wanted: list[float] = []
            weights: list[float] = []
            for at in layer:
                item = items[at]
                near = [*item.above, *item.below] if both else item.above if sweep % 2 == 0 else item.below
                # A line over several layers is to be straight before the boxes are in the middle of their neighbours.
                pulls = [_STRAIGHT if item.bend and items[each].bend else 1.0 for each in near]
                total = sum(pulls)
                wanted.append(
                    sum(p * items[each].x for p, each in zip(pulls, near, strict=True)) / total
                    if near
                    else item.x
                )
                weights.append(total or 0.1)
            for at, x in zip(layer, _spread(items, layer, wanted, weights), strict=True):
                items[at].x = x


def _spread(
    items: Sequence[_Item], layer: Sequence[int], wanted: Sequence[float], weights: Sequence[float]
) -> list[float]:
    """Return the places nearest to the wanted ones that keep order and gaps (pool adjacent violators)."""
    offsets = [0.0]
    for one, other in pairwise(layer):
        a, b = items[one], items[other]
        gap = _BEND_GAP if a.bend or b.bend else GAP_X
        offsets.append(offsets[-1] + a.right + gap + b.left)
    blocks: list[tuple[float, float, int]] = []  # mean, weight, members
    for x, weight, offset in zip(wanted, weights, offsets, strict=True):
        mean, total, members = x - offset, weight, 1
        while blocks and blocks[-1][0] >= mean:
            before, more, count = blocks.pop()
            mean = (mean * total + before * more) / (total + more)
            total, members = total + more, members + count
        blocks.append((mean, total, members))
    means = [mean for mean, _, members in blocks for _ in range(members)]
    return [mean + offset for mean, offset in zip(means, offsets, strict=True)]


def _set_y(
    items: Sequence[_Item], order: Sequence[Sequence[int]], gap: float
) -> tuple[list[float], list[float]]:
    """Return where each layer begins and ends."""
    tops: list[float] = []
    bottoms: list[float] = []
    for layer in order:
        tops.append(bottoms[-1] + gap if bottoms else 0.0)
        bottoms.append(tops[-1] + max(items[at].height for at in layer))
    return tops, bottoms


def _ports(
    items: Sequence[_Item], chains: Sequence[_Chain | None], sizes: Sequence[Size]
) -> list[tuple[float, float]]:
    """Return where each edge leaves its upper box and enters its lower one: side by side, in the order of their way."""
    leaving: dict[int, list[tuple[float, int]]] = {}
    entering: dict[int, list[tuple[float, int]]] = {}
    for at, chain in enumerate(chains):
        if chain is not None:
            leaving.setdefault(chain.items[0], []).append((items[chain.items[1]].x, at))
            entering.setdefault(chain.items[-1], []).append((items[chain.items[-2]].x, at))
    upper, lower = [0.0] * len(chains), [0.0] * len(chains)
    for ends, into in ((leaving, upper), (entering, lower)):
        for box, edges in ends.items():
            step = min(_PORT, 0.7 * sizes[box].width / len(edges))
            for rank, (_, at) in enumerate(sorted(edges)):
                into[at] = items[box].x + (rank - (len(edges) - 1) / 2) * step
    return list(zip(upper, lower, strict=True))


def _course(
    chain: _Chain,
    items: Sequence[_Item],
    ends: tuple[float, float],
    rows: tuple[Sequence[float], Sequence[float]],
    boxes: tuple[Sequence[Point], Sequence[Size]],
) -> Course:
    tops, bottoms = rows
    centres, sizes = boxes
    first, last = chain.items[0], chain.items[-1]
    points: list[Point] = [(ends[0], centres[first][1] + sizes[first].height / 2)]
    for at in chain.items[1:-1]:
        points += [(items[at].x, tops[items[at].layer]), (items[at].x, bottoms[items[at].layer])]
    points.append((ends[1], centres[last][1] - sizes[last].height / 2))
    label = None
    if chain.label is not None:
        layer = items[chain.label].layer
        label = (items[chain.label].x, (tops[layer] + bottoms[layer]) / 2)
    return Course(tuple(reversed(points) if chain.turned else points), label)


def _loop(centre: Point, size: Size, wire: Wire, room: float) -> Course:
    x, y = centre
    right = x + size.width / 2
    label = (right + room + wire.label.width / 2, y) if wire.label.width else None
    return Course(((right, y - size.height / 4), (right, y + size.height / 4)), label, loop=True)
