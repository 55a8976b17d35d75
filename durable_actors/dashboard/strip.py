"""The timeline of an instance as a strip: what ran, what waited, and for how long. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs
from markupsafe import Markup

from durable_actors._timeline import Line
from durable_actors._wording import seconds

WIDTH = 1000.0
HEIGHT = 34.0
_LEAST = 3.0


@attrs.frozen
class _Piece:
    """One part of the strip."""

    kind: str
    """`run`, `wait` or `end`."""
    weight: float
    text: str


def _pieces(lines: Sequence[Line]) -> list[_Piece]:
    """Runs and waits in order. A second of waiting weighs less than a second of running, and a day little more."""
    found: list[_Piece] = []
    for line in lines:
        record = line.record
        if record is None:
            if line.waited is not None and not line.ran:
                found.append(_Piece("wait", _weight(line.waited), line.text.removeprefix("┆ ")))
        elif record.seconds is not None:
            kind = "bad" if record.error is not None else "run"
            text = f"{record.step}: {record.kind}, {seconds(record.seconds)}"
            found.append(_Piece(kind, _weight(record.seconds), text))
    return found


def _weight(waited: float) -> float:
    return 1.0 + math.log10(1.0 + 20.0 * max(waited, 0.0))


def strip(lines: Sequence[Line], *, most: int = 160) -> Markup | None:
    """Draw the last pieces of a timeline; None if there are none. Lengths are compressed: a wait may take days."""
    pieces = _pieces(lines)[-most:]
    if not pieces:
        return None
    gap = 2.0
    scale = (WIDTH - gap * len(pieces)) / sum(piece.weight for piece in pieces)
    out: list[Markup] = []
    x = 0.0
    for piece in pieces:
        width = max(piece.weight * scale, _LEAST)
        y, height = (13.0, 8.0) if piece.kind == "wait" else (4.0, 26.0)
        out.append(
            Markup(
                '<rect class="{}" x="{}" y="{}" width="{}" height="{}" rx="3"><title>{}</title></rect>'
            ).format(piece.kind, round(x, 1), y, round(width, 1), height, piece.text)
        )
        x += width + gap
    runs = sum(piece.kind != "wait" for piece in pieces)
    label = f"{runs} runs and {len(pieces) - runs} waits, in order; lengths are compressed"
    return Markup(
        '<svg class="strip" viewBox="0 0 {} {}" preserveAspectRatio="none" role="img" aria-label="{}">{}</svg>'
    ).format(round(max(x, WIDTH), 1), HEIGHT, label, Markup("").join(out))
