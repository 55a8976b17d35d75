"""The statements of commands on one instance, one call each: what a client does beside them is left out."""

from __future__ import annotations

import msgspec
from durable_actors._postgres.driver import encode
from durable_actors._postgres.driver.connection import PgConn
from durable_actors._store.commands import Command
from durable_actors._store.sql import statement


async def retry_instance(conn: PgConn, schema: str, number: int) -> bool:
    """Let a failed or cancelled instance run again in its step; False if it has not ended so or does not exist.

    Raises psycopg's UniqueViolation if another instance occupies its unique key by now.
    """
    params = [encode.number(number), *Command().params()]
    return bool((await conn.run(statement("retry_instance", schema), params)).rows)


async def hasten_instance(conn: PgConn, schema: str, number: int) -> str | None:
    """Let a delayed instance run now: "hastened", "paused", "due" or "held"; None if it is not runnable."""
    params = [encode.number(number), *Command().params()]
    rows = (await conn.run(statement("hasten_instance", schema), params)).rows
    return msgspec.json.decode(rows[0][0] or b"null", type=str) if rows else None


async def cancel_instance(
    conn: PgConn, schema: str, number: int, *, force: bool = False, children: bool = False
) -> str | None:
    """Cancel an instance, or ask its node to: "cancelled" or "requested"; None if it has ended or does not exist.

    Siblings of its key are not offered: see `dialogues.cancelling`.
    """
    flags = [b"t" if force else b"f", b"t" if children else b"f"]
    params = [encode.number(number), *Command().params(), *flags]
    rows = (await conn.run(statement("cancel_instance", schema), params)).rows
    return msgspec.json.decode(rows[0][0] or b"null", type=str) if rows else None
