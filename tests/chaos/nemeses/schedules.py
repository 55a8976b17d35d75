"""Schedules that fire while workers are killed, and an operator pauses, resumes and runs them."""

from __future__ import annotations

import contextlib
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import durable_actors as da
import trio
from durable_actors import errors
from tests.chaos.machines import job
from tests.chaos.nemeses import nemesis, process
from tests.chaos.world import World

OVERLAPS: Final = ("allow", "skip", "buffer_one")


@nemesis("schedules")
async def schedules(world: World) -> None:
    """Schedules fire every second while workers are killed; an operator pauses, resumes and runs them by hand."""
    [[now]] = await world.query("select extract(epoch from clock_timestamp())::float8")
    ends = datetime.fromtimestamp(now, UTC) + timedelta(seconds=world.until - trio.current_time())
    async with da.open_client(world.dsn, name=f"operator {world.seed}") as client:
        for overlap in OVERLAPS:
            await client.schedules.put(
                f"every second, {overlap}",
                job,
                every=1,
                args={"n": 1},
                overlap=overlap,
                missed="all",
                ends=ends,
            )
        async with trio.open_nursery() as nursery:
            nursery.start_soon(process.kill, world)
            while await world.pause(0.2, 0.8):
                await _operate(world, client)
        for overlap in OVERLAPS:
            with contextlib.suppress(errors.Conflict):  # it is not paused
                await client.schedules.resume(f"every second, {overlap}")


async def _operate(world: World, client: Any) -> None:
    name = f"every second, {world.rng.choice(OVERLAPS)}"
    verb = world.rng.choice(("pause", "resume", "resume", "run_now"))
    try:
        await getattr(client.schedules, verb)(name)
    except errors.Conflict:
        return  # it is paused, it is not, or an instance of it has not ended
    world.count(f"{verb} of a schedule")
