"""What goes between the engine and the store: claims out, transitions in. Plain values."""

from __future__ import annotations

from typing import Literal

import attrs

Status = Literal["runnable", "executing", "awaiting_signal", "awaiting_children", "done", "failed"]
"""The statuses of an instance, as the database spells them."""


# Not frozen: a claim is made per step on the hot path, and attrs writes frozen slots at twice the cost.
@attrs.define(eq=False)
class Claim:
    """Temporary, exclusive ownership of an instance, with the row as it was claimed."""

    id: int
    claim_id: str
    """A uuid that never repeats; with `visit` the fence of every write."""
    queue: str
    priority: int
    fsm: str
    version: int
    step: str
    attempt: int
    crashes: int
    visit: int
    state: bytes
    """JSON as the database has it."""
    partition_key: str | None
    parent_id: int | None
    awaits: tuple[str, ...] | None
    """Names of the await that led here; kept until the outcome after it."""
    inbox: bool
    """A signal was sent to it at some time: its inbox is worth a look."""
    children_total: int
    """Children of the barrier that led here."""
    round: int
    """Committed outcomes of this visit; a crash re-run has the same."""
    trusted_until: float
    """On Trio's clock: the lease's end, counted from before the statement that set it was sent."""

    def enter(self, step: str, visit: int, state: bytes, *, inbox: bool) -> None:
        """The row is in this step now, still under this claim; a signal may have come while the last one ran."""
        self.step, self.visit, self.state, self.inbox = step, visit, state, inbox
        self.attempt = self.crashes = self.round = 0

    @property
    def plain(self) -> bool:
        """Nobody has signalled it, and it waited for nothing: its outcomes take the short way."""
        return self.awaits is None and not self.inbox and not self.children_total


@attrs.frozen
class OrphanedClaim:
    """A claim of ours of which nobody here knows: as much of it as is needed to give it back."""

    id: int
    claim_id: str
    partition_key: str | None


@attrs.frozen
class Raised:
    """The exception behind `last_error`, as texts."""

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
    """What is added to the visit: 1 when a step is entered."""
    keep_claim: bool = False
    """Stay executing on this claim if no due sibling of the key waits; the store may answer `runnable` instead."""
    state: bytes | None = None
    """JSON; None keeps what is there."""
    result: bytes | None = None
    delay: float = 0.0
    """Seconds until it is eligible, from the database's now."""
    last_error: str | None = None
    raised: Raised | None = None
    """The exception behind it."""
    rekey: bool = False
    """Whether `partition_key` is written."""
    partition_key: str | None = None
    awaits: tuple[str, ...] | None = None
    """Park until a signal of one of these names comes."""
    await_step: str | None = None
    """The step to enter then; None for the same one."""
    timeout: float | None = None
    """Seconds until it is woken anyway."""
    keeps_awaits: bool = False
    """A retry: the await that led here still counts."""
    consumed: tuple[int, ...] = ()
    """Ids of signals that this commit takes out of the inbox."""
    kept: tuple[int, ...] = ()
    """Ids of awaited signals that were there when the step began and that it keeps: they do not wake it again."""

    @property
    def plain(self) -> bool:
        """Whether the short statement can write it."""
        return self.claim.plain and self.awaits is None and not self.consumed and self.raised is None

    @property
    def ends(self) -> bool:
        """Whether the instance is terminal after it."""
        return self.status in {"done", "failed"}


@attrs.define  # not frozen, as `Claim`; many tasks may be given the same one, so nobody changes it
class Committed:
    """The transition is in the database."""

    visit: int
    """The row's visit now."""
    status: Status
    """The row's status now."""
    state: bytes | None = None
    """The stored state, when the row stays executing: jsonb does not give back the very bytes it was given."""
    inbox: bool = True
    """Whether a signal was sent to it (or nobody knows)."""
    offered: tuple[Promoted, ...] = ()
    """Siblings of its key that are on offer now, when it scheduled children; else see `commit.Flushed`."""


@attrs.frozen
class Promoted:
    """A row that the pick may claim now; it may lie before the picker's cursor."""

    id: int
    queue: str


@attrs.frozen
class Seen:
    """A row of a pick's window that was not claimed."""

    id: int
    priority: int
    eligible_at: str
    what: Literal["h", "s", "l"]
    """Held behind a sibling of its key · shelved, its machine or step being unknown here · left for a later look."""

    @property
    def postponed(self) -> bool:
        """It stays where it is and wants another look; otherwise it was taken out of the pick's way."""
        return self.what == "l"


@attrs.frozen
class PickResult:
    """What a pick found."""

    claims: list[Claim]
    """Most urgent first."""
    seen: list[Seen]
    """The other rows of the window."""
    positions: dict[int, tuple[str, int]]
    """Per priority the last position (eligible_at, id) in the window: where the next pick may begin."""

    @property
    def window(self) -> int:
        """How many rows were looked at."""
        return len(self.claims) + len(self.seen)
