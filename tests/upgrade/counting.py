"""A history in which `rev` is not judged: a node of release 0.1 does not count its claims, holds and joins. Pure."""

from __future__ import annotations

import attrs
from durable_actors._store.moves import MOVES
from tests.invariants.changes import Change, InstanceChange, move_of
from tests.invariants.history import History

UNCOUNTED = frozenset(move.name for move in MOVES if not move.counts)


def without_count(history: History) -> History:
    """The same history, with the `rev` that each change would have left if it had been counted as the checkers want.

    0.1 adds 1 to `rev` for what its journal was to record: outcomes, wakes, ends. 0.2 adds 1 for every move. So in a
    history of both, `rev` proves nothing; everything else is judged as it is.
    """
    revs: dict[int, int] = {}
    changes = [_counted(change, revs) for change in history.changes]
    rows = {number: attrs.evolve(row, rev=revs.get(number, row.rev)) for number, row in history.rows.items()}
    return attrs.evolve(history, changes=changes, rows=rows)


def _counted(change: Change, revs: dict[int, int]) -> Change:
    if not isinstance(change, InstanceChange):
        return change
    rev = revs.get(change.instance, 1)  # an insert is the first move
    old = change.old and attrs.evolve(change.old, rev=rev)
    new = change.new and attrs.evolve(change.new, rev=rev)
    if old is not None and new is not None and move_of(old, new) not in {None, *UNCOUNTED}:
        new = attrs.evolve(new, rev=rev + 1)
    revs[change.instance] = rev if new is None else new.rev
    return attrs.evolve(change, old=old, new=new)
