"""Waiting for results, and looking at instances."""

from __future__ import annotations

from datetime import timedelta

import attrs
import durable_actors as da
import pytest
import trio.testing
from tests.engine.engine_kit import QUIET, Gate, running

pytestmark = pytest.mark.usefixtures("registry")


@attrs.frozen
class Receipt:
    total: int


def echo():
    class Echo(da.Machine, name="echo"):
        @da.step
        async def start(self, ctx):
            return da.Done(ctx.state["say"])

    return Echo


async def test_by_id_and_by_key(durable_dsn):
    M = echo()
    async with running(durable_dsn) as run:
        number = await run.insert(M, state={"say": {"total": 7}}, unique_key="order:1")
        assert await da.result(number, timeout=30) == {"total": 7}
        assert await da.result("order:1", timeout=30) == {"total": 7}
        assert await da.result(b"order:1", timeout=30) == {"total": 7}
        assert await da.result(number, type=Receipt) == Receipt(7)
        with pytest.raises(da.StateError, match="total"):
            await da.result(await run.insert(M, state={"say": {"total": "x"}}), type=Receipt, timeout=30)
        assert (await da.inspect("order:1")).id == (await da.inspect(number)).id == number


async def test_nobody_there(durable_dsn):
    echo()
    async with running(durable_dsn):
        for target in (404, "nobody", b"nobody"):
            with pytest.raises(da.NoTarget, match=r"404|nobody"):
                await da.result(target, timeout=30)
            with pytest.raises(da.NoTarget, match=r"404|nobody"):
                await da.inspect(target)


@pytest.mark.parametrize("timeout", [0.02, timedelta(milliseconds=20), 0])
async def test_too_slow(durable_dsn, timeout):
    M = echo()
    async with running(durable_dsn, queues={}) as run:
        number = await run.insert(M, state={"say": 1})
        with pytest.raises(trio.TooSlowError):
            await da.result(number, timeout=timeout)
        with pytest.raises(da.ConfigError, match="timeout"):
            await da.result(number, timeout=-1)


async def test_failed(durable_dsn):
    class M(da.Machine):
        @da.step
        async def start(self, ctx):
            return da.Stop(ValueError("no stock"))

    async with running(durable_dsn) as run:
        number = await run.insert(M)
        with pytest.raises(da.InstanceFailed, match="no stock") as caught:
            await da.result(number, timeout=30)
        assert caught.value.id == number


async def test_many_waiters_of_many_instances(durable_dsn):
    """One of them looks for all; it passes the lead on when it leaves or is cancelled."""
    gate, M, found = Gate(), echo(), []

    class Slow(da.Machine):
        @da.step
        async def start(self, ctx):
            await gate.wait()
            return da.Done("slow")

    async with running(durable_dsn, **QUIET) as run:
        slow = await run.insert(Slow)
        await gate.wait_entered()

        async def wait(number: int) -> None:
            found.append(await da.result(number, timeout=30))

        async with trio.open_nursery() as nursery:
            with trio.CancelScope() as leader:
                async with trio.open_nursery() as inner:
                    inner.start_soon(wait, slow)  # it leads
                    await trio.testing.wait_all_tasks_blocked(0.02)
                    for n in range(20):
                        nursery.start_soon(wait, await run.insert(M, state={"say": n}))
                    leader.cancel()
            nursery.start_soon(wait, slow)
            nursery.start_soon(wait, slow)
            with trio.fail_after(30):
                while len(found) < 20:
                    await trio.sleep(0.005)
            gate.open()
    assert sorted(each for each in found if each != "slow") == list(range(20))
    assert found.count("slow") == 2


async def test_ended_elsewhere(durable_dsn):
    """A client without an engine polls; it needs no hint."""
    M = echo()
    async with da.open_client(durable_dsn, name="web") as web, running(durable_dsn, name="worker"):
        number = await web.insert(M, state={"say": "hello"})
        assert number is not None
        assert await web.result(number, timeout=30) == "hello"


async def test_an_instance_as_it_runs(durable_dsn):
    gate = Gate()

    class M(da.Machine, queue="q"):
        @da.step
        async def start(self, ctx):
            await gate.wait()
            return da.Done()

    async with running(durable_dsn) as run:
        number = await run.insert(M, state={"a": [1]}, priority=2)
        await gate.wait_entered()
        row = await da.inspect(number)
        assert (row.status, row.locked_by, row.queue, row.priority) == (
            "executing",
            run.engine.incarnation,
            "q",
            2,
        )
        assert row.state == {"a": [1]}
        assert row.lease_expires_at is not None
        assert row.lease_expires_at > row.inserted_at
        assert row.finished_at is None
        gate.open()
