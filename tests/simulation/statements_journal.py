"""The journal as the statements write it: one record per move of a row whose level asks for it. See `statements`."""

from __future__ import annotations

import json
from typing import Any

from durable_actors._postgres.driver.statement import Params
from tests.simulation import literals as lit
from tests.simulation.tables import Row, Tx

FAILURES, OUTCOMES, CLAIMS, FULL = 1, 2, 3, 4


def iso(micros: int) -> str:
    """An instant as `to_jsonb` writes it."""
    return lit.instant(micros).replace(" ", "T").replace("+00", "+00:00")


def present(**data: Any) -> dict[str, Any]:
    """As jsonb_strip_nulls."""
    return {name: value for name, value in data.items() if value is not None}


def note(
    tx: Tx, new: Row, kind: str, old: Row, to_step: str | None = None, *, level: int = CLAIMS, **rest: Any
) -> None:
    """durable.note: record a move of a row whose level is at least this. `old` is the row before the move."""
    if new.journal >= level:
        data = rest.pop("data", {})
        if old.round and kind not in {"started", "snapshot"}:
            data = {**data, "round": old.round}
        _insert(
            tx, new, kind=kind, step=old.step, to_step=to_step, visit=old.visit, attempt=old.attempt, data=data, **rest
        )  # fmt: skip


def _insert(tx: Tx, row: Row, **columns: Any) -> None:
    """A record that is there already stays as it is."""
    tx.record({"instance_id": row.id, "rev": row.rev, "at": iso(tx.now), **present(**columns)})


def fenced(old: Row) -> dict[str, Any]:
    """Whose claim ended."""
    return {"claim_id": old.claim_id, "node": old.locked_by}


def folded(row: Row) -> dict[str, Any]:
    return {"folded": {}} if row.journal < CLAIMS else {}


def note_started(tx: Tx, row: Row, *, by: str | None = None, command: object = None) -> None:
    """Only `insert_instances` and `start_child` do so: `insert_plain` is given no row that needs it."""
    scope = list(row.scope)
    columns = present(
        fsm=row.fsm, fsm_version=row.version, step=row.step, queue=row.queue, priority=row.priority,
        journal=row.journal, eligible_at=iso(row.eligible_at), partition_key=row.partition_key,
        unique_key=row.unique_key and f"\\x{row.unique_key.hex()}", unique_scope=scope, parent_id=row.parent_id,
        barrier=row.barrier, tags=row.tags and list(row.tags), inserted_at=iso(tx.now),
        meta=row.meta and json.loads(row.meta), fingerprint=row.fingerprint and f"\\x{row.fingerprint}",
        rerun_of=row.rerun_of, child_key=row.child_key, links=row.links, hold=row.hold or None,
        max_attempts=row.max_attempts,
        fair_key=row.fair_key, rate_limit=row.rate_limit,
    )  # fmt: skip
    if row.journal >= FULL:
        columns["state"] = json.loads(row.state)
    data: dict[str, Any] = {"row": columns}
    parent = None if row.parent_id is None else tx.get(row.parent_id)
    if parent is not None:
        data["parent"] = {"id": parent.id, "machine": parent.fsm, "step": parent.step}
    if command is not None:
        data["command"] = command
    note(tx, row, "started", row, row.step, level=OUTCOMES, by=by, data=data)


def note_claimed(tx: Tx, new: Row) -> None:
    data = {"lease_until": iso(new.lease), "token_hash": new.token}
    note(tx, new, "claimed", new, **fenced(new), data=data)


def note_spawned(tx: Tx, old: Row, new: Row, params: Params) -> None:
    """`park_parent`: what it was before, the caller says."""
    step, attempt, node, before, lease, error, definition = (each and each.decode() for each in params[7:14])
    until = None if lease is None else lit.micros(lease)
    data = present(
        children_total=new.children_total, children_pending=new.children_pending, wake_on_failure=new.wake_on_failure,
        deadline=new.await_deadline and iso(new.await_deadline), renewed_until=until and iso(until),
        late=True if until is not None and until <= tx.now else None, round=int(before or 0) or None,
        definition=definition, **folded(new),
    )  # fmt: skip
    if new.journal >= FULL:
        data["state"] = json.loads(new.state)
    if new.cancel_rest is not None:
        data["columns"] = {"cancel_rest": new.cancel_rest}
    if new.journal >= OUTCOMES:
        _insert(
            tx, new, kind="spawned", step=step, to_step=(params[1] or b"").decode(), visit=old.visit,
            attempt=int(attempt or 0), claim_id=new.claim_id, node=node, error=error and json.loads(error),
            data=data,
        )  # fmt: skip


def journal_outcomes(scene: Any, tx: Tx, params: Params) -> list[Any]:
    """What this transaction has committed. Registered in `statements`."""
    numbers = lit.ints(params[0])
    node = None if params[7] is None else params[7].decode()
    read: list[list[Any]] = [
        [*lit.texts(params[2])], [*lit.texts(params[3])], [*lit.ints(params[4])], [*lit.ints(params[5])],
        [*lit.floats(params[6])], [*lit.ints(params[8])], [*lit.texts(params[9])], [*lit.bools(params[10])],
        [*lit.texts(params[11])], [*lit.texts(params[12])],
    ]  # fmt: skip
    full = [(each or [None]) * (len(numbers) if len(each) < 2 else 1) for each in read]
    for (
        number,
        claim,
        kind,
        step,
        visit,
        attempt,
        seconds,
        before,
        lease,
        rekeyed,
        handled,
        definition,
    ) in zip(numbers, lit.texts(params[1]), *full, strict=True):
        row = tx.get(number)
        if row is None or row.claim_id != claim or not tx.wrote(number):
            continue
        error = handled and json.loads(handled)
        if row.last_error is not None:
            error = present(type=row.error_type, text=row.last_error, traceback=row.traceback)
        _insert(
            tx, row, kind=kind, step=step, visit=visit, attempt=attempt, seconds=seconds, claim_id=claim, node=node,
            to_step={"next": row.step, "parked": row.await_step, "asked": (row.manual or {}).get("then")}.get(kind),
            error=error,
            data=_outcome_data(scene, tx, row, kind, before, lease, rekeyed=rekeyed, definition=definition)
            | ({"to_attempt": row.attempt} if kind == "failed" and row.attempt != attempt else {}),
        )  # fmt: skip
    return []


def _outcome_data(
    scene: Any,
    tx: Tx,
    row: Row,
    kind: str,
    before: int,
    lease: str | None,
    *,
    rekeyed: bool | None,
    definition: str | None,
) -> dict[str, Any]:
    until = None if lease is None else lit.micros(lease)
    later = kind == "retry" or (kind == "next" and row.eligible_at > tx.now)
    kept = row.locked_by is not None
    data = present(
        round=before or None,
        definition=definition,
        renewed_until=until and iso(until),
        late=True if until is not None and until <= tx.now and "unsaid" not in scene.broken else None,
        keeps_claim=True if kept else None,
        lease_until=row.lease and iso(row.lease),
        eligible_at=iso(row.eligible_at) if later else None,
        awaits=list(row.awaits) if kind == "parked" else None,
        deadline=row.await_deadline and iso(row.await_deadline),
        **folded(row),
    )
    short = row.journal == OUTCOMES and not before and not rekeyed and definition is None
    if short and (kind == "done" or (kind == "next" and (kept or row.eligible_at <= tx.now))):
        return {"folded": {}, "keeps_claim": True} if kept else {"folded": {}}  # a constant, for its cost
    if kind == "asked":
        data["boundary"] = row.manual
    if rekeyed:
        data["columns"] = {"partition_key": row.partition_key}
    if row.journal >= FULL and not row.terminal:
        data["state"] = json.loads(row.state)
    elif row.journal >= FULL and kind == "done":
        data["result"] = json.loads(row.result)
    return data


def stored(row: Row) -> dict[str, Any]:
    """The row as `to_jsonb` shows it, for whoever folds its records."""
    found = row.columns()
    found["fsm_version"] = found.pop("version")
    found["unique_scope"] = list(found.pop("scope"))
    found["fingerprint"] = row.fingerprint and f"\\x{row.fingerprint}"
    found["unique_key"] = row.unique_key and f"\\x{row.unique_key.hex()}"
    for name in ("awaits", "tags"):
        found[name] = None if found[name] is None else list(found[name])
    for name in ("state", "result", "meta", "request", "cancellation"):
        found[name] = None if found[name] is None else json.loads(found[name])
    for name in ("eligible_at", "inserted_at", "finished_at", "await_deadline", "lease_expires_at"):
        found[name] = None if found[name] is None else iso(found[name])
    return found
