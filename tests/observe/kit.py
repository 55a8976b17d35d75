"""The real SDKs with exporters that keep everything in memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import attrs
from durable_actors import _tracing, otel
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter


@attrs.frozen
class Sdk:
    """What was exported."""

    tracers: TracerProvider
    exporter: InMemorySpanExporter
    meters: MeterProvider
    reader: InMemoryMetricReader

    def bridge(self, **options: Any) -> otel.Bridge:
        """A bridge that replaces the process's own until the test ends."""
        return otel.instrument(tracer_provider=self.tracers, meter_provider=self.meters, **options)

    def spans(self, name: str = "") -> list[ReadableSpan]:
        return [span for span in self.exporter.get_finished_spans() if span.name.startswith(name)]

    def points(self) -> dict[tuple[str, frozenset[tuple[str, Any]]], Any]:
        """Metric and attributes → its point."""
        data = self.reader.get_metrics_data()
        return {
            (metric.name, frozenset((point.attributes or {}).items())): point
            for resource in (data.resource_metrics if data else ())
            for scope in resource.scope_metrics
            for metric in scope.metrics
            for point in metric.data.data_points
        }


@contextmanager
def sdk() -> Iterator[Sdk]:
    exporter, reader = InMemorySpanExporter(), InMemoryMetricReader()
    tracers = TracerProvider(shutdown_on_exit=False)
    tracers.add_span_processor(SimpleSpanProcessor(exporter))
    meters = MeterProvider([reader], shutdown_on_exit=False)
    try:
        yield Sdk(tracers, exporter, meters, reader)
    finally:
        _tracing.install(None)
        tracers.shutdown()
        meters.shutdown()
