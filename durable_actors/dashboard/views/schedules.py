"""Schedules: when each fires next, what became of its last slots; pause, resume, run now."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final, Literal

import attrs

from durable_actors._postgres.driver.connection import PgConn
from durable_actors._scheduling.words import rule_words
from durable_actors._store.audit import read_receipts_of
from durable_actors._store.commands import Receipt
from durable_actors._store.dialogues import run_dialogue
from durable_actors._store.read import Instance, read_by_ids
from durable_actors._store.schedule_commands import ScheduleInfo, listing
from durable_actors._store.schedules import SCHEDULE
from durable_actors.dashboard.desk import Action, Desk, Done, Form, Nav, Page, View, said
from durable_actors.dashboard.web import Request, segment
from durable_actors.errors import NoTarget

MOST: Final = 200
"""Schedules that the list shows."""
SLOTS: Final = 5
"""Slots of each that the list shows, past ones."""
RECORDS: Final = 50
RECEIPTS: Final = 20
DONE: Final = {
    "pause": "The schedule is paused.",
    "resume": "The schedule is resumed.",
    "run_now": "An instance was started.",
}


async def schedules(desk: Desk, request: Request) -> View:
    """List schedules by name; `q` those whose name or machine contains it."""
    part = request.query.get("q", "").strip()

    async def read(conn: PgConn, schema: str) -> tuple[list[ScheduleInfo], Mapping[int, Instance]]:
        found = await run_dialogue(conn, listing(schema, None, SLOTS))
        shown = [each for each in found if part in each.name or part in each.machine]
        return shown, await _instances(conn, schema, shown[:MOST])

    found, instances = await desk.read(read)
    data = {
        "schedules": [_shown(each, instances) for each in found[:MOST]],
        "q": part,
        "left_out": max(len(found) - MOST, 0),
    }
    return View(template="schedules.html", title="Schedules", data=data)


async def schedule(desk: Desk, request: Request, name: str) -> View:
    """Show one schedule. Raises `NoTarget`."""

    async def read(
        conn: PgConn, schema: str
    ) -> tuple[list[ScheduleInfo], Mapping[int, Instance], tuple[Receipt, ...]]:
        found = await run_dialogue(conn, listing(schema, [name], RECORDS))
        receipts = await read_receipts_of(conn, schema, SCHEDULE, name, limit=RECEIPTS)
        return found, await _instances(conn, schema, found), receipts

    found, instances, receipts = await desk.read(read)
    if not found:
        raise NoTarget(f"there is no schedule {name[:200]!r}")
    told = [desk.redactor.receipt(each) for each in receipts]
    data = {"schedule": _shown(found[0], instances), "receipts": told}
    extra = {"once": _once, "done": DONE.get(request.query.get("done", "")), "records": RECORDS}
    return View(template="schedule.html", title=f"Schedule {name}", data=data, extra=extra)


async def _instances(conn: PgConn, schema: str, found: Sequence[ScheduleInfo]) -> Mapping[int, Instance]:
    """The instances of the slots that fired, by id; those that are gone are missing."""
    ids = {record.instance_id for each in found for record in each.records if record.instance_id is not None}
    return await read_by_ids(conn, schema, sorted(ids), full=False) if ids else {}


def _shown(info: ScheduleInfo, instances: Mapping[int, Instance]) -> dict[str, Any]:
    found = attrs.asdict(info, recurse=False)
    records: list[dict[str, Any]] = []
    for record in info.records:
        row = None if record.instance_id is None else instances.get(record.instance_id)
        records.append({**attrs.asdict(record), "status": None if row is None else row.status})
    return {**found, "state": info.state, "words": rule_words(info.definition), "records": records}


def _once() -> str:
    """An idempotency key for one form: sent twice, it starts one instance."""
    return f"dashboard-{secrets.token_hex(12)}"


async def turn(desk: Desk, request: Request, form: Form, name: str, command: str) -> Done:
    """Pause or resume a schedule."""
    info = await getattr(desk.client.schedules, command)(name, **said(desk, request, form))
    return Done(to=f"/schedules/{segment(name)}", query={"done": command}, data={"state": info.state})


async def run_now(desk: Desk, request: Request, form: Form, name: str) -> Done:
    """Start an instance beside the slots."""
    form.require_confirmation()
    overlap: Literal["allow"] | None = "allow" if form.get("overlap") == "allow" else None
    number = await desk.client.schedules.run_now(name, overlap=overlap, **said(desk, request, form))
    return Done(to=f"/schedules/{segment(name)}", query={"done": "run_now"}, data={"id": number})


PAGES: Final = (
    Page(path="/schedules", view=schedules, nav=Nav("Schedules", "/schedules", "s")),
    Page(path="/schedules/{name}", view=schedule),
)
ACTIONS: Final = (
    Action(path="/schedules/{name}/pause", name="pause_schedule", act=partial(turn, command="pause")),
    Action(path="/schedules/{name}/resume", name="resume_schedule", act=partial(turn, command="resume")),
    Action(path="/schedules/{name}/run_now", name="run_schedule", act=run_now),
)
