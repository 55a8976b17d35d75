"""START HERE: the supervision tree of an engine, as one literal.

rest_for_one, in start order: what comes later depends on what comes before. Stopping runs it backwards, and the
graceful drain follows from the order: the gate closes (nothing is claimed any more, no step runs ahead), the feeders
release buffered claims, the step tasks drain, the flusher commits queued outcomes and releases what it cannot commit,
while leases are still renewed and keys held; keeper and heartbeat are last. Maintenance and commands stand aside: their
crashes restart nothing else. Commands are received as long as steps run: they start before the work and stop after it.
So does the notifier, if there is one: what a drain gives back is told.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from functools import partial

import attrs
import trio

from durable_actors._engine.claiming.at_once import ClaimsAtOnce
from durable_actors._engine.claiming.feeder import Feeder
from durable_actors._engine.claiming.hand_over import HandOver
from durable_actors._engine.claiming.idle_queues import IdleQueues
from durable_actors._engine.claiming.long_poll import LongPoll, can_long_poll
from durable_actors._engine.claiming.planner import ClaimPlanner
from durable_actors._engine.claims import ActiveClaim
from durable_actors._engine.committing.completion import Completion, facts
from durable_actors._engine.committing.flusher import FLUSH_TIME, Flusher, outcome_time
from durable_actors._engine.committing.queue import Commits
from durable_actors._engine.keys.keeper import Keeper
from durable_actors._engine.keys.locks import Keys
from durable_actors._engine.lanes import answer_patience
from durable_actors._engine.limits import QueueLimits, max_inflight_burst
from durable_actors._engine.maintenance.cascades import Cascades
from durable_actors._engine.maintenance.control import Control
from durable_actors._engine.maintenance.heartbeat import Heartbeat
from durable_actors._engine.maintenance.janitor import Janitor
from durable_actors._engine.maintenance.notifier import notifier_child
from durable_actors._engine.maintenance.reaper import Reaper
from durable_actors._engine.maintenance.schedules import Schedules
from durable_actors._engine.node import Node, logger
from durable_actors._engine.running.dispatcher import Dispatcher, TaskSlice
from durable_actors._engine.running.fair_dispatcher import FairDispatcher
from durable_actors._engine.running.step_inputs import InputLoader
from durable_actors._engine.running.step_task import StepTasks
from durable_actors._engine.shares import FairShares
from durable_actors._store.rows import Claim
from durable_actors._wording import counted
from durable_actors.otp import (
    ActorChild,
    Address,
    ChildSpec,
    Error,
    ExitReason,
    Pool,
    PoolChild,
    PoolTask,
    Supervisor,
    TaskChild,
)
from durable_actors.telemetry import DrainStarted, PartitionContended, RequestReceived


@attrs.define(eq=False)
class Parts:
    """What an engine is made of: the tree, and what outlives the restarts of its actors."""

    root: Supervisor = attrs.field(init=False)
    commits: Commits
    keys: Keys
    pool: Pool | None
    """None on a client-only node."""
    wakes: Mapping[str, Address[object]]
    """The mailbox of each queue's feeder."""
    planners: Mapping[str, ClaimPlanner]
    dispatchers: Mapping[str, Dispatcher]
    idle_queues: IdleQueues = attrs.field(factory=IdleQueues)
    """Which queues the long poll watches, or may watch."""


def build_tree(node: Node, queues: Mapping[str, QueueLimits], *extra: ChildSpec) -> Parts:
    """Make the tree of one engine; `extra` children (signals, the embedded server) come first and stop last."""
    flush: Address[object] = Address("flusher", capacity=1)
    lock, watch = Address[object]("keeper", capacity=1), Address[object]("long poll", capacity=1)
    parts = _make_parts(node, queues, flush, lock)
    commits, keys, pool, planners = parts.commits, parts.keys, parts.pool, parts.planners
    long_polls = _watch_idle_queues(node, queues, parts, watch)

    def feeder(queue: str, limits: QueueLimits) -> ActorChild[object]:
        make = partial(
            Feeder,
            node,
            queue,
            limits=limits,
            planner=planners[queue],
            dispatcher=parts.dispatchers[queue],
            idle=parts.idle_queues.of(queue),
            commits=commits,
            keys=keys,
        )
        return ActorChild(parts.wakes[queue], make)

    last = outcome_time(node.config.drain_timeout) + FLUSH_TIME + 1.0
    work = [] if pool is None else [
        ActorChild(Address[object]("heartbeat", capacity=1), partial(Heartbeat, node)),
        ActorChild(lock, partial(Keeper, node, keys)),
        # Queued outcomes are committed while leases and keys are still held.
        ActorChild(flush, partial(Flusher, node, commits), shutdown=last),
        PoolChild(pool, shutdown=node.config.drain_timeout, on_kill=node.threads.leave),
        # Feeders last: they claim only when everything that a claim needs is there.
        *(feeder(queue, limits) for queue, limits in queues.items()),
    ]  # fmt: skip
    commands = [] if pool is None else [
        # It only looks: a stop need not wait for an answer.
        ActorChild(Address[object]("control", capacity=1), partial(Control, node), shutdown="brutal"),
    ]  # fmt: skip
    maintenance = [] if pool is None else [
        ActorChild(Address[object]("reaper", capacity=1), partial(Reaper, node)),
        # A batch is all or nothing: a stop need not wait for it.
        ActorChild(Address[object]("janitor", capacity=1), partial(Janitor, node), shutdown="brutal"),
        ActorChild(_cascade_hints(node), partial(Cascades, node), shutdown="brutal"),
        ActorChild(_schedule_hints(node), partial(Schedules, node), shutdown="brutal"),
        *([ActorChild(watch, partial(LongPoll, node, parts.idle_queues, planners, commits))] if long_polls else []),
    ]  # fmt: skip
    parts.root = Supervisor(
        f"engine {node.config.name}".replace("/", "_"),
        [
            *extra,
            *_notifications(node),
            Supervisor("commands", commands, intensity=10, period=10.0),
            Supervisor("work", work, strategy="rest_for_one", intensity=10, period=10.0),
            Supervisor("maintenance", maintenance, intensity=10, period=10.0),
            # Started last, so stopped first.
            TaskChild("gate", partial(_gate, node, parts), handshake=True),
        ],
        intensity=3,
        period=60.0,
    )
    return parts


def _watch_idle_queues(
    node: Node, queues: Mapping[str, QueueLimits], parts: Parts, watch: Address[object]
) -> bool:
    """Make what knows of idle queues, and what commits fill them with. Whether the long poll watches any."""
    long_polls = can_long_poll(node, queues)
    parts.idle_queues = IdleQueues(queues if long_polls else {}, on_change=partial(watch.cast, None))
    if parts.pool is not None:
        node.hand_over = HandOver(node, parts.planners, parts.dispatchers, parts.idle_queues, parts.keys)
        node.at_once = ClaimsAtOnce(node, parts.planners, parts.dispatchers, parts.idle_queues)
    return long_polls


def _cascade_hints(node: Node) -> Address[object]:
    """The mailbox of `Cascades`, to which the node's hints go."""
    address: Address[object] = Address("cascades", capacity=1)
    node.cascade = partial(address.cast, None)
    return address


def _schedule_hints(node: Node) -> Address[object]:
    """The mailbox of `Schedules`, to which the node's hints go."""
    address: Address[object] = Address("schedules", capacity=1)
    node.schedules_changed = partial(address.cast, None)
    return address


def _notifications(node: Node) -> list[ChildSpec]:
    """The notifier, if one is configured."""
    if node.wakeups is None:
        return []
    lane, schema = node.lane("client"), node.owner.schema
    child = notifier_child(node.wakeups, pool=node.pool, lane=lane, schema=schema)
    return [Supervisor("notifications", [child], intensity=10, period=10.0)]


def _make_parts(
    node: Node, queues: Mapping[str, QueueLimits], flush: Address[object], lock: Address[object]
) -> Parts:
    """Make what outlives the actors: the queues between them, and what they know."""
    # A slash separates the names of a tree; a queue's name may contain one.
    names = {queue: queue.replace("%", "%25").replace("/", "%2F") for queue in queues}
    wakes: dict[str, Address[object]] = {
        queue: Address(f"feeder {name}", capacity=1) for queue, name in names.items()
    }
    commits, keys = Commits(flush), Keys(lock)
    shares = {
        queue: FairShares(limits.weights) for queue, limits in queues.items() if limits.weights is not None
    }
    planners = {
        queue: ClaimPlanner(limits, wake_feeder=partial(wakes[queue].cast, None), shares=shares.get(queue))
        for queue, limits in queues.items()
    }
    node.queues = planners
    dispatchers: dict[str, Dispatcher] = {}
    node.claims.on_request = partial(request_received, node, dispatchers)
    parts = Parts(commits, keys, None, wakes, planners, dispatchers)
    slots = sum(max_inflight_burst(limits) for limits in queues.values())
    if not slots:
        return parts
    context = StepTasks.context()
    parts.pool = pool = Pool(
        "steps", slots=slots, on_exit=_task_exited, on_wait=_task_suspended, context=context
    )
    completion = Completion(node, commits, dispatchers)
    commits.settle_with(completion.settle)
    # Awaited signals are not read on the client lane: there, signals to a row that a caller has locked wait for it.
    lane, beside = node.lane("claim"), node.lane("client")
    patience = answer_patience(node.owner.lease_ttl)
    inputs = InputLoader(node.pool, lane, node.owner.schema, beside=beside, patience=patience)
    tasks = StepTasks(node, inputs=inputs, commits=commits, completion=completion, context=context)
    for queue, limits in queues.items():
        kind = partial(FairDispatcher, shares[queue]) if queue in shares else Dispatcher
        dispatchers[queue] = dispatcher = kind(
            limits,
            claims=node.claims,
            commits=commits,
            keys=keys,
            pool=pool,
            draining=node.draining,
            wake_feeder=partial(wakes[queue].cast, None),
            on_contended=partial(key_contended, node),
        )
        dispatcher.run_slice = tasks.run
        planners[queue].on_pauses = dispatcher.pause
    return parts


async def _gate(node: Node, parts: Parts, *, task_status: trio.TaskStatus[None]) -> None:
    """Open while the engine runs; closes when it is asked to stop, in whatever way, before anything else stops."""
    task_status.started()
    try:
        await trio.sleep_forever()
    finally:
        node.drain()
        running = sum(dispatcher.running for dispatcher in parts.dispatchers.values())
        buffered = sum(dispatcher.buffered for dispatcher in parts.dispatchers.values())
        logger.info(
            "draining: %s still running, %s to release",
            counted(running, "step"),
            counted(buffered, "claimed row"),
        )
        if node.telemetry.active:
            node.telemetry.emit(DrainStarted(node=node.owner.name, running=running, buffered=buffered))
        for wake in parts.wakes.values():
            wake.cast(None)


def _task_exited(task: PoolTask, reason: ExitReason) -> None:
    """An error here is a bug of ours: users' errors go through `handle`."""
    task_slice = task.key
    assert isinstance(task_slice, TaskSlice)
    if isinstance(reason, Error):
        with contextlib.suppress(
            Exception
        ):  # a user's log handler that raises would end the pool, and all its steps
            instance_id = task_slice.active.claim.id
            logger.error("the task of instance %d failed", instance_id, exc_info=reason.error)
    task_slice.dispatcher.on_exited(task_slice, trio.current_time())


def _task_suspended(task: PoolTask) -> None:
    task_slice = task.key
    assert isinstance(task_slice, TaskSlice)
    task_slice.dispatcher.on_suspended(task_slice, trio.current_time())


def request_received(node: Node, dispatchers: Mapping[str, Dispatcher], active: ActiveClaim) -> None:
    """A command asks something of this claim. What it asks for is done from here, before users' observers and logs."""
    claim, request = active.claim, active.request
    assert request is not None
    if active.cancel_requested and active.lost is None:
        if active.between_steps:
            dispatchers[claim.queue].give_back_between_steps(active)
        elif not node.threads.runs(
            claim
        ):  # a thread cannot be cancelled: its outcome is `Done`, or overruled
            node.claims.interrupt(active, "a command asks for it")
    elif request.pauses and active.lost is None and active.between_steps:
        dispatchers[claim.queue].give_back_between_steps(active)  # its release holds it
    if node.telemetry.active:
        node.telemetry.emit(
            RequestReceived(
                **facts(claim), kind=request.kind, by=request.by, reason=request.reason, at=request.at
            )
        )
    logger.info("instance %d: %s requested by %s", claim.id, request.kind, request.by or "an unknown caller")


def key_contended(node: Node, claim: Claim) -> None:
    """A claimed row was released because its key is busy elsewhere."""
    logger.debug("instance %d: its key %r is busy elsewhere", claim.id, claim.partition_key)
    if node.telemetry.active:
        node.telemetry.emit(PartitionContended(**facts(claim), key=claim.partition_key or ""))
