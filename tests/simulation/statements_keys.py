"""What it means to hand a partition key on; see `statements`."""

from __future__ import annotations

from collections import defaultdict

from durable_actors._postgres.driver.statement import Params
from tests.simulation import literals as lit
from tests.simulation.statements import Rows, Scene, claim, meaning, promote
from tests.simulation.tables import Row, Tx


@meaning
def hand_siblings(scene: Scene, tx: Tx, params: Params) -> Rows:
    keys, numbers = lit.texts(params[0]), lit.ints(params[1])
    queues, deletes = lit.texts(params[5]), lit.bools(params[6])
    known = set(lit.texts(params[13]))
    fits: dict[str | None, list[Row]] = defaultdict(list)
    for number, claim_id, key, priority, queue, gone in zip(
        numbers, lit.texts(params[2]), lit.texts(params[3]), lit.ints(params[4]), queues, deletes, strict=True
    ):
        if not _has_left(tx, number, claim_id, key, params[7] if gone else None):
            continue
        first = _first(tx, key)
        if first is None or first.id in numbers or first.hold > 1 or tx.is_locked(first.id):
            continue
        plain = first.rate_limit is None and first.request is None and first.address in known
        if plain and first.queue == queue and first.priority <= priority:
            fits[queue].append(first)
    taken: list[Row] = []
    for queue, room in zip(lit.texts(params[11]), lit.ints(params[12]), strict=True):
        taken += sorted(fits[queue], key=lambda row: row.urgency)[:room]
    owner = [None, None, params[8], params[9]]
    out: Rows = [(row.queue, *claim(scene, tx, row, owner, params[10])) for row in taken]
    kept = {row.partition_key for row in taken}
    for row in promote(tx, [key for key in keys if key not in kept]):
        out.append((row.queue, row.id, row.priority, lit.instant(row.eligible_at), "o", *[None] * 16))
    return out


def _has_left(tx: Tx, number: int, claim_id: str | None, key: str | None, token: bytes | None) -> bool:
    """Whether this transaction has ended its claim, or deleted it."""
    row = tx.get(number)
    if row is not None:
        ended = row.claim_id == claim_id and row.locked_by is None and row.partition_key == key
        return ended and tx.wrote(number)
    kept = None if token is None else tx.noted_flush(token.decode())
    return kept is not None and number not in kept


def _first(tx: Tx, key: str | None) -> Row | None:
    """The first due row of a key that keeps its place; None: there is none."""
    rows = [row for row in tx.all() if row.partition_key == key and key is not None]
    due = [
        row
        for row in rows
        if row.status == "runnable"
        and row.eligible_at <= tx.now
        and row.keeps_place
        and not tx.is_stopped(row)
    ]
    return min(due, key=lambda row: row.urgency, default=None)
