"""Spans over insert, step and child, with the real SDK; the trace context crosses processes in the row."""

from __future__ import annotations

import json
import subprocess
import sys

import durable_actors as da
import psycopg
import pytest
import trio
from durable_actors import _tracing
from durable_actors._engine.running.step_task import StepTasks
from durable_actors._tracing import TRACE, TraceContext
from opentelemetry import trace as traces
from opentelemetry.trace import SpanKind, StatusCode
from tests.engine.kit import Gate, gated, running
from tests.kit import until
from tests.observe.kit import Sdk

pytestmark = pytest.mark.usefixtures("registry")


def ids(span):
    return span.context.trace_id, span.context.span_id


def parent_of(span):
    return None if span.parent is None else (span.parent.trace_id, span.parent.span_id)


async def test_from_insert_to_step_to_child(durable_dsn, otel_sdk: Sdk):
    @da.job(name="leaf", queue="leaves")
    async def leaf(args: int) -> int:
        return args

    class Tree(da.Machine, name="tree", queue="q"):
        @da.step
        async def start(self, ctx):
            await ctx.start_child(leaf, key="k", args=1)
            with otel_sdk.tracers.get_tracer("user").start_as_current_span("by the user"):
                pass
            return da.ScheduleChildren(self.end, [da.Child(leaf, args=2)])

        @da.step
        async def end(self, ctx):
            return da.Done()

    bridge = otel_sdk.bridge()
    with otel_sdk.tracers.get_tracer("web").start_as_current_span("request") as request:
        async with running(durable_dsn, queues={"q": 2, "leaves": 2}, observers=[bridge]) as run:
            row = await run.run(Tree)
            trace = row.meta[TRACE]
            await run.engine.client.result(row.id, timeout=20)
            for number in [each.id for each in await da.list_instances(da.Filter(machine="leaf"))]:
                await run.engine.client.result(number, timeout=20)
    [send] = otel_sdk.spans("send q")
    start, end = sorted(otel_sdk.spans("process q"), key=lambda span: span.start_time)
    [user] = otel_sdk.spans("by the user")
    [sent] = otel_sdk.spans("send leaves")
    leaves = otel_sdk.spans("process leaves")
    assert {span.context.trace_id for span in [send, start, end, user, sent, *leaves]} == {
        request.get_span_context().trace_id
    }
    assert (send.kind, start.kind) == (SpanKind.PRODUCER, SpanKind.CONSUMER)
    assert parent_of(send)[1] == request.get_span_context().span_id
    assert trace.startswith(f"00-{send.context.trace_id:032x}-{send.context.span_id:016x}-0")
    assert [parent_of(start), parent_of(end), parent_of(user)] == [ids(send), ids(send), ids(start)]
    assert parent_of(sent) == ids(start)
    assert {parent_of(leaf) for leaf in leaves} == {ids(sent), ids(start)}  # start_child · ScheduleChildren
    assert dict(start.attributes) == {
        "messaging.system": "durable_actors",
        "messaging.destination.name": "q",
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.message.id": str(row.id),
        "durable.machine": "tree",
        "durable.machine.version": 1,
        "durable.step": "start",
        "durable.attempt": 0,
        "durable.visit": 1,
        "durable.node": run.engine.incarnation,
        "durable.outcome": "children",
    }
    assert send.attributes["messaging.message.id"] == str(row.id)


@pytest.mark.parametrize(
    ("mode", "age", "child", "links"),
    [
        ("auto", 299, True, 0),
        ("auto", 301, False, 1),
        ("auto", None, False, 1),
        ("child", 10**6, True, 0),
        ("link", 0, False, 1),
        ("none", 0, False, 0),
    ],
)
def test_a_child_while_it_is_young_then_a_link(otel_sdk: Sdk, monkeypatch, mode, age, child, links):
    now = 1_800_000_000.0
    monkeypatch.setattr("time.time", lambda: now)
    stored = TraceContext(
        "00-" + "a" * 32 + "-" + "b" * 16 + "-01", "x=y", None if age is None else int(now) - age
    )
    context, found = otel_sdk.bridge(trace=mode)._origin(TraceContext.decode(stored.encode()), 7)
    origin = traces.get_current_span(context).get_span_context()
    assert (origin.is_valid, len(found)) == (child, links)
    for each in [origin] if child else [link.context for link in found]:
        assert (f"{each.trace_id:x}", f"{each.span_id:x}") == ("a" * 32, "b" * 16)
        assert each.trace_state.to_header() == "x=y"


async def test_a_step_is_never_in_the_trace_of_its_worker(durable_dsn, otel_sdk: Sdk, nothing_traced):
    bridge = otel_sdk.bridge()
    with otel_sdk.tracers.get_tracer("worker").start_as_current_span("worker starts"):
        async with running(durable_dsn, observers=[bridge]) as run:
            with psycopg.connect(durable_dsn, autocommit=True) as conn:  # as another program inserts
                [[number]] = conn.execute(
                    "insert into durable.gen_durable (fsm, step) values ('untraced', 'perform') returning id"
                ).fetchall()
            await run.engine.client.result(number, timeout=20)
    [span] = otel_sdk.spans("process")
    assert (span.parent, span.links) == (None, ())


@pytest.fixture
def nothing_traced(registry):
    @da.job(name="untraced")
    async def untraced(args: dict) -> None: ...

    return untraced


async def test_errors_and_cancelled_steps(durable_dsn, otel_sdk: Sdk):
    gate = Gate()

    class Fails(da.Machine, name="fails"):
        @da.step
        async def start(self, ctx):
            raise ValueError("no")

    @da.job(name="crashes", max_attempts=1)
    async def crashes(args: dict) -> None:
        raise SystemExit(3)

    held = gated(gate, "held")
    async with running(durable_dsn, observers=[otel_sdk.bridge()], max_crashes=1) as run:
        assert (await run.run(Fails)).status == "failed"
        assert (await run.run(crashes)).status == "failed"
        number = await da.insert(held)
        await gate.wait_entered()
        await da.cancel(number)
        with pytest.raises(da.InstanceCancelled):
            await da.result(number, timeout=20)
    by_machine = {span.attributes["durable.machine"]: span for span in otel_sdk.spans("process")}
    fails, crashed, cancelled = (by_machine[name] for name in ("fails", "crashes", "held"))
    assert (fails.status.status_code, fails.attributes["error.type"]) == (StatusCode.ERROR, "ValueError")
    assert [event.name for event in fails.events] == ["exception"]
    assert (crashed.attributes["error.type"], crashed.attributes["durable.outcome"]) == (
        "SystemExit",
        "crashed",
    )
    assert cancelled.attributes["durable.outcome"] == "cancelled"
    assert cancelled.status.status_code == StatusCode.UNSET


async def test_context_variables_are_as_before(durable_dsn, otel_sdk: Sdk, monkeypatch):
    """A bridge leaves nothing in the task of a step, or the engine would have to renew its context each time."""
    seen, resets = [], []
    monkeypatch.setattr(StepTasks, "_reset_context", lambda self: resets.append(self))

    @da.job(name="looks")
    async def looks(args: dict) -> None:
        seen.append(traces.get_current_span().get_span_context().span_id)

    async with running(durable_dsn, observers=[otel_sdk.bridge()], queues={"default": 1}):
        numbers = await da.insert_many(looks, [{"args": {}}] * 5)
        for number in numbers:
            await da.result(number, timeout=20)
    assert resets == []
    assert len(set(seen)) == 5
    assert {span.context.span_id for span in otel_sdk.spans("process")} == set(seen)


INSERTS = """
import json, sys
import durable_actors as da, psycopg
from durable_actors import otel
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import set_tracer_provider

@da.job(name="crossing")
def crossing(args: dict) -> None: ...

set_tracer_provider(TracerProvider())
otel.instrument()
from opentelemetry import trace
with psycopg.connect(sys.argv[1]) as conn, trace.get_tracer("web").start_as_current_span("request") as span:
    number = da.sync.insert(conn, crossing, args={})
print(json.dumps([number, f"{span.get_span_context().trace_id:032x}"]))
"""


@pytest.mark.slow
async def test_the_trace_crosses_processes(durable_dsn, otel_sdk: Sdk):
    @da.job(name="crossing")
    async def crossing(args: dict) -> None: ...

    done = await trio.run_process([sys.executable, "-c", INSERTS, durable_dsn], capture_stdout=True)
    number, trace = json.loads(done.stdout)
    async with running(durable_dsn, observers=[otel_sdk.bridge()]) as run:
        await run.engine.client.result(number, timeout=20)
    [span] = otel_sdk.spans("process")
    assert f"{span.context.trace_id:032x}" == trace
    assert span.parent is not None


@pytest.mark.parametrize("text", ["", "nonsense", "00-0-0-00 1", '{"a": 1}', "x" * 5000, "\x1f@5"])
async def test_a_trace_context_that_is_none(durable_dsn, otel_sdk: Sdk, nothing_traced, text):
    async with running(durable_dsn, observers=[otel_sdk.bridge()]) as run:
        number = await da.insert(nothing_traced, args={}, meta={TRACE: text, "mine": 1})
        await run.engine.client.result(number, timeout=20)
        assert (await da.inspect(number)).meta == {TRACE: text, "mine": 1}
    [span] = otel_sdk.spans("process")
    assert (span.parent, span.links) == (None, ())


def test_a_stored_context_reads_back():
    for context in (
        TraceContext("00-a-b-01"),
        TraceContext("00-a-b-01", None, 17),
        TraceContext("00-a-b-01", "k=v, l=w", 17),
    ):
        assert TraceContext.decode(context.encode()) == context
    assert len(TraceContext("p", "x" * 2000, 1).encode()) < 10


async def test_a_re_run_of_a_step_finds_its_child_whatever_the_trace(
    durable_dsn, otel_sdk: Sdk, nothing_traced
):
    class Twice(da.Machine, name="twice"):
        @da.step
        async def start(self, ctx):
            await ctx.start_child(nothing_traced, key="only", args={"n": 1})
            return da.Done() if ctx.attempt else da.Retry()

    async with running(durable_dsn, observers=[otel_sdk.bridge()]) as run:
        assert (await run.run(Twice)).status == "done"
        assert len(await da.list_instances(da.Filter(machine="untraced"))) == 1


async def test_without_a_tracer_nothing_is_stored(durable_dsn, nothing_traced):
    assert _tracing.tracer() is None
    async with running(durable_dsn) as run:
        assert (await run.run(nothing_traced)).meta == {}


def test_the_core_imports_no_telemetry_library():
    script = (
        "import sys, durable_actors, durable_actors.cli\n"
        "assert not {'opentelemetry', 'prometheus_client'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize("ahead", [True, False])
async def test_steps_of_an_old_instance_share_a_trace_with_links(durable_dsn, otel_sdk: Sdk, ahead):
    """After a long wait: the next steps are one new trace; after another wait, another one that links to it."""

    class Long(da.Machine, name="long", run_ahead=ahead):
        @da.step
        async def start(self, ctx):
            return da.Await("go", then=self.second)

        @da.step
        async def second(self, ctx):
            return da.Next(self.third)

        @da.step
        async def third(self, ctx):
            return da.Await("end", then=self.last)

        @da.step
        async def last(self, ctx):
            return da.Done()

    bridge = otel_sdk.bridge()
    async with running(durable_dsn, observers=[bridge]) as run:
        number = await da.insert(
            Long, meta={TRACE: "00-" + "a" * 32 + "-" + "b" * 16 + "-01 1"}
        )  # since 1970
        await da.signal(number, "go")
        await until(lambda: len(otel_sdk.spans("process")) == 3)
        bridge._bursts[number].ended -= 1000
        await da.signal(number, "end")
        await run.engine.client.result(number, timeout=20)
    start, second, third, last = sorted(otel_sdk.spans("process"), key=lambda span: span.start_time)
    assert [parent_of(span) for span in (start, second, third, last)] == [None, ids(start), ids(start), None]
    insert = "a" * 32
    assert [
        [f"{link.context.trace_id:032x}" for link in span.links] for span in (start, second, third, last)
    ] == [
        [insert],
        [insert],
        [insert],
        [insert, f"{start.context.trace_id:032x}"],
    ]
    assert not bridge._bursts  # it has ended


@pytest.mark.parametrize("journal", ["off", "auto", "outcomes", "claims", "full"])
async def test_both_picks_hand_it_on_at_every_level_of_the_journal(
    durable_dsn, otel_sdk: Sdk, nothing_traced, journal
):
    """One is inserted before the engine starts, and picked from the queue; the other is picked by its id."""
    bridge = otel_sdk.bridge()
    async with da.open_client(durable_dsn, name="before") as client:
        await client.insert(nothing_traced, args={}, journal=journal)
    async with running(durable_dsn, observers=[bridge]) as run:
        await until(lambda: otel_sdk.spans("process"))
        await run.engine.client.result(await da.insert(nothing_traced, args={}, journal=journal), timeout=20)
    sent = {ids(span) for span in otel_sdk.spans("send")}
    assert {parent_of(span) for span in otel_sdk.spans("process")} == sent
    assert len(sent) == 2
