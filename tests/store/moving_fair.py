"""Scenarios of `moving.py` for picks of fair queues."""

from __future__ import annotations

from collections.abc import Sequence

import trio
from durable_actors._limits import Limit
from durable_actors._store.fair import Entry, FairPick, pick_fair
from durable_actors._store.holds import HELD, SHELVED
from durable_actors._store.limits import declare_limits
from tests.store.kit import OWNER, SCHEMA, address, insert, known_steps
from tests.store.moving import World, scenario


async def pick(world: World, *keys: str, shelved: Sequence[str] = ()) -> list[int]:
    take = FairPick([Entry(0, key, 10) for key in keys], shelved=shelved, from_shelf=10 if shelved else 0)
    picked, _ = await pick_fair(
        world.conn,
        OWNER,
        queue="default",
        limit=100,
        known=known_steps("m/1"),
        take=take,
        now=trio.current_time(),
    )
    return [claim.id for claim in picked.claims]


@scenario
async def claims_of_a_fair_queue(world: World) -> None:
    insert(world.db, 2, fair_key="a")
    insert(world.db, 2, fair_key="b", partition_key="key")
    insert(world.db, fair_key="a", fsm_version=9)
    wide = insert(world.db, fair_key="b", fsm_version=9)
    world.db.execute("update durable.gen_durable set fsm = repeat('m', 2601) where id = any (%s)", [wide])
    [shelved] = insert(world.db, hold=SHELVED, shelved_step="s", fair_key="a")
    assert len(await pick(world, "a", "b")) == 3
    assert await pick(world, shelved=[address("m/1")]) == [shelved]


@scenario
async def limits_in_a_fair_queue(world: World) -> None:
    await declare_limits(world.conn, SCHEMA, {"mail": Limit(1, per=60)}, node="n")
    first, _ = insert(world.db, 2, fair_key="a", rate_limit="mail")
    assert await pick(world, "a") == [first]
    await declare_limits(world.conn, SCHEMA, {"few": Limit(1, per=60, on_full="drop")}, node="n")
    insert(world.db, 2, fair_key="a", rate_limit="few")
    await pick(world, "a")
    await pick(world, "a")


@scenario
async def an_elder_that_is_held_is_offered_by_the_fair_pick_that_meets_it(world: World) -> None:
    insert(world.db, partition_key="key", hold=HELD, fair_key="a")
    insert(world.db, partition_key="key", fair_key="a")
    insert(world.db, partition_key="free", hold=HELD, fair_key="b")
    insert(world.db, partition_key="free", fair_key="b")
    await pick(world, "a", "b")
