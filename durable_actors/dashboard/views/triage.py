"""Triage: failed instances grouped by what went wrong, and a retry of a whole group."""

from __future__ import annotations

import secrets
from typing import Any, Final, cast, get_args

import attrs

from durable_actors._bulk import Bulk
from durable_actors._postgres.driver.connection import PgConn
from durable_actors._store.audit import read_receipts_of
from durable_actors._store.bulk import SCOPE, TARGET
from durable_actors._store.commands import Receipt
from durable_actors._store.failures import WINDOW, FailureGroup, Failures, Grouping, merged, read_failures
from durable_actors._store.observe import Filter
from durable_actors.dashboard.desk import Action, Desk, Done, Form, Nav, Page, View, said
from durable_actors.dashboard.render import visible
from durable_actors.dashboard.web import HttpError, Request

AT_ONCE: Final = 100
"""Instances that are retried while the page waits. A worker retries more than these, in the background."""
BULKS: Final = 5
"""Commands to many instances that the page shows: the last ones."""


async def triage(desk: Desk, request: Request) -> View:
    """Group the newest failed instances: `by` is all, error or machine."""
    by = request.query.get("by", "all")
    if by not in get_args(Grouping):
        raise HttpError(400, f"by is one of {', '.join(get_args(Grouping))}")

    async def read(conn: PgConn, schema: str) -> tuple[Failures, tuple[Receipt, ...]]:
        return await read_failures(conn, schema), await read_receipts_of(
            conn, schema, SCOPE, TARGET, limit=BULKS
        )

    found, bulks = await desk.read(read)
    groups = [with_plain_error(each) for each in merged(found.groups, cast("Grouping", by))]
    data = {
        "by": by,
        "groups": [_shown(desk, each) for each in groups],
        "looked": found.looked,
        "capped": found.capped,
        "left_out": found.left_out,
        "bulks": [_bulk(desk.redactor.receipt(each)) for each in bulks],
    }
    extra = {
        "window": WINDOW,
        "queries": [query_of(each) for each in groups],
        "done": request.query.get("done"),
        "largest": max((each.count for each in groups), default=1),
    }
    return View(template="triage.html", title="Triage", data=data, extra=extra)


def _shown(desk: Desk, group: FailureGroup) -> dict[str, Any]:
    text = group.text
    if text is not None:
        text = desk.redactor.shown(group.machine or group.machines[0], "error", text)
    return {**attrs.asdict(group), "text": text}


def _bulk(receipt: Receipt) -> dict[str, Any]:
    """What became of a command to many, from its receipt."""
    data: object = receipt.data  # a hook may have put a text in its place
    where: Any = data.get("where") if isinstance(data, dict) else None
    result = receipt.result
    told = cast("dict[str, Any]", result) if isinstance(result, dict) else {}
    state = "finished" if told.get("finished") else "aborted" if told.get("aborted") else "running"
    return {
        "id": receipt.id,
        "at": receipt.at,
        "command": receipt.command,
        "by": receipt.by,
        "reason": receipt.reason,
        "where": where if isinstance(where, dict) else {},
        "state": state,
        **{name: told.get(name) for name in ("count", "done", "skipped", "failed")},
    }


def with_plain_error(group: FailureGroup) -> FailureGroup:
    """The group with as much of its error as a form can carry: up to the first character that pages show escaped."""
    error = group.error or ""
    end = next((at for at, each in enumerate(error) if visible(each) != each), len(error))
    return attrs.evolve(group, error=error[:end] or None)


def query_of(group: FailureGroup) -> str:
    """The text of the filter bar that lists the group. Pure."""
    terms = [f'{name}:"{value}"' for name, value in _terms(group.machine, group.step, group.error)]
    return " ".join(["status:failed", *terms])


def _terms(machine: str | None, step: str | None, error: str | None) -> list[tuple[str, str]]:
    """What the filter bar can say: it knows no quotes within quotes, so a text ends before the first one."""
    given = (("machine", machine), ("step", step), ("error", error))
    cut = [(name, value.partition('"')[0]) for name, value in given if value]
    return [(name, value) for name, value in cut if value.strip()]


async def retry(desk: Desk, request: Request, form: Form) -> Done:
    """Retry a group: count it first, and do it when the number is confirmed."""
    where = Filter(
        status="failed",
        machine=_kept(form, "machine") or None,
        step=_kept(form, "step") or None,
        error=_kept(form, "error") or None,
    )
    if where == Filter(status="failed"):
        raise HttpError(400, "name a machine, a step or an error: not all failed instances are meant")
    if form.get("confirm") != "yes":
        counted = await desk.client.retry(where=where, dry_run=True)
        return _asked(desk, where, counted)
    count = form.get("count")
    background = not (count.isascii() and count.isdigit() and len(count) < 9 and int(count) <= AT_ONCE)
    done = await desk.client.retry(where=where, background=background, **said(desk, request, form))
    data = {
        "bulk": done.id, "instance": done.instance_id, "state": done.state, "count": done.count, "done": done.done,
        "skipped": done.skipped, "failed": done.failed, "failures": done.failures,
    }  # fmt: skip
    return Done(to="/triage", query={"done": done.id}, data=data)


def _kept(form: Form, name: str) -> str:
    """A field with the spaces around it, which may belong to it."""
    return (form.all(name) or [""])[-1]


def _asked(desk: Desk, where: Filter, counted: Bulk) -> Done:
    data = {
        "machine": where.machine,
        "step": where.step,
        "error": where.error,
        "count": counted.count,
        "dry_run": True,
    }
    sample = desk.sampler.latest
    alive = sample is not None and any(each.state == "alive" and each.queues for each in sample.nodes)
    extra = {"key": f"dashboard-{secrets.token_hex(12)}", "alive": alive, "at_once": AT_ONCE}
    view = View(template="triage_retry.html", title="Retry a group", data=data, extra=extra, live=False)
    return Done(to="/triage", data=data, view=view)


PAGES: Final = (Page(path="/triage", view=triage, nav=Nav("Triage", "/triage", "t")),)
ACTIONS: Final = (Action(path="/triage/retry", name="retry", act=retry),)
