"""What a graph does to an instance that is revived or resumed: `durable.wait_again` and `durable.hold_of_resumed`."""

from __future__ import annotations

from tests.simulation.tables import Row, Tx


def hold_of_resumed(tx: Tx, row: Row) -> int:
    node = tx.node(row.id)
    waits = node is not None and node.waits > 0 and row.links in {1, 3} and row.cancellation is None
    return 5 if waits else 0


def wait_again(tx: Tx, number: int) -> int:
    """Count anew what a revived instance comes after, and have it told."""
    mine = tx.node(number)
    if mine is None:
        return 0
    for each in sorted(mine.needs or ()):
        tx.lock_node(each)
    waits = 0
    for each in mine.needs or ():
        node, row = tx.node(each), tx.get(each)
        if node is None or row is None:
            continue
        owed = number in (node.owed or ())
        untold = owed and node.told_at != row.finished_at
        if row.finished_at is None or untold or (row.status != "done" and not mine.any_end):
            waits += 1
            if not owed:
                new = tx.change_node(each)
                new.told_at = row.finished_at if node.owed is None else node.told_at
                new.owed = [*(node.owed or ()), number]
    tx.change_node(number).waits = waits
    return waits
