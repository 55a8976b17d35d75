"""What the actors of one engine share, passed to them explicitly."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, Literal, Protocol

import attrs
from trio_util import AsyncBool, AsyncValue

from durable_actors._engine.catalog import MachineCatalog
from durable_actors._engine.claims import ActiveClaims
from durable_actors._engine.store_health import StoreHealth
from durable_actors._engine.threads import Threads
from durable_actors._engine.wakeups import Wakeups
from durable_actors._postgres.driver.connection import PgConn
from durable_actors._postgres.driver.statement import Params, Result, Statement
from durable_actors._postgres.pool.lane import Lane
from durable_actors._postgres.pool.pool import ConnectionPool
from durable_actors._store.claim import Owner
from durable_actors._store.graph import Room
from durable_actors._store.read import Ending
from durable_actors._store.rows import Claim, Promoted
from durable_actors._store.schedules import ScheduledPlan
from durable_actors._store.siblings import Heir
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

    def expect_token(self, slot: str | None = None) -> None:
        """A throttled instance may have its token, or this slot."""
        ...

    def pauses_changed(self) -> None:
        """The queue, or a machine in it, was paused or resumed by this process."""
        ...

    def learn_pauses(self, pauses: Mapping[str, float], now: float) -> None:
        """What is paused in it (`QueueShape.pauses`)."""
        ...


class TakesOver(Protocol):
    """What a commit may claim for this node (`claiming.hand_over.HandOver`)."""

    def begin(self, queues: Iterable[str]) -> Room | None:
        """How much of these queues a commit that is about to be sent may claim."""
        ...

    def begin_keys(self, claims: Sequence[Claim]) -> Heir | None:
        """Of which of these claims, whose keys it may leave, it may claim the key's next row."""
        ...

    def done(self, claims: Sequence[Claim]) -> None:
        """It has claimed these."""
        ...

    def failed(self, *, unknown_fate: bool) -> None:
        """It has failed, or may have."""
        ...

    async def settled(self) -> None:
        """Wait for the end of the one under way."""
        ...


class _NoHandOver:
    """Of commits that claim nothing."""

    def begin(self, queues: Iterable[str]) -> Room | None:  # noqa: ARG002 - the protocol's
        return None

    def begin_keys(self, claims: Sequence[Claim]) -> Heir | None:  # noqa: ARG002 - the protocol's
        return None

    def done(self, claims: Sequence[Claim]) -> None: ...

    def failed(self, *, unknown_fate: bool) -> None: ...

    async def settled(self) -> None: ...


NO_HAND_OVER: Final[TakesOver] = _NoHandOver()


class ClaimsForCalls(Protocol):
    """What calls of this process may claim for this node (`claiming.at_once.ClaimsAtOnce`)."""

    async def run(
        self,
        conn: PgConn,
        call: tuple[Statement, Params],
        queues: Iterable[str] | None,
        ids: Sequence[int] = (),
    ) -> tuple[Result, bool]:
        """Run a call that makes one row runnable, and claim the row if its queue is at rest."""
        ...

    async def settled(self, queue: str) -> None:
        """Wait for the end of those under way."""
        ...


class _NoClaims:
    """Of nodes that serve no queue."""

    async def run(
        self,
        conn: PgConn,
        call: tuple[Statement, Params],
        queues: Iterable[str] | None,  # noqa: ARG002 - the protocol's
        ids: Sequence[int] = (),  # noqa: ARG002
    ) -> tuple[Result, bool]:
        return await conn.run(*call), False

    async def settled(self, queue: str) -> None: ...


NO_CLAIMS: Final[ClaimsForCalls] = _NoClaims()


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
    swept_at: float | None = None
    """When the janitor last began a round that deleted all that was due, on Trio's clock; None: it deletes nothing."""
    on_fatal: Callable[[BaseException], None] = attrs.field(default=lambda _: None)
    """A step raised KeyboardInterrupt: the node must stop."""
    hand_over: TakesOver = NO_HAND_OVER
    """What the commits of the flusher may claim for this node."""
    at_once: ClaimsForCalls = NO_CLAIMS
    """What calls of its client may claim for this node."""
    cascade: Callable[[], object] = attrs.field(default=lambda: None)
    """Children are to be cancelled: called after the commit that decided it. Never blocks."""
    schedules: Mapping[str, ScheduledPlan] = attrs.field(factory=dict[str, ScheduledPlan])
    """What this node's code says of schedules."""
    schedules_changed: Callable[[], object] = attrs.field(default=lambda: None)
    """A call of this process has changed a schedule. Never blocks."""
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

    def expect_token(self, queue: str, slot: str | None) -> None:
        """A step with this slot has ended, or one was released: the feeder must look for what waits for it."""
        hints = self.queues.get(queue)
        if hints is not None:
            hints.expect_token(slot)

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
