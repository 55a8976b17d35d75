"""The kinds of records. One record is written per move of a row, and its kind is the name of the move.

`KINDS` says of every kind what it means, from which level on it is recorded, and what a record of it must contain. The
classes in this file describe `Record.data`: a field without a default must be there. Keys that no field names are
allowed, so that a newer release may write more.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Final, Literal, get_args

import msgspec
from msgspec import UNSET, UnsetType

Instant = Annotated[datetime, msgspec.Meta(tz=True)]
"""An instant with a time zone. One without could not be compared with the others, so it is damage of the record."""

Level = Literal["off", "auto", "outcomes", "claims", "full"]
"""How much of an instance is recorded. Each level records what the one before it does, and more."""

LEVELS: Final[tuple[Level, ...]] = get_args(Level)


def level_of(stored: object) -> Level:
    """Return the level that the column `journal` of a row names, as text or as a position in `LEVELS`."""
    if isinstance(stored, str) and stored in LEVELS:
        return stored
    if isinstance(stored, int) and 0 <= stored < len(LEVELS):
        return LEVELS[stored]
    raise ValueError(f"{stored!r} is no journal level; levels are {', '.join(LEVELS)}")


def known_level(stored: object) -> Level | None:
    """As `level_of`; None for what is no level: a hand may have written any number into the column of a row."""
    try:
        return level_of(stored)
    except ValueError:
        return None


def is_gapless(level: Level) -> bool:
    """Return whether every move is recorded at this level, so that a missing revision is damage."""
    return level in {"claims", "full"}


class _Part(msgspec.Struct, frozen=True, kw_only=True):
    """A part of `Record.data`."""


class Folded(_Part, frozen=True, kw_only=True):
    """Written below level "claims": the claim of this record, and other moves before it, were not recorded."""

    at: Instant | None = None
    """When the claim was taken, if that is known."""
    lease_until: Instant | None = None
    """When its lease expires, if that is known."""
    token_hash: str | None = None


class Command(_Part, frozen=True, kw_only=True):
    """The receipt of what somebody outside the instance asked for. `Record.by` says who."""

    type: str
    """start, rerun, signal, cancel, retry, run_now, pause, resume, proceed, approve, reject."""
    key: str | None = None
    """The idempotency key: the same key again is a second delivery of the same command."""
    reason: str | None = None
    payload: Any = None
    metadata: dict[str, Any] = {}
    """For people. Secrets in it are redacted before it is stored."""


class ChildStart(_Part, frozen=True, kw_only=True):
    """A child that this instance started."""

    id: int
    machine: str
    step: str
    """The step in which it begins."""
    key: str | None = None
    """Its key among the children of this step. Children of a barrier have none: their position stands for it."""
    meta: dict[str, Any] | None = None


class Boundary(_Part, frozen=True, kw_only=True):
    """A manual boundary: the instance is parked until somebody decides."""

    kind: Literal["pause", "approval"]
    then: str | None = None
    on_reject: str | None = None
    on_timeout: str | None = None
    title: str | None = None
    data: Any = None


class Data(_Part, frozen=True, kw_only=True):
    """What every record may have."""

    round: int = 0
    """The row's `round` before the move."""
    columns: dict[str, Any] = {}
    """Columns that the move wrote and that the protocol does not know, such as `partition_key`."""


class ThrottledData(Data, frozen=True, kw_only=True):
    """`throttled`."""

    limited_by: str
    """The limit, with its key, that it waits for."""


class ParentStart(_Part, frozen=True, kw_only=True):
    """Who started a child, in the child's own record."""

    id: int
    machine: str | None = None
    step: str | None = None
    """The step of the parent that started it."""
    key: str | None = None
    """Its key among the children of that step; None for children of a barrier."""


class RowData(Data, frozen=True, kw_only=True):
    """`started`; `snapshot` has more."""

    row: dict[str, Any]
    """The columns of the row after the move, as JSON."""
    command: Command | None = None
    parent: ParentStart | None = None
    """Of a child that was started: its parent then."""


class SnapshotData(RowData, frozen=True, kw_only=True):
    """`snapshot`."""

    needed: int | None = None
    """While it waits for its children: for how many its barrier waited at first."""
    retention: bool = False
    """Retention wrote it, as it does now and then in a long history: records before it may be deleted."""


class ClaimedData(Data, frozen=True, kw_only=True):
    """`claimed`."""

    lease_until: Instant
    token_hash: str | None = None


class UnderClaim(Data, frozen=True, kw_only=True):
    """Records that are written under a claim, and most of which end it."""

    folded: Folded | None = None
    """Present below level "claims" only."""
    renewed_until: Instant | None = None
    """The end of the lease after the last heartbeat, if there was one. Heartbeats have no records of their own."""
    late: bool = False
    """The lease had expired, and the store accepted the write because the claim was current (`late_commit`)."""
    definition: str | None = None
    """The fingerprint of the definition that ran the step, if it is not the one that the instance was started with."""


class OutcomeData(UnderClaim, frozen=True, kw_only=True):
    """What every outcome may have."""

    state: Any | UnsetType = UNSET
    """The new state, at level "full"; absent if the outcome keeps the state."""


class NextData(OutcomeData, frozen=True, kw_only=True):
    """`next`."""

    eligible_at: Instant | None = None
    """When the entered step may run, if not at once."""
    keeps_claim: bool = False
    """The row stays executing: the entered step runs on the same claim."""
    lease_until: Instant | None = None
    """The end of the lease of the claim that is kept."""


class RetryData(OutcomeData, frozen=True, kw_only=True):
    """`retry`."""

    eligible_at: Instant
    """When the next attempt may run."""


class ParkedData(OutcomeData, frozen=True, kw_only=True):
    """`parked`."""

    awaits: list[str]
    deadline: Instant | None = None


class SpawnedData(OutcomeData, frozen=True, kw_only=True):
    """`spawned`."""

    children_total: int
    children_pending: int
    """How many of them the barrier waits for; 0 if the step is entered at once."""
    wake_on_failure: bool = False
    deadline: Instant | None = None
    children: list[ChildStart] = []
    """Who they are. If there are too many to list, their own `started` records have it."""


class DoneData(UnderClaim, frozen=True, kw_only=True):
    """`done`."""

    result: Any | UnsetType = UNSET
    """At level "full"."""


class FailedData(UnderClaim, frozen=True, kw_only=True):
    """`failed`."""

    to_attempt: int | None = None
    """The row's `attempt` after the move, if it is another: no run was left, so the one before this was the last."""


class CancelledData(UnderClaim, frozen=True, kw_only=True):
    """`cancelled`. With `claim_id` its owner committed it, as an outcome; without, somebody took the row from it."""

    command: Command | None = None
    """Absent if nobody asked for it: what the instance depends on has failed, or its parent was cancelled."""


class CompensatingData(Data, frozen=True, kw_only=True):
    """`compensating`. `columns` has the cancellation."""

    command: Command | None = None
    eligible_at: Instant | None = None


class ReturnedData(UnderClaim, frozen=True, kw_only=True):
    """A claim that ended without an outcome."""

    to_attempt: int
    """The row's `attempt` after the move."""
    eligible_at: Instant
    """The row's `eligible_at` after the move."""


class ReleasedData(ReturnedData, frozen=True, kw_only=True):
    """`released`."""

    hold: int = 0
    """The row's `hold` after the move."""
    interrupted: bool = False
    """A drain ended the run; it is counted in `interruptions`, not as an attempt."""


class CrashedData(ReturnedData, frozen=True, kw_only=True):
    """`crashed`."""

    failed: bool = False
    """It crashed too often: the instance has failed."""


class ReapedData(ReturnedData, frozen=True, kw_only=True):
    """`reaped`."""

    proof: Literal["lease", "dead", "stopped"]
    """Why the claim could be taken: its lease had expired, its node was proved dead, its node had stopped in order."""
    failed: bool = False
    """It crashed too often: the instance has failed."""


class WokenData(Data, frozen=True, kw_only=True):
    """`woken`."""

    eligible_at: Instant | None = None
    signals: list[dict[str, Any]] = []
    """The signals that woke it: id, name, and at level "full" the payload."""


class ExpiredData(Data, frozen=True, kw_only=True):
    """`expired`."""

    waited_for: Literal["signal", "children"]
    eligible_at: Instant | None = None


class CountedData(Data, frozen=True, kw_only=True):
    """`child_ended`, `joined`, `recounted`."""

    count: int
    """How many children were counted."""
    pending: int
    """How many the barrier waits for after the move."""
    failed: bool = False
    """Whether one of them failed."""
    eligible_at: Instant | None = None


class RevivedData(Data, frozen=True, kw_only=True):
    """`revived`, `hastened`."""

    command: Command | None = None
    eligible_at: Instant | None = None
    hold: int = 0
    """The row's `hold` after the move: 5 if it waits for what it comes after."""


class UpstreamEndedData(Data, frozen=True, kw_only=True):
    """`unblocked`, `doomed`. Of a doomed one `columns` has the cancellation, which names what did not succeed."""

    eligible_at: Instant


class ChildStartedData(UnderClaim, frozen=True, kw_only=True):
    """`child_started`."""

    child: ChildStart


class UnfitData(Data, frozen=True, kw_only=True):
    """`unfit`: columns of the row after the move; absent if it did not change them."""

    eligible_at: Instant | None = None
    crashes: int | None = None
    interruptions: int | None = None
    children_pending: int | None = None


class AskedData(OutcomeData, frozen=True, kw_only=True):
    """`asked`: the column `manual` after the move is `boundary`, as it was written."""

    boundary: Boundary
    deadline: Instant | None = None


class PausedData(Data, frozen=True, kw_only=True):
    """`paused`."""

    command: Command | None = None


class ResolvedData(Data, frozen=True, kw_only=True):
    """`resumed`, `proceeded`, `approved`, `rejected`."""

    command: Command
    decision: dict[str, Any] = {}
    """What the step gets as `ctx.decision`."""
    eligible_at: Instant | None = None
    hold: int = 0
    """Of `resumed`: the row's `hold` after the move; 5 if it waits for what it comes after."""
    failed: bool = False
    """A rejection without `on_reject`: the instance has failed."""


class TimedOutData(Data, frozen=True, kw_only=True):
    """`timed_out`."""

    decision: dict[str, Any] = {}
    """What the step gets as `ctx.decision`."""
    eligible_at: Instant | None = None
    failed: bool = False
    """Neither `on_timeout` nor `on_reject`: the instance has failed."""


class WakeupData(Data, frozen=True, kw_only=True):
    """`wakeup`."""

    visible_at: Instant | None = None


class Kind(msgspec.Struct, frozen=True):
    """What is to be known of one kind of record."""

    meaning: str
    level: Literal["outcomes", "claims"]
    """The first level that records it."""
    fields: tuple[str, ...]
    """The fields of `Record` that it needs beside rev, at and kind."""
    data: type[Data]
    """The form of `Record.data`."""


_PLACE: Final = ("step", "visit", "attempt")
_CLAIM: Final = (*_PLACE, "claim_id")
_WAKE: Final = (*_PLACE, "to_step")

KINDS: Final[dict[str, Kind]] = {
    "started": Kind("the row was inserted", "outcomes", (), RowData),
    "claimed": Kind("a node took the row to run its step", "claims", (*_CLAIM, "node"), ClaimedData),
    "next": Kind("outcome Next: a step was entered", "outcomes", (*_CLAIM, "to_step"), NextData),
    "retry": Kind("outcome Retry: the same step runs again", "outcomes", _CLAIM, RetryData),
    "parked": Kind("outcome Await: the row waits for a signal", "outcomes", _CLAIM, ParkedData),
    "spawned": Kind(
        "outcome ScheduleChildren: the row waits for its children",
        "outcomes",
        (*_CLAIM, "to_step"),
        SpawnedData,
    ),
    "done": Kind("outcome Done: the instance has ended with a result", "outcomes", _CLAIM, DoneData),
    "failed": Kind("outcome Stop: the instance has failed", "outcomes", (*_CLAIM, "error"), FailedData),
    "cancelled": Kind("the instance was cancelled", "outcomes", _PLACE, CancelledData),
    "compensating": Kind(
        "the instance was cancelled, and entered the step that compensates",
        "outcomes",
        _WAKE,
        CompensatingData,
    ),
    "released": Kind("a node gave the claim back without an outcome", "claims", _CLAIM, ReleasedData),
    "crashed": Kind("the step raised what no handler may catch", "outcomes", (*_CLAIM, "error"), CrashedData),
    "reaped": Kind("the claim was taken from a dead or silent node", "claims", _CLAIM, ReapedData),
    "woken": Kind("a signal ended the wait", "claims", _WAKE, WokenData),
    "expired": Kind("the deadline of a wait or barrier passed", "claims", _WAKE, ExpiredData),
    "child_ended": Kind(
        "ended children were counted; the barrier stays closed", "claims", _PLACE, CountedData
    ),
    "joined": Kind("ended children were counted; the barrier opened", "claims", _WAKE, CountedData),
    "recounted": Kind("a revived child is waited for again", "claims", _PLACE, CountedData),
    "held": Kind("a sibling of its partition key goes first", "claims", _PLACE, Data),
    "shelved": Kind("it waits for a node that knows its machine and step", "claims", _PLACE, Data),
    "throttled": Kind("it waits for a token or a slot of a limit", "claims", _PLACE, ThrottledData),
    "limited": Kind("the limits that its next step uses", "outcomes", _PLACE, Data),
    "dropped": Kind("a limit is full, and what finds it so is cancelled", "outcomes", _PLACE, Data),
    "offered": Kind("picks may claim it again", "claims", _PLACE, Data),
    "revived": Kind("a failed or cancelled instance runs again", "outcomes", _PLACE, RevivedData),
    "unblocked": Kind("all that it comes after has ended", "claims", _PLACE, UpstreamEndedData),
    "doomed": Kind("what it comes after did not succeed", "outcomes", _PLACE, UpstreamEndedData),
    "hastened": Kind("a delayed instance is due at once", "outcomes", _PLACE, RevivedData),
    "child_started": Kind("its step started a child", "outcomes", _CLAIM, ChildStartedData),
    "unfit": Kind(
        "a row that no index can hold, written by hand, has failed", "outcomes", (*_PLACE, "error"), UnfitData
    ),
    "asked": Kind(
        "outcome Pause or Approval: the row waits for a person", "outcomes", (*_CLAIM, "to_step"), AskedData
    ),
    "timed_out": Kind("nobody decided in time", "outcomes", _PLACE, TimedOutData),
    "paused": Kind("an operator paused it", "outcomes", _PLACE, PausedData),
    "resumed": Kind("the operator's pause has ended", "outcomes", _PLACE, ResolvedData),
    "approved": Kind("somebody approved", "outcomes", _WAKE, ResolvedData),
    "rejected": Kind("somebody rejected", "outcomes", _PLACE, ResolvedData),
    "proceeded": Kind("somebody let it proceed", "outcomes", _WAKE, ResolvedData),
    "snapshot": Kind(
        "the whole row: recording began or its level changed, or older records may be deleted",
        "outcomes",
        (),
        SnapshotData,
    ),
    "wakeup": Kind("a notifier was told that the row is due", "claims", _PLACE, WakeupData),
}

_FAILED_ATTEMPTS: Final = frozenset({"retry", "failed", "crashed", "unfit"})


def is_recorded(kind: str, level: Level, *, job: bool = False, failed: bool = False) -> bool:
    """Return whether a move is recorded. `job`: the instance is a job. `failed`: the move ends it as failed.

    At level "auto", machines record what "outcomes" does, and jobs their failed attempts only. A move that fails the
    instance, such as a reap that quarantines it, is recorded at every level but "off".
    """
    if level == "off":
        return False
    if is_gapless(level) or failed:
        return True
    if level == "auto" and job:
        return kind in _FAILED_ATTEMPTS
    return KINDS[kind].level == "outcomes"
