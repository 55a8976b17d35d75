"""I6, I7 and I9 to I11: what instances wait for, i.e. signals, wake-ups, keys and barriers. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from durable_actors._store.holds import HOLDS, OFFERED, SHELVED
from durable_actors._store.move_parts import MoveName
from durable_actors._store.moves import OUTCOMES
from tests.invariants.changes import InstanceChange, InstanceState, SignalChange, SignalState
from tests.invariants.history import History, StepRun, Violation

SHOWN: Final = 1000
"""The engine passes at most this many signals to a step. With more in the inbox, the log does not show which."""


def i6_consumed_by_what_saw_it(history: History) -> list[Violation]:
    """A signal leaves the inbox in the transaction that commits the step which received it (or named it).

    * Next and ScheduleChildren consume all that the step received, Await what it does not await again, Retry nothing.
    * `Done` deletes the whole inbox. A failure or a cancellation consumes nothing: the instance may be retried.
    """
    found: list[Violation] = []
    commits = _by_transaction(history)
    for target, changes in history.signal_changes.items():
        for change in changes:
            old, new = change.old, change.new
            if (
                old is not None
                and new is not None
                and old.consumed_at is not None
                and new.consumed_at is None
            ):
                found.append(history.violation("I6", "a consumed signal came back", change))
            if change.takes:
                found.extend(_taken(history, change, commits.get((target, change.txid), ())))
    found.extend(_not_taken(history))
    for signal in history.signals.values():
        row = history.rows.get(signal.target_id)
        if row is not None and row.status == "done":
            sentence = f"signal {signal.id} is left in the inbox of an instance that is {row.status}"
            events = [change for change in history.signal_changes[row.id] if change.signal.id == signal.id]
            end = [
                change for change, _ in history.by_instance.get(row.id, ()) if change.new and change.new.ended
            ]
            found.append(history.violation("I6", sentence, *events, *end))
    return found


_Moves = Sequence[tuple[InstanceChange, MoveName | None]]


def _by_transaction(history: History) -> Mapping[tuple[int, int], _Moves]:
    """By instance and transaction: its moves, e.g. a park and the wake of its recheck."""
    found: dict[tuple[int, int], list[tuple[InstanceChange, MoveName | None]]] = defaultdict(list)
    for change, move in history.moves:
        found[change.instance, change.txid].append((change, move))
    return found


def _taken(history: History, taken: SignalChange, moves: _Moves) -> Iterator[Violation]:
    """Check that this transaction may consume this signal."""
    if any(
        change.new is None or (change.new.status == "done" and move is not None) for change, move in moves
    ):
        return
    commit = next((change for change, move in moves if move in OUTCOMES), None)
    if commit is None or commit.old is None or commit.new is None:
        others = [change for change, _ in moves]
        yield history.violation("I6", "a signal was consumed by no outcome of its instance", taken, *others)
        return
    if _retries(commit):
        yield history.violation("I6", "a retry consumed a signal", commit, taken)
    if commit.new.ended:  # done is excused above
        yield history.violation(
            "I6", f"an instance that {_ended_as(commit.new)} consumed a signal", commit, taken
        )
    run = _run_of(history, commit)
    if run is None or run.began is None:
        return
    allowed = _handed(run)
    if run.outcome is None:
        allowed |= frozenset(run.began.data.get("signals", ()))  # it may have named any that it could see
    else:
        allowed |= frozenset(run.outcome.data.get("consumed") or ())
    if taken.signal.id not in allowed:
        sentence = f"signal {taken.signal.id} was consumed by a step that was not given it"
        yield history.violation("I6", sentence, run.began, commit, taken)


def _ended_as(row: InstanceState) -> str:
    return "was cancelled" if row.status == "cancelled" else row.status


def _not_taken(history: History) -> Iterator[Violation]:
    """Signals that a step received, and that are still there after its outcome."""
    for change, move in history.moves:
        new = change.new
        if move not in OUTCOMES or new is None or new.ended or _retries(change):
            continue
        run = _run_of(history, change)
        handed = frozenset[int]() if run is None else _handed(run)
        if not handed or run is None:
            continue
        inbox = history.signal_changes.get(change.instance, ())
        taken = {each.signal.id for each in inbox if each.takes and each.txid == change.txid}
        for each in inbox:
            signal = each.signal
            kept = new.status == "awaiting_signal" and signal.name in (new.awaits or ())
            if each.old is None and signal.id in handed - taken and not kept:
                sentence = f"signal {signal.id} was handed to a step, and outlived its outcome"
                yield history.violation("I6", sentence, each, run.began, change)


def _retries(change: InstanceChange) -> bool:
    old, new = change.old, change.new
    return old is not None and new is not None and new.status == "runnable" and new.visit == old.visit


def _run_of(history: History, change: InstanceChange) -> StepRun | None:
    old = change.old
    if old is None or old.claim_id is None:
        return None
    return history.runs.get((old.claim_id, old.visit))


def _handed(run: StepRun) -> frozenset[int]:
    return frozenset() if run.began is None else frozenset(run.began.data.get("awaited", ()))


def i7_no_wake_up_is_lost(history: History) -> list[Violation]:
    """No instance sleeps although its signal is there, and no due row stays unclaimed.

    * A signal wakes a parked instance in the signal's transaction; a park that finds a signal wakes in the park's.
      Signals that the parked step received and keeps do not count.
    * An acknowledged signal (`note("sent", id=…, name=…, dedup=…)`) was written.
    * At the end no row, parked or runnable, is due for longer than `patience` while its queue is quiet.
    """
    return [*_slept_on(history), *_lost_signals(history), *_stuck(history)]


def _slept_on(history: History) -> Iterator[Violation]:
    for target, inbox in history.signal_changes.items():
        rows = (change for change, _ in history.by_instance.get(target, ()))
        events: list[InstanceChange | SignalChange] = [*rows, *inbox]
        events.sort(key=lambda event: event.seq)
        unread: dict[int, SignalChange] = {}
        row: InstanceChange | None = None
        kept: frozenset[int] = frozenset()
        for event, after in zip(events, [*events[1:], None], strict=True):
            if isinstance(event, InstanceChange):
                row = event
                if event.old is not None and event.old.status == "executing":
                    kept = _keeps(history, event, unread)
            elif event.old is None:
                unread[event.signal.id] = event
            else:
                unread.pop(event.signal.id, None)
            committed = after is None or after.txid != event.txid
            if committed and row is not None and row.new is not None:
                for signal in [each for each in unread.values() if _awaits(row.new, each.signal, kept)]:
                    del unread[signal.signal.id]  # report it once
                    name = signal.signal.name
                    sentence = f"it awaits {name!r}, signal {signal.signal.id} is there, and it sleeps on"
                    yield history.violation("I7", sentence, row, signal)


def _keeps(history: History, park: InstanceChange, unread: Iterable[int]) -> frozenset[int]:
    """The signals that this step received: it may keep them and sleep. If that is unknown, all that were there."""
    run = _run_of(history, park)
    handed = None if run is None or run.began is None else _handed(run)
    return frozenset(unread) if handed is None or len(handed) >= SHOWN else handed


def _awaits(row: InstanceState, signal: SignalState, kept: frozenset[int]) -> bool:
    return row.status == "awaiting_signal" and signal.name in (row.awaits or ()) and signal.id not in kept


def _lost_signals(history: History) -> Iterator[Violation]:
    written = Counter[tuple[int, object, object]]()
    for target, changes in history.signal_changes.items():
        for change in changes:
            if change.old is None:
                written[target, change.signal.name, change.signal.dedup_key] += 1
    for note in history.notes("sent"):
        if note.id is None:
            continue
        name, dedup = note.data.get("name"), note.data.get("dedup")
        key = (note.id, name, dedup)
        if not written[key]:
            yield history.violation("I7", f"signal {name!r} was acknowledged, and never written", note)
        elif dedup is None:
            written[key] -= 1


def _stuck(history: History) -> Iterator[Violation]:
    """Rows that were claimable at the end, and that nobody claimed."""
    picks: dict[str, float] = {}
    running: set[str | None] = {
        row.partition_key for row in history.rows.values() if row.status == "executing"
    }
    for change, move in history.moves:
        if move == "claimed" and change.new is not None:
            picks[change.new.queue] = max(change.at, picks.get(change.new.queue, 0.0))
    for number, row in history.rows.items():
        last = next(iter(reversed(history.by_instance.get(number, ()))), (None, None))[0]
        since = _due_since(row, last)
        if since is None or (row.partition_key is not None and row.partition_key in running):
            continue
        since = max(since, picks.get(row.queue, 0.0))
        waited = history.ended - since - history.away(since, history.ended)
        if waited > history.patience:
            held = " (held behind its key)" if row.hold else ""
            sentence = f"it is {row.status}{held} and due, and nobody took it for {waited:.1f} s"
            yield history.violation("I7", sentence, last)


def _due_since(row: InstanceState, last: InstanceChange | None) -> float | None:
    """Since when it is due; None: it is not, or no worker knows its machine."""
    if row.status == "runnable" and row.hold <= 1:
        return max(row.eligible_at, 0.0 if last is None else last.at)
    if row.status in {"awaiting_signal", "awaiting_children"}:
        return row.await_deadline
    return None


def i9_one_step_per_key(history: History) -> list[Violation]:
    """One step of a partition key runs at a time, and due rows run in order.

    * In the database: never two executing rows of a key.
    * In the effect log: a run begins after the last event of the previous run, whatever became of that run's claim; a
      thread that outlives its lease keeps its key. Sessions hold the keys, so after a loss of sessions a step has
      `margin` seconds of running time to be cancelled; a thread, which cannot be cancelled, is excused.
    * A pick takes the first due row of a key by (priority, eligible_at, id), among the rows that were committed when it
      began and whose machine its worker knows. A step runs ahead only if no row of its key is due.
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
    """Whether the first run could not know that its key was lost, or could not be cancelled."""
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
            ahead = move in OUTCOMES and new is not None and new.status == "executing"
            for other in siblings[old.partition_key].values():
                row = other.new
                if not (ahead or move == "claimed") or row is None or not _was_due(history, other, change):
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
    """Whether the other row was certainly committed and due when the transaction of this change began."""
    row = other.new
    return (
        row is not None
        and row.status == "runnable"
        and row.hold in _KEEPING
        and not history.queue_paused(row, change.at)
        and row.eligible_at <= change.began
        and history.ended_by.get(other.txid, change.began + 1) <= change.began
    )


_KEEPING: Final = frozenset({OFFERED, *(hold.number for hold in HOLDS if hold.keeps_place)}) - {SHELVED}
"""The holds of rows that keep their place in their partition key, whatever the picking node knows."""


def _known_steps(history: History) -> Mapping[str, frozenset[tuple[str, int, str]]]:
    """By owner: the steps that its code certainly has, because it has claimed such rows."""
    found: dict[str, set[tuple[str, int, str]]] = defaultdict(set)
    for change, move in history.moves:
        if move == "claimed" and change.new is not None and change.new.locked_by is not None:
            found[change.new.locked_by].add((change.new.fsm, change.new.version, change.new.step))
    return {owner: frozenset(steps) for owner, steps in found.items()}


def i10_unique_keys_are_unique(history: History) -> list[Violation]:
    """One instance at a time occupies a unique key. It does so while its status is in the key's scope."""
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
    """A barrier opens once, when its join holds or its deadline has passed, and counts each child's end once.

    * The children are inserted in the transaction that parks the parent, as many as `children_total` says.
    * A change of the counter equals the number of children that ended (or were retried) in the same transaction.
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
                if move in OUTCOMES and change.new is not None and change.new.visit == barrier
            ),
            None,
        )
        born = [change for change, move in children if move == "started"]
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


def _families(history: History) -> Mapping[tuple[int, int], _Moves]:
    """By parent and barrier: the moves of the children."""
    found: dict[tuple[int, int], list[tuple[InstanceChange, MoveName | None]]] = defaultdict(list)
    for change, move in history.moves:
        row = change.new or change.old
        if row is not None and row.parent_id is not None and row.barrier is not None:
            found[row.parent_id, row.barrier].append((change, move))
    return found


_COUNTING: Final = frozenset({"child_ended", "recounted", "joined", "expired"})
"""What may happen to a barrier."""


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
        if move not in _COUNTING:
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
        failed = old.wake_on_failure and any(each.new and each.new.status != "done" for each in ended)
        if move in {"joined", "expired"}:
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
    """A barrier that is closed at the end although its children have ended."""
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
