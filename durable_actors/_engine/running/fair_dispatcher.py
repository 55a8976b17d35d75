"""FairDispatcher: the dispatcher of a fair queue. It tells `FairShares` for how long each claim has a slot."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import trio

from durable_actors._engine.claims import ActiveClaim, ClaimState
from durable_actors._engine.running.dispatcher import Dispatcher
from durable_actors._engine.shares import FairShares

WITH_SLOT: Final = frozenset(
    {ClaimState.RUNNING, ClaimState.CONTINUING, ClaimState.READY, ClaimState.RECOVERING}
)


class FairDispatcher(Dispatcher):
    """The claims and slots of a fair queue. A dispatcher of its own, so that others pay nothing for it."""

    def __init__(
        self,
        shares: FairShares,
        *args: Any,
        clock: Callable[[], float] = trio.current_time,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._shares = shares
        self._clock = clock

    def _move(self, active: ActiveClaim, state: ClaimState) -> None:
        old = active.state
        super()._move(active, state)
        if old in WITH_SLOT and state in WITH_SLOT:
            return
        claim_id = active.claim.claim_id
        if state in WITH_SLOT:
            self._shares.started(claim_id, self._clock())
        elif state is ClaimState.GONE or state is ClaimState.ABANDONED:
            self._shares.ended(claim_id, self._clock())
        elif old in WITH_SLOT:
            self._shares.stopped(claim_id, self._clock())
