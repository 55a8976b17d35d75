"""`ScheduleCalls`: commands on schedules. A client has one as `client.schedules`."""

from __future__ import annotations

import builtins
from collections.abc import Awaitable, Callable
from datetime import datetime
from functools import partial
from typing import Any, Literal, Protocol, TypeVar, Unpack

from durable_actors._history import TrioConn
from durable_actors._option_checks import choice, count, shown
from durable_actors._scheduling.schedule import Overlap, Schedule, check_name
from durable_actors._store.commands import Said, plan_command
from durable_actors._store.foreign import Dialogue
from durable_actors._store.schedule_commands import (
    RECORDS,
    ScheduleInfo,
    Started,
    backfilling,
    deleting,
    listing,
    pausing_schedule,
    putting,
    resuming_schedule,
    running_now,
)
from durable_actors._store.schedules import plan_schedule
from durable_actors.errors import ConfigError, NoTarget
from durable_actors.machine import JournalLevel

T = TypeVar("T")


class RunsDialogue(Protocol):
    """Runs a dialogue on a connection of the client."""

    def __call__(self, start: Callable[[], Dialogue[T]], conn: TrioConn | None, /) -> Awaitable[T]:
        """Return what the dialogue returns."""
        ...


def _nobody_listens() -> None:
    """Do nothing: there is no engine in this process, and nodes elsewhere look by themselves."""


class ScheduleCalls:
    """Creates, changes and lists schedules. Every command leaves a `Receipt`."""

    def __init__(
        self,
        run: RunsDialogue,
        schema: str,
        *,
        journal: JournalLevel,
        hint: Callable[..., None],
        after_commit: Callable[[Callable[[], None]], None],
    ) -> None:
        self._run = run
        self._schema = schema
        self._journal: JournalLevel = journal
        self._hint = hint
        self._after_commit = after_commit
        self.changed: Callable[[], object] = _nobody_listens
        """Called after a commit that changed a schedule. An engine sets it to `Node.schedules_changed`."""

    async def put(
        self, schedule: Schedule | str, machine: Any = None, *, options: Any = None, **given: Any
    ) -> ScheduleInfo:
        """Create a schedule or replace its definition; see `durable_actors.schedules.put`."""
        said: dict[str, Any] = {
            name: given.pop(name) for name in ("by", "reason", "idempotency_key", "meta") if name in given
        }
        if not isinstance(schedule, Schedule):
            if options is not None:
                given["options"] = options
            try:
                schedule = Schedule(schedule, machine, **given)
            except TypeError as error:
                raise ConfigError(f"{error}; see durable_actors.Schedule for the options") from None
        elif machine is not None or given or options is not None:
            raise ConfigError("put takes a Schedule, or the arguments of one, not both", option="schedule")
        plan = plan_schedule(schedule, journal=self._journal)
        command = plan_command(**said)
        await self._run(partial(putting, self._schema, plan, command), None)
        self._after_commit(self._changed)
        return await self.get(plan.name)

    async def get(self, name: str) -> ScheduleInfo:
        """Read one schedule; see `durable_actors.schedules.get`."""
        found = await self._run(partial(listing, self._schema, [check_name(name)]), None)
        if not found:
            raise missing(name)
        return found[0]

    async def list(self, *, records: int = RECORDS) -> builtins.list[ScheduleInfo]:
        """List all schedules by name; see `durable_actors.schedules.list`."""
        count("records", records, least=0, most=1000)
        return await self._run(partial(listing, self._schema, None, records), None)

    async def pause(self, name: str, **said: Unpack[Said]) -> ScheduleInfo:
        """Let a schedule not fire; see `durable_actors.schedules.pause`."""
        await self._run(partial(pausing_schedule, self._schema, name, plan_command(**said)), None)
        return await self.get(name)

    async def resume(self, name: str, **said: Unpack[Said]) -> ScheduleInfo:
        """End the pause of a schedule; see `durable_actors.schedules.resume`."""
        await self._run(partial(resuming_schedule, self._schema, name, plan_command(**said)), None)
        self._after_commit(self._changed)
        return await self.get(name)

    async def run_now(self, name: str, *, overlap: Overlap | None = None, **said: Unpack[Said]) -> int:
        """Start an instance now; see `durable_actors.schedules.run_now`."""
        if overlap is not None:
            choice("overlap", overlap, "skip", "allow")
        command = plan_command(**said)
        started = await self._run(partial(running_now, self._schema, name, command, overlap), None)
        self._started(started)
        return started.ids[0]

    async def backfill(
        self,
        name: str,
        start: datetime,
        end: datetime,
        *,
        overlap: Literal["allow", "skip"] = "allow",
        **said: Unpack[Said],
    ) -> tuple[int, ...]:
        """Start an instance for every slot of a time that has passed; see `durable_actors.schedules.backfill`."""
        choice("overlap", overlap, "allow", "skip")
        command = plan_command(**said)
        dialogue = partial(backfilling, self._schema, name, command, start=start, end=end, overlap=overlap)
        started = await self._run(dialogue, None)
        self._started(started)
        return started.ids

    async def delete(self, name: str, **said: Unpack[Said]) -> None:
        """Delete a schedule and its records; see `durable_actors.schedules.delete`."""
        await self._run(partial(deleting, self._schema, name, plan_command(**said)), None)
        self._after_commit(self._changed)

    def _changed(self) -> None:
        self.changed()

    def _started(self, started: Started) -> None:
        if started.queue is not None:
            for number in started.ids:
                self._after_commit(partial(self._hint, started.queue, number, priority=started.priority))


def missing(name: str) -> Exception:
    """The error for a schedule that does not exist."""
    return NoTarget(f"there is no schedule {shown(name)}")
