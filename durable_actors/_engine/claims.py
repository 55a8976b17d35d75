"""The claims that this node holds: running, buffered, and those whose thread has outlived its claim.

Shared by the feeders (which hold and drop), the step tasks and the heartbeat (which extends). No actor of its own: it
has nothing to wait for, and its knowledge must survive the restart of any of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from durable_actors._store.rows import Claim
from durable_actors.otp import PoolTask


class ActiveClaim:
    """One claim in this node's hands."""

    __slots__ = (
        "ahead_until",
        "claim",
        "ending",
        "interrupted",
        "left",
        "lost",
        "seen",
        "steps",
        "task",
        "waited",
    )

    def __init__(self, claim: Claim, seen: float = math.inf) -> None:
        self.claim = claim
        self.seen = seen
        """When the database told whether its inbox is worth a look, on Trio's clock; -inf: it has waited since."""
        self.task: PoolTask | None = None
        """The step task that runs it; None while it waits in a buffer, and once its outcome is left."""
        self.waited = False
        """That task has waited for something."""
        self.ending = False
        """Its step has run; the outcome is on its way."""
        self.left = False
        """Its task has left the outcome to the flusher, which lets go of the claim when it is settled."""
        self.steps = 0
        """So many have begun on this claim."""
        self.ahead_until = 0.0
        """Until then a step may be followed by the next one on this claim."""
        self.lost: str | None = None
        """Why it is no longer ours; nothing of it may be committed."""
        self.interrupted: str | None = None
        """Why its step was cancelled although the claim is ours: it goes back, attempt + 1."""

    @property
    def waits(self) -> bool:
        """Whether it waits for a slot, or for a task: no code of its step runs, or has run."""
        return self.task is None and not self.left


class TaskSlice:
    """What a step task runs: one claim, and after a step that waited for nothing the next one."""

    __slots__ = ("held", "since", "task")

    def __init__(self, held: ActiveClaim, since: float) -> None:
        self.held = held
        """The claim whose step runs now, or has run last."""
        self.since = since
        self.task: PoolTask | None = None

    def __str__(self) -> str:
        claim = self.held.claim
        return f"instance {claim.id}, {claim.fsm}, step {claim.step}"


class ActiveClaims:
    """Every claim of this node, by claim id (an instance can be claimed again while its old thread still runs)."""

    __slots__ = ("_held",)

    def __init__(self) -> None:
        self._held: dict[str, ActiveClaim] = {}

    def __len__(self) -> int:
        return len(self._held)

    def find(self, claim_id: object) -> ActiveClaim | None:
        """The claim of this id, if it is in our hands."""
        return self._held.get(claim_id) if isinstance(claim_id, str) else None

    def hold(self, claim: Claim, seen: float = math.inf) -> ActiveClaim:
        """Keep this claim alive from now on. `seen`: when the database told of it."""
        held = self._held[claim.claim_id] = ActiveClaim(claim, seen)
        return held

    def drop(self, held: ActiveClaim) -> None:
        """Keep it alive no longer: its outcome is committed, it was released, or it is lost."""
        self._held.pop(held.claim.claim_id, None)

    def all(self) -> list[ActiveClaim]:
        """Every claim, also those known to be lost whose task or thread has not exited."""
        return list(self._held.values())

    def live(self) -> list[ActiveClaim]:
        """Every claim that is not known to be lost."""
        return [held for held in self._held.values() if held.lost is None]

    def extend(self, renewed: Iterable[ActiveClaim], trusted_until: float) -> None:
        """Trust these claims until then. A lease is a deadline: that of the step's cancel scope."""
        for held in renewed:
            held.claim.trusted_until = trusted_until
            if held.task is not None:
                held.task.deadline = trusted_until

    def lose(self, held: ActiveClaim, why: str) -> None:
        """This claim is somebody else's, or nobody's: cancel its step; nothing of it will be committed."""
        if held.lost is None:
            held.lost = why
            if held.task is not None:
                held.task.cancel(why)

    def interrupt(self, held: ActiveClaim, why: str) -> bool:
        """This claim is ours, but its step must not go on: cancel it. Its task gives the row back as it exits.

        False: it is being cancelled already, or does not run. One that has run is fenced like any other.
        """
        if held.task is None or held.left or held.lost is not None or held.interrupted is not None:
            return False
        held.interrupted = why
        held.task.cancel(why)
        return True
