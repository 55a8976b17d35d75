"""The flusher's queue: outcomes to commit, and claims to release.

Made before the flusher, and valid across its restarts. Synchronous: a step task queues its outcome and takes the next
claim; `Completion` follows when the verdict is known.
"""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

import attrs

from durable_actors._engine.claims import ActiveClaim
from durable_actors._engine.committing.verdicts import Verdict
from durable_actors._store.children import Spawn
from durable_actors._store.holds import OFFERED
from durable_actors._store.rows import Claim, Raised, Transition
from durable_actors.otp import Address

MAX_BATCH: Final = 1000
SPLIT_ABOVE: Final = 100
"""Up to so many outcomes form one group. Of more, only half of those whose instances continue here do: the steps that
were answered run while Postgres commits the others. That keeps both busy where there are hundreds of slots."""
MAX_BYTES: Final = 32_000_000
"""States and results of one group. Postgres refuses a message of 1 GB; a group must not come near that."""


class Recoverable(Protocol):
    """The run of a step, as far as it is needed when Postgres refuses its outcome (`StepRun`)."""

    home: object
    leaked: bool

    async def recover(self, error: Exception) -> PendingCommit:
        """Let `handle` turn an error into an outcome."""
        ...


class PendingCommit:
    """The outcome of a step on its way into the database: what to write, for whom, and what has become of it so far."""

    __slots__ = (
        "active",
        "aside",
        "error",
        "final",
        "open",
        "outcome",
        "refusal",
        "refusals",
        "run",
        "sent",
        "spawn",
        "transition",
        "unknown",
    )

    def __init__(
        self,
        active: ActiveClaim,
        run: Recoverable | None,
        transition: Transition,
        outcome: str,
        error: Exception | None = None,
    ) -> None:
        self.active = active
        self.run = run
        """Runs `handle` if Postgres refuses the outcome; None for an outcome that no user code chose."""
        self.transition = transition
        self.outcome = outcome
        """The outcome's class, for telemetry."""
        self.error = error
        """What went through `handle`."""
        self.spawn: Spawn | None = None
        """Children to insert with it: such an outcome has a transaction of its own, and never enters the queue."""
        self.refusal: Exception | None = None
        """Why Postgres refused the outcome that this one replaces."""
        self.final = False
        """It is the plain failure that follows the second refusal: there is nothing left to try after it."""
        self.open = True
        """It has no verdict yet, and was not withdrawn."""
        self.aside = False
        """It waits outside of the queue, for a foreign row lock or for the next attempt."""
        self.refusals = 0
        """How often Postgres refused it alone, and not for its data."""
        self.unknown = False
        """It was sent, and may be committed. Stays true across restarts of the flusher."""
        self.sent: tuple[str, ...] = ()
        """If its commit deletes the row: the tokens of the groups in which it was sent (`read_flushes`)."""

    @property
    def rows(self) -> set[int]:
        """The instances that its commit writes."""
        claim = self.transition.claim
        if claim.parent_id is None or not self.transition.ends:
            return {claim.id}
        return {claim.id, claim.parent_id}

    @property
    def writes_beside(self) -> bool:
        """Whether its commit may wait for a lock on more than its own row: signals, a parent. Records wait for none."""
        transition = self.transition
        return not transition.plain or (transition.ends and transition.claim.parent_id is not None)


Settle = Callable[[PendingCommit, Verdict | None, float], None]
"""Called with the verdict of an outcome (None: withdrawn) and the time. Must not block or raise."""


@attrs.frozen
class Release:
    """How a group of claims is released."""

    attempts: int
    hold: int
    interruptions: int = 0
    """1: a drain ended their runs."""
    tries: int = 0
    """How often their rows were found locked."""
    refused: bool = False
    """Postgres refuses to release one of them, alone."""
    crash: str | None = None
    """What their steps raised, if each is a crash."""
    raised: Raised | None = None
    """Its class and traceback."""


class Commits:
    """The queue. `settle` is called for every outcome, once."""

    def __init__(self, wake: Address[object], settle: Settle | None = None) -> None:
        self._wake = wake
        self._settle = settle
        self.entries: deque[PendingCommit] = deque()
        self.releases: dict[Release, list[Claim]] = {}
        self.releasing: set[str] = set()
        """Claims (`claim_id`) whose release is queued, sent or set aside: neither active nor orphans."""
        self.answered: list[str] = []
        """Tokens of groups that deleted rows, and whose outcomes all have a verdict: the next group deletes their rows
        of `flushes`. Tokens whose answer did not come are left to the reaper: their statement may be under way."""
        self._taken = False  # since `take_activity` was called

    def settle_with(self, settle: Settle) -> None:
        """Set the function that follows a verdict; it is made after this queue, because it needs the queue."""
        self._settle = settle

    # -- outcomes

    def enqueue(self, pending: PendingCommit) -> None:
        """Queue an outcome."""
        if not self.entries:  # else the flusher is awake, or will be: it sleeps only when the queue is empty
            self._wake.cast(None)
        self.entries.append(pending)

    def answer(self, pending: PendingCommit, verdict: Verdict | None, now: float) -> None:
        """The verdict of an outcome is known; None: it is withdrawn. Once: a second answer changes nothing."""
        if pending.open:
            pending.open = False
            assert self._settle is not None
            self._settle(pending, verdict, now)

    def wants(self, pending: PendingCommit, now: float) -> bool:
        """Whether it is still to be committed. An outcome whose claim is known to be lost is withdrawn here.

        An expired lease does not withdraw it: the step has run, and the fence decides whether its outcome counts.
        """
        if pending.active.lost is not None:
            self.answer(pending, None, now)
        return pending.open

    def take(self, now: float, most: int = MAX_BATCH) -> list[PendingCommit]:
        """The next group: distinct instances, none withdrawn, at most so many and about `MAX_BYTES`."""
        batch: dict[int, PendingCommit] = {}
        later: list[PendingCommit] = []
        size = 0
        if len(self.entries) > SPLIT_ABOVE:
            continuing = sum([pending.transition.keep_claim for pending in self.entries])
            most = min(most, max(SPLIT_ABOVE, len(self.entries) - continuing // 2))
        entries = self.entries
        while entries and len(batch) < most and size < MAX_BYTES:
            pending = entries.popleft()
            if (not pending.open or pending.active.lost is not None) and not self.wants(pending, now):
                continue
            after = pending.transition
            instance_id = after.claim.id
            if instance_id in batch:  # an old claim's late outcome beside the new one's: one row, one update
                later.append(pending)
                continue
            batch[instance_id] = pending
            if after.state is not None:
                size += len(after.state)
            if after.result is not None:
                size += len(after.result)
        entries.extendleft(reversed(later))
        self._taken = True
        return list(batch.values())

    def take_activity(self) -> bool:
        """Whether a group was taken since the last call."""
        taken, self._taken = self._taken, False
        return taken

    def unanswered(self, batch: list[PendingCommit], now: float) -> list[PendingCommit]:
        """Those of a group that are still to be committed with it."""
        batch = [pending for pending in batch if pending.open]
        if any([pending.active.lost is not None for pending in batch]):  # noqa: C419 - faster than a generator
            batch = [pending for pending in batch if self.wants(pending, now)]
        return [pending for pending in batch if not pending.aside]

    def next_token(self, batch: list[PendingCommit]) -> tuple[str | None, list[str]]:
        """The token of a group that is about to be sent, and the tokens that nobody will ask for any more.

        None and none if the group deletes no row.
        """
        deleting = [pending for pending in batch if pending.transition.deletes]
        if not deleting:
            return None, []
        token = str(uuid.uuid4())
        for pending in deleting:  # before it is sent: its answer may not come
            pending.sent += (token,)
        answered, self.answered = self.answered, []
        return token, answered

    # -- releases

    def release(
        self, claim: Claim, *, attempts: int, interruptions: int = 0, hold: int = OFFERED, began: bool = True
    ) -> None:
        """Queue a claim to be released. Fenced: if it was committed meanwhile, the row is not touched."""
        if not began and claim.recorded.rate_limit is not None:
            claim.recorded.unstarted = True
        self.releasing.add(claim.claim_id)
        self.releases.setdefault(Release(attempts, hold, interruptions), []).append(claim)
        self._wake.cast(None)

    def crash(self, claim: Claim, error: str, raised: Raised) -> None:
        """Queue a claim to be released whose step raised what is not for `handle`: it counts as a crash."""
        self.releasing.add(claim.claim_id)
        self.releases.setdefault(Release(1, OFFERED, crash=error, raised=raised), []).append(claim)
        self._wake.cast(None)

    def take_releases(self, most: int) -> tuple[Release, list[Claim]]:
        """Claims to release alike, at most so many. There must be some."""
        how, claims = self.releases.popitem()
        if len(claims) > most:
            self.releases[how] = claims[most:]
        return how, claims[:most]
