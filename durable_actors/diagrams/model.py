"""`Diagram`: nodes and edges to be drawn, and which of them are drawn when there are too many. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

import attrs

State = Literal["plain", "waiting", "ready", "running", "done", "failed", "cancelled"]
"""How a node is drawn. "plain": nothing is known of it, as of a step that no instance has entered."""
Shape = Literal["box", "start", "end"]
"""A step or task; where an instance comes from; where it ends."""
Flow = Literal["plain", "wait", "error"]
"""How an edge is drawn: goes on at once, waits for something first, or follows an error."""
Kind = Literal["tasks", "steps"]
"""Tasks come after each other, each is there once. Steps follow each other, also in circles."""

MOST_EDGES: Final = 20
"""Edges that are drawn, for each node that is drawn."""

_URGENCY: Final[Mapping[State, int]] = {
    "failed": 0, "running": 1, "ready": 2, "waiting": 3, "cancelled": 4, "plain": 5, "done": 6,
}  # fmt: skip


@attrs.frozen(kw_only=True)
class DiagramNode:
    """A step of a machine, a task of a graph, or an end."""

    id: str
    """Its name in the edges of this diagram."""
    label: str
    """Its name for people."""
    state: State = "plain"
    detail: str = ""
    """What else is to be said, for people: "attempt 2, 1.4 s"."""
    current: bool = False
    """Whether the instance is here now."""
    shape: Shape = "box"
    facts: Mapping[str, Any] = {}
    """What it stands for, for programs: JSON values and instants."""
    quiet: bool = False
    """Whether its colour and mark alone tell its state, because the detail says more."""


@attrs.frozen(kw_only=True)
class Edge:
    """What follows what."""

    source: str
    target: str
    label: str = ""
    flow: Flow = "plain"
    observed: bool = False
    """Whether it was seen in journals only, and not in the source."""
    passed: bool = False
    """Whether the instance took it."""


@attrs.frozen(kw_only=True)
class Diagram:
    """A graph to be drawn. `durable_actors.diagrams.render` draws it."""

    kind: Kind
    title: str
    nodes: tuple[DiagramNode, ...]
    edges: tuple[Edge, ...]
    """Only between `nodes`."""
    notes: tuple[str, ...] = ()
    """What a reader should know: steps that nothing enters, outcomes that the source does not show."""
    hidden: Mapping[str, int] = {}
    """How many nodes are left out, by state."""
    hidden_edges: int = 0
    """How many edges are left out."""

    def __attrs_post_init__(self) -> None:
        names = {node.id for node in self.nodes}
        if len(names) < len(self.nodes):
            raise ValueError("two nodes of a diagram have the same id")
        if any(edge.source not in names or edge.target not in names for edge in self.edges):
            raise ValueError("an edge of a diagram leads to a node that is not there")


def chosen(nodes: Sequence[DiagramNode], limit: int) -> tuple[list[DiagramNode], dict[str, int]]:
    """Return at most `limit` nodes, in their order, and how many of each state the others are.

    Of many nodes those stay that somebody should look at: failed, running, ready, waiting, cancelled, in this order,
    and of those in the same state the first.
    """
    if len(nodes) <= limit:
        return [*nodes], {}
    order = sorted(range(len(nodes)), key=lambda at: (not nodes[at].current, _URGENCY[nodes[at].state]))
    hidden: Counter[str] = Counter(nodes[at].state for at in order[limit:])
    return [nodes[at] for at in sorted(order[:limit])], dict(hidden)


def capped(diagram: Diagram, limit: int) -> Diagram:
    """Return the diagram with at most `limit` nodes (see `chosen`), and a number of edges that can be drawn."""
    nodes, left = chosen(diagram.nodes, limit)
    hidden = Counter(diagram.hidden) + Counter(left)
    names = {node.id for node in nodes}
    edges = [edge for edge in diagram.edges if edge.source in names and edge.target in names]
    shown = edges[: MOST_EDGES * len(nodes)]
    left_out = diagram.hidden_edges + len(diagram.edges) - len(shown)
    return attrs.evolve(
        diagram, nodes=tuple(nodes), edges=tuple(shown), hidden=dict(hidden), hidden_edges=left_out
    )


def about(node: DiagramNode) -> str:
    """Return what is said about a node beside its name: its state and its detail. The name of an end is its state."""
    state = "" if node.state == "plain" or node.shape == "end" or node.quiet else node.state
    return ", ".join(part for part in (state, node.detail) if part)


def omissions(diagram: Diagram) -> str:
    """Say what is left out: "… and 12 more: 10 done, 2 waiting"; empty if nothing is."""
    nodes = sum(diagram.hidden.values())
    what = ", ".join(f"{number} {state}" for state, number in sorted(diagram.hidden.items()) if number)
    parts = [f"… and {nodes} more: {what}"] if nodes else []
    if diagram.hidden_edges:
        lines = "line" if diagram.hidden_edges == 1 else "lines"
        parts.append(f"{'' if nodes else '… and '}{diagram.hidden_edges} {lines} not drawn")
    return "; ".join(parts)


def printable(text: str, limit: int = 60) -> str:
    """Return a text on one line, with escapes for what cannot be printed, cut at `limit` characters.

    Every format shows names in this form: a name is data, whatever it contains.
    """
    cut = text if len(text) <= limit else text[: limit - 1] + "…"
    return "".join(each if each.isprintable() else _escape(each) for each in cut)


def _escape(character: str) -> str:
    code = ord(character)
    if character == "\n":
        return "\\n"
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" if code < 65536 else f"\\U{code:08x}"
