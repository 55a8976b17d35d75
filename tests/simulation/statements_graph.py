"""What the statements of graphs mean; see `statements`."""

from __future__ import annotations

import json
from collections import Counter

from durable_actors._postgres.driver.statement import Params
from tests.simulation import literals as lit
from tests.simulation.statements import Rows, Scene, claim, meaning, shown
from tests.simulation.statements_journal import CLAIMS, OUTCOMES, iso, note
from tests.simulation.tables import Node, Row, Tx


def _ids(literal: str | None) -> list[int] | None:
    return None if literal is None else list(lit.ints(literal.encode()))


@meaning
def insert_graph(scene: Scene, tx: Tx, params: Params) -> Rows:
    ids, needs, feeds = lit.ints(params[0]), lit.texts(params[1]), lit.texts(params[3])
    ends = list(lit.bools(params[2])) or [None] * len(ids)
    for number, need, end, feed in zip(ids, needs, ends, feeds, strict=True):
        tx.put_node(Node(number, _ids(need), _ids(feed), any_end=bool(end)))
    return []


@meaning
def lock_owed(scene: Scene, tx: Tx, params: Params) -> Rows:
    found = [number for number in sorted(lit.ints(params[0])) if tx.node(number) is not None]
    for number in found:
        tx.lock_node(number)
    return [shown(number) for number in found]


@meaning
def will_tell(scene: Scene, tx: Tx, params: Params) -> Rows:
    """The trigger notes no end that this transaction tells (`Tx.told`)."""
    return []


@meaning
def tell_dependents(scene: Scene, tx: Tx, params: Params) -> Rows:
    for number in lit.ints(params[0]):
        tx.told(number)
    if "untold" in scene.broken:
        return []
    ready = _count(scene, tx, [*lit.ints(params[0])])
    taken = _taken(tx, ready, params)
    out: Rows = []
    for row, bad in ready:
        if row.id in taken:
            row.eligible_at = max(row.eligible_at, tx.now)
            owner = [None, None, params[1], params[2]]
            out.append((row.queue, *claim(scene, tx, row, owner, params[3])))
        elif (new := _offer(tx, row, bad)) is not None:
            out.append((new.queue, new.id, new.priority, lit.instant(new.eligible_at), "o", *[None] * 16))
    return out


@meaning
def tell_untold(scene: Scene, tx: Tx, params: Params) -> Rows:
    ended = tx.take_untold(int(params[0] or 0))
    for number in ended:
        tx.lock_node(number)
    offered = [_offer(tx, row, bad) for row, bad in _count(scene, tx, ended)]
    return [shown(len(ended), None), *(shown(each.id, each.queue) for each in offered if each is not None)]


def _taken(tx: Tx, ready: list[tuple[Row, int | None]], params: Params) -> set[int]:
    """Which of these the node claims at once."""
    rooms = dict(zip(lit.texts(params[4]), lit.ints(params[5]), strict=True))
    priorities, known = set(lit.ints(params[6])), set(lit.texts(params[7]))
    taken: set[int] = set()
    for queue, room in rooms.items():
        on_offer = [
            row
            for row in tx.all()
            if (row.status, row.hold, row.queue) == ("runnable", 0, queue)
            and row.eligible_at <= tx.now
            and row.priority in priorities
        ]
        if on_offer or tx.stopped(queue or ""):
            continue
        fit = [
            row
            for row, bad in ready
            if bad is None and row.queue == queue and row.hold == 5 and row.partition_key is None
            and row.rate_limit is None
            and row.request is None and row.journal < 3 and row.eligible_at <= tx.now and row.address in known
        ]  # fmt: skip
        fit.sort(key=lambda row: (row.priority, row.id))
        taken |= {row.id for row in fit[:room]}
    return taken


def _count(scene: Scene, tx: Tx, numbers: list[int]) -> list[tuple[Row, int | None]]:
    """Count these ends; which dependents wait for nothing more, and which bad end dooms them."""
    counts: Counter[int] = Counter()
    bad: dict[int, int] = {}
    told: list[Node] = []
    for number in sorted(set(numbers)):
        row, node = tx.get(number), tx.node(number)
        if node is None or node.owed is None:
            continue
        if row is None or (row.finished_at is not None and node.told_at != row.finished_at):
            told.append(node)
    for node in told:
        row = tx.get(node.id)  # one that is gone counts as done
        for each in node.owed or ():
            if each in {other.id for other in told}:
                continue
            counts[each] += 1
            if row is not None and row.status != "done":
                bad.setdefault(each, node.id)
        if "told again" not in scene.broken:
            new = tx.change_node(node.id)
            new.owed, new.told_at = None, None if row is None else row.finished_at
    ready: list[tuple[Row, int | None]] = []
    for number in sorted(counts):
        node = tx.node(number)
        if node is None or node.waits <= 0:
            continue
        new = tx.change_node(number)
        why = None if node.any_end else bad.get(number)
        if "forgets failures" in scene.broken:
            why = None
        new.waits = max(node.waits - counts[number], 0) if why is None and "early" not in scene.broken else 0
        row = tx.get(number)
        waited = row is not None and row.status == "runnable" and row.hold in {4, 5}
        if new.waits == 0 and row is not None and waited and row.cancellation is None:
            ready.append((row, why))
    return ready


def _offer(tx: Tx, row: Row, bad: int | None) -> Row | None:
    """Returns the row if it is on offer now."""
    if row.hold == 4 and bad is None:
        return None
    old = row.clone()
    new = tx.write(row, "tell")
    new.hold = new.held
    data: dict[str, object] = {}
    if bad is None:
        new.eligible_at = max(row.eligible_at, tx.now)
    else:
        new.eligible_at = tx.now
        upstream = tx.get(bad)
        assert upstream is not None
        name = f"instance {bad}" if upstream.child_key is None else upstream.child_key
        ended = "was cancelled" if upstream.status == "cancelled" else upstream.status
        told: dict[str, object] = {
            "upstream": bad,
            "at": iso(tx.now),
            "reason": f"upstream failed: {name} {ended}",
        }
        columns: dict[str, object] = {"cancellation": told}
        if row.rate_limit is not None:
            told["rate_limit"] = row.rate_limit
            columns["rate_limit"] = new.rate_limit = None
        new.cancellation = lit.jsonb(json.dumps(told))
        data["columns"] = columns
    data["eligible_at"] = iso(new.eligible_at)
    note(
        tx,
        new,
        "unblocked" if bad is None else "doomed",
        old,
        level=CLAIMS if bad is None else OUTCOMES,
        data=data,
    )
    return new if new.hold == 0 else None


@meaning
def read_dependencies(scene: Scene, tx: Tx, params: Params) -> Rows:
    nodes = [node for number in lit.ints(params[0]) if (node := tx.node(number)) is not None]
    out = [shown(each.id, each.needs and lit.int_array(each.needs), *[None] * 6) for each in nodes]
    found = {row.id: row for each in nodes for one in each.needs or () if (row := tx.get(one)) is not None}
    out += [
        shown(None, None, row.id, row.child_key, row.fsm, row.status, row.result, row.last_error)
        for row in found.values()
    ]
    return out
