"""Run-ahead: an instance enqueues its commit and keeps its slot; what may happen until its next step begins."""

from __future__ import annotations

from typing import Any

import durable_actors as da
import psycopg
import pytest
import trio
from durable_actors._engine.claims import ActiveClaim, ClaimState
from durable_actors._engine.running import dispatcher as dispatching
from durable_actors.telemetry import ClaimLost, DrainStarted, StepCommitted, StepStarted, StepStopped
from tests.engine.kit import (
    QUIET,
    Gate,
    Picks,
    Run,
    active_claims,
    dispatcher_of,
    in_flight,
    locked,
    restarts_of,
    running,
    state_of,
)
from tests.kit import until

pytestmark = pytest.mark.usefixtures("registry")


@pytest.fixture(autouse=True)
def _slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the machine takes: what stays, stays."""
    monkeypatch.setattr(dispatching, "RUN_AHEAD_SECONDS", 3600.0)


def chain(
    gate: Gate,
    ran: list[tuple[int, int, int]],
    *,
    claims: list[str] | None = None,
    then: list[Gate] | None = None,
) -> Any:
    """A machine that enters its step three times; the first run waits for the gate, the second for `then`."""

    class Chain(da.Machine, name="chain"):
        @da.step
        async def start(self, ctx):
            ran.append((ctx.id, ctx.visit, ctx.attempt))
            if claims is not None:
                claims.append(ctx.claim_id)
            if ctx.visit == 1:
                await gate.wait()
            if ctx.visit == 2 and then:
                await then[0].wait()
            return da.Next(self.start, {"n": ctx.visit}) if ctx.visit < 3 else da.Done(ctx.state)

    return Chain


async def leave_first(run: Run, gate: Gate, machine: Any, **options: Any) -> tuple[int, ActiveClaim]:
    """Until its first step waits at the gate."""
    number = await run.insert(machine, state={}, **options)
    await gate.wait_entered()
    [one] = active_claims(run)
    return number, one


async def end_feeder(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """It dies of a bug, and the next one runs."""
    dispatcher, restarts = dispatcher_of(run), restarts_of(run, "feeder default")

    def bug(now: float) -> int:
        monkeypatch.setattr(dispatcher, "demand", demand)
        raise RuntimeError("a bug of ours")

    demand = dispatcher.demand
    monkeypatch.setattr(dispatcher, "demand", bug)
    run.engine._node.notify("default")
    await until(
        lambda: restarts_of(run, "feeder default") > restarts and state_of(run, "feeder default") == "running"
    )


async def test_no_task_waits_for_the_commit_and_the_slot_is_kept(durable_dsn):
    gate, ran = Gate(), list[tuple[int, int, int]]()
    async with running(durable_dsn, queues={"default": da.Queue(1, prefetch=5)}, **QUIET) as run:
        number, one = await leave_first(run, gate, chain(gate, ran))
        with locked(durable_dsn, number):
            gate.open()
            await run.events.wait(StepStopped, id=number)
            await until(lambda: one.state is ClaimState.CONTINUING)
            other = await run.insert("chain", state={})
            await until(lambda: dispatcher_of(run).buffered == 1)
            assert in_flight(run) == (1, 0)
            assert run.engine._parts is not None
            assert run.engine._parts.pool is not None
            assert len(run.engine._parts.pool) == 0
            assert one.task is None
            assert one.state is ClaimState.CONTINUING
        assert (await run.ended(number)).status == "done"
        await run.events.wait(StepStarted, id=other)
    assert ran[:3] == [(number, 1, 0), (number, 2, 0), (number, 3, 0)]
    last, began = run.events.started(number)[-1], run.events.started(other)[0]
    order = run.events.events
    assert order.index(last) < order.index(began), "the other one had to wait for the slot"


async def test_it_sees_what_is_stored_and_signals_that_came_meanwhile(durable_dsn):
    gate, seen = Gate(), []

    class Chain(da.Machine, name="chain"):
        @da.step
        async def start(self, ctx):
            await gate.wait()
            return da.Next(self.then, {"b": 1, "a": [1.0, 2]})

        @da.step
        async def then(self, ctx):
            seen.append((ctx.state, [signal.name for signal in ctx.signals], ctx.visit))
            return da.Done()

    async with running(durable_dsn, **QUIET) as run:
        number = await run.insert(Chain, state={})
        await gate.wait_entered()
        await run.engine.client.signal(number, "hello")
        gate.open()
        assert (await run.ended(number)).status == "done"
    assert seen == [({"a": [1.0, 2], "b": 1}, ["hello"], 2)]


async def test_when_its_feeder_dies_it_goes_on_with_the_next(durable_dsn, monkeypatch):
    gate, ran, second = Gate(), list[tuple[int, int, int]](), list[Gate]()
    async with running(durable_dsn, **QUIET) as run:
        number, one = await leave_first(run, gate, chain(gate, ran, then=second))
        with locked(durable_dsn, number):
            gate.open()
            await until(lambda: one.state is ClaimState.CONTINUING)
            await end_feeder(run, monkeypatch)
            assert in_flight(run) == (1, 0)
            second.append(Gate())
        await second[0].wait_entered()
        assert in_flight(run) == (1, 0)
        second[0].open()
        assert (await run.ended(number)).status == "done"
        await until(lambda: not active_claims(run))
        assert in_flight(run) == (0, 0)
    assert ran == [(number, 1, 0), (number, 2, 0), (number, 3, 0)]


async def test_after_a_feeder_has_died_no_more_run_than_may(durable_dsn, monkeypatch):
    """The slot of one whose outcome is on its way is not for others."""
    gate, second, now, most = Gate(), Gate(), 0, 0

    class Chain(da.Machine, name="chain"):
        @da.step
        async def start(self, ctx):
            await gate.wait()
            return da.Next(self.then)

        @da.step
        async def then(self, ctx):
            nonlocal now, most
            now += 1
            most = max(most, now)
            await second.wait()
            now -= 1
            return da.Done()

    async with running(durable_dsn, queues={"default": 1}, **QUIET) as run:
        number, one = await leave_first(run, gate, Chain)
        with locked(durable_dsn, number):
            gate.open()
            await until(lambda: one.state is ClaimState.CONTINUING)
            await end_feeder(run, monkeypatch)
            other = await run.insert(Chain, state={})
            with trio.move_on_after(0.3):  # would begin now
                await second.wait_entered()
        await second.wait_entered()
        second.open()
        assert (await run.ended(number)).status == "done"
        assert (await run.ended(other)).status == "done"
    assert most == 1


async def test_one_that_was_interrupted_at_its_end_does_not_stay(durable_dsn):
    """It has an outcome all the same: its code was not to be stopped any more."""
    gate, ran, claims = Gate(), list[tuple[int, int, int]](), list[str]()
    async with running(durable_dsn, **QUIET) as run:
        number, one = await leave_first(run, gate, chain(gate, ran, claims=claims), partition_key="k")
        gate.open()  # it is on its way to its end
        assert run.engine._node.claims.interrupt(one, "the session with its key may be gone")
        row = await run.ended(number)
        assert (row.status, row.attempt) == ("done", 0)
    assert ran == [(number, 1, 0), (number, 2, 0), (number, 3, 0)]
    assert claims[0] != claims[1]


async def test_it_can_be_interrupted_again(durable_dsn, monkeypatch):
    """Interrupted in a step that has ended, then in the next one on the same claim."""
    gate, ran, second = Gate(), list[tuple[int, int, int]](), [Gate()]
    async with running(durable_dsn, **QUIET) as run:
        number, one = await leave_first(run, gate, chain(gate, ran, then=second), partition_key="k")
        leases = run.engine._node.claims
        with locked(durable_dsn, number):
            gate.open()
            await until(lambda: one.state is ClaimState.CONTINUING)
            one.interrupted = "a moment ago, when its outcome was there"
        await second[0].wait_entered()
        assert active_claims(run) == [one], "it went on, on the same claim"
        assert leases.interrupt(one, "the session with its key is gone")
        lost = await run.events.wait(ClaimLost, id=number)
        assert lost.reason == "the session with its key is gone"
        second[0].open()
        row = await run.ended(number)
        assert (row.status, row.attempt) == ("done", 0)
    assert ran == [(number, 1, 0), (number, 2, 0), (number, 2, 1), (number, 3, 0)]


async def test_between_two_feeders_it_goes_back_at_once(durable_dsn):
    """Nobody would ever start what a closed buffer is given, and its lease would be renewed for ever."""
    gate, ran, claims = Gate(), list[tuple[int, int, int]](), list[str]()
    async with running(durable_dsn, **QUIET) as run:
        number, one = await leave_first(run, gate, chain(gate, ran, claims=claims))
        with locked(durable_dsn, number):
            gate.open()
            await until(lambda: one.state is ClaimState.CONTINUING)
            dispatcher_of(run).close()
        assert (await run.ended(number)).status == "done"
        await until(lambda: not active_claims(run))
    assert ran == [(number, 1, 0), (number, 2, 0), (number, 3, 0)]
    assert len(set(claims)) == 3, "each step was claimed anew"


async def test_a_drain_gives_it_back_before_its_next_step(durable_dsn):
    gate, ran = Gate(), list[tuple[int, int, int]]()
    async with trio.open_nursery() as nursery, running(durable_dsn, drain_timeout=10, **QUIET) as run:
        number, one = await leave_first(run, gate, chain(gate, ran))
        free = trio.Event()

        async def hold() -> None:
            with locked(durable_dsn, number):
                gate.open()
                await until(lambda: one.state is ClaimState.CONTINUING)
                free.set()
                await run.events.wait(DrainStarted)

        nursery.start_soon(hold)
        await free.wait()
    assert ran == [(number, 1, 0)]
    with psycopg.connect(durable_dsn) as db:
        query = "select status::text, visit, attempt, state from durable.gen_durable where id = %s"
        assert db.execute(query, [number]).fetchone() == ("runnable", 2, 0, {"n": 1})


async def test_one_that_is_lost_after_its_commit_does_not_begin(durable_dsn, monkeypatch):
    """The heartbeat says so while it waits for a task."""
    gate, ran = Gate(), list[tuple[int, int, int]]()
    async with running(durable_dsn, reap_interval=3600, **QUIET) as run:
        number, _ = await leave_first(run, gate, chain(gate, ran))
        go_on = dispatcher_of(run).continue_on_claim

        def lose_it(one: ActiveClaim, now: float) -> None:
            run.engine._node.claims.lose(one, "another worker has claimed it")
            go_on(one, now)

        monkeypatch.setattr(dispatcher_of(run), "continue_on_claim", lose_it)
        gate.open()
        await until(lambda: not active_claims(run))
        assert in_flight(run) == (0, 0)
        assert len(run.events.all(StepCommitted, id=number)) == 1
    assert ran == [(number, 1, 0)]


async def test_one_that_has_no_more_time_goes_back(durable_dsn, monkeypatch):
    gate, ran = Gate(), list[tuple[int, int, int]]()
    async with running(durable_dsn, **QUIET) as run:
        number, _ = await leave_first(run, gate, chain(gate, ran))
        go_on = dispatcher_of(run).continue_on_claim

        def late(one: ActiveClaim, now: float) -> None:
            one.claim.trusted_until = now
            monkeypatch.setattr(dispatcher_of(run), "continue_on_claim", go_on)
            go_on(one, now)

        monkeypatch.setattr(dispatcher_of(run), "continue_on_claim", late)
        gate.open()
        row = await run.ended(number)
        assert (row.status, row.attempt) == ("done", 0)
    assert ran == [(number, 1, 0), (number, 2, 0), (number, 3, 0)]
    assert not run.events.all(ClaimLost)


@pytest.mark.parametrize("doubt", [True, False], ids=["in doubt", "lost"])
async def test_without_its_key_it_does_not_begin(durable_dsn, doubt: bool):
    """Its outcome counts all the same: the row was executing under our claim."""
    gate, ran, claims = Gate(), list[tuple[int, int, int]](), list[str]()
    async with running(durable_dsn, **QUIET) as run:
        machine = chain(gate, ran, claims=claims)
        number, one = await leave_first(run, gate, machine, partition_key="k")
        assert run.engine._parts is not None
        keys = run.engine._parts.keys
        with locked(durable_dsn, number):
            gate.open()
            await until(lambda: one.state is ClaimState.CONTINUING)
            assert keys.holds(one.claim)
            if doubt:
                keys.up = False
            else:
                keys.table.lost()
            assert not keys.holds(one.claim)
        await until(lambda: one not in active_claims(run))
        if doubt:
            assert ran == [(number, 1, 0)], "no key can be taken, so nothing begins"
            keys.opened()
            run.engine._node.notify("default", instance_id=number)
        row = await run.ended(number)
        assert (row.status, row.attempt) == ("done", 0)
    assert ran == [(number, 1, 0), (number, 2, 0), (number, 3, 0)]
    assert claims[0] != claims[1] == claims[2]


async def test_nothing_is_claimed_ahead_for_slots_that_are_kept(durable_dsn, monkeypatch):
    """Its steps end at once, but the instance keeps its slot: what was claimed beyond that would go back."""
    picks = Picks(monkeypatch)

    class Quick(da.Machine, name="quick"):
        @da.step
        async def start(self, ctx):
            return da.Next(self.start) if ctx.visit < 10 else da.Done()

    async with running(durable_dsn, queues={"default": 5}, **QUIET) as run:
        ids = await run.engine.client.insert_many(Quick, [{"state": {}} for _ in range(60)])
        for number in ids:
            assert number is not None
            await run.ended(number)
    claims = [number for each in picks.claimed for number in each]
    assert sorted(claims) == ids, "each was claimed once"
