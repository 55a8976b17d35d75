"""`Projection`: what the facts of one run add up to, and the questions that it answers."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final, Literal, get_args

import msgspec

from durable_actors.journal.kinds import Level, is_gapless
from durable_actors.journal.records import ErrorInfo

AttemptStatus = Literal["available", "claimed", "completed", "failed", "expired"]

Status = Literal[
    "absent",
    "runnable",
    "executing",
    "awaiting_signal",
    "awaiting_children",
    "paused",
    "done",
    "failed",
    "cancelled",
]
"""The status of a run. All but `absent` and `paused` are statuses of the row."""

Reason = Literal[
    "terminal",
    "manual",
    "completed_not_applied",
    "planned_not_scheduled",
    "expired_claim",
    "visible",
    "claimed",
    "scheduled_later",
    "idle",
    "started",
    "waiting",
    "absent",
]
"""Why a run is where it is; the first that holds, in this order."""

REASONS: Final[tuple[Reason, ...]] = get_args(Reason)


ANOMALIES: Final[Mapping[str, str]] = {
    "malformed_entry": "an unknown kind, a missing or ill-typed field, or a fact of a run that has not started",
    "unknown_runnable_intent": "no such attempt was scheduled",
    "conflicting_runnable_intent": "the attempt was scheduled with other fields; the first intent stays",
    "attempt_not_visible": "claimed before visible_at",
    "active_claim": "claimed, or taken away, while the lease of another claim is alive",
    "terminal_attempt": "claimed after its end",
    "terminal_run": "the run has ended",
    "stale_claim": "the claim is not the current one",
    "expired_claim": "the lease is over",
    "conflicting_completion": "completed again, with another result",
    "result_not_completed": "applied before its completion",
    "conflicting_result": "applied with a result that is not the completion's",
    "active_manual_step": "a second manual boundary, or a second pause",
    "stale_manual_resolution": "no such manual boundary is open, or no pause",
    "conflicting_child_run": "the child is known with another identity, or the identity with another child",
    "conflicting_workflow": "started again as something else",
    "conflicting_run_index": "the index has the run with another machine or queue",
    "conflicting_run_catalog": "the catalog has the run with another machine or queue",
    "active_wait": "a second wait while one is open",
    "stale_wait": "no such wait or barrier is open",
    "conflicting_barrier": "the count of a barrier does not follow from what was counted before",
    "conflicting_snapshot": "a snapshot differs from the row that the complete history before it gives",
    "other_definition": "a notice: a step ran with another definition of the machine than the run was started with",
}
"""Every reason of an anomaly. The last five are extensions."""

NOTICES: Final = frozenset({"other_definition"})
"""Reasons that are worth knowing and no damage: the history says what happened, and the row can be rebuilt from it."""


class Claim(msgspec.Struct, frozen=True):
    """Temporary exclusive ownership of an attempt."""

    id: str
    owner: str
    at: datetime
    lease_until: datetime | None = None
    """None if it was not recorded: such a lease never counts as expired."""
    token_hash: str | None = None


class Attempt(msgspec.Struct):
    """One attempt of a runnable."""

    key: str
    step: str
    visit: int
    round: int
    attempt: int
    visible_at: datetime
    idempotency_key: str
    input: str | None = None
    """A digest of the state that the step gets, if it is recorded."""
    status: AttemptStatus = "available"
    retry: bool = False
    """It follows a failed attempt."""
    claim: Claim | None = None
    """The current claim, or the last one."""
    result: dict[str, Any] | None = None
    error: ErrorInfo | None = None
    applied: bool = False
    """Its result has changed the run."""
    woken: bool = False
    """A notifier was told of it."""


class Place(msgspec.Struct, frozen=True):
    """Where the run goes when its wait ends."""

    step: str
    visit: int
    round: int
    attempt: int
    await_step: str | None = None
    """The column of that name: None if the same step runs again."""


class Wait(msgspec.Struct, frozen=True):
    """An open wait for signals, or for children."""

    since: datetime
    next: Place
    deadline: datetime | None = None
    names: tuple[str, ...] | None = None
    """The awaited signals; None for a barrier."""


class Manual(msgspec.Struct, frozen=True):
    """An open manual boundary."""

    step: str
    kind: str
    boundary: int
    """The visit that waits for the decision."""
    next: Place
    since: datetime
    deadline: datetime | None = None
    metadata: dict[str, Any] = {}


class ChildRun(msgspec.Struct, frozen=True):
    """A child run, and the attempt that started it."""

    child: int
    machine: str
    trigger: str
    child_key: str
    step: str
    """The step of the parent that started it: part of the child's identity, unlike the attempt."""
    origin: dict[str, Any]
    metadata: dict[str, Any] | None = None


class Receipt(msgspec.Struct, frozen=True):
    """A command that reached the run, by its type."""

    type: str
    at: datetime
    by: str | None = None
    key: str | None = None
    reason: str | None = None


class Anomaly(msgspec.Struct, frozen=True):
    """A fact that did not fit. It changed nothing but this list."""

    reason: str
    kind: str
    rev: int
    runnable_key: str | None = None
    claim_id: str | None = None
    step: str | None = None
    detail: str | None = None
    """Of "other_definition": the fingerprint of the definition that ran the step."""

    @property
    def is_notice(self) -> bool:
        """Whether it is worth knowing, and no damage."""
        return self.reason in NOTICES


class Run(msgspec.Struct, kw_only=True):
    """The run itself: the columns of its row that do not follow from an attempt or a wait."""

    id: int
    machine: str
    version: int
    queue: str
    level: Level
    columns: dict[str, Any]
    """What the insert wrote and no move of the protocol changes, as JSON."""
    parent: dict[str, Any] | None = None
    step: str
    visit: int
    round: int
    attempt: int
    current: str | None = None
    """The key of the current attempt, or of the last one."""
    eligible_at: datetime
    hold: int = 0
    shelved_step: str | None = None
    limited_by: str | None = None
    crashes: int = 0
    interruptions: int = 0
    claim_id: str | None = None
    token_hash: str | None = None
    awaits: list[str] | None = None
    manual: dict[str, Any] | None = None
    """The column: the open boundary, or the decision that the step gets."""
    children_total: int = 0
    children_pending: int = 0
    wake_on_failure: bool = False
    state: Any = None
    result: Any = None
    error: ErrorInfo | None = None
    finished_at: datetime | None = None
    approximate: bool = False
    """The last record does not say where the row stands, and moves before it may not be recorded."""
    since: tuple[int, int, int] | None = None
    """Visit, round and attempt of the row in the last snapshot, or of the last attempt that a revival made void:
    attempts up to there are not known; None: all are."""

    def stand_at(self, place: Mapping[str, Any]) -> None:
        """Set step, visit, round and attempt. Called by `fold`."""
        self.approximate = False
        self.step, self.visit = place["step"], place["visit"]
        self.round, self.attempt = place["round"], place["attempt"]

    def make_current(self, intent: Mapping[str, Any], *, keeps_time: bool = False) -> None:
        """Stand at an attempt that was scheduled. Called by `fold`."""
        self.stand_at(intent)
        self.current = intent["runnable_key"]
        if not keeps_time:
            self.eligible_at = intent["visible_at"]

    def drop_claim(self) -> None:
        """The claim has ended without an outcome, so the row no longer names it. Called by `fold`."""
        self.claim_id = self.token_hash = None
        self.hold = 0


class Projection(msgspec.Struct, kw_only=True):
    """What the facts of one run add up to. `fold` makes it; treat it as a value."""

    rev: int = 0
    """The revision of the last folded fact."""
    run: Run | None = None
    attempts: dict[str, Attempt] = {}
    planned: dict[str, Attempt] = {}
    """Runnables that were planned and not scheduled."""
    children: dict[int, ChildRun] = {}
    lineage: dict[str, int] = {}
    """The identities of the children → their ids."""
    wait: Wait | None = None
    """The open wait for signals or children."""
    barrier_failed: bool = False
    """A child of the open barrier has failed."""
    manual: Manual | None = None
    suspended: dict[str, Any] | None = None
    """Who paused the run, when and why."""
    terminal: Literal["done", "failed", "cancelled"] | None = None
    commands: list[Receipt] = []
    """Commands that reached the run, signals excepted."""
    anomalies: list[Anomaly] = []

    @property
    def current(self) -> Attempt | None:
        """The current attempt, or the last one."""
        key = None if self.run is None else self.run.current
        return None if key is None else self.attempts.get(key)

    @property
    def gapless(self) -> bool:
        """Whether every move is recorded."""
        return self.run is not None and is_gapless(self.run.level)

    @property
    def status(self) -> Status:
        """The status of the run."""
        if self.terminal is not None:
            return self.terminal
        if self.run is None:
            return "absent"
        if self.manual is not None:
            return "paused"
        if self.wait is not None:
            return "awaiting_children" if self.wait.names is None else "awaiting_signal"
        current = self.current
        return "executing" if current is not None and current.status == "claimed" else "runnable"

    def visible(self, now: datetime) -> list[Attempt]:
        """The attempts that may be claimed now, the most urgent first. None of a terminal or suspended run."""
        if self.terminal is not None or self.suspended is not None:
            return []
        found = [a for a in self.attempts.values() if a.status == "available" and a.visible_at <= now]
        return sorted(found, key=_claim_order)

    def expired(self, now: datetime) -> list[Attempt]:
        """The claimed attempts whose lease is over, so that they may be claimed again. None of a terminal run."""
        if self.terminal is not None:
            return []
        found = [a for a in self.attempts.values() if a.status == "claimed" and lease_is_over(a.claim, now)]
        return sorted(found, key=_claim_order)

    def pending_dispatches(self) -> list[Attempt]:
        """Runnables that were planned and not scheduled: their intents are missing."""
        return [] if self.terminal is not None else list(self.planned.values())

    def ready_to_apply(self) -> list[Attempt]:
        """Completed attempts whose result has not changed the run yet."""
        if self.terminal is not None:
            return []
        return [a for a in self.attempts.values() if a.status == "completed" and not a.applied]

    def reason(self, now: datetime) -> Reason:
        """Why the run is where it is: the first of `REASONS` that holds."""
        live = [a for a in self.attempts.values() if a.status in {"available", "claimed"}]
        holds: dict[Reason, bool] = {
            "terminal": self.terminal is not None,
            "manual": self.manual is not None or self.suspended is not None,
            "completed_not_applied": bool(self.ready_to_apply()),
            "planned_not_scheduled": bool(self.pending_dispatches()),
            "expired_claim": bool(self.expired(now)),
            "visible": bool(self.visible(now)),
            "claimed": any(a.status == "claimed" for a in live),
            "scheduled_later": bool(live),
            "idle": bool(self.attempts) and self.wait is None,
            "started": self.run is not None and self.wait is None,
            "waiting": self.wait is not None,
        }
        for reason in REASONS:
            if holds.get(reason):
                return reason
        return "absent"


def lease_is_over(claim: Claim | None, now: datetime) -> bool:
    """Return whether the lease has expired: at the very moment of its end it has."""
    return claim is not None and claim.lease_until is not None and claim.lease_until <= now


def _claim_order(attempt: Attempt) -> tuple[datetime, int, str]:
    return (attempt.visible_at, attempt.attempt, attempt.key)
