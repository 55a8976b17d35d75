"""START HERE: the supervision tree of an engine, as one literal.

rest_for_one, in start order: what comes later depends on what comes before. Stopping runs it backwards, and the
graceful drain falls out of the order: the gate closes (nothing is claimed any more, no step runs ahead), the feeders
give their buffers back, the step tasks drain, the flusher commits what they have left and gives back what it cannot,
while leases are still renewed and keys held; keeper and heartbeat are last. Maintenance stands aside: its crash
restarts nobody else.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import attrs
import trio

from durable_actors._engine.claiming.demand import QueueLimits
from durable_actors._engine.claiming.feeder import Feeder
from durable_actors._engine.claiming.idle_queues import IdleQueues
from durable_actors._engine.claiming.long_poll import LongPoll, can_long_poll
from durable_actors._engine.claims import TaskSlice
from durable_actors._engine.committing.flusher import FLUSH_TIME, Flusher, outcome_time
from durable_actors._engine.committing.queue import Commits
from durable_actors._engine.keys.keeper import Keeper, Keys
from durable_actors._engine.maintenance.heartbeat import Heartbeat
from durable_actors._engine.maintenance.reaper import Reaper
from durable_actors._engine.node import Node, logger
from durable_actors._engine.running.slots import most_in_hand
from durable_actors._engine.running.step_task import StepTasks
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
from durable_actors.telemetry import DrainStarted


@attrs.frozen
class Parts:
    """What an engine's tree is made of, beside the tree itself."""

    root: Supervisor
    commits: Commits
    keys: Keys
    pool: Pool | None
    """None on a client-only node."""


def build_tree(node: Node, queues: Mapping[str, QueueLimits], *extra: ChildSpec) -> Parts:
    """Make the tree of one engine; `extra` children (signals, the embedded server) come first and stop last."""
    flush: Address[object] = Address("flusher", capacity=1)
    lock: Address[object] = Address("keeper", capacity=1)
    commits, keys = Commits(flush), Keys(lock)
    slots = sum(most_in_hand(limits) for limits in queues.values())
    pool = None if not slots else Pool(
        "steps",
        slots=slots,
        on_exit=partial(_step_exited, node),
        on_wait=partial(_step_waits, node),
        context=StepTasks.context(),
    )  # fmt: skip
    # A slash parts the names of a tree; a queue may have one in its own.
    names = {queue: queue.replace("%", "%25").replace("/", "%2F") for queue in queues}
    node.wakes = {queue: Address(f"feeder {name}", capacity=1) for queue, name in names.items()}

    watch: Address[object] = Address("long poll", capacity=1)
    long_polls = can_long_poll(node, queues)
    node.idle_queues = IdleQueues(queues if long_polls else {}, on_change=partial(watch.cast, None))

    def feeder(queue: str, limits: QueueLimits, steps: Pool) -> ActorChild[object]:
        make = partial(Feeder, node, queue, limits=limits, pool=steps, commits=commits, keys=keys)
        return ActorChild(node.wakes[queue], make)

    last = outcome_time(node.config.drain_timeout) + FLUSH_TIME + 1.0
    work = [] if pool is None else [
        ActorChild(Address[object]("heartbeat", capacity=1), partial(Heartbeat, node)),
        ActorChild(lock, partial(Keeper, node, keys)),
        # What steps leave is committed while leases and keys are still held.
        ActorChild(flush, partial(Flusher, node, commits), shutdown=last),
        PoolChild(pool, shutdown=node.config.drain_timeout, on_kill=node.threads.leave),
        # Feeders last: they claim only when everything that a claim needs is there.
        *(feeder(queue, limits, pool) for queue, limits in queues.items()),
    ]  # fmt: skip
    maintenance = [] if pool is None else [
        ActorChild(Address[object]("reaper", capacity=1), partial(Reaper, node)),
        *([ActorChild(watch, partial(LongPoll, node))] if long_polls else []),
    ]  # fmt: skip
    root = Supervisor(
        f"engine {node.config.name}".replace("/", "_"),
        [
            *extra,
            Supervisor("work", work, strategy="rest_for_one", intensity=10, period=10.0),
            Supervisor("maintenance", maintenance, intensity=10, period=10.0),
            # Started last, so stopped first.
            TaskChild("gate", partial(_gate, node), handshake=True),
        ],
        intensity=3,
        period=60.0,
    )
    return Parts(root, commits, keys, pool)


async def _gate(node: Node, *, task_status: trio.TaskStatus[None]) -> None:
    """Open while the engine runs; closes when it is asked to stop, by whatever way, before anything else stops."""
    task_status.started()
    try:
        await trio.sleep_forever()
    finally:
        node.draining = True
        running = sum(feeder.claimed.slots.running for feeder in node.feeders.values())
        buffered = sum(len(feeder.claimed) for feeder in node.feeders.values())
        logger.info(
            "draining: %s still running, %s to give back",
            counted(running, "step"),
            counted(buffered, "claimed row"),
        )
        if node.telemetry.active:
            node.telemetry.emit(DrainStarted(node=node.owner.name, running=running, buffered=buffered))
        for wake in node.wakes.values():
            wake.cast(None)


def _step_exited(node: Node, task: PoolTask, reason: ExitReason) -> None:
    """Free the queue's slot. An error here is a bug of ours: users' errors go through `handle`."""
    assert isinstance(task.key, TaskSlice)
    held = task.key.held
    if isinstance(reason, Error):
        logger.error("the task of instance %d failed", held.claim.id, exc_info=reason.error)
    feeder = node.feeders.get(held.claim.queue)
    if feeder is not None:
        feeder.claimed.exited(held)


def _step_waits(node: Node, task: PoolTask) -> None:
    """A step waits for something: others may begin."""
    assert isinstance(task.key, TaskSlice)
    held = task.key.held
    feeder = node.feeders.get(held.claim.queue)
    if feeder is not None:
        feeder.claimed.waits(held)
