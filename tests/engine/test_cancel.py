"""`cancel`, as callers and steps see it: what does not run ends at once, what runs is cancelled where it runs."""

from __future__ import annotations

import asyncio
from typing import Any

import durable_actors as da
import psycopg
import pytest
import trio
import trio.testing
from durable_actors._engine.maintenance import control
from durable_actors._store.commands import Request
from durable_actors.telemetry import ClaimLost, OutcomeStale, RequestReceived, StepCommitted, StepStarted
from tests.engine.kit import (
    PATIENCE,
    Db,
    Gate,
    Run,
    active_claims,
    client_of,
    dispatcher_of,
    gated,
    locked,
    parked,
    refuse_bad,
    running,
    simple,
)
from tests.kit import until

pytestmark = pytest.mark.usefixtures("registry")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The node looks for requests in quick succession."""
    monkeypatch.setattr(control, "LOOK_EVERY", 0.03)
    monkeypatch.setattr(control, "LONG_STEP", 0.01)


async def ends_cancelled(run: Run, number: int, reason: str = "no reason was given") -> da.Instance:
    """Wait for its end; nothing is left of it here."""
    with pytest.raises(da.InstanceCancelled) as caught:
        await run.engine.client.result(number, timeout=PATIENCE)
    assert (caught.value.id, caught.value.reason) == (number, reason)
    await until(lambda: not [each for each in active_claims(run) if each.claim.id == number])
    found = await run.engine.client.inspect(number)
    assert (found.status, found.locked_by) == ("cancelled", None)
    return found


# -- what does not run


async def test_what_does_not_run_has_ended_when_it_returns(durable_dsn, db: Db):
    machine = simple()
    async with client_of(db) as client:
        number = await client.insert(machine, state={}, unique_key="k", schedule_in=600)
        assert await client.cancel("k", by="ada", reason="wrong order", meta={"ticket": 7}) == "cancelled"
        with pytest.raises(da.InstanceCancelled, match=f"instance {number} was cancelled: wrong order"):
            await client.result(number)
        with pytest.raises(da.Conflict, match="is cancelled"):
            await client.cancel(number)
        with pytest.raises(da.NoTarget):
            await client.cancel(number + 99)
        with pytest.raises(da.NoTarget):
            await client.signal(number, "go")
        with pytest.raises(da.ConfigError, match="force"):
            await client.cancel(number, force="yes")  # type: ignore[arg-type]
        [receipt] = await client.receipts(number)
        facts = (receipt.command, receipt.by, receipt.reason, receipt.data, receipt.result)
        assert facts == ("cancel", "ada", "wrong order", {"ticket": 7}, "cancelled")
        assert await client.insert(machine, state={}, unique_key="k") != number, "its key is free"


async def test_the_helper_and_who_waits_here(durable_dsn):
    """The waiter of this process is told at once, although its next look is a second away."""
    async with running(durable_dsn) as run:
        number = await run.insert(gated(Gate()), schedule_in=600)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ends_cancelled, run, number, "because")
            await trio.testing.wait_all_tasks_blocked()
            assert await da.cancel(number, reason="because", idempotency_key="k") == "cancelled"
            assert await da.cancel(number, idempotency_key="k") == "cancelled"


async def test_on_callers_connections(durable_dsn, db: Db):
    async with client_of(db) as client:
        first, second, third = [await client.insert(simple(), state={}) for _ in range(3)]

        def in_a_thread() -> None:
            with psycopg.connect(durable_dsn) as conn:
                assert da.sync.cancel(conn, first, reason="because", idempotency_key="k") == "cancelled"
                assert da.sync.cancel(conn, first, idempotency_key="k") == "cancelled"
                with pytest.raises(da.Conflict):
                    da.sync.cancel(conn, first)
                assert conn.execute("select 1").fetchone() == (1,), "the transaction is usable"
                with psycopg.connect(durable_dsn) as other:
                    assert da.sync.inspect(other, first).status == "runnable", "not before the commit"

        async def on_asyncio() -> None:
            async with await psycopg.AsyncConnection.connect(durable_dsn) as conn:
                assert await da.aio.cancel(conn, second, force=True) == "cancelled"
                await conn.rollback()
                assert (await da.aio.inspect(conn, second)).status == "runnable"

        await trio.to_thread.run_sync(in_a_thread)
        await trio.to_thread.run_sync(lambda: asyncio.run(on_asyncio()))
        async with await da.TrioConnection.connect(durable_dsn) as conn, conn.transaction():
            assert await client.cancel(third, conn=conn) == "cancelled"
        assert [(await client.inspect(each)).status for each in (first, second, third)] == [
            "cancelled", "runnable", "cancelled",
        ]  # fmt: skip


async def test_a_parked_instance_and_its_sibling(durable_dsn):
    """The key was held behind it; a scheduled sibling does not matter."""

    class Waits(da.Machine[dict]):
        @da.step
        async def start(self, ctx):
            return da.Await("go")

    async with running(durable_dsn) as run:
        number = await run.insert(Waits, state={})
        await parked(run, number)
        assert await da.cancel(number) == "cancelled"
        await ends_cancelled(run, number)


# -- what runs


async def test_a_step_on_another_node_is_cancelled_within_two_seconds(durable_dsn, db: Db):
    """With the real intervals. The caller is another process's client."""
    gate, cleaned = Gate(), trio.Event()

    class Long(da.Machine[dict]):
        @da.step
        async def start(self, ctx):
            try:
                await gate.wait()
            finally:
                cleaned.set()
            return da.Done()

    async with running(durable_dsn) as run, client_of(db, name="caller") as client:
        number = await run.insert(Long, state={})
        await gate.wait_entered()
        await trio.sleep(1.0)  # a step that is as old is looked after
        assert await client.cancel(number, by="ada", reason="wrong order") == "requested"
        asked = await client.explain(number)  # its node may have looked in between
        assert "cancel requested by ada" in asked.summary or asked.reason == "cancelled"
        with trio.fail_after(2):
            await cleaned.wait()
        found = await ends_cancelled(run, number, "wrong order")
        assert (found.attempt, found.crashes, found.last_error) == (0, 0, "wrong order")
        event = run.events.all(RequestReceived)[0]
        assert (event.id, event.kind, event.by) == (number, "cancel", "ada")
        assert run.events.all(ClaimLost) == []
        assert run.events.all(OutcomeStale) == []


async def test_a_step_that_is_done_first_is_done(durable_dsn, quick):
    gate = Gate()

    class Shielded(da.Machine[dict]):
        @da.step
        async def start(self, ctx):
            with trio.CancelScope(shield=True):
                await gate.wait()
            return da.Done(7)

    async with running(durable_dsn) as run:
        number = await run.insert(Shielded, state={})
        await gate.wait_entered()
        assert await da.cancel(number) == "requested"
        assert await da.cancel(number) == "requested"
        await run.events.wait(RequestReceived)
        gate.open()
        assert await run.engine.client.result(number, timeout=PATIENCE) == 7


def short(kind: str, gate: Gate, *, run_ahead: bool = True) -> Any:
    """Its first step waits at the gate, too short for a look, and returns that outcome."""

    class Child(da.Machine[dict], name="child"):
        @da.step
        async def start(self, ctx):
            return da.Done()

    class Short(da.Machine[dict], name="short", run_ahead=run_ahead):
        @da.step(initial=True)
        async def begin(self, ctx):
            await gate.wait()
            match kind:
                case "Next":
                    return da.Next(self.end)
                case "Retry":
                    return da.Retry()
                case "Await":
                    return da.Await("go")
                case "Stop":
                    return da.Stop("no")
                case "raises":
                    raise ValueError("no")
                case "ScheduleChildren":
                    return da.ScheduleChildren(self.end, [Child, Child])
                case "SystemExit":
                    raise SystemExit(2)
            return da.Done()

        @da.step
        async def end(self, ctx):
            return da.Done()

    return Short


@pytest.mark.parametrize(
    "kind", ["Next", "Retry", "Await", "Stop", "raises", "ScheduleChildren", "SystemExit", "Done"]
)
@pytest.mark.parametrize("way", ["short", "refused before", "run_ahead off"])
async def test_any_outcome_but_done_becomes_cancelled(durable_dsn, db: Db, monkeypatch, kind: str, way: str):
    """No look comes in time: the fence of the commit decides."""
    monkeypatch.setattr(control, "LONG_STEP", 600.0)
    gate = Gate()
    async with running(durable_dsn) as run:
        number = await run.insert(short(kind, gate, run_ahead=way != "run_ahead off"), state={})
        await gate.wait_entered()
        assert await da.cancel(number, reason="because") == "requested"
        if way == "refused before":  # the outcome is set aside first
            with locked(durable_dsn, number):
                gate.open()
                await trio.sleep(0.2)
        else:
            gate.open()
        if kind == "Done":
            await run.engine.client.result(number, timeout=PATIENCE)
            await until(
                lambda: run.events.all(StepCommitted, id=number)
            )  # the row may tell before the node does
        else:
            found = await ends_cancelled(run, number, "because")
            assert (found.step, found.attempt) == ("begin", 0)
        assert len(run.events.all(StepStarted, id=number)) == 1
        assert len(run.events.all(StepCommitted, id=number)) == (kind == "Done")
        assert db.execute("select count(*) from durable.gen_durable") == [(1,)], "no child was inserted"


async def test_between_two_steps_of_one_claim(durable_dsn, db: Db, quick, monkeypatch):
    """The first outcome is committed, the request comes, and the node knows of it before the next step begins."""
    gate = Gate()

    class Two(da.Machine[dict]):
        @da.step(initial=True)
        async def begin(self, ctx):
            return da.Next(self.end)

        @da.step
        async def end(self, ctx):
            await gate.wait()
            return da.Done()

    async with running(durable_dsn) as run:
        dispatcher = dispatcher_of(run)
        real = dispatcher.continue_on_claim

        def asked_first(active, now):
            db.execute(
                "update durable.gen_durable set request = jsonb_build_object('kind', 'cancel') where id = %s",
                active.claim.id,
            )
            run.engine._node.claims.request(active.claim.claim_id, Request("cancel"))
            real(active, now)

        monkeypatch.setattr(dispatcher, "continue_on_claim", asked_first)
        number = await run.insert(Two, state={})
        found = await ends_cancelled(run, number)
        assert (found.step, gate.entered) == ("end", 0)


@pytest.mark.parametrize("kind", ["Done", "Next"])
async def test_a_thread_runs_to_its_end(durable_dsn, quick, kind: str):
    gate = Gate()

    class Blocking(da.Machine[dict]):
        @da.step(initial=True)
        def begin(self, ctx):
            gate.wait_in_thread()
            return da.Done(7) if kind == "Done" else da.Next(self.end)

        @da.step
        def end(self, ctx):
            return da.Done()

    async with running(durable_dsn) as run:
        number = await run.insert(Blocking, state={})
        await gate.wait_entered()
        assert await da.cancel(number) == "requested"
        await run.events.wait(RequestReceived, id=number)
        await trio.testing.wait_all_tasks_blocked()
        [active] = active_claims(run)
        assert active.interrupted is None
        gate.open()
        if kind == "Done":
            assert await run.engine.client.result(number, timeout=PATIENCE) == 7
        else:
            await ends_cancelled(run, number)


async def test_a_claim_that_waits_for_a_slot(durable_dsn, quick):
    """It never runs, and does not wait for its turn; neither does one behind a partition key."""
    gate = Gate()
    machine = gated(gate)
    async with running(durable_dsn, queues={"default": da.Queue(1, prefetch=2)}) as run:
        first = await run.insert(machine)
        await gate.wait_entered()
        plain = await run.insert(machine)
        keyed = await run.insert(machine, partition_key="p")
        await until(lambda: len(active_claims(run)) == 3)
        for number in (plain, keyed):
            assert await da.cancel(number) == "requested"
            await ends_cancelled(run, number)
        assert gate.entered == 1
        gate.open()
        await run.ended(first)


async def test_its_key_and_its_slot_are_free(durable_dsn, quick):
    gate = Gate()
    machine = gated(gate)
    async with running(durable_dsn, queues={"default": 1}) as run:
        first = await run.insert(machine, partition_key="p")
        await gate.wait_entered()
        second = await run.insert(machine, partition_key="p")
        assert await da.cancel(first) == "requested"
        await gate.wait_entered(2)
        gate.open()
        assert (await run.ended(second)).status == "done"
        await ends_cancelled(run, first)


@pytest.mark.parametrize("force", [False, True])
async def test_its_parent_goes_on(durable_dsn, quick, force: bool):
    gate = Gate()
    machine = gated(gate)

    class Parent(da.Machine[dict]):
        @da.step(initial=True)
        async def begin(self, ctx):
            return da.ScheduleChildren(self.end, [machine])

        @da.step
        async def end(self, ctx):
            return da.Done(dict(ctx.children_counts))

    async with running(durable_dsn) as run:
        parent = await run.insert(Parent, state={})
        await gate.wait_entered()
        [child] = await run.engine.client.list_instances(da.Filter(parent=parent))
        assert await da.cancel(child.id, force=force) == ("cancelled" if force else "requested")
        assert await run.engine.client.result(parent, timeout=PATIENCE) == {"cancelled": 1}
        gate.open()


async def test_force_fences_the_step_out(durable_dsn, quick):
    """The step runs on until its node notices; nothing of it is committed."""
    gate = Gate()
    async with running(durable_dsn, heartbeat_interval=600.0, lease_ttl=3600.0, dead_after=3000.0) as run:
        number = await run.insert(gated(gate))
        await gate.wait_entered()
        assert await da.cancel(number, force=True, reason="now") == "cancelled"
        gate.open()
        await run.events.wait(OutcomeStale, id=number)
        await ends_cancelled(run, number, "now")


async def test_a_drain_ends_what_was_to_be_cancelled(durable_dsn, db: Db, monkeypatch):
    monkeypatch.setattr(control, "LONG_STEP", 600.0)  # it does not know
    gate = Gate()
    async with running(durable_dsn, drain_timeout=0) as run:
        number = await run.insert(gated(gate))
        await gate.wait_entered()
        assert await da.cancel(number) == "requested"
    assert db.row(number, "status, attempt, interruptions") == ("cancelled", 0, 0)


async def test_handle_of_an_outcome_that_postgres_refuses(durable_dsn, db: Db, quick):
    """`handle` does not run any more."""
    gate, handled = Gate(), []
    refuse_bad(db, "23514")

    class Bad(da.Machine[dict]):
        @da.step
        async def start(self, ctx):
            with trio.CancelScope(shield=True):
                await gate.wait()
            return da.Done("bad")

        async def handle(self, error, ctx):
            handled.append(error)
            return da.Done("handled")

    async with running(durable_dsn) as run:
        number = await run.insert(Bad, state={})
        await gate.wait_entered()
        assert await da.cancel(number) == "requested"
        await run.events.wait(RequestReceived, id=number)
        gate.open()
        await ends_cancelled(run, number)
        assert handled == []


async def test_a_worker_that_dies_under_a_request(durable_dsn, db: Db):
    async with client_of(db, name="caller") as client:
        number = await client.insert(simple(), state={})
        db.execute(
            "update durable.gen_durable set status = 'executing', claim_id = gen_random_uuid(), locked_by = 'gone',"
            " lease_expires_at = now() + interval '1 h'"
        )
        assert await client.cancel(number, reason="because") == "requested"
        db.execute("update durable.gen_durable set lease_expires_at = now()")
        async with running(durable_dsn) as run:
            await ends_cancelled(run, number, "because")
            assert run.events.started(number) == []


@pytest.mark.parametrize("kind", ["cancelled in its step", "Next", "Done"])
async def test_execute_next_returns_the_cancelled_instance(db: Db, quick, kind: str):
    gate = Gate()

    class Step(da.Machine[dict]):
        @da.step(initial=True)
        async def begin(self, ctx):
            with trio.CancelScope(shield=kind != "cancelled in its step"):
                await gate.wait()
            return da.Done() if kind == "Done" else da.Next(self.end)

        @da.step
        async def end(self, ctx):
            return da.Done()

    async with client_of(db) as client:
        number = await client.insert(Step, state={})
        found: list[Any] = []

        async def call() -> None:
            found.append(await client.execute_next())

        async with trio.open_nursery() as nursery:
            nursery.start_soon(call)
            await gate.wait_entered()
            assert await client.cancel(number, reason="because") == "requested"
            if kind != "cancelled in its step":
                gate.open()
        status = "done" if kind == "Done" else "cancelled"
        assert [(each.id, each.status) for each in found] == [(number, status)]
        assert await client.execute_next() is None
