"""A small node: the product's parts and five loops, under the product's rules for restarts; and what befalls it."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import attrs
import trio
from durable_actors._engine.claiming.demand import QueueLimits
from durable_actors._engine.claims import ActiveClaim, ActiveClaims, TaskSlice
from durable_actors._engine.committing.queue import Commits
from durable_actors._engine.keys.locks import Keys
from durable_actors._engine.node import MachineCatalog, Node
from durable_actors._engine.running.context_port import EnginePort
from durable_actors._engine.running.step_inputs import InputLoader
from durable_actors._engine.running.step_task import StepTasks
from durable_actors._postgres.pool.lane import Lane
from durable_actors._store.claim import Owner
from durable_actors.machine import Registry
from durable_actors.otp._exit import Error
from durable_actors.otp._restart import Backoff, GiveUp, RestartThese, Sibling, decide
from durable_actors.telemetry import Telemetry
from tests.simulation import workload
from tests.simulation.process import current_process
from tests.simulation.small.feeder import QUEUE, Bell, Feeder
from tests.simulation.small.loops import Flusher, Heartbeat, Keeper, Reaper
from tests.simulation.small.wire import Line, Lines

if TYPE_CHECKING:
    from tests.simulation.small.run import Land

SCHEMA = "durable"
KNOWN = MachineCatalog(
    Registry(), {spec.key: spec for each in workload.MACHINES if (spec := each.__durable__)}
)  # type: ignore[attr-defined]
ROLES = {role: Lane(role, 1) for role in ("claim", "commit", "client", "heartbeat")}
BACKOFF = Backoff()


@attrs.frozen
class Options:
    """What the parts read of a Config."""

    late_commit: str
    lease_ttl: float
    reap_interval: float
    dead_after: float
    thread_limit: int = 1


class Bug(Exception):
    """Something of ours is wrong, and an actor dies of it."""


class Ticket:
    """A running step, as its claim knows it: a cancel scope whose deadline is the lease's end, on the node's clock."""

    def __init__(self, host: Host, deadline: float) -> None:
        self.host = host
        self.scope = trio.CancelScope()
        self.since = trio.current_time()
        self.deadline = deadline

    @property
    def deadline(self) -> float:
        return self._deadline

    @deadline.setter
    def deadline(self, deadline: float) -> None:
        self._deadline = deadline
        self.apply()

    def apply(self) -> None:
        """A process that stands still notices no deadline."""
        self.scope.deadline = math.inf if self.host.paused else self._deadline - self.host.skew

    def cancel(self, why: str) -> bool:
        self.scope.cancel(reason=why)
        return True


class Host:
    """One incarnation."""

    def __init__(self, land: Land, name: str, skew: float) -> None:
        plan = land.plan
        self.land, self.name, self.skew = land, name, skew
        self.book = land.book
        self.dead = self.ended = self.paused = False
        self.resumed_at = -1.0
        self.lines: list[Line] = []
        self.plan_has_keys = any(item.key for item in plan.items)
        options: dict[str, Any] = plan.options
        self.limits = QueueLimits(
            plan.concurrency, plan.prefetch, 1, options["poll_interval"], options["max_poll_interval"]
        )
        self.hunger, self.outcomes, self.locks = Bell(), Bell(), Bell()
        self.commits = Commits(self.outcomes)  # type: ignore[arg-type]
        self.keys = Keys(self.locks)  # type: ignore[arg-type]
        pool: Any = Lines(land.network, self)
        leases = ActiveClaims()
        names = attrs.fields_dict(Options)
        config: Any = Options(**{key: value for key, value in options.items() if key in names})
        port = EnginePort(pool, "client", SCHEMA, leases)
        self.node = Node(
            config, Owner(SCHEMA, name, b"hash", config.lease_ttl), pool, ROLES, KNOWN, Telemetry(), port,
            InputLoader(pool, "client", SCHEMA), leases, random=land.world.random.random,
        )  # fmt: skip
        self.node.wakes = {QUEUE: self.hunger}  # type: ignore[dict-item]
        port.poke = self.node.poke
        self.scope = trio.CancelScope()
        self._gate = trio.Event()
        self.keeps = trio.Event()
        """The keeper has its session, or has failed once: nothing is claimed before that."""

    def now(self) -> float:
        """Its own clock, which may be wrong: only differences mean anything."""
        return trio.current_time() + self.skew

    async def run(self) -> None:
        current_process.set(self)  # type: ignore[arg-type]
        with self.scope:
            self.tasks = StepTasks(self.node, self.commits, self.keys, StepPool(self))  # type: ignore[arg-type]
            async with trio.open_nursery() as nursery:
                Group(self, nursery, [Heartbeat, Keeper, Flusher, Steps, Feeder]).start()
                Group(self, nursery, [Reaper]).start()
        self.ended = True

    # -- what befalls it

    def kill(self) -> None:
        """SIGKILL: what unwinds afterwards reaches nobody."""
        self.dead = True
        self.paused = False
        self._gate.set()
        self.scope.cancel()

    def pause(self) -> None:
        """SIGSTOP: it sends and learns nothing, its steps stand still, time goes on."""
        if not self.paused and not self.dead:
            self.paused = True
            self._gate = trio.Event()
            self._deadlines()

    def resume(self) -> None:
        """As in Trio, what came from outside is looked at before deadlines are."""
        if self.paused:
            self.paused = False
            self.resumed_at = self.land.world.now
            self._gate.set()
            self._deadlines()

    def _deadlines(self) -> None:
        for held in self.node.claims.all():
            if isinstance(held.task, Ticket):
                held.task.apply()

    async def awake(self) -> None:
        while self.paused:
            await self._gate.wait()

    async def sleep(self, seconds: float) -> None:
        """What a step does while it works."""
        await trio.sleep(seconds)
        if self.paused:
            await self.awake()

    # -- steps

    def start_step(self, held: ActiveClaim) -> None:
        """In the present incarnation of the steps' place in the tree."""
        if self.dead:
            return
        slots = self.node.feeders[QUEUE].slots
        if slots.running > self.limits.concurrency:
            self.land.fail("slots", f"{self.name} runs {slots.running} steps of {self.limits.concurrency}")
        turn = TaskSlice(held, self.now())
        turn.task = held.task = self.start(turn, self.tasks.run, turn)  # type: ignore[assignment]

    def start(self, turn: TaskSlice, fn: Callable[..., Awaitable[object]], *args: object) -> Ticket:
        ticket = Ticket(self, turn.held.claim.trusted_until)
        self.steps.start_soon(self._step, ticket, turn.held, partial(fn, *args))
        return ticket

    async def _step(self, ticket: Ticket, held: ActiveClaim, run: Callable[[], Awaitable[object]]) -> None:
        try:
            with ticket.scope:
                await run()
        finally:
            self.node.feeders[QUEUE].exited(held)


class StepPool:
    """What step tasks know of the product's pool."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.context = StepTasks.context()

    def start_nowait(
        self, fn: Callable[..., Awaitable[object]], *args: object, key: TaskSlice, deadline: float
    ) -> Ticket:
        del deadline  # the claim's
        return self.host.start(key, fn, *args)


class Steps:
    """The steps' place in the tree: ends, and all that run are cancelled."""

    def __init__(self, host: Host) -> None:
        self.host = host

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            self.host.steps = nursery
            await trio.sleep_forever()


class Group:
    """A supervisor: whom to restart, and when to give up, is the product's decision."""

    def __init__(self, host: Host, nursery: trio.Nursery, makers: list[Callable[[Host], Any]]) -> None:
        self.host, self.nursery, self.makers = host, nursery, makers
        self._siblings = [Sibling("permanent")] * len(makers)
        self._scopes = [trio.CancelScope() for _ in makers]
        self._ended = [trio.Event() for _ in makers]
        self._history: tuple[float, ...] = ()
        self._streak, self._crashed_at = 0, 0.0
        self._restarting = False
        host.land.groups.setdefault(host.name, []).append(self)

    def start(self) -> None:
        for index in range(len(self.makers)):
            self._begin(index)

    def _begin(self, index: int) -> None:
        self._scopes[index], self._ended[index] = trio.CancelScope(), trio.Event()
        self.nursery.start_soon(self._live, index)

    async def _live(self, index: int) -> None:
        current_process.set(self.host)  # type: ignore[arg-type]
        try:
            with self._scopes[index]:
                await self.makers[index](self.host).run()
        finally:
            self._ended[index].set()

    def crash(self, index: int) -> None:
        """A bug ends this actor: restart whom the rules say."""
        if self._restarting:
            return
        now = self.host.now()
        decision = decide(
            self._siblings, index, Error(Bug()), strategy="rest_for_one", auto_shutdown="never", intensity=10,
            period=10.0, history=self._history, now=now,
        )  # fmt: skip
        if isinstance(decision, GiveUp):
            self.host.land.crash(self.host)
        elif isinstance(decision, RestartThese):
            self._history = decision.history
            self._streak = BACKOFF.next_streak(self._streak, lived=now - self._crashed_at)
            self._crashed_at = now
            self._restarting = True
            self.nursery.start_soon(self._restart, index, decision)
        else:
            self._scopes[index].cancel()

    async def _restart(self, failed: int, decision: RestartThese) -> None:
        for index in (*decision.stop, failed):
            self._scopes[index].cancel()
            await self._ended[index].wait()
        await trio.sleep(BACKOFF.delay(self._streak))
        if self.host.paused:
            await self.host.awake()
        self._restarting = False
        for index in decision.start:
            self._begin(index)
