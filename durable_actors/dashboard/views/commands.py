"""Commands on instances: on one from its page, on many by a selection or a filter, which is counted first."""

from __future__ import annotations

import secrets
from functools import partial
from typing import Any, Final, Literal

from durable_actors._bulk import Bulk
from durable_actors._store.bulk import BULK
from durable_actors.dashboard.desk import Action, Desk, Done, Form, View, said
from durable_actors.dashboard.filters import parse_query
from durable_actors.dashboard.web import HttpError, Request
from durable_actors.errors import DurableError
from durable_actors.machine import KEEP, decode_json

SELECTED: Final = 200
"""Instances that may be selected one by one; more are named by a filter."""
_SIMPLE: Final = ("retry", "run_now", "pause", "resume")
_DECISIONS: Final = ("proceed", "approve", "reject")


def _json(form: Form, name: str, missing: Any = None) -> Any:
    """The JSON value of a field. Raises `HttpError`."""
    text = form.get(name)
    if not text:
        return missing
    try:
        return decode_json(text.encode("utf-8", "replace"), what=name)
    except ValueError as exc:
        raise HttpError(400, f"{exc}") from None


async def simple(desk: Desk, request: Request, form: Form, id: int, command: str) -> Done:  # noqa: A002 - part of the path
    """Retry, run now, pause or resume."""
    answer = await getattr(desk.client, command)(id, **said(desk, request, form))
    return Done(to=f"/instances/{id}", query={"done": command}, data={"result": answer})


async def cancel(desk: Desk, request: Request, form: Form, id: int) -> Done:  # noqa: A002
    """Cancel one, with its children if the box was ticked."""
    form.require_confirmation()
    children: Literal["leave", "cancel"] = "cancel" if form.get("children") == "yes" else "leave"
    answer = await desk.client.cancel(
        id, children=children, force=form.get("force") == "yes", **said(desk, request, form)
    )
    return Done(to=f"/instances/{id}", query={"done": "cancel"}, data={"result": answer})


async def decide(desk: Desk, request: Request, form: Form, id: int, verb: str) -> Done:  # noqa: A002
    """Proceed, approve or reject: what a person decides."""
    data = _json(form, "data")
    comment = form.get("comment") or None
    said_ = {**said(desk, request, form), "comment": comment, **({} if data is None else {"data": data})}
    await getattr(desk.client, verb)(id, **said_)
    return Done(to=form.get("next") or f"/instances/{id}", query={"done": verb}, data={"decision": verb})


async def signal(desk: Desk, request: Request, form: Form, id: int) -> Done:  # noqa: A002
    """Send a signal."""
    said(desk, request, form)  # a reason may be required, though a signal has no receipt
    name = form.get("name")
    if not name:
        raise HttpError(400, "a signal needs a name")
    key = form.get("dedup_key") or None
    await desk.client.signal(id, name, _json(form, "payload"), dedup_key=key)
    return Done(to=f"/instances/{id}", query={"done": "signal"})


async def rerun(desk: Desk, request: Request, form: Form, id: int) -> Done:  # noqa: A002
    """Start a new instance from this one, perhaps at another step, with another state, or at a revision."""
    form.require_confirmation()
    rev = form.get("at_rev")
    number = await desk.client.rerun(
        id,
        step=form.get("step") or None,
        state=_json(form, "state", KEEP),
        at_rev=int(rev) if rev.isascii() and rev.isdigit() and len(rev) < 19 else None,
        **said(desk, request, form),
    )
    return Done(to=f"/instances/{number}", query={"done": "rerun"}, data={"id": number})


# -- many


async def bulk(desk: Desk, request: Request, form: Form) -> Done:
    """Give a command to those that are selected, or to all that match, which are counted first."""
    command = form.get("command")
    if command not in BULK:
        raise HttpError(400, f"choose one of {', '.join(BULK)}")
    if form.get("scope") == "all":
        return await _all_that_match(desk, request, form, command)
    return await _selected(desk, request, form, command)


async def _selected(desk: Desk, request: Request, form: Form, command: str) -> Done:
    ids = [int(each) for each in form.all("id") if each.isascii() and each.isdigit() and len(each) < 19]
    if not ids:
        raise HttpError(400, "select some instances first")
    if len(ids) > SELECTED:
        raise HttpError(400, f"select up to {SELECTED}, or all that match")
    who = said(desk, request, form)
    done: list[int] = []
    refused: dict[int, str] = {}
    for number in sorted(set(ids)):
        try:
            await getattr(desk.client, command)(number, **who)
            done.append(number)
        except DurableError as exc:
            refused[number] = str(exc)
    data = {"command": command, "done": done, "refused": refused, "q": form.get("q"), "count": len(done)}
    view = View(template="bulk_done.html", title="Done", data=data, live=False)
    return Done(to="/instances", data=data, view=view)


async def _all_that_match(desk: Desk, request: Request, form: Form, command: str) -> Done:
    query = parse_query(form.get("q"))
    if query.wrong:
        raise HttpError(400, f"the filter is not clear: {query.wrong[0]}")
    if query.is_empty:
        raise HttpError(400, "a command to all instances there are is not given here: type a filter")
    call = getattr(desk.client, command)
    if form.get("confirm") != "yes":
        found: Bulk = await call(where=query.where, dry_run=True)
        data = {"command": command, "q": query.text, "count": found.count, "dry_run": True}
        extra = {"key": f"dashboard-{secrets.token_hex(12)}", "served": _has_workers(desk)}
        view = View(template="bulk.html", title="Confirm", data=data, extra=extra, live=False)
        return Done(to="/instances", data=data, view=view)
    # In the background: a worker does it, with progress and receipts, and goes on if one dies.
    begun: Bulk = await call(where=query.where, background=True, **said(desk, request, form))
    data = {"command": command, "bulk": begun.id, "instance": begun.instance_id, "count": begun.count}
    to = f"/instances/{begun.instance_id}" if begun.instance_id is not None else "/instances"
    return Done(to=to, query={"done": "bulk"}, data=data)


def _has_workers(desk: Desk) -> bool:
    sample = desk.sampler.latest
    return sample is not None and any(each.state == "alive" and each.queues for each in sample.nodes)


ACTIONS: Final = (
    Action(path="/instances/bulk", name="bulk", act=bulk, names_command="command"),
    Action(path="/instances/{id:int}/cancel", name="cancel", act=cancel),
    Action(path="/instances/{id:int}/signal", name="signal", act=signal),
    Action(path="/instances/{id:int}/rerun", name="rerun", act=rerun),
    *(
        Action(path=f"/instances/{{id:int}}/{command}", name=command, act=partial(simple, command=command))
        for command in _SIMPLE
    ),
    *(
        Action(path=f"/instances/{{id:int}}/{verb}", name=verb, act=partial(decide, verb=verb))
        for verb in _DECISIONS
    ),
)
