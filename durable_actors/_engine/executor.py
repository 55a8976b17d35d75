"""`execute_next`: one claim, from the pick to its end, inside one call.

The parts are an engine's, and so are the rules: dispatcher, step task, flusher, heartbeat and keeper are the same
classes, in a tree that lives as long as the call. There is no feeder and no reaper. The call itself reaps a few expired
claims, wakes the instances of the queue whose deadline has passed, and picks one row::

    rest_for_one    heartbeat → (keeper, if the row has a partition key) → flusher → steps → gate → control

Each call is a node of its own: its claim has an owner's name of its own, so that a pick of unknown fate can be undone.
That node has no row in `nodes` and, without a partition key, no session lock. The heartbeat is its sign of life; if the
process dies, the claim is taken back when its lease ends, or by an engine that has seen no renewal for `dead_after`.

Cancelling the call stops the tree in order, as a drain without a timeout: the step is cancelled, the row released
(attempts unchanged, `interruptions` + 1), or the commit that was under way finished.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Final, TypeVar

import attrs
import trio

from durable_actors._engine.catalog import MachineCatalog
from durable_actors._engine.claiming.pick_one import claim_one, on_claim_lane, undo_pick
from durable_actors._engine.claims import ActiveClaim
from durable_actors._engine.committing.completion import Completion
from durable_actors._engine.committing.flusher import FLUSH_TIME, Flusher, outcome_time
from durable_actors._engine.committing.queue import Commits, PendingCommit
from durable_actors._engine.committing.verdicts import Overruled, Refused, Stale, Verdict
from durable_actors._engine.keys.keeper import Keeper
from durable_actors._engine.keys.locks import Keys
from durable_actors._engine.lanes import answer_patience
from durable_actors._engine.limits import QueueLimits, max_inflight_burst
from durable_actors._engine.maintenance.cascades import cascade_some
from durable_actors._engine.maintenance.control import Control
from durable_actors._engine.maintenance.heartbeat import Heartbeat
from durable_actors._engine.maintenance.reaper import reap_some, sweep_some
from durable_actors._engine.node import Node, OnFinal, QueueHints
from durable_actors._engine.outage import TRANSIENT_ERRORS
from durable_actors._engine.running.context_port import EnginePort
from durable_actors._engine.running.dispatcher import Dispatcher, TaskSlice
from durable_actors._engine.running.step_inputs import InputLoader
from durable_actors._engine.running.step_task import StepTasks
from durable_actors._engine.setup import config_error_in, make_node
from durable_actors._engine.threads import Threads
from durable_actors._engine.tree import key_contended, request_received
from durable_actors._engine.wakeups import Wakeups
from durable_actors._postgres.driver.connection import PgConn
from durable_actors._postgres.pool.lane import Lane
from durable_actors._postgres.pool.pool import ConnectionPool
from durable_actors._store.cascade import write_compensations
from durable_actors._store.holds import OFFERED
from durable_actors._store.read import Instance, read_by_ids
from durable_actors._store.rows import Claim, Committed
from durable_actors.config import Config
from durable_actors.errors import LeaseLost
from durable_actors.machine import ENDED, current_registry, decode_or_text
from durable_actors.otp import (
    ActorChild,
    Address,
    Error,
    ExitReason,
    Pool,
    PoolChild,
    PoolTask,
    StartFailed,
    Supervisor,
    TaskChild,
    open_tree,
)
from durable_actors.telemetry import Telemetry

T = TypeVar("T")

REAPED: Final = 20
"""Expired claims that one call takes back."""
CASCADED: Final = 10
"""Statements by which one call cancels children."""
SWEPT: Final = 100
"""Partition keys that a call which found nothing looks at for held rows that nothing promotes."""
LIMITS: Final = QueueLimits(
    concurrency=1, prefetch=0, min_demand=1, poll_interval=1.0, max_poll_interval=1.0, run_ahead=False
)

Hook = Callable[[Claim], None]
"""Called at a point of the run; what it raises ends the call there, as if the process had died."""


def _nothing(claim: Claim, /) -> None:
    """The default hook."""


class Executor:
    """Executes claims one call at a time, on the connections of one client. Calls may run concurrently."""

    def __init__(
        self,
        config: Config,
        pool: ConnectionPool,
        roles: Mapping[str, Lane],
        *,
        telemetry: Telemetry | None = None,
        queues: Callable[[], Mapping[str, QueueHints]] = dict,
        on_final: OnFinal = lambda _number, _ending=None: None,
        wakeups: Wakeups | None = None,
    ) -> None:
        """`queues`: the feeders of an engine on the same connections, which get hints. The others: as of `Node`."""
        self._wakeups = wakeups
        self._config = config
        self._pool = pool
        self._roles = roles
        self._queues = queues
        self._on_final = on_final
        self._threads = Threads(config.thread_limit)
        self._catalog: MachineCatalog | None = None
        self._registry: object = None
        self._told: int | None = None
        self._cascades = False
        self.telemetry: Final = Telemetry() if telemetry is None else telemetry
        """The events of its calls."""
        self.on_outcome: Hook = _nothing
        """Called when a step has an outcome, before that is committed."""
        self.on_committed: Hook = _nothing
        """Called when the outcome is committed, before the call returns."""

    async def execute_next(
        self,
        queue: str,
        context: contextvars.Context,
        *,
        only: Sequence[int] | None = None,
        lease_ttl: float | None = None,
        name: str | None = None,
    ) -> Instance | None:
        """Execute the step of one due instance of the queue; return the instance, or None if nothing is due.

        `context`: the context variables of the step. `only`: claim one of these instances, or none.
        """
        await self.reap()
        node = self.make_node(lease_ttl, name)
        await self._tell(node)
        swept = False
        while True:
            claim = await claim_one(node, queue, only)
            if claim is not None:
                run = _Run(node, claim, context, self.on_outcome)
                await run.execute()
                if self._cascades:
                    await self._cascade(node)
                if run.has_ended():
                    return await self._answer(run)
                node = self.make_node(lease_ttl, name)  # the last one has stopped
            # Once: a key may be locked without an executing row, and its row would be held and offered for ever.
            elif swept or not await on_claim_lane(node, partial(_sweep, node)):
                return None
            else:
                swept = True

    async def _tell(self, node: Node) -> None:
        """Record which steps compensate, as an engine does at its start; once for each change of what is known here."""
        specs, generation = node.catalog.specs, node.catalog.generation
        if self._told == generation:
            return
        if any(spec.on_cancel is not None for spec in specs):
            await on_claim_lane(node, lambda conn: write_compensations(conn, node.owner.schema, specs))
        self._told = generation

    async def _cascade(self, node: Node) -> None:
        """The run has decided that children are cancelled: begin with it. Other calls and nodes do what is left."""
        self._cascades = False
        with contextlib.suppress(*TRANSIENT_ERRORS):
            async with node.pool.acquire(node.lane("claim")) as conn:
                await cascade_some(node, conn, rounds=CASCADED)

    def _note_cascade(self) -> None:
        self._cascades = True

    async def reap(self) -> int:
        """Take back a few expired claims; return how many."""
        node = self.make_node()
        return await on_claim_lane(node, partial(reap_some, node, limit=REAPED))

    def make_node(self, lease_ttl: float | None = None, name: str | None = None) -> Node:
        """What the parts of one call share."""
        config = self._config
        if lease_ttl is not None and lease_ttl != config.lease_ttl:
            config = attrs.evolve(config, lease_ttl=lease_ttl, heartbeat_interval=lease_ttl / 3)
        if name is not None:
            config = attrs.evolve(config, node=name)
        node = make_node(config, self._pool, self._roles, {}, catalog=self._known())
        node.telemetry = self.telemetry
        node.threads = self._threads
        node.queues = self._queues()
        node.on_final = self._on_final
        node.cascade = self._note_cascade
        assert isinstance(node.port, EnginePort)
        node.port.notify, node.port.telemetry = node.notify, self.telemetry
        node.wakeups = node.port.wakeups = self._wakeups
        return node

    def _known(self) -> MachineCatalog:
        """What this process can run: every registered machine."""
        registry = current_registry()
        if self._catalog is None or self._registry is not registry:
            self._catalog, self._registry = MachineCatalog(registry, {}), registry
        self._catalog.refresh()
        return self._catalog

    async def _answer(self, run: _Run) -> Instance:
        """The instance after the run."""
        claim, verdict, node = run.claim, run.completion.verdict, run.node
        if isinstance(verdict, Committed):
            self.on_committed(claim)
        # From here on the call must not fail: what it tells is committed.
        with contextlib.suppress(*TRANSIENT_ERRORS):
            async with node.pool.acquire(node.lane("claim")) as conn:
                found = await read_by_ids(conn, node.owner.schema, [claim.id])
            if claim.id in found:
                return found[claim.id]
        return instance_after(claim, run.completion.pending, verdict)


async def _sweep(node: Node, conn: PgConn) -> int:
    """Offer rows that are held although nothing goes first, cancel children; return how much that was."""
    offered, _ = await sweep_some(node, conn, after="", limit=SWEPT)
    return offered + len((await cascade_some(node, conn, rounds=CASCADED)).offered)


# -- the run


class _Completion(Completion):
    """Remembers what became of the one claim."""

    verdict: Verdict | None = None
    pending: PendingCommit | None = None
    interruption: str | None = None
    has_crashed: bool = False
    was_postponed: bool = False
    is_cancelled: bool = False
    """A command has asked for it: its release ends the instance."""

    def report(self, pending: PendingCommit, verdict: Verdict, now: float) -> None:
        self.pending, self.verdict = pending, verdict
        super().report(pending, verdict, now)

    def _committed(self, pending: PendingCommit, verdict: Committed, now: float) -> None:
        self.pending, self.verdict = pending, verdict  # `settle` does not go through `report`
        super()._committed(pending, verdict, now)

    def interrupted(self, active: ActiveClaim, now: float) -> None:
        if active.cancel_requested and active.lost is None:
            self.is_cancelled = True
        else:
            self.interruption = active.lost or active.interrupted or "its lease could not be renewed in time"
        super().interrupted(active, now)

    def postponed(self, active: ActiveClaim) -> None:
        self.was_postponed = True
        super().postponed(active)

    def crashed(self, active: ActiveClaim, error: BaseException) -> None:
        self.has_crashed = True
        super().crashed(active, error)


class _Dispatcher(Dispatcher):
    """Owns the one claim, and says when its step has an outcome."""

    on_outcome: Hook = staticmethod(_nothing)

    def hand_over(self, task_slice: TaskSlice, *, keep_slot: bool) -> None:
        self.on_outcome(task_slice.active.claim)
        super().hand_over(task_slice, keep_slot=keep_slot)

    def commit_in_task(self, active: ActiveClaim, now: float) -> None:
        self.on_outcome(active.claim)
        super().commit_in_task(active, now)


class _Run:
    """One claim, from the pick to its end."""

    def __init__(self, node: Node, claim: Claim, context: contextvars.Context, on_outcome: Hook) -> None:
        self.node = node
        self.claim = claim
        self.failure: BaseException | None = None
        """What ended the run instead of an outcome: KeyboardInterrupt, or a bug of ours."""
        self._over = trio.Event()
        node.on_fatal = self._fail
        queue = claim.queue
        self._flush: Address[object] = Address("flusher", capacity=1)
        self._lock: Address[object] = Address("keeper", capacity=1)
        self._commits, self._keys = Commits(self._flush), Keys(self._lock)
        self._pool = Pool(
            "steps", slots=max_inflight_burst(LIMITS), on_exit=self._task_exited, context=context
        )
        self._dispatcher = dispatcher = _Dispatcher(
            LIMITS,
            claims=node.claims,
            commits=self._commits,
            keys=self._keys,
            pool=self._pool,
            draining=node.draining,
            wake_feeder=self._note_end,
            on_contended=partial(key_contended, node),
        )
        dispatcher.on_outcome = on_outcome
        node.claims.on_request = partial(request_received, node, {queue: dispatcher})
        self.completion = _Completion(node, self._commits, {queue: dispatcher})
        self._commits.settle_with(self.completion.settle)
        patience = answer_patience(node.owner.lease_ttl)
        inputs = InputLoader(
            node.pool, node.lane("claim"), node.owner.schema, beside=node.lane("client"), patience=patience
        )
        tasks = StepTasks(
            node, inputs=inputs, commits=self._commits, completion=self.completion, context=context
        )
        dispatcher.run_slice = tasks.run
        dispatcher.add([claim], trio.current_time())

    def has_ended(self) -> bool:
        """Whether the step has run. False: its key is busy, or a reload has removed it; the row was released.

        Raises what the caller must know if nothing was committed.
        """
        claim, completion = self.claim, self.completion
        if self.failure is not None:
            raise self.failure
        match completion.verdict:
            case Committed():
                return True
            case Stale():
                raise LeaseLost(
                    f"instance {claim.id}: another claim owns it by now; the outcome of step {claim.step!r} was not "
                    "committed"
                )
            case Refused(error=error):
                raise error
            case None if completion.interruption is not None:
                raise LeaseLost(
                    f"instance {claim.id}: step {claim.step!r} was cancelled, and nothing of it committed: "
                    f"{completion.interruption}"
                )
            case None | Overruled():
                return completion.has_crashed or completion.was_postponed or completion.is_cancelled

    async def execute(self) -> None:
        """Run the claim's step, and commit its outcome. When this returns or raises, the claim is over."""
        started = False
        try:
            async with open_tree(self._tree()):
                started = True
                if self.claim.partition_key is not None:
                    await self._take_key()
                if len(self.node.claims):
                    self._dispatcher.start(trio.current_time())
                    await self._over.wait()
        except StartFailed as exc:
            raise config_error_in(exc) or exc from None
        finally:
            if not started:
                await undo_pick(self.node, self.claim.queue)

    def _tree(self) -> Supervisor:
        node = self.node
        keyed = self.claim.partition_key is not None
        last = outcome_time(node.config.drain_timeout) + FLUSH_TIME + 1.0
        return Supervisor(
            "execute_next",
            [
                ActorChild(Address[object]("heartbeat", capacity=1), partial(Heartbeat, node)),
                *([ActorChild(self._lock, partial(Keeper, node, self._keys))] if keyed else []),
                ActorChild(self._flush, partial(Flusher, node, self._commits), shutdown=last),
                # No time to finish, and none is left behind: a thread keeps its lease and its key until it returns.
                PoolChild(self._pool, shutdown=0),
                TaskChild("gate", self._gate, handshake=True),
                # After the gate, so that its crash restarts nothing else.
                ActorChild(Address[object]("control", capacity=1), partial(Control, node), shutdown="brutal"),
            ],
            strategy="rest_for_one",
            intensity=10,
            period=10.0,
        )

    async def _gate(self, *, task_status: trio.TaskStatus[None]) -> None:
        """Started after all that it stops."""
        task_status.started()
        try:
            await trio.sleep_forever()
        finally:
            self.node.drain()
            self._dispatcher.close()

    async def _take_key(self) -> None:
        claim = self.claim
        if claim.claim_id not in await self._keys.take([claim]):
            self._dispatcher.give_back_contended(self._dispatcher.without_key())

    def _note_end(self) -> bool:
        if not len(self.node.claims):
            self._over.set()
        return False  # there is no feeder, so say it every time

    def _fail(self, error: BaseException) -> None:
        self.failure = self.failure or error

    def _task_exited(self, task: PoolTask, reason: ExitReason) -> None:
        if isinstance(reason, Error):
            self._fail(reason.error)
        task_slice = task.key
        assert isinstance(task_slice, TaskSlice)
        task_slice.dispatcher.on_exited(task_slice, trio.current_time())


def instance_after(claim: Claim, pending: PendingCommit | None, verdict: Verdict | None) -> Instance:
    """The instance as a run has left it, from what the worker knows: its row is gone or cannot be read.

    Key, tags and times are not known here.
    """
    now = datetime.now(UTC)
    before = Instance(
        id=claim.id,
        machine=claim.fsm,
        version=claim.version,
        step=claim.step,
        status="runnable",
        queue=claim.queue,
        priority=claim.priority,
        attempt=claim.attempt + 1,
        crashes=claim.crashes + 1,
        visit=claim.visit,
        state=decode_or_text(claim.state),
        result=None,
        last_error=None,
        partition_key=claim.partition_key,
        unique_key=None,
        parent_id=claim.parent_id,
        locked_by=None,
        eligible_at=now,
        lease_expires_at=None,
        inserted_at=now,
        updated_at=now,
        finished_at=None,
        hold=OFFERED,
    )
    if pending is None or not isinstance(verdict, Committed):
        return before
    after = pending.transition
    return attrs.evolve(
        before,
        status=verdict.status,
        visit=verdict.visit,
        step=after.step,
        attempt=after.attempt,
        crashes=claim.crashes if after.advance == 0 else 0,
        state=before.state if after.state is None else decode_or_text(after.state),
        result=None if after.result is None else decode_or_text(after.result),
        last_error=after.last_error,
        partition_key=after.partition_key if after.rekey else claim.partition_key,
        finished_at=now if verdict.status in ENDED else None,
    )
