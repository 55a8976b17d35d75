"""I1 to I5, I8 and I12: who may run a step and write a row. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Final

from durable_actors._store.move_parts import MoveName
from durable_actors._store.moves import MOVES, OUTCOMES
from tests.invariants.changes import InstanceChange, InstanceState, is_snapshot
from tests.invariants.effect_log import BEGIN, END, LEFT, OUTAGE, SESSIONS_LOST, Effect
from tests.invariants.history import History, StepRun, Violation


def i1_commit_before_proceed(history: History) -> list[Violation]:
    """A step runs only from a committed row, and a row advances only by an outcome that its step had reached.

    * When a step begins, a row with its claim, visit, step and attempt is committed. Exception: a crash of the server
      may lose the claim of a row without a partition key.
    * A commit follows the end of its step, and is what the step (or `handle`) returned.
    * An acknowledged insert (`note("inserted", id=…)`) is there, and no live instance is deleted, but by the commit of
      the step that ended it (`keep=0`).

    Steps run at least once, so a begin without a commit is no violation.
    """
    return [
        *_unfounded_runs(history),
        *_unfounded_commits(history),
        *_lost_inserts(history),
        *(
            history.violation("I1", "a live instance was deleted", change)
            for change, _ in history.moves
            if change.new is None
            and change.old is not None
            and not change.old.ended
            and not _finished(history, change, change.old)
        ),
    ]


def _finished(history: History, change: InstanceChange, old: InstanceState) -> bool:
    """Whether this may be the commit of `Done` that deletes the row: its step had ended, and nobody may look for it."""
    run = None if old.claim_id is None else history.runs.get((old.claim_id, old.visit))
    if old.status != "executing" or run is None or run.ended is None or old.parent_id is not None:
        return False
    done = run.outcome is None or run.outcome.data["outcome"] == "Done"
    return done and "done" not in old.unique_scope and history.at(run.ended) - history.doubt <= change.at


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
        step = (began.step, began.attempt, began.fsm)
        if step != (entry.new.step, entry.new.attempt, entry.new.fsm):
            yield history.violation("I1", "a step began that is not the one in the row", entry, began)
        at = history.at(began) + history.doubt
        if at < entry.at:
            yield history.violation("I1", "a step began before the row was written", began, entry)
        elif at < history.open_until.get(entry.txid, 0.0):
            yield history.violation("I1", "a step began before the row was committed", began, entry)


def _forgotten(history: History, began: Effect) -> bool:
    """Whether a crash of the server may have lost its claim.

    A pick of rows without a key does not wait for the disk. The row was committed before the pick, so it can be claimed
    again. But if the step began at a visit that no committed row shows, the server has lost an outcome.
    """
    first, last = began.at - int(history.lease * 1e9), began.at + int((1 + history.margin) * 1e9)
    crashes = (effect.at for kind in (OUTAGE, SESSIONS_LOST) for effect in history.notes(kind))
    if not any(first <= at <= last for at in crashes):
        return False
    step = (began.visit, began.step, began.attempt, began.fsm)
    return any(
        (new.visit, new.step, new.attempt, new.fsm) == step
        for change, _ in history.by_instance.get(began.id or 0, ())
        if (new := change.new) is not None
        and new.status == "runnable"
        and new.partition_key is None
        and change.at <= history.at(began) + history.doubt
    )


def _unfounded_commits(history: History) -> Iterator[Violation]:
    for change, move in history.moves:
        old, new = change.old, change.new
        if not is_commit(change, move) or old is None or new is None or old.claim_id is None:
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
        elif (outcome := run.outcome) is not None and not _agrees(outcome, run, change):
            sentence = f"the step returned {outcome.data['outcome']}, and something else was committed"
            yield history.violation("I1", sentence, run.began, outcome, change)


_STATUSES: Final[Mapping[str, frozenset[str]]] = {
    "Next": frozenset({"runnable", "executing"}),
    "Retry": frozenset({"runnable"}),
    "Await": frozenset({"awaiting_signal"}),
    "Pause": frozenset({"awaiting_signal"}),
    "Approval": frozenset({"awaiting_signal"}),
    "ScheduleChildren": frozenset({"awaiting_children", "runnable"}),
    "Done": frozenset({"done"}),
    "Stop": frozenset({"failed"}),
}


def is_commit(change: InstanceChange, move: MoveName | None) -> bool:
    """Whether this is the commit of an outcome: it keeps the claim's id. A command, a release and a reap clear it."""
    return move in OUTCOMES and (
        move not in {"cancelled", "compensating"}
        or (change.new is not None and change.new.claim_id is not None)
    )


def _agrees(outcome: Effect, run: StepRun, change: InstanceChange) -> bool:
    """Whether the commit is what the outcome demands.

    `handle` receives an outcome that cannot be stored, and may return any other; by default the instance fails. An
    instance whose cancellation was requested is cancelled by any outcome but `Done`; one that compensates by that, too.
    """
    old, new = change.old, change.new
    statuses = _STATUSES.get(str(outcome.data["outcome"]))
    if old is None or new is None or statuses is None or new.status == "failed":
        return True
    if new.status == "cancelled":
        return outcome.data["outcome"] != "Done" or old.cancellation is not None
    if any(event.kind == "handle" for event in run.events):
        return True
    if new.status not in statuses:
        return False
    entered = outcome.data.get("next")
    if entered is None:
        return new.visit == old.visit
    return new.visit == old.visit + 1 and entered == _to_enter(new)


def _to_enter(row: InstanceState) -> str | None:
    """The step that it enters next; the await_step of a boundary is that of its deadline."""
    if row.status not in {"awaiting_signal", "awaiting_children"}:
        return row.step
    return row.await_step if row.manual is None else row.manual.get("then")


def _lost_inserts(history: History) -> Iterator[Violation]:
    for note in history.notes("inserted"):
        if note.id is not None and note.id not in history.by_instance and note.id not in history.rows:
            yield history.violation("I1", "an insert was acknowledged, and the instance is not there", note)


def i2_one_live_claim(history: History) -> list[Violation]:
    """An instance is claimed only while it is runnable, and a claim runs each visit at most once.

    * An unexpired claim is taken only from a worker that is dead, or whose session was lost.
    * Two runs of an instance may overlap, if the first lost its claim and does not know it yet. The fence handles that.
    """
    found: list[Violation] = []
    for change, move in history.moves:
        old, new = change.old, change.new
        if old is None or new is None or not _is_takeover(old, new, move):
            continue
        sentence = (
            "an instance was claimed while another claim of it was live"
            if old.status == "executing"
            else f"an instance that was {old.status} was claimed"
        )
        found.append(history.violation("I2", sentence, _entry_of(history, change), change))
    for run in history.runs.values():
        begins = [event for event in run.events if event.kind == BEGIN]
        if len(begins) > 1:
            sentence = "a step was run twice under one claim"
            found.append(history.violation("I2", sentence, *begins[:2]))
    return [*found, *_robbed(history)]


def _robbed(history: History) -> Iterator[Violation]:
    """Unexpired claims that were taken from workers which recorded events afterwards, and had kept their sessions."""
    pids: dict[str, set[int]] = defaultdict(set)
    last: dict[int, Effect] = {}
    for key, run in history.runs.items():
        entry, began = history.entries.get(key), run.events[0]
        if entry is not None and entry.new is not None and entry.new.locked_by is not None:
            pids[entry.new.locked_by].add(began.pid)
        last[began.pid] = max(last.get(began.pid, began), run.events[-1], key=lambda event: event.at)
    for change, move in history.moves:
        old = change.old
        if move != "reaped" or old is None or old.locked_by is None or old.lease_expires_at is None:
            continue
        if old.lease_expires_at <= change.began or history.cut_before(change):
            continue
        for pid in pids.get(old.locked_by, ()):
            alive = history.at(last[pid]) > change.at + history.doubt
            if alive and not history.woke_before(change, pid):
                sentence = "a claim was taken from a worker that was alive, before its lease was over"
                yield history.violation("I2", sentence, _entry_of(history, change), change, last[pid])


def _is_takeover(old: InstanceState, new: InstanceState, move: MoveName | None) -> bool:
    """Whether this is a claim of a row that was not runnable. I4 covers other changes of a claimed row."""
    if move is not None or new.status != "executing" or old.status == "runnable":
        return False
    return old.status != "executing" or old.claim_id != new.claim_id


def _entry_of(history: History, change: InstanceChange) -> InstanceChange | None:
    old = change.old
    if old is None or old.claim_id is None:
        return None
    return history.entries.get((old.claim_id, old.visit))


def i3_fences_only_grow(history: History) -> list[Violation]:
    """`visit` and `rev` never go back, and no claim id is reused.

    Only a commit increments `visit`, by one. Every move increments `rev`, by one; renewals, and the flag that a signal
    was sent, leave it.
    """
    found: list[Violation] = []
    users: dict[str, InstanceChange] = {}
    for changes in history.by_instance.values():
        last: InstanceChange | None = None
        gone: dict[str, InstanceChange] = {}
        for change, move in changes:
            old, new = change.old, change.new
            if new is None:
                break
            before = old or (last.new if last is not None else None)
            if before is not None:
                sentence = _fence_broken(before.visit, new.visit, before.rev, new.rev, move)
                if sentence is not None:
                    found.append(history.violation("I3", sentence, last, change))
                if before.claim_id is not None and before.claim_id != new.claim_id:
                    gone.setdefault(before.claim_id, change)
            if new.claim_id is not None and new.claim_id in gone:
                sentence = "a claim id came back"
                found.append(history.violation("I3", sentence, gone.pop(new.claim_id), change))
            if move == "claimed" and new.claim_id is not None:
                other = users.setdefault(new.claim_id, change)
                if other is not change:
                    found.append(history.violation("I3", "a claim id was given twice", other, change))
            last = change
    return found


def _fence_broken(old_visit: int, visit: int, old_rev: int, rev: int, move: MoveName | None) -> str | None:
    if visit < old_visit:
        return f"visit went back from {old_visit} to {visit}"
    if visit > old_visit + 1:
        return f"visit went from {old_visit} to {visit}"
    if visit > old_visit and move not in OUTCOMES:
        return "visit grew without an outcome"
    if rev < old_rev:
        return f"rev went back from {old_rev} to {rev}"
    if move is None:
        return None  # I4 reports it
    if rev != old_rev + (move not in _NOT_COUNTED):
        return f"rev went from {old_rev} to {rev} when the row was {move}"
    return None


_NOT_COUNTED: Final = frozenset(move.name for move in MOVES if not move.counts)


def i4_stale_writes_change_nothing(history: History) -> list[Violation]:
    """A live row changes only by the engine's moves, each made by the session that may make it.

    * Any other change was made by a session that did not own the row, or that bypassed the fence.
    * If workers have names (`application_name`), outcomes, renewals and releases come from the worker that made the
      claim.
    * A released claim commits nothing; nor does an expired one if `late_commit="reject"`.
    * The audit misses no write: each change begins where the last one ended.

    I6 and I11 cover what is written along with an outcome (signals, children). I1 covers an outcome that is written
    under another worker's claim before that worker's step ended.
    """
    found: list[Violation] = [*_gaps(history)]
    names = _names(history)
    for change, move in history.moves:
        old, new = change.old, change.new
        if old is None or new is None or old.ended or (history.snapshots and is_snapshot(old, new)):
            continue
        if move is None:
            if not _is_takeover(old, new, move):
                sentence = "a row was changed by somebody who did not own it"
                found.append(history.violation("I4", sentence, _entry_of(history, change), change))
            continue
        if _by_owner(change, move) and old.locked_by is not None:
            known = names.get(old.locked_by, frozenset())
            if known and change.writer not in known:
                sentence = f"{change.writer or 'somebody'} wrote under a claim of {', '.join(sorted(known))}"
                found.append(history.violation("I4", sentence, _entry_of(history, change), change))
        if move in OUTCOMES and history.late_commit == "reject" and old.lease_expires_at is not None:
            # The fence read the lease later than `began`, so a positive difference is proof.
            late = change.began - old.lease_expires_at
            if late > 0:
                sentence = f"an outcome was committed {late:.3f} s after its lease"
                found.append(history.violation("I4", sentence, _entry_of(history, change), change))
    return found


def _by_owner(change: InstanceChange, move: MoveName | None) -> bool:
    """Whether only the owner of the claim writes this."""
    return is_commit(change, move) or move in {"renewed", "released", "crashed", "child_started"}


def _gaps(history: History) -> Iterator[Violation]:
    for number, changes in history.by_instance.items():
        for (before, _), (change, _) in pairwise(changes):
            if change.old != before.new:
                yield history.violation("I4", "a row was changed behind the audit's back", before, change)
        last, row = changes[-1][0], history.rows.get(number)
        if row is not None and row != last.new:
            yield history.violation("I4", "a row was changed behind the audit's back", last)


def _names(history: History) -> Mapping[str, frozenset[str]]:
    """By owner: the names of the sessions that made its claims."""
    found: dict[str, set[str]] = defaultdict(set)
    for change, move in history.moves:
        if move == "claimed" and change.new is not None and change.new.locked_by is not None:
            found[change.new.locked_by].add(change.writer)
    return {owner: frozenset(names) for owner, names in found.items()}


def i5_inside_the_trust_window(history: History) -> list[Violation]:
    """No step begins or continues after its lease by more than the margin, nor after its claim was released.

    * The lease is the latest that was granted by then. If a reaper took a claim early, from a node that seemed dead,
      its worker trusts the lease until it learns of that; the fence refuses the outcome.
    * Time in which the process did not run does not count: code that does not run cannot be stopped.
    * Code in a thread cannot be cancelled: it may end late, but not begin late. Its row is not released before it ends.
    """
    found: list[Violation] = []
    leases, names = _leases(history), _names(history)
    for (claim, visit), run in history.runs.items():
        granted = leases.get(claim, ())
        for event in run.events:
            if event.kind == BEGIN or (event.kind in {END, LEFT} and not run.threaded):
                found.extend(_overrun(history, event, granted))
        ended, exit_ = run.ended, history.exits.get((claim, visit))
        if ended is not None and exit_ is not None and _given_back(*exit_, names):
            released = exit_[0]
            if history.at(ended) - history.doubt > released.at:
                sentence = "its claim was given back while its step ran"
                found.append(history.violation("I5", sentence, run.began, released, ended))
    return found


def _given_back(change: InstanceChange, move: MoveName | None, names: Mapping[str, frozenset[str]]) -> bool:
    """Whether its owner gave the claim back, without an outcome."""
    old = change.old
    if move != "cancelled" or is_commit(change, move) or old is None or old.lease_expires_at is None:
        return move in {"released", "crashed"}
    # Before the end of its lease, and by itself: not reaped. A worker gives no commands.
    return change.writer in names.get(old.locked_by or "", ()) and change.began < old.lease_expires_at


def _leases(history: History) -> Mapping[str, Sequence[InstanceChange]]:
    """By claim: the changes that granted or extended its lease."""
    found: dict[str, list[InstanceChange]] = defaultdict(list)
    for change, move in history.moves:
        new = change.new
        if move in {"claimed", "renewed"} and new is not None and new.claim_id is not None:
            found[new.claim_id].append(change)
    return found


def _overrun(history: History, event: Effect, granted: Sequence[InstanceChange]) -> Iterator[Violation]:
    at = history.at(event)
    known = [change for change in granted if change.at <= at + history.doubt]
    lease = max((change for change in known), key=_until, default=None)
    if lease is None:
        return  # I1 reports it
    over = at - _until(lease)
    if over <= history.margin + history.doubt:
        return
    ran = over - history.paused(event.pid, event.at - int(over * 1e9), event.at)
    if ran > history.margin + history.doubt:
        sentence = f"a step ran {ran:.2f} s beyond its lease"
        yield history.violation("I5", sentence, lease, event)


def _until(change: InstanceChange) -> float:
    return 0.0 if change.new is None else change.new.lease_expires_at or 0.0


def i8_terminal_rows_never_change(history: History) -> list[Violation]:
    """A row that has ended is not written again. It may be deleted, and an operator may retry one that is not done."""
    return list(_disturbed(history))


def _disturbed(history: History) -> Iterator[Violation]:
    retried = {note.id for note in history.notes("retried")}
    for changes in history.by_instance.values():
        end: InstanceChange | None = None
        for change, move in changes:
            if change.old is not None and change.old.ended and change.new is not None:
                commanded = history.operator or change.instance in retried or history.commanded(change)
                allowed = move == "revived" and commanded
                if not allowed:
                    sentence = f"an instance that was {change.old.status} was written again"
                    yield history.violation("I8", sentence, end, change)
            if change.new is not None and change.new.ended:
                end = change


def i12_nothing_without_an_owner(history: History) -> list[Violation]:
    """No row stays executing after its lease for longer than the reap interval and the margin.

    Outages do not count: while Postgres, or every worker, is down (`EffectLog.outage`), nobody can reap.
    """
    found: list[Violation] = []
    limit = history.reap_interval + history.margin
    for number, changes in history.by_instance.items():
        last: InstanceChange | None = None
        reported: set[str | None] = set()
        for change, _ in changes:
            late = _late(history, change.old, last, change.at)
            if late > limit and change.old is not None and change.old.claim_id not in reported:
                reported.add(change.old.claim_id)
                sentence = f"nobody took a row back whose lease was over for {late:.2f} s"
                found.append(history.violation("I12", sentence, _entry_of(history, change), change))
            last = change
        late = _late(history, history.rows.get(number), last, history.ended)
        if late > limit:
            sentence = f"it is executing, and its lease was over {late:.2f} s before the end"
            found.append(history.violation("I12", sentence, last))
    return found


def _late(history: History, row: InstanceState | None, last: InstanceChange | None, at: float) -> float:
    """Seconds for which a reaper could have taken the row. Time in which another session locked it does not count."""
    if row is None or row.status != "executing" or row.lease_expires_at is None:
        return 0.0
    since = row.lease_expires_at
    if last is not None:
        since = max(since, history.open_until.get(last.txid, 0.0))
    return 0.0 if at <= since else at - since - history.away(since, at)
