"""The audit: triggers record every change of instances and signals, in a schema of its own.

`install_audit` creates the triggers (audit.sql explains what they record, and why the order can be trusted);
`read_audit` reads the records.

A record is written in the transaction of its change, so it does not show a change that was rolled back, or that a
server crash lost. The effect log does.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import attrs
import psycopg
from durable_actors._option_checks import check_schema_name
from durable_actors._store.sql import in_schema
from tests.invariants.changes import (
    Change,
    Clock,
    InstanceChange,
    InstanceState,
    ReceiptRow,
    SignalChange,
    SignalState,
    Snapshot,
)
from tests.invariants.history import Needs
from tests.invariants.limits import Slots
from tests.invariants.schedules import ScheduleEvidence, SlotInstance, SlotRecord


def install_audit(dsn: str, schema: str = "durable") -> None:
    """Record every change from now on, in the schema `<schema>_audit`. Call it once per database, as its owner."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(_text(Path(__file__).with_name("audit.sql").read_text(), schema))
    mark_clock(dsn, schema)


def mark_clock(dsn: str, schema: str = "durable") -> None:
    """Compare this machine's monotonic clock with the server's, now. Repeat it in a run that takes hours."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        point = read_clock(connection)
        insert = "insert into durable_audit.clock values (%s, to_timestamp(%s), %s)"
        connection.execute(_text(insert, schema), point)


def read_clock(connection: psycopg.Connection[Any]) -> tuple[int, float, float]:
    """One point of a `Clock`: the shortest of five round trips."""
    points: list[tuple[int, float, float]] = []
    for _ in range(5):
        sent = time.monotonic_ns()
        row = connection.execute("select extract(epoch from clock_timestamp())::float8").fetchone()
        assert row is not None
        trip = time.monotonic_ns() - sent
        points.append((sent + trip // 2, row[0], trip / 2e9))
    return min(points, key=lambda point: point[2])


def read_audit(dsn: str, schema: str = "durable") -> list[Change]:
    """All changes so far, in order."""
    with psycopg.connect(dsn) as connection:
        return fetch_changes(connection, schema)


def fetch_changes(connection: psycopg.Connection[Any], schema: str) -> list[Change]:
    """All changes that this transaction sees, in order."""
    columns = ", ".join(
        [
            "seq, txid::text::int8, extract(epoch from began)::float8, extract(epoch from at)::float8",
            "extract(epoch from seen)::float8, snapshot, writer, backend, instance",
            *(_columns(InstanceState, name) for name in ("before", "after")),
            *(_columns(SignalState, name) for name in ("old_signal", "new_signal")),
        ]
    )
    query = f"select {columns} from durable_audit.change order by seq"
    reader = _Reader()
    return [reader.read(row) for row in connection.execute(_text(query, schema))]


class _Reader:
    """Turns rows into changes. A change mostly starts from what the previous one left: that value is reused."""

    def __init__(self) -> None:
        self._last: dict[int, tuple[Sequence[Any], InstanceState]] = {}

    def read(self, row: Sequence[Any]) -> Change:
        seq, txid, began, at, seen, snapshot, writer, backend, instance, *values = row
        ended = None if snapshot is None else Snapshot.parse(snapshot)
        facts = (seq, txid, began, at, seen, ended, writer, backend, instance)
        before, after = values[: len(_INSTANCE)], values[len(_INSTANCE) : 2 * len(_INSTANCE)]
        if before[0] is not None or after[0] is not None:
            return InstanceChange(*facts, self._instance(before), self._instance(after))
        old, new = values[2 * len(_INSTANCE) : -len(_SIGNAL)], values[-len(_SIGNAL) :]
        return SignalChange(*facts, _signal(old), _signal(new))

    def _instance(self, values: Sequence[Any]) -> InstanceState | None:
        last, state = self._last.get(values[0], (None, None))
        if last != values:
            state = _instance(values)
            if state is not None:
                self._last[state.id] = (values, state)
        return state


_INSTANCE: Final = tuple(field.name for field in attrs.fields(InstanceState))
_SIGNAL: Final = tuple(field.name for field in attrs.fields(SignalState))
_TEXT: Final[Mapping[str, str]] = {
    "lease_expires_at": "extract(epoch from {})::float8",
    "eligible_at": "extract(epoch from {})::float8",
    "await_deadline": "extract(epoch from {})::float8",
    "consumed_at": "extract(epoch from {})::float8",
    "claim_id": "{}::text",
    "unique_key": "encode({}, 'escape')",
    "unique_scope": "{}::text[]",
}
"""Columns that need a conversion."""


def _columns(kind: type[InstanceState | SignalState], value: str) -> str:
    """The fields of a composite value, as columns. Reading them as JSON takes four times as long."""
    names = _INSTANCE if kind is InstanceState else _SIGNAL
    return ", ".join(_TEXT.get(name, "{}").format(f"({value}).{name}") for name in names)


def _instance(values: Sequence[Any]) -> InstanceState | None:
    return None if values[0] is None else InstanceState(**dict(zip(_INSTANCE, values, strict=True)))


def _signal(values: Sequence[Any]) -> SignalState | None:
    return None if values[0] is None else SignalState(**dict(zip(_SIGNAL, values, strict=True)))


def fetch_rows(connection: psycopg.Connection[Any], schema: str) -> Mapping[int, InstanceState]:
    """All current instances, by id."""
    recorded = "select durable_audit.recorded(g) as recorded from durable.gen_durable g offset 0"
    query = f"select {_columns(InstanceState, 'recorded')} from ({recorded}) t"
    found = (_instance(row) for row in connection.execute(_text(query, schema)))
    return {state.id: state for state in found if state is not None}


def fetch_signals(connection: psycopg.Connection[Any], schema: str) -> Mapping[int, SignalState]:
    """All current signals, by id."""
    recorded = "select durable_audit.recorded(s) as recorded from durable.signals s offset 0"
    query = f"select {_columns(SignalState, 'recorded')} from ({recorded}) t"
    found = (_signal(row) for row in connection.execute(_text(query, schema)))
    return {state.id: state for state in found if state is not None}


def fetch_receipts(connection: psycopg.Connection[Any], schema: str) -> Sequence[ReceiptRow]:
    """The commands that were carried out, in order."""
    columns = "id, xmin::text::bigint, command, scope, target, by, idempotency_key, result, data"
    columns += ", extract(epoch from at)::float8"
    query = f"select {columns} from durable.receipts order by id"
    names = ("id", "xid", "command", "scope", "target", "by", "key", "result", "data", "began")
    return [
        ReceiptRow(**dict(zip(names, row, strict=True))) for row in connection.execute(_text(query, schema))
    ]


def fetch_needs(connection: psycopg.Connection[Any], schema: str) -> Mapping[int, Needs]:
    """What the current instances come after, by id."""
    query = "select id, needs, any_end from durable.graph where needs is not null"
    return {
        number: Needs(tuple(ids), any_end)
        for number, ids, any_end in connection.execute(_text(query, schema))
    }


def fetch_slots(connection: psycopg.Connection[Any], schema: str) -> Mapping[str, Slots]:
    """The limits that have slots, as the code declares them: operators of these runs never raise them."""
    query = (
        "select name, (declared ->> 'slots')::int, declared ->> 'held' from durable.limits"
        " where declared ->> 'slots' is not null"
    )
    return {
        name: Slots(count, held == "instance")
        for name, count, held in connection.execute(_text(query, schema))
    }


SCHEDULES: Final = """
select s.name, (s.spec ->> 'every')::float8, extract(epoch from s.created_at)::float8,
       extract(epoch from s.changed_at)::float8, extract(epoch from s.last_slot)::float8
  from durable.schedules s where s.spec ->> 'every' is not null and s.spec ->> 'starts' is null
"""
SLOT_RECORDS: Final = """
select l.name, extract(epoch from l.slot)::float8, extract(epoch from l.last_slot)::float8, l.outcome, l.kind,
       l.instance_id
  from durable.schedule_log l order by l.id
"""
SLOT_INSTANCES: Final = """
select g.meta #>> '{durable:schedule,name}', g.id,
       extract(epoch from (g.meta #>> '{durable:schedule,slot}')::timestamptz)::float8,
       g.meta #>> '{durable:schedule,kind}'
  from durable.gen_durable g where g.meta ? 'durable:schedule' and g.rerun_of is null
"""


def fetch_schedules(connection: psycopg.Connection[Any], schema: str) -> Sequence[ScheduleEvidence]:
    """The schedules with a period whose slots can be counted, with their records and instances."""
    records: dict[str, list[SlotRecord]] = {}
    for name, slot, last, outcome, kind, number in connection.execute(_text(SLOT_RECORDS, schema)):
        made = SlotRecord(slot=slot, last_slot=last, outcome=outcome, kind=kind, instance_id=number)
        records.setdefault(name, []).append(made)
    instances: dict[str, list[SlotInstance]] = {}
    for name, number, slot, kind in connection.execute(_text(SLOT_INSTANCES, schema)):
        instances.setdefault(name, []).append(SlotInstance(id=number, slot=slot, kind=kind))
    return [
        ScheduleEvidence(
            name=name,
            every=every,
            created=created,
            changed=changed,
            last_slot=last,
            records=records.get(name, ()),
            instances=instances.get(name, ()),
        )
        for name, every, created, changed, last in connection.execute(_text(SCHEDULES, schema))
    ]


def fetch_clock(connection: psycopg.Connection[Any], schema: str) -> Clock:
    """The recorded comparisons of the clocks, and one made now."""
    query = "select monotonic_ns, extract(epoch from at)::float8, doubt from durable_audit.clock"
    points: Iterable[tuple[int, float, float]] = connection.execute(_text(query, schema)).fetchall()
    return Clock(sorted([*points, read_clock(connection)]))


def _text(statement: str, schema: str) -> bytes:
    """The statement for this schema. Only its name is inserted, after a check."""
    audited = statement.replace("durable_audit.", f'"{check_schema_name(schema)}_audit".')
    audited = audited.replace("create schema durable_audit", f'create schema "{schema}_audit"')
    return in_schema(audited, schema).encode()
