"""`def` steps: they run in threads, which cannot be cancelled."""

from __future__ import annotations

import threading

import durable_actors as da
import pytest
from durable_actors.telemetry import ClaimLost, DrainStarted, Picked, StepCommitted, StepStarted
from tests.engine.engine_kit import Gate, running, until

pytestmark = pytest.mark.usefixtures("registry")

BEATS = {"lease_ttl": 60, "heartbeat_interval": 0.03}
END = (
    "update durable.gen_durable set status = 'failed', last_error = 'ended', finished_at = now(), locked_by = null,"
    " lease_expires_at = null, claim_id = null where id = %s"
)


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
        [held] = run.engine._node.leases.everything()
        await until(lambda: held.lost)
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


async def test_a_drain_waits_for_a_thread(durable_dsn, db):
    """Its row is never released early: another node would run it beside the thread."""
    gate = Gate()

    @da.job
    def stuck(args: dict, ctx: da.Context[dict]):
        if not ctx.attempt:
            gate.wait_in_thread()
        return "done"

    async with running(durable_dsn, drain_timeout=0.05, **BEATS) as run:
        number = await run.insert(stuck, args={})
        await gate.wait_entered()
        run.engine.request_stop()
        await run.events.wait(DrainStarted)
        for _ in range(6):  # three drain_timeouts later: still claimed, still renewed
            [lease] = db.row(number, "lease_expires_at")
            await db.wait(
                "select lease_expires_at > %s from durable.gen_durable where id = %s", lease, number
            )
        assert db.row(number, "status::text, attempt") == ("executing", 0)
        gate.open()
    assert db.row(number, "status::text, attempt, crashes") == ("runnable", 1, 0)
