"""A diagram as SVG: one file that needs nothing else, in light and dark colours as the reader's system says. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final
from unicodedata import combining, east_asian_width

import attrs

from durable_actors.diagrams.model import Diagram, DiagramNode, Edge, State, about, omissions, printable
from durable_actors.diagrams.place import Course, Placement, Point, Size, Wire, place

_MARGIN: Final = 20.0
_LABEL: Final = 13.0
_SMALL: Final = 11.0
_LONGEST: Final = 36
_BOLD: Final = 1.16
"""How much wider bold text is, in the widest of the usual fonts."""
_LEAST_WIDTH: Final = 360.0

_LIGHT: Final[dict[State, tuple[str, str]]] = {
    "plain": ("#ffffff", "#6b7280"),
    "waiting": ("#fef6dc", "#b7791f"),
    "ready": ("#e6f4fd", "#0b77b7"),
    "running": ("#cfe9fc", "#0369a1"),
    "done": ("#e2f7e9", "#15803d"),
    "failed": ("#fde6e6", "#c81e1e"),
    "cancelled": ("#eceef1", "#6b7280"),
}
_DARK: Final[dict[State, tuple[str, str]]] = {
    "plain": ("#1f2430", "#8b93a3"),
    "waiting": ("#3a2f12", "#e0a93b"),
    "ready": ("#12303f", "#57b6e8"),
    "running": ("#123a55", "#6cc4f5"),
    "done": ("#12351f", "#4cc677"),
    "failed": ("#431a1c", "#f27878"),
    "cancelled": ("#262b35", "#8b93a3"),
}
_MARKS: Final[dict[State, str]] = {
    "waiting": '<circle r="4" class="line"/>',
    "ready": '<circle r="4" class="line"/><circle r="1.5" class="solid"/>',
    "running": '<path d="M-3.5 -4.5L4.5 0L-3.5 4.5z" class="solid"/>',
    "done": '<path d="M-4.5 0.5L-1.5 3.5L4.5 -3.5" class="line"/>',
    "failed": '<path d="M-3.5 -3.5L3.5 3.5M3.5 -3.5L-3.5 3.5" class="line"/>',
    "cancelled": '<circle r="4" class="line"/><path d="M-2.8 2.8L2.8 -2.8" class="line"/>',
}
_MARK_ROOM: Final = 18.0


def render_svg(diagram: Diagram) -> str:
    """Return the drawing. Names are text in it, never markup."""
    nodes, edges = diagram.nodes, _one_loop_each(diagram.edges)
    at = {node.id: index for index, node in enumerate(nodes)}
    sizes = [_size(node) for node in nodes]
    labels = [_label(edge) for edge in edges]
    wires = [
        Wire(at[edge.source], at[edge.target], Size(text_width(label, _SMALL) + 8, 16) if label else Size())
        for edge, label in zip(edges, labels, strict=True)
    ]
    placed = place(sizes, wires)
    title = printable(diagram.title, 120)
    width = max(placed.width, _LEAST_WIDTH, min(_BOLD * text_width(title, 15), 900.0))
    shift = (width - placed.width) / 2
    notes = [omissions(diagram), *(f"note: {note}" for note in diagram.notes)]
    foot = [line for note in notes if note for line in _wrapped(printable(note, 1000), width)]
    top = 34.0
    height = top + placed.height + (12 + 16 * len(foot) if foot else 0)
    out = [_head(width + 2 * _MARGIN, height + 2 * _MARGIN, diagram, title)]
    out.append(f'<text class="title" x="{_n(_MARGIN)}" y="{_n(_MARGIN + 12)}">{escape(title)}</text>')
    out.append(f'<g transform="translate({_n(_MARGIN + shift)} {_n(_MARGIN + top)})">')
    out += _drawn_edges(edges, labels, placed)
    out += (_box(node, size, centre) for node, size, centre in zip(nodes, sizes, placed.centres, strict=True))
    out.append("</g>")
    for row, line in enumerate(foot):
        y = _MARGIN + top + placed.height + 24 + 16 * row
        out.append(f'<text class="note" x="{_n(_MARGIN)}" y="{_n(y)}">{escape(line)}</text>')
    return "\n".join([*out, "</svg>", ""])


def _one_loop_each(edges: Sequence[Edge]) -> list[Edge]:
    """Draw one loop at a node that has several edges to itself, with all their labels."""
    found: list[Edge] = []
    loops: dict[str, int] = {}
    for edge in edges:
        at = loops.get(edge.source) if edge.source == edge.target else None
        if at is None:
            if edge.source == edge.target:
                loops[edge.source] = len(found)
            found.append(edge)
            continue
        other = found[at]
        label = " · ".join(part for part in (_label(other), _label(edge)) if part)
        found[at] = attrs.evolve(other, label=label, observed=False, passed=other.passed or edge.passed)
    return found


def _head(width: float, height: float, diagram: Diagram, title: str) -> str:
    count = f"{len(diagram.nodes)} {diagram.kind}, {len(diagram.edges)} lines"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_n(width)}" height="{_n(height)}" '
        f'viewBox="0 0 {_n(width)} {_n(height)}" role="img">\n'
        f"<title>{escape(title)}</title>\n<desc>{escape(count)}</desc>\n<style>{_css()}</style>\n"
        f"<defs>{''.join(map(_arrow_head, ('plain', 'wait', 'error', 'passed')))}</defs>\n"
        '<rect class="canvas" width="100%" height="100%"/>'
    )


def _css() -> str:
    font = "ui-sans-serif,system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif"
    dark = _colours(_DARK, "#12151c", "#e6e9ef", "#9aa3b2")
    return (
        f"text{{font-family:{font};font-size:{_n(_LABEL)}px}}.title{{font-size:15px;font-weight:600}}"
        f".detail,.note,.label{{font-size:{_n(_SMALL)}px}}.name{{font-weight:600}}"
        ".box{stroke-width:1.2}.current .box{stroke-width:3}.line{fill:none;stroke-width:1.6}"
        ".edge{fill:none;stroke-width:1.3}.edge.error,.edge.observed{stroke-dasharray:5 4}"
        ".edge.passed{stroke-width:2.4}"
        f"{_colours(_LIGHT, '#ffffff', '#111827', '#5b6472')}"
        f"@media (prefers-color-scheme:dark){{{dark}}}"
    )


def _colours(states: dict[State, tuple[str, str]], canvas: str, ink: str, dim: str) -> str:
    rules = [
        f".canvas,.halo{{fill:{canvas}}}text{{fill:{ink}}}.detail,.note,.label{{fill:{dim}}}",
        f".edge{{stroke:{dim}}}.head-plain{{fill:{dim}}}",
    ]
    lines: dict[str, State] = {"wait": "waiting", "error": "failed", "passed": "done"}
    for flow, like in lines.items():
        colour = states[like][1]
        rules.append(f".edge.{flow}{{stroke:{colour}}}.head-{flow}{{fill:{colour}}}")
    for state, (fill, line) in states.items():
        rules.append(
            f".{state} .box{{fill:{fill};stroke:{line}}}.{state} .line{{stroke:{line}}}.{state} .solid{{fill:{line}}}"
        )
    return "".join(rules)


def _arrow_head(name: str) -> str:
    return (
        f'<marker id="da-{name}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
        f'markerUnits="userSpaceOnUse" orient="auto"><path class="head-{name}" d="M0 0.5L8 4L0 7.5z"/></marker>'
    )


def _size(node: DiagramNode) -> Size:
    name, said = _texts(node)
    mark = _MARK_ROOM if node.state in _MARKS else 0.0
    width = max(_BOLD * text_width(name, _LABEL) + mark, text_width(said, _SMALL))
    return Size(max(width + 26, 56.0), 48.0 if said else 32.0)


def _texts(node: DiagramNode) -> tuple[str, str]:
    said = about(node)
    return printable(node.label, _LONGEST), printable(said, 44)


def _box(node: DiagramNode, size: Size, centre: Point) -> str:
    name, said = _texts(node)
    x, y = centre[0] - size.width / 2, centre[1] - size.height / 2
    radius = 7 if node.shape == "box" else size.height / 2
    mark = _MARKS.get(node.state, "")
    room = _MARK_ROOM if mark else 0.0
    # With a mark everything begins at the left edge: a width that is estimated wrongly does not show.
    anchor, text_x = ("start", x + 13) if mark else ("middle", centre[0])
    text_y = centre[1] + (-4 if said else 4.5)
    full = printable(" ".join(part for part in (node.label, said) if part), 1000)
    parts = [
        f'<g class="{node.state}{" current" if node.current else ""}"><title>{escape(full)}</title>',
        f'<rect class="box" x="{_n(x)}" y="{_n(y)}" {_extent(size)} rx="{_n(radius)}"/>',
        f'<text class="name" text-anchor="{anchor}" x="{_n(text_x + room)}" y="{_n(text_y)}">{escape(name)}</text>',
    ]
    if mark:
        parts.append(f'<g transform="translate({_n(text_x + 5)} {_n(text_y - 4.5)})">{mark}</g>')
    if said:
        parts.append(
            f'<text class="detail" text-anchor="{anchor}" x="{_n(text_x)}" y="{_n(centre[1] + 13)}">'
            f"{escape(said)}</text>"
        )
    return "".join([*parts, "</g>"])


def _drawn_edges(edges: Sequence[Edge], labels: Sequence[str], placed: Placement) -> Iterator[str]:
    """All lines, then all labels, so that no line crosses a label."""
    for edge, course in zip(edges, placed.courses, strict=True):
        head = "passed" if edge.passed else edge.flow
        kinds = [edge.flow, *(["observed"] if edge.observed else []), *(["passed"] if edge.passed else [])]
        yield f'<path class="edge {" ".join(kinds)}" d="{_path(course)}" marker-end="url(#da-{head})"/>'
    for label, course in zip(labels, placed.courses, strict=True):
        if label and course.label is not None:
            x, y = course.label
            width = text_width(label, _SMALL) + 4
            yield (
                f'<rect class="halo" x="{_n(x - width / 2)}" y="{_n(y - 8)}" width="{_n(width)}" height="16"/>'
                f'<text class="label" text-anchor="middle" x="{_n(x)}" y="{_n(y + 4)}">{escape(label)}</text>'
            )


def _path(course: Course) -> str:
    points = course.points
    (x, y), *rest = points
    out = [f"M{_n(x)} {_n(y)}"]
    if course.loop:
        (ex, ey) = rest[0]
        reach = 34.0
        return (
            f"M{_n(x)} {_n(y)}C{_n(x + reach)} {_n(y - 10)} {_n(ex + reach)} {_n(ey + 10)} {_n(ex)} {_n(ey)}"
        )
    for nx, ny in rest:
        if nx == x:
            out.append(f"L{_n(nx)} {_n(ny)}")
        else:
            bend = (ny - y) / 2
            out.append(f"C{_n(x)} {_n(y + bend)} {_n(nx)} {_n(ny - bend)} {_n(nx)} {_n(ny)}")
        x, y = nx, ny
    return "".join(out)


def _label(edge: Edge) -> str:
    told = edge.label if not edge.observed else f"{edge.label}, observed" if edge.label else "observed"
    return printable(told, 40)


def escape(text: str) -> str:
    """Return a text as content of an element. Attributes have no names of users."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def text_width(text: str, size: float) -> float:
    """Estimate the width of a text in a sans-serif font, rather too wide than too narrow."""
    return size * sum(map(_em, text))


def _em(character: str) -> float:
    if combining(character):
        return 0.0
    if east_asian_width(character) in "WF":
        return 1.0
    if character in "iljtfrI.,:;|!'()[] ":
        return 0.36
    if character in "mwMW@%…→":
        return 0.92
    return 0.7 if character.isupper() or not character.isascii() else 0.58


def _wrapped(text: str, width: float) -> Iterator[str]:
    line = ""
    for word in text.split(" "):
        if line and text_width(f"{line} {word}", _SMALL) > width:
            yield line
            line = word
        else:
            line = f"{line} {word}" if line else word
    yield line


def _extent(size: Size) -> str:
    return f'width="{_n(size.width)}" height="{_n(size.height)}"'


def _n(value: float) -> str:
    """A coordinate with at most one decimal."""
    return f"{value:.1f}".removesuffix(".0")
