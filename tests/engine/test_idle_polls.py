"""What a poll of an empty queue costs: one look, and no pick until there is something. Quick polls are the server's."""

from __future__ import annotations

from typing import Any

import durable_actors as da
import psycopg
import pytest
import trio
import trio.testing
from durable_actors._engine import feeder, watch
from durable_actors.machine import isolated_registry
from durable_actors.telemetry import StepCommitted

CALLS = """
select coalesce(sum(calls) filter (where query like '%recursive p(priority)%'), 0)::int,
       coalesce(sum(calls) filter (where query like '%judge_keys%'), 0)::int
  from pg_stat_statements s join pg_database d on d.oid = s.dbid where d.datname = current_database()
"""


def calls(connection: psycopg.Connection) -> tuple[int, int]:
    row = connection.execute(CALLS).fetchone()
    assert row is not None
    return row


async def test_an_idle_queue_is_looked_at_and_not_picked_from(durable_dsn):
    """With as few connections as this, each poll is ours."""
    with isolated_registry(), psycopg.connect(durable_dsn, autocommit=True) as connection:
        connection.execute("create extension if not exists pg_stat_statements")
        ran = trio.Event()

        @da.job(name="late")
        async def late(args: dict) -> None:
            ran.set()

        quick = da.Config(
            dsn=durable_dsn, queues={"default": 2}, poll_interval=0.02, max_poll_interval=0.02, pool_size=4
        )
        with trio.fail_after(30):
            async with da.open_engine(quick):
                looks = 0
                while looks < 3:  # the first pick was empty, polls have begun
                    await trio.sleep(0.02)
                    looks, _ = calls(connection)
                looks, picks = calls(connection)
                seen = looks
                while seen < looks + 10:
                    await trio.sleep(0.02)
                    seen, picked = calls(connection)
                assert picked == picks
                # Somebody elsewhere inserts, with a priority that nobody here has heard of.
                connection.execute(
                    "insert into durable.gen_durable (fsm, step, priority) values ('late', 'perform', 7)"
                )
                await ran.wait()


WATCHES = """
select pid from pg_stat_activity
 where datname = current_database() and state = 'active' and query like '%wait_for_work%' and pid <> pg_backend_pid()
"""
WAITS = """
select coalesce(sum(calls), 0)::int from pg_stat_statements s join pg_database d on d.oid = s.dbid
 where d.datname = current_database() and query like '%select%wait_for_work(%' and query not like '%pg_stat%'
"""
INSERT = "insert into durable.gen_durable (fsm, step, priority) values ('late', 'perform', 7)"


async def watched(connection: psycopg.Connection) -> int:
    while not (found := connection.execute(WATCHES).fetchall()):
        await trio.sleep(0.01)
    return found[0][0]


async def poll_no_more(engine: da.Engine) -> None:
    """Until its feeder rests for an hour: only the server's watch can find anything."""
    rests = trio.Event()

    def rest(*_: object) -> float:
        rests.set()
        return 3600.0

    engine._node.feeders["default"]._watch.begin = rest
    engine._node.wakes["default"].cast(None)
    await rests.wait()


@pytest.mark.parametrize("cut", [False, True], ids=["", "after its session was cut"])
async def test_the_server_watches_an_idle_queue(durable_dsn, monkeypatch, *, cut: bool):
    """No poll of ours would find the row: the fallback is an hour away. Nor when the watch fails: then we poll."""
    monkeypatch.setattr(watch, "PAUSE", 3600.0)
    with isolated_registry(), psycopg.connect(durable_dsn, autocommit=True) as connection:
        ran = trio.Event()

        @da.job(name="late")
        async def late(args: dict) -> None:
            ran.set()

        quick = da.Config(dsn=durable_dsn, queues={"default": 2}, poll_interval=0.05, max_poll_interval=0.05)
        with trio.fail_after(60):
            async with da.open_engine(quick) as engine:
                pid = await watched(connection)
                if cut:
                    connection.execute("select pg_terminate_backend(%s)", [pid])
                    while connection.execute(WATCHES).fetchall():
                        await trio.sleep(0.01)
                else:
                    await poll_no_more(engine)
                connection.execute(INSERT)
                await ran.wait()


async def test_what_the_server_has_seen_is_picked_without_another_look(durable_dsn, monkeypatch):
    """A round trip less for whoever waits."""
    done: list[str] = []

    def note(name: str) -> None:
        real = getattr(feeder, name)

        async def noted(*args: Any, **options: Any) -> Any:
            done.append(name)
            return await real(*args, **options)

        monkeypatch.setattr(feeder, name, noted)

    note("read_queue")
    note("pick_instances")
    with isolated_registry(), psycopg.connect(durable_dsn, autocommit=True) as connection:
        ran = trio.Event()

        @da.job(name="late")
        async def late(args: dict) -> None:
            ran.set()

        quick = da.Config(dsn=durable_dsn, queues={"default": 2}, poll_interval=0.05, max_poll_interval=0.05)
        with trio.fail_after(60):
            async with da.open_engine(quick) as engine:
                await watched(connection)
                await poll_no_more(engine)
                done.clear()
                connection.execute(INSERT.replace("7", "0"))
                await ran.wait()
    assert done[0] == "pick_instances"


async def test_an_idle_engine_with_quick_polls_sends_few_statements(durable_dsn):
    """A wait of a second, and a look; fifty polls a second were fifty."""
    with isolated_registry(), psycopg.connect(durable_dsn, autocommit=True) as connection:
        connection.execute("create extension if not exists pg_stat_statements")
        quick = da.Config(dsn=durable_dsn, queues={"default": 2}, poll_interval=0.01, max_poll_interval=0.01)
        with trio.fail_after(60):
            async with da.open_engine(quick):
                await watched(connection)
                before, _ = calls(connection)
                while connection.execute(WAITS).fetchone() < (3,):
                    await trio.sleep(0.05)
                after, _ = calls(connection)
                assert after - before < 20  # in three seconds


async def test_a_watch_leaves_its_connection_to_whoever_waits_for_one(durable_dsn, monkeypatch):
    """Two are for clients. One is held for long, the other watches: a call has that one next; then it watches on."""
    monkeypatch.setattr(watch, "PATIENCE", 0.05)
    with isolated_registry(), psycopg.connect(durable_dsn, autocommit=True) as connection:
        quick = da.Config(dsn=durable_dsn, queues={"default": 2}, poll_interval=0.05, max_poll_interval=0.05)
        with trio.fail_after(60):
            async with da.open_engine(quick) as engine:
                await watched(connection)
                pool = engine._node.pool
                async with pool.acquire("client"):
                    async with pool.acquire("client"):
                        assert not engine._node.feeders["default"]._watch._looks
                    await watched(connection)
                assert [lane.timeouts for lane in pool.statistics().lanes if lane.name == "client"] == [0]


async def test_slots_that_become_free_do_not_put_the_next_poll_off(durable_dsn):
    """Counted as empty polls, thirty of them would make the next pause a year, or `max_poll_interval`."""
    with isolated_registry(), psycopg.connect(durable_dsn, autocommit=True) as connection:
        gates = [trio.Event() for _ in range(30)]
        ended = [trio.Event() for _ in range(30)]
        late_ran = trio.Event()

        @da.job(name="gated")
        async def gated(args: dict) -> None:
            await gates[args["number"]].wait()

        @da.job(name="late")
        async def late(args: dict) -> None:
            late_ran.set()

        def note(event: object) -> None:
            if isinstance(event, StepCommitted) and event.id in numbers:
                ended[numbers.index(event.id)].set()

        numbers: list[int | None] = []
        config = da.Config(
            dsn=durable_dsn,
            queues={"default": 31},
            poll_interval=0.05,
            max_poll_interval=3600,
            pool_size=4,
            observers=[note],
        )
        with trio.fail_after(60):
            async with da.open_engine(config) as engine:
                numbers += await engine.client.insert_many(
                    gated, [{"args": {"number": each}} for each in range(30)]
                )
                for gate, end in zip(gates, ended, strict=True):  # one after the other: each frees a slot
                    gate.set()
                    await end.wait()
                    await trio.testing.wait_all_tasks_blocked()
                connection.execute(INSERT)
                await late_ran.wait()
