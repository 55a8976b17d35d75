"""The output of commands: JSON for programs, tables for people. Data is never interpreted as markup."""

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

from durable_actors._store.read import ParentRun
from durable_actors._wording import one_line as one_line, seconds  # noqa: PLC0414 - the commands take it from here

PIPE_WIDTH = 240
"""Columns when the output is not a terminal, so that nothing is cut off."""


def make_console() -> Console:
    """Return a console as wide as the terminal, or PIPE_WIDTH columns wide without one."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=PIPE_WIDTH)


def print_json(value: object) -> None:
    """Print one JSON document on one line."""
    click.echo(as_document(value))


def as_document(value: object) -> str:
    """Return a value as one JSON document on one line."""
    return json.dumps(value, ensure_ascii=False, default=plain)


def plain(value: object) -> Any:
    """Convert one value for JSON: an attrs object to a dict, an instant to ISO format, bytes to text.

    Not recursive: the encoder calls it again for the parts. A state may be nested as deeply as Python can decode.
    """
    kind: type[Any] = type(value)
    if attrs.has(kind):
        found = {field.name: getattr(value, field.name) for field in attrs.fields(kind)}
        # JSON has no infinity, which a row changed by hand may contain.
        return {
            name: None if isinstance(each, float) and not isfinite(each) else each
            for name, each in found.items()
        }
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, bytes):
        return shown_key(value)
    raise TypeError(f"{kind.__name__} is not JSON")


def shown_key(key: str | bytes | None) -> str | None:
    r"""Return a unique key as text, or as `\x…` if it is not UTF-8."""
    if key is None or isinstance(key, str):
        return key
    try:
        return key.decode()
    except UnicodeDecodeError:
        return "\\x" + key.hex()


def started_by(parent: ParentRun) -> str:
    """Say who started an instance, as far as it is known."""
    machine = "" if parent.machine is None else f" of {one_line(parent.machine)}"
    step = "" if parent.step is None else f", step {one_line(parent.step)}"
    key = "" if parent.key is None else f", key {one_line(parent.key)}"
    return f"{parent.id}{machine}{step}{key}"


def ago(instant: datetime | None) -> str:
    """Format how long ago an instant was, by the clock of this computer."""
    return "" if instant is None else f"{elapsed(instant)} ago"


def elapsed(instant: datetime) -> str:
    """Format how much time has passed since an instant, by the clock of this computer."""
    return seconds(max((datetime.now(instant.tzinfo) - instant).total_seconds(), 0.0))


def table(headers: Sequence[str], rows: Iterable[Sequence[object]], *, right: Sequence[str] = ()) -> Table:
    """Return a table without a frame; the columns in `right` are right-aligned."""
    made = Table(box=None, pad_edge=False, header_style="bold", show_header=any(headers))
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
    "cancelled": "dim",
    "awaiting_signal": "yellow",
    "awaiting_children": "yellow",
    "alive": "green",
    "lost": "red",
    "stopped": "dim",
}


def coloured(word: str) -> Text:
    """Return a status or state in its colour."""
    return Text(word, style=STYLES.get(word, ""))
