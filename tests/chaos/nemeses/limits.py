"""Limits that an operator changes while workers are killed."""

from __future__ import annotations

import trio
from durable_actors._limits import Limit
from durable_actors._postgres.driver.connection import PgConn
from durable_actors._store.commands import Command
from durable_actors._store.limits import release_limit, set_limit
from tests.chaos.machines import LIMITS
from tests.chaos.nemeses import nemesis, process
from tests.chaos.world import World


@nemesis("limits")
async def limits(world: World) -> None:
    """An operator lowers limits, clears what he has set, and lets keys begin anew, while workers are killed."""
    conn = await PgConn.open(world.dsn)
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(process.kill, world)
            while await world.pause(0.1, 0.5):
                await _operate(world, conn)
        for name in LIMITS:
            await set_limit(conn, "durable", name, None, Command())
    finally:
        conn.close()


async def _operate(world: World, conn: PgConn) -> None:
    name = world.rng.choice([*LIMITS])
    verb = world.rng.choice(("set", "clear", "release"))
    if verb == "release":
        await release_limit(conn, "durable", world.rng.choice(("api", "tokens:t0", "tokens:t1")), Command())
    else:
        # Never more slots than the code declares: the checker knows no other number.
        slow = Limit(20, burst=1) if LIMITS[name].slots is None else Limit(slots=1, held=LIMITS[name].held)
        await set_limit(conn, "durable", name, slow if verb == "set" else None, Command())
    world.count(f"{verb} of a limit")
