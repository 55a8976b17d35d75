"""Approvals: everything that waits for a person, and what they decide: approve, reject, proceed."""

from __future__ import annotations

import secrets
from functools import partial
from typing import Any, Final, cast

from durable_actors._postgres.driver.connection import PgConn
from durable_actors._store.asked import KINDS, Ask, AskKind, Asks, read_asks
from durable_actors._store.observe import NEWEST
from durable_actors.dashboard.desk import Action, Desk, Done, Form, Nav, Page, View, said
from durable_actors.dashboard.web import HttpError, Request
from durable_actors.machine import decode_json

PAGE: Final = 25
DONE: Final = {
    "proceed": "It proceeds.",
    "approve": "It is approved.",
    "reject": "It is rejected.",
}
"""What the page says after a decision."""


async def approvals(desk: Desk, request: Request) -> View:
    """List what waits for a person: below the id `before`, of one `kind` or of both."""
    wanted = request.query.get("kind")
    kinds: dict[str, AskKind] = {"approval": "approval", "pause": "pause"}
    kind = kinds.get(wanted or "")
    if wanted is not None and kind is None:
        raise HttpError(400, f"kind is one of {', '.join(KINDS)}")
    given = request.query.get("before", "")
    before = int(given) if given.isascii() and given.isdigit() and len(given) < 19 else NEWEST

    async def read(conn: PgConn, schema: str) -> Asks:
        return await read_asks(conn, schema, kind=kind, limit=PAGE, before=before)

    asks = await desk.read(read)
    complete = before == NEWEST and asks.before is None
    found = [*asks.found]
    if complete:  # all of them are here, so they can be in the order in which they need somebody
        found.sort(key=urgency)
    data = {
        "asks": [_shown(desk, each) for each in found],
        "kind": kind,
        "next_before": asks.before,
        "first_page": before == NEWEST,
        "complete": complete,
    }
    extra = {"once": _once, "is_flat": is_flat, "done": DONE.get(request.query.get("done", ""))}
    return View(template="approvals.html", title="Approvals", data=data, extra=extra)


def urgency(ask: Ask) -> tuple[bool, float]:
    """The order of a list that is complete: the next deadline first, then who waits longest. Pure."""
    boundary = ask.instance.boundary
    assert boundary is not None
    if boundary.deadline is not None:
        return False, boundary.deadline.timestamp()
    return True, boundary.since.timestamp()


def _shown(desk: Desk, ask: Ask) -> dict[str, Any]:
    row, boundary = ask.instance, ask.instance.boundary
    assert boundary is not None
    return {
        "id": row.id,
        "machine": row.machine,
        "version": row.version,
        "step": row.step,
        "queue": row.queue,
        "unique_key": row.unique_key,
        "tags": row.tags,
        "kind": boundary.kind,
        "title": boundary.title,
        "data": desk.redactor.shown(row.machine, "boundary", ask.data),
        "data_bytes": ask.data_bytes,
        "since": boundary.since,
        "deadline": boundary.deadline,
        "then": boundary.then,
        "on_reject": boundary.on_reject,
        "on_timeout": boundary.on_timeout,
    }


def is_flat(data: Any) -> bool:
    """Whether data are better read as a few names and values than as JSON. Pure."""
    if not isinstance(data, dict) or not 0 < len(cast("dict[str, Any]", data)) <= 12:
        return False
    values = cast("dict[str, Any]", data).values()
    return all(each is None or isinstance(each, str | int | float) for each in values)


def _once() -> str:
    """An idempotency key for one form: sent twice, it decides once."""
    return f"dashboard-{secrets.token_hex(12)}"


async def decide(desk: Desk, request: Request, form: Form, id: int, verb: str) -> Done:  # noqa: A002 - part of the path
    """Approve, reject or proceed. To reject needs a tick: it may fail the instance."""
    if verb == "reject":
        form.require_confirmation()
    text = form.get("data")
    try:
        data = decode_json(text.encode("utf-8", "replace"), what="data") if text else None
    except ValueError as exc:
        raise HttpError(400, str(exc)) from None
    comment = form.get("comment") or None
    number = await getattr(desk.client, verb)(id, comment=comment, data=data, **said(desk, request, form))
    return Done(to="/approvals", query={"done": verb}, data={"id": number, "decision": verb})


PAGES: Final = (Page(path="/approvals", view=approvals, nav=Nav("Approvals", "/approvals", "a")),)
ACTIONS: Final = tuple(
    Action(path=f"/approvals/{{id:int}}/{verb}", name=verb, act=partial(decide, verb=verb)) for verb in DONE
)
