"""The audit: every change of instances and signals, recorded by triggers in a schema of its own.

`install_audit` puts the triggers on (audit.sql tells what is recorded, and why the order can be trusted), `read_audit`
reads what they recorded.

The record is written in the transaction of the change: what was rolled back, or lost by a server that crashed, is not
in it. That is what the effect log is for.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from importlib.resources import files
from typing import Any

import psycopg

from durable_actors._option_checks import check_schema_name
from durable_actors._store.sql import in_schema
from durable_actors.testing.changes import (
    Change,
    Clock,
    InstanceChange,
    InstanceState,
    SignalChange,
    SignalState,
    Snapshot,
)


def install_audit(dsn: str, schema: str = "durable") -> None:
    """Record every change from now on, in the schema `<schema>_audit`. Once per database; needs its owner."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(_text(files("durable_actors.testing").joinpath("audit.sql").read_text(), schema))
    mark_clock(dsn, schema)


def mark_clock(dsn: str, schema: str = "durable") -> None:
    """Compare this machine's monotonic clock with the server's, now. Worth repeating in a run of hours."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        point = read_clock(connection)
        insert = "insert into durable_audit.clock values (%s, to_timestamp(%s), %s)"
        connection.execute(_text(insert, schema), point)


def read_clock(connection: psycopg.Connection[Any]) -> tuple[int, float, float]:
    """One point of a `Clock`: the best of some round trips."""
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
    query = (
        "select seq, txid::text::int8, extract(epoch from began)::float8, extract(epoch from at)::float8,"
        " extract(epoch from seen)::float8, snapshot, writer, backend, instance, to_jsonb(before)::text,"
        " to_jsonb(after)::text, to_jsonb(old_signal)::text, to_jsonb(new_signal)::text"
        " from durable_audit.change order by seq"
    )
    return [_change(row) for row in connection.execute(_text(query, schema))]


def _change(row: Sequence[Any]) -> Change:
    seq, txid, began, at, seen, snapshot, writer, backend, instance, before, after, old, new = row
    ended = None if snapshot is None else Snapshot.parse(snapshot)
    told = (seq, txid, began, at, seen, ended, writer, backend, instance)
    if old is None and new is None:
        return InstanceChange(*told, _instance(before), _instance(after))
    return SignalChange(*told, _signal(old), _signal(new))


def _instance(text: str | None) -> InstanceState | None:
    if text is None:
        return None
    told: dict[str, Any] = json.loads(text)
    for name in ("lease_expires_at", "eligible_at", "await_deadline"):
        told[name] = _seconds(told[name])
    if told["unique_key"] is not None:
        told["unique_key"] = bytes.fromhex(told["unique_key"][2:]).decode("utf-8", "backslashreplace")
    return InstanceState(**told)


def _signal(text: str | None) -> SignalState | None:
    if text is None:
        return None
    told: dict[str, Any] = json.loads(text)
    told["consumed_at"] = _seconds(told["consumed_at"])
    return SignalState(**told)


def _seconds(text: str | None) -> float | None:
    """Seconds since the epoch of an instant as JSON tells it; what Python's calendar does not hold is infinite."""
    if text is None:
        return None
    if text.endswith("infinity"):
        return float(text)
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return math.inf if not text.endswith("BC") else -math.inf


def fetch_rows(connection: psycopg.Connection[Any], schema: str) -> Mapping[int, InstanceState]:
    """All instances as they are, by id."""
    query = "select to_jsonb(durable_audit.told(g))::text from durable.gen_durable g"
    found = (_instance(row[0]) for row in connection.execute(_text(query, schema)))
    return {state.id: state for state in found if state is not None}


def fetch_signals(connection: psycopg.Connection[Any], schema: str) -> Mapping[int, SignalState]:
    """All signals as they are, by id."""
    query = "select to_jsonb(durable_audit.told(s))::text from durable.signals s"
    found = (_signal(row[0]) for row in connection.execute(_text(query, schema)))
    return {state.id: state for state in found if state is not None}


def fetch_clock(connection: psycopg.Connection[Any], schema: str) -> Clock:
    """What is known of the clocks, with a reading of now."""
    query = "select monotonic_ns, extract(epoch from at)::float8, doubt from durable_audit.clock"
    points: Iterable[tuple[int, float, float]] = connection.execute(_text(query, schema)).fetchall()
    return Clock(sorted([*points, read_clock(connection)]))


def _text(statement: str, schema: str) -> bytes:
    """The statement for this schema; its name was checked, and is the only thing put in."""
    audited = statement.replace("durable_audit.", f'"{check_schema_name(schema)}_audit".')
    audited = audited.replace("create schema durable_audit", f'create schema "{schema}_audit"')
    return in_schema(audited, schema).encode()
