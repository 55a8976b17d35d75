"""What the statements of pauses mean; see `statements`. Receipts of queues are not modelled."""

from __future__ import annotations

import json

from durable_actors._postgres.driver.statement import Params
from tests.simulation import literals as lit
from tests.simulation.ending import asked_to_cancel
from tests.simulation.graphs import hold_of_resumed
from tests.simulation.literals import jsonb
from tests.simulation.statements import SECOND, Rows, Scene, meaning, shown
from tests.simulation.statements_journal import OUTCOMES, iso, note, present
from tests.simulation.tables import Row, Tx


def _command(params: Params, kind: str) -> tuple[str | None, str | None, dict[str, object]]:
    """By whom, why, and what the record tells."""
    by, reason, key, given = (None if each is None else each.decode() for each in params[1:5])
    command = present(type=kind, key=key, reason=reason) | {"metadata": given and json.loads(given)}
    return by, reason, {"command": command}


@meaning
def pause_instance(scene: Scene, tx: Tx, params: Params) -> Rows:
    row = tx.get(int(params[0] or 0))
    if row is None or row.terminal or row.paused or asked_to_cancel(row):
        return []
    old = row.clone()
    key = params[3] and params[3].decode()
    new = tx.write(row, "pause", key)
    by, reason, data = _command(params, "pause")
    new.request = jsonb(json.dumps(present(kind="pause", by=by, reason=reason, at=iso(tx.now))))
    if row.status == "runnable":
        new.hold = new.held
    note(tx, new, "paused", old, level=OUTCOMES, by=by, data=data)
    said = "requested" if old.status == "executing" else "paused"
    tx.receipt("pause", row.id, key, json.dumps(said).encode())
    return [shown(json.dumps(said), new.partition_key if old.status == "runnable" else None)]


def _resumable(row: Row) -> bool:
    return row.paused or (row.status == "runnable" and row.hold == 4)


@meaning
def resume_instance(scene: Scene, tx: Tx, params: Params) -> Rows:
    row = tx.get(int(params[0] or 0))
    if row is None or row.terminal or not _resumable(row):
        return []
    old = row.clone()
    key = params[3] and params[3].decode()
    new = tx.write(row, "resume", key)
    tx.receipt("resume", row.id, key, str(row.id).encode())
    new.request, new.hold = (
        None,
        hold_of_resumed(tx, row) if row.status == "runnable" and row.hold == 4 else row.hold,
    )
    by, _, data = _command(params, "resume")
    if new.hold == 5:
        data["hold"] = 5
    note(tx, new, "resumed", old, level=OUTCOMES, by=by, data=data)
    return [shown(row.id)]


def _told(queue: str, fsm: str, until: int | None, params: Params, at: int) -> Rows:
    by, reason, _ = _command(params, "")
    end = None if until is None else iso(until)
    told = {"queue": queue, "machine": fsm or None, "until": end, "at": iso(at), "by": by, "reason": reason}
    return [shown(json.dumps(told))]


@meaning
def pause_queue(scene: Scene, tx: Tx, params: Params) -> Rows:
    queue, fsm = ((each or b"").decode() for each in params[5:7])
    until = None if params[8] is None else tx.now + round(float(params[8]) * SECOND)
    tx.tables.pauses[queue, fsm] = until
    return _told(queue, fsm, until, params, tx.now)


@meaning
def resume_queue(scene: Scene, tx: Tx, params: Params) -> Rows:
    queue, fsm = ((each or b"").decode() for each in params[5:7])
    if fsm not in tx.stopped(queue):
        return []
    return _told(queue, fsm, tx.tables.pauses.pop((queue, fsm)), params, tx.now)


@meaning
def read_pauses(scene: Scene, tx: Tx, params: Params) -> Rows:
    among = None if params[0] is None else set(lit.texts(params[0]))
    found = sorted((queue, fsm) for queue, fsm in tx.tables.pauses if fsm in tx.stopped(queue))
    return [
        shown(queue, fsm, None, lit.instant(tx.now), None, None, None)
        for queue, fsm in found
        if among is None or queue in among
    ]
