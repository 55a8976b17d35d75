"""How verbs print: JSON for programs, tables for people. Data is shown as it is, never as markup."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from datetime import datetime
from math import isfinite
from typing import Any

import attrs
import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

WIDE = 240
"""Columns when nobody looks: a pipe must not cut anything off."""


def make_console() -> Console:
    """A console for one command; as wide as the terminal, or as wide as needed."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=WIDE)


def print_json(value: object) -> None:
    """One JSON document on one line."""
    click.echo(json.dumps(value, ensure_ascii=False, default=plain))


def plain(value: object) -> Any:
    """One value as JSON has it: an attrs class as an object, an instant in ISO form, bytes as text.

    Not what is in it: the encoder asks again. A state may be nested as deeply as Python can decode it.
    """
    kind: type[Any] = type(value)
    if attrs.has(kind):
        found = {field.name: getattr(value, field.name) for field in attrs.fields(kind)}
        # JSON has no infinity: an instant that a hand has set to it.
        return {
            name: None if isinstance(each, float) and not isfinite(each) else each
            for name, each in found.items()
        }
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, bytes):
        return shown_key(value)
    raise TypeError(f"{kind.__name__} is no JSON")


def shown_key(key: str | bytes | None) -> str | None:
    r"""A unique key as text; one that is not text as `\x…`."""
    if key is None or isinstance(key, str):
        return key
    try:
        return key.decode()
    except UnicodeDecodeError:
        return "\\x" + key.hex()


def one_line(value: object, *, limit: int = 80) -> str:
    """A value for a table's cell: printable, on one line, cut."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    text = "".join(c if c.isprintable() else "\\n" if c == "\n" else f"\\x{ord(c):02x}" for c in text)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def seconds(value: float | None) -> str:
    """A duration for people: 0.4 s, 12 s, 5 min, 3 h, 2 d."""
    if value is None:
        return ""
    for unit, size in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if abs(value) >= 2 * size:
            return f"{value / size:.0f} {unit}"
    return f"{value:.1f} s" if abs(value) < 10 else f"{value:.0f} s"


def ago(instant: datetime | None) -> str:
    """How long ago, by this machine's clock: for people only."""
    if instant is None:
        return ""
    return seconds(max((datetime.now(instant.tzinfo) - instant).total_seconds(), 0.0)) + " ago"


def table(headers: Sequence[str], rows: Iterable[Sequence[object]], *, right: Sequence[str] = ()) -> Table:
    """A table without a frame; columns named in `right` are numbers."""
    made = Table(box=None, pad_edge=False, header_style="bold")
    for header in headers:
        made.add_column(header, justify="right" if header in right else "left", no_wrap=True)
    for row in rows:
        made.add_row(
            *(each if isinstance(each, Text) else Text("" if each is None else str(each)) for each in row)
        )
    return made


STYLES = {
    "executing": "cyan",
    "done": "green",
    "failed": "red",
    "awaiting_signal": "yellow",
    "awaiting_children": "yellow",
    "alive": "green",
    "lost": "red",
    "stopped": "dim",
}


def coloured(word: str) -> Text:
    """A status or state in its colour."""
    return Text(word, style=STYLES.get(word, ""))
