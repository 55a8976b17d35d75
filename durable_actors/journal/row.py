"""The row of an instance and its projection: what the row should be, and a projection that begins with a row. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final, Literal, cast

import msgspec

from durable_actors.journal.facts import idempotency_key, runnable_key
from durable_actors.journal.kinds import level_of
from durable_actors.journal.projection import Attempt, Claim, Manual, Place, Projection, Run, Wait
from durable_actors.journal.records import Current, ErrorInfo

From = Literal["outcomes", "claims", "full"]

COLUMNS: Final[Mapping[str, From]] = {
    "id": "outcomes",
    "rev": "outcomes",
    "status": "outcomes",
    "fsm": "outcomes",
    "fsm_version": "outcomes",
    "queue": "outcomes",
    "step": "outcomes",
    "visit": "outcomes",
    "round": "outcomes",
    "attempt": "outcomes",
    "awaits": "outcomes",
    "await_step": "outcomes",
    "await_deadline": "outcomes",
    "manual": "outcomes",
    "request": "outcomes",
    "claim_id": "claims",
    "locked_by": "outcomes",
    "finished_at": "outcomes",
    "last_error": "outcomes",
    "error_type": "outcomes",
    "traceback": "outcomes",
    "eligible_at": "claims",
    "hold": "claims",
    "shelved_step": "claims",
    "limited_by": "claims",
    "crashes": "claims",
    "interruptions": "claims",
    "children_total": "claims",
    "children_pending": "claims",
    "wake_on_failure": "claims",
    "claim_token_hash": "claims",
    "state": "full",
    "result": "full",
}
"""The columns that moves change → the first level whose records tell them. The others are as the insert wrote them."""

NOT_IN_THE_JOURNAL: Final[Mapping[str, str]] = {
    "lease_expires_at": "heartbeats change it, and they are no moves; null unless the row is executing",
    "inbox": "a signal that wakes nothing sets it",
    "updated_at": "for people; some writes are no moves",
    "unique_guard": "generated from unique_key, unique_scope and status",
}
"""Columns that no record tells, and why."""


EMPTY_UNLESS_NAMED: Final = (
    "parent_id", "barrier", "partition_key", "unique_key", "child_uid", "child_args", "tags", "meta",
    "fingerprint", "rate_limit", "rerun_of", "cancellation", "cancel_rest", "child_key", "links",
    "max_attempts", "fair_key",
)  # fmt: skip
"""The columns of an insert that are null if its record does not name them. `weight` is 1 then."""

PAUSED: Final = 4
"""The column `hold` of a row that is runnable and paused."""

_SURE: Final = ("id", "rev", "fsm", "fsm_version", "queue")
"""What a record that does not say where the row stands leaves certain, beside the inserted columns."""


def row_of(projection: Projection) -> dict[str, Any]:
    """Return the columns that the row must have if its `rev` is that of the projection.

    Below level "full", columns are missing whose values the records do not tell; see `COLUMNS`. Times are datetimes,
    and what the insert wrote is as the `started` record has it. Raises ValueError if the projection has no run.
    """
    run = projection.run
    if run is None:
        raise ValueError("the projection has no run: its history begins with neither started nor snapshot")
    known: set[str] = {"outcomes", run.level} | ({"claims"} if projection.gapless else set[str]())
    found = {**_place(projection, run), **_claim(projection, run), **_kept(run)}
    if projection.suspended is not None and projection.status == "runnable":
        found["hold"] = PAUSED
    if projection.status != "executing":
        found["lease_expires_at"] = None
    if run.level != "full":
        found = {name: value for name, value in found.items() if COLUMNS.get(name, "outcomes") in known}
    row = {**run.columns, **found}
    if run.approximate:
        row = {name: value for name, value in row.items() if name in run.columns or name in _SURE}
    return row


def whole_row(projection: Projection) -> dict[str, Any]:
    """As `row_of`, with the columns that the insert left empty: a `started` record does not name them."""
    row = row_of(projection)
    for name in EMPTY_UNLESS_NAMED:
        row.setdefault(name, None)
    row.setdefault("weight", 1)
    return row


def _place(projection: Projection, run: Run) -> dict[str, Any]:
    waiting = projection.manual or projection.wait
    status = projection.status
    return {
        "id": run.id,
        "rev": projection.rev,
        # A manual boundary is a wait that no signal can end.
        "status": "awaiting_signal" if status == "paused" else status,
        "fsm": run.machine,
        "fsm_version": run.version,
        "queue": run.queue,
        "step": run.step,
        "visit": run.visit,
        "round": run.round,
        "attempt": run.attempt,
        "awaits": run.awaits,
        "await_step": waiting and waiting.next.await_step,
        "await_deadline": waiting and waiting.deadline,
        "manual": run.manual,
        "request": projection.suspended and {"kind": "pause", **_given(projection.suspended)},
    }


def _claim(projection: Projection, run: Run) -> dict[str, Any]:
    current = projection.current
    owner = None
    if projection.status == "executing" and current is not None and current.claim is not None:
        owner = current.claim.owner
    return {"claim_id": run.claim_id, "locked_by": owner, "claim_token_hash": run.token_hash}


def _kept(run: Run) -> dict[str, Any]:
    error = run.error
    return {
        "finished_at": run.finished_at,
        "last_error": error and error.text,
        "error_type": error and error.type,
        "traceback": error and error.traceback,
        "eligible_at": run.eligible_at,
        "hold": run.hold,
        "shelved_step": run.shelved_step,
        "limited_by": run.limited_by,
        "crashes": run.crashes,
        "interruptions": run.interruptions,
        "children_total": run.children_total,
        "children_pending": run.children_pending,
        "wake_on_failure": run.wake_on_failure,
        "state": run.state,
        "result": run.result,
    }


def inserted_columns(row: Mapping[str, Any]) -> dict[str, Any]:
    """The columns of a recorded row that no move of the protocol changes."""
    return {
        name: value for name, value in row.items() if name not in COLUMNS and name not in NOT_IN_THE_JOURNAL
    }


def projection_of(instance_id: int, rev: int, recorded: Mapping[str, Any]) -> Projection:
    """Return a projection that begins with a recorded row: the base that a `snapshot` record gives."""
    row = msgspec.convert(recorded, Current)
    error = None
    if row.last_error is not None:
        error = ErrorInfo(text=row.last_error, type=row.error_type, traceback=row.traceback)
    run = Run(
        id=instance_id,
        machine=row.fsm,
        version=row.fsm_version,
        queue=row.queue,
        level=level_of(row.journal),
        columns=inserted_columns(recorded),
        parent=None if row.parent_id is None else {"run": row.parent_id, "barrier": row.barrier},
        step=row.step,
        visit=row.visit,
        round=row.round,
        attempt=row.attempt,
        eligible_at=row.eligible_at,
        hold=row.hold,
        shelved_step=row.shelved_step,
        limited_by=row.limited_by,
        crashes=row.crashes,
        interruptions=row.interruptions,
        claim_id=row.claim_id,
        token_hash=row.claim_token_hash,
        awaits=row.awaits,
        manual=cast("dict[str, Any] | None", recorded.get("manual")),
        children_total=row.children_total,
        children_pending=row.children_pending,
        wake_on_failure=row.wake_on_failure,
        state=row.state,
        result=row.result,
        error=error,
        finished_at=row.finished_at,
        since=(row.visit, row.round, row.attempt),
    )
    projection = Projection(rev=rev, run=run, suspended=_pause_in(recorded))
    if projection.suspended is not None:
        run.hold = 0
    _stand(projection, run, row)
    return projection


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _pause_in(row: Mapping[str, Any]) -> dict[str, Any] | None:
    """Who paused the instance, when and why; None if it is not paused. Requests to cancel are not in the history."""
    request = row.get("request")
    if not isinstance(request, dict) or cast("dict[str, Any]", request).get("kind") != "pause":
        return None
    return {name: cast("dict[str, Any]", request).get(name) for name in ("by", "reason", "at")}


def _stand(projection: Projection, run: Run, row: Current) -> None:
    """Open what the status of the row says is open: an attempt, a claim, a wait."""
    following = Place(row.await_step or row.step, row.visit, row.round, row.attempt, row.await_step)
    match row.status:
        case "done" | "failed" | "cancelled":
            projection.terminal = row.status
        case "awaiting_signal" if (manual := run.manual) is not None and "decision" not in manual:
            kind, then = str(manual.get("kind", "pause")), str(manual.get("then", row.step))
            place = Place(then, row.visit, row.round, row.attempt, row.await_step)
            projection.manual = Manual(
                row.step, kind, row.visit, place, row.eligible_at, row.await_deadline, manual
            )
        case "awaiting_signal":
            projection.wait = Wait(row.eligible_at, following, row.await_deadline, tuple(row.awaits or ()))
        case "awaiting_children":
            projection.wait = Wait(row.eligible_at, following, row.await_deadline)
        case _:
            attempt = _attempt(run, row)
            projection.attempts[attempt.key] = attempt
            run.current = attempt.key


def _attempt(run: Run, row: Current) -> Attempt:
    key = runnable_key(run.id, row.visit, row.step, row.round, row.attempt)
    idempotency = idempotency_key(run.id, row.visit, row.step)
    attempt = Attempt(key, row.step, row.visit, row.round, row.attempt, row.eligible_at, idempotency)
    if row.status == "executing" and row.claim_id is not None:
        attempt.status = "claimed"
        attempt.claim = Claim(
            row.claim_id, row.locked_by or "", row.eligible_at, row.lease_expires_at, row.claim_token_hash
        )
    return attempt


def differences(expected: Mapping[str, Any], row: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the columns in which a row differs: name → (expected, actual). A column that the row lacks is skipped.

    So is the request of a row that has ended: it keeps what it was asked for, which means nothing any more.
    """
    if row.get("finished_at") is not None:
        expected = {name: value for name, value in expected.items() if name != "request"}
    return {
        name: (value, row[name])
        for name, value in expected.items()
        if name in row and not _is_same(name, value, row[name])
    }


_TIMES: Final = frozenset(
    {"eligible_at", "lease_expires_at", "await_deadline", "inserted_at", "updated_at", "finished_at"}
)
_DOCUMENTS: Final = frozenset({"state", "result", "meta", "manual", "cancellation"})


def _is_same(name: str, one: object, other: object) -> bool:
    if name == "request":  # whether it is paused; by whom is in the history
        return _is_cancel(other) or (_pause_in({name: one}) is None) == (_pause_in({name: other}) is None)
    if one == other:
        # For Python true is 1 and 1 is 1.0; for JSON, and for a step that gets a state, they are not.
        return name not in _DOCUMENTS or one is other or _json(one) == _json(other)
    return name not in _DOCUMENTS and _comparable(name, one) == _comparable(name, other)


def _is_cancel(request: object) -> bool:
    """It takes the place of a pause that was asked for before, and no record tells so until the step has ended."""
    return isinstance(request, dict) and cast("dict[str, Any]", request).get("kind") == "cancel"


def _json(value: object) -> bytes:
    return msgspec.json.encode(value, order="deterministic")


def _comparable(name: str, value: object) -> object:
    """Times may be datetimes or the text that JSON has for them; bytes are text in Postgres's form."""
    if isinstance(value, bytes):
        return "\\x" + value.hex()
    if name in _TIMES and isinstance(value, str):
        try:
            return datetime.fromisoformat(value)
        except ValueError:
            return value
    return value
