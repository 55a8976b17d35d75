"""Parts of I13: what is paused starts nothing, and what a person decides counts once. Pure."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any, Final

import attrs
from durable_actors._store.holds import PAUSED
from durable_actors._store.move_parts import MoveName
from durable_actors._store.moves import OUTCOMES
from tests.invariants.changes import InstanceChange, InstanceState, ReceiptRow
from tests.invariants.effect_log import Effect
from tests.invariants.history import History, Violation
from tests.invariants.notes import ANSWERED

DECISIONS: Final[Mapping[MoveName, str]] = {
    "proceeded": "proceed",
    "approved": "approve",
    "rejected": "reject",
}
"""Moves by which a person has decided, and the command of each."""


def paused_and_run(history: History) -> Iterator[Violation]:
    """Between its pause and its resume an instance enters no step, in the order of the transactions of its row.

    A step that runs when the pause is asked for finishes, and the instance does not run ahead. A pause ends only by
    `resume`, with the instance, or with a cancel that it compensates.
    """
    for changes in history.by_instance.values():
        since: InstanceChange | None = None
        for change, move in changes:
            old, new = change.old, change.new
            since = change if move == "paused" else since
            if old is None or new is None or not old.paused or old.ended:
                continue
            if _enters(old, new):
                yield history.violation("I13", "it was paused, and entered a step", since, change)
            if not (new.paused or new.ended or new.asked_to_end or move in {"resumed", "compensating"}):
                yield history.violation("I13", "its pause ended, and nobody has resumed it", since, change)
            if new.paused and new.status == "runnable" and new.hold != PAUSED:
                yield history.violation("I13", "it is paused, and offered", since, change)


def _enters(old: InstanceState, new: InstanceState) -> bool:
    same = (old.status, old.claim_id, old.visit) == (new.status, new.claim_id, new.visit)
    return new.status == "executing" and not same


@attrs.frozen
class QueuePause:
    """A time for which a queue, or a machine in it, was certainly paused."""

    receipt: ReceiptRow
    answer: Effect
    queue: str
    machine: str | None
    since: float
    until: float

    def holds(self, row: InstanceState) -> bool:
        """Whether it concerns this row."""
        return self.queue == row.queue and self.machine in {None, row.fsm}


def certain_pauses(history: History) -> list[QueuePause]:
    """From the answer of a pause until its end, or until somebody began to resume or to change it."""
    answers = {
        (note.data.get("target"), note.data.get("key")): note
        for note in reversed(history.notes(ANSWERED))
        if note.data.get("command") == "pause" and note.id is None and "answer" in note.data
    }
    by_target: dict[str, list[ReceiptRow]] = defaultdict(list)
    for receipt in history.receipts:
        if receipt.scope == "queue":
            by_target[receipt.target].append(receipt)
    found: list[QueuePause] = []
    for receipts in by_target.values():
        for index, receipt in enumerate(receipts):
            answer = answers.get((receipt.target, receipt.key))
            if receipt.command != "pause" or answer is None:
                continue
            result: Mapping[str, Any] = receipt.result
            ends = [each.began for each in receipts[index + 1 :]]
            if result["until"] is not None:
                ends.append(datetime.fromisoformat(result["until"]).timestamp())
            since, until = history.at(answer) + history.doubt, min(ends, default=math.inf)
            if since < until:
                found.append(QueuePause(receipt, answer, result["queue"], result["machine"], since, until))
    return found


def started_in_paused_queues(history: History) -> Iterator[Violation]:
    """No pick that began after the answer of a pause claims a row of its queue, until somebody resumes it."""
    pauses = certain_pauses(history)
    for change, move in history.moves:
        if move != "claimed" or change.new is None:
            continue
        for pause in pauses:
            if pause.holds(change.new) and pause.since < change.began and change.at < pause.until:
                sentence = f"it was claimed, and {pause.receipt.target} was paused"
                yield history.violation("I13", sentence, pause.receipt, pause.answer, change)


def wrong_decisions(history: History) -> Iterator[Violation]:
    """Each boundary is resolved by one command, which the row tells; and the step is told what the row says."""
    for change, move in history.moves:
        if move is None or move not in DECISIONS:
            continue
        receipts = [each for each in history.commanded(change) if each.command in DECISIONS.values()]
        if len(receipts) != 1:
            sentence = f"it was {move} by {len(receipts)} commands"
            yield history.violation("I13", sentence, *receipts, change)
        elif change.new is not None and change.new.decision is not None:
            [receipt], told = receipts, change.new.decision
            given = (receipt.command, receipt.by, receipt.data.get("comment"))
            if given != (DECISIONS[move], told.get("by"), told.get("comment")):
                yield history.violation("I13", "its row tells another decision", receipt, change)
    for key, run in history.runs.items():
        entry, began = history.entries.get(key), run.began
        if entry is None or entry.new is None or began is None:
            continue
        told = {name: value for name, value in (entry.new.decision or {}).items() if name != "at"}
        if began.data.get("decision", {}) != told and not _taken_before(history, key, began):
            yield history.violation("I13", f"a step was told another decision than {told}", entry, began)


def _taken_before(history: History, key: tuple[str, int], began: Effect) -> bool:
    """Whether the claim was taken away before its step began: what that reads is another's, and none of it counts."""
    change, move = history.exits.get(key, (None, None))
    return change is not None and move not in OUTCOMES and change.at < history.at(began) + history.doubt
