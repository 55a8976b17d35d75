"""How an instance is cancelled, compensates, and has its children cancelled: functions that statements share."""

from __future__ import annotations

import json
from typing import Any

from tests.simulation import literals as lit
from tests.simulation.statements_journal import OUTCOMES, iso, note, present
from tests.simulation.tables import Cascade, Row, Tx


def asked_to_cancel(row: Row) -> bool:
    """durable.asked_to_cancel."""
    request = None if row.request is None else json.loads(row.request)
    return isinstance(request, dict) and request.get("kind") == "cancel"


def asked_for_children(row: Row) -> bool:
    """durable.asked_for_children."""
    request = None if row.request is None else json.loads(row.request)
    return isinstance(request, dict) and request.get("children") == "cancel"


def waiting_parent(tx: Tx, row: Row) -> int | None:
    """Whose barrier must count this child when it ends."""
    parent = None if row.barrier is None else tx.get(row.parent_id)
    if parent is None or parent.status != "awaiting_children" or parent.visit != row.barrier:
        return None
    return parent.id


def end_claim(tx: Tx, row: Row, *why: object) -> tuple[str, bool] | None:
    """A claim ends under a request to cancel. Returns the status, and whether children follow; None: not now."""
    request = json.loads(row.request)
    if (step := request.get("on_cancel")) is not None:
        return compensate(tx, row, request, step, *why).status, request.get("children") == "cancel"
    if (parent := waiting_parent(tx, row)) is not None:
        if tx.is_locked(parent):
            return None
        tx.lock(parent)
    cancel(tx, row, *why)
    return "cancelled", request.get("children") == "cancel" and cascade(tx, row.id, None, request)


def cancel(
    tx: Tx,
    row: Row,
    *why: object,
    asked: bytes | None = None,
    fault: str | None = None,
    cascades: bool = False,
) -> Row:
    """End an instance, as its request says; or because what compensates has crashed too often (`fault`)."""
    old = row.clone()
    new = tx.write(row, *why)
    new.request = asked or row.request
    request: dict[str, Any] = {} if new.request is None else json.loads(new.request)
    new.status, new.hold, new.finished_at = "cancelled", 0, tx.now
    before = None if row.cancellation is None else json.loads(row.cancellation).get("reason")
    new.last_error = fault or request.get("reason") or (before if asked else None)
    new.error_type = new.traceback = None
    new.await_step = new.await_deadline = None
    new.manual = new.manual if "decision" in (new.manual or {}) else None
    new.children_pending, new.wake_on_failure = 0, False
    new.unclaim()
    data: dict[str, Any] = {}
    if asked_to_cancel(new):
        command = present(type="cancel", key=request.get("key"), reason=new.last_error)
        data = {"command": {**command, "metadata": request.get("metadata") or {}}}
    note(
        tx, new, "cancelled", old, level=OUTCOMES, by=request.get("by") if data else None,
        error=None if new.last_error is None else {"text": new.last_error}, data=data,
    )  # fmt: skip
    if cascades:
        cascade(tx, new.id, None, request)
    return new


def compensate(tx: Tx, row: Row, request: dict[str, Any], step: str, *why: object) -> Row:
    """durable.compensate: enter the step that compensates."""
    old = row.clone()
    new = tx.write(row, *why)
    new.status, new.hold, new.step, new.visit, new.eligible_at = "runnable", 0, step, row.visit + 1, tx.now
    new.attempt = new.crashes = new.round = new.children_total = new.children_pending = 0
    new.last_error = new.error_type = new.traceback = new.request = None
    new.awaits = new.await_step = new.await_deadline = new.manual = None
    new.wake_on_failure = False
    new.rate_limit = tx.tables.compensation_limits.get((row.fsm, row.version))
    new.unclaim()
    told = present(by=request.get("by"), reason=request.get("reason"), at=request.get("at") or iso(tx.now))
    new.cancellation = lit.jsonb(json.dumps(told))
    command = present(type="cancel", key=request.get("key"), reason=request.get("reason"))
    changed = {} if new.rate_limit == old.rate_limit else {"rate_limit": new.rate_limit}
    note(
        tx, new, "compensating", old, step, level=OUTCOMES, by=request.get("by"),
        data={
            "columns": {"cancellation": told, **changed},
            "command": {**command, "metadata": request.get("metadata") or {}},
        },
    )  # fmt: skip
    if request.get("children") == "cancel":
        cascade(tx, new.id, None, request)
    return new


def cascade(tx: Tx, parent: int, barrier: int | None, why: dict[str, Any] | None) -> bool:
    """durable.cascade: let the children be cancelled that exist by now."""
    why = why or {}
    what = "was cancelled" if barrier is None else "goes on without it"
    request = present(
        kind="cancel", by=why.get("by"), at=why.get("at") or iso(tx.now), children="cancel", parent=parent,
        reason=why.get("reason") or f"its parent, instance {parent}, {what}",
    )  # fmt: skip
    tx.put_cascade(Cascade(parent, barrier, tx.tables.serial, request))
    return True
