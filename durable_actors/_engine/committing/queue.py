"""The flusher's queue: outcomes that wait for their commit, and claims that wait to be given back.

Made before the flusher, and valid across its restarts. Synchronous but for a task that waits for its verdict: one whose
outcome was refused, and that has run `handle`. Others leave their outcome and are gone.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Final

import attrs
import outcome
import trio
from trio.lowlevel import Abort, RaiseCancelT, Task

from durable_actors._engine.claims import ActiveClaim
from durable_actors._engine.committing.verdicts import Verdict
from durable_actors._engine.running.step_run import Ran, StepRun
from durable_actors._store.claim import OFFERED
from durable_actors._store.rows import Claim, Raised, Transition
from durable_actors.otp import Address

MAX_BATCH: Final = 1000
WHOLE: Final = 100
"""Up to so many outcomes are one group. Of more, half of those whose instances go on here are: while Postgres commits
the others, the steps that were answered run. Keeps both busy where there are hundreds of slots."""
MAX_BYTES: Final = 32_000_000
"""States and results of one group. Postgres takes no message of 1 GB; a thousand large ones must not come near that."""


class Entry:
    """A transition on its way, and the task that waits for it."""

    __slots__ = ("aside", "held", "open", "refusals", "task", "transition", "unknown")

    def __init__(self, transition: Transition, held: ActiveClaim, task: Task | None) -> None:
        self.transition = transition
        self.held = held
        self.task = task
        self.open = True
        """Somebody wants its verdict; no longer when it was answered or withdrawn."""
        self.aside = False
        """It waits outside of the queue, for a foreign row lock or for better times."""
        self.refusals = 0
        """How often it was refused alone."""
        self.unknown = False
        """It was sent once, and nobody knows whether it was committed. Stays true across restarts of the flusher."""

    @property
    def rows(self) -> set[int]:
        """The instances that its commit writes."""
        number, parent = self.transition.claim.id, self.transition.claim.parent_id
        return {number} if parent is None or not self.transition.ends else {number, parent}

    @property
    def writes_beside(self) -> bool:
        """Whether its commit may write, or lock, anything but its own row: signals, a parent."""
        transition = self.transition
        return not transition.plain or (transition.ends and transition.claim.parent_id is not None)

    def wanted(self) -> bool:
        """Whether to commit it, still."""
        return self.open

    def give_up(self) -> None:
        """There is no more time for it. Who waits is cancelled, and withdraws it."""

    def withdraw(self, _: RaiseCancelT) -> Abort:
        """Its task is cancelled while it waits."""
        self.open = False
        return Abort.SUCCEEDED

    def answer(self, verdict: Verdict) -> None:
        """Wake the task that waits, if it still does."""
        if self.open:
            self.open = False
            assert self.task is not None
            trio.lowlevel.reschedule(self.task, outcome.Value(verdict))


class Left(Entry):
    """The outcome of a step whose task has gone: it is settled when its verdict is known.

    Withdrawn when its claim is known to be lost. Trust that is over withdraws nothing: the step has run, and the fence
    tells whether its outcome counts.
    """

    __slots__ = ("_settle", "ran", "run")

    def __init__(self, run: StepRun, ran: Ran, held: ActiveClaim, settle: Settle) -> None:
        super().__init__(ran.transition, held, None)
        self.run = run
        self.ran = ran
        self._settle = settle

    def wanted(self) -> bool:
        """Whether to commit it, still; one that is not is settled here."""
        if self.held.lost is not None:
            self.give_up()
        return self.open

    def give_up(self) -> None:
        """Withdraw it: the claim goes back, if it is still ours."""
        if self.open:
            self.open = False
            self._settle(self, None)

    def answer(self, verdict: Verdict) -> None:
        """Settle it, once."""
        if self.open:
            self.open = False
            self._settle(self, verdict)


Settle = Callable[[Left, Verdict | None], None]
"""Called in the flusher with what became of an outcome; None: withdrawn. Must not block."""


@attrs.frozen
class Release:
    """Claims to give back alike."""

    attempts: int
    hold: int
    interruptions: int = 0
    """1: a drain ended their runs."""
    tries: int = 0
    """How often their rows were found locked."""
    refused: bool = False
    """Postgres refuses to take one of them back, alone."""
    crash: str | None = None
    """What their steps raised, if each is a crash."""
    raised: Raised | None = None
    """Its class and traceback."""


class Commits:
    """The flusher's queue: made before it, and valid across its restarts."""

    def __init__(self, wake: Address[object]) -> None:
        self._wake = wake
        self.entries: deque[Entry] = deque()
        self.answered = math.inf
        """When the outcomes that are settled now were committed, on Trio's clock; one reading for a whole group."""
        self.releases: dict[Release, list[Claim]] = {}
        self.releasing: set[str] = set()
        """Claims (`claim_id`) on their way back: queued, sent, or set aside. They are nobody's here, and no strays."""

    async def commit(self, transition: Transition, held: ActiveClaim) -> Verdict:
        """Queue a transition and wait for its verdict. Cancelled: one that is under way may be committed."""
        entry = Entry(transition, held, trio.lowlevel.current_task())
        if not self.entries:  # else the flusher is awake, or will be: it sleeps only when there is nothing
            self._wake.cast(None)
        self.entries.append(entry)
        verdict: Verdict = await trio.lowlevel.wait_task_rescheduled(entry.withdraw)
        return verdict

    def leave(self, entry: Left) -> None:
        """Queue an outcome that no task waits for."""
        if not self.entries:
            self._wake.cast(None)
        self.entries.append(entry)

    def release(self, claim: Claim, *, attempts: int, interruptions: int = 0, hold: int = OFFERED) -> None:
        """Queue a claim to be given back. Fenced: one that was committed meanwhile is not touched."""
        self.releasing.add(claim.claim_id)
        self.releases.setdefault(Release(attempts, hold, interruptions), []).append(claim)
        self._wake.cast(None)

    def take_releases(self, most: int) -> tuple[Release, list[Claim]]:
        """Claims to give back alike, at most so many. There must be some."""
        how, claims = self.releases.popitem()
        if len(claims) > most:
            self.releases[how] = claims[most:]
        return how, claims[:most]

    def crash(self, claim: Claim, error: str, raised: Raised) -> None:
        """Queue a claim to be given back whose step raised what is for no `handle`: it counts as a crash."""
        self.releasing.add(claim.claim_id)
        self.releases.setdefault(Release(1, OFFERED, crash=error, raised=raised), []).append(claim)
        self._wake.cast(None)

    def take(self, most: int = MAX_BATCH) -> list[Entry]:
        """The next group: distinct instances, nobody who has gone, at most so many and about `MAX_BYTES`."""
        batch: dict[int, Entry] = {}
        later: list[Entry] = []
        size = 0
        if len(self.entries) > WHOLE:
            going_on = sum([entry.transition.keep_claim for entry in self.entries])
            most = min(most, max(WHOLE, len(self.entries) - going_on // 2))
        while self.entries and len(batch) < most and size < MAX_BYTES:
            entry = self.entries.popleft()
            if not entry.wanted():
                continue  # withdrawn before it was sent
            number = entry.transition.claim.id
            if number in batch:  # an old claim's late outcome beside the new one's: one row, one update
                later.append(entry)
            else:
                batch[number] = entry
                size += len(entry.transition.state or b"") + len(entry.transition.result or b"")
        self.entries.extendleft(reversed(later))
        return list(batch.values())


def waiting(batch: list[Entry]) -> list[Entry]:
    """Those that are still to be committed. Of the others a claim was lost, or a drain's time was up."""
    return [entry for entry in batch if entry.wanted() and not entry.aside]
