"""Schedules in the database: what is due, and the statement that turns one. Values are read here, too."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, tzinfo
from typing import Any, Final, Literal, cast

import attrs
import msgspec

from durable_actors._postgres.driver import encode
from durable_actors._postgres.driver.connection import PgConn
from durable_actors._postgres.driver.decode import decode_instant
from durable_actors._postgres.driver.statement import Params, Row, Statement
from durable_actors._scheduling.decide import Fire, Skip, Standing, Turn, keep_seconds
from durable_actors._scheduling.schedule import Definition, Schedule, definition_of, revision_of
from durable_actors._scheduling.slots import check_rule, zone_of
from durable_actors._store.commands import Command
from durable_actors._store.insert import tags_literal
from durable_actors._store.sql import statement
from durable_actors.errors import ConfigError
from durable_actors.machine import InsertPlan, JournalLevel, ScheduledRun, current_registry, plan_insert

SCHEDULE: Final = "schedule"
"""The scope of receipts whose target is a schedule; also the first part of its instances' tag and unique key."""
DUE_LIMIT: Final = 50
"""Schedules that a node turns before it looks again."""


class StoredSchedule(msgspec.Struct, frozen=True):
    """A row of `schedules`, without what is only inserted."""

    name: str
    rev: int
    spec: Any
    fsm: str
    fsm_version: int
    step: str
    queue: str
    priority: int
    origin: Literal["code", "api"]
    revisions: list[str]
    next_slot: datetime | None
    fire_at: datetime | None
    last_slot: datetime | None
    buffered: datetime | None
    remaining: int | None
    overridden: Any = None
    paused: Any = None
    disabled_at: datetime | None = None
    changed_at: datetime | None = None

    @property
    def definition(self) -> Definition:
        """When and how it fires. Raises `msgspec.ValidationError` for what only a hand can have written."""
        return definition_of(self.spec)

    def standing(self, *, busy: bool) -> Standing:
        """For the decisions."""
        return Standing(
            self.name,
            self.definition,
            _utc(self.next_slot),
            _utc(self.last_slot),
            self.remaining,
            _utc(self.buffered),
            busy,
        )


def _utc(instant: datetime | None) -> datetime | None:
    return None if instant is None else instant.astimezone(UTC)


@attrs.frozen
class Found:
    """A schedule as it was read."""

    row: StoredSchedule
    now: datetime
    """The time of the database."""
    running: int | None
    """Its last instance, if that has not ended."""
    records: tuple[Mapping[str, Any], ...] = ()


@attrs.frozen
class Due:
    """What a look has found."""

    found: tuple[Found, ...]
    now: datetime
    wait: float | None
    """Seconds until the next one fires; None: none will."""
    others: frozenset[str]
    """Enabled ones of some code, but not of this node's."""
    disabled: frozenset[str]
    """Disabled ones that this node's code has."""
    broken: tuple[str, ...] = ()
    """Why rows cannot be read."""


async def read_due(conn: PgConn, schema: str, declared: Iterable[str]) -> Due:
    """Read what is due, and when to look again."""
    params = [encode.text_array(sorted(declared)), encode.number(DUE_LIMIT)]
    head, *rows = (await conn.run(statement("due_schedules", schema, read_only=True), params)).rows
    found: list[Found] = []
    broken: list[str] = []
    for row in rows:
        try:
            each = read_found(row)
            check_rule(
                each.row.definition
            )  # another system may know more time zones, and a hand may write anything
            found.append(each)
        except (msgspec.ValidationError, ConfigError) as error:
            broken.append(f"{(row[0] or b'').decode()[:200]}: {error}")
    return Due(
        tuple(found),
        instant_of(head),
        None if head[2] is None else float(head[2]),
        frozenset(_names(head[3])),
        frozenset(_names(head[4])),
        tuple(broken),
    )


def _names(raw: bytes | None) -> list[str]:
    return [] if raw is None else msgspec.json.decode(raw, type=list[str])


def instant_of(row: Row) -> datetime:
    """The time of the database, as due_schedules.sql and list_schedules.sql return it."""
    now = decode_instant(row[1])
    assert now is not None
    return now.astimezone(UTC)


def read_found(row: Row) -> Found:
    """Read a row of due_schedules.sql or list_schedules.sql. Raises `msgspec.ValidationError`."""
    stored = msgspec.json.decode(row[0] or b"null", type=StoredSchedule)
    stored.definition  # noqa: B018 - raises
    records = [] if row[3] is None else msgspec.json.decode(row[3], type=list[dict[str, Any]])
    return Found(stored, instant_of(row), None if row[2] is None else int(float(row[2])), tuple(records))


# -- turns


def read_scheduled(stored: object) -> ScheduledRun | None:
    """The slot of an instance, which turn_schedule.sql stores in its `meta`; None for what is none."""
    fields = cast("dict[str, Any]", stored) if isinstance(stored, dict) else {}
    try:
        slot = datetime.fromisoformat(fields["slot"])
        return ScheduledRun(
            schedule=str(fields["name"]), slot=slot.astimezone(_zone(fields.get("tz"))), kind=fields["kind"]
        )
    except (KeyError, TypeError, ValueError, OverflowError):
        return None


def _zone(name: object) -> tzinfo:
    try:
        return zone_of(str(name))
    except Exception:  # noqa: BLE001 - zoneinfo raises what opening a file of that name raises
        return UTC


@attrs.frozen
class Decided:
    """What became of a slot that was to fire."""

    slot: datetime
    instance_id: int | None
    """None: it was skipped."""
    queue_paused: bool
    queue: str
    priority: int


def key_of(name: str, slot: datetime, *, alone: bool) -> str:
    """The unique key of the instance of a slot: that of the schedule if instances must not overlap."""
    key = f"{SCHEDULE}:{name}"
    return key if alone else f"{key}@{slot.astimezone(UTC).isoformat()}"


def turn_call(
    schema: str,
    row: StoredSchedule,
    turn: Turn,
    *,
    paused: object = None,
    alone: bool | None = None,
    verb: str | None = None,
    command: Command | None = None,
) -> tuple[Statement, Params]:
    """The statement that turns a schedule, and its parameters. Pure."""
    single = row.definition.overlap != "allow" if alone is None else alone
    reference = turn.next_slot or turn.last_slot or datetime.now(UTC)
    params = [
        encode.text(row.name),
        encode.number(row.rev),
        *map(_instant, (turn.next_slot, turn.fire_at, turn.last_slot)),
        encode.number(turn.remaining),
        _instant(turn.buffered),
        None if paused is None else encode.json(paused),
        *_fires(row.name, turn.fires, alone=single),
        *_skips(turn.skips),
        encode.number(keep_seconds(row.definition, reference)),
        encode.text(verb),
        *(command or Command()).params(),
    ]
    return statement("turn_schedule", schema), params


def _fires(name: str, fires: Sequence[Fire], *, alone: bool) -> list[bytes | None]:
    return [
        encode.text_array([each.slot.isoformat() for each in fires]),
        encode.text_array([each.kind for each in fires]),
        encode.text_array([key_of(name, each.slot, alone=alone) for each in fires]),
    ]


def _skips(skips: Sequence[Skip]) -> list[bytes | None]:
    return [
        encode.text_array([each.first.isoformat() for each in skips]),
        encode.text_array([each.last.isoformat() for each in skips]),
        encode.int_array([each.count for each in skips]),
        encode.text_array([each.reason for each in skips]),
    ]


def _instant(value: datetime | None) -> bytes | None:
    return None if value is None else value.isoformat().encode()


def read_decided(rows: Sequence[Row]) -> list[Decided]:
    """Read the answer of turn_schedule.sql: what became of each slot that was to fire."""
    return [
        Decided(
            datetime.fromisoformat((slot or b"").decode()),
            None if number is None else int(number),
            closed == b"t",
            (queue or b"").decode(),
            int(priority or 0),
        )
        for slot, number, closed, queue, priority in rows
        if slot is not None
    ]


# -- definitions


@attrs.frozen
class ScheduledPlan:
    """A schedule that can be stored: when, and what it inserts."""

    name: str
    definition: Definition
    plan: InsertPlan

    @property
    def revision(self) -> str:
        """The revision of this definition."""
        plan = self.plan
        meta = None if plan.labels is None else plan.labels.meta
        parts = (
            plan.machine,
            str(plan.version),
            plan.step,
            plan.queue,
            str(plan.priority),
            plan.partition_key,
        )
        told = (tags_literal(plan), meta, str(plan.journal), plan.fingerprint)
        flow = (str(plan.max_attempts), plan.fair_key, plan.limits)
        return revision_of(self.definition.to_json(), *parts, plan.state, *told, *flow)


def plan_schedule(schedule: Schedule, *, journal: JournalLevel = "auto") -> ScheduledPlan:
    """What a schedule stores. Raises `ConfigError`, `StateError`, `UnknownMachine`."""
    options = schedule.row_options
    options["tags"] = [*(options.get("tags") or ()), f"{SCHEDULE}:{schedule.name}"]
    plan = plan_insert(current_registry().find(schedule.machine), options, journal=journal)  # type: ignore[arg-type]
    return ScheduledPlan(schedule.name, schedule.definition, plan)


def put_call(
    schema: str,
    plan: ScheduledPlan,
    turn: Turn,
    *,
    rev: int,
    origin: Literal["code", "api"],
    revisions: Sequence[str] = (),
    overridden: object = None,
    verb: str | None = None,
    command: Command | None = None,
) -> tuple[Statement, Params]:
    """The statement that stores a definition, and its parameters. Pure."""
    row = plan.plan
    tags, meta = tags_literal(row), None if row.labels is None else row.labels.meta
    params = [
        encode.text(plan.name),
        encode.number(rev),
        plan.definition.to_json(),
        *(encode.text(row.machine), encode.number(row.version), encode.text(row.step), row.state),
        *(encode.text(row.queue), encode.number(row.priority), encode.text(row.partition_key)),
        *(encode.text(tags), meta, encode.number(row.journal), encode.text(row.fingerprint)),
        *(encode.text(origin), encode.text_array(revisions)),
        None if overridden is None else encode.json(overridden),
        *map(_instant, (turn.next_slot, turn.fire_at, turn.last_slot)),
        encode.number(turn.remaining),
        *_skips(turn.skips),
        encode.text(verb),
        *(command or Command()).params(),
        *(encode.number(row.max_attempts), encode.text(row.fair_key), encode.text(row.limits)),
    ]
    return statement("put_schedule", schema), params


async def read_declared(conn: PgConn, schema: str) -> dict[str, set[str]]:
    """Which schedules the live nodes have in their code, each with its revisions there."""
    rows = (await conn.run(statement("read_declared", schema, read_only=True), [schema.encode()])).rows
    found: dict[str, set[str]] = {}
    for name, revision in rows:
        found.setdefault((name or b"").decode(), set()).add((revision or b"").decode())
    return found


async def enable_schedules(conn: PgConn, schema: str, names: Iterable[str], *, enable: bool) -> list[str]:
    """Disable schedules that no live node has in its code, or enable them again; return those that changed."""
    params = [encode.text_array(sorted(names)), b"t" if enable else b"f"]
    rows = (await conn.run(statement("enable_schedules", schema), params)).rows
    return [(row[0] or b"").decode() for row in rows]
