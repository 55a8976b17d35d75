"""The engine's side of `Context`: what a step may do to other instances while it runs.

Every call is fenced by the step's claim and has an identity, because the step may run again. A call without a key is
numbered: the n-th call of a kind in one round of one visit is the same call in every run. Only a committed outcome
advances the round, so a crash re-run finds what the first run sent, while the run after a Retry or a same-step Await
sends again. Calls of `handle` are numbered separately.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any, Final, TypeVar, cast
from weakref import WeakKeyDictionary

import attrs
import psycopg
import trio

from durable_actors._engine.claims import ActiveClaims
from durable_actors._engine.committing.verdicts import blames_data
from durable_actors._engine.wakeups import Wakeups
from durable_actors._limits import Use
from durable_actors._postgres.driver.connection import PgConn
from durable_actors._postgres.pool.lock_retry import retry_while_locked
from durable_actors._postgres.pool.pool import ConnectionPool
from durable_actors._store.children import Started, args_digest, child_uid, read_children, start_child
from durable_actors._store.insert import key_as_given, traced
from durable_actors._store.limits import charge_limits
from durable_actors._store.read import find_by_key, read_by_ids
from durable_actors._store.rows import Claim
from durable_actors._store.signal import (
    PAGE_SIZE,
    Delivery,
    Sent,
    plan_signal,
    read_signals,
    signal_from_step,
)
from durable_actors._tracing import sending
from durable_actors._trio_run import HomeRun, at_home
from durable_actors.errors import (
    CommitUnknown,
    ConfigError,
    Conflict,
    Duplicate,
    LeaseLost,
    NoTarget,
    StoreUnavailable,
)
from durable_actors.machine import (
    ENDED,
    ChildView,
    Context,
    InsertOptions,
    InsertPlan,
    JournalLevel,
    MachineRef,
    RowOptions,
    Signal,
    canonical_json,
    current_registry,
    plan_insert,
)
from durable_actors.telemetry import InstancesInserted, Telemetry

T = TypeVar("T")

logger: Final = logging.getLogger("durable_actors.engine")

LOOK_AGAIN: Final = 0.25
"""Seconds between attempts while Postgres is unavailable."""


class EnginePort:
    """One object per engine, shared by all contexts."""

    def __init__(
        self,
        pool: ConnectionPool,
        lane: str,
        schema: str,
        claims: ActiveClaims,
        *,
        patience: float | None = None,
        journal: JournalLevel = "auto",
    ) -> None:
        self._pool = pool
        self._lane = lane
        self._patience = patience
        self._journal: JournalLevel = journal
        self._schema = schema
        self._claims = claims
        self.home: Final = HomeRun(anywhere=True)
        """The engine's Trio run: a `def` step may have started one of its own."""
        self._calls: WeakKeyDictionary[Context[Any], dict[str, int]] = WeakKeyDictionary()
        self.notify: Callable[..., None] = _no_notify
        """Called for each instance that was started or woken (`Node.notify`)."""
        self.wakeups: Wakeups | None = None
        """As of `Node`."""
        self.telemetry = Telemetry()
        """As of `Node`."""

    @at_home
    async def spent(self, use: Use, /) -> None:
        """Charge a limit for what a step has spent beyond its weight."""
        async with self._pool.acquire(self._lane) as conn:
            await charge_limits(conn, self._schema, [(use.target, float(use.weight))])

    @at_home
    async def insert(self, ctx: Context[Any], machine: MachineRef, options: InsertOptions, /) -> int | None:
        """Insert an instance; committed at once, not with the step's outcome. A re-run finds the same one."""
        plan = plan_insert(current_registry().find(machine), options, journal=self._journal)
        started = await self._start(ctx, plan, self._ordinal(ctx, "insert " + plan.machine), kind="insert")
        if started.id is not None or plan.on_duplicate == "skip":
            return started.id
        if plan.on_duplicate == "raise" or started.occupant is None:
            raise _duplicate(plan, started)
        return started.occupant

    @at_home
    async def start_child(
        self, ctx: Context[Any], machine: MachineRef, key: str, options: RowOptions, /
    ) -> int:
        """Start a child, or find the one that an earlier run of this step started."""
        if not isinstance(key, str):
            raise ConfigError(f"start_child(key=...) must be a text, not {key!r}", option="key", value=key)
        if "on_duplicate" in options:
            raise ConfigError(
                "start_child takes no on_duplicate: its key finds the child that an earlier run started, and an "
                "occupied unique_key raises Duplicate",
                option="on_duplicate",
            )
        spec = current_registry().find(machine)
        plan = plan_insert(spec, cast("InsertOptions", options), journal=self._journal)
        initial = None if plan.step == spec.initial else plan.step
        given: object = options["args"] if "args" in options else options.get("state", {})
        stored: object = spec.codec.decode(plan.state, step=plan.step)
        # A dict and an object with the same content count as equal. Where the state is a dict, the digest is made of
        # what was given: this distinguishes a set, which is stored in any order, from a list.
        digest = args_digest(plan, canonical_json(given if isinstance(stored, dict) else stored))
        started = await self._start(ctx, plan, key, kind="child", initial=initial, digest=digest)
        if started.conflict:
            raise Conflict(
                f"instance {ctx.id}, step {ctx.step!r}: start_child({plan.machine!r}, key={key!r}) has started "
                f"instance {started.id} with other arguments; give another key to start another child"
            )
        if started.id is None:
            raise _duplicate(plan, started)
        return started.id

    @at_home
    async def signal(
        self,
        ctx: Context[Any],
        target: int | str | bytes,
        name: str,
        payload: object,
        dedup_key: str | None,
        /,
    ) -> None:
        """Send a signal, once per call and round, however often crashes run the step again."""
        claim = self._claim(ctx)
        delivery = plan_signal(target, name, payload, dedup_key)
        if dedup_key is None:
            ordinal = self._ordinal(ctx, "signal " + name)
            uid = child_uid(ctx.id, ctx.step, name, ordinal, kind="signal")
            delivery = attrs.evolve(delivery, dedup_key=f"step:{uid}")
        unknown = False

        async def send(conn: PgConn) -> list[Sent] | None:
            nonlocal unknown
            try:
                return await signal_from_step(conn, self._schema, claim, [delivery])
            except BaseException as exc:
                unknown = unknown or isinstance(exc, CommitUnknown | trio.Cancelled)
                raise

        sent = await self._retry_while_unavailable(ctx, send)
        if sent is not None and sent[0].outcome == "no_target" and unknown:
            if await self._status(ctx, delivery) in ENDED:
                return  # an earlier attempt of this call may have delivered the signal that ended the target
            sent = await self._retry_while_unavailable(ctx, send)  # the target was inserted just now
        self._tell_sent(ctx, sent, f"signal {name!r}: {target!r} does not exist or has ended")

    def _tell_sent(self, ctx: Context[Any], found: list[Sent] | None, missing: str) -> None:
        if found is None:
            raise LeaseLost(f"instance {ctx.id}: its claim is gone; nothing was sent")
        [sent] = found
        if sent.outcome == "no_target":
            raise NoTarget(missing)
        if sent.woken and sent.queue is not None:
            self.notify(sent.queue, instance_id=sent.target, by_signal=True)
            if self.wakeups is not None and sent.target is not None:
                self.wakeups.add((sent.target,))

    async def _status(self, ctx: Context[Any], delivery: Delivery) -> str | None:
        """The target's status; None if it does not exist."""

        async def look(conn: PgConn) -> str | None:
            number = delivery.target
            if number is None:
                number = await find_by_key(conn, self._schema, delivery.key or b"")
            found = {} if number is None else await read_by_ids(conn, self._schema, [number])
            return next((instance.status for instance in found.values()), None)

        return await self._retry_while_unavailable(ctx, look)

    async def iter_signals(self, ctx: Context[Any], /) -> AsyncIterator[Signal]:
        """The whole inbox, oldest first, in pages."""
        after = 0
        while True:
            read = partial(read_signals, schema=self._schema, number=ctx.id, after=after, limit=PAGE_SIZE)
            page = await self._retry_while_unavailable(ctx, read)
            for signal in page:
                yield signal
            if len(page) < PAGE_SIZE:
                return
            after = page[-1].id

    async def iter_children(self, ctx: Context[Any], /) -> AsyncIterator[ChildView]:
        """All children of the barrier, in spawn order, in pages."""
        after = 0
        while True:
            read = partial(
                read_children,
                schema=self._schema,
                parent=ctx.id,
                barrier=ctx.visit,
                after=after,
                limit=PAGE_SIZE,
            )
            page = await self._retry_while_unavailable(ctx, read)
            for child in page:
                yield child
            if len(page) < PAGE_SIZE:
                return
            after = page[-1].id

    async def _start(
        self,
        ctx: Context[Any],
        plan: InsertPlan,
        key: str,
        *,
        kind: str,
        initial: str | None = None,
        digest: bytes | None = None,
    ) -> Started:
        claim = self._claim(ctx)
        uid = child_uid(ctx.id, ctx.step, plan.machine, key, kind=kind, initial=initial)
        began = trio.current_time()
        with sending() as span:
            traced([plan])  # not part of the digest: a re-run has another trace
            started = await self._retry_while_unavailable(
                ctx,
                lambda conn: start_child(
                    conn, self._schema, claim, plan, uid=uid, as_child=kind == "child", key=key, digest=digest
                ),
            )
            if started is None:
                raise LeaseLost(f"instance {ctx.id}: its claim is gone; nothing was started")
            span.sent([started.id])
        if started.new and self.telemetry.active:
            seconds = trio.current_time() - began
            self.telemetry.emit(
                InstancesInserted(machine=plan.machine, queue=plan.queue, count=1, seconds=seconds)
            )
        if started.new and not plan.delay and plan.eligible_at is None:
            self.notify(plan.queue, instance_id=started.id, priority=plan.priority)
        if started.new and self.wakeups is not None and started.id is not None:
            self.wakeups.add((started.id,))
        return started

    @at_home
    async def _retry_while_unavailable(self, ctx: Context[Any], call: Callable[[PgConn], Awaitable[T]]) -> T:
        """Run a call of a step; retry while Postgres is unavailable or refuses it, as long as the lease lasts.

        An error would go through `handle`, whose default fails the instance. Repeating a call of unknown fate is
        harmless: what it starts or sends has an identity.
        """
        told = False
        while True:
            try:
                return await retry_while_locked(self._pool, self._lane, call, within=self._patience)
            except StoreUnavailable:
                pass  # the actors log it
            except psycopg.Error as exc:
                if blames_data(exc):
                    raise
                if not told:
                    logger.warning(
                        "instance %d: Postgres refuses a call of its step, trying again: %s", ctx.id, exc
                    )
                told = True
            await trio.sleep(LOOK_AGAIN)
            self._claim(ctx)

    def _claim(self, ctx: Context[Any]) -> Claim:
        active = self._claims.find(ctx.claim_id)
        if active is None or active.lost is not None or active.claim.visit != ctx.visit:
            raise LeaseLost(f"instance {ctx.id}: this context's step has ended or lost its claim")
        return active.claim

    def _ordinal(self, ctx: Context[Any], kind: str) -> str:
        """Which call of its kind this is: the same text in every run of this round.

        It contains neither the attempt nor the handed signals: both differ between a run and its crash re-run.
        """
        counts = self._calls.setdefault(ctx, {})
        counts[kind] = counts.get(kind, 0) + 1
        done = self._claim(ctx).round
        run = f"handle {done}" if ctx.in_handle else str(done)
        return f"{ctx.visit}/{run}/{counts[kind]}"


def _duplicate(plan: InsertPlan, started: Started) -> Duplicate:
    return Duplicate(key_as_given(plan.unique_key or b""), started.occupant)


def _no_notify(queue: str, /, **hint: object) -> None:
    """The default: no engine runs."""
