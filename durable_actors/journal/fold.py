"""`fold`: from facts to a `Projection`. Pure, total, deterministic.

A fact that does not fit becomes an anomaly and changes nothing else, so every handler first looks for a reason to
refuse and then changes. `attempts.py` has the life of an attempt, `runs.py` the facts of the run; this file has what
the facts of an attempt change in its run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, Literal

import msgspec

from durable_actors.errors import ProtocolAnomaly
from durable_actors.journal import runs
from durable_actors.journal.attempts import apply_to_attempt
from durable_actors.journal.expand import expand_all
from durable_actors.journal.facts import Fact, is_well_formed, place_of
from durable_actors.journal.projection import NOTICES, Anomaly, Projection, Run
from durable_actors.journal.records import Record

OnAnomaly = Literal["report", "raise"]


def fold(
    facts: Iterable[Fact], base: Projection | None = None, *, on_anomaly: OnAnomaly = "report"
) -> Projection:
    """Return what the facts add up to, on top of `base`, which is not changed.

    Never raises because of what the facts say, unless `on_anomaly="raise"`: then the first anomaly is raised as
    `ProtocolAnomaly`. Notices are only reported.
    """
    projection = copy_of(base)
    for fact in facts:
        reason = None if is_well_formed(fact) else "malformed_entry"
        _apply(projection, fact, reason or _refusal(projection, fact), on_anomaly)
    return projection


def replay(
    records: Iterable[Record], base: Projection | None = None, *, on_anomaly: OnAnomaly = "report"
) -> Projection:
    """Return what checked records add up to: `fold(expand_all(records), base)`, without checking the facts again."""
    projection = copy_of(base)
    replay_into(projection, records, on_anomaly=on_anomaly)
    return projection


def replay_into(
    projection: Projection, records: Iterable[Record], *, on_anomaly: OnAnomaly = "report"
) -> None:
    """Replay records into a projection that nobody else uses; see `copy_of`. For readers of long histories."""
    run = projection.run
    fold_into(projection, expand_all(records, queue="" if run is None else run.queue), on_anomaly=on_anomaly)


def fold_into(projection: Projection, facts: Iterable[Fact], *, on_anomaly: OnAnomaly = "report") -> None:
    """Fold the facts of checked records, which are well formed, into a projection that nobody else uses."""
    for fact in facts:
        _apply(projection, fact, _refusal(projection, fact), on_anomaly)


def _apply(projection: Projection, fact: Fact, refusal: str | None, on_anomaly: OnAnomaly) -> None:
    reason = refusal or _HANDLERS[fact.kind](projection, fact)
    if reason is not None:
        if on_anomaly == "raise" and reason not in NOTICES:
            raise ProtocolAnomaly(fact.run, fact.rev, reason, fact.kind)
        projection.anomalies.append(_anomaly(reason, fact))
    elif "columns" in fact.data and projection.run is not None:
        projection.run.columns |= fact.data["columns"]
    if fact.rev > projection.rev:  # noqa: PLR1730 - a call of max() costs a tenth of a fold
        projection.rev = fact.rev


def copy_of(base: Projection | None) -> Projection:
    """Return a copy that shares with `base` only what folding replaces and never changes; of None, an empty one."""
    if base is None:
        return Projection()
    run = base.run and msgspec.structs.replace(base.run, columns=dict(base.run.columns))
    attempts = {key: msgspec.structs.replace(attempt) for key, attempt in base.attempts.items()}
    return msgspec.structs.replace(
        base,
        run=run,
        attempts=attempts,
        planned=dict(base.planned),
        children=dict(base.children),
        lineage=dict(base.lineage),
        commands=list(base.commands),
        anomalies=list(base.anomalies),
    )


def _refusal(p: Projection, fact: Fact) -> str | None:
    """The reason to refuse a fact before its own handler looks at it."""
    run = p.run
    if run is None:
        return "malformed_entry" if fact.kind in _NEEDS_RUN else None
    if run.id != fact.run:
        return "malformed_entry"
    if p.terminal is not None and fact.kind not in _AFTER_THE_END:
        return "terminal_run"
    return None


def _anomaly(reason: str, fact: Fact) -> Anomaly:
    data = fact.data
    text = {name: data.get(name) for name in ("runnable_key", "claim_id", "step")}
    text["detail"] = data.get("fingerprint") if reason == "other_definition" else None
    return Anomaly(
        reason, fact.kind, fact.rev, **{key: value for key, value in text.items() if isinstance(value, str)}
    )


# Attempts, and what their facts change in the run.


def _scheduled(p: Projection, fact: Fact) -> str | None:
    data, key = fact.data, fact.data["runnable_key"]
    known = key in p.attempts
    reason = apply_to_attempt(p.attempts, fact)
    if reason is None and not known:
        p.planned.pop(key, None)
        if p.run is not None:
            p.run.make_current(data, keeps_time=data.get("ahead", False))
    return reason


def _claimed(p: Projection, fact: Fact) -> str | None:
    reason = apply_to_attempt(p.attempts, fact)
    if reason is None and p.run is not None:
        p.run.hold = 0
        p.run.claim_id = fact.data["claim_id"]
        if not fact.data.get("kept"):
            p.run.token_hash = fact.data.get("token_hash")
    return reason


def _attempt_only(p: Projection, fact: Fact) -> str | None:
    return apply_to_attempt(p.attempts, fact)


def _wakeup(p: Projection, fact: Fact) -> str | None:
    """A notifier may be slower than the attempt that it was told of, and a snapshot may have come since."""
    reason, run = apply_to_attempt(p.attempts, fact), p.run
    before = run is not None and run.since is not None and place_of(fact.data["runnable_key"]) <= run.since
    return None if before and reason == "unknown_runnable_intent" else reason


def _completed(p: Projection, fact: Fact) -> str | None:
    before = p.attempts.get(fact.data["runnable_key"])
    repeated = before is not None and before.status == "completed"
    reason = apply_to_attempt(p.attempts, fact)
    if reason is None and not repeated and p.run is not None:
        p.run.error = None
    return reason


def _failed(p: Projection, fact: Fact) -> str | None:
    reason = apply_to_attempt(p.attempts, fact)
    run, data = p.run, fact.data
    if reason is not None or run is None:
        return reason
    if data["ended_by"] == "outcome":
        _outcome_committed(run, data)
        run.error = data.get("error")
    else:
        run.drop_claim()
        if data["ended_by"] == "crashed":
            run.crashes += 1
            run.error = data.get("error")
    if data.get("retry") is not None:
        run.make_current(data["retry"])
    return None


def _outcome_committed(run: Run, data: Mapping[str, Any]) -> None:
    """What every committed outcome does to the row, whichever it is."""
    run.children_pending, run.wake_on_failure = 0, False
    if "state" in data:
        run.state = data["state"]


def _released(p: Projection, fact: Fact) -> str | None:
    reason = apply_to_attempt(p.attempts, fact)
    run, data = p.run, fact.data
    if reason is None and run is not None:
        run.drop_claim()
        run.interruptions += bool(data.get("interrupted"))
        run.eligible_at = data.get("eligible_at") or run.eligible_at
    return reason


def _expired(p: Projection, fact: Fact) -> str | None:
    reason = apply_to_attempt(p.attempts, fact)
    run = p.run
    if reason is None and run is not None:
        run.drop_claim()
        if fact.data["proof"] == "stopped":
            run.interruptions += 1
        else:
            run.crashes += 1
    return reason


def _applied(p: Projection, fact: Fact) -> str | None:
    before = p.attempts.get(fact.data["runnable_key"])
    repeated = before is not None and before.applied
    reason = apply_to_attempt(p.attempts, fact)
    run, data = p.run, fact.data
    if reason is not None or repeated or run is None:
        return reason
    _outcome_committed(run, data)
    run.awaits = None
    if data.get("transition") not in {"parked", "asked"}:  # a park keeps the error that `handle` was given
        run.error = None
    if data.get("advance"):
        run.crashes = run.children_total = 0
    if data.get("advance") or data.get("transition") == "done":
        run.manual = None
    return None


_AFTER_THE_END: Final = frozenset({"run_revived", "run_snapshot", "run_indexed", "run_cataloged"})
_NEEDS_RUN: Final = frozenset(
    {
        "runnables_planned",
        "child_run_started",
        "manual_step_paused",
        "manual_step_resolved",
        "run_terminal",
        "wait_opened",
        "wait_resolved",
        "barrier_opened",
        "barrier_counted",
        "barrier_resolved",
        "run_suspended",
        "run_resumed",
        "run_redirected",
        "run_revived",
        "run_hastened",
        "upstream_ended",
        "run_caught_up",
        "definition_differs",
        "hold_changed",
    }
)

_HANDLERS: Final[Mapping[str, Callable[[Projection, Fact], str | None]]] = {
    "run_signal_received": runs.signal_received,
    "run_started": runs.run_started,
    "runnables_planned": runs.runnables_planned,
    "runnable_applied": _applied,
    "child_run_started": runs.child_started,
    "manual_step_paused": runs.manual_paused,
    "manual_step_resolved": runs.manual_resolved,
    "run_terminal": runs.run_terminal,
    "wait_opened": runs.wait_opened,
    "wait_resolved": runs.wait_resolved,
    "barrier_opened": runs.barrier_opened,
    "barrier_counted": runs.barrier_counted,
    "barrier_resolved": runs.barrier_resolved,
    "run_suspended": runs.run_suspended,
    "run_resumed": runs.run_resumed,
    "run_redirected": runs.run_redirected,
    "run_revived": runs.run_revived,
    "run_hastened": runs.run_hastened,
    "upstream_ended": runs.upstream_ended,
    "run_caught_up": runs.run_caught_up,
    "definition_differs": runs.definition_differs,
    "run_snapshot": runs.run_snapshot,
    "run_queued": runs.of_another_thread,
    "attempt_scheduled": _scheduled,
    "attempt_claimed": _claimed,
    "attempt_heartbeat": _attempt_only,
    "attempt_completed": _completed,
    "attempt_failed": _failed,
    "claim_released": _released,
    "claim_expired": _expired,
    "hold_changed": runs.hold_changed,
    "live_wakeup_emitted": _wakeup,
    "run_indexed": runs.of_another_thread,
    "run_cataloged": runs.of_another_thread,
}
