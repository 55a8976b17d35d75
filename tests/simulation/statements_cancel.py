"""What the statements mean that cancel instances and their children. See `statements`."""

from __future__ import annotations

import json

from durable_actors._postgres.driver.statement import Params
from tests.simulation import literals as lit
from tests.simulation.ending import asked_for_children, asked_to_cancel, cancel, compensate, waiting_parent
from tests.simulation.statements import SECOND, Rows, Scene, meaning, shown
from tests.simulation.statements_inbox import count_ended
from tests.simulation.statements_journal import iso, present
from tests.simulation.tables import Cascade, Row, Tx


@meaning
def write_compensations(scene: Scene, tx: Tx, params: Params) -> Rows:
    told = zip(
        lit.texts(params[0]), lit.ints(params[1]), lit.texts(params[2]), lit.texts(params[3]), strict=True
    )
    for fsm, version, step, limits in told:
        tx.tables.compensation_limits[fsm or "", version] = limits
        if step is None:
            tx.tables.compensations.pop((fsm or "", version), None)
        else:
            tx.tables.compensations[fsm or "", version] = step
    return []


@meaning
def cancel_instance(scene: Scene, tx: Tx, params: Params) -> Rows:
    row = tx.get(int(params[0] or 0))
    if row is None or row.terminal or (compensates(row) and params[5] != b"t"):
        return []
    tx.lock(row.id)
    by, reason, key, given = (None if each is None else each.decode() for each in params[1:5])
    undo = None if row.cancellation is not None else tx.tables.compensations.get((row.fsm, row.version))
    also = params[6] == b"t" or (asked_to_cancel(row) and asked_for_children(row))
    request = present(
        kind="cancel", by=by, reason=reason, at=iso(tx.now), key=key, on_cancel=undo,
        children="cancel" if also else None,
    )  # fmt: skip
    request["metadata"] = json.loads(given or "null")
    asked = lit.jsonb(json.dumps(request))
    asks = row.status == "executing" and params[5] != b"t"
    if "receipt" not in scene.broken:
        tx.receipt("cancel", row.id, key, b'"requested"' if asks or undo is not None else b'"cancelled"')
    if asks:
        tx.write(row, "ask", key, moves=False).request = asked
        if "counts requests" in scene.broken:
            count_ended(scene, tx, row.parent_id, row.barrier, 1, failed=True)
        return [shown('"requested"', None, None, None, None)]
    if undo is not None:
        new = compensate(tx, row, request, undo, "cancel", key)
        return [shown('"requested"', new.partition_key, None, None, new.queue)]
    new, opened = cancel(tx, row, "cancel", key, asked=asked, cascades=also), None
    if "uncounted cancel" not in scene.broken:
        opened = count_ended(scene, tx, row.parent_id, row.barrier, 1, failed=True)
    return [shown('"cancelled"', new.partition_key, opened and opened.id, opened and opened.queue, None)]


def compensates(row: Row) -> bool:
    """What it comes after has not doomed it."""
    return row.cancellation is not None and "upstream" not in json.loads(row.cancellation)


@meaning
def cancel_children(scene: Scene, tx: Tx, params: Params) -> Rows:
    cascades, most = (int(each or 0) for each in params)
    ready = [each for each in tx.cascades() if each.next_at <= tx.clock and not tx.is_locked(-each.id)]
    work = sorted(ready, key=lambda each: (each.next_at, each.id))[:cascades]
    pages = {each.id: _page(tx, each, most) for each in work}
    out: Rows = []
    for each in work:
        missing = [] if each.missed is None else [each.missed]
        for row in pages[each.id]:
            if not row.terminal and not _cancel_child(scene, tx, each, row, out):
                missing.append(row.id)
        page = pages[each.id]
        new = tx.change_cascade(each)
        if len(page) >= most:
            new.next_at, new.after, new.missed = tx.clock, page[-1].id, min(missing, default=None)
        elif missing:
            new.next_at, new.after, new.missed = tx.clock + SECOND // 2, min(missing) - 1, None
            out.append(shown("rests", each.id, None, None))
        else:
            tx.drop_cascade(each)
    return [*out, shown("looked", len(work), None, None)]


def _page(tx: Tx, each: Cascade, most: int) -> list[Row]:
    found = [
        row for row in tx.all()
        if row.parent_id == each.parent and each.after < row.id <= each.up_to and each.barrier in {None, row.barrier}
    ]  # fmt: skip
    return sorted(found, key=lambda row: row.id)[:most]


def _cancel_child(scene: Scene, tx: Tx, each: Cascade, row: Row, out: Rows) -> bool:
    """False: it is locked, or its parent is."""
    row = tx.get(row.id) or row
    parent = waiting_parent(tx, row)
    if tx.is_locked(row.id) or (parent is not None and tx.is_locked(parent)):
        return False
    if row.terminal or row.cancellation is not None:
        return True
    undo = tx.tables.compensations.get((row.fsm, row.version))
    if row.status == "executing":
        if not asked_to_cancel(row) or not asked_for_children(row):
            given = {**each.request, **present(on_cancel=undo)}
            if asked_to_cancel(row):
                given = {**json.loads(row.request), "children": "cancel"}
            tx.write(row, "ask", None, moves=False).request = lit.jsonb(json.dumps(given))
            out.append(shown("asked", row.id, row.queue, None))
        return True
    if undo is not None:
        compensate(tx, row, each.request, undo, "cancel", None)
        out.append(shown("entered", row.id, row.queue, row.partition_key))
        return True
    live = any(child.parent_id == row.id and not child.terminal for child in tx.all())
    cancel(tx, row, "cancel", None, asked=lit.jsonb(json.dumps(each.request)), cascades=live)
    out.append(shown("ended", row.id, row.queue, row.partition_key))
    opened = count_ended(scene, tx, row.parent_id, row.barrier, 1, failed=True)
    if opened is not None:
        out.append(shown("opened", opened.id, opened.queue, None))
    return True
