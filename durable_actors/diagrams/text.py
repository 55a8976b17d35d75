"""A diagram as text for a terminal: one line per node; edges are named, not drawn. Pure.

Tasks name what they come after, steps name what follows them: `→` from the source, `⇢` from journals only, `↻` the same
step again, `⇒` a way that the instance took. So the width does not depend on the size of the graph,
and every line can be found with grep.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, Literal
from unicodedata import combining, east_asian_width

from durable_actors.diagrams.layers import acyclic, longest_paths
from durable_actors.diagrams.model import Diagram, Edge, State, about, omissions, printable

Style = State | Literal["title", "dim", "current"]
Line = tuple[tuple[str, Style], ...]
"""Pieces of text, each with its style."""

WIDTH: Final = 80
MARKS: Final[dict[State, str]] = {
    "plain": "○", "waiting": "◌", "ready": "○", "running": "▶", "done": "✓", "failed": "✗", "cancelled": "⊘",
}  # fmt: skip
_LONGEST: Final = 32
"""Characters of a name in its column."""
_BRIEF: Final = 30
"""What is said about a node is one column as long as it is not longer."""


def render_text(diagram: Diagram, width: int = WIDTH) -> str:
    """Return the diagram as plain text, at most `width` columns wide."""
    return "".join("".join(text for text, _ in line) + "\n" for line in text_lines(diagram, width))


def text_lines(diagram: Diagram, width: int = WIDTH) -> Iterator[Line]:
    """Iterate over the lines, with the style of each piece."""
    yield from _folded(((printable(diagram.title, 1000), "title"),), width, indent=2)
    if diagram.nodes:
        yield ()
        yield from _tasks(diagram, width) if diagram.kind == "tasks" else _steps(diagram, width)
    if left_out := omissions(diagram):
        yield from _folded(((left_out, "dim"),), width)
    for at, note in enumerate(diagram.notes):
        if not at:
            yield ()
        yield from _folded(((f"note: {printable(note, 1000)}", "dim"),), width, indent=6)


def _tasks(diagram: Diagram, width: int) -> Iterator[Line]:
    """One line per task, layer by layer, with what it comes after."""
    place = {node.id: at for at, node in enumerate(diagram.nodes)}
    edges = [(place[edge.source], place[edge.target]) for edge in diagram.edges]
    layers = longest_paths(len(place), acyclic(len(place), edges)[0])
    names = {node.id: _cut(printable(node.label), _LONGEST) for node in diagram.nodes}
    before: dict[str, list[str]] = {}
    for edge in diagram.edges:
        before.setdefault(edge.target, []).append(names[edge.source])
    column = max(map(columns, names.values()), default=0)
    details = {node.id: printable(about(node), 200) for node in diagram.nodes}
    second = max((columns(text) for text in details.values() if columns(text) <= _BRIEF), default=0)
    last = None
    for at in sorted(range(len(layers)), key=lambda each: layers[each]):
        node = diagram.nodes[at]
        number = str(layers[at] + 1) if layers[at] != last else ""
        last = layers[at]
        pieces: list[tuple[str, Style]] = [
            (f"{number:>3} ", "dim"),
            (f"{MARKS[node.state]} ", node.state),
            (_padded(names[node.id], column), "current" if node.current else "plain"),
        ]
        told, needs = details[node.id], _listed(before.get(node.id, []))
        room = max(columns(told), second)
        told = f"  {_padded(told, room)}" if room else ""
        used = 6 + column + columns(told)
        if not needs or used + columns(f"  ← {needs}") <= width:
            after = f"  ← {needs}" if needs else ""
            yield from _folded([*pieces, (told, node.state), (after, "dim")], width, indent=8)
        else:  # what it comes after has a line of its own
            yield from _folded([*pieces, (told, node.state)], width, indent=8)
            yield from _folded([(f"        ← {needs}", "dim")], width, indent=10)


def _steps(diagram: Diagram, width: int) -> Iterator[Line]:
    """One line per step, in the order of the source, and below it one line for each edge that leaves it."""
    names = {node.id: _cut(printable(node.label), _LONGEST) for node in diagram.nodes}
    following: dict[str, list[Edge]] = {}
    for edge in diagram.edges:
        following.setdefault(edge.source, []).append(edge)
    column = max((columns(names[edge.target]) for edge in diagram.edges), default=0)
    for node in diagram.nodes:
        if node.shape == "end" and not node.current:
            continue  # the edges name it
        told = printable(about(node), 200)
        mark = "▶" if node.current and node.state == "plain" else MARKS[node.state]
        pieces: list[tuple[str, Style]] = [
            (f"{mark} ", node.state),
            (names[node.id], "current" if node.current else "plain"),
            (f"  {told}" if told else "", node.state),
        ]
        yield from _folded(pieces, width, indent=4)
        for edge in following.get(node.id, ()):
            yield from _folded(_arrow(edge, names, column), width, indent=10)


def _arrow(edge: Edge, names: dict[str, str], column: int) -> list[tuple[str, Style]]:
    arrow = "⇒" if edge.passed else "↻" if edge.source == edge.target else "⇢" if edge.observed else "→"
    told = printable(edge.label, 200)
    if edge.observed:
        told = f"{told}, observed" if told else "observed"
    style: Style = "done" if edge.passed else "failed" if edge.flow == "error" else "plain"
    name = _padded(names[edge.target], column) if told else names[edge.target]
    return [(f"    {arrow} ", style), (name, style), (f"  {told}" if told else "", "dim")]


def _listed(names: Sequence[str], most: int = 6) -> str:
    """The first names, and how many there are beside them."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def columns(text: str) -> int:
    """Return how many columns of a terminal a text takes."""
    return sum(0 if combining(each) else 2 if east_asian_width(each) in "WF" else 1 for each in text)


def _padded(text: str, width: int) -> str:
    return text + " " * max(width - columns(text), 0)


def _cut(text: str, width: int) -> str:
    if columns(text) <= width:
        return text
    while columns(text) > width - 1:
        text = text[:-1]
    return text + "…"


def _folded(pieces: Iterable[tuple[str, Style]], width: int, indent: int = 0) -> Iterator[Line]:
    """Break a line between words where it is too long; what follows is indented."""
    line: list[tuple[str, Style]] = []
    used = 0
    todo: deque[tuple[str, Style]] = deque()
    for text, style in pieces:
        todo.extend((word, style) for word in _words(text))
    while todo:
        word, style = todo.popleft()
        size = columns(word.rstrip())
        if used + size > width and used > indent:
            yield _stripped(line)
            line, used = [_indented(indent)], indent
            todo.appendleft((word.lstrip(), style))
        elif used + size > width > indent:  # one word, longer than a line
            head = word
            while used + columns(head) > width and len(head) > 1:
                head = head[:-1]
            line.append((head, style))
            used = width
            todo.appendleft((word[len(head) :], style))
        else:
            line.append((word, style))
            used += columns(word)
    yield _stripped(line)


def _indented(by: int) -> tuple[str, Style]:
    return " " * by, "plain"


def _words(text: str) -> Iterator[str]:
    """The words of a text, each with the spaces before it; leading spaces are a word of their own."""
    start = 0
    for at in range(1, len(text)):
        if text[at] == " " and text[at - 1] != " ":
            yield text[start:at]
            start = at
    if text:
        yield text[start:]


def _stripped(line: Sequence[tuple[str, Style]]) -> Line:
    left = list(line)
    while left and not left[-1][0].strip():
        left.pop()
    if left:
        left[-1] = (left[-1][0].rstrip(), left[-1][1])
    return tuple(left)
