"""A diagram in Mermaid's language, for GitHub, GitLab and wikis. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from durable_actors.diagrams.model import Diagram, DiagramNode, Edge, State, about, omissions, printable

_STYLES: Final[dict[State, str]] = {
    "waiting": "fill:#fef3c7,stroke:#d97706,color:#451a03",
    "ready": "fill:#e0f2fe,stroke:#0284c7,color:#082f49",
    "running": "fill:#bae6fd,stroke:#0369a1,color:#082f49",
    "done": "fill:#dcfce7,stroke:#16a34a,color:#052e16",
    "failed": "fill:#fee2e2,stroke:#dc2626,color:#450a0a",
    "cancelled": "fill:#e5e7eb,stroke:#6b7280,color:#111827",
}
_LEFT_AS_IT_IS: Final = frozenset(" _-.,/()…→←✓✗")


def render_mermaid(diagram: Diagram) -> str:
    """Return a flowchart. Names are in quotes, with the code of every character that Mermaid could interpret."""
    return "\n".join(_lines(diagram)) + "\n"


def _lines(diagram: Diagram) -> Iterator[str]:
    yield "---"
    yield f'title: "{_comment(diagram.title)}"'
    yield "---"
    yield "flowchart TD"
    names = {node.id: f"n{at}" for at, node in enumerate(diagram.nodes)}
    for node in diagram.nodes:
        yield f"    {names[node.id]}{_box(node)}"
    if left_out := omissions(diagram):
        yield f'    more["{_quoted(left_out)}"]'
    for edge in diagram.edges:
        yield f"    {names[edge.source]} {_arrow(edge)} {names[edge.target]}"
    for state, style in _STYLES.items():
        members = [names[node.id] for node in diagram.nodes if node.state == state]
        if members:
            yield f"    classDef {state} {style}"
            yield f"    class {','.join(members)} {state}"
    here = [names[node.id] for node in diagram.nodes if node.current]
    if here:
        yield "    classDef current stroke-width:4px"
        yield f"    class {','.join(here)} current"
    for note in diagram.notes:
        yield f"    %% note: {_comment(note)}"


def _box(node: DiagramNode) -> str:
    told = [_quoted(node.label)]
    said = about(node)
    if said:
        told.append(_quoted(said))
    opening, closing = ("[", "]") if node.shape == "box" else ("([", "])")
    return f'{opening}"{"<br/>".join(told)}"{closing}'


def _arrow(edge: Edge) -> str:
    label = edge.label if not edge.observed else f"{edge.label}, observed" if edge.label else "observed"
    line = "==>" if edge.passed else "-.->" if edge.observed or edge.flow == "error" else "-->"
    return f'{line}|"{_quoted(label)}"|' if label else line


def _quoted(text: str) -> str:
    """The inside of a string in quotes. Letters, digits and a few signs stay; all others become `#code;`."""
    found = "".join(
        each if each.isalnum() or each in _LEFT_AS_IT_IS else f"#{ord(each)};"
        for each in printable(text, 120)
    )
    return found.replace("#92;n", "#92;#8288;n")  # Mermaid breaks the line at a backslash before an n


def _comment(text: str) -> str:
    """For the title and for comments, where Mermaid knows no codes: what could be syntax becomes a space."""
    kept = (
        each if each.isalnum() or each in _LEFT_AS_IT_IS or each in ":=" else " "
        for each in printable(text, 300)
    )
    return " ".join("".join(kept).split())
