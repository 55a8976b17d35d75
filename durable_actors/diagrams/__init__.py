"""Diagrams: graphs of tasks and steps as text, Mermaid, DOT and SVG. No database, no command line.

    diagram = await da.graph(report_id)
    Path("report.svg").write_text(diagrams.render(diagram, "svg"))

`Diagram` is plain data; each format is a file of this package that draws it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, Literal, get_args

from durable_actors.diagrams.dot import render_dot
from durable_actors.diagrams.mermaid import render_mermaid
from durable_actors.diagrams.model import Diagram, DiagramNode, Edge, capped
from durable_actors.diagrams.svg import render_svg
from durable_actors.diagrams.text import render_text

__all__ = ["FORMATS", "LIMIT", "Diagram", "DiagramNode", "Edge", "Format", "render"]

Format = Literal["text", "mermaid", "dot", "svg"]
FORMATS: Final[tuple[Format, ...]] = get_args(Format)
LIMIT: Final = 100
"""How many nodes are drawn, unless the caller says otherwise."""
_RENDERERS: Final[Mapping[Format, Callable[[Diagram], str]]] = {
    "text": render_text,
    "mermaid": render_mermaid,
    "dot": render_dot,
    "svg": render_svg,
}


def render(diagram: Diagram, format: Format = "text", *, limit: int = LIMIT) -> str:  # noqa: A002 - as in str.format
    """Return a diagram in one of the formats. It says how many nodes and lines are left out because of `limit`."""
    if format not in _RENDERERS:
        raise ValueError(f"format={format!r} is none of {', '.join(FORMATS)}")
    if limit < 1:
        raise ValueError(f"limit={limit!r} must be at least 1")
    return _RENDERERS[format](capped(diagram, limit))
