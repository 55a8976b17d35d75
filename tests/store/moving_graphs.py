"""Scenarios of `moving.py`: children that come after other children."""

from __future__ import annotations

from durable_actors._store.runner import claim_next
from tests.store.graph_kit import family, hand_over
from tests.store.kit import SCHEMA
from tests.store.moving import World, scenario
from tests.store.moving_pauses import pause, resume
from tests.store.moving_runners import broken, end, take
from tests.support.commands import cancel_instance, retry_instance

PAIRS = {"a": "", "b": "a", "x": "", "y": "x"}


@scenario
async def outcomes_tell_dependents(world: World) -> None:
    all_of = await family(world.db, world.conn, PAIRS)
    await pause(world, all_of.ids["y"])
    await all_of.run(a="done", x="failed")
    await resume(world, all_of.ids["y"])
    await all_of.run(b="done", y="done")
    assert await retry_instance(world.conn, SCHEMA, all_of.ids["y"])


@scenario
async def outcomes_hand_dependents_over(world: World) -> None:
    all_of = await family(world.db, world.conn, {"a": "", "b": "a"}, columns={"journal": 2})
    done = await hand_over(all_of, a="done")
    assert [each.id for each in done.handed] == [all_of.ids["b"]]


@scenario
async def other_ends_are_told_later(world: World) -> None:
    all_of = await family(world.db, world.conn, PAIRS, ended="b")
    for key in "ax":
        await cancel_instance(world.conn, SCHEMA, all_of.ids[key])
    assert await all_of.tell() == "by"


@scenario
async def runners_tell_dependents_and_get_no_doomed_row(world: World) -> None:
    await family(world.db, world.conn, PAIRS)
    await end(world, await take(world), done=None)
    await broken(world, await take(world), most=1)
    await end(world, await take(world), done=None)  # b; y is ended inside
    assert (
        await claim_next(world.conn, SCHEMA, queue="default", steps=["m/s"], owner="test", lease=1.0) is None
    )


@scenario
async def a_runner_completes_and_fails_what_others_come_after(world: World) -> None:
    await family(world.db, world.conn, PAIRS, ended="by")
    await broken(world, await take(world), most=1)
    await end(world, await take(world), stop="no")
    await family(world.db, world.conn, {"a": "", "b": "a"})
    await end(world, await take(world), stop="no")


@scenario
async def a_runner_tells_what_is_untold(world: World) -> None:
    all_of = await family(world.db, world.conn, PAIRS, ended="b")
    for key in "ax":
        await cancel_instance(world.conn, SCHEMA, all_of.ids[key])
    assert (await take(world)).id == all_of.ids["b"]
    assert (
        await claim_next(world.conn, SCHEMA, queue="default", steps=["m/s"], owner="test", lease=1.0) is None
    )
