"""What the facts of the run thread do to a projection, each in one function.

A function returns the reason if the fact is an anomaly; then it has changed nothing. `fold.py` has checked that the
data is complete, that the run exists if the fact needs one, and that it has not ended.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final, cast

import msgspec

from durable_actors.journal.attempts import intent_of
from durable_actors.journal.facts import Fact, place_of, runnable_key
from durable_actors.journal.projection import Attempt, ChildRun, Manual, Place, Projection, Receipt, Run, Wait
from durable_actors.journal.row import differences, inserted_columns, projection_of, row_of


def _run(p: Projection) -> Run:
    assert p.run is not None
    return p.run


def signal_received(p: Projection, fact: Fact) -> str | None:
    """Keep the receipt of a command. The same idempotency key again is the same command."""
    data = fact.data
    if data["type"] == "signal":
        return None
    key = data.get("key")
    if key is not None and any(one.type == data["type"] and one.key == key for one in p.commands):
        return None
    p.commands.append(Receipt(data["type"], fact.at, data.get("by"), key, data.get("reason")))
    return None


def run_started(p: Projection, fact: Fact) -> str | None:
    """The run begins. The same start again changes nothing."""
    data = fact.data
    if p.run is not None:
        known = (p.run.machine, p.run.version, p.run.queue, p.run.parent)
        same = known == (data["machine"], data["version"], data["queue"], data.get("parent"))
        return None if same else "conflicting_workflow"
    row: Mapping[str, Any] = data.get("row") or {}
    p.run = Run(
        id=fact.run,
        machine=data["machine"],
        version=data["version"],
        queue=data["queue"],
        level=data["level"],
        columns=inserted_columns(row),
        parent=data.get("parent"),
        step=data["step"],
        visit=data["visit"],
        round=data["round"],
        attempt=data["attempt"],
        eligible_at=data.get("eligible_at") or fact.at,
        hold=data.get("hold", 0),
        state=row.get("state"),
    )
    return None


def runnables_planned(p: Projection, fact: Fact) -> str | None:
    """Remember what is to be dispatched, until it is."""
    found: dict[str, Attempt] = {}
    planned: list[Any] = fact.data["runnables"]
    for each in planned:
        intent = intent_of(cast("dict[str, Any]", each)) if isinstance(each, dict) else None
        if intent is None:
            return "malformed_entry"
        if intent.key not in p.attempts:
            found[intent.key] = intent
    p.planned |= found
    return None


def child_started(p: Projection, fact: Fact) -> str | None:
    """Link a child. The same identity again is the same child, whichever attempt says so."""
    data, origin = fact.data, fact.data["origin"]
    if not all(isinstance(origin.get(name), kind) for name, kind in _ORIGIN.items()):
        return "malformed_entry"
    child = ChildRun(
        data["child"],
        data["machine"],
        data["trigger"],
        data["child_key"],
        origin["step"],
        dict(origin),
        data.get("metadata"),
    )
    identity = _identity(child)
    if child.child in p.children or identity in p.lineage:
        return None if p.lineage.get(identity) == child.child else "conflicting_child_run"
    if _run(p).current != origin["runnable_key"]:
        return "stale_claim"
    p.children[child.child] = child
    p.lineage[identity] = child.child
    return None


_ORIGIN: Final = {"runnable_key": str, "step": str, "attempt": int}


def _identity(child: ChildRun) -> str:
    """A child is identified by its parent's run and step, its own machine and first step, and its key."""
    return json.dumps([child.step, child.machine, child.trigger, child.child_key])


def _place(data: Mapping[str, Any]) -> Place | None:
    try:
        return msgspec.convert(data, Place)
    except msgspec.ValidationError:
        return None


def _open(p: Projection, place: Place, fact: Fact) -> None:
    """Park: the row stays at its step and counts as being in the visit that comes after the wait."""
    run = _run(p)
    run.visit, run.round, run.attempt = place.visit, place.round, place.attempt
    run.eligible_at = fact.at
    run.approximate = False


def wait_opened(p: Projection, fact: Fact) -> str | None:
    """Park until a signal."""
    place = _place(fact.data["next"])
    if place is None:
        return "malformed_entry"
    if p.wait is not None or p.manual is not None:
        return "active_wait"
    names = tuple(cast("list[str]", fact.data["names"]))
    p.wait = Wait(fact.at, place, fact.data.get("deadline"), names)
    _run(p).awaits = list(names)
    _open(p, place, fact)
    return None


def _is_next(p: Projection, fact: Fact) -> bool:
    """Whether the run goes on where its open wait said that it would."""
    if p.wait is None:
        return False
    place, data = p.wait.next, fact.data
    return (place.step, place.visit, place.round, place.attempt) == (
        data["step"],
        data["visit"],
        data["round"],
        data["attempt"],
    )


def wait_resolved(p: Projection, fact: Fact) -> str | None:
    """A signal or the deadline ends the wait."""
    if p.wait is None or p.wait.names is None or not _is_next(p, fact):
        return "stale_wait"
    p.wait = None
    return None


def barrier_opened(p: Projection, fact: Fact) -> str | None:
    """Park until enough children have ended."""
    place, data, run = _place(fact.data["next"]), fact.data, _run(p)
    if place is None:
        return "malformed_entry"
    if p.wait is not None or p.manual is not None:
        return "active_wait"
    p.wait = Wait(fact.at, place, data.get("deadline"))
    p.barrier_failed = False
    run.children_total, run.children_pending = data["total"], data["pending"]
    run.wake_on_failure = data.get("wake_on_failure", False)
    _open(p, place, fact)
    return None


def barrier_counted(p: Projection, fact: Fact) -> str | None:
    """Count ended children, or one that was revived and is waited for again."""
    data, run = fact.data, _run(p)
    if p.wait is None or p.wait.names is not None:
        return "stale_wait"
    if max(run.children_pending - data["count"], 0) != data["pending"]:
        return "conflicting_barrier"
    run.children_pending = data["pending"]
    p.barrier_failed = p.barrier_failed or bool(data.get("failed"))
    return None


def barrier_resolved(p: Projection, fact: Fact) -> str | None:
    """Enough children, a failure that was to wake the run, or the deadline ends the wait."""
    run = _run(p)
    if p.wait is None or p.wait.names is not None or not _is_next(p, fact):
        return "stale_wait"
    joined = run.children_pending == 0 or (run.wake_on_failure and p.barrier_failed)
    if fact.data["why"] == "joined" and not joined:
        return "conflicting_barrier"
    p.wait = None
    p.barrier_failed = False
    return None


def manual_paused(p: Projection, fact: Fact) -> str | None:
    """Park until somebody decides. Only the current boundary is kept."""
    place, data = _place(fact.data["next"]), fact.data
    if place is None:
        return "malformed_entry"
    opened = Manual(
        data["step"],
        data["manual"],
        data["boundary"],
        place,
        fact.at,
        data.get("deadline"),
        data.get("metadata") or {},
    )
    if p.manual is not None:
        return None if opened == p.manual else "active_manual_step"
    if p.wait is not None:
        return "active_wait"
    p.manual = opened
    run = _run(p)
    run.manual, run.awaits = opened.metadata, []
    _open(p, place, fact)
    return None


def manual_resolved(p: Projection, fact: Fact) -> str | None:
    """Somebody decided, or the deadline passed."""
    data = fact.data
    if p.manual is None or (p.manual.step, p.manual.boundary) != (data["step"], data["boundary"]):
        return "stale_manual_resolution"
    run, decision = _run(p), data.get("decision")
    run.manual = None if decision is None else {**p.manual.metadata, "decision": decision}
    p.manual = None
    return None


def run_suspended(p: Projection, fact: Fact) -> str | None:
    """An operator paused the run: none of its attempts is visible."""
    who = {"by": fact.data.get("by"), "reason": fact.data.get("reason"), "at": fact.at.isoformat()}
    if p.suspended is not None:
        same = all(p.suspended.get(name) == who[name] for name in ("by", "reason"))
        return None if same else "active_manual_step"
    p.suspended = who
    _run(p).hold = 0  # whatever held it: from now on the pause does, whenever it is runnable
    _run(p).approximate = not p.gapless
    return None


def run_resumed(p: Projection, fact: Fact) -> str | None:
    """The operator's pause has ended."""
    if p.suspended is None:
        return "stale_manual_resolution"
    p.suspended = None
    _run(p).hold = fact.data.get("hold", 0)
    _run(p).approximate = not p.gapless
    return None


def hold_changed(p: Projection, fact: Fact) -> str | None:
    """The row was offered to picks, held or shelved."""
    run = _run(p)
    if "runnable_key" in fact.data and not p.gapless:
        reason = run_caught_up(p, fact)
        if reason is not None:
            return reason
    run.hold = 0 if p.suspended is not None else fact.data["hold"]
    if run.hold == 2:
        run.shelved_step = fact.data.get("step", run.step)
    elif run.hold == 3:
        run.limited_by = fact.data.get("limited_by", run.limited_by)
    return None


def upstream_ended(p: Projection, fact: Fact) -> str | None:
    """What the run comes after has ended: its attempt may run, or is claimed to end the run."""
    data, run = fact.data, _run(p)
    attempt = p.attempts.get(data["runnable_key"])
    if attempt is None or run.current != attempt.key or attempt.status != "available":
        return "stale_claim"
    attempt.visible_at = run.eligible_at = data["visible_at"]
    run.hold = 0
    return None


def run_terminal(p: Projection, fact: Fact) -> str | None:
    """The end. It fences all that is left of the run: attempts, waits, boundaries."""
    data, run = fact.data, _run(p)
    if data["status"] not in {"done", "failed", "cancelled"}:
        return "malformed_entry"
    outcome = data.get("ended_by") == "outcome"
    if outcome or data["status"] == "cancelled":
        run.children_pending, run.wake_on_failure = 0, False
        run.error = data.get("error")
    else:
        run.error = data.get("error") or run.error
    if not outcome and (data["status"] == "cancelled" or p.status == "executing"):
        run.drop_claim()
    p.terminal = data["status"]
    if p.manual is not None:
        run.manual = None
    p.wait = p.manual = p.suspended = None
    p.planned.clear()
    run.stand_at(data)
    run.finished_at = fact.at
    run.eligible_at = data.get("eligible_at") or run.eligible_at
    for counter in ("crashes", "interruptions", "children_pending"):
        setattr(run, counter, data.get(counter, getattr(run, counter)))
    run.result = data.get("result")
    return None


def run_redirected(p: Projection, _: Fact) -> str | None:
    """The run was cancelled, and enters the step that compensates. It fences all that is left, like an end."""
    run = _run(p)
    for one in p.attempts.values():
        if one.status in {"available", "claimed"}:
            one.status = "expired"
    p.wait = p.manual = p.suspended = None
    p.barrier_failed = False
    p.planned.clear()
    run.drop_claim()
    run.crashes = run.children_total = run.children_pending = 0
    run.wake_on_failure = False
    run.awaits = run.error = run.manual = None
    return None


def run_revived(p: Projection, _: Fact) -> str | None:
    """The one way back from an end. The visit begins again at attempt 0, so its earlier attempts give up their keys."""
    if p.terminal is None:
        return "malformed_entry"
    if p.terminal == "done":
        return "terminal_run"
    run = _run(p)
    p.terminal = None
    gone = [place_of(key) for key, one in p.attempts.items() if one.visit == run.visit]
    p.attempts = {key: one for key, one in p.attempts.items() if one.visit != run.visit}
    run.since = max((*gone, run.since or (0, 0, 0)))  # a notifier may be told of them later
    run.drop_claim()
    run.crashes, run.current, run.finished_at = 0, None, None
    return None


def run_hastened(p: Projection, fact: Fact) -> str | None:
    """The current attempt is visible from now on. Where moves are not recorded, they may have led to another one."""
    data, run = fact.data, _run(p)
    if not p.gapless:
        reason = run_caught_up(p, fact)
        if reason is not None:
            return reason
    attempt = p.attempts.get(data["runnable_key"])
    if attempt is None or run.current != attempt.key or attempt.status != "available":
        return "stale_claim"
    attempt.visible_at = run.eligible_at = data["visible_at"]
    return None


def run_caught_up(p: Projection, fact: Fact) -> str | None:
    """Moves were not recorded: what was open has been closed by them, and this attempt is the current one."""
    data, run = fact.data, _run(p)
    if p.gapless:
        return "malformed_entry"
    if (data["visit"], data["round"], data["attempt"]) < (run.visit, run.round, run.attempt):
        return "stale_claim"
    key = runnable_key(run.id, data["visit"], data["step"], data["round"], data["attempt"])
    attempt = p.attempts.get(key)
    if attempt is not None and attempt.status not in {"available", "claimed"}:
        return "terminal_attempt"
    before = p.current
    if before is not None and before.key != key and before.status in {"available", "claimed"}:
        before.status = "expired"
    if attempt is None:
        intent = {
            **data,
            "runnable_key": key,
            "idempotency_key": key.rpartition("#")[0],
            "visible_at": fact.at,
        }
        attempt = p.attempts[key] = cast("Attempt", intent_of(intent))
    attempt.status, attempt.claim = "available", None
    attempt.visible_at = min(attempt.visible_at, fact.at)
    if p.manual is not None:
        run.manual = None
    p.wait = p.manual = None
    p.planned.clear()
    run.make_current({**data, "runnable_key": key}, keeps_time=True)
    return None


def run_snapshot(p: Projection, fact: Fact) -> str | None:
    """A new base. If nothing can have happened since the last fact unrecorded, it must say what the history says."""
    row: Mapping[str, Any] = fact.data["row"]
    try:
        base = projection_of(fact.run, fact.rev, row)
    except (msgspec.ValidationError, ValueError):
        return "malformed_entry"
    if p.gapless and fact.rev == p.rev + 1:
        told = {**row_of(p), "rev": fact.rev, "journal": row["journal"]}
        if differences(told, row):
            return "conflicting_snapshot"
    p.run, p.attempts, p.planned, p.children, p.lineage = base.run, base.attempts, {}, {}, {}
    p.wait, p.manual, p.terminal = base.wait, base.manual, base.terminal
    p.barrier_failed, p.suspended, p.commands = False, base.suspended, []
    return None


def definition_differs(p: Projection, fact: Fact) -> str | None:
    """Report every other definition once, whichever step it ran first."""
    told = fact.data["fingerprint"]
    started = _run(p).columns.get("fingerprint")
    known = any(one.reason == "other_definition" and one.detail == told for one in p.anomalies)
    return None if known or started == f"\\x{told}" else "other_definition"


def of_another_thread(_: Projection, __: Fact) -> str | None:
    """Facts that belong to an index, or say nothing that the run does not know."""
    return None
