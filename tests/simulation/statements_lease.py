"""What the statements about leases mean: renewed, taken back, looked at; the sweep of held rows. See `statements`."""

from __future__ import annotations

import json
from typing import Any

from durable_actors._postgres.driver.statement import Params
from tests.simulation import literals as lit
from tests.simulation.ending import asked_to_cancel, cancel, end_claim, waiting_parent
from tests.simulation.graphs import wait_again
from tests.simulation.literals import jsonb
from tests.simulation.statements import (
    SECOND,
    Rows,
    Scene,
    meaning,
    shown,
)
from tests.simulation.statements_journal import (
    CLAIMS,
    FAILURES,
    OUTCOMES,
    fenced,
    folded,
    iso,
    note,
    note_started,
    present,
)
from tests.simulation.tables import Row, Tx


@meaning
def renew_leases(scene: Scene, tx: Tx, params: Params) -> Rows:
    out: Rows = []
    for number, claim in zip(lit.ints(params[0]), lit.texts(params[1]), strict=True):
        row = tx.get(number)
        if (
            row is not None
            and row.claim_id == claim
            and row.locked_by is not None
            and not tx.is_locked(number)
        ):
            until = tx.now + round(float(params[2] or 0) * SECOND)
            if "renewals" not in scene.broken:
                tx.write(row, "renew", claim, moves=False).lease = until
            out.append(shown(claim, lit.instant(until)))
    return out


@meaning
def reap_claims(scene: Scene, tx: Tx, params: Params) -> Rows:
    dead = dict(zip(lit.texts(params[1]), lit.floats(params[3]), strict=True))
    for row in tx.all():  # who has claimed or renewed anything since it was found dead lives
        seen = ((dead.get(row.locked_by) or 0.0) + 0.001) * SECOND
        if row.status == "executing" and row.lease > seen and "moved" not in scene.broken:
            dead.pop(row.locked_by, None)
    for owner in list(dead):
        if scene.owner_locked(owner) and "moved" not in scene.broken:  # it is back since it was found dead
            del dead[owner]
    most = None if params[2] is None else int(params[2])
    out: Rows = []
    for row in sorted(tx.all(), key=lambda each: each.id):
        until = dead.get(row.locked_by) or 0.0
        if "moved" in scene.broken and row.locked_by in dead:
            until = float("inf")
        over = row.status == "executing" and (row.lease <= tx.now or row.lease <= (until + 0.001) * SECOND)
        if not over or tx.is_locked(row.id) or len(out) == int(params[0] or 0):
            continue
        if asked_to_cancel(row) and "reap asked" not in scene.broken:
            if (ended := end_claim(tx, row, "reap")) is not None:
                out.append(_given_back(tx, row, *ended))
            continue
        crashed = most is not None and row.crashes + 1 >= most
        if crashed and (parent := waiting_parent(tx, row)) is not None:
            if tx.is_locked(parent):
                continue
            tx.lock(parent)
        stopped = row.locked_by in tx.tables.stopped
        if crashed and not stopped and row.cancellation is not None:
            cancel(tx, row, "reap", fault=_quarantined(row, "its worker died or lost it"))
            out.append(_given_back(tx, row, "cancelled", None))
            continue
        old = row.clone()
        new = tx.write(row, "reap")
        gone = crashed and not stopped
        pause = 0 if row.crashes == 0 or stopped else min(2 ** min(row.crashes - 1, 9), 300)
        new.status, new.hold = "failed" if gone else "runnable", 0 if gone else row.held
        new.eligible_at = tx.now + pause * SECOND
        new.attempt, new.crashes = row.attempt + (not stopped and not gone), row.crashes + (not stopped)
        new.interruptions = row.interruptions + stopped
        if gone:
            new.last_error = _quarantined(row, "its worker died or lost it")
            new.error_type = new.traceback = None
            new.finished_at = tx.now
        if "reap keeps claim" not in scene.broken:
            new.unclaim()
        else:
            new.locked_by = new.lease = None
        proof = "stopped" if stopped else "lease" if old.lease <= tx.now else "dead"
        data = {
            "to_attempt": new.attempt,
            "eligible_at": iso(new.eligible_at),
            "failed": gone,
            "proof": proof,
        }
        if old.lease <= tx.now and new.journal >= 3:
            data["renewed_until"] = iso(old.lease)
        note(
            tx, new, "reaped", old, level=FAILURES if gone else 3, **fenced(old),
            error={"text": new.last_error} if gone else None, data={**data, **folded(new)},
        )  # fmt: skip
        out.append(
            shown(
                row.id,
                row.queue,
                row.partition_key,
                new.status,
                row.fsm,
                row.step,
                new.last_error if gone else None,
                None,
            )
        )
    return out


def _given_back(tx: Tx, row: Row, status: str, cascades: bool | None) -> list[bytes | None]:
    step = (tx.get(row.id) or row).step
    return shown(row.id, row.queue, row.partition_key, status, row.fsm, step, None, cascades)


def _quarantined(row: Row, why: str) -> str:
    times = "once" if row.crashes == 0 else f"{row.crashes + 1} times"
    return f"quarantined: step {row.step} ended {times} without an outcome ({why})"


@meaning
def crash_claims(scene: Scene, tx: Tx, params: Params) -> Rows:
    most = None if params[3] is None else int(params[3])
    out: Rows = []
    given = zip(lit.ints(params[0]), lit.texts(params[1]), lit.texts(params[2]), strict=True)
    for number, claim, error in sorted(given):
        row = tx.get(number)
        if row is None or row.claim_id != claim or row.locked_by is None or tx.is_locked(number):
            continue
        if asked_to_cancel(row):
            if (ended := end_claim(tx, row, "crash", claim)) is not None:
                out.append(_given_back(tx, row, *ended))
            continue
        gone = most is not None and row.crashes + 1 >= most
        if gone and (parent := waiting_parent(tx, row)) is not None:
            if tx.is_locked(parent):
                continue
            tx.lock(parent)
        if gone and row.cancellation is not None:
            cancel(tx, row, "crash", claim, fault=_quarantined(row, f"the last time: {error}"))
            out.append(_given_back(tx, row, "cancelled", None))
            continue
        old = row.clone()
        new = tx.write(row, "crash", claim)
        pause = 0 if row.crashes == 0 else min(2 ** min(row.crashes - 1, 9), 300)
        new.status, new.hold = "failed" if gone else "runnable", 0 if gone else row.held
        new.attempt, new.crashes = row.attempt + (not gone), row.crashes + 1
        new.eligible_at = tx.now + pause * SECOND
        last = f"the last time: {error}"
        new.last_error = _quarantined(row, last) if gone else f"crash {row.crashes + 1}: {error}"
        new.error_type, new.traceback = (None if each is None else each.decode() for each in params[4:6])
        new.finished_at = tx.now if gone else None
        new.unclaim()
        data = {"to_attempt": new.attempt, "eligible_at": iso(new.eligible_at), "failed": gone}
        note(
            tx, new, "crashed", old, level=FAILURES, **fenced(old), data={**data, **folded(new)},
            error=present(type=new.error_type, text=new.last_error, traceback=new.traceback),
        )  # fmt: skip
        fault = new.last_error if gone else None
        out.append(shown(row.id, row.queue, row.partition_key, new.status, row.fsm, row.step, fault, None))
    return out


@meaning
def read_owners(scene: Scene, tx: Tx, params: Params) -> Rows:
    owners: dict[str, list[int]] = {}
    for row in tx.all():
        if row.status == "executing":
            owners.setdefault(row.locked_by, []).append(row.lease)
    up = (tx.now - scene.started_at) / SECOND
    return [
        shown(
            owner,
            len(ends),
            (min(ends) - tx.now) / SECOND,
            max(ends) / SECOND,
            scene.owner_locked(owner),
            up,
            scene.backend,
        )
        for owner, ends in owners.items()
    ]


@meaning
def sweep_keys(scene: Scene, tx: Tx, params: Params) -> Rows:
    after = (params[0] or b"").decode()
    rows = [row for row in tx.all() if row.partition_key is not None]
    held = {row.partition_key for row in rows if row.status == "runnable" and row.hold == 1}
    out: Rows = []
    for key in sorted(key for key in held if key > after)[: int(params[1] or 0)]:
        mine = [row for row in rows if row.partition_key == key]
        first = min(
            (
                r
                for r in mine
                if r.status == "runnable"
                and r.eligible_at <= tx.now
                and r.hold != 2
                and r.keeps_place
                and not tx.is_stopped(r)
            ),
            key=lambda row: row.urgency,
            default=None,
        )
        stuck = not any(r.status == "executing" for r in mine) and first is not None and first.hold == 1
        out.append(shown(key, stuck))
    return out


@meaning
def free_holds(scene: Scene, tx: Tx, params: Params) -> Rows:
    stuck = [r for r in tx.all() if r.status == "runnable" and r.hold == 1 and r.partition_key is None]
    return [_free(tx, row) for row in stuck[: int(params[0] or 0)] if not tx.is_locked(row.id)]


def _free(tx: Tx, row: Row) -> list[bytes | None]:
    new = tx.write(row, "promote")
    new.hold = 0
    note(tx, new, "offered", row)
    return shown(row.id, row.queue)


# -- commands


@meaning
def read_requests(scene: Scene, tx: Tx, params: Params) -> Rows:
    owner = (params[0] or b"").decode()
    mine = [row for row in tx.all() if row.locked_by == owner and row.request is not None]
    return [shown(row.id, row.claim_id, row.request) for row in mine]


@meaning
def retry_instance(scene: Scene, tx: Tx, params: Params) -> Rows:
    row = tx.get(int(params[0] or 0))
    if row is None or row.status not in {"failed", "cancelled"}:
        return []
    old = row.clone()
    by, reason, key, given = (None if each is None else each.decode() for each in params[1:5])
    new = tx.write(row, "retry", key)
    doomed = old.cancellation is not None and "upstream" in json.loads(old.cancellation)
    comes_after = row.links in {1, 3} and (old.cancellation is None or doomed)
    waits = wait_again(tx, row.id) if comes_after else 0
    new.status, new.hold, new.attempt, new.crashes, new.eligible_at = (
        "runnable",
        5 if waits else 0,
        0,
        0,
        tx.now,
    )
    new.claim_id = new.token = new.request = new.finished_at = None
    command = present(type="retry", key=key, reason=reason) | {"metadata": given and json.loads(given)}
    data: dict[str, Any] = {"command": command} | ({"hold": 5} if waits else {})
    if doomed:
        limits = json.loads(old.cancellation or b"{}").get("rate_limit")
        new.cancellation = None
        data["columns"] = {"cancellation": None} | present(rate_limit=limits)
        new.rate_limit = row.rate_limit if limits is None else limits
    note(tx, new, "revived", old, new.step, level=OUTCOMES, by=by, data=data)
    if (parent := waiting_parent(tx, row)) is not None:
        waiting = tx.get(parent)
        assert waiting is not None
        again = tx.write(waiting, "recount")
        again.children_pending += 1
        note(tx, again, "recounted", again, data={"count": 1, "pending": again.children_pending})
    if "receipt" not in scene.broken:
        tx.receipt("retry", row.id, key, str(row.id).encode())
    return [shown(row.id)]


@meaning
def hasten_instance(scene: Scene, tx: Tx, params: Params) -> Rows:
    """Its receipt is not modelled, as that of `retry_instance`."""
    row = tx.get(int(params[0] or 0))
    if row is None or row.status != "runnable":
        return []
    if row.hold not in {0, 4} or row.eligible_at <= tx.now:
        return [shown({0: '"due"', 5: '"waiting"'}.get(row.hold, '"held"'))]
    old = row.clone()
    new = tx.write(row, "hasten")
    new.eligible_at = tx.now
    by, reason, key, given = (None if each is None else each.decode() for each in params[1:5])
    command = present(type="run_now", key=key, reason=reason) | {"metadata": given and json.loads(given)}
    note(tx, new, "hastened", old, level=OUTCOMES, by=by, data={"command": command})
    return [shown('"paused"' if old.hold == 4 else '"hastened"')]


@meaning
def rerun_instance(scene: Scene, tx: Tx, params: Params) -> Rows:
    """Its receipt is not modelled, as that of `retry_instance`."""
    row = tx.get(int(params[0] or 0))
    if row is None:
        return []
    by, reason, key, given, step, _, partition = (
        None if each is None else each.decode() for each in params[1:8]
    )
    state = None if params[6] is None else jsonb(params[6].decode())
    first = tx.tables.journal.get((row.id, 1), {}).get("data", {}).get("row")
    ended_by_outcome = row.terminal and row.claim_id is not None
    if step is None:
        step = first["step"] if first else row.step if row.visit == 1 else None
    if state is None and first and "state" in first:
        state = jsonb(json.dumps(first["state"]))
    if state is None and row.visit == 1 and row.round <= ended_by_outcome:
        state = row.state
    if step is None or state is None:
        return []
    if params[8] != b"t":
        partition = first.get("partition_key") if first else row.partition_key
    limits = None if params[9] is None else params[9].decode()
    if first and first["step"] == step:
        limits = first.get("rate_limit")
    elif params[10] != b"t" or step == row.step:
        limits = row.rate_limit or json.loads(row.cancellation or b"{}").get("rate_limit")
    tx.tables.serial += 1
    new = Row(
        id=tx.tables.serial, fsm=row.fsm, version=row.version, step=step, state=state, queue=row.queue,
        priority=row.priority, partition_key=partition, tags=row.tags, meta=row.meta, journal=row.journal,
        fingerprint=row.fingerprint, rerun_of=row.id, eligible_at=tx.now,
        max_attempts=row.max_attempts, fair_key=row.fair_key, rate_limit=limits,
        inbox=row.meta is not None and "durable:schedule" in json.loads(row.meta),
    )  # fmt: skip
    tx.insert(new)
    command = present(type="rerun", key=key, reason=reason) | {"metadata": json.loads(given or "{}")}
    note_started(tx, new, by=by, command=command)
    return [shown(new.id)]


@meaning
def find_receipt(scene: Scene, tx: Tx, params: Params) -> Rows:
    command, _, target, key = ((each or b"").decode() for each in params)
    found = tx.tables.receipts.get((command, int(target), key))
    if found is None:
        return []
    return [shown(1, lit.instant(tx.now), command, "instance", target, None, None, key, "{}", found)]


# -- the notifier


@meaning
def read_intents(scene: Scene, tx: Tx, params: Params) -> Rows:
    rows = [row for number in lit.ints(params[0]) if (row := tx.get(number)) is not None]
    found = [row for row in rows if not (row.status == "runnable" and row.hold == 4)]
    return [
        shown(
            row.id, row.status, row.queue, row.step, row.visit, row.round, row.attempt, lit.instant(row.eligible_at),
            row.journal,
        )
        for row in found
    ]  # fmt: skip


@meaning
def record_wakeup(scene: Scene, tx: Tx, params: Params) -> Rows:
    row = tx.get(int(params[0] or 0))
    if row is None or row.journal < CLAIMS or row.terminal:
        return []
    new = tx.write(row, "wakeup")
    step, visit, attempt, before, at = ((each or b"").decode() for each in params[1:6])
    told = Row(step=step, visit=int(visit), attempt=int(attempt), round=int(before))
    note(tx, new, "wakeup", told, data={"visible_at": iso(lit.micros(at))})
    return [shown(new.rev)]
