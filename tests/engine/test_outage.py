"""Postgres goes away and comes back: actors and steps survive, nothing is lost, and the log stays short."""

from __future__ import annotations

import logging
from collections import Counter

import durable_actors as da
import pytest
import trio.testing
from durable_actors._engine.outage import Outage
from durable_actors._engine.running import context_port as port
from durable_actors.errors import CommitUnknown, StoreUnavailable
from durable_actors.telemetry import StoreDown, StoreUp
from tests.engine.kit import Gate, gated, running
from tests.kit import until
from tests.support.faults import open_proxy

pytestmark = pytest.mark.usefixtures("registry")

TERMINATE = (
    "select pg_terminate_backend(pid) from pg_stat_activity"
    " where datname = current_database() and pid <> pg_backend_pid()"
)


def restarts(run) -> list:
    """Actors that died: their supervisor remembers."""

    return [(node.name, node.restarts) for node in run.engine.snapshot().walk() if node.restarts]


async def test_every_backend_is_terminated(durable_dsn, db):
    """As in a fast restart. Steps that run are not touched; what they return is committed."""
    gate, runs = Gate(), []
    M = gated(gate, runs=runs)
    async with running(durable_dsn, heartbeat_interval=0.05) as run:
        number = await run.insert(M)
        await gate.wait_entered()
        for _ in range(3):
            db.execute(TERMINATE)
            later = await run.insert_anyway(M)
            await until(lambda later=later: any(each == later for each, _ in runs))
        gate.open()
        rows = [await run.ended(each) for each in {number, *(each for each, _ in runs)}]
        assert restarts(run) == []
    assert {row.status for row in rows} == {"done"}
    assert (number, 0) in runs
    assert sum(each == number for each, _ in runs) == 1


async def test_a_silent_network(durable_dsn, caplog, monkeypatch):
    """H58: nothing answers for a while. Two lines and two events per outage, however many actors and queues see it."""
    gate, runs = Gate(), []
    M = gated(gate, runs=runs)
    caplog.set_level(logging.WARNING, logger="durable_actors.engine")
    queues = {"default": 2, "a": 1, "b": 1}
    attempts, failed = Counter[str](), Outage.failed

    def counted(self: Outage, error: Exception) -> float:
        attempts[self._actor] += 1
        return failed(self, error)

    monkeypatch.setattr(Outage, "failed", counted)
    async with (
        open_proxy(durable_dsn) as proxy,
        running(proxy.dsn, heartbeat_interval=0.05, queues=queues) as run,
    ):
        number = await run.insert(M)
        await gate.wait_entered()
        proxy.refuse()
        proxy.reset()
        gate.open()  # an outcome that cannot be committed yet
        await run.events.wait(StoreDown)
        health = run.engine._node.health
        await until(lambda: len(health._failing) >= 5)  # three feeders, flusher, heartbeat
        await until(lambda: all(attempts[f"feeder of {queue!r}"] >= 4 for queue in queues))
        proxy.heal()
        row = await run.ended(number)
        up = await run.events.wait(StoreUp)
        assert up.seconds > 0
        assert (await run.run(M)).status == "done"
        assert restarts(run) == []
        assert [len(run.events.all(kind)) for kind in (StoreDown, StoreUp)] == [1, 1]
    assert (row.result, row.attempt) == ("finished", 0)
    said = [text.partition(": ")[2] for text in caplog.messages if "the store" in text]
    assert len(said) == 2, said
    assert said[0].startswith("the store cannot be reached, trying again until it can: ")
    assert said[1].startswith("the store works again after ")


async def test_a_deaf_network(durable_dsn):
    """Blackholed: connections hang instead of failing. Steps go on while their leases are trusted."""
    gate, runs = Gate(), []
    M = gated(gate, runs=runs)
    async with open_proxy(durable_dsn) as proxy, running(proxy.dsn) as run:
        number = await run.insert(M)
        await gate.wait_entered()
        proxy.blackhole()
        gate.open()
        await trio.testing.wait_all_tasks_blocked(0.05)  # sent, and no answer
        assert run.engine._node.claims.live()
        proxy.heal()
        row = await run.ended(number)
        assert restarts(run) == []
    assert (row.result, row.attempt, runs) == ("finished", 0, [(number, 0)])


async def test_waiting_for_a_result_survives(durable_dsn, db):
    gate, runs = Gate(), []
    async with open_proxy(durable_dsn) as proxy, running(proxy.dsn) as run:
        number = await run.insert(gated(gate, runs=runs))
        await gate.wait_entered()

        async def cut() -> None:
            proxy.reset()
            gate.open()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(cut)
            assert await run.engine.client.result(number, timeout=30) == "finished"


async def test_a_server_that_is_not_there(durable_dsn):
    """At the start there is somebody to tell."""
    async with open_proxy(durable_dsn) as proxy:
        proxy.refuse()
        with pytest.raises(da.StoreUnavailable):
            async with da.open_engine(dsn=proxy.dsn, start_timeout=0.1):
                raise AssertionError("must not start")
        with pytest.raises(da.StoreUnavailable):
            async with da.open_client(proxy.dsn, start_timeout=0.1):
                raise AssertionError("must not start")


@pytest.mark.parametrize("done", [False, True], ids=["not done", "done and unknown"])
async def test_a_step_bears_an_outage_in_its_calls(durable_dsn, db, monkeypatch, done):
    """Through `handle` it would end the instance for good, although the database is back in a second."""
    real_start, real_signal, failures = port.start_child, port.signal_from_step, []

    def flaky(real):
        async def call(conn, *args, **options):
            if len(failures) >= 4:
                return await real(conn, *args, **options)
            failures.append(real.__name__)
            if done:
                await real(conn, *args, **options)
                raise CommitUnknown("x")
            raise StoreUnavailable("x")

        return call

    monkeypatch.setattr(port, "start_child", flaky(real_start))
    monkeypatch.setattr(port, "signal_from_step", flaky(real_signal))

    @da.job
    async def leaf(args):
        return 1

    class M(da.Machine):
        @da.step
        async def start(self, ctx):
            await ctx.insert(leaf, args={})
            await ctx.start_child(leaf, key="one", args={})
            await ctx.signal(ctx.id, "go")
            return da.Await("go", then=self.end)

        @da.step
        async def end(self, ctx):
            return da.Done(len(ctx.awaited))

    async with running(durable_dsn) as run:
        row = await run.run(M)
    assert (row.result, row.attempt) == (1, 0)
    assert len(failures) == 4
    assert db.execute("select count(*)::int from durable.gen_durable") == [(3,)]
