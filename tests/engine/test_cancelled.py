"""An instance that was cancelled, as callers and its parent see it. The tests cancel it by the store's commit."""

from __future__ import annotations

import asyncio

import durable_actors as da
import psycopg
import pytest
import trio
from durable_actors._engine.committing.transition import cancellation
from durable_actors._store.commit import commit_outcomes
from tests.engine.kit import PATIENCE, make_node, pick, running

QUEUE = "nobody's"
"""No engine serves it: the tests claim from it themselves."""


@pytest.fixture
def job(registry):
    @da.job(queue=QUEUE)
    async def job(args: dict) -> dict:
        return args

    return job


async def cancel(dsn: str, reason: str | None = "not wanted") -> list[int]:
    """Claim everything in the queue, and commit that it is cancelled."""
    async with make_node(dsn) as node:
        claims = await pick(node, queue=QUEUE)
        assert claims, "an engine serves the queue"
        async with node.pool.acquire(node.lane("commit")) as conn:
            changes = [cancellation(claim, reason) for claim in claims]
            flushed = await commit_outcomes(conn, "durable", changes, accept_late=False)
    return sorted(flushed.committed)


async def test_result_raises(durable_dsn, job):
    async with da.open_client(durable_dsn) as client:
        number = await client.insert(job, args={}, unique_key="k")
        assert await cancel(durable_dsn) == [number]
        for target in (number, "k"):
            with pytest.raises(da.InstanceCancelled, match=f"instance {number} was cancelled: not wanted"):
                await client.result(target, timeout=PATIENCE)
        with pytest.raises(da.InstanceFailed) as caught:
            await client.result(number)
        assert (caught.value.id, caught.value.reason) == (number, "not wanted")
        with pytest.raises(da.NoTarget):
            await client.signal(number, "go")
        assert [each.id for each in await client.list_instances(da.Filter(status="cancelled"))] == [number]


async def test_an_engine_tells_those_who_wait(durable_dsn, job):
    """The waiter is there before the end."""
    async with running(durable_dsn, queues={"default": 1}) as run:
        number = await run.insert(job, args={})

        async def wait() -> None:
            with pytest.raises(da.InstanceCancelled):
                await run.engine.client.result(number, timeout=PATIENCE)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait)
            await cancel(durable_dsn)


async def test_on_callers_connections(durable_dsn, job):
    async with da.open_client(durable_dsn) as client:
        number = await client.insert(job, args={})
        await cancel(durable_dsn, None)

    def in_a_thread() -> None:
        with psycopg.connect(durable_dsn) as conn:
            with pytest.raises(da.InstanceCancelled, match="no reason was given"):
                da.sync.result(conn, number, timeout=PATIENCE)
            with pytest.raises(da.NoTarget):
                da.sync.signal(conn, number, "go")

    async def on_asyncio() -> None:
        async with await psycopg.AsyncConnection.connect(durable_dsn) as conn:
            with pytest.raises(da.InstanceCancelled, match="no reason was given"):
                await da.aio.result(conn, number, timeout=PATIENCE)
            with pytest.raises(da.NoTarget):
                await da.aio.signal(conn, number, "go")

    await trio.to_thread.run_sync(in_a_thread)
    await trio.to_thread.run_sync(lambda: asyncio.run(on_asyncio()))


async def test_retry(durable_dsn, job):
    async with da.open_client(durable_dsn, name="caller") as client:
        number = await client.insert(job, args={"n": 1}, unique_key="k")
        await cancel(durable_dsn)
        assert await client.retry("k") == number
        async with running(durable_dsn, queues={QUEUE: 1}):
            assert await client.result(number, timeout=PATIENCE) == {"n": 1}


@pytest.mark.parametrize(("join", "cancelled"), [("all", 2), ("any_failed", 1), (1, 1)])
async def test_the_parent_counts_it_as_ended(durable_dsn, registry, job, join, cancelled):
    @da.job(queue="late", name="late")
    async def late(args: dict) -> None: ...

    class Parent(da.Machine[dict]):
        @da.step(initial=True)
        async def begin(self, ctx: da.Context[dict]) -> da.Outcome:
            children = [da.Child(job, args={}), da.Child(job if cancelled == 2 else late, args={})]
            return da.ScheduleChildren(self.end, children, join=join)

        @da.step
        async def end(self, ctx: da.Context[dict]) -> da.Outcome:
            errors = [child.last_error for child in ctx.children if child.status == "cancelled"]
            return da.Done({"counts": dict(ctx.children_counts), "errors": errors})

    async with running(durable_dsn, machines=[Parent, job, late], queues={"default": 2}) as run:
        parent = await run.insert(Parent, state={})
        await run.events.wait(da.telemetry.StepCommitted, id=parent, status="awaiting_children")
        assert len(await cancel(durable_dsn)) == cancelled
        rest = {} if cancelled == 2 else {"runnable": 1}
        assert await run.engine.client.result(parent, timeout=PATIENCE) == {
            "counts": {"cancelled": cancelled} | rest,
            "errors": ["not wanted"] * cancelled,
        }
