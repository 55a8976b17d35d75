"""Session locks: a node's sign of life, and the partition keys of its running steps.

Session locks belong to the server process, not to a transaction. They survive a rollback, are counted (a lock taken
twice needs two unlocks), and end with the connection. So a lost connection always means "not locked", never "unknown".
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from durable_actors._postgres.driver import encode
from durable_actors._postgres.driver.connection import PgConn
from durable_actors._store.sql import statement


@attrs.frozen
class SessionState:
    """The server process behind a connection."""

    backend: int
    """Its real pid. A pooler shows another one to its clients, and may change the process between transactions."""
    locked: bool
    """Whether it holds the owner's lock."""


async def lock_node(conn: PgConn, schema: str, owner: str) -> SessionState:
    """Take the owner's lock for this session, unless another session still holds it."""
    return await _session("lock_node", conn, schema, owner)


async def check_session(conn: PgConn, schema: str, owner: str) -> SessionState:
    """Check whether this session still holds the owner's lock."""
    return await _session("check_session", conn, schema, owner)


async def _session(name: str, conn: PgConn, schema: str, owner: str) -> SessionState:
    result = await conn.run(statement(name, schema, read_only=True), [schema.encode(), owner.encode()])
    [row] = result.rows
    return SessionState(int(row[0] or 0), row[1] == b"t")


async def exchange_keys(
    conn: PgConn, schema: str, *, free: Sequence[str], take: Sequence[str]
) -> tuple[set[str], set[str]]:
    """Unlock and lock keys in one round trip.

    Returns the keys of `take` that are locked now, and those of `free` that were not locked by us. After a cancellation
    or an error some may be locked or unlocked: see `read_held_keys`.
    """
    space = schema.encode()
    calls = [
        (statement(name, schema, read_only=True), [space, encode.text_array(keys)])
        for name, keys in (("free_keys", free), ("take_keys", take))
        if keys
    ]
    results = await conn.batch(calls)
    freed = results[0].rows if free else []
    taken = results[-1].rows if take else []
    return (
        {row[0].decode() for row in taken if row[0] is not None and row[1] == b"t"},
        {row[0].decode() for row in freed if row[0] is not None and row[1] != b"t"},
    )


async def read_held_keys(conn: PgConn, schema: str, keys: Sequence[str]) -> set[str]:
    """Read which of these keys this session has locked."""
    result = await conn.run(
        statement("read_held_keys", schema, read_only=True), [schema.encode(), encode.text_array(keys)]
    )
    return {row[0].decode() for row in result.rows if row[0] is not None}
