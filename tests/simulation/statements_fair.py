"""What the statements of fair queues mean; see `statements`."""

from __future__ import annotations

from durable_actors._postgres.driver.statement import Params
from tests.simulation import literals as lit
from tests.simulation.statements import Rows, Scene, due, meaning, shown, take_window
from tests.simulation.tables import Row, Tx


def _position(row: Row) -> tuple[int, int]:
    return row.eligible_at, row.id


@meaning
def read_fair_keys(scene: Scene, tx: Tx, params: Params) -> Rows:
    """It locks nothing, and sees locked rows, too."""
    queue = (params[0] or b"").decode()
    most, visits = int(params[3] or 0), int(params[4] or 0)
    offered = [row for row in tx.all() if row.queue == queue and row.status == "runnable" and row.hold == 0]
    out: Rows = []
    found = visited = 0
    for priority, begin in zip(lit.ints(params[1]), lit.texts(params[2]), strict=True):
        first: dict[str, int] = {}
        for row in sorted(offered, key=_position):
            if row.priority == priority and row.fair_key is not None:
                first.setdefault(row.fair_key, row.eligible_at)
        end = begin or ""
        for key in sorted(key for key in first if key > (begin or "")):
            if found >= most or visited >= visits:
                break
            visited += 1
            end = key
            if first[key] <= tx.now:
                found += 1
                out.append(shown("k", priority, key, None, 0, None, None))
        else:
            end = end if found >= most or visited >= visits else ""
        out.append(shown("e", priority, end, None, 0, None, None))
        if found >= most or visited >= visits:
            break
    places = zip(lit.ints(params[5]), lit.texts(params[6]), lit.ints(params[7]), strict=True)
    for priority, at, number in places:
        start = (lit.micros(at or "-infinity"), number)
        there = [row for row in offered if row.priority == priority and row.eligible_at <= tx.now]
        read = sorted((row for row in there if _position(row) > start), key=_position)[: int(params[8] or 0)]
        plain = [row.id for row in read if row.fair_key is None]
        ids = "{" + ",".join(map(str, plain)) + "}" if plain else None
        last = (lit.instant(read[-1].eligible_at), read[-1].id) if read else (None, None)
        out.append(shown("p", priority, None, ids, len(read), *last))
    return out


@meaning
def pick_fair(scene: Scene, tx: Tx, params: Params) -> Rows:
    queue, limit = (params[0] or b"").decode(), int(params[1] or 0)
    stopped = set[str]() if "pauses" in scene.broken else tx.stopped(queue)
    if "" in stopped:
        return []
    entries = [*zip(lit.ints(params[5]), lit.texts(params[6]), lit.ints(params[7]), strict=True)]
    plain, shelved, skip = set(lit.ints(params[8])), set(lit.texts(params[10])), set(lit.ints(params[12]))
    offered = sorted((row for row in tx.all() if due(row, tx, queue)), key=_position)
    if "double claim" in scene.broken:
        offered += [row for row in tx.all() if row.status == "executing" and row.queue == queue]
    shelf = [row for row in offered if row.hold == 2 and row.address in shelved and row.fsm not in stopped]
    window = sorted(shelf, key=lambda row: row.urgency)[: int(params[13] or 0)]
    from_shelf = len(window)
    for priority in dict.fromkeys(priority for priority, _, _ in entries):
        for whole in (False, True):
            for at, key, quota in entries:
                left = limit - (len(window) - from_shelf)
                wanted = left if whole else min(quota, left)
                if at == priority:
                    window += [
                        row
                        for row in offered
                        if row.hold == 0 and row.priority == at and row not in window
                        and (row.fair_key or "") == key and (row.id in plain if not key else row.id not in skip)
                    ][:wanted]  # fmt: skip
    ranks = {row.id: (row.priority, index >= from_shelf, index) for index, row in enumerate(window)}
    chosen = sorted(window, key=lambda row: ranks[row.id])[:limit]
    chosen.sort(key=lambda row: row.urgency)  # as siblings of a partition key are judged
    keys = {row.id: row.fair_key for row in chosen}
    return [
        (*row, keys[int(str(row[0]))] if row[3] == "c" else None)
        for row in take_window(scene, tx, params, chosen, stopped)
    ]
