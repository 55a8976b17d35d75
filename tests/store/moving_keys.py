"""Statements about partition keys, run once for each of their moves; see `moving`."""

from __future__ import annotations

from durable_actors._store.holds import HELD
from durable_actors._store.insert import insert_instances
from tests.store.kit import SCHEMA, claims, insert, outcome, plan, rows
from tests.store.moving import World, scenario
from tests.store.siblings_kit import leave


@scenario
async def siblings_inserted_together(world: World) -> None:
    await insert_instances(world.conn, SCHEMA, [plan(partition_key="key")] * 2)
    assert rows(world.db, "hold") == [(0,), (HELD,)]


@scenario
async def keys_handed_on(world: World) -> None:
    insert(world.db, partition_key="key")
    insert(world.db, 2, partition_key="key", hold=HELD)
    [claim] = await claims(world.conn)
    [second] = (await leave(world.conn, outcome(claim))).handed
    assert [each.id for each in (await leave(world.conn, outcome(second), room=0)).offered]
