"""What the statements of retention mean. See `statements`."""

from __future__ import annotations

from durable_actors._postgres.driver.statement import Params
from tests.simulation import literals as lit
from tests.simulation.statements import SECOND, Rows, Scene, meaning, shown
from tests.simulation.tables import Row, Tx


def _number(value: bytes | None) -> float | None:
    return None if value is None else float(value)


@meaning
def write_keeps(scene: Scene, tx: Tx, params: Params) -> Rows:
    """The model's machines say nothing."""
    assert not any(lit.bools(params[2]))
    return []


@meaning
def read_keeps(scene: Scene, tx: Tx, params: Params) -> Rows:
    return []


@meaning
def delete_ended(scene: Scene, tx: Tx, params: Params) -> Rows:
    after, limit = int(params[0] or 0), int(params[1] or 0)
    ages = dict(zip(("done", "cancelled", "failed"), map(_number, params[2:5]), strict=True))
    old = tx.now - round(float(params[6] or 0) * SECOND)
    looked = sorted((row for row in tx.all() if row.id > after), key=lambda row: row.id)[:limit]

    def ripe(row: Row) -> bool:
        age = ages.get(row.status)
        return age is not None and row.guard is None and row.finished_at <= tx.now - round(age * SECOND)

    locked = [row for row in looked if row.terminal and ripe(row) and not tx.is_locked(row.id)]
    locked = locked if params[7] == b"t" else []
    if "deletes live rows" in scene.broken:
        locked = looked
    tops = {row.id for row in locked if row.parent_id is None}
    gone = [row for row in locked if not _needed(scene, tx, row, tops)]
    records = sum(tx.delete(row) for row in gone)
    counts = [sum(row.status == status for row in gone) for status in ages]
    past = [row.id for row in looked if row.inserted_at <= old]
    return [shown(len(looked), looked[-1].id if looked else None, max(past, default=None), *counts, records)]


def _needed(scene: Scene, tx: Tx, row: Row, tops: set[int]) -> bool:
    """Whether its parent may read it."""
    parent = None if row.parent_id is None else tx.get(row.parent_id)
    if parent is None or parent.status == "done" or parent.id in tops or "deletes children" in scene.broken:
        return False
    return row.barrier is None or row.barrier >= parent.visit


@meaning
def delete_done(scene: Scene, tx: Tx, params: Params) -> Rows:
    out: Rows = []
    for number in lit.ints(params[0]):
        row = tx.get(number)
        if row is None or not tx.wrote(number) or row.status != "done":
            continue
        if row.guard is None and row.parent_id is None:
            records = tx.delete(row)
            out.append(shown(number, records if row.journal else None))
    return out
