"""The claims that this node holds, and the states of a claim's life.

`Dispatcher` (one per queue) moves a claim from state to state. `ActiveClaims` knows the claims of all queues: the
heartbeat extends them, the keeper interrupts them, control brings them requests. Neither is an actor: they wait for
nothing, and what they know must survive the restart of any actor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from enum import IntEnum
from typing import Final

from durable_actors._store.commands import Request
from durable_actors._store.rows import Claim
from durable_actors.otp import PoolTask


class ClaimState(IntEnum):
    """Where a claim is in its life. ARCHITECTURE.md draws it."""

    GONE = 0
    """Not ours: not yet, or no longer."""
    BUFFERED = 1
    """Claimed; waits for a slot, and for its partition key if it has one."""
    RUNNING = 2
    """A task runs its step. Holds a slot."""
    COMMITTING = 3
    """Its outcome is being committed. Its slot is free for another claim."""
    CONTINUING = 4
    """Its outcome is being committed, and the claim keeps its slot for the next step."""
    READY = 5
    """Committed; waits for a task that runs the next step. Holds a slot."""
    RECOVERING = 6
    """Postgres refused the outcome, and a task runs `handle`. Holds a slot."""
    ABANDONED = 7
    """The engine has stopped, and a thread of the step still runs: lease and key stay with it."""


_S = ClaimState
_GONE: Final = ClaimState.GONE  # to look it up costs 60 ns
MOVES: Final[Mapping[ClaimState, frozenset[ClaimState]]] = {
    _S.GONE: frozenset({_S.BUFFERED}),
    _S.BUFFERED: frozenset({_S.RUNNING, _S.GONE}),
    # Back to BUFFERED or READY: the step pool could not start a task.
    _S.RUNNING: frozenset({_S.COMMITTING, _S.CONTINUING, _S.BUFFERED, _S.READY, _S.ABANDONED, _S.GONE}),
    _S.COMMITTING: frozenset({_S.RECOVERING, _S.GONE}),
    _S.CONTINUING: frozenset({_S.READY, _S.RECOVERING, _S.GONE}),
    _S.READY: frozenset({_S.RUNNING, _S.GONE}),
    _S.RECOVERING: frozenset({_S.COMMITTING, _S.ABANDONED, _S.GONE}),
    _S.ABANDONED: frozenset(),
}
"""Every move that a claim can make; only `Dispatcher` makes one."""


class ActiveClaim:
    """One claim in this node's hands."""

    __slots__ = (
        "cancel_requested",
        "claim",
        "handed_on",
        "inbox_known_at",
        "interrupted",
        "lost",
        "request",
        "run_ahead_until",
        "state",
        "steps",
        "task",
        "turns",
        "turns_until",
    )

    def __init__(self, claim: Claim, inbox_known_at: float = math.inf) -> None:
        self.claim = claim
        self.state = _GONE
        """Only `Dispatcher` writes it."""
        self.inbox_known_at = inbox_known_at
        """When the database last said whether its inbox has signals, on Trio's clock; -inf: that is too old to use."""
        self.task: PoolTask | None = None
        """The task that runs its step; None before the step begins and once the outcome is queued."""
        self.handed_on = False
        """Its outcome has claimed the next row of its partition key, which takes its place here."""
        self.turns = 0
        """How many claims of its partition key were handed on before it, one to the next."""
        self.turns_until = math.inf
        """Until then, its key may be handed on."""
        self.steps = 0
        """The number of steps that have begun on this claim."""
        self.run_ahead_until = 0.0
        """Until then, the next step may run on this claim."""
        self.lost: str | None = None
        """Why the claim is no longer ours: nothing of it may be committed."""
        self.interrupted: str | None = None
        """Why its step was cancelled although the claim is ours: the row is released, with attempt + 1 unless a command
        has asked for it."""
        self.request: Request | None = None
        """What a command asks for, as far as this node has learned of it."""
        self.cancel_requested = False
        """It asks to cancel the instance: nothing of it runs any more, and its release ends it."""

    @property
    def between_steps(self) -> bool:
        """Whether no code of its next step has run: it is BUFFERED or READY."""
        return self.state is ClaimState.BUFFERED or self.state is ClaimState.READY


class ActiveClaims:
    """Every claim of this node, by claim id: an instance can be claimed again while its old thread still runs."""

    __slots__ = ("_claims", "on_request")

    def __init__(self) -> None:
        self._claims: dict[str, ActiveClaim] = {}
        self.on_request: Callable[[ActiveClaim], None] = lambda _: None
        """A claim has a request that it did not have before."""

    def __len__(self) -> int:
        return len(self._claims)

    def find(self, claim_id: object) -> ActiveClaim | None:
        """The claim with this id, if it is in our hands."""
        return self._claims.get(claim_id) if isinstance(claim_id, str) else None

    def add(self, active: ActiveClaim) -> None:
        """Renew this claim from now on."""
        self._claims[active.claim.claim_id] = active

    def drop(self, active: ActiveClaim) -> None:
        """Renew it no longer: its outcome is committed, it was released, or it is lost."""
        self._claims.pop(active.claim.claim_id, None)

    def all(self) -> list[ActiveClaim]:
        """Every claim, also those known to be lost whose task or thread has not exited."""
        return list(self._claims.values())

    def has_instance(self, number: int) -> bool:
        """Whether a claim of this instance is here. Reads all of them: for rare questions."""
        return any(active.claim.id == number for active in self._claims.values())

    def live(self) -> list[ActiveClaim]:
        """Every claim that is not known to be lost."""
        return [active for active in self._claims.values() if active.lost is None]

    def extend(self, renewed: Iterable[ActiveClaim], trusted_until: float) -> None:
        """Trust these claims until then. A lease is a deadline: that of the step's cancel scope."""
        for active in renewed:
            active.claim.trusted_until = trusted_until
            if active.task is not None:
                active.task.deadline = trusted_until

    def lose(self, active: ActiveClaim, why: str) -> None:
        """The row has another claim, or none: cancel the step; nothing of it will be committed."""
        if active.lost is None:
            active.lost = why
            if active.task is not None:
                active.task.cancel(why)

    def interrupt(self, active: ActiveClaim, why: str) -> bool:
        """The claim is ours, but its step must stop: cancel it. Its task releases the row as it exits.

        False: it is being cancelled already, or no task runs it. The fence protects an outcome that is queued.
        """
        if active.task is None or active.lost is not None or active.interrupted is not None:
            return False
        active.interrupted = why
        active.task.cancel(why)
        return True

    def request(self, claim_id: str, request: Request) -> None:
        """A command asks for this. Safe to repeat; a claim that is no longer ours is not concerned."""
        active = self._claims.get(claim_id)
        if active is not None and active.request != request:
            active.request = request
            active.cancel_requested = request.cancels
            self.on_request(active)
