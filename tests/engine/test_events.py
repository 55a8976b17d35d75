"""What an engine tells: each event, with its fields; and that telling never hurts."""

from __future__ import annotations

import durable_actors as da
import pytest
from durable_actors import telemetry
from durable_actors.telemetry import (
    DrainStarted,
    NodeStarted,
    NodeStopped,
    Picked,
    StepCommitted,
    StepStarted,
    StepStopped,
)
from tests.engine.kit import Recorder, running

pytestmark = pytest.mark.usefixtures("registry")


def two_steps(ahead: bool = True):
    class M(da.Machine, name="two", version=3, queue="q", run_ahead=ahead):
        @da.step
        async def start(self, ctx):
            return da.Next(self.end)

        @da.step
        async def end(self, ctx):
            if not ctx.attempt:
                raise ValueError("once")
            return da.Done()

        async def handle(self, error, ctx):
            return da.Retry()

    return M


async def test_the_life_of_an_instance(durable_dsn, ahead):
    async with running(durable_dsn, queues={"q": 2}) as run:
        row = await run.run(two_steps(ahead))
        name = run.engine.incarnation
    mine = [event for event in run.events.events if getattr(event, "id", None) == row.id]
    # A commit's answer may arrive together with the next pick's, and be read after it: sorted is stable.
    mine.sort(key=lambda event: (event.visit, event.attempt))
    facts = [(type(event), event.step, event.visit, event.attempt) for event in mine]
    assert facts == [
        (kind, step, visit, attempt)
        for step, visit, attempt in [("start", 1, 0), ("end", 2, 0), ("end", 2, 1)]
        for kind in (StepStarted, StepStopped, StepCommitted)
    ]
    assert {(event.machine, event.version, event.queue) for event in mine} == {("two", 3, "q")}
    stopped = [event for event in mine if isinstance(event, StepStopped)]
    assert [event.outcome for event in stopped] == ["Next", "Retry", "Done"]
    assert [type(event.error) for event in stopped] == [type(None), ValueError, type(None)]
    assert all(event.seconds >= 0 for event in stopped)
    committed = [event.status for event in mine if isinstance(event, StepCommitted)]
    assert committed == ["executing" if ahead else "runnable", "runnable", "done"]
    assert run.events.all(NodeStarted) == [NodeStarted(node=name, queues=("q",))]
    assert run.events.all(NodeStopped) == [NodeStopped(node=name)]
    [drain] = run.events.all(DrainStarted)
    assert (drain.node, drain.running, drain.buffered) == (name, 0, 0)
    claiming = [event for event in run.events.all(Picked) if event.claimed]
    assert claiming[0].queue == "q"
    assert (claiming[0].wanted, claiming[0].claimed) == (2, 1)
    assert run.events.events[0] == run.events.all(NodeStarted)[0]
    assert run.events.events[-1] == run.events.all(NodeStopped)[0]


async def test_an_observer_that_raises_is_dropped(durable_dsn, caplog):
    good = Recorder()

    def bad(event):
        raise RuntimeError("observer's own")

    M = two_steps()
    async with running(durable_dsn, observers=[bad, good]) as run:
        assert (await run.run(M)).status == "done"
    assert caplog.text.count("is removed") == 1
    assert good.all(StepCommitted, status="done")


async def test_observers_come_and_go(durable_dsn):
    M = two_steps()
    async with running(durable_dsn, observers=[]) as run:
        assert not run.engine.telemetry.active  # nobody listens: no event is made
        await run.run(M)
        late = Recorder()
        leave = run.engine.telemetry.subscribe(late)
        row = await run.run(M)
        assert {event.id for event in late.all(StepStarted)} == {row.id}
        leave()
        count = len(late.events)
        await run.run(M)
        assert len(late.events) == count
        assert not run.engine.telemetry.active


def test_every_event_is_in_the_table():
    events = set(telemetry.__all__) - {"Event", "Telemetry", "StepLogFilter", "TraceContext", "LaneMeasured"}
    assert {each.__name__ for each in telemetry.Event.__args__} == events
    for name in events:
        assert f"`{name}`" in (telemetry.__doc__ or ""), name
