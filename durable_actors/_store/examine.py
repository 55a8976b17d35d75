"""What `doctor` reads of the server: settings, tables, indexes, and who holds vacuum back. Nothing is written."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

import attrs
import msgspec

from durable_actors._postgres.driver import encode
from durable_actors._postgres.driver.connection import PgConn
from durable_actors._store.sql import migrations, statement

_CREATED: Final = re.compile(r"create (?:unique )?index (?:concurrently )?(?:if not exists )?(\w+)")
_DROPPED: Final = re.compile(r"drop index (?:concurrently )?(?:if exists )?durable\.(\w+)")
_RENAMED: Final = re.compile(r"alter index (?:if exists )?durable\.(\w+) rename to (\w+)")


@attrs.frozen(kw_only=True)
class ServerFacts:
    """The server."""

    version: int
    """As `server_version_num`: 160004."""
    clock: float
    """Seconds since the epoch."""
    standby: bool
    settings: Mapping[str, str | None]
    connections: int
    sees_others: bool
    """Whether this role may see what sessions of other roles do."""


@attrs.frozen
class TableFacts:
    """One table, by the statistics."""

    name: str
    live: int
    dead: int
    size: int
    """Bytes, with indexes."""
    vacuumed: float | None
    """Seconds since the last vacuum; None: never."""


@attrs.frozen
class Holder:
    """Something that keeps vacuum from removing dead rows."""

    kind: str
    """"transaction", "prepared" or "slot"."""
    name: str
    seconds: float | None
    transactions: int
    about: str


async def examine_server(conn: PgConn, schema: str) -> ServerFacts:
    """Read version, clock and settings."""
    [row] = (await conn.run(statement("examine_server", schema, read_only=True))).rows
    return ServerFacts(
        version=int(row[0] or 0),
        clock=float(row[1] or 0),
        standby=row[2] == b"t",
        settings=msgspec.json.decode(row[3] or b"{}", type=dict[str, str | None]),
        connections=int(row[4] or 0),
        sees_others=row[5] == b"t",
    )


async def examine_tables(conn: PgConn, schema: str) -> list[TableFacts]:
    """Read the statistics of the tables."""
    rows = (await conn.run(statement("examine_tables", schema, read_only=True), [schema.encode()])).rows
    return [
        TableFacts(
            (row[0] or b"").decode(),
            int(row[1] or 0),
            int(row[2] or 0),
            int(row[3] or 0),
            None if row[4] is None else float(row[4]),
        )
        for row in rows
    ]


async def examine_indexes(conn: PgConn, schema: str) -> dict[str, bool]:
    """The indexes of the schema, and whether each is valid."""
    rows = (await conn.run(statement("examine_indexes", schema, read_only=True), [schema.encode()])).rows
    return {(row[0] or b"").decode(): row[1] == b"t" for row in rows}


async def examine_holders(conn: PgConn, schema: str, *, older_than: float) -> list[Holder]:
    """What has held vacuum back for longer than these seconds, as far as this role sees it."""
    params = [encode.number(older_than)]
    rows = (await conn.run(statement("examine_holders", schema, read_only=True), params)).rows
    return [
        Holder(
            (row[0] or b"").decode(),
            (row[1] or b"").decode(),
            None if row[2] is None else float(row[2]),
            int(row[3] or 0),
            (row[4] or b"").decode(),
        )
        for row in rows
    ]


def expected_indexes(version: int) -> frozenset[str]:
    """The indexes that the migrations up to this version create, without those of primary keys. Pure."""
    found: set[str] = set()
    for migration in migrations():
        if migration.version > version:
            continue
        text = re.sub(r"--[^\n]*", "", migration.sql)
        steps = [
            *((match.start(), "create", match) for match in _CREATED.finditer(text)),
            *((match.start(), "drop", match) for match in _DROPPED.finditer(text)),
            *((match.start(), "rename", match) for match in _RENAMED.finditer(text)),
        ]
        for _, kind, match in sorted(steps, key=lambda step: step[0]):
            if kind == "create":
                found.add(match[1])
            else:
                found.discard(match[1])
                if kind == "rename":
                    found.add(match[2])
    return frozenset(found)
