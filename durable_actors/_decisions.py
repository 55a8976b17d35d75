"""`DecisionCalls`: what people decide for instances that wait for them. `Client` inherits it."""

from __future__ import annotations

from functools import partial
from typing import Unpack

from durable_actors._history import TrioConn
from durable_actors._pause_calls import PauseCalls
from durable_actors._store.boundaries import DecisionPlan, DecisionSaid, plan_decision
from durable_actors._store.dialogues import CarriedOut, deciding


class DecisionCalls(PauseCalls):
    """Resolves manual boundaries."""

    async def proceed(
        self, target: int | str | bytes, *, conn: TrioConn | None = None, **said: Unpack[DecisionSaid]
    ) -> int:
        """Let an instance proceed that waits at a `Pause`; see `durable_actors.proceed`."""
        return await self._decide(target, plan_decision("proceed", **said), conn)

    async def approve(
        self, target: int | str | bytes, *, conn: TrioConn | None = None, **said: Unpack[DecisionSaid]
    ) -> int:
        """Approve what an instance asks with `Approval`; see `durable_actors.approve`."""
        return await self._decide(target, plan_decision("approve", **said), conn)

    async def reject(
        self, target: int | str | bytes, *, conn: TrioConn | None = None, **said: Unpack[DecisionSaid]
    ) -> int:
        """Reject what an instance asks with `Approval`; see `durable_actors.reject`."""
        return await self._decide(target, plan_decision("reject", **said), conn)

    async def _decide(self, target: int | str | bytes, plan: DecisionPlan, conn: TrioConn | None) -> int:
        done = await self._dialogue(partial(deciding, self._schema, target, plan), conn)
        if done.found is not None:
            self._after_commit(conn, partial(self._after_decision, plan, done))
        return done.id

    def _after_decision(self, plan: DecisionPlan, done: CarriedOut) -> None:
        """Hint at the step that it enters, or at its end, and at a parent that this has woken."""
        found = done.found
        assert found is not None
        if plan.verb == "reject" and found.boundary is not None and found.boundary.on_reject is None:
            self._ended(done.id)
        else:
            self._hint(found.queue, found.id, priority=found.priority)
        for each in done.offered:
            self._hint(each.queue, each.id)
