"""The part of the walks of test_faithful.py that claims rows in the transaction that makes them runnable."""

from __future__ import annotations

from random import Random
from typing import Any

from durable_actors._store.claim import ClaimAtOnce, Owner
from durable_actors._store.rows import Claim
from tests.simulation.compare import plain

SCHEMA = "durable"


class ClaimWalks:
    """Steps of a walk; `Pair` has what they need."""

    random: Random
    known: Any
    said: list[str]
    both: Any
    _claimed: Any

    async def at_once(self, call: Any, *ids: int) -> None:
        """What makes a row runnable, and claims it."""
        owner = Owner(SCHEMA, self.random.choice("ab"), b"hash", 6000.0)
        ask = ClaimAtOnce(owner, ["default"], self.known, 0.0)

        async def run(conn: Any) -> tuple[Any, list[Claim]]:
            made, claimed = await conn.batch([call, ask.call(ids)])
            return made.rows, ask.read(claimed.rows)

        (made, ours), (model, theirs) = await self.both(run)
        assert plain(made) == plain(model), self.said[-5:]
        self._claimed(ours, theirs, owner.name)
