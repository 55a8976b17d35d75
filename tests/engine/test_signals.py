"""Signals end to end: in transactions, in batches, with a start, from steps; and what they must not hold up."""

from __future__ import annotations

import asyncio
from typing import Any

import durable_actors as da
import psycopg
import pytest
import trio
from durable_actors import aio, sync
from tests.engine.kit import QUIET, REAP, Db, Gate, collector, parked, running
from tests.kit import PATIENCE

pytestmark = pytest.mark.usefixtures("registry")

State = dict[str, Any]


async def test_in_a_trio_transaction(durable_dsn):
    async with running(durable_dsn, **QUIET) as run:
        number = await run.insert(collector(), unique_key="k")
        await parked(run, number)
        async with await da.TrioConnection.connect(durable_dsn) as conn:
            await da.signal(number, "n", 1, conn=conn)
            await da.signal("k", "stop", conn=conn)
            assert (await da.inspect(number)).status == "awaiting_signal", "visible with the commit"
            await conn.rollback()
            assert await da.signal_many([{"target": "k", "name": "n", "payload": 2}], conn=conn) == ["sent"]
            await da.signal("k", "stop", conn=conn)
            with pytest.raises(da.NoTarget):
                await da.signal("unknown", "stop", conn=conn)
            await conn.commit()
        # No poll within a minute: the commit itself has poked.
        assert await da.result(number, timeout=PATIENCE) == [2]


async def test_in_a_transaction_of_plain_psycopg(durable_dsn):
    async with running(durable_dsn) as run:
        number = await run.insert(collector(), unique_key=b"\xff")
        await parked(run, number)

        def caller() -> None:
            with psycopg.connect(durable_dsn) as conn:
                conn.execute("create temporary table mine (x int)")
                sync.signal(conn, number, "n", {"a": 1})
                sync.signal(conn, number, "n", {"a": 2}, dedup_key="d")
                sync.signal(conn, number, "n", {"a": 3}, dedup_key="d")
                sync.signal(conn, b"\xff", "stop")
                with pytest.raises(da.NoTarget):
                    sync.signal(conn, 10**9, "n")

        await trio.to_thread.run_sync(caller)
        assert await da.result(number, timeout=PATIENCE) == [{"a": 1}, {"a": 2}]


async def test_in_a_transaction_of_asyncio(durable_dsn):
    async with running(durable_dsn) as run:
        number = await run.insert(collector(), unique_key="k")
        await parked(run, number)

        async def caller() -> None:
            async with await psycopg.AsyncConnection.connect(durable_dsn) as conn:
                await aio.signal(conn, "k", "n", 1)
                await aio.signal(conn, number, "stop")
                with pytest.raises(da.NoTarget):
                    await aio.signal(conn, "unknown", "n")

        await trio.to_thread.run_sync(lambda: asyncio.run(caller()))
        assert await da.result(number, timeout=PATIENCE) == [1]


async def test_an_open_transaction_holds_up_its_own_target_only(durable_dsn):
    """H49: the caller holds the row of a running instance; the others' outcomes are committed meanwhile."""
    gate = Gate()

    class Runs(da.Machine[State]):
        @da.step
        async def start(self, ctx):
            if ctx.state.get("held"):
                await gate.wait()
            return da.Next(self.last)

        @da.step
        async def last(self, ctx):
            return da.Done([s.payload for s in ctx.signals])

    async with running(durable_dsn) as run, await da.TrioConnection.connect(durable_dsn) as conn:
        held = await run.insert(Runs, state={"held": True})
        await gate.wait_entered()
        await da.signal(held, "n", 5, conn=conn)
        gate.open()
        for _ in range(3):
            assert (await run.run(Runs)).status == "done"
        assert (await da.inspect(held)).step == "start"
        await conn.commit()
        assert await da.result(held, timeout=PATIENCE) == [5]


@pytest.mark.slow
async def test_signals_that_wait_for_a_lock_do_not_use_up_the_connections(durable_dsn):
    """Twelve senders wait for a row that a caller holds; inserts, inboxes and results go on."""
    machine = collector()
    async with running(durable_dsn) as run, await da.TrioConnection.connect(durable_dsn) as conn:
        locked, other = await run.insert(machine), await run.insert(machine)
        await parked(run, locked)
        await parked(run, other)
        await da.signal(locked, "n", "caller", conn=conn)
        async with trio.open_nursery() as nursery:
            for n in range(12):
                nursery.start_soon(da.signal, locked, "n", n)
            await da.signal(other, "stop")
            assert await da.result(other, timeout=PATIENCE) == []
            await conn.commit()
        await da.signal(locked, "stop")
        found = await da.result(locked, timeout=PATIENCE)
    assert found[0] == "caller"
    assert sorted(found[1:]) == list(range(12))


async def test_signal_many_tells_what_became_of_each(durable_dsn):
    async with running(durable_dsn, **QUIET) as run:
        number = await run.insert(collector(), unique_key="k")
        await parked(run, number)
        found = await da.signal_many(
            [
                {"target": number, "name": "n", "payload": 1, "dedup_key": "d"},
                {"target": "k", "name": "n", "payload": 2, "dedup_key": "d"},
                {"target": 10**9, "name": "n"},
                {"target": "k", "name": "stop"},
            ]
        )
        assert found == ["sent", "duplicate", "no_target", "sent"]
        assert await da.result(number, timeout=PATIENCE) == [1]
        assert await da.signal_many([]) == []
        with pytest.raises(da.ConfigError, match="target and name"):
            await da.signal_many([{"name": "n"}])  # type: ignore[typeddict-item]
        with pytest.raises(da.ConfigError, match="target and name"):
            await da.signal_many([{"target": 1, "name": "n", "nmae": 1}])  # type: ignore[typeddict-unknown-key]


async def test_bad_signals_are_refused_before_anything_is_sent(durable_dsn, db: Db):
    async with running(durable_dsn) as run:
        number = await run.insert(collector())
        for payload in (object(), float("inf"), "\0", "x" * 1_000_001):
            with pytest.raises(da.StateError, match="payload of signal 'n'"):
                await da.signal(number, "n", payload)
        for target, name in ((number, ""), (number, "x" * 501), (0, "n"), (True, "n"), (None, "n")):
            with pytest.raises(da.ConfigError):
                await da.signal(target, name)  # type: ignore[arg-type]
        with pytest.raises(da.NoTarget, match="unique key 'nobody'"):
            await da.signal("nobody", "n")
    assert db.execute("select count(*) from durable.signals") == [(0,)]


async def test_signal_with_start_delivers_or_starts(durable_dsn):
    machine = collector()
    async with running(durable_dsn, **QUIET) as run:
        first = await da.signal_with_start(machine, key="k", name="n", payload=1, state={"a": 1})
        await parked(run, first)
        again = await da.signal_with_start(machine, key="k", name="n", payload=2, state={"a": 2})
        assert (await da.inspect(first)).state == {"a": 1}
        assert await da.signal_with_start(machine, key="k", name="stop") == first == again
        assert await da.result(first, timeout=PATIENCE) == [1, 2]
        new = await da.signal_with_start(machine, key="k", name="stop")
        assert new != first
        assert await da.result(new, timeout=PATIENCE) == []
        with pytest.raises(da.ConfigError, match="key="):
            await da.signal_with_start(machine, key="k", name="n", unique_key="k")


async def test_twenty_callers_start_one_instance(durable_dsn, db: Db):
    machine = collector()
    found: set[int] = set()
    async with running(durable_dsn) as run:

        async def call(n: int) -> None:
            found.add(await da.signal_with_start(machine, key="k", name="n", payload=n))

        async with trio.open_nursery() as nursery:
            for n in range(20):
                nursery.start_soon(call, n)
        [number] = found
        await parked(run, number)
        await da.signal("k", "stop")
        assert sorted(await da.result(number, timeout=PATIENCE)) == list(range(20))
    assert db.execute("select count(*) from durable.gen_durable") == [(1,)]


async def test_a_full_inbox_is_paged_and_slows_nobody(durable_dsn):
    class Pages(da.Machine[State]):
        @da.step
        async def start(self, ctx):
            if not ctx.awaited:
                return da.Await("stop")
            numbers = [s.payload async for s in ctx.iter_signals() if s.name == "n"]
            more = [ctx.more_signals, len(ctx.signals), len(ctx.awaited)]
            return da.Done([more, numbers == list(range(10_000))])

    machine = collector()
    async with running(durable_dsn) as run:
        full = await run.insert(Pages)
        await parked(run, full)
        await da.signal_many([{"target": full, "name": "n", "payload": n} for n in range(10_000)])
        await da.signal(full, "stop")
        others = [await run.insert(machine, schedule_in=0.05) for _ in range(20)]
        await da.signal_many([{"target": each, "name": "stop"} for each in others])
        for each in others:
            assert await da.result(each, timeout=PATIENCE) == []
        assert await da.result(full, timeout=PATIENCE) == [[True, 1000, 1], True], (
            "what it awaited lay beyond the page"
        )


@pytest.mark.parametrize("count", [999, 1000, 1001])
async def test_more_signals_tells_whether_the_list_is_whole(durable_dsn, count: int):
    class Counts(da.Machine[State]):
        @da.step
        async def start(self, ctx):
            return da.Done([ctx.more_signals, len(ctx.signals)])

    async with running(durable_dsn, **QUIET) as run:
        number = await run.insert(Counts, schedule_in=1)
        await da.signal_many([{"target": number, "name": "n"}] * count)
        assert await da.result(number, timeout=PATIENCE) == [count > 1000, min(count, 1000)]


async def test_a_step_signals_once_however_often_a_crash_runs_it_again(durable_dsn, db: Db):
    machine = collector()

    class Sender(da.Machine[State]):
        @da.step
        async def start(self, ctx):
            await ctx.signal(ctx.state["to"], "n", "first")
            await ctx.signal("k", "n", "second")
            if ctx.attempt < 2:
                db.execute(REAP, ctx.id)
                await trio.sleep_forever()
            if ctx.attempt == 2:
                raise RuntimeError("no more")
            return da.Next(self.second)

        @da.step
        async def second(self, ctx):
            await ctx.signal("k", "n", "first")
            return da.Done()

        async def handle(self, error, ctx):
            await ctx.signal("k", "n", "handle")
            return da.Next(self.second)

    async with running(durable_dsn, heartbeat_interval=0.05) as run:
        number = await run.insert(machine, unique_key="k")
        await parked(run, number)
        assert (await run.run(Sender, state={"to": number})).status == "done"
        await da.signal(number, "stop")
        assert await da.result(number, timeout=PATIENCE) == [
            "first",
            "second",
            "handle",
            "first",
        ]


async def test_a_run_that_was_handed_more_sends_nothing_twice(durable_dsn, db: Db):
    """Its partner has answered what the first run, which crashed, had sent: the second run is handed that, too."""

    class Sender(da.Machine[State]):
        @da.step
        async def start(self, ctx):
            return da.Await("a", then=self.work)

        @da.step
        async def work(self, ctx):
            for received in ctx.awaited:
                await ctx.signal("k", "n", received.payload)
            if ctx.attempt == 0:
                await da.signal(ctx.id, "a", 2)
                db.execute(REAP, ctx.id)
                await trio.sleep_forever()
            return da.Done()

    async with running(durable_dsn, heartbeat_interval=0.05) as run:
        number = await run.insert(collector(), unique_key="k")
        sender = await run.insert(Sender)
        await parked(run, number)
        await da.signal(sender, "a", 1)
        await run.ended(sender)
        await da.signal(number, "stop")
        assert await da.result(number, timeout=PATIENCE) == [1, 2]


async def test_a_server_that_awaits_in_one_step_answers_every_request(durable_dsn):
    """One visit, many wakes: an answer for each, none swallowed as a repetition."""

    class Server(da.Machine[State]):
        @da.step
        async def start(self, ctx):
            for request in ctx.awaited:
                await ctx.signal(request.payload, "answer", request.id)
            return da.Await("ask", consume=ctx.awaited)

    class Asks(da.Machine[State]):
        @da.step
        async def start(self, ctx):
            answers = [*ctx.state.get("answers", []), *(s.payload for s in ctx.awaited)]
            if len(answers) == 3:
                return da.Done(len(set(answers)))
            await ctx.signal(ctx.state["server"], "ask", ctx.id)
            return da.Await("answer", {**ctx.state, "answers": answers}, consume=ctx.awaited)

    async with running(durable_dsn) as run:
        server = await run.insert(Server)
        await parked(run, server)
        row = await run.run(Asks, state={"server": server})
    assert row.result == 3


async def test_a_context_is_of_no_use_after_its_step(durable_dsn):
    kept: list[da.Context[State]] = []
    machine = collector()

    class Keeps(da.Machine[State]):
        @da.step
        async def start(self, ctx):
            kept.append(ctx)
            return da.Done()

    async with running(durable_dsn) as run:
        number = await run.insert(machine)
        await run.run(Keeps)
        with pytest.raises(da.LeaseLost):
            await kept[0].signal(number, "n")
        with pytest.raises(da.LeaseLost):
            await kept[0].start_child(machine, key="k")
        with pytest.raises(da.LeaseLost):
            await kept[0].insert(machine)
