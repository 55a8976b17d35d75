"""I13 and I14: what commands have answered, and what retention deletes. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import attrs
from durable_actors._store.move_parts import MoveName
from tests.invariants.cascades import broken_families, by_cascade
from tests.invariants.changes import InstanceChange, InstanceState, ReceiptRow
from tests.invariants.effect_log import Effect
from tests.invariants.history import XIDS, History, Violation
from tests.invariants.notes import ANSWERED, ASKED
from tests.invariants.pauses import paused_and_run, started_in_paused_queues, wrong_decisions

HAIR: Final = 0.01
"""Seconds: instants are rounded on the way."""

EFFECTS: Final[Mapping[str, Mapping[object, MoveName]]] = {
    "cancel": {"cancelled": "cancelled", "requested": "requested"},
    "retry": {None: "revived"},
    "pause": {None: "paused"},
    "resume": {None: "resumed"},
    "run_now": {"hastened": "hastened", "paused": "hastened"},
    "proceed": {None: "proceeded"},
    "approve": {None: "approved"},
    "reject": {None: "rejected"},
}
"""By command and answer (None: any): what it does to its instance, in the transaction of its receipt."""
COMMANDS: Final[Mapping[MoveName, str]] = {
    "requested": "cancel",
    "paused": "pause",
    "resumed": "resume",
    "hastened": "run_now",
    "proceeded": "proceed",
    "approved": "approve",
    "rejected": "reject",
}
"""Moves that only a command makes; I8 looks after `revived`."""


def effect_of(receipt: ReceiptRow) -> MoveName | None:
    """The move that this command makes; None: unknown."""
    moves: Mapping[object, MoveName] = EFFECTS.get(receipt.command, {})
    answer = receipt.result if isinstance(receipt.result, str) else None
    return moves[answer] if answer in moves else moves.get(None)


def i13_commands_do_what_they_answered(history: History) -> list[Violation]:
    """A command is carried out once, or not at all; what it answered is so.

    * A command that was answered has one receipt, which says the same; one that was refused has none.
    * Receipt and effect are in one transaction, which was committed before the answer came.
    * Only commands cancel, and ask a node for anything. After "cancelled" nothing is written until a retry (I8); an
      instance that was asked to end is done or cancelled next, whoever ends its claim, and enters no other step.
    * Who is cancelled with its children has none left that nobody has cancelled; who compensates ends as cancelled,
      after its step (`cascades`).
    * What is paused starts nothing until it is resumed, and a decision counts once (`pauses`, `decisions`).
    """
    return [
        *_wrong_answers(history),
        *_without_effect(history),
        *_uncommanded(history),
        *_not_overruled(history),
        *paused_and_run(history),
        *started_in_paused_queues(history),
        *wrong_decisions(history),
        *broken_families(history),
    ]


@attrs.define
class _Attempts:
    """What is known of one command: all attempts with its key."""

    asked: list[Effect] = attrs.field(factory=list[Effect])
    answered: list[Effect] = attrs.field(factory=list[Effect])


def _wrong_answers(history: History) -> Iterator[Violation]:
    commands: dict[tuple[object, ...], _Attempts] = defaultdict(_Attempts)
    for note in history.notes(ASKED):
        commands[_name(note)].asked.append(note)
    for note in history.notes(ANSWERED):
        commands[_name(note)].answered.append(note)
    receipts: dict[tuple[object, ...], list[ReceiptRow]] = defaultdict(list)
    for receipt in history.receipts:
        receipts[receipt.command, receipt.target, receipt.key].append(receipt)
    for name, attempts in commands.items():
        found = receipts.get(name, [])
        if len(found) > 1:
            sentence = f"{name[0]} with key {name[2]!r} was carried out {len(found)} times"
            yield history.violation("I13", sentence, *attempts.asked, *found)
        told = [note for note in attempts.answered if "refused" not in note.data]
        for note in told:
            yield from _wrong_answer(history, note, found)
        # An attempt without an answer may have been carried out after the others were refused.
        if not told and found and len(attempts.answered) == len(attempts.asked):
            sentence = f"{name[0]} was refused, and carried out"
            yield history.violation("I13", sentence, *attempts.answered, *found)


def _name(note: Effect) -> tuple[object, ...]:
    """Which command it is: what, on what, with which key."""
    target = note.data.get("target") if note.id is None else str(note.id)
    return note.data.get("command"), target, note.data.get("key")


def _wrong_answer(history: History, note: Effect, found: Sequence[ReceiptRow]) -> Iterator[Violation]:
    command, answer = note.data.get("command"), note.data.get("answer")
    if not found:
        sentence = f"{command} was answered {answer!r}, and there is no receipt"
        yield history.violation("I13", sentence, note)
        return
    receipt = found[0]
    if receipt.told != answer:
        sentence = f"{command} was answered {answer!r}, and its receipt says {receipt.told!r}"
        yield history.violation("I13", sentence, note, receipt)
    made = [each for each, _ in history.by_instance.get(note.id or 0, ()) if each.txid % XIDS == receipt.xid]
    at = history.at(note) + history.doubt
    if made and at < max(made[0].at, history.open_until.get(made[0].txid, 0.0)):
        yield history.violation("I13", f"{command} was answered before it was committed", note, made[0])


def _without_effect(history: History) -> Iterator[Violation]:
    for receipt in history.receipts:
        expected, number = effect_of(receipt), receipt.instance
        if expected is None or number is None or number not in history.by_instance:
            continue
        here = [move for change, move in history.by_instance[number] if change.txid % XIDS == receipt.xid]
        # Who compensates was asked to end, whether a step ran or not.
        if expected not in here and not (expected == "requested" and "compensating" in here):
            told = f"{receipt.command}: {receipt.result!r}"
            sentence = f"a receipt says {told}, and its transaction has not {expected} it"
            yield history.violation("I13", sentence, receipt)


def _uncommanded(history: History) -> Iterator[Violation]:
    for change, move in history.moves:
        if move is None or change.old is None or change.new is None:
            continue
        commands = {receipt.command for receipt in history.commanded(change)}
        if move in COMMANDS and COMMANDS[move] not in commands and not by_cascade(change):
            yield history.violation("I13", f"it was {move} without a command", change)
        asked = change.old.asked_to_end or change.old.cancellation is not None
        if move in {"cancelled", "compensating"} and not (
            "cancel" in commands or asked or by_cascade(change)
        ):
            yield history.violation("I13", "it was cancelled, and nobody had asked for that", change)


def _not_overruled(history: History) -> Iterator[Violation]:
    for changes in history.by_instance.values():
        asked: InstanceChange | None = None
        for change, move in changes:
            if move == "requested":
                asked = change
            old, new = change.old, change.new
            if old is None or new is None or not old.asked_to_end or old.ended:
                continue
            if not _ends_as_asked(old, new):
                sentence = f"it was asked to end, and went on: {move or 'no move'}"
                yield history.violation("I13", sentence, asked, change)


def _ends_as_asked(old: InstanceState, new: InstanceState) -> bool:
    """Whether an instance that was asked to end is still where it was, or has ended as it may."""
    same = (new.status, new.claim_id, new.visit) == (old.status, old.claim_id, old.visit)
    compensates = old.cancellation is None and new.cancellation is not None
    return new.status in {"done", "cancelled"} or same or compensates


def i14_retention_removes_nothing_that_lives(history: History) -> list[Violation]:
    """A row is deleted only when it has ended, long enough ago, and nobody may need it.

    * Not while it occupies its unique key.
    * Not while its parent may read it: a parent that is not done has the children of its current barrier, and those
      that it started.

    I1 reports a live row that was deleted; I6 a signal of a live one.
    """
    found: list[Violation] = []
    rows: dict[int, InstanceState] = {}
    ends: dict[int, InstanceChange] = {}
    gone = {(change.instance, change.txid) for change, _ in history.moves if change.new is None}
    for change, _ in history.moves:
        old, new = change.old, change.new
        if new is not None:
            rows[new.id] = new
            if new.ended and not (old is not None and old.ended):
                ends[new.id] = change
            continue
        rows.pop(change.instance, None)
        if old is None or not old.ended:
            continue
        end = ends.get(old.id)
        age = history.retention if end is None else change.began - end.began
        if age < history.retention - HAIR:
            sentence = (
                f"it was deleted {age:.2f} s after its end, and is to be kept for {history.retention:g} s"
            )
            found.append(history.violation("I14", sentence, end, change))
        if old.occupies is not None:
            found.append(history.violation("I14", "it was deleted, and occupied its unique key", end, change))
        parent = None if old.parent_id is None else rows.get(old.parent_id)
        if parent is None or parent.status == "done" or (parent.id, change.txid) in gone:
            continue
        if old.barrier is None or old.barrier >= parent.visit:
            sentence = f"it was deleted, and its parent {parent.id}, which is {parent.status}, may read it"
            found.append(history.violation("I14", sentence, end, change))
    return found
