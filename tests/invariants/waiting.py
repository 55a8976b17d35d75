"""I6 and I7: signals and wake-ups. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from tests.invariants.changes import InstanceChange, InstanceState, SignalChange, SignalState
from tests.invariants.history import History, StepRun, Violation
from tests.invariants.moves import Move

SHOWN: Final = 1000
"""Signals that a step is handed at most; beyond them nobody knows from outside what it was given."""


def i6_consumed_by_what_saw_it(history: History) -> list[Violation]:
    """A signal leaves the inbox in the very transaction that commits the step which was handed it (or named it).

    * Next and ScheduleChildren take all that was handed, Await what it does not await again, Retry nothing.
    * `Done` drops the inbox, and nothing is left of it. A failure takes nothing: the instance may be retried.
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


_Moves = Sequence[tuple[InstanceChange, Move]]


def _by_transaction(history: History) -> Mapping[tuple[int, int], _Moves]:
    """What a transaction did to an instance: a park, and the wake of its recheck, say."""
    found: dict[tuple[int, int], list[tuple[InstanceChange, Move]]] = defaultdict(list)
    for change, move in history.moves:
        found[change.instance, change.txid].append((change, move))
    return found


def _taken(history: History, taken: SignalChange, moves: _Moves) -> Iterator[Violation]:
    """Whether this transaction may take this signal."""
    if any(
        change.new is None or (change.new.status == "done" and move is not Move.FOREIGN)
        for change, move in moves
    ):
        return
    commit = next((change for change, move in moves if move is Move.COMMIT), None)
    if commit is None or commit.old is None or commit.new is None:
        others = [change for change, _ in moves]
        yield history.violation("I6", "a signal was consumed by no outcome of its instance", taken, *others)
        return
    if _retries(commit):
        yield history.violation("I6", "a retry consumed a signal", commit, taken)
    if commit.new.status == "failed":
        yield history.violation("I6", "a failure consumed a signal", commit, taken)
    run = _run_of(history, commit)
    if run is None or run.began is None:
        return
    allowed = _handed(run)
    if run.outcome is None:
        allowed |= frozenset(run.began.data.get("signals", ()))  # it may have named any that it saw
    else:
        allowed |= frozenset(run.outcome.data.get("consumed") or ())
    if taken.signal.id not in allowed:
        sentence = f"signal {taken.signal.id} was consumed by a step that was not given it"
        yield history.violation("I6", sentence, run.began, commit, taken)


def _not_taken(history: History) -> Iterator[Violation]:
    """Signals that a step was handed, and that outlived its outcome."""
    for change, move in history.moves:
        new = change.new
        if move is not Move.COMMIT or new is None or new.ended or _retries(change):
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
    """Whoever awaits a signal that is there is awake, and whatever is due is done.

    * A signal wakes a parked instance in its own transaction; a park that finds a signal wakes in its own. Signals that
      the parked step was handed and keeps do not count.
    * A signal that was acknowledged (`note("sent", id=…, name=…, dedup=…)`) was written.
    * At the end no row is due for longer than `patience`, parked or runnable, while its queue is quiet.
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
                    del unread[signal.signal.id]  # told once
                    name = signal.signal.name
                    sentence = f"it awaits {name!r}, signal {signal.signal.id} is there, and it sleeps on"
                    yield history.violation("I7", sentence, row, signal)


def _keeps(history: History, park: InstanceChange, unread: Iterable[int]) -> frozenset[int]:
    """The signals that this outcome's step was handed, and may sleep on. If that is not known: any that were there."""
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
    """Rows that waited at the end although nothing kept anybody from taking them."""
    picks: dict[str, float] = {}
    running: set[str | None] = {
        row.partition_key for row in history.rows.values() if row.status == "executing"
    }
    for change, move in history.moves:
        if move is Move.PICK and change.new is not None:
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
    """Since when it waits for nothing; None: it does wait, or no worker knows its machine."""
    if row.status == "runnable" and row.hold <= 1:
        return max(row.eligible_at, 0.0 if last is None else last.at)
    if row.status in {"awaiting_signal", "awaiting_children"}:
        return row.await_deadline
    return None
