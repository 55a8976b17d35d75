"""I9, I10 and I11: partition keys, unique keys, barriers. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from tests.invariants.changes import InstanceChange
from tests.invariants.history import History, StepRun, Violation
from tests.invariants.moves import Move


def i9_one_step_per_key(history: History) -> list[Violation]:
    """One step of a partition key runs at a time, and the due ones go in order.

    * In the database: never two executing rows of a key.
    * In the world: a run begins after the last sign of the run before, whatever became of that one's claim; a thread
      that outlives its lease keeps its key. After a loss of sessions (which are what holds keys) a step that can be
      cancelled has `margin` seconds of its own time to notice; a thread cannot be helped.
    * A pick takes the first due row of a key by (priority, eligible_at, id), of those that were committed when it began
      and whose machine its worker knows; a step runs ahead only if no row of its key is due.
    """
    return [*_two_executing(history), *_overlaps(history), *_out_of_order(history)]


def _two_executing(history: History) -> Iterator[Violation]:
    holders: dict[str, InstanceChange] = {}
    for change, _ in history.moves:
        old, new = change.old, change.new
        if old is not None and old.status == "executing" and old.partition_key is not None:
            held = holders.get(old.partition_key)
            if held is not None and held.instance == change.instance:
                del holders[old.partition_key]
        if new is not None and new.status == "executing" and new.partition_key is not None:
            other = holders.get(new.partition_key)
            if other is not None and other.instance != change.instance:
                sentence = f"two instances of key {new.partition_key!r} are executing"
                yield history.violation("I9", sentence, other, change)
            holders[new.partition_key] = change


def _overlaps(history: History) -> Iterator[Violation]:
    keyed: dict[str, list[StepRun]] = defaultdict(list)
    for run_id, run in history.runs.items():
        entry = history.entries.get(run_id)
        if run.began is not None and entry is not None and entry.new is not None:
            key = entry.new.partition_key
            if key is not None:
                keyed[key].append(run)
    for key, runs in keyed.items():
        runs.sort(key=_begin)
        longest = runs[0]
        for run in runs[1:]:
            if _begin(run) < longest.events[-1].at and not _excused(history, longest, run):
                sentence = f"two steps of key {key!r} ran at once"
                events = (longest.began, run.began, longest.events[-1])
                yield history.violation("I9", sentence, *events)
            longest = max(longest, run, key=lambda each: each.events[-1].at)


def _begin(run: StepRun) -> int:
    return 0 if run.began is None else run.began.at


def _excused(history: History, first: StepRun, second: StepRun) -> bool:
    """Whether the first could not know, or could not be told, that its key was gone."""
    begin, end = _begin(second), first.events[-1]
    if not any(_begin(first) <= loss.at <= begin for loss in history.sessions_lost):
        return False
    ran = (end.at - begin) / 1e9 - history.paused(end.pid, begin, end.at)
    return first.threaded or ran <= history.margin


def _out_of_order(history: History) -> Iterator[Violation]:
    known = _known_steps(history)
    siblings: dict[str, dict[int, InstanceChange]] = defaultdict(dict)
    for change, move in history.moves:
        old, new = change.old, change.new
        if old is not None and old.partition_key is not None:
            siblings[old.partition_key].pop(change.instance, None)
            ahead = move is Move.COMMIT and new is not None and new.status == "executing"
            for other in siblings[old.partition_key].values():
                row = other.new
                if not (ahead or move is Move.PICK) or row is None or not _was_due(history, other, change):
                    continue
                steps = known.get((new or old).locked_by or "", frozenset())
                if ahead:
                    sentence = f"it ran ahead although instance {row.id} of its key was due"
                    yield history.violation("I9", sentence, other, change)
                elif row.place < old.place and (row.fsm, row.version, row.step) in steps:
                    sentence = f"it was claimed before instance {row.id} of its key, which was due earlier"
                    yield history.violation("I9", sentence, other, change)
        if new is not None and new.partition_key is not None:
            siblings[new.partition_key][change.instance] = change


def _was_due(history: History, other: InstanceChange, change: InstanceChange) -> bool:
    """Whether that row was certainly committed, and due, when the transaction of this change began."""
    row = other.new
    return (
        row is not None
        and row.status == "runnable"
        and row.hold <= 1
        and row.eligible_at <= change.began
        and history.ended_by.get(other.txid, change.began + 1) <= change.began
    )


def _known_steps(history: History) -> Mapping[str, frozenset[tuple[str, int, str]]]:
    """By owner: the steps of machines that it is known to know, for it has claimed such rows."""
    found: dict[str, set[tuple[str, int, str]]] = defaultdict(set)
    for change, move in history.moves:
        if move is Move.PICK and change.new is not None and change.new.locked_by is not None:
            found[change.new.locked_by].add((change.new.fsm, change.new.version, change.new.step))
    return {owner: frozenset(steps) for owner, steps in found.items()}


def i10_unique_keys_are_unique(history: History) -> list[Violation]:
    """A unique key is occupied by one instance at a time: one whose status is in the scope that it was given."""
    found: list[Violation] = []
    occupants: dict[str, InstanceChange] = {}
    for change, _ in history.moves:
        before = None if change.old is None else change.old.occupies
        after = None if change.new is None else change.new.occupies
        if before is not None and before != after:
            held = occupants.get(before)
            if held is not None and held.instance == change.instance:
                del occupants[before]
        if after is not None:
            other = occupants.get(after)
            if other is not None and other.instance != change.instance:
                sentence = f"two instances occupy the unique key {after!r}"
                found.append(history.violation("I10", sentence, other, change))
            occupants[after] = change
    return found


def i11_barriers_open_once(history: History) -> list[Violation]:
    """A parent's barrier opens once, when its join holds or its deadline has passed, and counts each child's end once.

    * Its children are inserted in the transaction that parks it, as many as it says.
    * The counter moves by the children that ended (or were retried) in that very transaction.
    """
    found: list[Violation] = []
    families = _families(history)
    for (parent, barrier), children in families.items():
        changes = history.by_instance.get(parent)
        if changes is None:
            continue  # older than the audit
        park = next(
            (
                change
                for change, move in changes
                if move is Move.COMMIT and change.new is not None and change.new.visit == barrier
            ),
            None,
        )
        born = [change for change, move in children if move is Move.INSERT]
        strays = [change for change in born if park is None or change.txid != park.txid]
        if strays:
            sentence = "a child was inserted outside of the outcome that parks its parent"
            found.append(history.violation("I11", sentence, park, strays[0]))
        elif park is not None and park.new is not None and park.new.children_total != len(born):
            sentence = f"its barrier counts {park.new.children_total} children, and {len(born)} were inserted"
            found.append(history.violation("I11", sentence, park))
        if park is not None:
            found.extend(_counting(history, park, changes, children))
    return found


_Moves = Sequence[tuple[InstanceChange, Move]]


def _families(history: History) -> Mapping[tuple[int, int], _Moves]:
    """By parent and barrier: what happened to the children."""
    found: dict[tuple[int, int], list[tuple[InstanceChange, Move]]] = defaultdict(list)
    for change, move in history.moves:
        row = change.new or change.old
        if row is not None and row.parent_id is not None and row.barrier is not None:
            found[row.parent_id, row.barrier].append((change, move))
    return found


def _counting(
    history: History, park: InstanceChange, changes: _Moves, children: _Moves
) -> Iterator[Violation]:
    """Follow one barrier from its park to its opening."""
    assert park.new is not None
    needed = pending = park.new.children_pending
    opened: InstanceChange | None = park if park.new.status != "awaiting_children" else None
    for change, move in changes:
        old, new = change.old, change.new
        if old is None or new is None or change.seq <= park.seq or old.visit != park.new.visit:
            continue
        if move not in {Move.COUNT, Move.OPEN}:
            continue
        here = [each for each, _ in children if each.txid == change.txid]
        ended = [each for each in here if _ends(each)]
        retried = [each for each in here if each.old is not None and each.old.ended and not _is_end(each)]
        left = max(pending - len(ended), 0) + len(retried)
        if new.children_pending != left:
            sentence = (
                f"{len(ended)} children ended, and its counter went from {pending} to {new.children_pending}"
            )
            yield history.violation("I11", sentence, park, *ended, change)
        pending = new.children_pending
        failed = old.wake_on_failure and any(each.new and each.new.status == "failed" for each in ended)
        if move is Move.OPEN:
            due = old.await_deadline is not None and old.await_deadline <= change.began
            if opened is not None:
                yield history.violation("I11", "its barrier opened twice", park, opened, change)
            elif not due and not failed and not (ended and left == 0):
                sentence = f"its barrier opened while it waited for {left} of {needed} children"
                yield history.violation("I11", sentence, park, *ended, change)
            opened = change
        elif ended and (left == 0 or failed):
            yield history.violation(
                "I11", "the last child ended, and its barrier did not open", *ended, change
            )
    yield from _unopened(history, park, children)


def _unopened(history: History, park: InstanceChange, children: _Moves) -> Iterator[Violation]:
    """A barrier that is closed at the end although its children are through."""
    row = history.rows.get(park.instance)
    assert park.new is not None
    if row is None or row.status != "awaiting_children" or row.visit != park.new.visit:
        return
    last = {change.instance: change for change, _ in children}
    through = [change for change in last.values() if change.new is None or change.new.ended]
    left = max(park.new.children_pending - len(through), 0)
    if row.children_pending != left or left == 0:
        sentence = f"its barrier waits for {row.children_pending} children, of which {left} are still to end"
        yield history.violation("I11", sentence, park, *through)


def _ends(change: InstanceChange) -> bool:
    return _is_end(change) and not (change.old is not None and change.old.ended)


def _is_end(change: InstanceChange) -> bool:
    return change.new is not None and change.new.ended
