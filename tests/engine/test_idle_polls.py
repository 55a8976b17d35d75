"""What a poll of an empty queue costs: one look, and no pick until there is something. Quick polls are the server's."""

from __future__ import annotations

from typing import Any

import durable_actors as da
import psycopg
import pytest
import trio
import trio.testing
from durable_actors._engine.claiming import cursor, feeder, long_poll
from durable_actors._engine.claiming.idle_queues import IdleQueue, IdleQueues
from durable_actors.machine import isolated_registry
from durable_actors.telemetry import StepCommitted

CALLS = """
select coalesce(sum(calls) filter (where query like '%recursive p(priority)%'), 0)::int,
       coalesce(sum(calls) filter (where query like '%judge_siblings%'), 0)::int
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


def never_polled(dsn: str, **options: Any) -> da.Config:
    """Only the server's watch can find anything: a poll is an hour away."""
    return da.Config(
        **{
            "dsn": dsn,
            "queues": {"default": 2},
            "poll_interval": 3600,
            "max_poll_interval": 3600,
            "long_poll": 0.02,
            **options,
        }
    )


def late_job(queue: str = "default") -> trio.Event:
    ran = trio.Event()

    @da.job(name="late", queue=queue)
    async def late(args: dict) -> None:
        ran.set()

    return ran


@pytest.mark.parametrize("cut", [False, True], ids=["", "after its session was cut"])
async def test_the_server_watches_an_idle_queue(durable_dsn, *, cut: bool):
    with isolated_registry(), psycopg.connect(durable_dsn, autocommit=True) as connection:
        ran = late_job()
        with trio.fail_after(60):
            async with da.open_engine(never_polled(durable_dsn)):
                pid = await watched(connection)
                if cut:
                    connection.execute("select pg_terminate_backend(%s)", [pid])
                    while await watched(connection) == pid:
                        await trio.sleep(0.01)
                connection.execute(INSERT)
                await ran.wait()


async def test_a_watch_that_the_server_refuses_leaves_the_polls(durable_dsn):
    """A role's statement_timeout, say: the floor is there."""
    with isolated_registry(), psycopg.connect(durable_dsn, autocommit=True) as connection:
        ran = late_job()
        connection.execute("alter function durable.wait_for_work(text[], float8, float8) rename to gone")
        config = never_polled(durable_dsn, poll_interval=0.05, max_poll_interval=0.05)
        with trio.fail_after(60):
            async with da.open_engine(config):
                connection.execute(INSERT)
                await ran.wait()


async def test_what_the_server_has_seen_is_picked_without_another_look(durable_dsn, monkeypatch):
    """A round trip less for whoever waits, also where nobody here has heard of the priority."""
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
        ran = late_job()
        with trio.fail_after(60):
            async with da.open_engine(never_polled(durable_dsn)):
                await watched(connection)
                done.clear()
                connection.execute(INSERT)
                await ran.wait()
    assert done[0] == "pick_instances"
    assert "read_queue" not in done[: done.index("pick_instances") + 1]


async def test_one_statement_watches_all_queues_of_a_node(durable_dsn):
    """With the default pool, too; each start goes on being found."""
    names = [f"queue {number}" for number in range(5)]
    with isolated_registry(), psycopg.connect(durable_dsn, autocommit=True) as connection:
        runs = trio.open_memory_channel[str](100)

        @da.job(name="late")
        async def late(args: dict) -> None:
            await runs[0].send(args["queue"])

        with trio.fail_after(60):
            async with da.open_engine(never_polled(durable_dsn, queues=dict.fromkeys(names, 1))):
                for name in (*names, *names):
                    await watched(connection)
                    assert len(connection.execute(WATCHES).fetchall()) <= 1
                    connection.execute(
                        "insert into durable.gen_durable (fsm, step, queue, state)"
                        " values ('late', 'perform', %s, jsonb_build_object('queue', %s::text))",
                        [name, name],
                    )
                    assert await runs[1].receive() == name


async def test_future_and_locked_rows_do_not_turn_the_watch_off(durable_dsn, monkeypatch):
    idle: dict[str, IdleQueue] = {}
    real = IdleQueues.of

    def of(self: IdleQueues, name: str) -> IdleQueue:
        found = idle[name] = real(self, name)
        return found

    monkeypatch.setattr(IdleQueues, "of", of)
    with (
        isolated_registry(),
        psycopg.connect(durable_dsn, autocommit=True) as connection,
        psycopg.connect(durable_dsn) as stranger,
    ):
        ran = late_job()
        connection.execute(
            "insert into durable.gen_durable (fsm, step, eligible_at)"
            " values ('late', 'perform', now() + interval '1 day')"
        )
        connection.execute(
            "insert into durable.gen_durable (fsm, step, priority) values ('late', 'perform', 1)"
        )
        stranger.execute("select from durable.gen_durable where priority = 1 for update")
        with trio.fail_after(60):
            async with da.open_engine(never_polled(durable_dsn)):
                while idle["default"]._misses < 3:  # seen, not claimed, and watched again, ever later
                    await trio.sleep(0.01)
                assert not ran.is_set()
                connection.execute(INSERT)
                await ran.wait()


async def test_a_row_behind_the_cursor_is_picked_when_the_server_has_seen_it(durable_dsn, monkeypatch):
    """Another process's transaction began before the last claimed row's, and committed after that was claimed."""
    monkeypatch.setattr(cursor, "RESET_MIN", 3600.0)
    monkeypatch.setattr(cursor, "RESET_MAX", 3600.0)
    with (
        isolated_registry(),
        psycopg.connect(durable_dsn, autocommit=True) as connection,
        psycopg.connect(durable_dsn) as slow,
    ):
        runs = trio.open_memory_channel[int](10)

        @da.job(name="late")
        async def late(args: dict) -> None:
            await runs[0].send(args["number"])

        insert = (
            "insert into durable.gen_durable (fsm, step, state)"
            " values ('late', 'perform', jsonb_build_object('number', %s::int))"
        )
        with trio.fail_after(60):
            async with da.open_engine(never_polled(durable_dsn)):
                slow.execute(insert, [1])
                connection.execute(insert, [2])
                assert await runs[1].receive() == 2
                slow.commit()
                assert await runs[1].receive() == 1


def patience_of_statements(monkeypatch) -> trio.MemoryReceiveChannel[float]:
    """How long each statement of the long poll may take."""
    send, receive = trio.open_memory_channel[float](10_000)
    real = long_poll.wait_for_work

    async def noted(*args: Any, patience: float, **options: Any) -> dict[str, int]:
        send.send_nowait(patience)
        return await real(*args, patience=patience, **options)

    monkeypatch.setattr(long_poll, "wait_for_work", noted)
    return receive


async def test_no_snapshot_is_held_while_a_queue_claims_rows(durable_dsn, monkeypatch):
    """It would keep every version of those rows. The idle queue beside it is checked as often."""
    asked = patience_of_statements(monkeypatch)
    with isolated_registry(), psycopg.connect(durable_dsn, autocommit=True) as connection:
        ran, gates = late_job(), [trio.Event(), trio.Event()]

        @da.job(name="gated", queue="busy")
        async def gated(args: dict) -> None:
            await gates[args["number"]].wait()

        async def next_statement(*, long: bool) -> None:
            for _ in range(20):
                if (await asked.receive() > 0) is long:
                    return
            pytest.fail(f"no {'long' if long else 'short'} statement among twenty")

        config = never_polled(durable_dsn, queues={"busy": da.Queue(1, prefetch=0), "default": 1})
        with trio.fail_after(60):
            async with da.open_engine(config):
                await da.insert_many(gated, [{"args": {"number": each}} for each in range(2)])
                await next_statement(long=False)
                await next_statement(long=True)  # nothing is claimed while the step runs
                gates[0].set()
                await next_statement(long=False)
                connection.execute(INSERT)
                await ran.wait()
                gates[1].set()


@pytest.mark.parametrize("cheap", [3600.0, 0.0], ids=["cheap", "expensive"])
async def test_after_slow_checks_the_server_waits_again(durable_dsn, monkeypatch, *, cheap: float):
    """It knows what its checks cost, and takes a twentieth of the time for them."""
    asked = patience_of_statements(monkeypatch)
    monkeypatch.setattr(IdleQueues, "take_claimed", lambda _: True)
    monkeypatch.setattr(long_poll, "CHEAP_REFRESH", cheap)
    monkeypatch.setattr(long_poll, "MAX_STATEMENT_SECONDS", 0.03)
    with isolated_registry(), trio.fail_after(60):
        async with da.open_engine(never_polled(durable_dsn)):
            found = [await asked.receive() > 0 for _ in range(6)]
    assert found == ([False] * 6 if cheap else [False, False, True] * 2)


async def test_a_stop_leaves_no_statement_behind(durable_dsn, monkeypatch):
    monkeypatch.setattr(long_poll, "MAX_STATEMENT_SECONDS", 300.0)
    with isolated_registry(), psycopg.connect(durable_dsn, autocommit=True) as connection:
        with trio.fail_after(60):
            async with da.open_engine(never_polled(durable_dsn)):
                await watched(connection)
        assert not connection.execute(WATCHES).fetchall()


@pytest.mark.slow
async def test_an_idle_engine_with_quick_polls_sends_few_statements(durable_dsn):
    """A wait of a second, and a look. Without the wait a hundred polls a second are a hundred statements."""
    with isolated_registry(), psycopg.connect(durable_dsn, autocommit=True) as connection:
        connection.execute("create extension if not exists pg_stat_statements")
        quick = da.Config(dsn=durable_dsn, queues={"default": 2}, poll_interval=0.01, max_poll_interval=0.01)
        with trio.fail_after(60):
            async with da.open_engine(quick):
                await watched(connection)
                before, _ = calls(connection)
                while connection.execute(WAITS).fetchone() < (2,):
                    await trio.sleep(0.05)
                after, _ = calls(connection)
                assert after - before < 14  # in two seconds


async def test_a_watch_gives_its_connection_to_whoever_waits_for_one(durable_dsn, monkeypatch):
    """Two are for clients. One is held for long, the other watches: a call has that one at once; then it watches on."""
    monkeypatch.setattr(long_poll, "MAX_STATEMENT_SECONDS", 300.0)
    monkeypatch.setattr(long_poll, "ANSWER_TIMEOUT", 300.0)
    with isolated_registry(), psycopg.connect(durable_dsn, autocommit=True) as connection:
        with trio.fail_after(60):
            async with da.open_engine(never_polled(durable_dsn)) as engine:
                await watched(connection)
                pool = engine._node.pool
                async with pool.acquire("client"):
                    async with pool.acquire("client"):
                        assert not connection.execute(WATCHES).fetchall()
                    await watched(connection)
                assert [lane.timeouts for lane in pool.statistics().lanes if lane.name == "client"] == [0]


async def test_a_small_pool_is_polled(durable_dsn):
    with isolated_registry():
        async with da.open_engine(never_polled(durable_dsn)) as engine:
            assert "long poll" in engine.snapshot().render()
        async with da.open_engine(never_polled(durable_dsn, pool_size=5)) as engine:
            assert "long poll" not in engine.snapshot().render()
        async with da.open_engine(never_polled(durable_dsn, long_poll=0)) as engine:
            assert "long poll" not in engine.snapshot().render()


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
