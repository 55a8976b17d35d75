"""Who waits for a person, for the dashboard: the newest boundaries that nobody has decided, with what they tell."""

from __future__ import annotations

from typing import Any, Final, Literal, get_args

import attrs

from durable_actors._postgres.driver import encode
from durable_actors._postgres.driver.connection import PgConn
from durable_actors._store.observe import NEWEST, Filter, list_instances
from durable_actors._store.read import Instance
from durable_actors._store.sql import statement
from durable_actors.machine import decode_or_text

MAX_DATA: Final = 32_768
"""Bytes of the data of one boundary that a list reads; the page of the instance has all of them."""
AskKind = Literal["approval", "pause"]
KINDS: Final[tuple[AskKind, ...]] = get_args(AskKind)


@attrs.frozen(kw_only=True)
class Ask:
    """An instance that waits for a person."""

    instance: Instance
    """Its `boundary` says what is asked. Without state and data."""
    data: Any = None
    """What the person should know; None if there is nothing, or too much."""
    data_bytes: int | None = None
    """How much that is."""


@attrs.frozen(kw_only=True)
class Asks:
    """A page of them, newest first."""

    found: tuple[Ask, ...]
    before: int | None
    """Where the next page begins; None if there is nothing older."""


async def read_asks(
    conn: PgConn, schema: str, *, kind: AskKind | None = None, limit: int, before: int = NEWEST
) -> Asks:
    """Read those that wait below an id, of one kind ("approval", "pause") or of both. Reads the index of such rows."""
    found: list[Instance] = []
    for each in KINDS if kind is None else (kind,):
        where = Filter(waiting=each)
        listing = await list_instances(conn, schema, where, limit=limit + 1, before=before, full=False)
        found += listing.instances
    found.sort(key=lambda each: -each.id)
    more = len(found) > limit
    shown = [each for each in found[:limit] if each.boundary is not None]
    told = await _told(conn, schema, [each.id for each in shown])
    asks = (_ask(each, *told.get(each.id, (None, None))) for each in shown)
    return Asks(found=tuple(asks), before=found[limit - 1].id if more else None)


def _ask(instance: Instance, data: Any, size: int | None) -> Ask:
    return Ask(instance=instance, data=data, data_bytes=size)


async def _told(conn: PgConn, schema: str, ids: list[int]) -> dict[int, tuple[Any, int | None]]:
    if not ids:
        return {}
    params = [encode.int_array(ids), encode.number(MAX_DATA)]
    rows = (await conn.run(statement("read_asked", schema, read_only=True), params)).rows
    return {
        int(row[0] or 0): (
            None if row[1] is None else decode_or_text(row[1]),
            None if row[2] is None else int(row[2]),
        )
        for row in rows
    }
