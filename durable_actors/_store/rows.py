"""The values between the engine and the store: claims come out, transitions go in."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, Literal

import attrs

from durable_actors.machine import ENDED, FAILURES, OFF, OUTCOMES, Cancellation, Status


@attrs.define
class RecordedClaim:
    """What the records of a claim's outcomes need. Apart from the claim, so that others need not set it."""

    fingerprint: str | None
    """The definition that it was started with, if that is known."""
    lease_until: str | None
    """End of its lease as the database has it; None if that is not recorded."""
    definition: str | None = None
    """The definition that runs its step, if it is another one."""
    links: int = 0
    """Its part in a graph (`links.NEEDS`, `links.FEEDS`): whether it comes after others, and others after it."""
    trace: str | None = None
    """The trace in which it was inserted, as stored (`_tracing.TraceContext`)."""
    rate_limit: str | None = None
    """The limits that its step uses (`_limits.uses_of`); None: none."""
    weight: int = 1
    """The weight of those that have none of their own."""
    unstarted: bool = False
    """It is released before its step began: what its limits were charged is given back."""


NULL: Final = b"null"
"""The result of `Done()`: JSON null."""
UNRECORDED: Final = RecordedClaim(None, None)
"""Of claims whose outcomes are not recorded, that are in no graph and no trace, and use no limit. They share it:
nothing sets its fields."""


# Not frozen: every step of the hot path makes one, and setting frozen slots costs attrs twice as much.
@attrs.define(eq=False)
class Claim:
    """Temporary, exclusive ownership of an instance, with the row as it was claimed."""

    id: int
    claim_id: str
    """A uuid that never repeats. Together with `visit` it is the fence of every write."""
    queue: str
    priority: int
    fsm: str
    version: int
    step: str
    attempt: int
    crashes: int
    visit: int
    state: bytes
    """JSON as the database stores it."""
    partition_key: str | None
    parent_id: int | None
    awaits: tuple[str, ...] | None
    """Signal names of the await that led to this step; kept until its outcome."""
    inbox: bool
    """Whether a signal was ever sent to it. If not, its inbox need not be read."""
    children_total: int
    """Children of the barrier that led to this step."""
    round: int
    """Number of committed outcomes of this visit; the same when a step is re-run after a crash."""
    trusted_until: float
    """End of the lease on Trio's clock, counted from before the statement that set it was sent."""
    journal: int = OFF
    """What is recorded of its history (`machine.OFF`, …)."""
    recorded: RecordedClaim = UNRECORDED
    """What its records need beside that, its part in a graph, and its trace."""
    cancellation: Cancellation | None = None
    """Why it was cancelled, if it compensates: however that ends, the instance is cancelled."""
    max_attempts: int | None = None
    """How often a job or a step with a `Backoff` may run, if the insert said so."""
    due_at: str | None = None
    """When it became due, as the database has it; None if it runs ahead, which waits for nothing."""

    def enter(self, step: str, visit: int, state: bytes, *, inbox: bool) -> None:
        """Continue in the next step under the same claim. A signal may have arrived while the last step ran."""
        self.step, self.visit, self.state, self.inbox = step, visit, state, inbox
        self.attempt = self.crashes = self.round = 0
        self.due_at = None

    @property
    def plain(self) -> bool:
        """No signal was sent to it and it waited for nothing, so the short commit statement can write its outcomes."""
        return self.awaits is None and not self.inbox and not self.children_total


@attrs.frozen
class OrphanedClaim:
    """A claim in this node's name that no task of the node knows: the columns needed to release it."""

    id: int
    claim_id: str
    partition_key: str | None
    parent_id: int | None = None


@attrs.frozen
class Raised:
    """The exception behind `last_error`, as text."""

    type: str
    traceback: str | None


@attrs.define(eq=False)
class Transition:
    """The whole next row of an instance, written by one fenced UPDATE."""

    claim: Claim
    status: Status
    step: str
    attempt: int
    advance: int = 0
    """Added to the visit: 1 if a step is entered."""
    keep_claim: bool = False
    """Stay executing under this claim, unless a due sibling of the key is waiting: then the row becomes `runnable`."""
    state: bytes | None = None
    """JSON; None keeps the stored state."""
    result: bytes | None = None
    delay: float = 0.0
    """Seconds until it is eligible, from now on the database's clock."""
    last_error: str | None = None
    raised: Raised | None = None
    """The exception behind `last_error`."""
    rekey: bool = False
    """Whether `partition_key` is written."""
    partition_key: str | None = None
    awaits: tuple[str, ...] | None = None
    """Park until a signal with one of these names arrives."""
    await_step: str | None = None
    """The step to enter then; None: the same step."""
    timeout: float | None = None
    """Seconds until it is woken without a signal."""
    boundary: bytes | None = None
    """The manual boundary at which it waits for a person: JSON. Its `awaits` is empty, so no signal matches."""
    keeps_awaits: bool = False
    """A retry keeps the await that led to the step."""
    consumed: tuple[int, ...] = ()
    """Ids of signals that this commit removes from the inbox."""
    kept: tuple[int, ...] = ()
    """Ids of awaited signals that the step saw at its beginning and keeps: they do not wake it again."""
    relimits: bool = False
    """Whether `limits` are written: the step that it leaves or the one that it enters uses limits."""
    limits: str | None = None
    """The limits of the step that it enters (`_limits.text_of`)."""
    seconds: float | None = None
    """How long the step ran, for the journal."""
    deletes: bool = False
    """Delete the row in the transaction that ends it, if nobody can look for it: `Done` of a machine with `keep=0`."""
    handled: bytes | None = None
    """The error that `handle` made this outcome of, as JSON, if the row does not keep it: for the journal."""

    @property
    def plain(self) -> bool:
        """Whether the short commit statement can write it."""
        return not rich_of((self,))

    @property
    def kind(self) -> str:
        """The name of the move that it is, and of its record."""
        if self.status in ENDED:
            return self.status
        if self.status == "runnable":
            return "next" if self.advance else "retry"
        if self.status == "awaiting_signal":
            return "parked" if self.boundary is None else "asked"
        return "spawned"

    @property
    def journaled(self) -> bool:
        """Whether the journal records it."""
        level = self.claim.journal
        if level == FAILURES:
            return self.status != "done" and self.kind in {"retry", "failed"}
        return level >= OUTCOMES

    @property
    def ends(self) -> bool:
        """Whether it ends the instance."""
        return self.status in ENDED

    @property
    def outlasts_request(self) -> bool:
        """Whether it is committed even if its node was asked to cancel the instance."""
        return self.status in {"done", "cancelled"}


def rich_of(transitions: Iterable[Transition]) -> list[Transition]:
    """Those that the short commit statement cannot write: a claim that is not `plain`, signals, an exception."""
    return [
        each
        for each in transitions  # asked in place: a property would double the cost
        if (claim := each.claim).awaits is not None
        or claim.inbox
        or claim.children_total
        or each.awaits is not None
        or each.consumed
        or each.raised is not None
    ]


@attrs.define  # not frozen, for the same reason as `Claim`; tasks may share one, so it must not be changed
class Committed:
    """The transition was committed."""

    visit: int
    """The row's visit after the commit."""
    status: Status
    """The row's status after the commit."""
    state: bytes | None = None
    """The stored state, if the row stays executing: jsonb does not preserve the exact bytes."""
    inbox: bool = True
    """Whether a signal was ever sent to it; True if unknown."""
    offered: tuple[Promoted, ...] = ()
    """If it scheduled children: siblings of its key that became runnable. Otherwise see `commit.Flushed`."""
    children: Sequence[int] = ()
    """The children that it inserted. Of a commit of unknown fate they are not known."""


@attrs.frozen
class Promoted:
    """A row that a pick may claim now; it may lie before the cursor of the picks."""

    id: int
    queue: str
    cascades: bool = False
    """Whether this has decided that children of it are cancelled: somebody must start with that (`cascade.py`)."""


@attrs.frozen
class Seen:
    """A row that a pick read but did not claim."""

    id: int
    priority: int
    eligible_at: str
    what: Literal["h", "s", "t", "l"]
    """Held behind a sibling of its key · shelved, because this node does not know its step · throttled by a limit ·
    left for a later pick."""

    @property
    def postponed(self) -> bool:
        """Whether a later pick has to read it again. The others have left the index of the pick."""
        return self.what == "l"


@attrs.frozen
class PickResult:
    """The result of a pick."""

    claims: list[Claim]
    """Most urgent first."""
    seen: list[Seen]
    """The other rows that it read."""
    positions: dict[int, tuple[str, int]]
    """Priority → the last position (eligible_at, id) that was read: the next pick may begin there."""

    @property
    def window(self) -> int:
        """How many rows were read."""
        return len(self.claims) + len(self.seen)
