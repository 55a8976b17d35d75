"""Traces and metrics for OpenTelemetry: `pip install 'durable-actors[otel]'`.

::

    from durable_actors import otel

    da.Config(observers=[otel.instrument()])     # a process that runs steps
    otel.instrument()                            # one that only inserts: a web process

It uses the providers that your program has set up, or those that you pass. An insert is a span `send QUEUE`; its trace
context is stored with the row. A step is a span `process QUEUE`, in which the spans of your code nest. It is a child of
the insert while that is younger than `max_age`, and begins a new trace with a link to the insert afterwards: a trace of
weeks helps nobody. Steps that follow one another on the same node within `max_age` share such a trace; the first has a
link to the trace before, if that was on this node, too. `serve --observer durable_actors.otel:observe` uses the
global providers, for instance those of `opentelemetry-instrument`.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from contextvars import ContextVar, Token
from typing import Any, Final, Literal

import attrs
from opentelemetry import context as contexts, metrics, propagate, trace as traces
from opentelemetry.context import Context
from opentelemetry.trace import Link, NonRecordingSpan, Span, SpanContext, SpanKind, Status, StatusCode

from durable_actors import _tracing
from durable_actors._metrics import (
    ERROR,
    MACHINE,
    METRICS,
    OPERATION,
    OUTCOME,
    QUEUE,
    SECONDS,
    STEP,
    SYSTEM,
    Labels,
    Measures,
    Metric,
    error_name,
    interruption_name,
    outcome_name,
)
from durable_actors._option_checks import Duration, choice, duration
from durable_actors._tracing import Sending, TraceContext
from durable_actors._version import __version__
from durable_actors.telemetry import (
    Event,
    NodeStarted,
    StepCommitted,
    StepInterrupted,
    StepStarted,
    StepStopped,
)

__all__ = ["Bridge", "TraceMode", "instrument", "observe"]

TraceMode = Literal["auto", "child", "link", "none"]
"""How a step relates to the trace of its insert. "auto": a child while that is young, then a new trace with a link."""
MODES: Final[tuple[TraceMode, ...]] = ("auto", "child", "link", "none")
TYPE: Final = "messaging.operation.type"
NAME: Final = "durable_actors"
MAX_BURSTS: Final = 10_000
"""Instances whose last trace on this node is known. Of others, a step only has the link to the insert."""

_sending: ContextVar[Span | None] = ContextVar("durable_actors_sending", default=None)
_running: ContextVar[_Begun | None] = ContextVar("durable_actors_span", default=None)


@attrs.define
class _Begun:
    """The span of a step that runs, and what restores the context variables afterwards, as the engine expects."""

    span: Span
    instance: int
    attached: Token[Context]
    mine: Token[_Begun | None] | None = None


@attrs.define
class _Burst:
    """Steps of an instance that follow one another on this node, in a trace of their own."""

    root: SpanContext
    ended: float = attrs.Factory(time.time)
    """When its last step ended."""


class Bridge:
    """An observer that makes spans and metrics; `instrument` returns one."""

    def __init__(
        self,
        *,
        tracer_provider: traces.TracerProvider | None = None,
        meter_provider: metrics.MeterProvider | None = None,
        trace: TraceMode = "auto",
        max_age: Duration = 300,
    ) -> None:
        choice("trace", trace, *MODES)
        self._mode: TraceMode = trace
        self._max_age = duration("max_age", max_age, positive=False)
        self._tracer = traces.get_tracer(NAME, __version__, tracer_provider)
        meter = metrics.get_meter(NAME, __version__, meter_provider)
        self._instruments = {metric: _instrument(meter, metric) for metric in METRICS}
        self._measures: Final = Measures(self)
        self._node: str | None = None
        self._bursts: OrderedDict[int, _Burst] = OrderedDict()

    def __call__(self, event: Event) -> None:
        """Count one event, and begin or end the span of a step."""
        match event:
            case StepStarted():
                self._begin(event)
            case StepStopped():
                self._end(event.error, outcome_name(event.outcome))
            case StepInterrupted():
                self._end(event.error, interruption_name(event.error))
            case StepCommitted(status="done" | "failed" | "cancelled"):
                self._bursts.pop(event.id, None)
            case NodeStarted():
                self._node = event.node
            case _:
                pass
        self._measures(event)

    # -- spans of steps, in the context of the step

    def _begin(self, event: StepStarted) -> None:
        parent, links = self._origin(event.trace, event.id)
        span = self._tracer.start_span(
            f"process {event.queue}",
            context=parent,
            kind=SpanKind.CONSUMER,
            links=links,
            attributes={
                **_about("process", event.queue),
                "messaging.message.id": str(event.id),
                MACHINE: event.machine,
                "durable.machine.version": event.version,
                STEP: event.step,
                "durable.attempt": event.attempt,
                "durable.visit": event.visit,
                **({} if self._node is None else {"durable.node": self._node}),
            },
        )
        if self._mode != "none" and not traces.get_current_span(parent).get_span_context().is_valid:
            self._bursts[event.id] = _Burst(span.get_span_context())
            if len(self._bursts) > MAX_BURSTS:
                self._bursts.popitem(last=False)
        begun = _Begun(span, event.id, contexts.attach(traces.set_span_in_context(span, parent)))
        begun.mine = _running.set(begun)

    def _origin(self, stored: TraceContext | None, instance: int) -> tuple[Context, list[Link]]:
        """The context in which a step begins, and its links.

        Never that of the node's own tasks: a worker that was started inside a span would put every step into its trace.
        """
        empty = Context()
        if self._mode == "none":
            return empty, []
        links: list[Link] = []
        if stored is not None:
            carrier = {"traceparent": stored.traceparent}
            if stored.tracestate:
                carrier["tracestate"] = stored.tracestate
            found = propagate.extract(carrier, empty)
            insert = traces.get_current_span(found).get_span_context()
            young = stored.created is not None and time.time() - stored.created <= self._max_age
            if insert.is_valid and (self._mode == "child" or (self._mode == "auto" and young)):
                return found, []
            links = [Link(insert)] if insert.is_valid else []  # a user may have written it
        before = self._bursts.get(instance)
        if before is None:
            return empty, links
        if self._mode == "auto" and time.time() - before.ended <= self._max_age:
            return traces.set_span_in_context(NonRecordingSpan(before.root), empty), links
        return empty, [*links, Link(before.root)]

    def _end(self, error: BaseException | None, outcome: str) -> None:
        begun = _running.get()
        if begun is None or begun.mine is None:  # it began before this observer was there
            return
        span = begun.span
        _running.reset(begun.mine)
        span.set_attribute(OUTCOME, outcome)
        if error is not None and outcome != "cancelled":
            span.set_attribute(ERROR, error_name(error))
            span.record_exception(error)
            span.set_status(Status(StatusCode.ERROR, str(error)))
        span.end()
        if (burst := self._bursts.get(begun.instance)) is not None:
            burst.ended = time.time()
        contexts.detach(begun.attached)

    # -- inserts

    @contextmanager
    def sending(self) -> Generator[Sending, None, None]:
        """A span around an insert; `context` tells what is inserted."""
        with self._tracer.start_as_current_span(
            "send", kind=SpanKind.PRODUCER, attributes={SYSTEM: NAME, OPERATION: "send", TYPE: "send"}
        ) as span:
            token = _sending.set(span)
            try:
                yield _Sent(span)
            finally:
                _sending.reset(token)

    def context(self, machine: str, queue: str, count: int) -> TraceContext | None:
        """The trace context to store with new instances."""
        span = _sending.get()
        if span is not None:
            span.update_name(f"send {queue}")
            span.set_attributes({QUEUE: queue, MACHINE: machine, "messaging.batch.message_count": count})
        carrier: dict[str, str] = {}
        propagate.inject(carrier)
        parent = carrier.get("traceparent")
        if parent is None:
            return None
        return TraceContext(parent, carrier.get("tracestate"), int(time.time()))

    def current(self) -> tuple[str, str] | None:
        """Trace id and span id of the current span."""
        found = traces.get_current_span().get_span_context()
        return (f"{found.trace_id:032x}", f"{found.span_id:016x}") if found.is_valid else None

    # -- metrics

    def add(self, metric: Metric, value: float, labels: Labels) -> None:
        """Add to a counter."""
        self._instruments[metric].add(value, dict(labels))

    def record(self, metric: Metric, value: float, labels: Labels) -> None:
        """Add a value to a histogram."""
        self._instruments[metric].record(value, dict(labels))

    def set(self, metric: Metric, value: float, labels: Labels) -> None:
        """Set a gauge."""
        self._instruments[metric].set(value, dict(labels))


class _Sent:
    def __init__(self, span: Span) -> None:
        self._span = span

    def sent(self, ids: Iterable[int | None]) -> None:
        """Tell the id, if it is one."""
        known = [number for number in ids if number is not None]
        if len(known) == 1:
            self._span.set_attribute("messaging.message.id", str(known[0]))


def _about(operation: str, queue: str) -> dict[str, str]:
    return {SYSTEM: NAME, QUEUE: queue, OPERATION: operation, TYPE: operation}


def _instrument(meter: metrics.Meter, metric: Metric) -> Any:
    if metric.kind == "counter":
        return meter.create_counter(metric.name, metric.unit, metric.meaning)
    if metric.kind == "gauge":
        return meter.create_gauge(metric.name, metric.unit, metric.meaning)
    return meter.create_histogram(
        metric.name, metric.unit, metric.meaning, explicit_bucket_boundaries_advisory=SECONDS
    )


def instrument(
    *,
    tracer_provider: traces.TracerProvider | None = None,
    meter_provider: metrics.MeterProvider | None = None,
    trace: TraceMode = "auto",
    max_age: Duration = 300,
) -> Bridge:
    """Trace the inserts of this process, and return an observer for the engines that run in it.

    `trace` and `max_age` (seconds) say how a step relates to the insert of its instance; "none" makes every step a
    trace of its own. They apply where the step runs. A later call replaces the first for inserts.
    """
    bridge = Bridge(
        tracer_provider=tracer_provider, meter_provider=meter_provider, trace=trace, max_age=max_age
    )
    _tracing.install(bridge)
    return bridge


_default: Bridge | None = None


def observe(event: Event) -> None:
    """Trace and count with the global providers. For `observers=` and `serve --observer`."""
    global _default  # noqa: PLW0603 - instruments are made once
    if _default is None:
        _default = instrument()
    _default(event)
