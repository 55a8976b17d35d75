"""A small node: the product's tree and everything in it, on simulated connections; and what befalls the node."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import attrs
import trio
import trio._core._run as trio_run
from durable_actors._engine.catalog import MachineCatalog
from durable_actors._engine.claims import ActiveClaims
from durable_actors._engine.limits import QueueLimits
from durable_actors._engine.node import Node
from durable_actors._engine.running.context_port import EnginePort
from durable_actors._engine.tree import build_tree
from durable_actors._postgres.pool.lane import Lane
from durable_actors._store.claim import Owner
from durable_actors.machine import JournalLevel, Registry
from durable_actors.otp import (
    ActorChild,
    ChildExited,
    ChildSpec,
    Error,
    PoolChild,
    PoolClosed,
    RestartLimitReached,
    StartFailed,
    StopFailed,
    Supervisor,
    Tree,
    run_tree,
)
from durable_actors.retention import Retention
from durable_actors.telemetry import Telemetry
from tests.simulation import workload
from tests.simulation.process import current_process
from tests.simulation.small.wire import Line, Lines
from tests.simulation.tables import SHORT

if TYPE_CHECKING:
    from tests.simulation.small.run import Land

SCHEMA = "durable"
QUEUE = "default"
KNOWN = MachineCatalog(
    Registry(), {spec.key: spec for each in workload.MACHINES if (spec := each.__durable__)}
)  # type: ignore[attr-defined]
ROLES = {role: Lane(role, 1) for role in ("session", "heartbeat", "commit", "claim")} | {
    "client": Lane("client", 4)
}
GAVE_UP = (RestartLimitReached, StartFailed, StopFailed)
"""What supervisors fail with when a child has failed."""


@attrs.frozen
class Options:
    """What the engine reads of a Config."""

    name: str
    late_commit: str
    lease_ttl: float
    reap_interval: float
    dead_after: float
    thread_limit: int = 1
    drain_timeout: float = 5.0
    max_crashes: int | None = None
    journal: JournalLevel = "auto"
    retention: Retention | None = SHORT

    @property
    def heartbeat_interval(self) -> float:
        return self.lease_ttl / 3


class Bug(Exception):
    """Something of ours is wrong, and an actor dies of it."""


class Host:
    """One incarnation."""

    def __init__(self, land: Land, name: str) -> None:
        plan = land.plan
        self.land, self.name = land, name
        self.book = land.book
        self.dead = self.ended = self.paused = False
        self.resumed_at = -1.0
        self.started_at = land.world.now
        self.lines: list[Line] = []
        options: dict[str, Any] = plan.options
        self.limits = QueueLimits(
            plan.concurrency, plan.prefetch, 1, options["poll_interval"], options["max_poll_interval"]
        )
        pool: Any = Lines(land.network, self)
        claims = ActiveClaims()
        names = attrs.fields_dict(Options)
        config: Any = Options(name, **{key: value for key, value in options.items() if key in names})
        port = EnginePort(pool, "client", SCHEMA, claims)
        self.node = Node(
            config, Owner(SCHEMA, name, b"hash", config.lease_ttl), pool, ROLES, KNOWN, Telemetry(), port, claims,
            random=land.world.random.random,
        )  # fmt: skip
        port.notify = self.node.notify
        self.scope = trio.CancelScope()
        self.on_wire: set[trio.lowlevel.Task] = set()
        """Tasks whose message is under way: that goes on while the process stands still."""
        self._stopped: list[trio.lowlevel.Task] = []
        self._gate = trio.Event()
        self._tree: Tree | None = None

    async def run(self) -> None:
        current_process.set(self)  # type: ignore[arg-type]
        self.parts = build_tree(self.node, {QUEUE: self.limits})
        with self.scope:
            try:
                await run_tree(
                    self.parts.root, drain_on_cancel=False, observe=self._observe, task_status=self
                )
            except GAVE_UP:
                self.land.crash(self)
        self.ended = True
        self.land.ended(self)

    def started(self, tree: Tree) -> None:
        """All of the tree runs."""
        self._tree = tree

    def _observe(self, event: object) -> None:
        if isinstance(event, ChildExited) and isinstance(event.reason, Error):
            error = event.reason.error
            # A feeder whose step pool has just failed cannot start what it has claimed.
            if not isinstance(error, (Bug, PoolClosed, *GAVE_UP)):
                self.land.fail("internal error", f"{self.name}: {event.path} failed: {error!r}")

    # -- what befalls it

    def kill(self) -> None:
        """SIGKILL: what unwinds afterwards reaches nobody."""
        self.dead = True
        self.resume()
        self.scope.cancel()

    def pause(self) -> None:
        """SIGSTOP: none of its tasks runs, time goes on."""
        if not self.paused and not self.dead:
            self.paused = True
            self._gate = trio.Event()

    def resume(self) -> None:
        """As in Trio, what came from outside is looked at before deadlines are."""
        if self.paused:
            self.paused = False
            self.resumed_at = self.land.world.now
            self._gate.set()
            trio_run.GLOBAL_RUN_CONTEXT.runner.runq.extend(self._stopped)
            self._stopped.clear()

    def stop(self, task: trio.lowlevel.Task) -> None:
        """It could run, but its process stands still."""
        self._stopped.append(task)

    async def awake(self) -> None:
        while self.paused:
            await self._gate.wait()

    async def sleep(self, seconds: float) -> None:
        """What a step does while it works."""
        await trio.sleep(seconds)

    def drain(self) -> None:
        """SIGTERM."""
        if self._tree is not None:
            self._tree.request_stop()

    def crash_one(self, draw: float) -> None:
        """A bug ends one of its actors, or the step pool."""
        parts = [each for each in _leaves(self.parts.root) if isinstance(each, ActorChild | PoolChild)]
        chosen = parts[math.floor(draw * len(parts))]
        if isinstance(chosen, PoolChild):
            nursery = chosen.pool._nursery
        else:
            task = chosen.address._task
            nursery = task.child_nurseries[0] if task is not None and task.child_nurseries else None
        if nursery is not None and not self.ended:
            nursery.start_soon(_fail, self)


async def _fail(host: Host) -> None:
    await trio.lowlevel.checkpoint()
    await host.awake()  # its context is not the host's: it would run while the host stands still
    if not host.dead:
        raise Bug


def _leaves(spec: ChildSpec) -> Iterator[ChildSpec]:
    if isinstance(spec, Supervisor):
        for child in spec.children:
            yield from _leaves(child)
    else:
        yield spec


@contextmanager
def stoppable() -> Iterator[None]:
    """Let Trio run no task of a process that stands still."""
    reschedule = trio_run.Runner.reschedule

    def reschedule_unless_stopped(runner: Any, task: trio.lowlevel.Task, *outcome: Any) -> None:
        reschedule(runner, task, *outcome)
        host: Any = task.context.get(current_process)
        if host is not None and host.paused and task not in host.on_wire:
            runner.runq.pop()
            host.stop(task)

    with patch.object(trio_run.Runner, "reschedule", reschedule_unless_stopped):
        yield
