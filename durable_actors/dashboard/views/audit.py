"""Audit: every command that was carried out: who, what, on what, when and why."""

from __future__ import annotations

from typing import Any, Final, cast

import attrs

from durable_actors._postgres.driver.connection import PgConn
from durable_actors._store.audit import ReceiptFilter, ReceiptPage, search_receipts
from durable_actors._store.commands import Receipt
from durable_actors._store.observe import NEWEST
from durable_actors.dashboard.desk import Desk, Nav, Page, View
from durable_actors.dashboard.web import Request, segment

PAGE: Final = 50
COMMANDS: Final = (
    "approve", "backfill", "cancel", "clear", "delete", "pause", "proceed", "put", "rebuild", "recover", "reject",
    "rerun", "resume", "retry", "run_now", "set",
)  # fmt: skip
"""Suggestions for the filter; any other text may be typed."""
SCOPES: Final = ("instance", "queue", "schedule", "limit", "bulk")
_FIELDS: Final = ("command", "scope", "by", "target")


async def audit(desk: Desk, request: Request) -> View:
    """List the receipts that pass the filter, newest first, below the id `before`."""
    given = {name: request.query.get(name, "").replace("\0", "").strip() for name in _FIELDS}
    where = ReceiptFilter(**{name: value or None for name, value in given.items()})
    number = request.query.get("before", "")
    before = int(number) if number.isascii() and number.isdigit() and len(number) < 19 else NEWEST

    async def read(conn: PgConn, schema: str) -> ReceiptPage:
        return await search_receipts(conn, schema, where, limit=PAGE, before=before)

    page = await desk.read(read)
    data = {
        "receipts": [_shown(desk, each) for each in page.receipts],
        "where": attrs.asdict(where),
        "looked": page.looked,
        "next_before": page.before,
        "first_page": before == NEWEST,
    }
    links = {each.id: path_of(each) for each in page.receipts}
    extra = {
        "commands": COMMANDS,
        "scopes": SCOPES,
        "links": links,
        "words": {each.id: result_words(each.target, each.result) for each in page.receipts},
        "filtered": any(given.values()),
        "full": len(links) == PAGE,
        "filter": {name: value for name, value in given.items() if value},
    }
    return View(template="audit.html", title="Audit", data=data, extra=extra)


def _shown(desk: Desk, receipt: Receipt) -> dict[str, Any]:
    return attrs.asdict(desk.redactor.receipt(receipt), recurse=False)


def result_words(target: str, result: object) -> str:
    """What came of a command, if a few words can say it and the target does not. Pure."""
    if not isinstance(result, dict):
        return "" if result is None or result is True or str(result) == target else str(result)
    told = cast("dict[str, Any]", result)
    if "count" in told:
        parts = [
            f"{told[name]} {name}"
            for name in ("done", "skipped", "failed")
            if isinstance(told.get(name), int)
        ]
        return f"{', '.join(parts) or 'begun'}, of {told['count']}"
    until = told.get("until")
    return f"until {until[:16].replace('T', ' ')} UTC" if isinstance(until, str) else ""


def path_of(receipt: Receipt) -> str | None:
    """The page of what a command was about; None if there is none. Pure."""
    target = receipt.target
    match receipt.scope:
        case "instance" if target.isascii() and target.isdigit() and len(target) < 19:
            return f"/instances/{target}"
        case "queue":  # the target may name a machine in it, too, and a queue may have a slash in its name
            result = receipt.result
            told = cast("dict[str, Any]", result) if isinstance(result, dict) else {}
            queue = told.get("queue")
            return f"/queues/{segment(queue if isinstance(queue, str) else target)}"
        case "schedule":
            return f"/schedules/{segment(target)}"
        case "limit":
            return f"/limits/{segment(target)}"
        case _:
            return None


PAGES: Final = (Page(path="/audit", view=audit, nav=Nav("Audit", "/audit", "u")),)
