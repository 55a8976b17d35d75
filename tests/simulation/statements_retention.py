"""What the statements of retention mean. See `statements`."""

from __future__ import annotations

from typing import Any

from durable_actors._postgres.driver.statement import Params
from tests.simulation import literals as lit
from tests.simulation.statements import SECOND, Rows, Scene, current, enter, meaning, shown
from tests.simulation.statements_journal import FULL, OUTCOMES, note, stored
from tests.simulation.tables import Row, Tx


def _number(value: bytes | None) -> float | None:
    return None if value is None else float(value)


@meaning
def write_keeps(scene: Scene, tx: Tx, params: Params) -> Rows:
    """What machines say concerns the janitor, who finds nothing of `keep=0`: the commit has deleted it."""
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
    last = looked[-1].id if looked else None
    return [shown(len(looked), last, max(past, default=None), *counts, records, None)]


def _needed(scene: Scene, tx: Tx, row: Row, tops: set[int]) -> bool:
    """Whether its parent may read it, or one that comes after it."""
    node = tx.node(row.id)
    fed = [tx.get(number) for number in (node and node.feeds) or ()]
    if any(each is not None and not each.terminal for each in fed) and "deletes upstream" not in scene.broken:
        return True
    parent = None if row.parent_id is None else tx.get(row.parent_id)
    if parent is None or parent.status == "done" or parent.id in tops or "deletes children" in scene.broken:
        return False
    return row.barrier is None or row.barrier >= parent.visit


@meaning
def commit_deletes(scene: Scene, tx: Tx, params: Params) -> Rows:
    late = params[4] == b"t"
    numbers = lit.ints(params[0])
    visits, results = lit.ints(params[2]), lit.texts(params[3]) or [None] * len(numbers)
    full = [*visits] * (len(numbers) if len(visits) < 2 else 1)
    gone: Rows = []
    kept: Rows = []
    for number, claim, visit, result in zip(numbers, lit.texts(params[1]), full, results, strict=True):
        row = current(scene, tx, number, claim, visit, late=late)
        if row is None:
            continue
        key = row.unique_key is not None and "done" in row.scope
        if not key and row.parent_id is None and row.links is None:
            tx.why[number] = ("commit", claim, visit, late)
            tx.delete(row)
            gone.append((number, row.visit, "done", None, row.inbox, None))
            continue
        done = ("done", row.step, None, result or "null", row.attempt, 0, 0.0, None, None, None)
        new = enter(tx, row, ("commit", claim, visit, late), done)
        new.locked_by = new.lease = new.awaits = new.await_step = new.await_deadline = new.manual = None
        new.children_pending, new.wake_on_failure = 0, False
        tx.drop_inbox(number)
        kept.append((number, new.visit, "done", None, new.inbox, None))
    if params[5] is not None and "token" not in scene.broken:
        deleted = {row[0] for row in gone}
        tx.note_flush(params[5].decode(), frozenset(numbers) - deleted)
    tx.forget_flushes(lit.texts(params[6]))
    return [*gone, *kept]


@meaning
def read_flushes(scene: Scene, tx: Tx, params: Params) -> Rows:
    found = ((token, tx.flush(token)) for token in lit.texts(params[0]))
    return [
        shown(token, "{" + ",".join(map(str, sorted(kept))) + "}")
        for token, kept in found
        if kept is not None
    ]


@meaning
def forget_flushes(scene: Scene, tx: Tx, params: Params) -> Rows:
    """No simulated world lasts for a day."""
    return []


# -- long journals

PAUSED = 4


def _cut(tx: Tx, row: Row, moves: int) -> int:
    """The revision before which records may go."""
    if row.journal == 1:
        return row.rev - moves
    told = tx.snapshot_of(row.id)
    return 0 if told is None or row.journal == 0 else told[1] or 0


@meaning
def find_long_journals(scene: Scene, tx: Tx, params: Params) -> Rows:
    after, limit, moves = (int(each or 0) for each in params[:3])
    rows = sorted(tx.all(), key=lambda row: row.id)
    if params[3] is None:
        looked = [row for row in rows if row.id > after][:limit]
    else:
        looked = [row for row in rows if row.id in set(lit.ints(params[3]))]
    long = [row for row in looked if not row.terminal and row.journal and row.rev > moves]
    grown = [
        row for row in long if row.journal > 1 and row.rev - (tx.snapshot_of(row.id) or (0,))[0] >= moves
    ]
    hides = [row for row in long if any(rev < _cut(tx, row, moves) for rev in tx.records_of(row.id))]

    def array(found: list[Row]) -> str | None:
        return "{" + ",".join(str(row.id) for row in found) + "}" if found else None

    last = looked[-1].id if looked else None
    return [shown(len(looked), last, array(long), array(grown), array(hides))]


@meaning
def sample_long_journals(scene: Scene, tx: Tx, params: Params) -> Rows:
    """The journals of the simulation are on fewer pages than it looks at."""
    moves, most = int(params[1] or 0), int(params[2] or 0)
    found = [row.id for row in tx.all() if any(rev > moves for rev in tx.records_of(row.id))]
    return [shown(number) for number in sorted(found)[:most]]


@meaning
def snapshot_journal(scene: Scene, tx: Tx, params: Params) -> Rows:
    row = tx.get(int(params[0] or 0))
    if row is None or row.terminal or row.journal < OUTCOMES or tx.is_locked(row.id):
        return []
    if row.hold == PAUSED or row.request is not None:
        return []
    told = tx.snapshot_of(row.id)
    if row.rev - (told or (0,))[0] < int(params[1] or 0) or (row.manual and row.status == "awaiting_signal"):
        return []
    records = tx.records_of(row.id)
    new = tx.write(row, "snapshot")
    columns = {name: value for name, value in stored(new).items() if name != "request"}
    if new.journal < FULL:
        columns = {name: value for name, value in columns.items() if name not in {"state", "result"}}
    data: dict[str, Any] = {"retention": True, "row": columns}
    first = next(iter(records.values()), {}).get("data", {})
    if new.parent_id is not None and "parent" in first:
        data["parent"] = first["parent"]
    if new.status == "awaiting_children":
        data["needed"] = _needed_children(new, records)
    note(tx, new, "snapshot", new, level=OUTCOMES, data=data)
    tx.note_snapshot(row.id, new.rev, None if told is None else told[0])
    return [shown(new.rev)]


def _needed_children(row: Row, records: dict[int, dict[str, Any]]) -> int | None:
    for record in reversed(records.values()):
        if record["kind"] == "spawned" and record["visit"] == row.visit - 1:
            return int(record["data"]["children_pending"])
        if record["kind"] == "snapshot" and record["visit"] == row.visit and "needed" in record["data"]:
            return int(record["data"]["needed"])
    return None


@meaning
def truncate_journal(scene: Scene, tx: Tx, params: Params) -> Rows:
    number, moves, most = (int(each or 0) for each in params[1:])
    row, records = tx.get(number), tx.records_of(number)
    gone: list[int] = []
    if row is not None and not row.terminal:
        cut = _cut(tx, row, moves)
        if row.journal == 1 or records.get(cut, {}).get("kind") == "snapshot":
            far = cut + 1 if "cuts too far" in scene.broken else cut
            gone = sorted((rev for rev in records if rev < far), reverse=True)[:most]
    tx.cut(number, gone)
    return [shown(len(gone))]
