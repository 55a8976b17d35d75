"""Inserting: options, uniqueness, batches, transactions of the caller's own."""

from __future__ import annotations

import os
import subprocess
import textwrap

import attrs
import durable_actors as da
import psycopg
import pytest
import trio.testing
from durable_actors.telemetry import StepStarted
from tests.engine.kit import QUIET, running
from tests.support.sql import count_statements
from tests.warm import warm

pytestmark = pytest.mark.usefixtures("registry")

LIVE = ["runnable", "executing", "awaiting_signal"]


@attrs.frozen
class Order:
    n: int = 0


@pytest.fixture
def machine(registry):
    class Shop(da.Machine[Order], name="shop"):
        @da.step
        async def start(self, ctx: da.Context[Order]) -> da.Outcome:
            return da.Done(ctx.state.n)

        @da.step
        async def second(self, ctx: da.Context[Order]) -> da.Outcome:
            return da.Done("second")

    return Shop


@pytest.fixture
async def client(durable_dsn):
    """Nothing runs here: the rows stay as they were inserted."""
    async with da.open_client(durable_dsn) as client:
        yield client


async def test_defaults(client, machine):
    number = await client.insert(machine)
    row = await client.inspect(number)
    assert (row.machine, row.version, row.step, row.status) == ("shop", 1, "start", "runnable")
    assert (row.queue, row.priority, row.state, row.attempt, row.visit) == ("default", 0, {}, 0, 1)
    assert (row.partition_key, row.unique_key, row.parent_id, row.result) == (None, None, None, None)
    assert row.eligible_at == row.inserted_at


async def test_every_option(client, machine):
    number = await client.insert(
        machine,
        state=Order(3),
        step=machine.second,
        queue="other",
        priority=-4,
        partition_key="p",
        unique_key="u",
        schedule_in=90,
    )
    row = await client.inspect(number)
    assert (row.step, row.queue, row.priority, row.state) == ("second", "other", -4, {"n": 3})
    assert (row.partition_key, row.unique_key) == ("p", "u")
    assert (row.eligible_at - row.inserted_at).total_seconds() == 90


@pytest.mark.parametrize(
    "options",
    [
        {"state": {"n": "x"}},
        {"state": Order(1), "args": Order(2)},
        {"step": "nowhere"},
        {"queue": ""},
        {"priority": 10**6},
        {"unique_key": ""},
        {"unique_scope": ["runnable"]},
        {"unique_key": "k", "unique_scope": ["runnable", "done"]},
        {"schedule_in": -1},
        {"eligible_at": "tomorrow"},
        {"on_duplicate": "replace"},
        {"nonsense": 1},
    ],
)
async def test_a_bad_option_writes_nothing(client, machine, db, options):
    with pytest.raises((da.ConfigError, da.StateError)):
        await client.insert(machine, **options)
    with pytest.raises((da.ConfigError, da.StateError)):
        await client.insert_many(machine, [{}, options])
    assert db.execute("select count(*)::int from durable.gen_durable") == [(0,)]


async def test_a_key_is_occupied_while_its_instance_lives(durable_dsn, machine):
    async with running(durable_dsn, queues={}) as run:
        first = await run.insert(machine, unique_key="order:1")
        insert = run.engine.client.insert
        for options in ({}, {"on_duplicate": "raise"}):
            for key in ("order:1", b"order:1"):  # text or bytes: one key
                with pytest.raises(da.Duplicate, match="order:1") as caught:
                    await insert(machine, unique_key=key, **options)
                assert (caught.value.existing_id, caught.value.key) == (first, "order:1")
        assert await insert(machine, unique_key="order:1", on_duplicate="return") == first
        assert await insert(machine, unique_key="order:1", on_duplicate="skip") is None
        assert await run.engine.client.insert_many(machine, [{"unique_key": "order:1"}]) == [None]
    async with running(durable_dsn) as run:
        await run.ended(first)
        again = await run.insert(machine, unique_key="order:1")  # free again
        await run.ended(again)
        assert (await run.engine.client.inspect("order:1")).id == again  # the newest that had it


async def test_scopes(durable_dsn, machine):
    async with running(durable_dsn) as run:
        insert = run.engine.client.insert
        forever = [*LIVE, "done", "failed", "cancelled"]
        first = await run.insert(machine, unique_key="once", unique_scope=forever)
        assert (await run.ended(first)).status == "done"
        for options in ({"unique_scope": forever}, {}):  # ended, and still taken, whoever asks
            with pytest.raises(da.Duplicate):
                await insert(machine, unique_key="once", **options)
        for _ in range(2):  # an empty scope never occupies it
            assert await run.insert(machine, unique_key="never", unique_scope=[], schedule_in=600)


async def test_a_batch_keeps_its_order(client, machine):
    keys = ["b", "a", None, "b", "c", "a"]
    rows = [{"state": Order(n), "unique_key": key} for n, key in enumerate(keys)]
    ids = await client.insert_many(machine, rows)
    assert [number is None for number in ids] == [False, False, False, True, False, True]
    found = [number for number in ids if number is not None]
    assert found == sorted(found)
    assert [(await client.inspect(number)).state for number in found] == [{"n": n} for n in (0, 1, 2, 4)]
    again = await client.insert_many(machine, [{**row, "on_duplicate": "return"} for row in rows])
    assert [again[i] == ids[i] for i in (0, 1, 4)] == [True] * 3
    assert (again[3], again[5]) == (ids[0], ids[1])
    fresh = await client.insert_many(machine, [{"unique_key": "z", "on_duplicate": "return"}] * 3)
    assert len(set(fresh)) == 1  # the first of equal keys wins, and is known to the others


async def test_a_batch_is_one_statement(durable_dsn, client, machine):
    with count_statements(durable_dsn) as count:
        ids = await client.insert_many(machine, [{"unique_key": f"{n % 700}"} for n in range(1000)])
    assert sum(number is not None for number in ids) == 700
    assert count.calls("insert into") == 1, count
    assert count.calls("commit") == count.calls("begin") == 0, count


async def test_an_empty_batch(client, machine, durable_dsn):
    assert await client.insert_many(machine, []) == []
    async with await da.TrioConnection.connect(durable_dsn) as conn:
        assert await client.insert_many(machine, [], conn=conn) == []


async def test_racing_for_a_key(durable_dsn, machine):
    """Twenty at a time: one has it."""
    won = []
    async with da.open_client(durable_dsn) as client:

        async def one() -> None:
            won.append(await client.insert(machine, unique_key="k", on_duplicate="skip"))

        async with trio.open_nursery() as nursery:
            for _ in range(20):
                nursery.start_soon(one)
    assert sum(number is not None for number in won) == 1


# -- in the caller's transaction


async def count(dsn: str) -> int:
    with psycopg.connect(dsn) as conn:
        row = conn.execute("select count(*) from durable.gen_durable").fetchone()
        assert row is not None
        return row[0]


@pytest.mark.parametrize("commit", [True, False], ids=["committed", "rolled back"])
async def test_sync(durable_dsn, machine, commit):
    with psycopg.connect(durable_dsn) as conn:
        first = da.sync.insert(conn, machine, state=Order(1), unique_key="k")
        with pytest.raises(da.Duplicate) as caught:
            da.sync.insert(conn, machine, unique_key="k")
        assert caught.value.existing_id == first
        assert da.sync.insert(conn, machine, unique_key="k", on_duplicate="return") == first
        assert da.sync.insert(conn, machine, unique_key="k", on_duplicate="skip") is None
        assert da.sync.insert_many(conn, machine, [{"unique_key": "k"}]) == [None]
        assert da.sync.insert_many(conn, machine, []) == []
        assert len(da.sync.insert_many(conn, machine, [{}, {"priority": 3}])) == 2
        with pytest.raises(da.ConfigError, match="schema"):
            da.sync.insert(conn, machine, schema="no such; schema")
        assert await count(durable_dsn) == 0
        conn.commit() if commit else conn.rollback()
    assert await count(durable_dsn) == (3 if commit else 0)


@pytest.mark.parametrize("commit", [True, False], ids=["committed", "rolled back"])
async def test_trio(durable_dsn, machine, commit):
    """And the poke goes out after the commit: nobody polls here (H53)."""
    async with running(durable_dsn, **QUIET) as run:
        async with await da.TrioConnection.connect(durable_dsn) as conn:
            number = await da.insert(machine, state=Order(5), conn=conn)
            await da.insert_many(machine, [{}, {}], conn=conn)
            await trio.testing.wait_all_tasks_blocked(0.02)
            assert not run.events.all(StepStarted)
            await conn.commit() if commit else await conn.rollback()
            if commit:
                assert await da.result(number, timeout=30) == 5
        assert await count(durable_dsn) == (3 if commit else 0)


async def test_pokes_after_blocks_and_autocommit(durable_dsn, machine):
    async with running(durable_dsn, **QUIET) as run:
        conn = await da.TrioConnection.connect(durable_dsn, autocommit=True)
        async with conn:
            async with conn.transaction():
                async with conn.transaction():
                    number = await run.insert(machine, state=Order(1), conn=conn)
                await trio.testing.wait_all_tasks_blocked(0.02)
                assert not run.events.all(StepStarted)
            assert await da.result(number, timeout=30) == 1
            with pytest.raises(ZeroDivisionError):
                async with conn.transaction():
                    await run.insert(machine, conn=conn)
                    1 / 0  # noqa: B018
            number = await run.insert(machine, state=Order(2), conn=conn)
            assert await da.result(number, timeout=30) == 2
            async with conn.pipeline(), conn.transaction():
                number = await run.insert(machine, state=Order(3), conn=conn)
            assert await da.result(number, timeout=30) == 3


async def test_asyncio(durable_dsn, tmp_path):
    """In an interpreter of its own: asyncio and Trio do not share a thread here."""
    script = textwrap.dedent(
        """
        import asyncio, sys
        import psycopg, durable_actors as da

        @da.job(name="mail")
        async def mail(args: dict): ...

        async def main(dsn):
            async with await psycopg.AsyncConnection.connect(dsn) as conn:
                await da.aio.insert(conn, mail, args={"n": 1})
                await conn.rollback()
                first = await da.aio.insert(conn, mail, args={"n": 2}, unique_key="k")
                assert await da.aio.insert(conn, mail, args={}, unique_key="k", on_duplicate="skip") is None
                try:
                    await da.aio.insert(conn, mail, args={}, unique_key="k")
                except da.Duplicate as exc:
                    assert exc.existing_id == first
                else:
                    raise AssertionError
                assert await da.aio.insert_many(conn, mail, []) == []

        asyncio.run(main(sys.argv[1]))
        """
    )
    program = warm().start(
        script,
        [durable_dsn],
        [subprocess.DEVNULL, subprocess.DEVNULL, 2],
        env=os.environ,
        warnings_are_errors=True,
    )
    assert await program.wait_ended() == 0
    with psycopg.connect(durable_dsn) as conn:
        assert conn.execute("select fsm, state from durable.gen_durable").fetchall() == [("mail", {"n": 2})]


async def test_a_foreign_insert_is_found_by_polling(durable_dsn, machine):
    async with running(durable_dsn) as run:
        with psycopg.connect(durable_dsn) as conn:
            number = da.sync.insert(conn, machine, state=Order(9))
        assert (await run.ended(number)).result == 9
