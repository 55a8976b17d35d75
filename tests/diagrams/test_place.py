"""The layout: every edge goes down, no box or label lies on another, and large graphs take a bounded time."""

from __future__ import annotations

import time
from itertools import combinations

import pytest
from durable_actors.diagrams import Diagram, render
from durable_actors.diagrams.layers import acyclic, longest_paths
from durable_actors.diagrams.place import Placement, Size, Wire, place
from tests.diagrams.kit import diamond, random_diagram

BOX, LABEL = Size(80, 30), Size(50, 16)


def placed(diagram: Diagram) -> tuple[list[Wire], Placement]:
    at = {node.id: index for index, node in enumerate(diagram.nodes)}
    wires = [
        Wire(at[edge.source], at[edge.target], LABEL if edge.label else Size()) for edge in diagram.edges
    ]
    return wires, place([BOX] * len(at), wires)


@pytest.mark.parametrize("seed", range(40))
def test_nothing_overlaps_and_everything_is_inside(seed: int):
    wires, found = placed(random_diagram(seed))
    boxes = [(x, y, BOX) for x, y in found.centres]
    boxes += [
        (*course.label, LABEL) for course in found.courses if course.label is not None and not course.loop
    ]
    for (ax, ay, a), (bx, by, b) in combinations(boxes, 2):
        apart_x = abs(ax - bx) >= (a.width + b.width) / 2 - 0.01
        apart_y = abs(ay - by) >= (a.height + b.height) / 2 - 0.01
        assert apart_x or apart_y
    for x, y, size in boxes:
        assert -0.01 <= x - size.width / 2 <= x + size.width / 2 <= found.width + 0.01
        assert -0.01 <= y - size.height / 2 <= y + size.height / 2 <= found.height + 0.01
    for wire, course in zip(wires, found.courses, strict=True):
        assert course.loop == (wire.source == wire.target)
        if not course.loop:
            ys = [y for _, y in course.points]
            assert ys in (sorted(ys), sorted(ys, reverse=True))
            assert (course.label is not None) == bool(wire.label.width)


@pytest.mark.parametrize("seed", range(40))
def test_without_circles_every_edge_goes_down(seed: int):
    wires, found = placed(random_diagram(seed, circles=False))
    for wire in wires:
        assert found.centres[wire.source][1] < found.centres[wire.target][1]


def test_layers():
    edges = [(0, 1), (1, 2), (0, 2), (2, 0), (3, 3)]
    straight, turned = acyclic(4, edges)
    assert turned == [False, False, False, True, False]
    assert straight[3] == (0, 2)
    assert longest_paths(4, straight) == [0, 1, 2, 0]


def test_a_tree_has_no_crossings():
    _, found = placed(diamond(6))
    xs = [found.centres[index][0] for index in range(1, 7)]
    assert xs == sorted(xs)
    middle = (xs[0] + xs[-1]) / 2
    assert found.centres[0][0] == pytest.approx(middle, abs=1)
    assert found.centres[7][0] == pytest.approx(middle, abs=1)


@pytest.mark.parametrize(
    "diagram",
    [diamond(1000), diamond(30, depth=30), random_diagram(1, size=1000, circles=False)],
    ids=["wide", "dense", "long"],
)
def test_a_thousand_nodes_are_drawn_in_bounded_time(diagram: Diagram):
    began = time.process_time()
    assert render(diagram, "svg", limit=1000).endswith("</svg>\n")
    assert time.process_time() - began < 20  # about 3 s on an idle machine
