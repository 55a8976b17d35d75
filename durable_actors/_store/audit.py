"""Receipts for the dashboard: pages of them, by filters, each at a bounded cost."""

from __future__ import annotations

from typing import Final

import attrs

from durable_actors._postgres.driver import encode
from durable_actors._postgres.driver.connection import PgConn
from durable_actors._store.commands import Receipt, read_receipt
from durable_actors._store.observe import NEWEST
from durable_actors._store.sql import statement

WINDOW: Final = 10_000
"""Receipts that one page looks at, at most."""


@attrs.frozen(kw_only=True)
class ReceiptPage:
    """A page of receipts, newest first."""

    receipts: tuple[Receipt, ...]
    before: int | None
    """Where the next page begins; None if there is nothing older."""
    looked: int
    """How many were looked at."""


@attrs.frozen(kw_only=True)
class ReceiptFilter:
    """Which receipts; None does not filter."""

    command: str | None = None
    scope: str | None = None
    by: str | None = None
    target: str | None = None
    """A part of the target."""


async def search_receipts(
    conn: PgConn, schema: str, where: ReceiptFilter, *, limit: int, before: int = NEWEST, window: int = WINDOW
) -> ReceiptPage:
    """Read the newest receipts below an id that pass the filter, among the next `window`."""
    texts = map(encode.text, (where.command, where.scope, where.by, where.target))
    params = [encode.number(before), encode.number(window), encode.number(limit), *texts]
    rows = (await conn.run(statement("search_receipts", schema, read_only=True), params)).rows
    looked, lowest = int(rows[0][10] or 0), rows[0][11]
    found = tuple(read_receipt(row[:10]) for row in rows if row[0] is not None)
    if len(found) == limit:
        return ReceiptPage(receipts=found, before=found[-1].id, looked=looked)
    return ReceiptPage(
        receipts=found, before=None if looked < window else int(lowest or 0) or None, looked=looked
    )


async def read_receipts_of(
    conn: PgConn, schema: str, scope: str, target: str, *, limit: int, before: int = NEWEST
) -> tuple[Receipt, ...]:
    """Read the newest receipts of one target: an instance, a queue, a schedule, or "instances" of the scope "bulk"."""
    params = [*map(encode.text, (scope, target)), encode.number(before), encode.number(limit), None]
    rows = (await conn.run(statement("list_receipts_of", schema, read_only=True), params)).rows
    return tuple(map(read_receipt, rows))
