"""A rolling deploy under load: a new version of one machine comes, another machine goes, a third changes its steps."""

from __future__ import annotations

from collections import Counter

import durable_actors as da
import trio
from durable_actors._client import Client
from durable_actors._journal_level import JournalLevel
from durable_actors._postgres.driver.connection import PgConn
from durable_actors._store.observe import read_queues
from durable_actors.machine import ENDED
from tests.chaos.nemeses import nemesis
from tests.chaos.releases import install
from tests.chaos.workload import default_level
from tests.chaos.world import World

EVERY = 0.04
"""Seconds between inserts."""
COUNTED = 15.0
"""Seconds until everything that nobody can do must be counted as such."""
LEFT = """
select fsm, fsm_version, status::text, hold, result #>> '{}', step from durable.gen_durable
 where fsm in ('chaos.Order', 'chaos.Old', 'chaos.Parcel')
"""
KEYS = 5
"""Partition keys that parcels share: those at a missing step must not hold up the others of their key."""


@nemesis("deploy", worker_options=("--release", "1"))
async def deploy(world: World) -> None:
    """Release 1 is replaced by release 2, worker by worker; what only release 1 could do is counted, and done later."""
    first = [each for each in world.workers if each.serving]
    machines = install(1) | install(2)
    inserted: Counter[str] = Counter()
    async with da.open_client(world.dsn, name="deploy") as client, trio.open_nursery() as nursery:
        level = default_level(world.seed)
        nursery.start_soon(_keep_inserting, client, machines, inserted, level)
        world.worker_options = ("--release", "2")
        for worker in first:
            await trio.sleep(world.rng.uniform(0.3, 0.8))
            world.terminate(worker, "replaced")  # whoever takes its place is of release 2
            await worker.process.wait()
        while sum(each.serving for each in world.workers) < len(first):
            await trio.sleep(0.02)
        await trio.sleep(max(0.5, world.until - trio.current_time()))
        nursery.cancel_scope.cancel()
    await _check_counted(world)
    world.worker_options = ("--release", "1")
    await world.spawn()  # roll back: what was put aside is done after all
    world.tell("a worker of release 1 is back")
    await _check_done(world, inserted)


async def _keep_inserting(
    client: Client, machines: dict[str, type[da.Machine]], inserted: Counter[str], level: JournalLevel
) -> None:
    """Callers of both releases, all the time."""
    # Parcels also at the step that only their release has, so that every worker meets the other's all the time.
    ways = [(name, machine, "start") for name, machine in machines.items()]
    ways += [("parcel 1", machines["parcel 1"], "pack"), ("parcel 2", machines["parcel 2"], "ship")]
    while True:
        for name, machine, step in ways:
            number = inserted[name]
            options: da.InsertOptions = {"state": {}, "step": step, "unique_key": f"deploy:{name}:{number}"}
            options["journal"] = level
            if name.startswith("parcel") and number % 2:
                options["partition_key"] = f"parcels {number % KEYS}"
            with trio.CancelScope(shield=True):  # counted if and only if it was inserted
                await client.insert(machine, **options)
                inserted[name] += 1
            await trio.sleep(EVERY)


async def _check_counted(world: World) -> None:
    """Nothing but `Old` and parcels at `pack` are left, all of that is shelved, and the queue's figures say so."""
    conn = await PgConn.open(world.dsn)
    try:
        with trio.move_on_after(COUNTED):
            while True:
                rows = await world.query(LEFT)
                live = [row for row in rows if row[2] not in ENDED]
                shelved = sum(queue.shelved for queue in await read_queues(conn, "durable"))
                removed = [
                    row[0] == "chaos.Old" or (row[0], row[5]) == ("chaos.Parcel", "pack") for row in live
                ]
                if shelved == len(live) and all(removed) and all(row[3] == 2 for row in live):
                    machine = sum(row[0] == "chaos.Old" for row in live)
                    world.count("shelved", "of the removed machine", machine)
                    world.count("shelved", "at the removed step", len(live) - machine)
                    return
                await trio.sleep(0.05)
        world.fail(f"{len(live)} are left ({Counter(live)}), {shelved} are counted as shelved")
    finally:
        conn.close()


async def _check_done(world: World, inserted: Counter[str]) -> None:
    """Every one of them, by its own version."""
    must = {"by version 1": "order 1", "by version 2": "order 2", "by the old one": "old"}
    must |= {"packed": "parcel", "shipped": "parcel"}  # by whichever release has run `start`
    wanted: Counter[str] = Counter()
    for name, count in inserted.items():
        wanted["parcel" if name.startswith("parcel") else name] += count
    found: Counter[str] = Counter()
    with trio.move_on_after(COUNTED):
        while found != wanted:
            await trio.sleep(0.05)
            found = Counter(must[row[4]] for row in await world.query(LEFT) if row[2] == "done")
        return
    world.fail(f"inserted {dict(wanted)}, but done are {dict(found)}")
