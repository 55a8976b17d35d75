"""The parts of I13 about families: children that are cancelled with their parent, and steps that compensate. Pure."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, Final

from durable_actors._store.move_parts import MoveName
from tests.invariants.changes import InstanceChange, InstanceState
from tests.invariants.history import History, Violation

CLOSING: Final = "closing:"
"""How the keys of commands begin that end, after a run, what nothing else ends."""
RESTS: Final = frozenset({"chaos.Rest"})
"""Machines whose barriers cancel the rest of the children when they open."""
COMPENSATES: Final = {"chaos.Undo": "undo"}
"""Machines with a step that compensates, and that step."""

Moves = Sequence[tuple[InstanceChange, MoveName | None]]


def asked(row: InstanceState | None) -> dict[str, Any]:
    """What is asked of it."""
    return {} if row is None or row.request is None else json.loads(row.request)


def by_cascade(change: InstanceChange) -> bool:
    """Whether this cancels it, or asks it to end, because of its parent."""
    old, new = change.old, change.new
    if old is None or new is None or new.parent_id is None:
        return False
    if old.cancellation is None and new.cancellation is not None:  # what was asked of it is over then
        return not old.asked_to_end or asked(old).get("parent") == new.parent_id
    if old.asked_to_end and asked(new) == {**asked(old), "children": "cancel"}:
        return True  # it was asked for itself alone
    return asked(new).get("parent") == new.parent_id


def broken_families(history: History) -> Iterator[Violation]:
    """Children of whoever was cancelled with them are cancelled, too, and only they; who compensates does so."""
    children: dict[int, list[int]] = defaultdict(list)
    for number, changes in history.by_instance.items():
        first = changes[0][0].new
        if first is not None and first.parent_id is not None:
            children[first.parent_id].append(number)
    places = {id(change): place for place, (change, _) in enumerate(history.moves)}
    for parent, numbers in children.items():
        causes = [*_causes(history.by_instance.get(parent, ()))]
        for number in numbers:
            mine = history.by_instance[number]
            yield from _without_a_cause(history, mine, causes, places)
            for cause, barrier in causes:
                yield from _left_alone(history, mine, cause, barrier, places)
    for number, changes in history.by_instance.items():
        yield from _not_compensated(history, number, changes)


def _causes(changes: Moves) -> Iterator[tuple[InstanceChange, int | None]]:
    """What cancels the children of an instance: its own end with them, or its barrier, of which only those."""
    for change, move in changes:
        new = change.new
        if new is None:
            continue
        if move in {"cancelled", "compensating"} and (
            asked(new).get("children") == "cancel" or asked(change.old).get("children") == "cancel"
        ):
            yield change, None
        elif move == "joined" and new.fsm in RESTS:
            yield change, new.visit


def _without_a_cause(
    history: History,
    changes: Moves,
    causes: Sequence[tuple[InstanceChange, int | None]],
    places: dict[int, int],
) -> Iterator[Violation]:
    for change, move in changes:
        if move not in {"requested", "cancelled", "compensating"} or not by_cascade(change):
            continue
        if change.old is None or change.old.asked_to_end or history.commanded(change):
            continue  # it was asked before; a command does it
        if not any(places[id(cause)] < places[id(change)] for cause, _ in causes):
            yield history.violation("I13", f"it was {move} with its parent, which was not", change)


def _left_alone(
    history: History, changes: Moves, cause: InstanceChange, barrier: int | None, places: dict[int, int]
) -> Iterator[Violation]:
    """Whether a child that lived then was reached: it was asked, or has ended before anybody had to help."""
    place = places[id(cause)]
    before = [change for change, _ in changes if places[id(change)] < place]
    state = before[-1].new if before else None
    if state is None or state.ended or state.asked_to_end or state.cancellation is not None:
        return
    if barrier is not None and state.barrier != barrier:
        return
    for change, _ in changes:
        if places[id(change)] < place:
            continue
        if change.txid == cause.txid and change.new is not None and change.new.ended:
            return  # its own end has opened the barrier
        helped = any((each.key or "").startswith(CLOSING) for each in history.commanded(change))
        if by_cascade(change) or (change.new is not None and change.new.ended and not helped):
            return
        if helped and change.new is not None and (change.new.ended or change.new.asked_to_end):
            sentence = "its parent was cancelled with its children, and nobody has cancelled it"
            yield history.violation("I13", sentence, cause, change)
            return


def _not_compensated(history: History, number: int, changes: Moves) -> Iterator[Violation]:
    for change, move in changes:
        old, new = change.old, change.new
        if old is None or new is None or old.ended:
            continue
        if new.cancellation is not None and new.status in {"done", "failed"}:
            yield history.violation("I13", f"it compensates, and is {new.status}", change)
        if new.fsm not in COMPENSATES or move != "cancelled":
            continue
        commanded = any(each.command == "cancel" for each in history.commanded(change))
        if commanded or old.crashes or (new.fsm, COMPENSATES[new.fsm]) not in history.instrumented:
            continue  # by force; given up
        if old.cancellation is None:
            yield history.violation("I13", "it was cancelled, and did not compensate", change)
            continue
        runs = (run for (_, visit), run in history.runs.items() if visit >= 1 and run.events[0].id == number)
        if not any(run.events[0].step == COMPENSATES[new.fsm] and run.outcome is not None for run in runs):
            sentence = f"it ended, and its step {COMPENSATES[new.fsm]!r} has not come to its end"
            yield history.violation("I13", sentence, change)
