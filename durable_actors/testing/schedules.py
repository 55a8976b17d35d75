"""Schedules on a bench: time passes from slot to slot, and each fires when it is due."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from durable_actors._engine.setup import plan_schedules
from durable_actors._postgres.driver import encode
from durable_actors._postgres.driver.connection import PgConn
from durable_actors._postgres.pool.pool import ConnectionPool
from durable_actors._scheduling.schedule import Schedule
from durable_actors._store.dialogues import run_dialogue
from durable_actors._store.schedule_commands import ScheduleInfo, declaring, listing
from durable_actors._store.schedule_turns import turn_due
from durable_actors._store.schedules import read_due
from durable_actors.config import Config
from durable_actors.errors import ConfigError
from durable_actors.machine import current_registry
from durable_actors.testing.statements import ADVANCE, NEXT_SLOT

MOST_TURNS: Final = 10_000
"""Slots that one `advance` passes, at most."""
_TICK: Final = 1e-6


async def pass_time(pool: ConnectionPool, lane: str, schema: str, seconds: float) -> None:
    """Move the clock to each slot on the way, fire it there, and go on. The clock must stand still."""
    left = seconds
    async with pool.acquire(lane) as conn:
        for _ in range(MOST_TURNS):
            await _turn_all(conn, schema)
            found = (await conn.run(NEXT_SLOT)).rows[0][0]
            wait = left if found is None else min(max(float(found), 0.0) + _TICK, left)
            await conn.run(ADVANCE, [encode.number(wait)])
            left -= wait
            if left <= 0:
                await _turn_all(conn, schema)
                return
    raise ConfigError(
        f"advance would pass more than {MOST_TURNS} slots of schedules: pause the frequent ones, or advance by less",
        option="by",
        value=seconds,
    )


async def _turn_all(conn: PgConn, schema: str) -> None:
    """Turn what is due now."""
    while True:
        due = await read_due(conn, schema, ())
        turned = [await turn_due(conn, schema, found) for found in due.found]
        if not any(turned):
            return


async def declare(
    pool: ConnectionPool, lane: str, schema: str, schedules: Sequence[Schedule]
) -> list[ScheduleInfo]:
    """Store schedules as an engine does at its start."""
    config = Config(schedules=schedules, dsn="")
    plans = plan_schedules(config, current_registry().specs)
    async with pool.acquire(lane) as conn:
        await run_dialogue(conn, declaring(schema, plans, {}))
        return await run_dialogue(conn, listing(schema, sorted(plans)))
