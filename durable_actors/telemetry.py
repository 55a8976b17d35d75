"""Typed events of an engine, passed to observers as they happen.

::

    async with da.open_engine(config) as engine:
        engine.telemetry.subscribe(print)          # from now on
    da.Config(..., observers=[print])              # from the start

An observer is called synchronously in the engine's event loop: it must be quick and must not raise (an error is logged
and the observer is removed). Without observers no event objects are created; an event costs one attribute test.
`StepStarted` and then either `StepStopped` or `StepInterrupted` are emitted in the context of the step: a context
variable that an observer sets on the first is visible to the step and can be reset on the second. `StepCommitted` and
`OutcomeStale` are emitted outside of that context.

=====================  ==================================================================================
event                  when
=====================  ==================================================================================
`NodeStarted`          the engine is ready
`NodeStopped`          the engine has stopped
`DrainStarted`         the engine drains: it claims no more rows
`InstancesInserted`    a client or a step of this process inserted instances
`SignalsSent`          a client of this process sent signals
`QueuePolled`          a queue was looked at: its running steps, buffered claims and limits
`Picked`               a pick returned: how many rows were requested, claimed, held, shelved, throttled; or a
                       commit has claimed dependents of what it ended
`QueueSaturated`       all slots of a queue are busy and its buffer is full
`StepStarted`          a step starts to run
`StepStopped`          a step returned; its outcome is not yet committed: kind, seconds, error
`StepInterrupted`      a step ended without an outcome: it was cancelled, or it crashed
`StepCrashed`          a step raised SystemExit or another BaseException; it runs again after a back-off
`LimitBlocked`         a step raised `RateLimited`: nothing that uses its limits begins for a while
`StepCommitted`        the outcome of a step is committed
`GroupCommitted`       a group of outcomes is committed
`OutcomeStale`         the fence refused an outcome: another claim owns the instance
`OutcomeLate`          an outcome was committed after its lease expired; the claim was still current
`ClaimLost`            a running step was cancelled because its claim was lost or its lease ended
`PartitionContended`   a claimed row was released because its partition key is busy on another node
`ClaimsReaped`         the reaper released claims of dead or silent nodes
`AwaitTimedOut`        deadlines of parked instances passed
`InstancesDeleted`     retention deleted instances that had ended
`JournalsTruncated`    retention deleted old records of instances that live on
`ScheduleFired`        a schedule started an instance
`ScheduleSkipped`      slots of a schedule did not fire
`RequestReceived`      a command asks something of a claim of this node
`NotifierFailed`       the notifier raised, took too long, or is not an async function
`WakeupsDropped`       wake-ups are not told: too many wait for the notifier, or the engine has stopped
`LoopBlocked`          code has blocked the event loop for half a second or more
`ActorRestarted`       a supervisor starts a part of the engine again
`EngineMeasured`       every ten seconds: how full mailboxes and lanes of connections are, how late retention is
`StoreDown`            Postgres is unavailable
`StoreUp`              Postgres is available again
=====================  ==================================================================================

Log records, yours and the engine's, can carry the step they belong to. Add the filter to a handler::

    handler = logging.StreamHandler()
    handler.addFilter(da.telemetry.StepLogFilter())
    handler.setFormatter(logging.Formatter("[%(instance)s %(machine)s.%(step)s #%(attempt)s] %(message)s"))
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import datetime
from typing import Final

import attrs

from durable_actors._engine_events import ActorRestarted, EngineMeasured, LaneMeasured
from durable_actors._step_log import StepLogFilter
from durable_actors._tracing import TraceContext

__all__ = [
    "ActorRestarted",
    "AwaitTimedOut",
    "ClaimLost",
    "ClaimsReaped",
    "DrainStarted",
    "EngineMeasured",
    "Event",
    "GroupCommitted",
    "InstancesDeleted",
    "InstancesInserted",
    "JournalsTruncated",
    "LaneMeasured",
    "LimitBlocked",
    "LoopBlocked",
    "NodeStarted",
    "NodeStopped",
    "NotifierFailed",
    "OutcomeLate",
    "OutcomeStale",
    "PartitionContended",
    "Picked",
    "QueuePolled",
    "QueueSaturated",
    "RequestReceived",
    "ScheduleFired",
    "ScheduleSkipped",
    "SignalsSent",
    "StepCommitted",
    "StepCrashed",
    "StepInterrupted",
    "StepLogFilter",
    "StepStarted",
    "StepStopped",
    "StoreDown",
    "StoreUp",
    "Telemetry",
    "TraceContext",
    "WakeupsDropped",
]

logger: Final = logging.getLogger("durable_actors.telemetry")


@attrs.frozen(kw_only=True)
class NodeStarted:
    """The engine is ready."""

    node: str
    """The node with its incarnation, as in `locked_by`."""
    queues: tuple[str, ...]


@attrs.frozen(kw_only=True)
class NodeStopped:
    """The engine has stopped."""

    node: str


@attrs.frozen(kw_only=True)
class DrainStarted:
    """The engine drains: it claims no more rows."""

    node: str
    running: int
    """Running steps, which may finish within `drain_timeout`."""
    buffered: int
    """Claimed rows that have not started; they are released at once."""


@attrs.frozen(kw_only=True)
class InstancesInserted:
    """A client or a step of this process inserted instances, and that is committed."""

    machine: str
    queue: str
    """Of the first of them."""
    count: int
    seconds: float | None
    """How long the statement took, and the wait for a connection; None for children, which an outcome inserts."""


@attrs.frozen(kw_only=True)
class SignalsSent:
    """A client of this process sent signals."""

    count: int
    seconds: float


@attrs.frozen(kw_only=True)
class QueuePolled:
    """A queue was looked at: whether it needs rows, or because a slot became free."""

    queue: str
    running: int
    """Steps whose code is running."""
    buffered: int
    """Claimed rows that have not started."""
    concurrency: int
    """How many may run."""
    prefetch: int
    """How many may be buffered beside that."""
    fair_keys: int | None = None
    """In a fair queue: how many keys have due or claimed rows, as far as this node has seen."""


@attrs.frozen(kw_only=True)
class Picked:
    """A pick (the query that claims rows) returned."""

    queue: str
    wanted: int
    """Rows requested."""
    claimed: int
    """Rows claimed."""
    held: int
    """Rows held back behind another instance with the same partition key."""
    shelved: int
    """Rows of machines or steps that this node does not know."""
    left: int
    """Rows to check again."""
    seconds: float
    throttled: int = 0
    """Rows that wait for a limit."""


@attrs.frozen(kw_only=True)
class QueueSaturated:
    """All slots of a queue are busy, and its buffer is full."""

    queue: str
    running: int
    """Steps whose code is running."""
    buffered: int
    """Claimed rows that have not started."""


@attrs.frozen(kw_only=True)
class _OfStep:
    """The fields of every event about one step."""

    id: int
    """The id of the instance."""
    machine: str
    version: int
    step: str
    attempt: int
    visit: int
    queue: str


@attrs.frozen(kw_only=True)
class StepStarted(_OfStep):
    """A step starts to run."""

    waited: float | None = None
    """Seconds since it became due, from the database's clock to the node's; None for one that runs ahead."""
    trace: TraceContext | None = None
    """The trace in which the instance was inserted, if it was inserted in one."""
    limits: tuple[str, ...] = ()
    """The names of the limits that the step uses. It has been charged for them."""


@attrs.frozen(kw_only=True)
class StepStopped(_OfStep):
    """A step returned or raised. Its outcome is not yet committed."""

    outcome: str
    """Next, Retry, Await, ScheduleChildren, Done or Stop."""
    seconds: float
    error: BaseException | None
    """The error that was passed to `handle`, if there was one."""


@attrs.frozen(kw_only=True)
class StepInterrupted(_OfStep):
    """A step ended without an outcome: it was cancelled, or it crashed (`StepCrashed` follows)."""

    seconds: float
    error: BaseException
    """Cancelled, or what it raised."""


@attrs.frozen(kw_only=True)
class LimitBlocked(_OfStep):
    """A step raised `RateLimited`: nothing that uses these limits, with the same keys, begins for so long."""

    limits: tuple[str, ...]
    """Their names."""
    retry_after: float
    """Seconds."""


@attrs.frozen(kw_only=True)
class StepCrashed(_OfStep):
    """A step raised SystemExit or another BaseException. `handle` is not called, and the step runs again."""

    error: BaseException


@attrs.frozen(kw_only=True)
class StepCommitted(_OfStep):
    """The outcome of a step is committed. The next step may have started before this event is emitted."""

    status: str
    """The new status of the instance."""


@attrs.frozen(kw_only=True)
class GroupCommitted:
    """A group of outcomes is committed, by one statement or a few. An outcome with children is none of a group."""

    count: int
    seconds: float


@attrs.frozen(kw_only=True)
class OutcomeStale(_OfStep):
    """The fence refused the outcome: another claim owns the instance."""


@attrs.frozen(kw_only=True)
class OutcomeLate(_OfStep):
    """The outcome was committed after its lease expired, because the claim was still current."""


@attrs.frozen(kw_only=True)
class ClaimLost(_OfStep):
    """A running step was cancelled because its claim was lost or its lease ended."""

    reason: str


@attrs.frozen(kw_only=True)
class PartitionContended(_OfStep):
    """A claimed row was released because its partition key is busy on another node."""

    key: str


@attrs.frozen(kw_only=True)
class RequestReceived(_OfStep):
    """The node has learned that a command asks something of an instance which it runs. Once per request."""

    kind: str
    """What is asked for, as "cancel"."""
    by: str | None
    """Who asked."""
    reason: str | None
    at: datetime | None
    """When, on the clock of the database."""


@attrs.frozen(kw_only=True)
class ClaimsReaped:
    """The reaper released claims of dead or silent nodes."""

    count: int
    failed: int
    """How many of these instances failed because they reached `max_crashes`."""
    dead_nodes: tuple[str, ...]
    """Nodes whose claims were released before their leases expired."""


@attrs.frozen(kw_only=True)
class InstancesDeleted:
    """A round of retention on this node deleted instances that had ended: how many of each status."""

    done: int
    cancelled: int
    failed: int
    records: int
    """Records of the journal that went with them."""


@attrs.frozen(kw_only=True)
class JournalsTruncated:
    """A round of retention on this node shortened the histories of instances that have not ended."""

    snapshots: int
    """How many snapshots it wrote."""
    records: int
    """How many records it deleted; each lay before a snapshot."""


@attrs.frozen(kw_only=True)
class ScheduleFired:
    """This node started the instance of a slot of a schedule."""

    schedule: str
    slot: datetime
    instance_id: int
    kind: str
    """"slot", or "caught_up" if the slot was missed."""
    lag: float
    """Seconds since the slot, on the clock of the database."""


@attrs.frozen(kw_only=True)
class ScheduleSkipped:
    """This node decided that slots of a schedule do not fire."""

    schedule: str
    slot: datetime
    """The first of them."""
    last_slot: datetime
    """The last of them."""
    slots: int | None
    """How many; None: more than 1,000."""
    reason: str
    """"overlap", "missed" or "queue_paused"."""


@attrs.frozen(kw_only=True)
class AwaitTimedOut:
    """The deadlines of parked instances passed, and they woke."""

    count: int


@attrs.frozen(kw_only=True)
class NotifierFailed:
    """The notifier was called and did not return: it raised, took too long, or is not an async function."""

    id: int
    """The instance that it was to be told of. Workers find it by polling."""
    queue: str
    error: BaseException
    count: int
    """Failures so far."""


@attrs.frozen(kw_only=True)
class WakeupsDropped:
    """The notifier is not told: too many wake-ups wait for it, or the engine has stopped."""

    dropped: int
    """How many."""
    count: int
    """How many so far."""


@attrs.frozen(kw_only=True)
class LoopBlocked:
    """Code blocked the event loop: no other step and no heartbeat of this process could run."""

    id: int | None
    """The instance whose step blocked the loop; None if it was another task."""
    machine: str | None
    step: str | None
    task: str
    """The name of the Trio task."""
    where: str
    """The line of code that was running when the block was detected."""
    seconds: float
    """The duration since the block was first detected: a lower bound."""


@attrs.frozen(kw_only=True)
class StoreDown:
    """Postgres is unavailable (emitted once per outage and node) or refuses statements of an actor (once per actor)."""

    actor: str
    """The actor that noticed it first."""
    error: BaseException


@attrs.frozen(kw_only=True)
class StoreUp:
    """Postgres is available again for all actors of the node."""

    actor: str
    """The actor that noticed it last."""
    seconds: float
    """The duration of the outage."""


Event = (
    NodeStarted | NodeStopped | DrainStarted | InstancesInserted | SignalsSent | QueuePolled | Picked
    | QueueSaturated | StepStarted | StepStopped | StepInterrupted | LimitBlocked | StepCrashed
    | StepCommitted | GroupCommitted | OutcomeStale | OutcomeLate | ClaimLost | PartitionContended
    | RequestReceived | ClaimsReaped | InstancesDeleted | JournalsTruncated | ScheduleFired
    | ScheduleSkipped | AwaitTimedOut | NotifierFailed | WakeupsDropped | LoopBlocked | StoreDown
    | StoreUp | ActorRestarted | EngineMeasured
)  # fmt: skip
"""Every event."""


class Telemetry:
    """The observers of one engine."""

    __slots__ = ("_observers", "active")

    def __init__(self, observers: tuple[Callable[[Event], object], ...] = ()) -> None:
        self._observers = observers
        self.active = bool(observers)
        """Whether there are observers. The engine checks this before it creates an event."""

    def subscribe(self, observer: Callable[[Event], object]) -> Callable[[], None]:
        """Call `observer` with every event from now on. Returns a function that unsubscribes it."""
        self._observers = (*self._observers, observer)
        self.active = True

        def unsubscribe() -> None:
            self._observers = tuple(each for each in self._observers if each is not observer)
            self.active = bool(self._observers)

        return unsubscribe

    def emit(self, event: Event) -> None:
        """Pass an event to every observer. If one raises, the error is logged and the observer is removed."""
        for observer in self._observers:
            try:
                observer(event)
            except Exception:
                logger.exception("observer %r raised an error on %r and is removed", observer, event)
                self._observers = tuple(each for each in self._observers if each is not observer)
                self.active = bool(self._observers)
