"""Scenarios of `moving.py` for pauses: an instance is paused, and then becomes runnable in every way that there is."""

from __future__ import annotations

from durable_actors._store.claim import release_claims
from durable_actors._store.commands import plan_command
from durable_actors._store.dialogues import run_dialogue
from durable_actors._store.holds import HELD, SHELVED
from durable_actors._store.insert import insert_instances
from durable_actors._store.lease import crash_claims, reap_claims
from durable_actors._store.pausing import RESUME, carrying_out, pausing
from durable_actors._store.rebuild import accepting, rebuilding
from durable_actors._store.recover import recount_barriers, wake_lost_waits
from durable_actors._store.rows import Raised
from durable_actors._store.signal import expire_awaits, send_signals, signal_from_step
from tests.store.kit import EXPIRE, SCHEMA, claims, insert, outcome, plan, rows
from tests.store.moving import World, scenario
from tests.store.moving_runners import broken, end, take
from tests.store.stepping import commit, deliver
from tests.support.commands import cancel_instance


async def pause(world: World, *numbers: int) -> list[str]:
    """Pause these; returns what each call said."""
    return [
        (await run_dialogue(world.conn, pausing(SCHEMA, number, plan_command(by="ada")))).result
        for number in numbers
    ]


async def resume(world: World, *numbers: int) -> None:
    for number in numbers:
        await run_dialogue(world.conn, carrying_out(RESUME, SCHEMA, number, plan_command()))


async def all_held_and_resumed(world: World, *numbers: int) -> None:
    """They are runnable by now, and nothing picks them; resumed, they are on offer."""
    for number in numbers:
        assert rows(world.db, "status, hold", f"id = {number}") == [("runnable", 4)]
    assert await claims(world.conn) == []
    await resume(world, *numbers)
    for number in numbers:
        assert rows(world.db, "status, hold, request", f"id = {number}") == [("runnable", 0, None)]


@scenario
async def pauses_of_every_kind(world: World) -> None:
    running, parked = await world.claim(), await world.park()
    parent = (await world.spawn(1, timeout=60.0)).id
    [child] = [number for (number,) in rows(world.db, "id", f"parent_id = {parent}")]
    [keyed, held] = insert(world.db, 2, partition_key="key", eligible_at="=now() - interval '1 h'")
    world.db.execute("update durable.gen_durable set hold = 1 where id = %s", [held])
    [shelved] = insert(world.db, hold=SHELVED, shelved_step="s")
    said = await pause(world, running.id, parked, parent, child, keyed, shelved)
    assert said == ["requested", *["paused"] * 5]
    assert rows(world.db, "hold", f"id = {held}") == [(0,)], "the next of its key goes"
    await pause(world, held)
    await commit(world.conn, outcome(running, "runnable", step="t", advance=1, attempt=0, keep_claim=True))
    await send_signals(world.conn, SCHEMA, [deliver(parked)])
    world.db.execute("update durable.gen_durable set await_deadline = now() where await_deadline is not null")
    assert len(await expire_awaits(world.conn, SCHEMA, "default", limit=10)) == 1
    await all_held_and_resumed(world, running.id, parked, parent, child, keyed, held, shelved)


@scenario
async def outcomes_under_a_pause(world: World) -> None:
    waited = {"awaits": ["go"], "children_total": 2, "inbox": True}
    plain = [await world.claim() for _ in range(2)]
    parked = [await world.claim(**waited) for _ in range(3)]
    none, missed = await world.claim(), await world.claim()
    await pause(world, *[claim.id for claim in (*plain, *parked, none, missed)])
    await commit(
        world.conn,
        outcome(plain[0], "runnable", attempt=1, delay=0.0),
        outcome(parked[0], "runnable", step="t", advance=1, attempt=0),
        outcome(parked[1], "runnable", attempt=1, raised=Raised("ValueError", "trace"), keeps_awaits=True),
    )
    await world.spawn(0, claim=none)
    await send_signals(world.conn, SCHEMA, [deliver(missed.id)])
    await commit(world.conn, outcome(missed, "awaiting_signal", awaits=("go",), await_step="t"))
    runnable = [plain[0].id, parked[0].id, parked[1].id, none.id, missed.id]
    await all_held_and_resumed(world, *runnable)
    await commit(world.conn, outcome(plain[1]), outcome(parked[2], "failed", last_error="no"))
    assert rows(world.db, "status, hold", f"id = {plain[1].id}") == [("done", 0)]


@scenario
async def claims_that_end_under_a_pause(world: World) -> None:
    held = [await world.claim(partition_key=f"key {number}") for number in range(4)]
    crashed, reaped = await world.claim(), await world.claim()
    every = [*held, crashed, reaped]
    await pause(world, *[claim.id for claim in every])
    await release_claims(world.conn, SCHEMA, held[:1], attempts=0)
    await release_claims(world.conn, SCHEMA, held[1:2], attempts=1)
    await release_claims(world.conn, SCHEMA, held[2:3], attempts=0, hold=HELD)
    await release_claims(world.conn, SCHEMA, held[3:], attempts=0, hold=SHELVED, interruptions=1)
    await crash_claims(world.conn, SCHEMA, [crashed], error="SystemExit: 2", raised=Raised("SystemExit", "t"))
    world.db.execute(EXPIRE)
    await reap_claims(world.conn, SCHEMA, limit=10)
    await all_held_and_resumed(world, *[claim.id for claim in every])


@scenario
async def barriers_and_signals_under_a_pause(world: World) -> None:
    by_commit = await world.spawn(1)
    [first] = await claims(world.conn)
    by_command = await world.spawn(1)
    [second] = await claims(world.conn)
    waits = await world.park()
    sender = await world.claim()
    await pause(world, by_commit.id, by_command.id, waits)
    await commit(world.conn, outcome(first))
    assert await cancel_instance(world.conn, SCHEMA, second.id, force=True) == "cancelled"
    await signal_from_step(world.conn, SCHEMA, sender, [deliver(waits)])
    await all_held_and_resumed(world, by_commit.id, by_command.id, waits)


@scenario
async def paused_rows_that_are_repaired(world: World) -> None:
    lost, wrong = await world.park(), await world.spawn(1)
    await pause(world, lost, wrong.id)
    insert_signal = "insert into durable.signals (target_id, name, payload) values (%s, 'go', '{}')"
    world.db.execute(insert_signal, [lost])
    assert (await wake_lost_waits(world.conn, SCHEMA, after=0))[0] == [lost]
    world.db.execute("delete from durable.gen_durable where parent_id = %s", [wrong.id])
    assert (await recount_barriers(world.conn, SCHEMA, after=0))[0] == [wrong.id]
    await all_held_and_resumed(world, lost, wrong.id)


@scenario
async def runners_under_a_pause(world: World) -> None:
    insert(world.db, 2)
    mine = [await take(world), await take(world)]
    await pause(world, *[claim.id for claim in mine])
    await end(world, mine[0], next="s")
    await broken(world, mine[1], most=20)
    await all_held_and_resumed(world, *[claim.id for claim in mine])


@scenario
async def paused_rows_that_are_cancelled(world: World) -> None:
    running, parked = await world.claim(), await world.park()
    [runnable] = insert(world.db, partition_key="key")
    await pause(world, running.id, parked, runnable)
    said = [await cancel_instance(world.conn, SCHEMA, each) for each in (running.id, parked, runnable)]
    assert said == ["requested", "cancelled", "cancelled"]
    await release_claims(world.conn, SCHEMA, [running], attempts=0)
    for number in (running.id, parked, runnable):
        assert rows(world.db, "status, hold", f"id = {number}") == [("cancelled", 0)]


@scenario
async def paused_rows_that_are_rebuilt(world: World) -> None:
    found = await insert_instances(world.conn, SCHEMA, [plan(journal=4)] * 3)
    numbers = [number for number in found if number is not None]
    [running] = await claims(world.conn, limit=1)
    await pause(world, *numbers)
    await run_dialogue(world.conn, accepting(SCHEMA, numbers[1], plan_command()))
    for number in numbers:
        await run_dialogue(world.conn, rebuilding(SCHEMA, number, plan_command()))
    assert running.id == numbers[0]
    world.db.execute("delete from durable.gen_durable where id = %s", [numbers[2]])
    await run_dialogue(world.conn, rebuilding(SCHEMA, numbers[2], plan_command()))
    await all_held_and_resumed(world, *numbers)
