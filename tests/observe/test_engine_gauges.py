"""What an engine tells of itself: mailboxes, connections, retention, restarts of its actors."""

from __future__ import annotations

import durable_actors as da
import pytest
from durable_actors._engine.maintenance import loop_watch
from durable_actors._engine.maintenance.gauges import kind_of
from durable_actors._engine.maintenance.reaper import Reaper
from durable_actors.prometheus import Bridge
from durable_actors.telemetry import ActorRestarted, EngineMeasured, Event, NodeStarted, NodeStopped
from prometheus_client import CollectorRegistry
from tests.engine.kit import running
from tests.kit import until
from tests.observe.kit import Sdk
from tests.observe.test_metrics import samples


def test_feeders_are_one_kind():
    """A queue is no label of an actor: their names are the program's."""
    names = ["feeder mail", "feeder a%2Fb", "flusher", "long poll"]
    assert [kind_of(name) for name in names] == ["feeder", "feeder", "flusher", "long poll"]


@pytest.mark.usefixtures("registry")
async def test_an_engine_measures_itself_for_both_libraries(durable_dsn: str, otel_sdk: Sdk):
    registry, seen = CollectorRegistry(), list[Event]()
    observers = [Bridge(registry), otel_sdk.bridge(), seen.append]
    queues = {"mail": 2, "other": 2}
    async with running(durable_dsn, observers=observers, queues=queues, pool_size=6):
        await until(lambda: any(isinstance(each, EngineMeasured) for each in seen), timeout=20)
        [event] = [each for each in seen if isinstance(each, EngineMeasured)]
        assert isinstance(seen[0], NodeStarted)
        assert {"feeder", "flusher", "heartbeat", "janitor"} <= set(event.mailboxes)
        assert event.janitor_lag is not None
        assert 0 <= event.janitor_lag < 20
        lanes = {each.lane: each for each in event.lanes}
        assert {"heartbeat", "commit", "claim", "client"} <= set(lanes)
        assert lanes["client"].size == 2
        found, points = samples(registry), otel_sdk.points()
        assert found["db_client_connection_max db_client_connection_pool_name=client"] == 2
        assert found["durable_actor_mailbox_size durable_actor=feeder"] >= 0
        assert found["durable_janitor_lag_seconds"] == event.janitor_lag
        client = ("db.client.connection.pool.name", "client")
        used = points[
            "db.client.connection.count", frozenset({client, ("db.client.connection.state", "used")})
        ]
        assert used.value == lanes["client"].in_use
        assert points["durable.actor.mailbox.size", frozenset({("durable.actor", "feeder")})].value >= 0
    assert isinstance(seen[-1], NodeStopped)


@pytest.mark.usefixtures("registry")
async def test_without_observers_an_engine_does_not_measure_itself(
    durable_dsn: str, monkeypatch: pytest.MonkeyPatch
):
    """The cost is one test, twice a second, in the watching thread; an observer that comes later is told."""
    monkeypatch.setattr(loop_watch, "INTERVAL", 0.01)
    measured: list[object] = []
    walk = da.Engine.snapshot
    monkeypatch.setattr(da.Engine, "snapshot", lambda self: measured.append(self) or walk(self))
    looks: list[float] = []
    look = loop_watch.LoopWatch.look
    monkeypatch.setattr(loop_watch.LoopWatch, "look", lambda self, now: looks.append(now) or look(self, now))
    async with running(durable_dsn, observers=[]) as run:
        await until(lambda: len(looks) > 20)
        assert measured == []
        seen: list[Event] = []
        run.engine.telemetry.subscribe(seen.append)
        await until(lambda: any(isinstance(each, EngineMeasured) for each in seen))
        count = len(looks)
        await until(lambda: len(looks) > count + 20)
        assert len(measured) == 1  # not at every look


@pytest.mark.usefixtures("registry")
async def test_a_restarted_actor_is_counted(durable_dsn: str, monkeypatch: pytest.MonkeyPatch):
    """A part of the engine that fails is started again, and told."""
    look, failures = Reaper._round, [RuntimeError("a bug")]

    async def fail_once(self: Reaper) -> float:
        if failures:
            raise failures.pop()
        return await look(self)

    monkeypatch.setattr(Reaper, "_round", fail_once)
    registry, seen = CollectorRegistry(), list[Event]()
    async with running(durable_dsn, observers=[Bridge(registry), seen.append]):
        await until(lambda: any(isinstance(each, ActorRestarted) for each in seen))
    [event] = [each for each in seen if isinstance(each, ActorRestarted)]
    assert (event.actor, event.path.split("/")[1:]) == ("reaper", ["maintenance", "reaper"])
    assert samples(registry)["durable_actor_restarts_total durable_actor=reaper"] == 1
