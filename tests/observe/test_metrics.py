"""Metrics of both bridges, with the real libraries; their names, their labels, and the Grafana dashboard."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import durable_actors as da
import pytest
from durable_actors import telemetry
from durable_actors._metrics import MAX_VALUES, METRICS, OTHER, SECONDS, Measures, error_name
from durable_actors.prometheus import Bridge
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from tests.engine.kit import Gate, gated, running
from tests.kit import until
from tests.observe.kit import Sdk

ROOT = Path(__file__).parent.parent.parent
STEP: dict[str, Any] = {
    "id": 7, "machine": "m", "version": 1, "step": "s", "attempt": 0, "visit": 1, "queue": "q",
}  # fmt: skip
NOW = datetime(2026, 1, 1, tzinfo=UTC)
EVENTS: list[telemetry.Event] = [
    telemetry.NodeStarted(node="n", queues=("q",)),
    telemetry.InstancesInserted(machine="m", queue="q", count=3, seconds=0.01),
    telemetry.SignalsSent(count=1, seconds=0.01),
    telemetry.QueuePolled(queue="q", running=2, buffered=1, concurrency=10, prefetch=5, fair_keys=3),
    telemetry.Picked(queue="q", wanted=9, claimed=3, held=0, shelved=1, left=0, seconds=0.002, throttled=4),
    telemetry.QueueSaturated(queue="q", running=10, buffered=5),
    telemetry.StepStarted(**STEP, waited=0.3, limits=("api", "gpu")),
    telemetry.LimitBlocked(**STEP, limits=("api",), retry_after=30.0),
    telemetry.StepStopped(**STEP, outcome="Retry", seconds=0.2, error=ValueError("no")),
    telemetry.StepInterrupted(**STEP, seconds=0.2, error=SystemExit(1)),
    telemetry.StepCrashed(**STEP, error=SystemExit(1)),
    telemetry.StepCommitted(**STEP, status="done"),
    telemetry.GroupCommitted(count=4, seconds=0.004),
    telemetry.OutcomeStale(**STEP),
    telemetry.OutcomeLate(**STEP),
    telemetry.ClaimLost(**STEP, reason="gone"),
    telemetry.PartitionContended(**STEP, key="k"),
    telemetry.RequestReceived(**STEP, kind="cancel", by=None, reason=None, at=NOW),
    telemetry.ClaimsReaped(count=2, failed=0, dead_nodes=()),
    telemetry.AwaitTimedOut(count=2),
    telemetry.InstancesDeleted(done=1, cancelled=0, failed=2, records=0),
    telemetry.JournalsTruncated(snapshots=1, records=1),
    telemetry.ScheduleFired(schedule="s", slot=NOW, instance_id=1, kind="slot", lag=0.1),
    telemetry.ScheduleSkipped(schedule="s", slot=NOW, last_slot=NOW, slots=None, reason="overlap"),
    telemetry.NotifierFailed(id=1, queue="q", error=ValueError(), count=1),
    telemetry.WakeupsDropped(dropped=4, count=4),
    telemetry.LoopBlocked(id=None, machine=None, step=None, task="t", where="x", seconds=0.7),
    telemetry.StoreDown(actor="a", error=OSError()),
    telemetry.StoreUp(actor="a", seconds=1.0),
    telemetry.ActorRestarted(actor="feeder", path="engine a/work/feeder q", delay=0.1),
    telemetry.EngineMeasured(
        mailboxes={"feeder": 1},
        lanes=(telemetry.LaneMeasured(lane="client", size=4, in_use=3, idle=1, waiting=2, timeouts=5),),
        janitor_lag=70.0,
    ),
    telemetry.DrainStarted(node="n", running=0, buffered=0),
]


def prometheus_of(events: list[telemetry.Event]) -> dict[str, float]:
    """Sample with its labels → value, as a scrape reads it."""
    registry = CollectorRegistry()
    bridge = Bridge(registry)
    for event in events:
        bridge(event)
    return samples(registry)


def samples(registry: CollectorRegistry) -> dict[str, float]:
    text = generate_latest(registry).decode()
    return {
        sample.name
        + "".join(f" {name}={value}" for name, value in sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if "_bucket" not in sample.name and not sample.name.endswith("_created")
    }


def test_every_event_and_every_metric_is_tried():
    assert {type(event) for event in EVENTS} | {telemetry.NodeStopped} == set(telemetry.Event.__args__)
    touched: set[str] = set()

    class Sink:
        def touch(self, metric, value, labels):
            assert value >= 0
            assert set(labels) <= set(metric.labels)
            touched.add(metric.name)

        add = record = set = touch

    measures = Measures(Sink())
    for event in EVENTS:
        measures(event)
    assert touched == {metric.name for metric in METRICS}


def test_prometheus_counts():
    found = prometheus_of(EVENTS)
    step = " durable_machine=m durable_step=s"
    assert found["messaging_client_sent_messages_total messaging_destination_name=q"] == 3
    assert found["messaging_client_consumed_messages_total messaging_destination_name=q"] == 3
    assert found["messaging_client_operation_duration_seconds_count messaging_operation_name=settle"] == 1
    assert found["durable_step_queue_time_seconds_sum messaging_destination_name=q"] == 0.3
    assert (
        found[
            "messaging_process_duration_seconds_count durable_machine=m durable_step=s error_type=ValueError"
            " messaging_destination_name=q"
        ]
        == 1
    )
    assert found[f"durable_steps_total durable_machine=m durable_outcome=retry durable_step=s"] == 1  # noqa: F541
    assert found[f"durable_retries_total{step}"] == 1
    assert found["durable_instances_ended_total durable_machine=m durable_status=done"] == 1
    assert found["durable_queue_slots_used messaging_destination_name=q"] == 2
    assert found["durable_queue_slots_limit messaging_destination_name=q"] == 10
    assert found["durable_queue_buffered messaging_destination_name=q"] == 1
    assert found["durable_queue_prefetch messaging_destination_name=q"] == 5
    assert found["durable_janitor_deleted_total durable_status=failed"] == 2
    assert found["durable_limit_granted_total durable_limit_name=api"] == 1
    assert found["durable_limit_denied_total messaging_destination_name=q"] == 4
    assert found["durable_limit_delay_seconds_sum durable_limit_name=gpu"] == 0.3
    assert found["durable_limit_blocked_total durable_limit_name=api"] == 1
    assert found["durable_fair_keys messaging_destination_name=q"] == 3
    assert found["durable_cancel_latency_seconds_count"] == 1
    assert found["durable_schedule_skipped_total durable_reason=overlap"] == 1000  # "more than"
    lane = "db_client_connection_pool_name=client"
    assert found[f"db_client_connection_count {lane} db_client_connection_state=used"] == 3
    assert found[f"db_client_connection_max {lane}"] == 4
    assert found[f"db_client_connection_pending_requests {lane}"] == 2
    assert found[f"db_client_connection_timeouts_total {lane}"] == 5
    assert found["durable_actor_mailbox_size durable_actor=feeder"] == 1
    assert found["durable_actor_restarts_total durable_actor=feeder"] == 1
    assert found["durable_janitor_lag_seconds"] == 70
    assert (found["durable_store_up"], found["durable_node_draining"]) == (1, 1)
    stopped = prometheus_of([*EVENTS, telemetry.NodeStopped(node="n")])
    assert stopped["durable_queue_slots_used messaging_destination_name=q"] == 0
    assert stopped[f"db_client_connection_count {lane} db_client_connection_state=used"] == 0


def test_labels_are_bounded():
    many = [
        telemetry.StepStopped(
            **{**STEP, "queue": f"q{n}", "step": f"s{n}"}, outcome="Done", seconds=0.1, error=None
        )
        for n in range(MAX_VALUES + 50)
    ]
    found = [name for name in prometheus_of(many) if name.startswith("durable_steps_total")]
    assert len(found) == MAX_VALUES + 1
    assert sum(OTHER in name for name in found) == 1
    forbidden = {"id", "key", "node", "unique_key", "partition_key", "messaging.message.id", "durable.key"}
    assert not {label for metric in METRICS for label in metric.labels} & forbidden


def test_the_class_of_an_error():
    assert error_name(ValueError()) == "ValueError"
    assert error_name(da.StepTimeout("x")) == "durable_actors.errors.StepTimeout"
    assert error_name(ExceptionGroup("", [KeyError("k")])) == "KeyError"
    assert error_name(ExceptionGroup("", [KeyError("k"), OSError()])) == "ExceptionGroup"


@pytest.mark.usefixtures("registry")
async def test_an_engine_counts_in_both(durable_dsn, otel_sdk: Sdk):
    """What an engine really emits: insert, pick, step, commit, and the saturation of its queue."""
    registry, gate = CollectorRegistry(), Gate()
    slots = "durable_queue_slots_used messaging_destination_name=default"
    held = gated(gate, "held")
    observers = [Bridge(registry), otel_sdk.bridge()]
    async with running(durable_dsn, observers=observers, queues={"default": da.Queue(2, prefetch=1)}) as run:
        numbers = await da.insert_many(held, [{}] * 3)
        await gate.wait_entered(2)
        full = "durable_queue_saturated_total messaging_destination_name=default"
        await until(lambda: samples(registry).get(full) == 1)
        assert samples(registry)[slots] == 2
        assert samples(registry)["durable_queue_buffered messaging_destination_name=default"] == 1
        gate.open()
        for number in numbers:
            await run.engine.client.result(number, timeout=20)
        await until(lambda: samples(registry)[slots] == 0)
    found, points = samples(registry), otel_sdk.points()
    assert found["messaging_client_sent_messages_total messaging_destination_name=default"] == 3
    assert found["durable_step_queue_time_seconds_count messaging_destination_name=default"] == 3
    assert found["durable_instances_ended_total durable_machine=held durable_status=done"] == 3
    queue, machine = ("messaging.destination.name", "default"), ("durable.machine", "held")
    assert points["messaging.client.sent.messages", frozenset({queue})].value == 3
    step = frozenset({queue, machine, ("durable.step", "start")})
    process = points["messaging.process.duration", step]
    assert (process.count, tuple(process.explicit_bounds)) == (3, SECONDS)
    assert points["durable.queue.slots.used", frozenset({queue})].value == 0


def test_the_dashboard_for_grafana_uses_these_names():
    board = json.loads((ROOT / "docs" / "grafana.json").read_text("utf-8"))
    suffixes = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
    known = {metric.prometheus + suffix for metric in METRICS for suffix in suffixes[metric.kind]}
    labels = {label.replace(".", "_") for metric in METRICS for label in metric.labels} | {
        "le",
        "instance",
        "job",
    }
    panels = [panel for panel in board["panels"] if panel["type"] != "row"]
    used: set[str] = set()
    for panel in panels:
        for target in panel["targets"]:
            names = set(re.findall(r"\b(?:durable|messaging|db_client)_\w+", target["expr"]))
            here = {name for name in names if name not in labels}
            assert here, panel["title"]
            assert here <= known, panel["title"]
            by = re.findall(r"\bby \(([^)]*)\)", target["expr"])
            assert {name.strip() for group in by for name in group.split(",")} <= labels, panel["title"]
            used |= here
    assert len(panels) >= 10
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    assert {"durable_step_queue_time_seconds_bucket", "durable_queue_slots_used"} <= used


def test_the_reference_has_every_metric():
    text = (ROOT / "docs" / "reference" / "telemetry.md").read_text("utf-8")
    for metric in METRICS:
        labels = ", ".join(f"`{label}`" for label in metric.labels) or "–"
        assert f"| `{metric.name}` | {metric.kind} | {labels} | {metric.meaning} |" in text, metric.name


@pytest.mark.usefixtures("registry")
async def test_without_observers_no_event_is_made(durable_dsn, monkeypatch):
    """Insert, signal, children, errors, a crash, a drain: each place tests `active` first."""
    made: list[str] = []

    def refuse(self, *args, **fields):
        made.append(type(self).__name__)
        raise AssertionError(f"{type(self).__name__} was made")

    for kind in telemetry.Event.__args__:
        monkeypatch.setattr(kind, "__init__", refuse)

    @da.job(name="leaf")
    async def leaf(args: dict) -> None: ...

    class Busy(da.Machine, name="busy"):
        @da.step
        async def start(self, ctx):
            await ctx.insert(leaf, args={})
            return da.Await("go", then=self.spawn)

        @da.step
        async def spawn(self, ctx):
            if not ctx.attempt:
                raise ValueError("once")
            return da.ScheduleChildren(self.end, [da.Child(leaf, args={})] * 2)

        @da.step
        async def end(self, ctx):
            return da.Done()

        async def handle(self, error, ctx):
            return da.Retry()

    async with running(durable_dsn, observers=[]):
        number = await da.insert(Busy)
        await da.signal(number, "go")
        await da.result(number, timeout=20)
    assert made == []


@pytest.mark.usefixtures("registry")
async def test_limits_and_fair_keys_are_counted_by_name(durable_dsn):
    """The second instance waits for a token; a step that says so blocks its limit. Keys are not labels."""
    registry = CollectorRegistry()

    @da.job(name="call", rate_limit="api")
    async def call(args: dict) -> None: ...

    @da.job(name="told", rate_limit="other")
    async def told(args: dict) -> None:
        raise da.RateLimited(retry_after=300)

    limits = {"api": da.Limit(1, per=600), "other": da.Limit(100)}
    queues = {"default": da.Queue(4, fair=True)}
    async with running(durable_dsn, observers=[Bridge(registry)], limits=limits, queues=queues):
        await da.insert_many(call, [{"args": {}, "fair_key": f"tenant {n}"} for n in range(2)])
        await da.insert(told, args={}, rate_limit=("other", "acme"), fair_key="tenant 9")

        def counted(name: str) -> float | None:
            return samples(registry).get(name)

        await until(lambda: counted("durable_limit_granted_total durable_limit_name=api") == 1)
        await until(lambda: counted("durable_limit_denied_total messaging_destination_name=default"))
        await until(lambda: counted("durable_limit_blocked_total durable_limit_name=other") == 1)
        assert counted("durable_limit_delay_seconds_count durable_limit_name=api") == 1
        await until(lambda: counted("durable_fair_keys messaging_destination_name=default") is not None)
    assert "acme" not in generate_latest(registry).decode()
