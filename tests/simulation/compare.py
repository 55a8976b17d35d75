"""What the model and Postgres must agree about, in a form that can be compared: rows, records, answers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import psycopg
from durable_actors._store.read import Instance
from tests.simulation.tables import Row, Tables

COLUMNS = (
    "id, status, hold, step, attempt, crashes, visit, round, rev, priority, "
    "partition_key, inbox, awaits, await_step, locked_by, claim_id is not null, lease_expires_at is not null, "
    "await_deadline is not null, children_total, children_pending, wake_on_failure, parent_id, barrier, "
    "last_error, state::text, result::text, interruptions, tags, meta::text, error_type, traceback, "
    "status <> 'runnable' or eligible_at <= now(), claim_id::text, request - 'at', "
    "journal, shelved_step, finished_at is not null, claim_token_hash::text, manual #- '{decision,at}', "
    "cancellation - 'at', cancel_rest, child_key, links, max_attempts, fair_key, rate_limit, limited_by"
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


TIMES = {
    "at", "eligible_at", "lease_until", "renewed_until", "deadline", "inserted_at", "visible_at", "lease_expires_at",
    "await_deadline", "finished_at",
}  # fmt: skip
"""Keys of data that are instants: the clocks of the two differ."""
UNKNOWN = {"weight", "updated_at"}
"""Columns of a snapshot that the model does not have."""
DUE = (
    "started",
    "next",
    "retry",
    "woken",
    "expired",
    "joined",
    "revived",
    "hastened",
    "released",
    "crashed",
    "reaped",
    "spawned",
    "proceeded",
    "approved",
    "rejected",
    "timed_out",
    "compensating",
    "unblocked",
    "doomed",
)
"""Records that say when the row is due."""


def recorded(record: Mapping[str, Any], ids: Mapping[str, str] | None = None) -> tuple[Any, ...]:
    """A record without its instants. `ids`: the claims of Postgres by ours, for a record of the model."""
    claim = record.get("claim_id")
    data = plain_data(record.get("data") or {})
    if record["kind"] == "snapshot":
        row = {key: value for key, value in data["row"].items() if value is not None and key not in UNKNOWN}
        if ids is not None and "claim_id" in row:
            row["claim_id"] = ids[row["claim_id"]]
        data = {**data, "row": row}
    plain = ("instance_id", "rev", "kind", "step", "to_step", "visit", "attempt", "node", "by", "error")
    return (
        *(record.get(name) for name in plain),
        claim if ids is None or claim is None else ids[claim],
        data,
    )


def last_kind(tables: Tables, row: Row, kinds: Sequence[str]) -> str | None:
    """The kind of its last record of these kinds."""
    found = [
        rev
        for number, rev in tables.journal
        if number == row.id and tables.journal[number, rev]["kind"] in kinds
    ]
    return tables.journal[row.id, max(found)]["kind"] if found else None


def retell(
    db: psycopg.Connection[Any], tables: Tables, row: Row, key: str, kinds: Sequence[str], column: str
) -> None:
    """Time was moved by hand: the record that tells this instant, and snapshots since, tell the new one, in both."""
    if row.journal < (2 if key == "deadline" else 3):
        return
    told = {rev: record for (number, rev), record in tables.journal.items() if number == row.id}
    first = max((rev for rev, record in told.items() if record["kind"] in kinds), default=0)
    db.execute("set durable_actors.journal_door = 'open'")
    for rev in [
        rev for rev, record in told.items() if rev == first or (rev > first and record["kind"] == "snapshot")
    ]:
        data, kind = told[rev]["data"], told[rev]["kind"]
        name = column if kind == "snapshot" else key
        (data["row"] if kind in {"started", "snapshot"} else data)[name] = "moved"
        path = ["row", name] if kind in {"started", "snapshot"} else [name]
        db.execute(
            f"update durable.journal j set data = jsonb_set(coalesce(j.data, '{{}}'), %s, to_jsonb(g.{column}))"
            " from durable.gen_durable g where g.id = j.instance_id and j.instance_id = %s and j.rev = %s",
            [path, row.id, rev],
        )
    db.execute("reset durable_actors.journal_door")


def plain_data(data: Any) -> Any:
    if isinstance(data, list):
        return [plain_data(each) for each in data]
    if not isinstance(data, dict):
        return data
    if "signals" in data:  # their ids differ: a sequence has gaps
        data = {**data, "signals": [{**each, "id": isinstance(each["id"], int)} for each in data["signals"]]}
    return {key: key if key in TIMES else plain_data(value) for key, value in data.items()}


def _undated(manual: dict[str, Any] | None) -> dict[str, Any] | None:
    decision = (manual or {}).get("decision")
    if manual is None or decision is None:
        return manual
    return {**manual, "decision": {name: value for name, value in decision.items() if name != "at"}}


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
        row.journal, row.shelved_step, row.finished_at is not None, row.token, _undated(row.manual),
        None if row.cancellation is None else _without_its_time(row.cancellation), row.cancel_rest,
        row.child_key, row.links, row.max_attempts, row.fair_key, row.rate_limit, row.limited_by,
    )  # fmt: skip
