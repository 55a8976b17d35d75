"""Scenarios of `moving.py` for the functions of runners: each of their moves, made by the statement that calls them."""

from __future__ import annotations

import json
from typing import Any

from durable_actors._limits import Limit
from durable_actors._store.holds import HELD
from durable_actors._store.limits import declare_limits
from durable_actors._store.runner import Claimed, claim_next, complete, fail, heartbeat
from durable_actors._store.signal import send_signals
from tests.store.kit import EXPIRE, SCHEMA, insert
from tests.store.moving import WIDE, World, scenario
from tests.store.stepping import deliver
from tests.support.commands import cancel_instance


async def take(world: World, *steps: str) -> Claimed:
    claimed = await claim_next(
        world.conn, SCHEMA, queue="default", steps=steps or ("m/s",), owner="test", lease=60.0
    )
    assert claimed is not None
    return claimed


async def end(world: World, claimed: Claimed, **outcome: Any) -> None:
    document = json.dumps({name.rstrip("_"): value for name, value in outcome.items()}).encode()
    await complete(world.conn, SCHEMA, claimed, document, accept_late=True)


async def broken(world: World, claimed: Claimed, *, most: int) -> None:
    await fail(world.conn, SCHEMA, claimed, b'"no"', retry_in=9.0, max_attempts=most, accept_late=True)


async def with_children(world: World, count: int) -> Claimed:
    """A parent that waits for so many children at step s; the claim it had."""
    insert(world.db, fsm_version=2)
    parent = await take(world, "m@2/s")
    child = {"machine": "m", "step": "s"}
    await end(world, parent, children=[child] * count, then="then")
    return parent


@scenario
async def a_runner_takes_what_is_due(world: World) -> None:
    insert(world.db, partition_key="key")
    insert(world.db, partition_key="key")
    first = await take(world)
    assert await claim_next(world.conn, SCHEMA, queue="default", steps=["m/s"], owner="x", lease=1.0) is None
    await heartbeat(world.conn, SCHEMA, first, lease=60.0)
    world.db.execute(EXPIRE)
    assert (await take(world)).id != first.id, "its sibling has waited for longer"
    insert(world.db, partition_key="other", hold=HELD)
    await take(world)


@scenario
async def a_runner_and_limits(world: World) -> None:
    await declare_limits(world.conn, SCHEMA, {"rpm": Limit(1, per=60)}, node="n")
    insert(world.db, 2, rate_limit="rpm")
    first = await take(world)
    assert await claim_next(world.conn, SCHEMA, queue="default", steps=["m/s"], owner="x", lease=1.0) is None
    await end(world, first, next="t")
    world.db.execute("update durable.limit_keys set tat = at")
    world.db.execute("update durable.limit_waits set next_at = now()")
    await take(world)
    await declare_limits(world.conn, SCHEMA, {"few": Limit(1, per=60, on_full="drop")}, node="n")
    insert(world.db, 2, rate_limit="few")
    await take(world)
    assert await claim_next(world.conn, SCHEMA, queue="default", steps=["m/s"], owner="x", lease=1.0) is None
    assert await claim_next(world.conn, SCHEMA, queue="default", steps=["m/s"], owner="x", lease=1.0) is None


@scenario
async def a_runner_ends_awaits_and_rows_that_no_index_holds(world: World) -> None:
    parked = {"status": "awaiting_signal", "awaits": ["go"], "await_step": "t", "await_deadline": "=now()"}
    insert(world.db, **parked)
    insert(world.db, **parked, partition_key=WIDE)
    await take(world, "m/t")


@scenario
async def a_runner_asks_a_person(world: World) -> None:
    insert(world.db)
    await end(world, await take(world), pause="t", title="look")
    await with_children(world, 1)
    await end(world, await take(world), approval="t", timeout=60)
    world.db.execute("update durable.gen_durable set await_deadline = now() where await_deadline is not null")
    assert await claim_next(world.conn, SCHEMA, queue="default", steps=["m/s"], owner="x", lease=1.0) is None


@scenario
async def a_runner_reaps_children_that_no_index_holds(world: World) -> None:
    for count in (1, 2):
        await with_children(world, count)
        child = await take(world)
        world.db.execute("update durable.gen_durable set partition_key = %s where id = %s", [WIDE, child.id])
        world.db.execute(EXPIRE)
        insert(world.db, fsm_version=3)
        await take(world, "m@3/s")
        world.db.execute("delete from durable.gen_durable")


@scenario
async def a_runner_behind_ten_thousand_rows_of_others(world: World) -> None:
    world.db.execute("alter table durable.gen_durable disable trigger recorder")
    insert(world.db, 10_000, fsm_version=9)
    world.db.execute("alter table durable.gen_durable enable trigger recorder")
    assert await claim_next(world.conn, SCHEMA, queue="default", steps=["m/s"], owner="x", lease=1.0) is None


@scenario
async def outcomes_of_a_runner(world: World) -> None:
    insert(world.db, 2, partition_key="a")
    held = await take(world)
    world.db.execute("update durable.gen_durable set hold = 1 where status = 'runnable'")
    await end(world, held, next="t", state=[1], partition_key=None)
    await end(world, await take(world), retry=60)
    await end(world, await take(world, "m/t"), await_="go", then="u", timeout=60)
    insert(world.db)
    meanwhile = await take(world)
    await send_signals(world.conn, SCHEMA, [deliver(meanwhile.id)])
    await end(world, meanwhile, await_=["go"])
    insert(world.db)
    await end(world, await take(world), stop="no")
    world.db.execute("delete from durable.gen_durable")
    await with_children(world, 2)
    await end(world, await take(world), done=1)
    await end(world, await take(world), done=2)
    parent = await with_children(world, 1)
    world.db.execute("update durable.gen_durable set partition_key = %s where id = %s", [WIDE, parent.id])
    await end(world, await take(world), done=3)


@scenario
async def failures_of_a_runner(world: World) -> None:
    insert(world.db, 2, partition_key="a")
    first = await take(world)
    world.db.execute("update durable.gen_durable set hold = 1 where status = 'runnable'")
    await broken(world, first, most=20)
    world.db.execute("delete from durable.gen_durable")
    await with_children(world, 2)
    await broken(world, await take(world), most=1)
    await broken(world, await take(world), most=1)
    parent = await with_children(world, 1)
    world.db.execute("update durable.gen_durable set partition_key = %s where id = %s", [WIDE, parent.id])
    await broken(world, await take(world), most=1)


@scenario
async def runners_that_were_asked_to_cancel(world: World) -> None:
    insert(world.db, hold=2, shelved_step="s")
    mine = [await take(world)]
    insert(world.db, 2)
    mine += [await take(world), await take(world)]
    for claim in mine:
        assert await cancel_instance(world.conn, SCHEMA, claim.id) == "requested"
    await end(world, mine[0], next="t")
    await broken(world, mine[1], most=20)
    world.db.execute(EXPIRE)
    insert(world.db, fsm_version=3)
    await take(world, "m@3/s")
    found = world.db.execute("select count(*) from durable.gen_durable where status = 'cancelled'")
    assert found.fetchone() == (3,)


@scenario
async def a_runner_cancels_the_children_of_who_was_cancelled(world: World) -> None:
    """One ends, one that runs is asked; their parent's barrier is not theirs any more."""
    parent = await with_children(world, 2)
    running = await take(world)
    await cancel_instance(world.conn, SCHEMA, parent.id, children=True)
    assert await claim_next(world.conn, SCHEMA, queue="default", steps=["m/s"], owner="x", lease=1.0) is None
    assert await statuses(world, parent.id) == {"cancelled": 1, "executing": 1}
    await end(world, running, done=1)


async def statuses(world: World, parent: int) -> dict[str, int]:
    query = "select status::text, count(*) from durable.gen_durable where parent_id = %s group by 1"
    return dict(world.db.execute(query, [parent]).fetchall())
