"""A client belongs to one Trio run: other runs, asyncio and `def` steps."""

from __future__ import annotations

import asyncio
import threading
from functools import partial

import durable_actors as da
import pytest
import trio
from tests.engine.kit import running


def in_second_run(call, *args):
    """Run it in a Trio run of its own, in a thread that knows nothing of ours."""
    found: list[object] = []

    def run():
        try:
            found.append(trio.run(call, *args))
        except BaseException as exc:
            found.append(exc)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(30)
    return found[0]


async def test_another_run_is_refused_before_a_connection_is_touched(durable_dsn, nothing):
    async with running(durable_dsn) as run:
        client = run.engine.client
        calls = [
            partial(da.insert, nothing, args={}),
            partial(client.insert_many, nothing, [{"args": {}}]),
            partial(da.signal, 1, "x"),
            partial(da.signal_with_start, nothing, key="k", name="x", args={}),
            partial(da.result, 1),
            partial(da.result, "key"),
            partial(da.inspect, 1),
            run.engine.stop,
            run.engine.wait_stopped,
        ]
        for call in calls:
            error = await trio.to_thread.run_sync(in_second_run, call)
            assert isinstance(error, da.DurableError), (call, error)
            assert "another Trio run" in str(error)
            assert "trio.from_thread.run" in str(error)
            assert "durable_actors.sync" in str(error)
        assert (await run.run(nothing, args={"a": 1})).result == {"a": 1}


async def test_an_engine_is_stopped_from_any_thread(durable_dsn):
    async with running(durable_dsn) as run:
        await trio.to_thread.run_sync(in_second_run, run_sync_in_trio, run.engine.request_stop)
        with trio.fail_after(30):
            await run.engine.wait_stopped()


async def run_sync_in_trio(call):
    call()


async def test_each_run_means_its_own_client(durable_dsn, nothing):
    async def other():
        async with da.open_client(durable_dsn, name="other"):
            return await da.insert(nothing, args={"from": "other"})

    async with running(durable_dsn) as run:
        number = await trio.to_thread.run_sync(in_second_run, other)
        assert isinstance(number, int)
        assert (await run.ended(number)).result == {"from": "other"}


async def test_a_connection_of_the_second_run_is_used_there(durable_dsn, nothing):
    """Nothing of the engine is touched but its feeder's wake-up, which is carried over."""

    async def other(engine):
        async with await da.TrioConnection.connect(durable_dsn) as conn, conn.transaction():
            return await engine.client.insert(nothing, args={"n": 1}, conn=conn)

    async with running(durable_dsn, poll_interval=60, max_poll_interval=60) as run:
        number = await trio.to_thread.run_sync(in_second_run, other, run.engine)
        assert isinstance(number, int)
        assert (await run.ended(number)).result == {"n": 1}


async def test_a_def_step_reaches_its_engine(durable_dsn, nothing):
    """By da.sync with its context, by trio.from_thread, and from a Trio run of its own."""
    found: dict[str, object] = {}

    class Parent(da.Machine):
        @da.step
        def start(self, ctx: da.Context):
            found["sync"] = da.sync.insert(ctx, nothing, args={"n": 1})
            found["child"] = da.sync.start_child(ctx, nothing, key="a", args={"n": 2})
            found["thread"] = trio.from_thread.run(partial(da.insert, nothing, args={"n": 3}))
            da.sync.signal(ctx, ctx.id, "one")

            async def nested():
                found["nested"] = await da.insert(nothing, args={"n": 4})
                found["nested ctx"] = await ctx.insert(nothing, args={"n": 5})
                await da.signal(ctx.id, "two")
                await ctx.signal(ctx.id, "three")
                found["inspected"] = (await da.inspect(ctx.id)).status
                found["inbox"] = [signal.name async for signal in ctx.iter_signals()]
                with pytest.raises(trio.TooSlowError):
                    await da.result(ctx.id, timeout=0.01)
                with trio.move_on_after(0.01) as scope:
                    await da.result(ctx.id)
                found["cancelled"] = scope.cancelled_caught
                with pytest.raises(da.NoTarget):
                    await da.signal(10**9, "x")

            trio.run(nested)
            return da.Done("done")

    async with running(durable_dsn) as run:
        ended = await run.run(Parent)
        assert ended.result == "done", ended.last_error
        for name, n in [("sync", 1), ("child", 2), ("thread", 3), ("nested", 4), ("nested ctx", 5)]:
            assert (await run.ended(found[name])).result == {"n": n}, name
        assert found["inspected"] == "executing"
        assert found["inbox"] == ["one", "two", "three"]
        assert found["cancelled"] is True


async def test_a_thread_of_a_def_steps_own(durable_dsn, nothing):
    """A ThreadPoolExecutor's thread has no Trio of its own; the context knows the way."""

    @da.job
    def spreads(args: dict, ctx: da.Context):
        found: list[int | None] = []
        thread = threading.Thread(target=lambda: found.append(da.sync.insert(ctx, nothing, args={"n": 1})))
        thread.start()
        thread.join()
        return found

    async with running(durable_dsn) as run:
        ended = await run.run(spreads, args={})
        [number] = ended.result
        assert (await run.ended(number)).result == {"n": 1}


async def test_plain_calls_are_not_for_tasks(durable_dsn, nothing):
    @da.job(max_attempts=1)
    async def mixes(args: dict, ctx: da.Context):
        da.sync.insert(ctx, nothing, args={})

    async with running(durable_dsn) as run:
        ended = await run.run(mixes, args={})
        assert "await ctx.insert" in (ended.last_error or "")


def test_asyncio_is_told_of_aio(nothing):
    async def opens(opening):
        async with opening:
            pass

    for call in (
        partial(da.insert, nothing, args={}),
        partial(da.signal, 1, "x"),
        partial(da.result, 1),
        partial(da.inspect, 1),
        lambda: opens(da.open_client("host=nowhere")),
        lambda: opens(da.open_engine(dsn="host=nowhere")),
        partial(da.serve, dsn="host=nowhere"),
    ):
        with pytest.raises(da.DurableError, match=r"durable_actors\.aio"):
            asyncio.run(call())


def test_no_event_loop_at_all(nothing):
    with pytest.raises(da.DurableError, match=r"trio\.run"):
        da.insert(nothing, args={}).send(None)


async def test_asyncio_in_a_def_step(durable_dsn, nothing):
    @da.job(max_attempts=1)
    def mixes(args: dict):
        async def main():
            await da.insert(nothing, args={})

        asyncio.run(main())

    async with running(durable_dsn) as run:
        ended = await run.run(mixes, args={})
        assert "durable_actors.aio" in (ended.last_error or "")


async def test_a_carried_call_ends_with_the_engines_run(durable_dsn, nothing):
    """Its run is over: the caller is told, and does not wait for ever."""
    waiting = threading.Event()
    inner: list[object] = []

    def asks(client):
        async def main():
            number = await client.insert(nothing, args={})
            with trio.fail_after(30):
                await client.result(number)

        try:
            trio.run(main)
        except BaseException as exc:
            inner.append(exc)
        waiting.set()

    def cancelled_run():
        async def main():
            async with da.open_client(durable_dsn, name="short") as client:
                client.home.adopt()
                with trio.move_on_after(0.2):
                    await trio.to_thread.run_sync(asks, client, abandon_on_cancel=True)

        trio.run(main)

    await trio.to_thread.run_sync(cancelled_run)
    assert await trio.to_thread.run_sync(waiting.wait, 30)
    assert isinstance(inner[0], da.DurableError)
