"""What the model and Postgres must agree about, in a form that can be compared: rows, records, answers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import attrs
from durable_actors._store.read import Instance
from tests.simulation.tables import Row

COLUMNS = (
    "id, status, hold, step, attempt, crashes, visit, round, rev, priority, "
    "partition_key, inbox, awaits, await_step, locked_by, claim_id is not null, lease_expires_at is not null, "
    "await_deadline is not null, children_total, children_pending, wake_on_failure, parent_id, barrier, "
    "last_error, state::text, result::text, interruptions, tags, meta::text, error_type, traceback, "
    "status <> 'runnable' or eligible_at <= now(), claim_id::text, request - 'at', "
    "journal, shelved_step, finished_at is not null, claim_token_hash::text, cancellation - 'at', cancel_rest"
)


def plain(value: Any) -> Any:
    """Something to compare: not every class of the store has an equality."""
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    return attrs.asdict(value) if attrs.has(type(value)) else value


def plain_instance(each: Instance) -> tuple[Any, ...]:
    """What both must say of an instance; their clocks differ."""
    ended = each.finished_at is not None
    return (
        each.id,
        each.machine,
        each.step,
        each.status,
        each.attempt,
        each.visit,
        each.state,
        each.result,
        ended,
    )


def unordered(values: Any) -> list[Any]:
    """RETURNING has no order."""
    return sorted(values, key=str)


TIMES = {"eligible_at", "lease_until", "renewed_until", "deadline", "inserted_at", "visible_at", "at"}
"""Keys of data that are instants: the clocks of the two differ."""
DUE = (
    "started",
    "next",
    "retry",
    "woken",
    "expired",
    "joined",
    "revived",
    "released",
    "crashed",
    "reaped",
    "spawned",
    "compensating",
)
"""Records that say when the row is due."""


def recorded(record: Mapping[str, Any], ids: Mapping[str, str] | None = None) -> tuple[Any, ...]:
    """A record without its instants. `ids`: the claims of Postgres by ours, for a record of the model."""
    claim = record.get("claim_id")
    data = plain_data(record.get("data") or {})
    plain = ("instance_id", "rev", "kind", "step", "to_step", "visit", "attempt", "node", "by", "error")
    return (
        *(record.get(name) for name in plain),
        claim if ids is None or claim is None else ids[claim],
        data,
    )


def plain_data(data: Any) -> Any:
    if isinstance(data, list):
        return [plain_data(each) for each in data]
    if not isinstance(data, dict):
        return data
    if "signals" in data:  # their ids differ: a sequence has gaps
        data = {**data, "signals": [{**each, "id": isinstance(each["id"], int)} for each in data["signals"]]}
    return {key: key if key in TIMES else plain_data(value) for key, value in data.items()}


def _without_its_time(request: bytes) -> dict[str, Any]:
    return {name: value for name, value in json.loads(request).items() if name != "at"}


def stored(row: Row, claim_ids: dict[str, str], now: int) -> tuple[Any, ...]:
    """As COLUMNS shows it; `claim_ids`: those of Postgres by ours."""
    return (
        row.id, row.status, row.hold, row.step, row.attempt, row.crashes, row.visit, row.round, row.rev,
        row.priority, row.partition_key, row.inbox,
        None if row.awaits is None else list(row.awaits), row.await_step, row.locked_by,
        row.claim_id is not None, row.lease is not None, row.await_deadline is not None, row.children_total,
        row.children_pending, row.wake_on_failure, row.parent_id, row.barrier, row.last_error,
        row.state.decode(), None if row.result is None else row.result.decode(), row.interruptions,
        None if row.tags is None else list(row.tags), None if row.meta is None else row.meta.decode(),
        row.error_type, row.traceback, row.status != "runnable" or row.eligible_at <= now,
        None if row.claim_id is None else claim_ids[row.claim_id],
        None if row.request is None else _without_its_time(row.request),
        row.journal, row.shelved_step, row.finished_at is not None, row.token,
        None if row.cancellation is None else _without_its_time(row.cancellation), row.cancel_rest,
    )  # fmt: skip
