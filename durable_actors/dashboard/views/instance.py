"""One instance: why it is where it is, its drawing, timeline, state, inbox and family."""

from __future__ import annotations

import re
from typing import Any, Final

from markupsafe import Markup

from durable_actors.dashboard.desk import Desk, Page, View
from durable_actors.dashboard.reading import (
    read_change,
    read_drawing,
    read_family,
    read_lines,
    read_one,
    shown_record,
)
from durable_actors.dashboard.strip import strip
from durable_actors.dashboard.web import Request
from durable_actors.diagrams import Diagram, render
from durable_actors.errors import DurableError
from durable_actors.machine import ENDED

_STYLE: Final = re.compile(r"<style>.*?</style>", re.DOTALL)
DONE: Final = {
    "retry": "It runs again.",
    "run_now": "It runs as soon as a slot is free.",
    "pause": "It is paused; a step that runs finishes first.",
    "resume": "It is resumed.",
    "cancel": "It is cancelled; a step that runs is asked to stop.",
    "signal": "The signal is in its inbox.",
    "rerun": "This is the new instance.",
    "proceed": "It proceeds.",
    "approve": "It is approved.",
    "reject": "It is rejected.",
    "bulk": "A worker carries out the command. This instance shows how far it is.",
}
"""What a page says after a command."""


async def instance(desk: Desk, request: Request, id: int) -> View:  # noqa: A002 - the part of the path
    """Show one instance. `rev` shows what one record changed."""
    found = await read_one(desk, id)
    row = found.instance
    lines, damaged = await read_lines(desk, row.machine, id, found.details.rev)
    family = await read_family(desk, id)
    drawn = await _drawn(desk, row.machine, id)
    rev = request.query.get("rev", "")
    change = None
    if rev.isascii() and rev.isdigit() and len(rev) < 19:
        change = await read_change(desk, row.machine, id, lines, int(rev))
    data = {
        "instance": row,
        "details": found.details,
        "why": found.why,
        "inbox": found.inbox,
        "receipts": found.receipts,
        "history": [shown_record(line.record) for line in lines if line.record is not None],
        "damaged": damaged,
        "family": family,
        "rev": None if change is None else int(rev),
        "change": change,
    }
    extra = {
        "lines": lines,
        "strip": strip(lines),
        "drawing": drawn,
        "done": DONE.get(request.query.get("done", "")),
        "can": commands_for(row.status, paused=row.paused is not None, boundary=row.boundary),
    }
    return View(template="instance.html", title=f"{row.machine} {row.id}", data=data, extra=extra)


async def _drawn(desk: Desk, machine: str, number: int) -> Markup | str:
    try:
        return inline_svg(await read_drawing(desk, machine, number))
    except DurableError as exc:
        return f"It cannot be drawn: {exc}"


def inline_svg(diagram: Diagram) -> Markup:
    """A diagram as part of a page: its colours come from the page's CSS, because the CSP allows no style within."""
    # `render` escapes every name; the rest is its own markup.
    return Markup(_STYLE.sub("", render(diagram, "svg", limit=60)))  # noqa: S704


def commands_for(status: str, *, paused: bool, boundary: Any) -> frozenset[str]:
    """The commands that the state of an instance allows. The command itself decides. Pure."""
    found = {"rerun"}
    if status in {"failed", "cancelled"}:
        found.add("retry")
    if status == "runnable":
        found.add("run_now")
    if status not in ENDED:
        found |= {"cancel", "signal", "resume" if paused else "pause"}
    if boundary is not None:
        found |= {"approve", "reject"} if boundary.kind == "approval" else {"proceed"}
    return frozenset(found)


PAGES: Final = (Page(path="/instances/{id:int}", view=instance),)
