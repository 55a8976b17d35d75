"""Nodes that work on this schema, for operators and for the reaper."""

from __future__ import annotations

from durable_actors._postgres.driver import encode
from durable_actors._postgres.driver.connection import PgConn
from durable_actors._store.releases import Feature, LiveNode, ignoring
from durable_actors._store.sql import statement


async def register_node(conn: PgConn, schema: str, *, incarnation: str, node: str, about: object) -> None:
    """Record that this incarnation has started."""
    params = [incarnation.encode(), node.encode(), encode.json(about)]
    await conn.run(statement("register_node", schema), params)


async def touch_node(conn: PgConn, schema: str, incarnation: str) -> None:
    """Record that this incarnation is alive."""
    await conn.run(statement("touch_node", schema), [incarnation.encode()])


async def stop_node(conn: PgConn, schema: str, incarnation: str) -> None:
    """Record that this incarnation has stopped cleanly."""
    await conn.run(statement("stop_node", schema), [incarnation.encode()])


async def forget_nodes(conn: PgConn, schema: str, *, stopped: float, lost: float, limit: int) -> list[str]:
    """Delete up to `limit` incarnations that stopped `stopped` seconds ago or were last seen `lost` seconds ago.

    Keeps those that hold claims, are alive, or whose row is locked. Returns the deleted ones.
    """
    params = [schema.encode(), encode.number(stopped), encode.number(lost), encode.number(limit)]
    result = await conn.run(statement("forget_nodes", schema), params)
    return [(row[0] or b"").decode() for row in result.rows]


async def read_live_nodes(conn: PgConn, schema: str) -> list[LiveNode]:
    """Read which nodes are alive, and the version of each."""
    result = await conn.run(statement("read_live_nodes", schema, read_only=True), [schema.encode()])
    return [
        LiveNode((incarnation or b"").decode(), None if version is None else version.decode())
        for incarnation, version in result.rows
    ]


async def feature_warning(conn: PgConn, schema: str, feature: Feature) -> str | None:
    """A warning that names the live nodes which ignore this feature, for the answer of a command; None: none does."""
    return ignoring(feature, await read_live_nodes(conn, schema))
