"""What the audit tells: rows before and after each change, who had committed by then, and when it was.

Values and nothing else; `audit` reads them from the database. Times are seconds since the epoch, by the server's clock.
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
    """An instance as a change left it: the columns of its row that invariants speak of."""

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
        """The unique key that it occupies now."""
        return self.unique_key if self.status in self.unique_scope else None

    @property
    def place(self) -> tuple[int, float, int]:
        """Its place in the order of its key."""
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
    """One change of one row: what every change tells."""

    seq: int
    """Grows; of one instance and its inbox in the order of the commits."""
    txid: int
    """The transaction."""
    began: float
    """When its transaction began."""
    at: float
    """When it was written."""
    seen: float
    """A moment later."""
    snapshot: Snapshot | None
    """Which transactions had ended, between these two; None: unknown."""
    writer: str
    """`application_name` of the session."""
    backend: int
    """The server process."""
    instance: int
    """The instance, or the target of the signal."""


@attrs.frozen
class InstanceChange(Change):
    """A change of an instance; without `old` it was inserted, without `new` deleted."""

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
            if value != before[name] and name not in _UNTOLD
        ]
        return f"{_short(self.old)}: " + (", ".join(parts) or "written, unchanged")


@attrs.frozen
class SignalChange(Change):
    """A change of a signal; without `old` it was sent, without `new` deleted."""

    old: SignalState | None
    new: SignalState | None

    @property
    def signal(self) -> SignalState:
        """The signal, as it is now or was last."""
        found = self.new or self.old
        assert found is not None
        return found

    @property
    def takes(self) -> bool:
        """Whether it takes an unread signal out of the inbox."""
        return (
            self.old is not None
            and self.old.consumed_at is None
            and (self.new is None or self.new.consumed_at is not None)
        )

    def __str__(self) -> str:
        what = "sent" if self.old is None else "deleted" if self.new is None else "marked as consumed"
        return f"signal {self.signal.id} ({self.signal.name}) {what}"


_UNTOLD: Final = frozenset({"rev", "eligible_at", "inbox", "hold"})


def _short(state: InstanceState) -> str:
    claim = f" under {state.claim_id[:8]}" if state.status == "executing" and state.claim_id else ""
    return f"{state.status}{claim} in {state.step}, visit {state.visit}"


def _value(value: object) -> str:
    return value[:8] if isinstance(value, str) and len(value) == _UUID else str(value)


_UUID: Final = 36


@attrs.frozen
class Snapshot:
    """Which transactions had ended: Postgres' `pg_snapshot`."""

    xmin: int = 0
    xmax: int = 0
    running: frozenset[int] = frozenset()

    @classmethod
    def parse(cls, text: str) -> Snapshot:
        """Read `xmin:xmax:running,…`."""
        xmin, xmax, running = text.split(":")
        return cls(int(xmin), int(xmax), frozenset(map(int, running.split(","))) if running else frozenset())

    def sees(self, txid: int) -> bool:
        """Whether that transaction had ended."""
        return txid < self.xmin or (txid < self.xmax and txid not in self.running)


@attrs.frozen
class Clock:
    """From the machine's monotonic clock to the server's, by moments at which both were read."""

    points: Sequence[tuple[int, float, float]] = ()
    """Monotonic nanoseconds, the server's seconds, and by how many seconds that may be wrong; in order."""

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
        """By how many seconds `at` may be wrong: round trips, and what the clocks drifted apart meanwhile."""
        offsets = [_offset(point) for point in self.points]
        drift = max((abs(b - a) for a, b in pairwise(offsets)), default=0.0)
        return drift + max((point[2] for point in self.points), default=0.0)


def _offset(point: tuple[int, float, float]) -> float:
    return point[1] - point[0] / 1e9


class Move(enum.Enum):
    """See the table above."""

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
    """Tell what a change did."""
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
    return _given_back(old, new)


def _given_back(old: InstanceState, new: InstanceState) -> Move:
    given_back = (*_CLAIM, "status", "attempt", "rev", "hold")
    if new.crashes == old.crashes and new.status == "runnable" and new.attempt - old.attempt in {0, 1}:
        if new.attempt == old.attempt and new.eligible_at != old.eligible_at:
            return _only(
                old, new, Move.REAP, *given_back, "eligible_at"
            )  # its node had stopped in good order
        return _only(old, new, Move.RELEASE, *given_back)
    if new.crashes == old.crashes + 1 and new.status in {"runnable", "failed"}:
        move = Move.CRASH if _tells_crash(new) else Move.REAP
        return _only(old, new, move, *given_back, "crashes", "eligible_at", "last_error")
    return Move.FOREIGN


def _tells_crash(new: InstanceState) -> bool:
    """crash_claims.sql says what was raised; reap_claims.sql, which has seen nothing, does not."""
    told = new.last_error or ""
    if new.status == "failed":
        return told.startswith("quarantined: ") and "without an outcome (the last time: " in told
    return told.startswith(f"crash {new.crashes}: ")


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
    """The move, if nothing changed but these columns."""
    same = attrs.evolve(new, **{name: getattr(old, name) for name in free})
    return move if same == old else Move.FOREIGN


def _quiet(old: InstanceState, new: InstanceState, move: Move, *free: str) -> Move:
    """The move, if nothing changed but these columns and the inbox's mark; that alone is a FLAG."""
    if all(getattr(old, name) == getattr(new, name) for name in free):
        return _only(old, new, Move.FLAG, "inbox")
    return _only(old, new, move, *free)
