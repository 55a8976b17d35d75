"""`DecisionCalls`: what people decide for instances that wait for them. `Client` inherits it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from durable_actors._history import TrioConn
from durable_actors._pause_calls import PauseCalls
from durable_actors._store.boundaries import Verb, decision_params
from durable_actors._store.commands import Command, plan_command
from durable_actors._store.dialogues import CarriedOut, deciding


class DecisionCalls(PauseCalls):
    """Resolves manual boundaries."""

    async def proceed(
        self,
        target: int | str | bytes,
        *,
        comment: str | None = None,
        data: object = None,
        by: str | None = None,
        reason: str | None = None,
        idempotency_key: str | None = None,
        meta: Mapping[str, Any] | None = None,
        conn: TrioConn | None = None,
    ) -> int:
        """Let an instance proceed that waits at a `Pause`; see `durable_actors.proceed`."""
        command = plan_command(by=by, reason=reason, idempotency_key=idempotency_key, meta=meta)
        return await self._decide("proceed", target, command, decision_params("proceed", comment, data), conn)

    async def approve(
        self,
        target: int | str | bytes,
        *,
        comment: str | None = None,
        data: object = None,
        by: str | None = None,
        reason: str | None = None,
        idempotency_key: str | None = None,
        meta: Mapping[str, Any] | None = None,
        conn: TrioConn | None = None,
    ) -> int:
        """Approve what an instance asks with `Approval`; see `durable_actors.approve`."""
        command = plan_command(by=by, reason=reason, idempotency_key=idempotency_key, meta=meta)
        return await self._decide("approve", target, command, decision_params("approve", comment, data), conn)

    async def reject(
        self,
        target: int | str | bytes,
        *,
        comment: str | None = None,
        data: object = None,
        by: str | None = None,
        reason: str | None = None,
        idempotency_key: str | None = None,
        meta: Mapping[str, Any] | None = None,
        conn: TrioConn | None = None,
    ) -> int:
        """Reject what an instance asks with `Approval`; see `durable_actors.reject`."""
        command = plan_command(by=by, reason=reason, idempotency_key=idempotency_key, meta=meta)
        return await self._decide("reject", target, command, decision_params("reject", comment, data), conn)

    async def _decide(
        self,
        verb: Verb,
        target: int | str | bytes,
        command: Command,
        params: list[bytes | None],
        conn: TrioConn | None,
    ) -> int:
        done = await self._dialogue(partial(deciding, verb, self._schema, target, command, params), conn)
        if done.found is not None:
            self._after_commit(conn, partial(self._after_decision, verb, done))
        return done.id

    def _after_decision(self, verb: Verb, done: CarriedOut) -> None:
        """Hint at the step that it enters, or at its end, and at a parent that this has woken."""
        found = done.found
        assert found is not None
        if verb == "reject" and found.boundary is not None and found.boundary.on_reject is None:
            self._ended(done.id)
        else:
            self._hint(found.queue, found.id, priority=found.priority)
        for each in done.offered:
            self._hint(each.queue, each.id)
