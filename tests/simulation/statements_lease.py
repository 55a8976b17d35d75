"""What the statements about leases mean: renewed, taken back, looked at; the sweep of held rows. See `statements`."""

from __future__ import annotations

from durable_actors._postgres.driver.statement import Params
from tests.simulation import literals as lit
from tests.simulation.statements import SECOND, Rows, Scene, meaning, shown
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
            if "renewals" not in scene.broken:
                tx.write(row, "renew", claim).lease = tx.now + round(float(params[2] or 0) * SECOND)
            out.append(shown(claim))
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
        crashed = most is not None and row.crashes + 1 >= most
        if crashed and (parent := _waiting_parent(tx, row)) is not None:
            if tx.is_locked(parent):
                continue
            tx.lock(parent)
        new = tx.write(row, "reap")
        stopped = row.locked_by in tx.tables.stopped
        gone = crashed and not stopped
        pause = 0 if row.crashes == 0 or stopped else min(2 ** min(row.crashes - 1, 9), 300)
        new.status, new.hold = "failed" if gone else "runnable", 0
        new.eligible_at = tx.now + pause * SECOND
        new.attempt, new.crashes = row.attempt + (not stopped and not gone), row.crashes + (not stopped)
        new.interruptions = row.interruptions + stopped
        if gone:
            new.last_error = _quarantined(row, "its worker died or lost it")
            new.error_type = new.traceback = None
        if "reap keeps claim" not in scene.broken:
            new.unclaim()
        else:
            new.locked_by = new.lease = None
        out.append(
            shown(
                row.id,
                row.queue,
                row.partition_key,
                new.status,
                row.fsm,
                row.step,
                new.last_error if gone else None,
            )
        )
    return out


def _quarantined(row: Row, why: str) -> str:
    times = "once" if row.crashes == 0 else f"{row.crashes + 1} times"
    return f"quarantined: step {row.step} ended {times} without an outcome ({why})"


def _waiting_parent(tx: Tx, row: Row) -> int | None:
    """Whose barrier must count this child when it fails."""
    parent = None if row.barrier is None else tx.get(row.parent_id)
    if parent is None or parent.status != "awaiting_children" or parent.visit != row.barrier:
        return None
    return parent.id


@meaning
def crash_claims(scene: Scene, tx: Tx, params: Params) -> Rows:
    most = None if params[3] is None else int(params[3])
    out: Rows = []
    given = zip(lit.ints(params[0]), lit.texts(params[1]), lit.texts(params[2]), strict=True)
    for number, claim, error in sorted(given):
        row = tx.get(number)
        if row is None or row.claim_id != claim or row.locked_by is None or tx.is_locked(number):
            continue
        gone = most is not None and row.crashes + 1 >= most
        if gone and (parent := _waiting_parent(tx, row)) is not None:
            if tx.is_locked(parent):
                continue
            tx.lock(parent)
        new = tx.write(row, "crash", claim)
        pause = 0 if row.crashes == 0 else min(2 ** min(row.crashes - 1, 9), 300)
        new.status, new.hold = "failed" if gone else "runnable", 0
        new.attempt, new.crashes = row.attempt + (not gone), row.crashes + 1
        new.eligible_at = tx.now + pause * SECOND
        last = f"the last time: {error}"
        new.last_error = _quarantined(row, last) if gone else f"crash {row.crashes + 1}: {error}"
        new.error_type, new.traceback = (None if each is None else each.decode() for each in params[4:6])
        new.unclaim()
        fault = new.last_error if gone else None
        out.append(shown(row.id, row.queue, row.partition_key, new.status, row.fsm, row.step, fault))
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
            (r for r in mine if r.status == "runnable" and r.eligible_at <= tx.now and r.hold != 2),
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
    tx.write(row, "promote").hold = 0
    return shown(row.id, row.queue)
