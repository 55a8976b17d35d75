"""What the statements of schedules mean; see `statements`. Commands on schedules are not modelled."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import attrs
from durable_actors._postgres.driver.statement import Params
from tests.simulation import literals as lit
from tests.simulation.literals import jsonb
from tests.simulation.statements import Rows, Scene, meaning, shown
from tests.simulation.statements_journal import note_started
from tests.simulation.tables import Row, Tx

BEGIN = datetime(2026, 1, 1, tzinfo=UTC)
"""The time of a server's clock that shows 0, as `literals.instant` has it."""
SCOPE = ("runnable", "executing", "awaiting_signal", "awaiting_children")


@attrs.frozen(kw_only=True)
class ScheduleRow:
    """A row of schedules."""

    name: str
    rev: int = 1
    spec: dict[str, Any]
    fsm: str
    fsm_version: int
    step: str
    state: bytes
    queue: str
    priority: int
    partition_key: str | None
    tags: tuple[str, ...] | None
    meta: bytes | None
    journal: int
    fingerprint: str | None
    max_attempts: int | None
    fair_key: str | None
    rate_limit: str | None
    origin: str
    revisions: tuple[str, ...]
    overridden: dict[str, Any] | None
    next_slot: datetime | None
    fire_at: datetime | None
    last_slot: datetime | None
    remaining: int | None
    buffered: datetime | None = None
    paused: dict[str, Any] | None = None
    disabled_at: datetime | None = None
    created_at: datetime
    changed_at: datetime

    @property
    def fires(self) -> bool:
        """Whether it is neither paused nor disabled."""
        return self.paused is None and self.disabled_at is None

    def shown(self, *without: str) -> str:
        """As `to_jsonb` shows it."""
        found = attrs.asdict(self, filter=lambda field, _: field.name not in without)
        found |= {"fingerprint": self.fingerprint and f"\\x{self.fingerprint}"}
        return json.dumps(found, default=lambda each: each.isoformat())


@attrs.frozen(kw_only=True)
class LogRow:
    """A row of schedule_log."""

    name: str
    slot: datetime
    last_slot: datetime
    slots: int | None
    outcome: str
    reason: str | None = None
    kind: str | None = None
    instance_id: int | None = None
    at: datetime


def time_of(micros: int) -> datetime:
    return BEGIN + timedelta(microseconds=micros)


def _instant(value: bytes | None) -> datetime | None:
    return None if value is None else datetime.fromisoformat(value.decode())


def _instants(value: bytes | None) -> list[datetime]:
    return [datetime.fromisoformat(str(each)) for each in lit.texts(value)]


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode()


def _json(value: bytes | None) -> Any:
    return None if value is None else json.loads(value)


def _number(value: bytes | None) -> int | None:
    return None if value is None else int(value)


def _running(tx: Tx, name: str) -> int | None:
    """The instance that has the unique key of a schedule."""
    key = f"schedule:{name}".encode()
    return next((row.id for row in tx.all() if row.guard == key), None)


def _names(names: list[str]) -> str | None:
    return json.dumps(names) if names else None


@meaning
def due_schedules(scene: Scene, tx: Tx, params: Params) -> Rows:
    declared, most, now = set(lit.texts(params[0])), int(params[1] or 0), time_of(tx.now)
    rows: list[ScheduleRow] = [*tx.read_all("schedules").values()]
    soon = now + timedelta(seconds=1)
    times = [
        min([soon, *([row.fire_at] if row.fire_at else [])]) if row.buffered else row.fire_at
        for row in rows
        if row.fires
    ]
    wait = min((at - now for at in times if at is not None), default=None)
    of_code = [row for row in rows if row.origin == "code"]
    others = [row.name for row in of_code if row.disabled_at is None and row.name not in declared]
    disabled = [row.name for row in of_code if row.disabled_at is not None and row.name in declared]
    head = shown(None, lit.instant(tx.now), wait and wait.total_seconds(), _names(others), _names(disabled))
    due = [
        (row, running)
        for row in rows
        if row.fires
        for running in (_running(tx, row.name),)
        if (row.fire_at and row.fire_at <= now) or (row.buffered and running is None)
    ]
    due.sort(key=lambda each: (each[0].fire_at is None, each[0].fire_at or now, each[0].name))
    return [
        head,
        *(
            shown(row.shown("state", "meta", "tags"), lit.instant(tx.now), running, None, None)
            for row, running in due[:most]
        ),
    ]


@meaning
def list_schedules(scene: Scene, tx: Tx, params: Params) -> Rows:
    names = None if params[0] is None else set(lit.texts(params[0]))
    most = int(params[1] or 0)
    out: Rows = []
    for name, row in tx.read_all("schedules").items():
        if names is None or name in names:
            log = [(n, each) for n, each in tx.read_all("schedule_log").items() if each.name == name]
            last = [attrs.asdict(each) | {"id": n} for n, each in log[::-1][:most]]
            records = json.dumps(last, default=lambda each: each.isoformat())
            out.append(shown(row.shown("state"), lit.instant(tx.now), _running(tx, name), records))
    return out


@meaning
def register_node(scene: Scene, tx: Tx, params: Params) -> Rows:
    """Only what nodes say of schedules is kept."""
    declared = json.loads(params[2] or b"{}").get("schedules")
    if declared:
        tx.put("declared", _text(params[0]), declared)
    return []


@meaning
def read_declared(scene: Scene, tx: Tx, params: Params) -> Rows:
    """Of nodes whose session lock is there."""
    return [
        shown(name, revision)
        for incarnation, declared in tx.read_all("declared").items()
        if f"\2{incarnation}" in scene.locks
        for name, revision in declared.items()
    ]


@meaning
def put_schedule(scene: Scene, tx: Tx, params: Params) -> Rows:
    name, now = str(_text(params[0])), time_of(tx.now)
    tx.lock(("schedules", name))
    old: ScheduleRow | None = tx.read("schedules", name)
    if old is not None and old.rev != _number(params[1]):
        return []
    new = ScheduleRow(
        name=name, spec=_json(params[2]), fsm=str(_text(params[3])), fsm_version=int(params[4] or 0),
        step=str(_text(params[5])), state=jsonb(params[6] or b"{}"), queue=str(_text(params[7])),
        priority=int(params[8] or 0), partition_key=_text(params[9]),
        tags=None if params[10] is None else tuple(map(str, lit.texts(params[10]))),
        meta=None if params[11] is None else jsonb(params[11]), journal=int(params[12] or 0),
        fingerprint=_text(params[13]), origin=str(_text(params[14])),
        revisions=tuple(map(str, lit.texts(params[15]))), overridden=_json(params[16]),
        next_slot=_instant(params[17]), fire_at=_instant(params[18]), last_slot=_instant(params[19]),
        remaining=_number(params[20]), max_attempts=_number(params[30]), fair_key=_text(params[31]),
        rate_limit=_text(params[32]), created_at=now, changed_at=now,
    )  # fmt: skip
    if old is not None:
        new = attrs.evolve(
            new, rev=old.rev + 1, paused=old.paused, buffered=old.buffered, created_at=old.created_at
        )
    tx.put("schedules", name, new)
    _skip(tx, name, params[21:25])
    return [shown(new.rev)]


def _skip(tx: Tx, name: str, params: Params) -> None:
    """The records of slots that do not fire now."""
    given = zip(
        _instants(params[0]), _instants(params[1]), lit.numbers(params[2]), lit.texts(params[3]), strict=True
    )
    for first, last, count, reason in given:
        what = "buffered" if reason == "buffered" else "skipped"
        why = None if reason == "buffered" else reason
        _log(
            tx,
            LogRow(
                name=name,
                slot=first,
                last_slot=last,
                slots=count,
                outcome=what,
                reason=why,
                at=time_of(tx.now),
            ),
        )


def _log(tx: Tx, row: LogRow) -> None:
    tx.tables.log_serial += 1
    tx.put("schedule_log", tx.tables.log_serial, row)


@meaning
def adopt_schedule(scene: Scene, tx: Tx, params: Params) -> Rows:
    name = str(_text(params[0]))
    row: ScheduleRow | None = tx.read("schedules", name)
    if row is None or row.rev != _number(params[1]):
        return []
    tx.lock(("schedules", name))
    overridden = (
        row.overridden or {"at": row.changed_at.isoformat()} if row.origin == "api" else row.overridden
    )
    new = attrs.evolve(
        row,
        overridden=overridden,
        origin="code",
        revisions=tuple(map(str, lit.texts(params[2]))),
        disabled_at=None,
        rev=row.rev + 1,
    )
    tx.put("schedules", name, new)
    return [shown(new.rev)]


@meaning
def enable_schedules(scene: Scene, tx: Tx, params: Params) -> Rows:
    enable, out = params[1] == b"t", list[Any]()
    for name in sorted(map(str, lit.texts(params[0]))):
        row: ScheduleRow | None = tx.read("schedules", name)
        if row is None or row.origin != "code" or (row.disabled_at is not None) != enable:
            continue
        if tx.try_lock("schedules", name):
            at = None if enable else time_of(tx.now)
            tx.put("schedules", name, attrs.evolve(row, disabled_at=at, rev=row.rev + 1))
            out.append(shown(name))
    return out


@meaning
def turn_schedule(scene: Scene, tx: Tx, params: Params) -> Rows:
    name, now = str(_text(params[0])), time_of(tx.now)
    row: ScheduleRow | None = tx.read("schedules", name)
    if row is None or (row.rev != _number(params[1]) and "turned twice" not in scene.broken):
        return []
    tx.lock(("schedules", name))
    instants = dict(
        zip(
            ("next_slot", "fire_at", "last_slot", "buffered"),
            map(_instant, (*params[2:5], params[6])),
            strict=True,
        )
    )
    row = attrs.evolve(
        row, **instants, remaining=_number(params[5]), paused=_json(params[7]), rev=row.rev + 1
    )
    tx.put("schedules", name, row)
    decided = []
    for slot, kind, key in zip(
        _instants(params[8]), lit.texts(params[9]), lit.texts(params[10]), strict=True
    ):
        closed = row.spec.get("queue_paused", "skip") != "insert" and kind in {"slot", "caught_up"}
        closed = closed and not {"", row.fsm}.isdisjoint(tx.stopped(row.queue))
        decided.append((slot, kind, closed, None if closed else _start(tx, row, slot, str(kind), str(key))))
    notes = [
        LogRow(
            name=name, slot=slot, last_slot=slot, slots=1, outcome="skipped" if number is None else "fired",
            reason=None if number is not None else "queue_paused" if closed else "overlap", kind=kind,
            instance_id=number, at=now,
        )
        for slot, kind, closed, number in decided
    ]  # fmt: skip
    _skip(tx, name, params[11:15])
    for each in notes if "unrecorded slot" not in scene.broken else []:
        _log(tx, each)
    old = now - timedelta(seconds=float(params[15] or 0))
    for number, each in tx.read_all("schedule_log").items():
        if each.name == name and each.at < old:
            tx.put("schedule_log", number, None)
    if not decided:
        return [shown(None, None, False, row.queue, row.priority)]
    return [
        shown(_slot(slot), number, closed, row.queue, row.priority) for slot, _, closed, number in decided
    ]


def _slot(slot: datetime) -> str:
    return slot.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _start(tx: Tx, row: ScheduleRow, slot: datetime, kind: str, key: str) -> int | None:
    """Insert the instance of a slot, unless another one has its key."""
    tx.tables.serial += 1
    if any(each.guard == key.encode() for each in tx.all()):
        return None
    about = {"name": row.name, "slot": _slot(slot), "tz": row.spec.get("tz"), "kind": kind}
    meta = json.loads(row.meta or b"{}") | {"durable:schedule": about}
    new = Row(
        id=tx.tables.serial, fsm=row.fsm, version=row.fsm_version, step=row.step, state=row.state, queue=row.queue,
        priority=row.priority, partition_key=row.partition_key, unique_key=key.encode(), scope=SCOPE,
        eligible_at=tx.now, tags=row.tags, meta=jsonb(json.dumps(meta)), journal=row.journal,
        fingerprint=row.fingerprint, max_attempts=row.max_attempts, fair_key=row.fair_key,
        rate_limit=row.rate_limit, inbox=True,
    )  # fmt: skip
    tx.insert(new)
    note_started(tx, new)
    return new.id
