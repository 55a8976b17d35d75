"""`/healthz`, `/readyz` and `/metrics`: for programs. The first two need no authentication and tell nothing else."""

from __future__ import annotations

import time
from collections.abc import Iterator

from durable_actors._store.samples import Sample
from durable_actors.dashboard.desk import Desk
from durable_actors.dashboard.web import Handler, Request, Response

_GAUGES = {
    "due": "Instances that could run now",
    "scheduled": "Instances that are due later",
    "held": "Instances that wait for their partition key",
    "shelved": "Instances whose step the nodes that read them do not have",
    "executing": "Instances whose step runs",
    "asks": "Instances that wait for a person",
    "throttled": "Instances that wait for a limit",
    "slots": "Steps that live nodes run at the same time",
    "nodes": "Live nodes that serve the queue",
}


_STATES = ("due", "scheduled", "held", "shelved", "throttled", "paused", "executing", "asks")


def health_routes(desk: Desk) -> dict[str, Handler]:
    """The paths and who answers them."""

    async def healthz(_request: Request) -> Response:
        return _text("ok\n")

    async def readyz(_request: Request) -> Response:
        sample = desk.sampler.latest
        fresh = sample is not None and desk.sampler.trouble is None
        return _text("ok\n" if fresh else "no fresh sample of the database\n", 200 if fresh else 503)

    async def metrics(_request: Request) -> Response:
        text = "\n".join(metrics_of(desk.sampler.latest, time.time())) + "\n"
        return Response(text, content_type="text/plain; version=0.0.4; charset=utf-8")

    return {"/healthz": healthz, "/readyz": readyz, "/metrics": metrics}


def _text(text: str, status: int = 200) -> Response:
    return Response(text, status=status, content_type="text/plain; charset=utf-8")


def metrics_of(sample: Sample | None, now: float) -> Iterator[str]:
    """The newest sample as text for Prometheus. Pure."""
    yield from _head("durable_dashboard_up", "Whether there is a sample")
    yield f"durable_dashboard_up {0 if sample is None else 1}"
    if sample is None:
        return
    yield from _head("durable_sample_age_seconds", "Age of the newest sample; counts end at 10001")
    yield f"durable_sample_age_seconds {max(now - sample.at.timestamp(), 0):.3f}"
    for kind, meaning in _GAUGES.items():
        yield from _head(f"durable_queue_{kind}", meaning)
        for each in sample.queues:
            yield f'durable_queue_{kind}{{queue="{_label(each.queue)}"}} {getattr(each, kind)}'
    yield from _head(
        "durable_instances",
        "Instances by queue and state, counted up to 10001; held, executing and asks in all queues together",
    )
    for kind in _STATES:
        for each in sample.queues:
            labels = f'queue="{_label(each.queue)}",state="{kind}"'
            yield f"durable_instances{{{labels}}} {getattr(each, kind)}"
    yield from _head("durable_queue_paused", "Whether the queue is paused, or a machine in it: 1 or 0")
    for each in sample.queues:
        yield f'durable_queue_paused{{queue="{_label(each.queue)}"}} {int(bool(each.pauses))}'
    yield from _head("durable_limit_waiting", "Instances that wait for a limit, of each queue up to 10001")
    for name, count in sample.limits.items():
        yield f'durable_limit_waiting{{limit="{_label(name)}"}} {count}'
    yield from _head("durable_queue_oldest_ready_age_seconds", "How long the oldest due instance has waited")
    for each in sample.queues:
        yield (
            f'durable_queue_oldest_ready_age_seconds{{queue="{_label(each.queue)}"}} {each.oldest_due or 0:.3f}'
        )
    yield from _head("durable_instances_failed", "Failed instances, counted up to 10001")
    yield f"durable_instances_failed {sample.failed}"
    for name in ("inserts", "updates", "signals"):
        yield f"# TYPE durable_rows_{name}_total counter"
        yield f"durable_rows_{name}_total {getattr(sample, name)}"


def _head(name: str, meaning: str) -> Iterator[str]:
    yield f"# HELP {name} {meaning}"
    yield f"# TYPE {name} gauge"


def _label(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
