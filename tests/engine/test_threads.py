"""`def` steps: they run in threads, which cannot be cancelled."""

from __future__ import annotations

import logging
import threading

import durable_actors as da
import pytest
import trio
from durable_actors._engine.claims import ClaimState
from durable_actors._engine.running.dispatcher import Dispatcher, TaskSlice
from durable_actors._engine.threads import Threads
from durable_actors._store.rows import Claim
from durable_actors.telemetry import ClaimLost, DrainStarted, Picked, StepCommitted, StepStarted
from tests.engine.kit import END, Gate, active_claims, claim, restarts_of, running
from tests.kit import PATIENCE, until

pytestmark = pytest.mark.usefixtures("registry")

BEATS = {"lease_ttl": 60, "heartbeat_interval": 0.03}


async def test_thread_limit(durable_dsn):
    running_now, most = 0, 0
    lock = threading.Lock()

    @da.job
    def plain(args: dict):
        nonlocal running_now, most
        with lock:
            running_now += 1
            most = max(most, running_now)
        threading.Event().wait(0.01)
        with lock:
            running_now -= 1

    async with running(durable_dsn, thread_limit=2, queues={"default": 8}) as run:
        ids = await run.engine.client.insert_many(plain, [{"args": {}}] * 8)
        for number in ids:
            assert number is not None
            assert (await run.ended(number)).status == "done"
    assert most <= 2


async def test_a_thread_outlives_its_claim(durable_dsn, db):
    """Slot and key stay taken until it has returned; its outcome is dropped."""
    gate = Gate()

    @da.job
    def stuck(args: dict):
        if args.get("first"):
            gate.wait_in_thread()
        return "done"

    async with running(durable_dsn, queues={"default": 1, "other": 1}, **BEATS) as run:
        number = await run.insert(stuck, args={"first": True}, partition_key="k")
        await gate.wait_entered()
        db.execute(END, number)  # its claim is gone, and the key is free as far as the database knows
        [active] = run.engine._node.claims.all()
        await until(lambda: active.lost)
        same_slot = await run.insert(stuck, args={})
        same_key = await run.insert(stuck, args={}, partition_key="k", queue="other")
        picks = len(run.events.all(Picked, queue="other"))
        await run.events.wait(Picked, queue="other", count=picks + 3)
        assert run.events.all(StepStarted, id=same_slot) == []
        assert run.events.all(StepStarted, id=same_key) == []
        gate.open()
        await run.events.wait(ClaimLost, id=number)
        assert (await run.ended(same_slot)).result == "done"
        assert (await run.ended(same_key)).result == "done"
        assert run.events.all(StepCommitted, id=number) == []
    assert db.row(number, "status::text, last_error, result") == ("failed", "ended", None)


def blocking(gate: Gate, returned: list, **options):
    """A job whose first run blocks its thread until the gate opens."""

    @da.job(name="blocking", **options)
    def blocking(args: dict, ctx: da.Context[dict]) -> str:
        if not gate.entered:
            gate.wait_in_thread()
            returned.append(ctx.id)
        return "done"

    return blocking


async def test_a_thread_that_returns_while_it_drains_is_committed(durable_dsn, db):
    gate, returned = Gate(), []
    async with running(durable_dsn, drain_timeout=60) as run:
        number = await run.insert(blocking(gate, returned), args={})
        await gate.wait_entered()
        run.engine.request_stop()
        await run.events.wait(DrainStarted)
        gate.open()
    assert db.row(number, "status::text, result, attempt, interruptions") == ("done", "done", 0, 0)


async def test_a_stop_leaves_on_time_while_a_thread_runs(durable_dsn, db, caplog):
    """Its row is not released: the thread may still have effects. The log names it. Then a reaper brings it back."""
    gate, returned = Gate(), []
    caplog.set_level(logging.INFO, logger="durable_actors.engine")
    once = blocking(gate, returned, max_attempts=1)
    async with running(durable_dsn, drain_timeout=0.05, **BEATS) as run:
        number = await run.insert(once, args={}, partition_key="k")
        await gate.wait_entered()
        began = db.row(number, "lease_expires_at")
        await run.engine.stop()
        assert returned == []
    status, lease, attempt = db.row(number, "status::text, lease_expires_at, attempt")
    assert (status, lease >= began[0], attempt) == ("executing", True, 0)
    [said] = [record for record in caplog.records if "is left behind" in record.message]
    assert said.levelname == "WARNING"
    assert said.message.startswith(f"instance {number}: the thread of blocking, step perform has run for ")
    # A job that may run once: a node that has stopped in good order has crashed nothing.
    async with running(durable_dsn, dead_after=0.05, reap_interval=0.05) as run:
        row = await run.ended(number)
        assert (row.status, row.result) == ("done", "done")
        assert (row.attempt, row.crashes, row.interruptions) == (0, 0, 1)
        assert returned == []
        gate.open()
        await until(lambda: any("has returned after" in text for text in caplog.messages))
    assert returned == [number]
    assert db.row(number, "status::text, attempt") == ("done", 0)  # what the old thread returned is dropped


async def test_a_second_signal_leaves_threads_at_once(durable_dsn, db):
    gate, returned = Gate(), []
    async with running(durable_dsn, drain_timeout=600) as run:
        number = await run.insert(blocking(gate, returned), args={})
        await gate.wait_entered()
        run.engine.request_stop()
        await run.events.wait(DrainStarted)
        run.engine.cancel_steps()
        await run.engine.stop()
    assert (returned, db.row(number, "status::text")) == ([], ("executing",))
    gate.open()


async def test_a_step_that_waits_for_a_thread_goes_back(durable_dsn, db):
    """Only the one whose thread runs is left behind."""
    gate, returned = Gate(), []
    machine = blocking(gate, returned)
    async with running(durable_dsn, drain_timeout=0.05, thread_limit=1) as run:
        first = await run.insert(machine, args={})
        await gate.wait_entered()
        second = await run.insert(machine, args={})
        await run.events.wait(StepStarted, id=second)
    columns = "status::text, attempt, interruptions"
    assert [db.row(each, columns) for each in (first, second)] == [("executing", 0, 0), ("runnable", 0, 1)]
    gate.open()


async def test_a_thread_may_ask_whether_it_is_cancelled(durable_dsn, db):
    """Of its own accord, as in any thread of Trio's: its claim is lost, and so is its outcome."""
    gate = Gate()

    @da.job(name="polite")
    def polite(args: dict) -> None:
        trio.from_thread.run_sync(gate.arrive)
        while True:
            trio.from_thread.check_cancelled()
            threading.Event().wait(0.01)

    async with running(durable_dsn, **BEATS) as run:
        number = await run.insert(polite, args={})
        await gate.wait_entered()
        db.execute(END, number)
        await run.events.wait(ClaimLost, id=number)
        await until(lambda: not run.engine._node.claims.all())
    assert db.row(number, "status::text, last_error") == ("failed", "ended")


async def test_a_left_thread_keeps_its_key_while_the_engine_stops(durable_dsn, db):
    """The heartbeat goes on, and the key's lock stays, until the session is closed: last of all."""
    gate, returned = Gate(), []
    async with running(durable_dsn, drain_timeout=0, **BEATS) as run:
        number = await run.insert(blocking(gate, returned), args={}, partition_key="k")
        await gate.wait_entered()
        node = run.engine._node
        [active] = node.claims.all()
        await run.engine.stop()
        assert node.threads.is_left(active.claim)
        assert active.state is ClaimState.ABANDONED
        assert node.claims.live() == [active]
    assert db.row(number, "status::text") == ("executing",)
    gate.open()


async def test_a_crash_of_the_step_pool_leaves_no_thread(durable_dsn, db, monkeypatch):
    """The engine goes on, so the task waits for its thread, and releases the row. A later stop ends in time."""
    gate, second, returned = Gate(), Gate(), list[int]()
    real, bugs = Dispatcher.on_exited, [AssertionError("a bug")]

    def buggy(self: Dispatcher, task_slice: TaskSlice, now: float) -> None:
        real(self, task_slice, now)
        if bugs:
            raise bugs.pop()

    @da.job(name="quick")
    async def quick(args: dict) -> None:
        await trio.sleep(0)

    @da.job(name="again")
    def again(args: dict) -> None:
        second.wait_in_thread()

    async with running(durable_dsn, drain_timeout=0.05, **BEATS) as run:
        number = await run.insert(blocking(gate, returned), args={}, partition_key="k")
        await gate.wait_entered()
        [active] = active_claims(run)
        monkeypatch.setattr(Dispatcher, "on_exited", buggy)
        await run.insert(quick, args={})
        await until(lambda: not bugs)
        gate.open()
        row = await run.ended(number)
        assert active.state is ClaimState.GONE
        assert (row.status, row.attempt) == ("done", 1)
        assert restarts_of(run, "steps") == 1
        left = await run.insert(again, args={})
        await second.wait_entered()
        with trio.fail_after(PATIENCE):
            await run.engine.stop()
    assert db.row(left, "status::text") == ("executing",)
    second.open()


async def test_a_thread_that_begins_after_the_others_were_left_is_left_too():
    """A second signal leaves threads; then Postgres refuses an outcome, and its `handle` begins."""
    threads, gate = Threads(2), Gate()

    async def run(claim: Claim, scope: trio.CancelScope) -> None:
        with scope:
            await threads.run(claim, gate.wait_in_thread)

    scopes = [trio.CancelScope() for _ in range(2)]
    claims = [claim(None, number) for number in range(2)]
    with trio.fail_after(PATIENCE):
        async with trio.open_nursery() as nursery:
            for count, (each, scope) in enumerate(zip(claims, scopes, strict=True), 1):
                nursery.start_soon(run, each, scope)
                await gate.wait_entered(count)
                assert not threads.is_left(each)
                scope.cancel()
                threads.leave()
                assert threads.is_left(each)
    gate.open()
    await until(lambda: not any(threads.is_left(each) for each in claims))
