"""I1 and I5: what steps did, compared with what was committed, and when. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from tests.invariants.changes import InstanceChange
from tests.invariants.effect_log import BEGIN, END, LEFT, OUTAGE, SESSIONS_LOST, Effect
from tests.invariants.history import History, StepRun, Violation
from tests.invariants.moves import Move


def i1_commit_before_proceed(history: History) -> list[Violation]:
    """A step runs only from a committed row, and a row goes on only by an outcome that a step had reached.

    * What a step was told when it began (visit, step, attempt) is a committed row under its claim, committed by then.
      Only a crash of the server may forget the claim itself, of a row without a key.
    * A commit comes after the end of its step, and is what the step returned (or what `handle` made of it).
    * What somebody was told is committed (`note("inserted", id=…)`) is there; a live instance is not deleted.

    Steps run at least once: a begin without a commit is no violation.
    """
    return [
        *_unfounded_runs(history),
        *_unfounded_commits(history),
        *_lost_inserts(history),
        *(
            history.violation("I1", "a live instance was deleted", change)
            for change, move in history.moves
            if move is Move.DELETE and change.old is not None and not change.old.ended
        ),
    ]


def _unfounded_runs(history: History) -> Iterator[Violation]:
    for key, run in history.runs.items():
        began = run.began
        if began is None:
            continue
        entry = history.entries.get(key)
        if entry is None or entry.new is None or entry.instance != began.id:
            if _forgotten(history, began):
                continue
            others = [change for change, _ in history.by_instance.get(began.id or 0, ())]
            sentence = "a step began under a claim and visit that were never committed"
            yield history.violation("I1", sentence, began, *others[-1:])
            continue
        told = (began.step, began.attempt, began.fsm)
        if told != (entry.new.step, entry.new.attempt, entry.new.fsm):
            yield history.violation("I1", "a step began that is not the one in the row", entry, began)
        at = history.at(began) + history.doubt
        if at < entry.at:
            yield history.violation("I1", "a step began before the row was written", began, entry)
        elif at < history.open_until.get(entry.txid, 0.0):
            yield history.violation("I1", "a step began before the row was committed", began, entry)


def _forgotten(history: History, began: Effect) -> bool:
    """Whether a crash of the server may have forgotten its claim.

    A pick of rows without a key does not wait for the disk; the row that it claimed was committed all the same, and is
    claimed again. A visit that was entered under the forgotten claim would be a lost commit.
    """
    first, last = began.at - int(history.lease * 1e9), began.at + int((1 + history.margin) * 1e9)
    crashes = (effect.at for kind in (OUTAGE, SESSIONS_LOST) for effect in history.notes(kind))
    if not any(first <= at <= last for at in crashes):
        return False
    told = (began.visit, began.step, began.attempt, began.fsm)
    return any(
        (new.visit, new.step, new.attempt, new.fsm) == told
        for change, _ in history.by_instance.get(began.id or 0, ())
        if (new := change.new) is not None
        and new.status == "runnable"
        and new.partition_key is None
        and change.at <= history.at(began) + history.doubt
    )


def _unfounded_commits(history: History) -> Iterator[Violation]:
    for change, move in history.moves:
        old, new = change.old, change.new
        if move is not Move.COMMIT or old is None or new is None or old.claim_id is None:
            continue
        run = history.runs.get((old.claim_id, old.visit))
        if run is None:
            advances = new.visit > old.visit or new.status == "done"
            if advances and (old.fsm, old.step) in history.instrumented:
                yield history.violation("I1", "an outcome was committed of a step that never ran", change)
            continue
        ended = run.ended
        if ended is not None and history.at(ended) - history.doubt > change.at:
            sentence = "an outcome was committed before its step had ended"
            yield history.violation("I1", sentence, run.began, change, ended)
        elif (told := run.outcome) is not None and not _agrees(told, run, change):
            sentence = f"the step returned {told.data['outcome']}, and something else was committed"
            yield history.violation("I1", sentence, run.began, told, change)


_STATUSES: Final[Mapping[str, frozenset[str]]] = {
    "Next": frozenset({"runnable", "executing"}),
    "Retry": frozenset({"runnable"}),
    "Await": frozenset({"awaiting_signal"}),
    "ScheduleChildren": frozenset({"awaiting_children", "runnable"}),
    "Done": frozenset({"done"}),
    "Stop": frozenset({"failed"}),
}


def _agrees(told: Effect, run: StepRun, change: InstanceChange) -> bool:
    """Whether the row went where the outcome says.

    An outcome that cannot be stored goes through `handle`, which may return any; without one of its own it fails.
    """
    old, new = change.old, change.new
    statuses = _STATUSES.get(str(told.data["outcome"]))
    if old is None or new is None or statuses is None or new.status == "failed":
        return True
    if any(event.kind == "handle" for event in run.events):
        return True
    if new.status not in statuses:
        return False
    entered = told.data.get("next")
    if entered is None:
        return new.visit == old.visit
    parked = new.status in {"awaiting_signal", "awaiting_children"}
    return new.visit == old.visit + 1 and entered == (new.await_step if parked else new.step)


def _lost_inserts(history: History) -> Iterator[Violation]:
    for note in history.notes("inserted"):
        if note.id is not None and note.id not in history.by_instance and note.id not in history.rows:
            yield history.violation("I1", "an insert was acknowledged, and the instance is not there", note)


def i5_inside_the_trust_window(history: History) -> list[Violation]:
    """No step begins, or goes on, after its lease by more than the margin; and none after its claim was given back.

    * The lease is the latest that was granted by then. A claim that a reaper took early, from a node that seemed
      dead, is trusted by its worker until it hears of that: the fence refuses its outcome.
    * Time in which the process stood still does not count: nobody can stop code that does not run.
    * Code in a thread cannot be cancelled: it may end late, but not begin late. Its row is not given back before.
    """
    found: list[Violation] = []
    leases = _leases(history)
    for (claim, visit), run in history.runs.items():
        granted = leases.get(claim, ())
        for event in run.events:
            if event.kind == BEGIN or (event.kind in {END, LEFT} and not run.threaded):
                found.extend(_overrun(history, event, granted))
        ended, exit_ = run.ended, history.exits.get((claim, visit))
        if ended is not None and exit_ is not None and exit_[1] in {Move.RELEASE, Move.CRASH}:
            released = exit_[0]
            if history.at(ended) - history.doubt > released.at:
                sentence = "its claim was given back while its step ran"
                found.append(history.violation("I5", sentence, run.began, released, ended))
    return found


def _leases(history: History) -> Mapping[str, Sequence[InstanceChange]]:
    """By claim: the changes that granted or extended its lease."""
    found: dict[str, list[InstanceChange]] = defaultdict(list)
    for change, move in history.moves:
        new = change.new
        if move in {Move.PICK, Move.RENEW} and new is not None and new.claim_id is not None:
            found[new.claim_id].append(change)
    return found


def _overrun(history: History, event: Effect, granted: Sequence[InstanceChange]) -> Iterator[Violation]:
    at = history.at(event)
    known = [change for change in granted if change.at <= at + history.doubt]
    lease = max((change for change in known), key=_until, default=None)
    if lease is None:
        return  # I1's business
    over = at - _until(lease)
    if over <= history.margin + history.doubt:
        return
    ran = over - history.paused(event.pid, event.at - int(over * 1e9), event.at)
    if ran > history.margin + history.doubt:
        sentence = f"a step ran {ran:.2f} s beyond its lease"
        yield history.violation("I5", sentence, lease, event)


def _until(change: InstanceChange) -> float:
    return 0.0 if change.new is None else change.new.lease_expires_at or 0.0
