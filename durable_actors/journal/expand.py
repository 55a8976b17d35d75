"""From a record to its facts, in commit order. Pure.

`EXPANSIONS` is the table: each kind of record is a sequence of emitters. An emitter is named after the fact that it
adds, or after the kind of record if it has to choose; it adds nothing if the record does not imply its fact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, cast

import msgspec
from msgspec import UNSET

from durable_actors.journal.facts import Fact
from durable_actors.journal.holds import hold_changed
from durable_actors.journal.kinds import (
    AskedData,
    ChildStart,
    ChildStartedData,
    ClaimedData,
    Command,
    CountedData,
    CrashedData,
    Data,
    DoneData,
    ExpiredData,
    NextData,
    OutcomeData,
    ParkedData,
    PausedData,
    ReapedData,
    ReleasedData,
    ResolvedData,
    ReturnedData,
    RowData,
    SpawnedData,
    TimedOutData,
    UnderClaim,
    UnfitData,
    WokenData,
    level_of,
)
from durable_actors.journal.moves import Move
from durable_actors.journal.records import Current, Inserted, Record
from durable_actors.journal.upstream import upstream_ended, waits_again, waits_on

# Commands, the row as a whole, the indexes.


def _run_signal_received(move: Move) -> None:
    """Every record that somebody outside caused has a receipt."""
    data, record = move.data, move.record
    receipt: dict[str, Any] = {"type": "start" if record.kind == "started" else "signal", "by": record.by}
    command: Command | None = getattr(data, "command", None)
    if command is not None:
        receipt |= {
            "type": command.type,
            "key": command.key,
            "reason": command.reason,
            "payload": command.payload,
            "metadata": command.metadata,
        }
    elif isinstance(data, WokenData):
        receipt["payload"] = data.signals
    elif record.kind != "started":
        return
    move.add("run_signal_received", receipt)


def _run_started(move: Move) -> None:
    row = cast("Inserted | Current", move.row)
    parent: dict[str, Any] | None = None
    if row.parent_id is not None:
        parent = {"run": row.parent_id, "barrier": row.barrier}
        start = cast("RowData", move.data).parent
        if start is not None:
            parent |= {"machine": start.machine, "step": start.step, "key": start.key}
    fact = {
        "machine": row.fsm,
        "version": row.fsm_version,
        "queue": row.queue,
        "level": level_of(row.journal),
        "parent": parent,
        **move.to,
        "hold": row.hold,
        "eligible_at": row.eligible_at,
        "row": cast("RowData", move.data).row,
    }
    move.add("run_started", fact)


def _run_snapshot(move: Move) -> None:
    move.add("run_snapshot", {"row": cast("RowData", move.data).row})


def _run_indexed(move: Move) -> None:
    """Once for the machine, and once for the unique key if there is one."""
    row = cast("Inserted | Current", move.row)
    found = {"machine": row.fsm, "queue": row.queue}
    move.add("run_indexed", {"index": "machine", "key": row.fsm, **found})
    if row.unique_key is not None:
        move.add("run_indexed", {"index": "unique_key", "key": row.unique_key, **found})


def _run_cataloged(move: Move) -> None:
    row = cast("Inserted | Current", move.row)
    move.add("run_cataloged", {"machine": row.fsm, "queue": row.queue})


def _run_queued(move: Move) -> None:
    move.add("run_queued", {"queue": move.queue})


# The claim.


def _run_caught_up(move: Move) -> None:
    """Below level "claims", a record restates where the row stood: what came before it may not be recorded."""
    if (
        isinstance(move.data, UnderClaim)
        and move.data.folded is not None
        and move.record.claim_id is not None
    ):
        move.add("run_caught_up", {**move.place, "runnable_key": move.key})


def _attempt_claimed(move: Move) -> None:
    """From a record of its own, or folded into a record that is written under the claim."""
    record, data = move.record, move.data
    claim: dict[str, Any] = {
        "runnable_key": move.key,
        "claim_id": record.claim_id,
        "owner": record.node or "",
    }
    if isinstance(data, ClaimedData):
        move.add("attempt_claimed", {**claim, "lease_until": data.lease_until, "token_hash": data.token_hash})
    elif isinstance(data, UnderClaim) and data.folded is not None and record.claim_id is not None:
        folded = data.folded
        claim |= {"lease_until": folded.lease_until, "token_hash": folded.token_hash}
        move.add("attempt_claimed", claim if folded.at is None else {**claim, "since": folded.at})


def _attempt_heartbeat(move: Move) -> None:
    """All heartbeats of a claim are one fact of the record that ends it. The store fences them by the claim alone."""
    claimed = move.record.claim_id is not None
    if claimed and isinstance(move.data, UnderClaim) and move.data.renewed_until is not None:
        move.add("attempt_heartbeat", {**move.fence, "lease_until": move.data.renewed_until, "late": True})


def _definition_differs(move: Move) -> None:
    """Reported, not refused: whoever deploys another definition under the same version may mean it."""
    if isinstance(move.data, UnderClaim) and move.data.definition is not None:
        told = {"fingerprint": move.data.definition, "step": move.place["step"], "runnable_key": move.key}
        move.add("definition_differs", told)


def _attempt_claimed_ahead(move: Move) -> None:
    """Running ahead: the entered step runs on the same claim."""
    data = cast("NextData", move.data)
    if data.keeps_claim:
        claim = {
            "runnable_key": move.next_key,
            "claim_id": move.record.claim_id,
            "owner": move.record.node or "",
        }
        move.add("attempt_claimed", {**claim, "lease_until": data.lease_until, "kept": True})


# The end of an attempt.


def _attempt_ended(move: Move) -> None:
    """Completed, or failed if an error went through `handle`."""
    error = move.record.error
    if error is None:
        move.add("attempt_completed", {**move.fence, "result": move.result})
    else:
        move.add("attempt_failed", {**move.fence, "ended_by": "outcome", "error": error})


def _attempt_failed(move: Move) -> None:
    """Outcomes Stop and Retry, crashes, and releases that count as an attempt."""
    record, data = move.record, move.data
    outcome = record.kind in {"retry", "failed"}
    fact = {**move.fence, "ended_by": "outcome" if outcome else record.kind, "error": record.error}
    if record.kind != "failed" and not (isinstance(data, CrashedData) and data.failed):
        fact["retry"] = move.intent
    if isinstance(data, OutcomeData) and data.state is not UNSET:
        fact["state"] = data.state
    if not outcome:
        fact["late"] = True  # the store fences the end of a claim without an outcome by the claim alone
    move.add("attempt_failed", fact)


def _claim_released(move: Move) -> None:
    data = cast("ReleasedData | ReapedData", move.data)
    interrupted = isinstance(data, ReapedData) or data.interrupted
    fact = {**move.fence, "late": True, "interrupted": interrupted, "eligible_at": data.eligible_at}
    move.add("claim_released", fact)


def _claim_expired(move: Move) -> None:
    move.add("claim_expired", {**move.fence, "proof": cast("ReapedData", move.data).proof})


def _released(move: Move) -> None:
    """A run that was cancelled, not drained, counts as an attempt: then the release is a failure with a retry."""
    data = cast("ReleasedData", move.data)
    if data.to_attempt == move.place["attempt"]:
        _claim_released(move)
    else:
        _attempt_failed(move)
    if data.hold:
        move.add("hold_changed", {"hold": data.hold, "step": move.place["step"]})


def _reaped(move: Move) -> None:
    """Taken away, and the next attempt scheduled; or given back in the name of a node that stopped in order."""
    data = cast("ReapedData", move.data)
    if data.failed:
        _claim_expired(move)
        _run_terminal(move)
    elif data.proof == "stopped" and data.to_attempt == move.place["attempt"]:
        _claim_released(move)
    else:
        _claim_expired(move)
        _attempt_scheduled(move)


# What the result does to the run.


def _runnable_applied(move: Move) -> None:
    data = move.data
    fact: dict[str, Any] = {"runnable_key": move.key, "result": move.result, "transition": move.record.kind}
    if move.to["visit"] != move.place["visit"]:
        fact["advance"] = True
    if isinstance(data, OutcomeData) and data.state is not UNSET:
        fact["state"] = data.state
    move.add("runnable_applied", fact)


def _runnables_planned(move: Move) -> None:
    move.add("runnables_planned", {"runnables": [move.intent]})


def _attempt_scheduled(move: Move) -> None:
    intent, data = move.intent, move.data
    if isinstance(data, OutcomeData) and data.state is not UNSET:
        intent = {**intent, "input": data.state}
    elif isinstance(data, RowData) and "state" in data.row:
        intent = {**intent, "input": data.row["state"]}
    if isinstance(data, NextData) and data.keeps_claim:
        intent = {**intent, "ahead": True}
    move.add("attempt_scheduled", intent)


def _scheduled(move: Move) -> None:
    """Planned and scheduled: always together in this store, because one statement writes both."""
    _runnables_planned(move)
    _attempt_scheduled(move)


def _wait_opened(move: Move) -> None:
    data = cast("ParkedData", move.data)
    following = {**move.to, "await_step": move.record.to_step}
    move.add("wait_opened", {"names": data.awaits, "deadline": data.deadline, "next": following})


def _wait_resolved(move: Move) -> None:
    move.add("wait_resolved", {"why": "deadline" if move.record.kind == "expired" else "signal", **move.to})


def _child_run_started(move: Move) -> None:
    data = move.data
    children = [data.child] if isinstance(data, ChildStartedData) else cast("SpawnedData", data).children
    for position, child in enumerate(children):
        move.add("child_run_started", _lineage(move, child, f"{move.to['visit']}.{position}"))


def _lineage(move: Move, child: ChildStart, position: str) -> dict[str, Any]:
    origin = {"runnable_key": move.key, "step": move.place["step"], "attempt": move.place["attempt"]}
    return {
        "child": child.id,
        "machine": child.machine,
        "trigger": child.step,
        "child_key": position if child.key is None else child.key,
        "origin": origin,
        "metadata": child.meta,
    }


def _barrier_opened(move: Move) -> None:
    data = cast("SpawnedData", move.data)
    fact = {
        "total": data.children_total,
        "pending": data.children_pending,
        "wake_on_failure": data.wake_on_failure,
        "deadline": data.deadline,
        "next": {**move.to, "await_step": move.record.to_step},
    }
    move.add("barrier_opened", fact)
    if data.children_pending == 0:
        _barrier_resolved(move)
        _scheduled(move)


def _barrier_counted(move: Move) -> None:
    data = cast("CountedData", move.data)
    count = -data.count if move.record.kind == "recounted" else data.count
    move.add("barrier_counted", {"count": count, "pending": data.pending, "failed": data.failed})


def _barrier_resolved(move: Move) -> None:
    move.add(
        "barrier_resolved", {"why": "deadline" if move.record.kind == "expired" else "joined", **move.to}
    )


def _live_wakeup_emitted(move: Move) -> None:
    move.add("live_wakeup_emitted", {"runnable_key": move.key})


# Manual boundaries, and the end.


def _run_suspended(move: Move) -> None:
    """An operator's command suspends the run where it stands."""
    command = cast("PausedData", move.data).command
    move.add("run_suspended", {"by": move.record.by, "reason": command and command.reason})


def _manual_step_paused(move: Move) -> None:
    data = cast("AskedData", move.data)
    fact = {
        "step": move.place["step"],
        "manual": data.boundary.kind,
        "boundary": move.to["visit"],
        "deadline": data.deadline,
        "metadata": move.record.data["boundary"],  # as it was written: the column has no more
        "next": {**move.to, "await_step": data.boundary.on_timeout or data.boundary.on_reject},
    }
    move.add("manual_step_paused", fact)


def _manual_step_resolved(move: Move) -> None:
    actions = {"approved": "approve", "rejected": "reject", "proceeded": "proceed", "timed_out": "timeout"}
    fact = {"step": move.place["step"], "boundary": move.place["visit"], "action": actions[move.record.kind]}
    data = cast("ResolvedData | TimedOutData", move.data)
    move.add("manual_step_resolved", fact if data.failed else {**fact, "decision": data.decision})


def _run_resumed(move: Move) -> None:
    move.add("run_resumed", {"by": move.record.by, **waits_on(move)})


def _rejected(move: Move) -> None:
    """With a step for that, it is entered; without, the instance has failed."""
    _manual_step_resolved(move)
    (_run_terminal if cast("ResolvedData | TimedOutData", move.data).failed else _scheduled)(move)


def _expired(move: Move) -> None:
    """The deadline of a wait or a barrier."""
    waited_for = cast("ExpiredData", move.data).waited_for
    (_wait_resolved if waited_for == "signal" else _barrier_resolved)(move)
    _scheduled(move)


def _crashed(move: Move) -> None:
    _attempt_failed(move)
    if cast("CrashedData", move.data).failed:
        _run_terminal(move)


def _run_redirected(move: Move) -> None:
    move.add("run_redirected", {})


def _run_revived(move: Move) -> None:
    move.add("run_revived", {})


def _run_hastened(move: Move) -> None:
    move.add(
        "run_hastened", {**move.place, "runnable_key": move.key, "visible_at": move.intent["visible_at"]}
    )


def _run_terminal(move: Move) -> None:
    record, data = move.record, move.data
    status = record.kind if record.kind in {"done", "cancelled"} else "failed"
    # An outcome counts as a round; a row that became unfit when it was woken has entered its step.
    fact: dict[str, Any] = {"status": status, **(move.to if record.kind in _STANDS_ELSEWHERE else move.place)}
    if status != "done":
        fact["error"] = record.error
    if record.kind in {"done", "failed"} or (status == "cancelled" and record.claim_id is not None):
        # An outcome: it counts as a round, and eligible_at and the error are written.
        fact |= move.to
        fact["eligible_at"] = record.at
        fact["ended_by"] = "outcome"
    elif isinstance(data, UnfitData):
        fact |= move.to
        fact |= {
            name: value
            for name in ("eligible_at", "crashes", "interruptions", "children_pending")
            if (value := getattr(data, name)) is not None
        }
    elif isinstance(data, ReturnedData):
        fact["eligible_at"] = data.eligible_at
    if isinstance(data, DoneData) and data.result is not UNSET:
        fact["result"] = data.result
    move.add("run_terminal", fact)


_STANDS_ELSEWHERE: Final = frozenset({"done", "failed", "unfit"})

Emitter = Callable[[Move], None]

_UNDER_CLAIM: Final[tuple[Emitter, ...]] = (
    _run_caught_up,
    _attempt_claimed,
    _attempt_heartbeat,
    _definition_differs,
)

EXPANSIONS: Final[dict[str, tuple[Emitter, ...]]] = {
    "started": (
        _run_signal_received,
        _run_started,
        _run_indexed,
        _run_cataloged,
        _runnables_planned,
        _run_queued,
        _attempt_scheduled,
    ),
    "claimed": (_attempt_claimed,),
    "next": (*_UNDER_CLAIM, _attempt_ended, _runnable_applied, _scheduled, _attempt_claimed_ahead),
    "retry": (*_UNDER_CLAIM, _attempt_failed),
    "parked": (*_UNDER_CLAIM, _attempt_ended, _runnable_applied, _wait_opened),
    "spawned": (*_UNDER_CLAIM, _attempt_ended, _runnable_applied, _child_run_started, _barrier_opened),
    "done": (*_UNDER_CLAIM, _attempt_ended, _runnable_applied, _run_terminal),
    "failed": (*_UNDER_CLAIM, _attempt_failed, _run_terminal),
    "cancelled": (_run_signal_received, *_UNDER_CLAIM, _run_terminal),
    "compensating": (_run_signal_received, _run_redirected, _scheduled),
    "released": (*_UNDER_CLAIM, _released),
    "crashed": (*_UNDER_CLAIM, _crashed),
    "reaped": (*_UNDER_CLAIM, _reaped),
    "woken": (_run_signal_received, _wait_resolved, _scheduled),
    "expired": (_expired,),
    "child_ended": (_barrier_counted,),
    "joined": (_barrier_counted, _barrier_resolved, _scheduled),
    "recounted": (_barrier_counted,),
    "held": (hold_changed,),
    "shelved": (hold_changed,),
    "throttled": (hold_changed,),
    "limited": (hold_changed,),
    "dropped": (hold_changed,),
    "offered": (hold_changed,),
    "revived": (_run_revived, _run_signal_received, _scheduled, waits_again),
    **dict.fromkeys(("unblocked", "doomed"), (upstream_ended,)),
    "hastened": (_run_signal_received, _run_hastened),
    "child_started": (*_UNDER_CLAIM, _child_run_started),
    "unfit": (_run_terminal,),
    "asked": (*_UNDER_CLAIM, _attempt_ended, _runnable_applied, _manual_step_paused),
    "timed_out": (_rejected,),
    "paused": (_run_signal_received, _run_suspended),
    "resumed": (_run_signal_received, _run_resumed),
    "approved": (_run_signal_received, _manual_step_resolved, _scheduled),
    "rejected": (_run_signal_received, _rejected),
    "proceeded": (_run_signal_received, _manual_step_resolved, _scheduled),
    "snapshot": (_run_snapshot, _run_indexed, _run_cataloged),
    "wakeup": (_live_wakeup_emitted,),
}
"""Kind of record → its facts, in the order in which they are committed."""


def expand(record: Record, *, queue: str = "", data: Data | None = None) -> list[Fact]:
    """Return the facts of a record. `queue` is the instance's: only `started` and `snapshot` records contain it.

    `data`: what `checked_data` returned, if the record was checked just now.
    """
    move = Move(record, queue, data)
    for emit in EXPANSIONS[record.kind]:
        emit(move)
    if move.data.columns:
        last = move.facts[-1]
        move.facts[-1] = msgspec.structs.replace(last, data={**last.data, "columns": move.data.columns})
    return move.facts


def expand_all(records: Iterable[Record], *, queue: str = "") -> Iterator[Fact]:
    """Yield the facts of the records of one instance. `queue` is needed if they do not begin with the first one."""
    for record in records:
        facts = expand(record, queue=queue)
        if facts:
            queue = facts[-1].queue
        yield from facts
