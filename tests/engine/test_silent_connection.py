"""One connection stops answering in mid-statement while all others work: the engine must not wait for ever."""

from __future__ import annotations

import durable_actors as da
import psycopg
import pytest
import trio
from durable_actors import _results
from durable_actors._engine import lanes as lanes_module, setup, tree
from durable_actors._engine.committing import flusher, spawn
from durable_actors._engine.lanes import answer_patience, lanes
from durable_actors._postgres.driver import waiting
from durable_actors.telemetry import StoreDown
from tests.engine.kit import Gate, running
from tests.kit import until
from tests.support.faults import open_proxy

SHORT = 0.3


@pytest.fixture
def impatient(monkeypatch, registry):
    """Seconds are not what is tested here."""
    monkeypatch.setattr(lanes_module, "answer_patience", lambda _: SHORT)
    monkeypatch.setattr(tree, "answer_patience", lambda _: SHORT)
    monkeypatch.setattr(flusher, "answer_patience", lambda _: SHORT)
    monkeypatch.setattr(spawn, "answer_patience", lambda _: SHORT)
    monkeypatch.setattr(setup, "answer_patience", lambda _: SHORT)
    monkeypatch.setattr(_results, "QUERY_TIMEOUT", SHORT)
    monkeypatch.setattr(waiting, "CANCEL_TIMEOUT", SHORT)


def family():
    class Child(da.Machine, name="child"):
        @da.step
        async def start(self, ctx):
            return da.Done()

    class Parent(da.Machine, name="parent"):
        @da.step
        async def start(self, ctx):
            return da.ScheduleChildren(self.wait, [Child, Child])

        @da.step
        async def wait(self, ctx):
            return da.Await("go", then=self.end)

        @da.step
        async def end(self, ctx):
            return da.Done([signal.payload for signal in ctx.awaited])

    return Parent


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    "statement",
    [
        "pick_instances",
        "COMMIT",
        "commit_outcomes",
        "commit_parks",
        "read_finals",
        "read_inboxes",
        "read_owners",
    ],
)
async def test_an_answer_that_never_comes(durable_dsn, statement):
    machine = family()
    async with (
        open_proxy(durable_dsn) as proxy,
        running(proxy.dsn, reap_interval=0.1) as run,
    ):
        proxy.lose_reply(statement.encode(), then="silence")
        number = await run.insert(machine)
        await run.engine.client.signal(number, "go", 1)
        row = await run.ended(number)
        with trio.fail_after(30):
            await proxy.wait_lost()
        assert [each.name for each in run.engine.snapshot().walk() if each.restarts] == []
    assert (row.status, row.result) == ("done", [1])


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("statement", ["signal_from_step", "start_child"])
async def test_a_call_of_a_step_that_is_not_answered(durable_dsn, statement):
    """It was done, and is asked again: what it has started or sent has an identity, so it is once there."""

    class Child(da.Machine, name="child"):
        @da.step
        async def start(self, ctx):
            return da.Await("go", then=self.end)

        @da.step
        async def end(self, ctx):
            return da.Done(len(ctx.awaited))

    class M(da.Machine, name="m"):
        @da.step
        async def start(self, ctx):
            child = await ctx.start_child(Child, key="one")
            await ctx.signal(child, "go")
            return da.Done(child)

    async with open_proxy(durable_dsn) as proxy, running(proxy.dsn) as run:
        proxy.lose_reply(statement.encode(), then="silence")
        row = await run.run(M)
        child = await run.ended(row.result)
    assert (row.attempt, child.result) == (0, 1)


@pytest.mark.usefixtures("impatient")
async def test_a_look_for_locks_that_is_not_answered(durable_dsn):
    """An outcome meets a foreign row lock, and nobody says which one it was: the others are committed all the same."""
    gate = Gate()

    class M(da.Machine, name="m"):
        @da.step
        async def start(self, ctx):
            await gate.wait()
            return da.Done()

    async with open_proxy(durable_dsn) as proxy, running(proxy.dsn) as run:
        first = await run.insert(M)
        await gate.wait_entered()
        with psycopg.connect(durable_dsn) as other:
            other.execute("select 1 from durable.gen_durable where id = %s for update", [first])
            proxy.lose_reply(b"probe_locks", then="silence")
            gate.open()
            with trio.fail_after(30):
                await proxy.wait_lost()
            assert (await run.run(M)).status == "done"
        assert (await run.ended(first)).status == "done"


@pytest.mark.slow
@pytest.mark.usefixtures("impatient")
async def test_a_heartbeat_that_is_not_answered(durable_dsn, db, monkeypatch):
    """The leases are renewed by another connection before they end: the step goes on."""
    monkeypatch.setattr(lanes_module, "SHORTEST_BEAT", SHORT)
    gate = Gate()

    class M(da.Machine, name="m"):
        @da.step
        async def start(self, ctx):
            await gate.wait()
            return da.Done(ctx.attempt)

    options = {"lease_ttl": 6, "heartbeat_interval": 0.1, "reap_interval": 0.1}
    async with open_proxy(durable_dsn) as proxy, running(proxy.dsn, **options) as run:
        number = await run.insert(M)
        await gate.wait_entered()
        proxy.lose_reply(b"renew_leases", then="silence")
        await proxy.wait_lost()
        renewed = db.row(number, "lease_expires_at")
        await run.events.wait(StoreDown, actor="heartbeat")
        await until(lambda: db.row(number, "lease_expires_at") > renewed)
        gate.open()
        assert (await run.ended(number)).result == 0


def test_patience_is_half_a_lease_and_leaves_time_to_renew():
    assert (answer_patience(60), answer_patience(1)) == (30, 5)
    roles = lanes(6, session_dsn=None, keepalive=60)
    assert {role: lane.answer_within for role, lane in roles.items()} == {
        "session": None,  # the keeper has a trust window of its own
        "heartbeat": 30,
        "commit": 30,
        "claim": 30,
        "client": None,  # callers decide; a large insert takes its time
    }
