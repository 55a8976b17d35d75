"""Nodes: who works on this schema, for people and for the reaper."""

from __future__ import annotations

from durable_actors._postgres import encode
from durable_actors._postgres.connection import PgConn
from durable_actors._store.sql import statement


async def register_node(conn: PgConn, schema: str, *, incarnation: str, node: str, about: object) -> None:
    """Note that this incarnation has started."""
    params = [incarnation.encode(), node.encode(), encode.json(about)]
    await conn.run(statement("register_node", schema), params)


async def touch_node(conn: PgConn, schema: str, incarnation: str) -> None:
    """Note that it is still there."""
    await conn.run(statement("touch_node", schema), [incarnation.encode()])


async def stop_node(conn: PgConn, schema: str, incarnation: str) -> None:
    """Note that it has stopped in good order; forget those that did so, or vanished, days ago."""
    await conn.run(statement("stop_node", schema), [incarnation.encode()])
