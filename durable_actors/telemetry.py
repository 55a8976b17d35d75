"""What an engine tells about itself: typed events, handed to observers as they happen.

::

    async with da.open_engine(config) as engine:
        engine.telemetry.subscribe(print)          # from now on
    da.Config(..., observers=[print])              # from the start

An observer is called synchronously in the engine's loop: it must be quick and must not raise (an error is logged and
the observer is dropped). With no observer an event costs one attribute test; it is not even made.
`StepStarted` and `StepStopped` are told in the step's own context: a context variable that an observer sets at the one
is seen by the step, and may be reset at the other. `StepCommitted` and `OutcomeStale` are told outside of it.

=====================  ==================================================================================
event                  when
=====================  ==================================================================================
`NodeStarted`          the engine is ready
`NodeStopped`          the engine has stopped
`DrainStarted`         nothing new is claimed from now on
`Picked`               a pick came back: how many were asked for, claimed, held, shelved
`QueueSaturated`       every slot and buffer place of a queue is taken
`StepStarted`          a step begins to run
`StepStopped`          its outcome is known (not yet committed): kind, seconds, error
`StepCrashed`          it raised SystemExit or another BaseException: no outcome, it runs again after a pause
`StepCommitted`        its outcome is in the database
`OutcomeStale`         its outcome was refused by the fence: another claim owns the instance
`OutcomeLate`          it was committed after its lease had ended, the claim still being current
`ClaimLost`            a running step was cancelled because its claim was gone or could not be trusted
`PartitionContended`   a claimed row went back because its key is busy elsewhere
`ClaimsReaped`         claims were taken back from dead or silent nodes
`AwaitTimedOut`        a parked instance's deadline passed
`LoopBlocked`          something has blocked the event loop for half a second or more
`StoreDown`            Postgres cannot be reached
`StoreUp`              Postgres is back
=====================  ==================================================================================

Log records, yours and the engine's, can carry the step they belong to. Add the filter to a handler::

    handler = logging.StreamHandler()
    handler.addFilter(da.telemetry.StepLogFilter())
    handler.setFormatter(logging.Formatter("[%(instance)s %(machine)s.%(step)s #%(attempt)s] %(message)s"))
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextvars import ContextVar
from typing import Final, Protocol

import attrs

__all__ = [
    "AwaitTimedOut",
    "ClaimLost",
    "ClaimsReaped",
    "DrainStarted",
    "Event",
    "LoopBlocked",
    "NodeStarted",
    "NodeStopped",
    "OutcomeLate",
    "OutcomeStale",
    "PartitionContended",
    "Picked",
    "QueueSaturated",
    "StepCommitted",
    "StepCrashed",
    "StepLogFilter",
    "StepStarted",
    "StepStopped",
    "StoreDown",
    "StoreUp",
    "Telemetry",
]

logger: Final = logging.getLogger("durable_actors.telemetry")


@attrs.frozen(kw_only=True)
class NodeStarted:
    """The engine is ready."""

    node: str
    """Node and incarnation, as in `locked_by`."""
    queues: tuple[str, ...]


@attrs.frozen(kw_only=True)
class NodeStopped:
    """The engine has stopped."""

    node: str


@attrs.frozen(kw_only=True)
class DrainStarted:
    """Nothing new is claimed from now on."""

    node: str
    running: int
    """Steps that may finish."""
    buffered: int
    """Rows that go back at once."""


@attrs.frozen(kw_only=True)
class Picked:
    """A pick came back."""

    queue: str
    wanted: int
    claimed: int
    held: int
    """Rows put behind a running sibling of their key."""
    shelved: int
    """Rows of machines that this node does not know."""
    left: int
    """Rows to look at again."""
    seconds: float


@attrs.frozen(kw_only=True)
class QueueSaturated:
    """Every slot and buffer place of a queue is taken."""

    queue: str
    running: int
    """Steps whose code runs. Claimed rows begin one after another: some may be about to."""
    buffered: int
    """Claimed rows that have not begun."""


@attrs.frozen(kw_only=True)
class _OfStep:
    """Fields of every event about one step."""

    id: int
    """The instance."""
    machine: str
    version: int
    step: str
    attempt: int
    visit: int
    queue: str


@attrs.frozen(kw_only=True)
class StepStarted(_OfStep):
    """A step begins to run."""


@attrs.frozen(kw_only=True)
class StepStopped(_OfStep):
    """Its outcome is known, not yet committed."""

    outcome: str
    """Next, Retry, Await, ScheduleChildren, Done or Stop."""
    seconds: float
    error: BaseException | None
    """What went through `handle`, if anything did."""


@attrs.frozen(kw_only=True)
class StepCrashed(_OfStep):
    """Its code raised SystemExit or another BaseException: no outcome, `handle` is not asked, it runs again."""

    error: BaseException


@attrs.frozen(kw_only=True)
class StepCommitted(_OfStep):
    """Its outcome is in the database. Told when the answer is read; the next step may have begun already."""

    status: str
    """The instance's status now."""


@attrs.frozen(kw_only=True)
class OutcomeStale(_OfStep):
    """Its outcome was refused by the fence: another claim owns the instance."""


@attrs.frozen(kw_only=True)
class OutcomeLate(_OfStep):
    """It was committed after its lease had ended, the claim still being current."""


@attrs.frozen(kw_only=True)
class ClaimLost(_OfStep):
    """A running step was cancelled because its claim was gone or could not be trusted."""

    reason: str


@attrs.frozen(kw_only=True)
class PartitionContended(_OfStep):
    """A claimed row went back because its key is busy elsewhere."""

    key: str


@attrs.frozen(kw_only=True)
class ClaimsReaped:
    """Claims were taken back from dead or silent nodes."""

    count: int
    failed: int
    """Of these, steps that crashed too often and are quarantined."""
    dead_nodes: tuple[str, ...]
    """Nodes whose claims were taken before their leases ended."""


@attrs.frozen(kw_only=True)
class AwaitTimedOut:
    """Deadlines of parked instances passed."""

    count: int


@attrs.frozen(kw_only=True)
class LoopBlocked:
    """Code has blocked the event loop: no other step and no heartbeat of this process could run."""

    id: int | None
    """The instance whose step it was; None: another task of the process."""
    machine: str | None
    step: str | None
    task: str
    """Trio's name of the task."""
    where: str
    """The line that ran when it was seen."""
    seconds: float
    """For how long, at least: from when it was first seen."""


@attrs.frozen(kw_only=True)
class StoreDown:
    """Postgres cannot be reached: once per outage of a node; or it refuses statements of an actor: once per actor."""

    actor: str
    """Who noticed it first."""
    error: BaseException


@attrs.frozen(kw_only=True)
class StoreUp:
    """Postgres is back, for everybody who could not reach it."""

    actor: str
    """Who noticed it last."""
    seconds: float
    """How long it was away."""


Event = (
    NodeStarted
    | NodeStopped
    | DrainStarted
    | Picked
    | QueueSaturated
    | StepStarted
    | StepStopped
    | StepCrashed
    | StepCommitted
    | OutcomeStale
    | OutcomeLate
    | ClaimLost
    | PartitionContended
    | ClaimsReaped
    | AwaitTimedOut
    | LoopBlocked
    | StoreDown
    | StoreUp
)
"""Every event."""


class Telemetry:
    """The observers of one engine."""

    __slots__ = ("_observers", "active")

    def __init__(self, observers: tuple[Callable[[Event], object], ...] = ()) -> None:
        self._observers = observers
        self.active = bool(observers)
        """Whether anybody listens. The engine asks before it makes an event."""

    def subscribe(self, observer: Callable[[Event], object]) -> Callable[[], None]:
        """Call `observer` with every event from now on. Returns what ends it."""
        self._observers = (*self._observers, observer)
        self.active = True

        def unsubscribe() -> None:
            self._observers = tuple(each for each in self._observers if each is not observer)
            self.active = bool(self._observers)

        return unsubscribe

    def emit(self, event: Event) -> None:
        """Hand an event to every observer. One that raises is logged and dropped: it must not stop the engine."""
        for observer in self._observers:
            try:
                observer(event)
            except Exception:
                logger.exception("observer %r failed on %r and is dropped", observer, event)
                self._observers = tuple(each for each in self._observers if each is not observer)
                self.active = bool(self._observers)


class RunningStep(Protocol):
    """What a log record is told of a step; a `Context` is one."""

    @property
    def id(self) -> int:
        """The instance."""
        ...

    @property
    def machine(self) -> str:
        """The machine's name."""
        ...

    @property
    def step(self) -> str:
        """The step's name."""
        ...

    @property
    def attempt(self) -> int:
        """How often it ran before."""
        ...


current_step: Final[ContextVar[RunningStep | None]] = ContextVar("durable_actors_step", default=None)
"""The step that runs in this task or thread; None outside of steps."""


class StepLogFilter(logging.Filter):
    """Adds `instance`, `machine`, `step` and `attempt` to every record; None outside of steps. Lets all pass."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Note which step the record comes from."""
        running = current_step.get()
        record.instance = None if running is None else running.id
        record.machine = None if running is None else running.machine
        record.step = None if running is None else running.step
        record.attempt = None if running is None else running.attempt
        return True
