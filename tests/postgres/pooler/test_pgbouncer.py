"""A real PgBouncer: what the driver leaves behind in it (nothing), and what an engine needs beside it."""

from __future__ import annotations

import math

import durable_actors as da
import psycopg
import pytest
import trio
from durable_actors._engine.claiming import long_poll
from durable_actors._engine.keys import session as key_session
from durable_actors._engine.maintenance import control
from durable_actors._postgres.driver.connection import PgConn
from durable_actors._postgres.driver.statement import Statement
from durable_actors.telemetry import RequestReceived
from psycopg import sql
from tests.chaos.pgbouncer import open_pgbouncer
from tests.engine.kit import Gate, gated, running
from tests.kit import until

pytestmark = pytest.mark.slow  # whole programs

SETTINGS = {"lock_timeout": "123ms", "enable_seqscan": "off"}
READ = Statement(
    "read_settings",
    "select current_setting('lock_timeout'), current_setting('enable_seqscan'), current_setting('timezone')",
    read_only=True,
)
PID = Statement("read_pid", "select pg_backend_pid()", read_only=True)


async def one(conn: PgConn, statement: Statement) -> list:
    return (await conn.run(statement)).rows[0]


async def test_settings_go_with_each_transaction_and_stay_with_nobody(pg_dsn):
    with open_pgbouncer(pg_dsn, size=1) as dsn:
        conn = await PgConn.open(dsn, settings=SETTINGS)
        for _ in range(2):
            assert await one(conn, READ) == [b"123ms", b"off", b"UTC"]
            with psycopg.connect(dsn, autocommit=True) as stranger:  # the same server process
                query = "select current_setting('lock_timeout'), current_setting('enable_seqscan')"
                assert stranger.execute(query).fetchone() == ("0", "on")
                assert stranger.execute("select count(*) from pg_prepared_statements").fetchone() == (0,)
        async with conn.transaction():
            assert await one(conn, READ) == [b"123ms", b"off", b"UTC"]
        assert conn.pooled
        conn.close()


async def test_one_statement_on_many_server_processes(pg_dsn):
    """Names of prepared statements mean nothing there: they would be another client's, or unknown."""
    with open_pgbouncer(pg_dsn, size=3) as dsn:
        conns = [await PgConn.open(dsn, settings=SETTINGS) for _ in range(3)]
        seen = set()
        for _ in range(3):
            async with conns[0].transaction(), conns[1].transaction():
                seen |= {(await one(conn, PID))[0] for conn in conns}
                for conn in conns:
                    assert await one(conn, READ) == [b"123ms", b"off", b"UTC"]
        assert len(seen) == 3
        for conn in conns:
            conn.close()


async def test_a_cancellation_hits_no_later_statement(pg_dsn):
    """It takes a way of its own through the pooler, and the server process may be somebody else's by then."""
    nap = Statement("nap", "select pg_sleep(600)", read_only=True)
    short = Statement("short", "select pg_sleep(0.005)", read_only=True)
    with open_pgbouncer(pg_dsn, size=2) as dsn:
        conn = await PgConn.open(dsn)
        for _ in range(15):
            with trio.move_on_after(0.005) as scope:
                await conn.run(nap)
            assert scope.cancelled_caught
            assert conn.pristine
            await conn.run(short)
        conn.close()


async def test_a_setting_that_the_server_refuses(pg_dsn):
    with open_pgbouncer(pg_dsn) as dsn, pytest.raises(da.ConfigError, match="lock_timeout"):
        await PgConn.open(dsn, settings={"lock_timeout": "soon"})


async def test_another_isolation_level_is_refused(empty_dsn):
    """Nothing can set it once the settings' own statement has run, and a recheck needs a snapshot of its own."""
    with psycopg.connect(empty_dsn, autocommit=True) as conn:
        name = sql.Identifier(conn.info.dbname)
        conn.execute(
            sql.SQL("alter database {} set default_transaction_isolation = 'repeatable read'").format(name)
        )
    with (
        open_pgbouncer(empty_dsn) as dsn,
        pytest.raises(da.ConfigError, match="default_transaction_isolation"),
    ):
        await PgConn.open(dsn)


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize("size", [1, 8])
async def test_an_engine_says_what_it_needs(durable_dsn, size, monkeypatch):
    monkeypatch.setattr(key_session, "SECOND_PROCESS", 0.2)  # of one server process there is none
    with open_pgbouncer(durable_dsn, size=size) as dsn:
        with pytest.raises(da.ConfigError, match="session_dsn") as caught:
            async with running(dsn):
                pytest.fail("must not start")
        assert caught.value.option == "session_dsn"
        with pytest.raises(da.ConfigError, match="session_dsn"):  # no better than the first way
            async with running(durable_dsn, session_dsn=dsn):
                pytest.fail("must not start")
        with psycopg.connect(durable_dsn) as conn:
            locks = "select count(*) from pg_locks where locktype = 'advisory' and database = %s::oid"
            query = "select oid from pg_database where datname = current_database()"
            assert conn.execute(locks, conn.execute(query).fetchone()).fetchone() == (0,)


@pytest.mark.usefixtures("registry")
async def test_migrations_need_a_session(empty_dsn):
    with open_pgbouncer(empty_dsn) as dsn:
        with pytest.raises(da.ConfigError, match="pooler"):
            await da.migrate(dsn)
        async with running(dsn, session_dsn=empty_dsn):
            pass
        await da.migrate(dsn)  # nothing is left to do


@pytest.mark.usefixtures("registry")
async def test_a_pooler_that_keeps_sessions_does_no_harm(durable_dsn):
    @da.job(name="one", queue="default")
    async def job(args: dict) -> int:
        return 1

    with open_pgbouncer(durable_dsn, mode="session", size=10) as dsn:
        async with running(dsn) as run:
            assert (await run.run(job, args={}, partition_key="k")).result == 1


@pytest.mark.usefixtures("registry")
async def test_no_server_process_of_the_pooler_is_kept_for_a_long_poll(durable_dsn, monkeypatch):
    """With one process, everybody's statements would wait for a second each while the queue is empty."""

    @da.job(name="one", queue="default")
    async def job(args: dict) -> int:
        return 1

    with open_pgbouncer(durable_dsn, size=1) as dsn:
        async with running(dsn, session_dsn=durable_dsn) as run:
            looks: list[float] = []
            monkeypatch.setattr(long_poll, "wait_for_work", lambda *_, **__: looks.append(1.0))
            queue = run.engine._parts.idle_queues.of("default")
            await until(lambda: queue.wants(math.inf))
            assert (await run.run(job, args={})).result == 1
            assert not looks
            assert not queue.watched


@pytest.mark.usefixtures("registry")
async def test_commands_and_requests(durable_dsn, monkeypatch):
    """A command through it leaves one receipt; a node behind it learns of a request, with the smallest pool."""
    monkeypatch.setattr(control, "LOOK_EVERY", 0.05)
    monkeypatch.setattr(control, "LONG_STEP", 0.01)
    gate = Gate()
    with open_pgbouncer(durable_dsn, size=2) as dsn:
        async with running(dsn, session_dsn=durable_dsn, pool_size=3) as run:
            number = await run.insert(gated(gate))
            await gate.wait_entered()
            with psycopg.connect(durable_dsn, autocommit=True) as db:
                db.execute('update durable.gen_durable set request = \'{"kind": "cancel"}\'')
                await run.events.wait(RequestReceived, id=number)
                gate.open()
                await run.ended(number)
                db.execute("update durable.gen_durable set status = 'failed'")
            assert await da.retry(number, idempotency_key="k") == number
            await run.ended(number)
            with psycopg.connect(dsn, autocommit=True) as stranger:
                assert da.sync.retry(stranger, number, idempotency_key="k") == number
            assert len(await da.receipts(number)) == 1


@pytest.mark.usefixtures("registry")
async def test_two_engines_with_their_session_locks_past_it(durable_dsn):
    """Everything an engine does, by two of them, over fewer server processes than they have connections."""
    running_keys: dict[str, int] = {}
    worst = 0

    class Child(da.Machine, name="child"):
        @da.step
        async def start(self, ctx):
            return da.Done(ctx.state["n"])

    class Parent(da.Machine, name="parent"):
        @da.step
        async def start(self, ctx):
            children = [da.Child(Child, state={"n": n}) for n in range(3)]
            return da.ScheduleChildren(self.wait, children)

        @da.step
        async def wait(self, ctx):
            return da.Await("go", {"sum": sum(child.result for child in ctx.children)}, then=self.end)

        @da.step
        async def end(self, ctx):
            return da.Done([ctx.state["sum"], *(signal.payload for signal in ctx.awaited)])

    @da.job(name="keyed")
    async def keyed(args: dict) -> None:
        nonlocal worst
        key = args["key"]
        running_keys[key] = running_keys.get(key, 0) + 1
        worst = max(worst, running_keys[key])
        await trio.sleep(0.01)
        running_keys[key] -= 1

    with open_pgbouncer(durable_dsn, size=3) as dsn:
        options = {"session_dsn": durable_dsn, "heartbeat_interval": 0.1}
        async with running(dsn, name="a", **options) as run, running(dsn, name="b", **options) as other:
            parents = [await run.insert(Parent) for _ in range(10)]
            options = [{"args": {"key": str(n % 3)}, "partition_key": str(n % 3)} for n in range(30)]
            jobs = await other.engine.client.insert_many(keyed, options)
            for number in parents:
                await other.engine.client.signal(number, "go", number)
            assert [(await run.ended(number)).result for number in parents] == [[3, n] for n in parents]
            assert {(await run.ended(number)).status for number in jobs if number is not None} == {"done"}
            snapshot = [*run.engine.snapshot().walk(), *other.engine.snapshot().walk()]
            assert [(node.name, node.restarts) for node in snapshot if node.restarts] == []
            with psycopg.connect(dsn, autocommit=True) as stranger:
                for name, value in (("lock_timeout", "0"), ("enable_seqscan", "on")):
                    assert stranger.execute("select current_setting(%s)", [name]).fetchone() == (value,)
    assert worst == 1
