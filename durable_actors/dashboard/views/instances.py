"""Instances: a filter bar whose text is in the URL, a page at a time, newest first."""

from __future__ import annotations

from typing import Any, Final

from durable_actors._store.observe import NEWEST, list_instances
from durable_actors.dashboard.desk import Desk, Nav, Page, View
from durable_actors.dashboard.filters import PRESETS, QUALIFIERS, parse_query
from durable_actors.dashboard.web import Request

PAGE: Final = 50
DEPTH: Final = 30_000
"""Rows that one page looks at, at most, if no index helps: some 50 ms. Then it says how far it has come."""


async def instances(desk: Desk, request: Request) -> View:
    """List the instances that match, newest first, below the id `before`."""
    query = parse_query(request.query.get("q", ""))
    before = _number(request.query.get("before")) or NEWEST
    if query.id is not None:
        before = min(query.id + 1, NEWEST)
    limit = 1 if query.id is not None else PAGE

    async def read(conn: Any, schema: str) -> Any:
        return await list_instances(
            conn, schema, query.where, limit=limit, before=before, depth=DEPTH, full=False
        )

    listing = await desk.read(read)
    found = [desk.redactor.instance(each) for each in listing.instances if query.id in {None, each.id}]
    data = {
        "q": query.text,
        "wrong": query.wrong,
        "instances": found,
        "looked": listing.looked,
        "next_before": None if query.id is not None else listing.before,
        "first_page": before == NEWEST,
    }
    extra = {"presets": PRESETS, "qualifiers": QUALIFIERS, "query": query}
    return View(template="instances.html", title="Instances", data=data, extra=extra)


def _number(text: str | None) -> int | None:
    return int(text) if text and text.isascii() and text.isdigit() and len(text) < 19 else None


PAGES: Final = (Page(path="/instances", view=instances, nav=Nav("Instances", "/instances", "i")),)
