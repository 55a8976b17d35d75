"""A diagram in the DOT language, for Graphviz. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from durable_actors.diagrams.model import Diagram, DiagramNode, Edge, State, about, omissions, printable

_COLOURS: Final[dict[State, tuple[str, str]]] = {
    "plain": ("#ffffff", "#4b5563"),
    "waiting": ("#fef3c7", "#d97706"),
    "ready": ("#e0f2fe", "#0284c7"),
    "running": ("#bae6fd", "#0369a1"),
    "done": ("#dcfce7", "#16a34a"),
    "failed": ("#fee2e2", "#dc2626"),
    "cancelled": ("#e5e7eb", "#6b7280"),
}


def render_dot(diagram: Diagram) -> str:
    """Return a digraph. Names are quoted labels; the nodes have names of ours."""
    return "\n".join(_lines(diagram)) + "\n"


def _lines(diagram: Diagram) -> Iterator[str]:
    yield "digraph {"
    title = [_quoted(diagram.title), *(_quoted(f"note: {note}") for note in diagram.notes)]
    yield f'    label="{"".join(f"{line}{_BREAK}" for line in title)}"; labelloc=t; rankdir=TB;'
    yield '    graph [fontname="Helvetica"]; edge [fontname="Helvetica", fontsize=10];'
    yield '    node [shape=box, style="rounded,filled", fontname="Helvetica"];'
    names = {node.id: f"n{at}" for at, node in enumerate(diagram.nodes)}
    for node in diagram.nodes:
        yield f"    {names[node.id]} [{_box(node)}];"
    if left_out := omissions(diagram):
        yield f'    more [label="{_quoted(left_out)}", shape=plaintext, style=""];'
    for edge in diagram.edges:
        yield f"    {names[edge.source]} -> {names[edge.target]} [{_arrow(edge)}];"
    yield "}"


_BREAK: Final = "\\l"


def _box(node: DiagramNode) -> str:
    said = about(node)
    label = _quoted(node.label) + (f"\\n{_quoted(said)}" if said else "")
    fill, line = _COLOURS[node.state]
    shape = ', shape=ellipse, style="filled"' if node.shape != "box" else ""
    width = ", penwidth=3" if node.current else ""
    return f'label="{label}", fillcolor="{fill}", color="{line}"{shape}{width}'


def _arrow(edge: Edge) -> str:
    label = edge.label if not edge.observed else f"{edge.label}, observed" if edge.label else "observed"
    parts = [f'label="{_quoted(label)}"'] if label else []
    if edge.observed or edge.flow == "error":
        parts.append("style=dashed")
    if edge.flow != "plain":
        parts.append(f'color="{_COLOURS["failed" if edge.flow == "error" else "waiting"][1]}"')
    if edge.passed:
        parts.append("penwidth=2.5")
    return ", ".join(parts)


def _quoted(text: str) -> str:
    """The inside of a quoted string: Graphviz interprets backslashes, and entities such as `&lt;`."""
    return printable(text, 120).replace("&", "&amp;").replace("\\", "\\\\").replace('"', '\\"')
