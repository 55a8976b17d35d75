"""Commands on schedules, and what the code of a node declares; listing them. Sans-I/O; see `dialogues`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import islice
from typing import Any, Final, Literal, cast

import attrs
import msgspec
import psycopg

from durable_actors._option_checks import has_zone, in_utc, shown
from durable_actors._postgres.driver import encode
from durable_actors._postgres.driver.statement import Params, Row, Statement
from durable_actors._scheduling.decide import Fire, Turn, first_turn, redefined, resumed
from durable_actors._scheduling.revisions import may_declare, with_revision
from durable_actors._scheduling.schedule import Definition, Overlap, check_name
from durable_actors._scheduling.slots import TICK, check_rule, zone_of
from durable_actors._store.commands import Command, Receipt, read_receipt
from durable_actors._store.foreign import Dialogue
from durable_actors._store.schedules import (
    SCHEDULE,
    Found,
    ScheduledPlan,
    instant_of,
    put_call,
    read_decided,
    read_found,
    turn_call,
)
from durable_actors._store.sql import statement
from durable_actors.errors import ConfigError, Conflict, NoTarget

RECORDS: Final = 5
"""Records that a list shows of each schedule, unless told otherwise."""
NEXT: Final = 5
"""Coming slots that a list shows of each."""
MOST_BACKFILLED: Final = 1000
_TRIES: Final = 20
"""How often a command reads again that another change has overtaken."""

Call = tuple[Statement, Params]


@attrs.frozen(kw_only=True)
class SlotRecord:
    """What became of a slot of a schedule, or of a run of slots that were skipped."""

    slot: datetime
    """The slot, or the first of several."""
    last_slot: datetime
    """The last of several, else the same."""
    slots: int | None = 1
    """How many; None: more than 1,000."""
    outcome: Literal["fired", "skipped", "buffered"]
    """Whether it fired; "buffered": it waits until the running instance has ended."""
    reason: str | None = None
    """Why it was skipped: "overlap", "missed", "paused", "queue_paused", or "changed"."""
    kind: str | None = None
    """How its instance came to be: "slot", "caught_up", "run_now" or "backfill"."""
    instance_id: int | None = None
    """Its instance, if it fired."""
    at: datetime
    """When that was decided."""


@attrs.frozen(kw_only=True)
class ByOperator:
    """Who paused or redefined a schedule, when and why."""

    at: datetime | None = None
    by: str | None = None
    reason: str | None = None


@attrs.frozen(kw_only=True)
class ScheduleInfo:
    """A schedule as it stands."""

    name: str
    machine: str
    """The name of the machine or job that it starts."""
    version: int
    queue: str
    definition: Definition
    """When it fires: `cron` or `every`, `tz`, `overlap`, `missed`, …"""
    origin: Literal["code", "api"]
    """Where it comes from: the code of a node, or `schedules.put`."""
    overridden: ByOperator | None
    """An operator has replaced what the code says."""
    paused: ByOperator | None
    """It does not fire until it is resumed."""
    disabled_at: datetime | None
    """Since when no live node has it in its code; it does not fire."""
    next: tuple[datetime, ...]
    """The next slots, in its time zone."""
    fire_at: datetime | None
    """When the next one fires, with its jitter; None: never again."""
    last_slot: datetime | None
    """The last slot that is decided."""
    buffered: datetime | None
    """A slot that waits until the running instance has ended."""
    running: int | None
    """The instance of an earlier slot that has not ended, unless they may overlap."""
    remaining: int | None
    """How many slots may still fire; None: all."""
    records: tuple[SlotRecord, ...]
    """What became of the last slots, newest first."""

    @property
    def state(self) -> Literal["active", "paused", "disabled", "ended"]:
        """Whether it fires."""
        if self.paused is not None:
            return "paused"
        if self.disabled_at is not None:
            return "disabled"
        return "active" if self.next or self.buffered is not None else "ended"


def info_of(found: Found) -> ScheduleInfo:
    """What people see of a schedule. Pure."""
    row, definition = found.row, found.row.definition
    following = (
        row.next_slot if row.paused is None or row.next_slot is None else max(row.next_slot, found.now)
    )
    slots = (
        []
        if following is None or not usable(definition)
        else list(islice(_from(definition, following - TICK), NEXT))
    )
    if row.remaining is not None:
        slots = slots[: row.remaining]
    return ScheduleInfo(
        name=row.name,
        machine=row.fsm,
        version=row.fsm_version,
        queue=row.queue,
        definition=definition,
        origin=row.origin,
        overridden=_operator(row.overridden),
        paused=_operator(row.paused),
        disabled_at=row.disabled_at,
        next=tuple(each.astimezone(zone_of(definition.tz)) for each in slots),
        fire_at=row.fire_at,
        last_slot=row.last_slot,
        buffered=row.buffered,
        running=found.running,
        remaining=row.remaining,
        records=tuple(msgspec.convert(each, SlotRecord) for each in found.records),
    )


def _from(definition: Definition, after: datetime) -> Iterator[datetime]:
    slot = definition.next_after(after)
    while slot is not None:
        yield slot
        slot = definition.next_after(slot)


def usable(definition: Definition) -> bool:
    """Whether its slots can be computed here: another system may know more time zones; a hand may write anything."""
    try:
        check_rule(definition)
    except ConfigError:
        return False
    return True


def _redefined(found: Found, plan: ScheduledPlan) -> Turn:
    """Where it stands with this definition instead of the stored one."""
    if not usable(found.row.definition):
        return first_turn(plan.name, plan.definition, found.now)
    return redefined(found.row.standing(busy=False), plan.definition, found.now)


def _operator(stored: object) -> ByOperator | None:
    return None if stored is None else msgspec.convert(stored, ByOperator)


def listing(schema: str, names: Sequence[str] | None, records: int = RECORDS) -> Dialogue[list[ScheduleInfo]]:
    """List schedules, by name. What cannot be read is left out: only a hand writes that."""
    found = yield from reading(schema, names, records)
    return [info_of(each) for each in found]


def reading(schema: str, names: Sequence[str] | None, records: int = 0) -> Dialogue[list[Found]]:
    """Read schedules, by name; None: all. What cannot be read is left out."""
    params = [None if names is None else encode.text_array(names), encode.number(records)]
    rows = yield statement("list_schedules", schema, read_only=True), params
    found: list[Found] = []
    for row in rows:
        try:
            found.append(read_found(row))
        except msgspec.ValidationError:
            continue
    return found


# -- commands


@attrs.frozen
class Told:
    """A command on a schedule was carried out, now or by an earlier call with the same key."""

    rows: list[Row]
    receipt: Receipt | None = None
    """The receipt of that earlier call."""
    found: Found | None = None


def _commanding(
    schema: str, name: str, verb: str, command: Command, act: Callable[[Found | None], Call]
) -> Dialogue[Told]:
    """Read the schedule, decide, and write if it is still as it was read; else begin again."""
    check_name(name)
    for _ in range(_TRIES):
        earlier = yield from _earlier(schema, name, verb, command)
        if earlier is not None:
            return Told([], earlier)
        found = yield from reading(schema, [name])
        call = act(found[0] if found else None)
        try:
            rows = yield call
        except psycopg.errors.UniqueViolation:
            earlier = yield from _earlier(schema, name, verb, command)
            if earlier is None:
                raise  # a snapshot that is older than the receipt does not show it
            return Told([], earlier)
        if rows:
            return Told(rows, found=found[0] if found else None)
    raise Conflict(f"schedule {name!r} was changed {_TRIES} times meanwhile: try again")


def _earlier(schema: str, name: str, verb: str, command: Command) -> Dialogue[Receipt | None]:
    if command.idempotency_key is None:
        return None
    params = [*map(encode.text, (verb, SCHEDULE, name, command.idempotency_key))]
    rows = yield statement("find_receipt", schema, read_only=True), params
    return read_receipt(rows[0]) if rows else None


def _existing(name: str, found: Found | None) -> Found:
    """The schedule, whose slots can be computed here. Raises `NoTarget`, `ConfigError`."""
    if found is None:
        raise NoTarget(f"there is no schedule {name!r}")
    check_rule(found.row.definition)
    return found


def _said(command: Command, now: datetime) -> dict[str, Any]:
    return {"at": now.isoformat(), "by": command.by, "reason": command.reason}


def putting(schema: str, plan: ScheduledPlan, command: Command) -> Dialogue[None]:
    """Create a schedule, or replace its definition, whatever the code says."""
    now = yield from _time(schema)

    def act(found: Found | None) -> Call:
        if found is None:
            turn = first_turn(plan.name, plan.definition, now)
            return put_call(schema, plan, turn, rev=0, origin="api", verb="put", command=command)
        row = found.row
        # A disabled one has left the code, which does not define it any more.
        origin: Literal["code", "api"] = "api" if row.disabled_at is not None else row.origin
        return put_call(
            schema,
            plan,
            _redefined(found, plan),
            rev=row.rev,
            origin=origin,
            revisions=row.revisions if origin == "code" else (),
            overridden=None if origin == "api" else _said(command, found.now),
            verb="put",
            command=command,
        )

    yield from _commanding(schema, plan.name, "put", command, act)


def _time(schema: str) -> Dialogue[datetime]:
    """The time of the database."""
    params = [encode.text_array([]), encode.number(0)]
    rows = yield statement("due_schedules", schema, read_only=True), params
    return instant_of(rows[0])


def pausing_schedule(schema: str, name: str, command: Command) -> Dialogue[None]:
    """Let a schedule not fire until it is resumed. Raises `NoTarget`; `Conflict` if it is paused already."""

    def act(maybe: Found | None) -> Call:
        found = _existing(name, maybe)
        if found.row.paused is not None:
            raise Conflict(f"schedule {name!r} is paused already")
        row = found.row
        turn = Turn(row.next_slot, row.fire_at, row.last_slot, row.remaining, row.buffered)
        return turn_call(schema, row, turn, paused=_said(command, found.now), verb="pause", command=command)

    yield from _commanding(schema, name, "pause", command, act)


def resuming_schedule(schema: str, name: str, command: Command) -> Dialogue[None]:
    """End the pause of a schedule; its slots in the meantime are recorded, and none of them fires."""

    def act(maybe: Found | None) -> Call:
        found = _existing(name, maybe)
        paused = _operator(found.row.paused)
        if paused is None:
            raise Conflict(f"schedule {name!r} is not paused")
        turn = resumed(found.row.standing(busy=False), (paused.at or found.now).astimezone(UTC), found.now)
        return turn_call(schema, found.row, turn, verb="resume", command=command)

    yield from _commanding(schema, name, "resume", command, act)


@attrs.frozen
class Started:
    """Instances that a command has started."""

    ids: tuple[int, ...]
    queue: str | None = None
    """None: an earlier call with the same key has started them."""
    priority: int = 0


def running_now(
    schema: str, name: str, command: Command, overlap: Overlap | None = None
) -> Dialogue[Started]:
    """Start an instance now, beside the slots. Raises `NoTarget`; `Conflict` if one runs and they must not overlap."""

    def act(maybe: Found | None) -> Call:
        found = _existing(name, maybe)
        alone = (overlap or found.row.definition.overlap) != "allow"
        if alone and found.running is not None:
            raise _runs(name, found.running)
        return _beside(
            schema, found, [Fire(found.now, "run_now")], alone=alone, verb="run_now", command=command
        )

    told = yield from _commanding(schema, name, "run_now", command, act)
    return _started(name, told)


def backfilling(
    schema: str,
    name: str,
    command: Command,
    *,
    start: datetime,
    end: datetime,
    overlap: Literal["allow", "skip"] = "allow",
) -> Dialogue[Started]:
    """Start an instance for every slot from `start` to `end`, which must have passed. Raises as `running_now`."""
    begin, until = _passed("start", start), _passed("end", end)
    if until < begin:
        raise ConfigError("end= comes before start=", option="end", value=end)

    def act(maybe: Found | None) -> Call:
        found = _existing(name, maybe)
        if until > found.now:
            raise Conflict(f"end={shown(end)} has not come yet: its slots fire by themselves")
        slots = list(islice(found.row.definition.between(begin - TICK, until), MOST_BACKFILLED + 1))
        if len(slots) > MOST_BACKFILLED:
            raise ConfigError(
                f"schedule {name!r} has more than {MOST_BACKFILLED} slots from start to end: use a shorter time",
                option="end",
                value=end,
            )
        if not slots:
            raise Conflict(f"schedule {name!r} has no slot from {begin.isoformat()} to {until.isoformat()}")
        if overlap == "skip" and found.running is not None:
            raise _runs(name, found.running)
        fires = [Fire(slot, "backfill") for slot in slots]
        return _beside(schema, found, fires, alone=overlap == "skip", verb="backfill", command=command)

    told = yield from _commanding(schema, name, "backfill", command, act)
    return _started(name, told)


def _passed(option: str, value: object) -> datetime:
    if not isinstance(value, datetime) or not has_zone(value):
        raise ConfigError(
            f"{option}={shown(value)} must be a datetime with a time zone", option=option, value=value
        )
    return in_utc(value)


def _beside(
    schema: str, found: Found, fires: Sequence[Fire], *, alone: bool, verb: str, command: Command
) -> Call:
    """Start instances, and leave where the schedule stands as it is."""
    row = found.row
    turn = Turn(row.next_slot, row.fire_at, row.last_slot, row.remaining, row.buffered, tuple(fires))
    return turn_call(schema, row, turn, paused=row.paused, alone=alone, verb=verb, command=command)


def _runs(name: str, number: int) -> Conflict:
    return Conflict(
        f'instance {number} of schedule {name!r} has not ended; overlap="allow" starts another one'
    )


def _started(name: str, told: Told) -> Started:
    if told.receipt is not None:
        result = told.receipt.result
        return Started(tuple(cast("list[int]", result)) if isinstance(result, list) else ())
    decided = read_decided(told.rows)
    ids = [each.instance_id for each in decided if each.instance_id is not None]
    if not ids:
        raise Conflict(f"instances of schedule {name!r} for this have been started, and have not ended")
    return Started(tuple(ids), decided[0].queue, decided[0].priority)


def deleting(schema: str, name: str, command: Command) -> Dialogue[None]:
    """Delete a schedule and its records. Raises `NoTarget`."""

    def act(maybe: Found | None) -> Call:
        if maybe is None:
            raise NoTarget(f"there is no schedule {name!r}")
        return statement("delete_schedule", schema), [encode.text(name), *command.params()]

    yield from _commanding(schema, name, "delete", command, act)


# -- what the code of a node says


def declaring(
    schema: str, plans: Mapping[str, ScheduledPlan], live: Mapping[str, Collection[str]]
) -> Dialogue[list[str]]:
    """Store what a node's code says of its schedules, where it may. Returns the names that changed.

    `live` are the revisions that the live nodes have, by name.
    """
    changed: list[str] = []
    now = yield from _time(schema)
    stored = {each.row.name: each for each in (yield from reading(schema, sorted(plans)))}
    for name, plan in sorted(plans.items()):
        call = _declaration(schema, plan, stored.get(name), live.get(name, ()), now)
        if call is not None and (yield call):
            changed.append(name)
    return changed


def _declaration(
    schema: str, plan: ScheduledPlan, found: Found | None, live: Collection[str], now: datetime
) -> Call | None:
    """The statement that makes a node's definition count; None: it counts, or must not."""
    mine = plan.revision
    if found is None:
        turn = first_turn(plan.name, plan.definition, now)
        return put_call(schema, plan, turn, rev=0, origin="code", revisions=[mine])
    row, seen = found.row, found.row.revisions
    current = bool(seen) and seen[-1] == mine
    if not (row.disabled_at is not None if current else may_declare(mine, seen, live)):
        return None
    revisions = with_revision(mine, seen)
    if current or row.origin == "api" or row.overridden is not None:
        params = [encode.text(row.name), encode.number(row.rev), encode.text_array(revisions)]
        return statement("adopt_schedule", schema), params
    turn = _redefined(found, plan)
    return put_call(schema, plan, turn, rev=row.rev, origin="code", revisions=revisions)
