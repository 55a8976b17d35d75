"""The changes that the audit recorded, as values, and which of the engine's moves each change is. Pure.

A change has the row before and after it, the time, and the transactions that had ended by then. `audit` reads changes
from the database. Times are seconds since the epoch, on the server's clock.
"""

from __future__ import annotations

import enum
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Final, Literal

import attrs

Status = Literal["runnable", "executing", "awaiting_signal", "awaiting_children", "done", "failed"]
TERMINAL: Final = frozenset({"done", "failed"})


@attrs.frozen(kw_only=True)
class InstanceState:
    """An instance as a change left it: the columns that the invariants refer to."""

    id: int
    status: Status
    visit: int
    round: int = 0
    rev: int = 0
    step: str = "start"
    attempt: int = 0
    crashes: int = 0
    claim_id: str | None = None
    locked_by: str | None = None
    lease_expires_at: float | None = None
    eligible_at: float = 0.0
    await_deadline: float | None = None
    awaits: Sequence[str] | None = None
    await_step: str | None = None
    hold: int = 0
    priority: int = 0
    queue: str = "default"
    fsm: str = "m"
    version: int = 1
    partition_key: str | None = None
    unique_key: str | None = None
    unique_scope: Sequence[str] = ()
    parent_id: int | None = None
    barrier: int | None = None
    children_total: int = 0
    children_pending: int = 0
    wake_on_failure: bool = False
    inbox: bool = False
    last_error: str | None = None
    state: int | None = None
    """A fingerprint."""
    result: int | None = None
    """A fingerprint."""

    @property
    def ended(self) -> bool:
        """Whether it is done or failed."""
        return self.status in TERMINAL

    @property
    def occupies(self) -> str | None:
        """The unique key that it occupies in this state."""
        return self.unique_key if self.status in self.unique_scope else None

    @property
    def place(self) -> tuple[int, float, int]:
        """Its position among the rows of its partition key."""
        return (self.priority, self.eligible_at, self.id)


@attrs.frozen(kw_only=True)
class SignalState:
    """A signal as a change left it."""

    id: int
    target_id: int
    name: str
    dedup_key: str | None = None
    consumed_at: float | None = None


@attrs.frozen
class Change:
    """One change of one row: what is recorded for every change."""

    seq: int
    """Increases; for one instance and its inbox it follows the order of the commits."""
    txid: int
    """The transaction."""
    began: float
    """When its transaction began."""
    at: float
    """When it was written."""
    seen: float
    """The time just after the snapshot was taken."""
    snapshot: Snapshot | None
    """The transactions that had ended at a moment between `at` and `seen`; None: unknown."""
    writer: str
    """`application_name` of the session."""
    backend: int
    """The server process."""
    instance: int
    """The instance, or the target of the signal."""


@attrs.frozen
class InstanceChange(Change):
    """A change of an instance. `old` is None for an insert, `new` is None for a delete."""

    old: InstanceState | None
    new: InstanceState | None

    def __str__(self) -> str:
        if self.new is None:
            return "deleted"
        if self.old is None:
            return f"inserted: {_short(self.new)}"
        before, after = attrs.asdict(self.old), attrs.asdict(self.new)
        parts = [
            f"{name} {_value(before[name])} → {_value(value)}"
            for name, value in after.items()
            if value != before[name] and name not in _NOT_SHOWN
        ]
        return f"{_short(self.old)}: " + (", ".join(parts) or "written, unchanged")


@attrs.frozen
class SignalChange(Change):
    """A change of a signal. `old` is None when it is sent, `new` is None when it is deleted."""

    old: SignalState | None
    new: SignalState | None

    @property
    def signal(self) -> SignalState:
        """The signal after the change, or before it if the change deleted it."""
        found = self.new or self.old
        assert found is not None
        return found

    @property
    def takes(self) -> bool:
        """Whether it removes an unread signal from the inbox."""
        return (
            self.old is not None
            and self.old.consumed_at is None
            and (self.new is None or self.new.consumed_at is not None)
        )

    def __str__(self) -> str:
        what = "sent" if self.old is None else "deleted" if self.new is None else "marked as consumed"
        return f"signal {self.signal.id} ({self.signal.name}) {what}"


_NOT_SHOWN: Final = frozenset({"rev", "eligible_at", "inbox", "hold"})


def _short(state: InstanceState) -> str:
    claim = f" under {state.claim_id[:8]}" if state.status == "executing" and state.claim_id else ""
    return f"{state.status}{claim} in {state.step}, visit {state.visit}"


def _value(value: object) -> str:
    return value[:8] if isinstance(value, str) and len(value) == _UUID else str(value)


_UUID: Final = 36


@attrs.frozen
class Snapshot:
    """The transactions that had ended: Postgres' `pg_snapshot`."""

    xmin: int = 0
    xmax: int = 0
    running: frozenset[int] = frozenset()

    @classmethod
    def parse(cls, text: str) -> Snapshot:
        """Parse `xmin:xmax:running,…`."""
        xmin, xmax, running = text.split(":")
        return cls(int(xmin), int(xmax), frozenset(map(int, running.split(","))) if running else frozenset())

    def sees(self, txid: int) -> bool:
        """Whether that transaction had ended."""
        return txid < self.xmin or (txid < self.xmax and txid not in self.running)


@attrs.frozen
class Clock:
    """Converts the machine's monotonic clock to the server's, from moments at which both were read."""

    points: Sequence[tuple[int, float, float]] = ()
    """Monotonic nanoseconds, the server's seconds, and the possible error in seconds; in order."""

    def at(self, monotonic_ns: int) -> float:
        """The server's time at that moment."""
        seconds = monotonic_ns / 1e9
        if not self.points:
            return seconds
        index = bisect_right([point[0] for point in self.points], monotonic_ns)
        near = self.points[max(0, index - 1) : index + 1]
        if len(near) == 1 or index == 0:
            return seconds + _offset(near[0])
        (first, second), share = near, (monotonic_ns - near[0][0]) / max(1, near[1][0] - near[0][0])
        return seconds + _offset(first) + (_offset(second) - _offset(first)) * share

    @property
    def doubt(self) -> float:
        """The possible error of `at`, in seconds: round trips, and the drift between the two clocks."""
        offsets = [_offset(point) for point in self.points]
        drift = max((abs(b - a) for a, b in pairwise(offsets)), default=0.0)
        return drift + max((point[2] for point in self.points), default=0.0)


def _offset(point: tuple[int, float, float]) -> float:
    return point[1] - point[0] / 1e9


class Move(enum.Enum):
    """What a change of an instance did. The engine makes these moves and no others.

    =========  ==============================================  ===============================================
    move       from → to                                       made by
    =========  ==============================================  ===============================================
    INSERT     nothing → a row                                 a client, a step, a parent's outcome
    PICK       runnable → executing, a new claim               a feeder
    RENEW      executing, a later lease                        the heartbeat
    COMMIT     executing → anything, the claim kept            the outcome of the step, fenced
    RELEASE    executing → runnable, the claim cleared         its worker: a drain, a busy key, a cancelled step
    REAP       the same, crashes + 1; or failed: quarantined   a reaper
               (crashes unchanged: its node stopped in order)
    CRASH      the same, `last_error` names the exception      its worker: SystemExit and the like in a step
    WAKE       awaiting_signal → runnable                      a signal, the park's recheck, a deadline
    COUNT      awaiting_children, fewer (or more) pending      a child's end (or its retry)
    OPEN       awaiting_children → runnable                    the last child, or a deadline
    OFFER      runnable, another hold                          the pick, a promotion
    FLAG       only the mark that its inbox is in use          a signal
    RETRY      failed → runnable                               an operator
    DELETE     a row → nothing                                 retention
    FOREIGN    anything else                                   nobody: no rule allows such a write
    =========  ==============================================  ===============================================
    """

    INSERT = enum.auto()
    PICK = enum.auto()
    RENEW = enum.auto()
    COMMIT = enum.auto()
    RELEASE = enum.auto()
    REAP = enum.auto()
    CRASH = enum.auto()
    WAKE = enum.auto()
    COUNT = enum.auto()
    OPEN = enum.auto()
    OFFER = enum.auto()
    FLAG = enum.auto()
    RETRY = enum.auto()
    DELETE = enum.auto()
    FOREIGN = enum.auto()


def move_of(old: InstanceState | None, new: InstanceState | None) -> Move:
    """Classify a change."""
    if old is None:
        return Move.INSERT
    if new is None:
        return Move.DELETE
    return _FROM[old.status](old, new)


def _from_runnable(old: InstanceState, new: InstanceState) -> Move:
    if new.status == "executing" and new.claim_id not in {None, old.claim_id}:
        return _only(old, new, Move.PICK, "status", "hold", "claim_id", "locked_by", "lease_expires_at")
    return _quiet(old, new, Move.OFFER, "hold")


def _from_executing(old: InstanceState, new: InstanceState) -> Move:
    if new.claim_id == old.claim_id:
        if new.status != "executing" or new.visit == old.visit + 1:
            return Move.COMMIT if new.visit - old.visit in {0, 1} else Move.FOREIGN
        return _quiet(old, new, Move.RENEW, "lease_expires_at")
    if new.claim_id is not None or new.locked_by is not None:
        return Move.FOREIGN
    return _released(old, new)


def _released(old: InstanceState, new: InstanceState) -> Move:
    released = (*_CLAIM, "status", "attempt", "rev", "hold")
    if new.crashes == old.crashes and new.status == "runnable" and new.attempt - old.attempt in {0, 1}:
        if new.attempt == old.attempt and new.eligible_at != old.eligible_at:
            return _only(old, new, Move.REAP, *released, "eligible_at")  # its node had stopped in order
        return _only(old, new, Move.RELEASE, *released)
    if new.crashes == old.crashes + 1 and new.status in {"runnable", "failed"}:
        move = Move.CRASH if _names_exception(new) else Move.REAP
        return _only(old, new, move, *released, "crashes", "eligible_at", "last_error")
    return Move.FOREIGN


def _names_exception(new: InstanceState) -> bool:
    """`crash_claims.sql` writes which exception was raised. `reap_claims.sql` does not know it."""
    error = new.last_error or ""
    if new.status == "failed":
        return error.startswith("quarantined: ") and "without an outcome (the last time: " in error
    return error.startswith(f"crash {new.crashes}: ")


def _from_await(old: InstanceState, new: InstanceState) -> Move:
    if new.status == "runnable" and new.step == (old.await_step or old.step):
        return _only(old, new, Move.WAKE, *_WOKEN, "inbox")
    return _quiet(old, new, Move.FLAG)


def _from_barrier(old: InstanceState, new: InstanceState) -> Move:
    if new.status == "runnable" and new.step == (old.await_step or old.step):
        return _only(old, new, Move.OPEN, *_WOKEN, "children_pending")
    return _quiet(old, new, Move.COUNT, "children_pending")


def _from_end(old: InstanceState, new: InstanceState) -> Move:
    if old.status == "failed" and new.status == "runnable" and not new.attempt and not new.crashes:
        free = ("status", "hold", "attempt", "crashes", "rev", "eligible_at", "claim_id")
        return _only(old, new, Move.RETRY, *free)
    return Move.FOREIGN


_FROM: Final[Mapping[Status, Callable[[InstanceState, InstanceState], Move]]] = {
    "runnable": _from_runnable,
    "executing": _from_executing,
    "awaiting_signal": _from_await,
    "awaiting_children": _from_barrier,
    "done": _from_end,
    "failed": _from_end,
}
_CLAIM: Final = ("claim_id", "locked_by", "lease_expires_at")
_WOKEN: Final = ("status", "eligible_at", "step", "await_step", "await_deadline", "rev")


def _only(old: InstanceState, new: InstanceState, move: Move, *free: str) -> Move:
    """The move if only these columns changed, else FOREIGN."""
    same = attrs.evolve(new, **{name: getattr(old, name) for name in free})
    return move if same == old else Move.FOREIGN


def _quiet(old: InstanceState, new: InstanceState, move: Move, *free: str) -> Move:
    """The move if only these columns changed, FLAG if only the inbox's mark did, else FOREIGN."""
    if all(getattr(old, name) == getattr(new, name) for name in free):
        return _only(old, new, Move.FLAG, "inbox")
    return _only(old, new, move, *free)
