"""What the actors of one engine share, passed to them explicitly."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Mapping
from typing import Final, Literal, Protocol

import attrs
from trio_util import AsyncBool, AsyncValue

from durable_actors._engine.catalog import MachineCatalog
from durable_actors._engine.claims import ActiveClaims
from durable_actors._engine.store_health import StoreHealth
from durable_actors._engine.threads import Threads
from durable_actors._engine.wakeups import Wakeups
from durable_actors._postgres.pool.lane import Lane
from durable_actors._postgres.pool.pool import ConnectionPool
from durable_actors._store.claim import Owner
from durable_actors._store.read import Ending
from durable_actors._store.rows import Promoted
from durable_actors.config import Config
from durable_actors.machine import ContextPort
from durable_actors.telemetry import Telemetry

logger: Final = logging.getLogger("durable_actors.engine")

EngineState = Literal["starting", "running", "draining", "stopped"]
"""The states of an engine, in their order."""


def engine_state() -> AsyncValue[EngineState]:
    """The state of an engine that starts."""
    return AsyncValue("starting")


class QueueHints(Protocol):
    """Hints for the feeder of a queue (`ClaimPlanner`). Each wakes the feeder; wake-ups coalesce."""

    def notify(
        self,
        instance_id: int | None = None,
        priority: int | None = None,
        *,
        new_unkeyed: bool = False,
        by_signal: bool = False,
    ) -> None:
        """A row is on offer."""
        ...

    def expect_deadline(self) -> None:
        """An instance was parked with a deadline."""
        ...

    def pauses_changed(self) -> None:
        """The queue, or a machine in it, was paused or resumed by this process."""
        ...

    def learn_pauses(self, pauses: Mapping[str, float], now: float) -> None:
        """What is paused in it (`QueueShape.pauses`)."""
        ...


class OnFinal(Protocol):
    """Is told that an instance has ended, and how, if its row may be gone."""

    def __call__(self, number: int, ending: Ending | None = None, /) -> None:
        """Called in the event loop of the engine."""
        ...


@attrs.define(eq=False)
class Node:
    """One engine's shared parts."""

    config: Config
    owner: Owner
    pool: ConnectionPool
    roles: Mapping[str, Lane]
    catalog: MachineCatalog
    telemetry: Telemetry
    port: ContextPort
    claims: ActiveClaims
    queues: Mapping[str, QueueHints] = attrs.field(factory=dict[str, QueueHints])
    """The queues that this node serves."""
    about: Mapping[str, object] = attrs.field(factory=dict[str, object])
    """What its row in `nodes` says about it, for people."""
    told: int = -1
    """The generation of `catalog` whose steps that compensate are recorded in the database."""
    registered: bool = True
    """That row exists. False: `nodes` was locked when the engine started, and the heartbeat inserts the row later."""
    state: AsyncValue[EngineState] = attrs.field(factory=engine_state)
    """What the engine as a whole does; tasks can wait for a change."""
    draining: AsyncBool = attrs.field(factory=AsyncBool)
    """Nothing is claimed any more, and no step runs ahead: true from the beginning of the drain on."""
    health: StoreHealth = attrs.field(factory=StoreHealth)
    """Whether the store can be reached."""
    wakeups: Wakeups | None = None
    """What the notifier is to be told: every row that became runnable by a commit of this node. None: there is none."""
    random: Callable[[], float] = random.random
    threads: Threads = attrs.field(init=False)
    """The threads of `def` steps."""
    leaks_logged: set[tuple[str, int, str]] = attrs.field(factory=set[tuple[str, int, str]])
    """Steps (machine, version, step) for which a leak was logged: they left something open in their task."""
    on_fatal: Callable[[BaseException], None] = attrs.field(default=lambda _: None)
    """A step raised KeyboardInterrupt: the node must stop."""
    cascade: Callable[[], object] = attrs.field(default=lambda: None)
    """Children are to be cancelled: called after the commit that decided it. Never blocks."""
    on_final: OnFinal = attrs.field(default=lambda _number, _ending=None: None)
    """An instance became terminal here: tasks that wait for its result read it, or are told."""

    def __attrs_post_init__(self) -> None:
        self.threads = Threads(self.config.thread_limit)

    def drain(self) -> None:
        """Close the gate. Safe to repeat."""
        self.draining.value = True
        if self.state.value != "stopped":
            self.state.value = "draining"

    def lane(self, role: str) -> str:
        """The name of the lane that a role uses."""
        return self.roles[role].name

    def notify(
        self,
        queue: str,
        /,
        *,
        instance_id: int | None = None,
        priority: int | None = None,
        new_unkeyed: bool = False,
        by_signal: bool = False,
    ) -> None:
        """Hint that there may be work, after it was committed (`PickCursor.hint`). Polling is the floor."""
        hints = self.queues.get(queue)
        if hints is not None:
            hints.notify(instance_id, priority, new_unkeyed=new_unkeyed, by_signal=by_signal)

    def expect_deadline(self, queue: str) -> None:
        """An instance was parked here with a deadline: the feeder must read when the next deadline is."""
        hints = self.queues.get(queue)
        if hints is not None:
            hints.expect_deadline()

    def pauses_changed(self, queue: str) -> None:
        """This process has paused or resumed a queue, or a machine in it: the feeder must look at once."""
        hints = self.queues.get(queue)
        if hints is not None:
            hints.pauses_changed()

    def offer(self, promoted: list[Promoted]) -> None:
        """Hint at rows that are on offer again."""
        for row in promoted:
            self.notify(row.queue, instance_id=row.id)
            if row.cascades:
                self.cascade()
        if self.wakeups is not None:
            self.wakeups.add(row.id for row in promoted)
