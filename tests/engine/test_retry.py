"""`retry` of a failed instance: inbox, handed signals, dedup keys and children are kept. Only `Done` drops them."""

from __future__ import annotations

from typing import Any

import durable_actors as da
import pytest
from durable_actors._store.signal import plan_signal, send_signals
from tests.engine.kit import Db, Gate, parked, running
from tests.kit import PATIENCE
from tests.store.kit import connect
from tests.support.commands import retry_instance

pytestmark = pytest.mark.usefixtures("registry")

State = dict[str, Any]


async def retried(dsn: str, number: int) -> None:
    async with connect(dsn) as conn:
        assert await retry_instance(conn, "durable", number)


@pytest.mark.parametrize("how", ["stop", "raise", "handle"])
async def test_a_retried_step_is_handed_the_payment_again(durable_dsn, how: str):
    broken = True

    class Ships(da.Machine[State]):
        @da.step
        async def start(self, ctx):
            return da.Await("paid", then=self.ship)

        @da.step
        async def ship(self, ctx):
            if broken and how == "stop":
                return da.Stop("the depot is closed")
            if broken:
                raise RuntimeError("the depot is closed")
            return da.Done([[s.payload for s in ctx.awaited], [s.name for s in ctx.signals]])

        async def handle(self, error, ctx):
            if how == "handle":
                raise RuntimeError("so is the office")
            return da.Stop(error)

    async with running(durable_dsn) as run:
        number = await run.insert(Ships)
        await parked(run, number)
        await da.signal(number, "note")
        await da.signal(number, "paid", 100)
        assert (await run.ended(number)).status == "failed"
        with pytest.raises(da.NoTarget):
            await da.signal(number, "paid", 1)
        broken = False
        await retried(durable_dsn, number)
        assert await da.result(number, timeout=PATIENCE) == [[100], ["note", "paid"]]


async def test_a_webhook_that_is_delivered_again_after_a_retry_is_recognised(durable_dsn):
    """Also when its first delivery was consumed long before the failure."""
    broken = True

    class Ledger(da.Machine[State]):
        @da.step
        async def start(self, ctx):
            cents = ctx.state["cents"] + sum(s.payload for s in ctx.awaited if s.name == "paid")
            if any(s.name == "closed" for s in ctx.awaited):
                return da.Stop("no") if broken else da.Done(cents)
            return da.Await(["paid", "closed"], {"cents": cents}, consume=ctx.awaited)

    async with running(durable_dsn) as run:
        number = await run.insert(Ledger, state={"cents": 0})
        await parked(run, number)
        await da.signal(number, "paid", 7, dedup_key="evt-1")
        await parked(run, number, 2)
        await da.signal(number, "closed", dedup_key="evt-2")
        assert (await run.ended(number)).status == "failed"
        broken = False
        async with connect(durable_dsn) as conn, conn.transaction():
            # In one transaction, so that it cannot run before the deliveries.
            assert await retry_instance(conn, "durable", number)
            for name, payload, key in (("paid", 7, "evt-1"), ("closed", None, "evt-2")):
                [sent] = await send_signals(conn, "durable", [plan_signal(number, name, payload, key)])
                assert sent.outcome == "duplicate"
        assert await da.result(number, timeout=PATIENCE) == 7


async def test_a_retried_parent_finds_its_children(durable_dsn):
    broken = True

    @da.job(name="kid")
    async def kid(args: int) -> int:
        return args

    class Parent(da.Machine[State]):
        @da.step
        async def start(self, ctx):
            return da.ScheduleChildren(self.add, [da.Child(kid, args=n) for n in (1, 2)])

        @da.step
        async def add(self, ctx):
            return da.Stop("no") if broken else da.Done([child.result for child in ctx.children])

    async with running(durable_dsn) as run:
        number = await run.insert(Parent)
        assert (await run.ended(number)).status == "failed"
        broken = False
        await retried(durable_dsn, number)
        assert await da.result(number, timeout=PATIENCE) == [1, 2]


async def test_done_after_a_retry_drops_the_inbox(durable_dsn, db: Db):
    gate = Gate()

    class M(da.Machine[State]):
        @da.step
        async def start(self, ctx):
            await gate.wait()
            return da.Stop("no") if gate.entered == 1 else da.Done()

    async with running(durable_dsn) as run:
        number = await run.insert(M)
        await gate.wait_entered()
        await da.signal(number, "a", dedup_key="1")
        gate.open()
        assert (await run.ended(number)).status == "failed"
        assert db.execute("select count(*) from durable.signals") == [(1,)]
        await retried(durable_dsn, number)
        await da.result(number, timeout=PATIENCE)
    assert db.execute("select count(*) from durable.signals") == [(0,)]
