"""The changes that the audit recorded, as values, and which of the engine's moves each change is. Pure.

A change has the row before and after it, the time, and the transactions that had ended by then. `audit` reads changes
from the database. Times are seconds since the epoch, on the server's clock.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import pairwise
from operator import attrgetter
from typing import Any, Final

import attrs
from durable_actors._store import moves
from durable_actors._store.move_parts import MoveName
from durable_actors._store.move_rules import Row
from durable_actors.machine import ENDED, Status


@attrs.frozen(kw_only=True)
class InstanceState:
    """An instance as a change left it: the columns that the invariants refer to."""

    id: int
    status: Status
    visit: int
    round: int = 0
    rev: int = 1
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
    request: str | None = None
    """What a command has asked of it, or of the node that runs it: JSON."""
    manual: Mapping[str, Any] | None = None
    """The boundary at which it waits for a person, and from then on what was decided."""
    cancellation: Mapping[str, Any] | None = None
    """Who has cancelled it, from when it compensates on."""
    slot: str | None = None
    """The slot that its step uses, with its key."""
    rerun_of: int | None = None
    """The instance from which a command has started it."""
    state: int | None = None
    """A fingerprint."""
    result: int | None = None
    """A fingerprint."""

    @property
    def ended(self) -> bool:
        """Whether it has ended: done, failed or cancelled."""
        return self.status in ENDED

    @property
    def asked_to_end(self) -> bool:
        """Whether a command has asked to cancel it."""
        return self.request is not None and json.loads(self.request).get("kind") == "cancel"

    @property
    def paused(self) -> bool:
        """Whether a command has paused it."""
        return self.request is not None and json.loads(self.request).get("kind") == "pause"

    @property
    def decision(self) -> Mapping[str, Any] | None:
        """What a person has decided for the step that it is in."""
        return None if self.manual is None else self.manual.get("decision")

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


@attrs.frozen(kw_only=True)
class ReceiptRow:
    """A command that was carried out, as the table of receipts has it."""

    id: int
    xid: int
    """The transaction: the lower 32 bits of its number."""
    command: str
    scope: str
    target: str
    by: str | None = None
    key: str | None = None
    result: Any = None
    data: Mapping[str, Any] = attrs.field(factory=dict[str, Any])
    began: float = 0.0
    """When its transaction began."""

    @property
    def told(self) -> object:
        """What its caller was told; of a queue, which."""
        return self.target if self.scope == "queue" else self.result

    @property
    def instance(self) -> int | None:
        """The instance; None: it names something else."""
        return int(self.target) if self.scope == "instance" else None

    def __str__(self) -> str:
        what = f"{self.command} of {self.scope} {self.target}"
        return f"receipt {self.id}: {what} by {self.by}, key {self.key}: {self.result}"


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


_columns: Final = attrgetter(*(field.name for field in attrs.fields(InstanceState)))
_NAMES: Final = tuple(field.name for field in attrs.fields(InstanceState))


def _row(state: InstanceState | None) -> Row | None:
    if state is None:
        return None
    row = dict(zip(_NAMES, _columns(state), strict=True))
    row["rate_limit"] = row.pop("slot")  # the part of the column that is recorded
    return row if state.request is None else {**row, "request": json.loads(state.request)}


AUDITED: Final = tuple(
    move for move in moves.MOVES if move.name not in {"rebuilt", "restored", "snapshot", "wakeup"}
)
"""The moves of engines and clients. Nobody repairs rows in an audited run, and no engine has a notifier; for snapshots
see `is_snapshot`."""


def is_snapshot(old: InstanceState, new: InstanceState) -> bool:
    """Whether a janitor has recorded the row as it is: nothing changes but `rev`."""
    return new.rev == old.rev + 1 and attrs.evolve(new, rev=old.rev) == old


def move_of(old: InstanceState | None, new: InstanceState | None) -> MoveName | None:
    """The engine's move that a change is; None: nobody may change a row like this.

    Of the same columns with a wrong `rev` it is the same move: I3 reports the `rev`.
    """
    before, after = _row(old), _row(new)
    found = moves.move_of(before, after, AUDITED)
    if found is None and before is not None and after is not None:
        revs = (before["rev"] + 1, before["rev"])
        others = (moves.move_of(before, {**after, "rev": rev}, AUDITED) for rev in revs)
        found = next((move for move in others if move is not None), None)
    return None if found is None else found.name
