"""Which events change which metrics. The names of the metrics and their labels are here and nowhere else.

The bridges (`otel`, `prometheus`) only know how their library counts. The conventions of OpenTelemetry for messaging
are not stable yet: what they call a metric or an attribute changes in this file.

No label has more than `MAX_VALUES` values: ids, keys and node names are never labels, and what a program makes up at
run time beyond that is counted as `OTHER`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, Protocol

import attrs

from durable_actors import telemetry

MAX_VALUES: Final = 200
OTHER: Final = "_OTHER"
"""The word of the semantic conventions for the values that are not told apart."""

QUEUE: Final = "messaging.destination.name"
OPERATION: Final = "messaging.operation.name"
SYSTEM: Final = "messaging.system"
ERROR: Final = "error.type"
MACHINE: Final = "durable.machine"
STEP: Final = "durable.step"
OUTCOME: Final = "durable.outcome"
STATUS: Final = "durable.status"
REASON: Final = "durable.reason"
LIMIT: Final = "durable.limit.name"
ACTOR: Final = "durable.actor"
POOL: Final = "db.client.connection.pool.name"
STATE: Final = "db.client.connection.state"

SECONDS: Final = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800, 3600)
"""The upper bounds of the histograms: from a step of a millisecond to an hour in a queue."""


@attrs.frozen(eq=False)
class Metric:
    """One metric."""

    name: str
    """As OpenTelemetry has it; Prometheus has underscores, and the unit or `_total` at the end."""
    kind: Literal["counter", "histogram", "gauge"]
    unit: str
    meaning: str
    labels: tuple[str, ...] = ()
    combined: Literal["sum", "min", "max"] = "sum"
    """What the gauges of several processes are together."""

    @property
    def prometheus(self) -> str:
        """The name in Prometheus, without `_total`, which its library adds to counters."""
        return self.name.replace(".", "_") + ("_seconds" if self.unit == "s" else "")


METRICS: Final[list[Metric]] = []
"""Every metric, in the order of the reference."""


def _metric(
    name: str,
    kind: Literal["counter", "histogram", "gauge"],
    unit: str,
    meaning: str,
    *labels: str,
    combined: Literal["sum", "min", "max"] = "sum",
) -> Metric:
    METRICS.append(Metric(name, kind, unit, meaning, labels, combined))
    return METRICS[-1]


PROCESS: Final = _metric(
    "messaging.process.duration", "histogram", "s", "How long steps ran.", QUEUE, MACHINE, STEP, ERROR
)
SENT: Final = _metric(
    "messaging.client.sent.messages", "counter", "{message}", "Instances inserted by this process.", QUEUE
)
CONSUMED: Final = _metric(
    "messaging.client.consumed.messages", "counter", "{message}", "Rows claimed.", QUEUE
)
OPERATIONS: Final = _metric(
    "messaging.client.operation.duration",
    "histogram",
    "s",
    "How long inserts (send), signals (signal), picks (receive) and commits (settle) took.",
    OPERATION,
)
QUEUE_TIME: Final = _metric(
    "durable.step.queue_time", "histogram", "s", "From when a step was due to its start.", QUEUE
)
STEPS: Final = _metric("durable.steps", "counter", "{step}", "Steps that ended.", MACHINE, STEP, OUTCOME)
RETRIES: Final = _metric("durable.retries", "counter", "{step}", "Steps that run again.", MACHINE, STEP)
ENDED: Final = _metric(
    "durable.instances.ended", "counter", "{instance}", "Instances ended.", MACHINE, STATUS
)
RUNNING: Final = _metric("durable.queue.slots.used", "gauge", "{step}", "Steps that run.", QUEUE)
CONCURRENCY: Final = _metric("durable.queue.slots.limit", "gauge", "{step}", "How many may run.", QUEUE)
BUFFERED: Final = _metric(
    "durable.queue.buffered", "gauge", "{instance}", "Claimed rows that have not started.", QUEUE
)
PREFETCH: Final = _metric(
    "durable.queue.prefetch", "gauge", "{instance}", "How many rows may be buffered.", QUEUE
)
SATURATED: Final = _metric(
    "durable.queue.saturated", "counter", "{time}", "How often all slots and the buffer became full.", QUEUE
)
SHELVED: Final = _metric(
    "durable.rows.shelved", "counter", "{instance}", "Rows whose machine or step this node lacks.", QUEUE
)
CONTENDED: Final = _metric(
    "durable.partition.contended", "counter", "{instance}", "Rows given back for a busy partition key.", QUEUE
)
STALE: Final = _metric(
    "durable.outcome.stale", "counter", "{outcome}", "Outcomes that the fence refused.", MACHINE, STEP
)
LATE: Final = _metric(
    "durable.outcome.late", "counter", "{outcome}", "Outcomes committed after their lease.", MACHINE, STEP
)
LOST: Final = _metric(
    "durable.lease.lost", "counter", "{claim}", "Steps cancelled because their claim was lost.", MACHINE, STEP
)
CRASHED: Final = _metric(
    "durable.step.crashes", "counter", "{step}", "Steps that raised a BaseException.", MACHINE, STEP
)
REAPED: Final = _metric("durable.lease.reaped", "counter", "{claim}", "Claims of dead nodes taken back.")
TIMED_OUT: Final = _metric("durable.await.timeouts", "counter", "{instance}", "Deadlines that passed.")
REQUESTS: Final = _metric("durable.requests", "counter", "{request}", "Commands to running steps.", REASON)
CANCEL: Final = _metric(
    "durable.cancel.latency",
    "histogram",
    "s",
    "From a cancel command to when the node that runs the step has learned of it.",
)
GRANTED: Final = _metric(
    "durable.limit.granted", "counter", "{step}", "Steps that began under a limit.", LIMIT
)
DENIED: Final = _metric(
    "durable.limit.denied", "counter", "{instance}", "Rows that had to wait for a limit.", QUEUE
)
DELAY: Final = _metric(
    "durable.limit.delay", "histogram", "s", "From when a step under a limit was due to its start.", LIMIT
)
TOLD: Final = _metric(
    "durable.limit.blocked", "counter", "{time}", "How often a step raised RateLimited.", LIMIT
)
FAIR_KEYS: Final = _metric(
    "durable.fair.keys",
    "gauge",
    "{key}",
    "Fair keys that have work, as far as the node has seen.",
    QUEUE,
    combined="max",
)
FIRED: Final = _metric("durable.schedule.fired", "counter", "{slot}", "Instances started by schedules.")
SKIPPED: Final = _metric(
    "durable.schedule.skipped", "counter", "{slot}", "Slots of schedules that did not fire.", REASON
)
LAG: Final = _metric("durable.schedule.lag", "histogram", "s", "From a slot to the start of its instance.")
DELETED: Final = _metric(
    "durable.janitor.deleted", "counter", "{instance}", "Ended instances that retention deleted.", STATUS
)
JANITOR_LAG: Final = _metric(
    "durable.janitor.lag",
    "gauge",
    "s",
    "Since when all that retention deletes was deleted; it should not exceed the interval.",
    combined="max",
)
MAILBOX: Final = _metric(
    "durable.actor.mailbox.size",
    "gauge",
    "{message}",
    "Messages that wait in the mailbox of an actor of the engine.",
    ACTOR,
    combined="max",
)
RESTARTS: Final = _metric(
    "durable.actor.restarts",
    "counter",
    "{restart}",
    "Actors of the engine that ended and were started again.",
    ACTOR,
)
CONNECTIONS: Final = _metric(
    "db.client.connection.count", "gauge", "{connection}", "Open connections to Postgres.", POOL, STATE
)
CONNECTION_LIMIT: Final = _metric(
    "db.client.connection.max", "gauge", "{connection}", "How many connections there may be.", POOL
)
PENDING: Final = _metric(
    "db.client.connection.pending_requests", "gauge", "{request}", "Tasks that wait for a connection.", POOL
)
POOL_TIMEOUTS: Final = _metric(
    "db.client.connection.timeouts", "counter", "{timeout}", "Tasks that waited for one in vain.", POOL
)
NOTIFIER: Final = _metric(
    "durable.notifier.failures", "counter", "{call}", "Calls of the notifier that failed."
)
DROPPED: Final = _metric("durable.notifier.dropped", "counter", "{wakeup}", "Wake-ups that nobody was told.")
BLOCKED: Final = _metric(
    "durable.loop.blocked", "counter", "{time}", "How often code blocked the event loop."
)
WORST: Final = _metric(
    "durable.loop.step.max",
    "gauge",
    "s",
    "The longest time that code blocked the event loop.",
    combined="max",
)
OUTAGES: Final = _metric("durable.store.outages", "counter", "{outage}", "Outages of Postgres.")
STORE_UP: Final = _metric(
    "durable.store.up", "gauge", "1", "Whether Postgres is available: 1 or 0.", combined="min"
)
DRAINING: Final = _metric(
    "durable.node.draining", "gauge", "1", "Whether the engine drains: 1 or 0.", combined="max"
)

Labels = Mapping[str, str]


class Sink(Protocol):
    """A library that counts."""

    def add(self, metric: Metric, value: float, labels: Labels) -> None:
        """Add to a counter."""

    def record(self, metric: Metric, value: float, labels: Labels) -> None:
        """Add a value to a histogram."""

    def set(self, metric: Metric, value: float, labels: Labels) -> None:
        """Set a gauge."""


class Measures:
    """An observer: translates events into changes of metrics."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._seen: dict[str, set[str]] = {}
        self._queues: dict[str, int] = {}
        self._mailboxes: set[str] = set()
        self._lanes: set[str] = set()
        self._worst = 0.0

    def __call__(self, event: telemetry.Event) -> None:
        """Count one event."""
        count = _COUNTS.get(type(event))
        if count is not None:
            count(self, event)

    def _labels(self, metric: Metric, *values: str | None) -> dict[str, str]:
        """The labels of a metric, without those that have no value."""
        return {
            name: self._bounded(name, value)
            for name, value in zip(metric.labels, values, strict=True)
            if value is not None
        }

    def _bounded(self, name: str, value: str) -> str:
        seen = self._seen.setdefault(name, set())
        if value not in seen:
            if len(seen) >= MAX_VALUES:
                return OTHER
            seen.add(value)
        return value

    def _add(self, metric: Metric, *values: str | None, count: float = 1) -> None:
        if count:
            self._sink.add(metric, count, self._labels(metric, *values))

    def _record(self, metric: Metric, seconds: float, *values: str | None) -> None:
        self._sink.record(metric, seconds, self._labels(metric, *values))

    def _set(self, metric: Metric, value: float, *values: str | None) -> None:
        self._sink.set(metric, value, self._labels(metric, *values))

    # -- one method per event

    def _inserted(self, event: telemetry.InstancesInserted) -> None:
        self._add(SENT, event.queue, count=event.count)
        if event.seconds is not None:
            self._record(OPERATIONS, event.seconds, "send")

    def _signalled(self, event: telemetry.SignalsSent) -> None:
        self._record(OPERATIONS, event.seconds, "signal")

    def _polled(self, event: telemetry.QueuePolled) -> None:
        for metric, value in (
            (RUNNING, event.running),
            (BUFFERED, event.buffered),
            (CONCURRENCY, event.concurrency),
            (PREFETCH, event.prefetch),
        ):
            self._set(metric, value, event.queue)
        if event.fair_keys is not None:
            self._set(FAIR_KEYS, event.fair_keys, event.queue)
        self._queues[event.queue] = event.concurrency

    def _picked(self, event: telemetry.Picked) -> None:
        self._record(OPERATIONS, event.seconds, "receive")
        self._add(CONSUMED, event.queue, count=event.claimed)
        self._add(SHELVED, event.queue, count=event.shelved)
        self._add(DENIED, event.queue, count=event.throttled)

    def _full(self, event: telemetry.QueueSaturated) -> None:
        self._add(SATURATED, event.queue)

    def _started(self, event: telemetry.StepStarted) -> None:
        if event.waited is not None:
            self._record(QUEUE_TIME, event.waited, event.queue)
        for name in event.limits:
            self._add(GRANTED, name)
            if event.waited is not None:
                self._record(DELAY, event.waited, name)

    def _told_to_wait(self, event: telemetry.LimitBlocked) -> None:
        for name in event.limits:
            self._add(TOLD, name)

    def _stopped(self, event: telemetry.StepStopped) -> None:
        error = None if event.error is None else error_name(event.error)
        self._record(PROCESS, event.seconds, event.queue, event.machine, event.step, error)
        self._add(STEPS, event.machine, event.step, outcome_name(event.outcome))
        if event.outcome == "Retry":
            self._add(RETRIES, event.machine, event.step)

    def _interrupted(self, event: telemetry.StepInterrupted) -> None:
        error = error_name(event.error)
        self._record(PROCESS, event.seconds, event.queue, event.machine, event.step, error)
        self._add(STEPS, event.machine, event.step, interruption_name(event.error))

    def _committed(self, event: telemetry.StepCommitted) -> None:
        if event.status in {"done", "failed", "cancelled"}:
            self._add(ENDED, event.machine, event.status)

    def _group(self, event: telemetry.GroupCommitted) -> None:
        self._record(OPERATIONS, event.seconds, "settle")

    def _reaped(self, event: telemetry.ClaimsReaped) -> None:
        self._add(REAPED, count=event.count)

    def _timed_out(self, event: telemetry.AwaitTimedOut) -> None:
        self._add(TIMED_OUT, count=event.count)

    def _requested(self, event: telemetry.RequestReceived) -> None:
        self._add(REQUESTS, event.kind)
        if event.kind == "cancel" and event.at is not None:
            self._record(CANCEL, max(time.time() - event.at.timestamp(), 0.0))

    def _fired(self, event: telemetry.ScheduleFired) -> None:
        self._add(FIRED)
        self._record(LAG, event.lag)

    def _skipped(self, event: telemetry.ScheduleSkipped) -> None:
        self._add(SKIPPED, event.reason, count=event.slots or 1000)

    def _deleted(self, event: telemetry.InstancesDeleted) -> None:
        for status in ("done", "cancelled", "failed"):
            self._add(DELETED, status, count=getattr(event, status))

    def _notifier_failed(self, _: telemetry.NotifierFailed) -> None:
        self._add(NOTIFIER)

    def _dropped(self, event: telemetry.WakeupsDropped) -> None:
        self._add(DROPPED, count=event.dropped)

    def _blocked(self, event: telemetry.LoopBlocked) -> None:
        self._add(BLOCKED)
        self._worst = max(self._worst, event.seconds)
        self._set(WORST, self._worst)

    def _restarted(self, event: telemetry.ActorRestarted) -> None:
        self._add(RESTARTS, event.actor)

    def _measured(self, event: telemetry.EngineMeasured) -> None:
        for actor, size in event.mailboxes.items():
            self._set(MAILBOX, size, actor)
        for each in event.lanes:
            self._set(CONNECTIONS, each.in_use, each.lane, "used")
            self._set(CONNECTIONS, each.idle, each.lane, "idle")
            self._set(CONNECTION_LIMIT, each.size, each.lane)
            self._set(PENDING, each.waiting, each.lane)
            self._add(POOL_TIMEOUTS, each.lane, count=each.timeouts)
        if event.janitor_lag is not None:
            self._set(JANITOR_LAG, event.janitor_lag)
        self._mailboxes.update(event.mailboxes)
        self._lanes.update(each.lane for each in event.lanes)

    def _down(self, _: telemetry.StoreDown) -> None:
        self._add(OUTAGES)
        self._set(STORE_UP, 0)

    def _up(self, _: telemetry.StoreUp) -> None:
        self._set(STORE_UP, 1)

    def _node_started(self, _: telemetry.NodeStarted) -> None:
        self._set(STORE_UP, 1)
        self._set(DRAINING, 0)

    def _drains(self, _: telemetry.DrainStarted) -> None:
        self._set(DRAINING, 1)

    def _node_stopped(self, _: telemetry.NodeStopped) -> None:
        for queue in self._queues:
            for metric in (RUNNING, BUFFERED, CONCURRENCY, PREFETCH):
                self._set(metric, 0, queue)
        for actor in self._mailboxes:
            self._set(MAILBOX, 0, actor)
        for lane in self._lanes:
            self._set(PENDING, 0, lane)
            for state in ("used", "idle"):
                self._set(CONNECTIONS, 0, lane, state)
        self._set(DRAINING, 0)


def _of_step(metric: Metric) -> Callable[[Measures, Any], None]:
    """Count an event of which only the step matters."""

    def count(measures: Measures, event: Any) -> None:
        measures._add(metric, event.machine, event.step)  # noqa: SLF001 - same module

    return count


def _contended(measures: Measures, event: telemetry.PartitionContended) -> None:
    measures._add(CONTENDED, event.queue)  # noqa: SLF001 - same module


_COUNTS: Final[Mapping[type[Any], Callable[[Measures, Any], None]]] = {
    telemetry.InstancesInserted: Measures._inserted,  # noqa: SLF001 - same module, and so on
    telemetry.SignalsSent: Measures._signalled,  # noqa: SLF001
    telemetry.QueuePolled: Measures._polled,  # noqa: SLF001
    telemetry.Picked: Measures._picked,  # noqa: SLF001
    telemetry.QueueSaturated: Measures._full,  # noqa: SLF001
    telemetry.StepStarted: Measures._started,  # noqa: SLF001
    telemetry.StepStopped: Measures._stopped,  # noqa: SLF001
    telemetry.StepInterrupted: Measures._interrupted,  # noqa: SLF001
    telemetry.StepCommitted: Measures._committed,  # noqa: SLF001
    telemetry.GroupCommitted: Measures._group,  # noqa: SLF001
    telemetry.LimitBlocked: Measures._told_to_wait,  # noqa: SLF001
    telemetry.StepCrashed: _of_step(CRASHED),
    telemetry.OutcomeStale: _of_step(STALE),
    telemetry.OutcomeLate: _of_step(LATE),
    telemetry.ClaimLost: _of_step(LOST),
    telemetry.PartitionContended: _contended,
    telemetry.RequestReceived: Measures._requested,  # noqa: SLF001
    telemetry.ClaimsReaped: Measures._reaped,  # noqa: SLF001
    telemetry.AwaitTimedOut: Measures._timed_out,  # noqa: SLF001
    telemetry.ScheduleFired: Measures._fired,  # noqa: SLF001
    telemetry.ScheduleSkipped: Measures._skipped,  # noqa: SLF001
    telemetry.InstancesDeleted: Measures._deleted,  # noqa: SLF001
    telemetry.NotifierFailed: Measures._notifier_failed,  # noqa: SLF001
    telemetry.WakeupsDropped: Measures._dropped,  # noqa: SLF001
    telemetry.LoopBlocked: Measures._blocked,  # noqa: SLF001
    telemetry.ActorRestarted: Measures._restarted,  # noqa: SLF001
    telemetry.EngineMeasured: Measures._measured,  # noqa: SLF001
    telemetry.StoreDown: Measures._down,  # noqa: SLF001
    telemetry.StoreUp: Measures._up,  # noqa: SLF001
    telemetry.NodeStarted: Measures._node_started,  # noqa: SLF001
    telemetry.DrainStarted: Measures._drains,  # noqa: SLF001
    telemetry.NodeStopped: Measures._node_stopped,  # noqa: SLF001
}


def outcome_name(outcome: str) -> str:
    """The outcome of a step as a label: next, await, retry, done, stop and so on."""
    return {"ScheduleChildren": "children"}.get(outcome, outcome.lower())


def interruption_name(error: BaseException) -> str:
    """How a step ended that has no outcome: "cancelled", or "crashed"."""
    return "cancelled" if type(error).__name__ == "Cancelled" else "crashed"


def error_name(error: BaseException) -> str:
    """The class of an error, with its module unless it is built in. Of a group with one error: that of the error."""
    inner: tuple[BaseException, ...] = getattr(error, "exceptions", ())
    if len(inner) == 1:
        return error_name(inner[0])
    kind = type(error)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
