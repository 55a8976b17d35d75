"""What the statements about deadlines and decisions mean. See `statements`."""

from __future__ import annotations

import json
from typing import Any

from durable_actors._postgres.driver.statement import Params
from tests.simulation.ending import cascade
from tests.simulation.statements import Rows, Scene, meaning, shown
from tests.simulation.statements_inbox import count_ended
from tests.simulation.statements_journal import FAILURES, OUTCOMES, iso, note, present
from tests.simulation.tables import Row, Tx


def asks(row: Row) -> bool:
    """Whether it waits for a person."""
    return row.status == "awaiting_signal" and row.manual is not None and "decision" not in row.manual


def _resolve(tx: Tx, row: Row, why: str, to_step: str | None, decision: dict[str, Any], error: str) -> Row:
    """Enter the step, or fail without one."""
    new = tx.write(row, why)
    if to_step is None:
        new.status, new.finished_at, new.manual = "failed", tx.now, None
        new.last_error, new.error_type, new.traceback = error, None, None
    else:
        new.status, new.step, new.eligible_at = "runnable", to_step, tx.now
        new.hold, new.manual = new.held, {**row.manual, "decision": decision}
    new.await_step = new.await_deadline = None
    return new


@meaning
def resolve_boundary(scene: Scene, tx: Tx, params: Params) -> Rows:
    by, reason, key, given, verb, comment, data = (each and each.decode() for each in params[1:8])
    row = tx.get(int(params[0] or 0))
    if row is None or not asks(row) or row.manual["kind"] != ("pause" if verb == "proceed" else "approval"):
        return []
    tx.lock(row.id)
    tx.receipt(verb or "", row.id, key, str(row.id).encode())
    kind = {"proceed": "proceeded", "approve": "approved"}.get(verb or "", "rejected")
    decision = present(kind=kind, by=by, comment=comment, at=iso(tx.now))
    decision |= {} if data is None else {"data": json.loads(data)}
    to_step = row.manual.get("on_reject" if verb == "reject" else "then")
    said = comment or reason
    error = f"rejected{f' by {by}' if by else ''}{f': {said}' if said else ''}"
    old = row.clone()
    new = _resolve(tx, row, "decide", to_step, decision, error)
    command = {**present(type=verb, key=key, reason=reason), "metadata": json.loads(given or "null")}
    failed = to_step is None
    note(
        tx, new, kind, old, to_step, level=FAILURES if failed else OUTCOMES, by=by,
        error={"text": error} if failed else None,
        data={"decision": decision, "command": command, **({"failed": True} if failed else {})},
    )  # fmt: skip
    opened = count_ended(scene, tx, row.parent_id, row.barrier, 1, failed=True) if failed else None
    return [shown(row.id, opened and opened.id, opened and opened.queue)]


@meaning
def expire_awaits(scene: Scene, tx: Tx, params: Params) -> Rows:
    out: Rows = []
    due = [
        row
        for row in tx.all()
        if row.status in {"awaiting_signal", "awaiting_children"}
        and row.queue == (params[0] or b"").decode()
        and row.await_deadline is not None
        and row.await_deadline <= tx.now
        and not tx.is_locked(row.id)
    ]
    expiring = {row.id for row in due}
    for row in sorted(due, key=lambda row: row.await_deadline):
        old = row.clone()
        if not asks(row):
            new = tx.write(row, "expire")
            new.wake(tx.now)
            waited_for = "signal" if old.status == "awaiting_signal" else "children"
            note(tx, new, "expired", old, new.step, data={"waited_for": waited_for})
            rest = bool(new.cancel_rest) and waited_for == "children" and cascade(tx, new.id, new.visit, None)
            out.append(shown(row.id, new.status, None, None, rest or None))
            continue
        to_step = row.await_step
        parent = None if row.parent_id is None or row.barrier is None else tx.get(row.parent_id)
        waits = parent is not None and parent.visit == row.barrier and parent.status == "awaiting_children"
        if to_step is None and waits and (row.parent_id in expiring or tx.is_locked(row.parent_id)):
            continue
        title = row.manual.get("title")
        error = "nobody decided in time" + (f": {title}" if title else "")
        new = _resolve(tx, row, "expire", to_step, {"kind": "timed_out", "at": iso(tx.now)}, error)
        failed = to_step is None
        note(
            tx, new, "timed_out", old, to_step, level=FAILURES if failed else OUTCOMES,
            error={"text": error} if failed else None,
            data={"failed": True} if failed else {"decision": new.manual["decision"]},
        )  # fmt: skip
        opened = count_ended(scene, tx, row.parent_id, row.barrier, 1, failed=True) if failed else None
        out.append(
            shown(row.id, new.status, row.parent_id if failed else None, opened and opened.queue, None)
        )
    return out
