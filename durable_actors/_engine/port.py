"""The engine's side of `Context`: what a step may do to other instances while it runs.

Everything here is fenced by the step's claim and idempotent by identity, for the step may run again. What has no key of
its own is numbered: the n-th call of a kind in one visit of a step is the same call in every run of it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any
from weakref import WeakKeyDictionary

from durable_actors._engine.leases import Leases
from durable_actors._postgres.pool import Pool
from durable_actors._store.children import child_uid, read_children, start_child
from durable_actors._store.rows import Claim
from durable_actors._store.signal import SHOWN, plan_signal, read_signals, send_signals
from durable_actors.errors import Duplicate, LeaseLost, NoTarget
from durable_actors.machine import (
    ChildView,
    Context,
    InsertOptions,
    InsertPlan,
    MachineRef,
    Signal,
    current_registry,
    plan_insert,
)


class EnginePort:
    """One object per engine, shared by all contexts."""

    def __init__(self, pool: Pool, lane: str, schema: str, leases: Leases) -> None:
        self._pool = pool
        self._lane = lane
        self._schema = schema
        self._leases = leases
        self._calls: WeakKeyDictionary[Context[Any], dict[str, int]] = WeakKeyDictionary()
        self.poke: Callable[[str], None] = lambda _queue: None
        """Told the queue of what was started or woken."""

    async def insert(self, ctx: Context[Any], machine: MachineRef, options: InsertOptions, /) -> int | None:
        """Insert an instance; committed at once, not with the step's outcome. A re-run finds the same one."""
        plan = plan_insert(current_registry().find(machine), options)
        key = f"{ctx.visit}/{self._count(ctx, 'insert ' + plan.machine)}"
        number = await self._start(ctx, plan, key, kind="insert")
        if number is None and plan.on_duplicate is not None:
            shown = (plan.unique_key or b"").decode("utf-8", "backslashreplace")
            raise Duplicate(shown, None)
        return number

    async def start_child(
        self, ctx: Context[Any], machine: MachineRef, key: str, options: InsertOptions, /
    ) -> int:
        """Start a child, or find the one that an earlier run of this step started."""
        plan = plan_insert(current_registry().find(machine), options)
        number = await self._start(ctx, plan, key, kind="child")
        if number is None:
            raise Duplicate((plan.unique_key or b"").decode("utf-8", "backslashreplace"), None)
        return number

    async def signal(
        self, ctx: Context[Any], target: int | str, name: str, payload: object, dedup_key: str | None, /
    ) -> None:
        """Send a signal, once per call and visit, however often the step runs."""
        self._claim(ctx)
        if dedup_key is None:
            dedup_key = f"{ctx.idempotency_key}/{self._count(ctx, 'signal')}"
        delivery = plan_signal(target, name, payload, dedup_key)
        async with self._pool.acquire(self._lane) as conn:
            [sent] = await send_signals(conn, self._schema, [delivery])
        if sent.outcome == "no_target":
            raise NoTarget(f"signal {name!r}: {target!r} does not exist or has ended")
        if sent.woken and sent.queue is not None:
            self.poke(sent.queue)

    async def iter_signals(self, ctx: Context[Any], /) -> AsyncIterator[Signal]:
        """The whole inbox, oldest first, in pages."""
        after = 0
        while True:
            async with self._pool.acquire(self._lane) as conn:
                page = await read_signals(conn, self._schema, ctx.id, after=after, limit=SHOWN)
            for signal in page:
                yield signal
            if len(page) < SHOWN:
                return
            after = page[-1].id

    async def iter_children(self, ctx: Context[Any], /) -> AsyncIterator[ChildView]:
        """All children of the barrier, in spawn order, in pages."""
        after = 0
        while True:
            async with self._pool.acquire(self._lane) as conn:
                page = await read_children(conn, self._schema, ctx.id, ctx.visit, after=after, limit=SHOWN)
            for child in page:
                yield child
            if len(page) < SHOWN:
                return
            after = page[-1].id

    async def _start(self, ctx: Context[Any], plan: InsertPlan, key: str, *, kind: str) -> int | None:
        claim = self._claim(ctx)
        uid = child_uid(ctx.id, ctx.step, plan.machine, key, kind=kind)
        async with self._pool.acquire(self._lane) as conn:
            found = await start_child(conn, self._schema, claim, plan, uid=uid, as_child=kind == "child")
        if found is None:
            raise LeaseLost(f"instance {ctx.id}: its claim is gone; nothing was started")
        number, new = found
        if new:
            self.poke(plan.queue)
        return number

    def _claim(self, ctx: Context[Any]) -> Claim:
        held = self._leases.find(ctx.claim_id)
        if held is None or held.lost is not None or held.claim.visit != ctx.visit:
            raise LeaseLost(f"instance {ctx.id}: this context's step has ended or lost its claim")
        return held.claim

    def _count(self, ctx: Context[Any], kind: str) -> int:
        counts = self._calls.setdefault(ctx, {})
        counts[kind] = counts.get(kind, 0) + 1
        return counts[kind]
