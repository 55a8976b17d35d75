"""Schedules at run time: `schedules.put`, `list`, `pause`, … They find their client themselves.

All but `list` and `get` are commands: they take `by`, `reason`, `idempotency_key` and `meta`, and leave a `Receipt`.
What they say goes before what the code says, and stays until `delete`.
"""

from __future__ import annotations

import builtins
from datetime import datetime
from typing import Any, Literal, Unpack

from durable_actors._scheduling.schedule import Definition, Overlap, Schedule
from durable_actors._store.commands import Said
from durable_actors._store.schedule_commands import RECORDS, ByOperator, ScheduleInfo, SlotRecord
from durable_actors.client import find_client

__all__ = [
    "ByOperator",
    "Definition",
    "Schedule",
    "ScheduleInfo",
    "SlotRecord",
    "backfill",
    "delete",
    "get",
    "list",
    "pause",
    "put",
    "resume",
    "run_now",
]


async def put(
    schedule: Schedule | str, machine: Any = None, *, engine: object = None, **options: Any
) -> ScheduleInfo:
    """Create a schedule, or replace its definition: `put("nightly", report, cron="0 3 * * *")` or `put(Schedule(...))`.

    It fires while any engine runs on this database. The first slot comes after now. If a schedule of this name exists,
    its pause and its records stay; if it fires at the same times as before, a slot that is due stays due. If the code
    of a node defines it, this definition counts instead, and `overridden` says so; `delete` brings the code's back.
    Raises `ConfigError`, `StateError` and `UnknownMachine`.
    """
    return await find_client(engine).schedules.put(schedule, machine, **options)


async def get(name: str, *, engine: object = None) -> ScheduleInfo:
    """Read one schedule, with its next five slots and its last records. Raises `NoTarget`."""
    return await find_client(engine).schedules.get(name)


async def list(*, records: int = RECORDS, engine: object = None) -> builtins.list[ScheduleInfo]:  # noqa: A001 - the contract's name
    """List all schedules by name, each with its next five slots and so many of its last records."""
    return await find_client(engine).schedules.list(records=records)


async def pause(name: str, *, engine: object = None, **said: Unpack[Said]) -> ScheduleInfo:
    """Let a schedule not fire until it is resumed, whatever is deployed.

    Raises `NoTarget`; `Conflict` if it is paused already.
    """
    return await find_client(engine).schedules.pause(name, **said)


async def resume(name: str, *, engine: object = None, **said: Unpack[Said]) -> ScheduleInfo:
    """End the pause of a schedule: it goes on with the next slot.

    The slots of the pause are recorded, and none of them fires; `backfill` starts them. Raises `NoTarget`; `Conflict`
    if it is not paused.
    """
    return await find_client(engine).schedules.resume(name, **said)


async def run_now(
    name: str, *, overlap: Overlap | None = None, engine: object = None, **said: Unpack[Said]
) -> int:
    """Start an instance now, beside the slots, also if the schedule is paused or disabled; return its id.

    Raises `NoTarget`, and `Conflict` if an instance has not ended and they must not overlap; `overlap="allow"` starts
    another one all the same.
    """
    return await find_client(engine).schedules.run_now(name, overlap=overlap, **said)


async def backfill(
    name: str,
    start: datetime,
    end: datetime,
    *,
    overlap: Literal["allow", "skip"] = "allow",
    engine: object = None,
    **said: Unpack[Said],
) -> tuple[int, ...]:
    """Start an instance for every slot from `start` to `end`, whatever became of it; return their ids, in order.

    At most 1,000; `end` must have passed. They may overlap, also if those of the schedule must not; but a slot whose
    last backfill has not ended is skipped. With `overlap="skip"` the first one starts, and the others are recorded as
    skipped. Raises `NoTarget`, `ConfigError`; `Conflict` if nothing is started.
    """
    return await find_client(engine).schedules.backfill(name, start, end, overlap=overlap, **said)


async def delete(name: str, *, engine: object = None, **said: Unpack[Said]) -> None:
    """Delete a schedule and its records; its instances stay. Raises `NoTarget`.

    One that a node has in its code comes back within about a minute, as the code says: to stop it, pause it.
    """
    await find_client(engine).schedules.delete(name, **said)
