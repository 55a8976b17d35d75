"""Diagrams to draw."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from random import Random
from typing import Any

from durable_actors.diagrams import Diagram, DiagramNode, Edge

HOSTILE = (
    'a"];DROP<script>alert(1)</script>',
    "end",
    "x\ny\r\x1b[31m",
    '`md` %%{init: {"theme":"dark"}}%%',
    "style a:#35; &amp; &lt;b&gt;",
    "日本語の名前とても長い名前とても長い名前とても長い名前",
    "\\N \\G back\\slash\\",
    "]]><!-- --><![CDATA[",
    "subgraph x\n  n0 --> n1",
    "} digraph {",
    "\u202egnp.exe \ud800 \u2028",
    "n0",
    "",
)
"""Names that are syntax somewhere."""


def tasks(names: Iterable[str], edges: Iterable[tuple[str, str]], **more: Any) -> Diagram:
    nodes = tuple(DiagramNode(id=name, label=name) for name in names)
    drawn = tuple(Edge(source=source, target=target) for source, target in edges)
    return Diagram(kind="tasks", title="tasks", nodes=nodes, edges=drawn, **more)


def hostile(kind: Any = "tasks") -> Diagram:
    nodes = tuple(DiagramNode(id=each, label=each, detail=each, state="waiting") for each in HOSTILE)
    edges = tuple(Edge(source=one, target=other, label=one) for one, other in pairwise(HOSTILE))
    return Diagram(kind=kind, title="\n".join(HOSTILE), nodes=nodes, edges=edges, notes=HOSTILE)


def random_diagram(seed: int, size: int = 12, *, circles: bool = True) -> Diagram:
    random = Random(seed)
    names = [f"task_{number}" for number in range(size)]
    pairs: set[tuple[int, int]] = set()
    for _ in range(random.randrange(3 * size)):
        source, target = random.randrange(size), random.randrange(size)
        if circles or source < target:
            pairs.add((source, target))
    nodes = tuple(DiagramNode(id=name, label=name * random.randrange(1, 4)) for name in names)
    edges = tuple(
        Edge(source=names[source], target=names[target], label=random.choice(["", "", "a label"]))
        for source, target in sorted(pairs)
    )
    return Diagram(kind="steps" if circles else "tasks", title=str(seed), nodes=nodes, edges=edges)


def diamond(width: int, depth: int = 1) -> Diagram:
    """Layers of this width, each complete to the next, between one first and one last task."""
    layers: list[Sequence[str]] = [["first"]]
    layers += ([f"l{layer}_{number}" for number in range(width)] for layer in range(depth))
    layers.append(["last"])
    pairs = [(one, other) for upper, lower in pairwise(layers) for one in upper for other in lower]
    return tasks([name for layer in layers for name in layer], pairs)
