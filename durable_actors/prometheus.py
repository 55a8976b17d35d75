"""Metrics for Prometheus: `pip install 'durable-actors[prometheus]'`.

::

    from durable_actors import prometheus

    da.Config(observers=[prometheus.observe])        # counts into prometheus_client's default registry
    da.Config(observers=[prometheus.Bridge(registry)])

`durable-actors serve --health 8080` does that by itself and serves `/metrics`. The names are in the reference.
"""

from __future__ import annotations

from typing import Final, Literal

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

from durable_actors._metrics import METRICS, SECONDS, Labels, Measures, Metric
from durable_actors.telemetry import Event

__all__ = ["Bridge", "observe"]

MODES: Final[dict[str, Literal["livesum", "livemin", "livemax"]]] = {
    "sum": "livesum",
    "min": "livemin",
    "max": "livemax",
}
"""How the gauges of several processes are one (`PROMETHEUS_MULTIPROC_DIR`); only those of live ones count."""


class Bridge:
    """An observer that counts into a registry of prometheus_client. At most one per registry."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self._collectors = {metric: _collector(metric, registry) for metric in METRICS}
        self._measures: Final = Measures(self)

    def __call__(self, event: Event) -> None:
        """Count one event."""
        self._measures(event)

    def add(self, metric: Metric, value: float, labels: Labels) -> None:
        """Add to a counter."""
        found = self._collectors[metric]
        assert isinstance(found, Counter)
        (found.labels(*_values(metric, labels)) if metric.labels else found).inc(value)

    def record(self, metric: Metric, value: float, labels: Labels) -> None:
        """Add a value to a histogram."""
        found = self._collectors[metric]
        assert isinstance(found, Histogram)
        (found.labels(*_values(metric, labels)) if metric.labels else found).observe(value)

    def set(self, metric: Metric, value: float, labels: Labels) -> None:
        """Set a gauge."""
        found = self._collectors[metric]
        assert isinstance(found, Gauge)
        (found.labels(*_values(metric, labels)) if metric.labels else found).set(value)


def _collector(metric: Metric, registry: CollectorRegistry) -> Counter | Gauge | Histogram:
    names = [name.replace(".", "_") for name in metric.labels]
    if metric.kind == "counter":
        return Counter(metric.prometheus, metric.meaning, names, registry=registry)
    if metric.kind == "gauge":
        return Gauge(
            metric.prometheus,
            metric.meaning,
            names,
            registry=registry,
            multiprocess_mode=MODES[metric.combined],
        )
    return Histogram(metric.prometheus, metric.meaning, names, registry=registry, buckets=SECONDS)


def _values(metric: Metric, labels: Labels) -> list[str]:
    """In Prometheus a missing label is an empty one."""
    return [labels.get(name, "") for name in metric.labels]


_default: Bridge | None = None


def observe(event: Event) -> None:
    """Count an event into the default registry. For `observers=` and `serve --observer`."""
    global _default  # noqa: PLW0603 - a registry takes each metric once
    if _default is None:
        _default = Bridge()
    _default(event)
