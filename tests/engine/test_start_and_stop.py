"""Starting and stopping at bad moments: no error and no request to stop is lost."""

from __future__ import annotations

import signal

import durable_actors as da
import psycopg
import pytest
import trio.testing
from durable_actors import engine as engines
from durable_actors._engine.keys.keeper import Keeper
from durable_actors._engine.keys.session import KeySession
from durable_actors.telemetry import DrainStarted
from tests.engine.kit import QUICK, Gate, running
from tests.kit import PATIENCE

pytestmark = pytest.mark.usefixtures("registry")


def leaves(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for each in error.exceptions for leaf in leaves(each)]
    return [error]


@pytest.mark.parametrize("wrapped", [False, True])
async def test_an_error_of_the_block_survives_a_cancelled_drain(durable_dsn, wrapped):
    """Cancelled while the engine drains after a failed block: the scope may take its Cancelled, not the error."""
    gate, scope = Gate(), trio.CancelScope()

    @da.job
    async def slow(args):
        await gate.wait()

    def cancel_then(event):
        if isinstance(event, DrainStarted):
            scope.cancel()

    with pytest.raises(BaseException) as caught, scope:
        async with running(durable_dsn, observers=[cancel_then], drain_timeout=0.1) as run:
            await run.insert(slow, args={})
            await gate.wait_entered()
            if not wrapped:
                raise ValueError("the block's own")
            async with trio.open_nursery() as nursery:
                nursery.start_soon(trio.sleep_forever)
                scope.cancel()
                raise ValueError("the block's own")
    [leaf] = leaves(caught.value)
    assert isinstance(leaf, ValueError)


async def test_both_errors_are_told(durable_dsn, monkeypatch):
    async def fails(node, *, failed):
        raise RuntimeError("the engine's")

    monkeypatch.setattr(engines, "_record_stop", fails)
    with pytest.raises(ExceptionGroup) as caught:
        async with da.open_engine(dsn=durable_dsn, **QUICK):
            raise ValueError("the block's")
    assert {type(leaf) for leaf in leaves(caught.value)} == {ValueError, RuntimeError}


async def test_an_engine_that_fails_cancels_the_block_and_is_bare(durable_dsn):
    with pytest.raises(KeyboardInterrupt):
        async with da.open_engine(dsn=durable_dsn, **QUICK) as engine:
            engine._fail(KeyboardInterrupt())
            await trio.sleep_forever()


async def test_a_signal_during_the_start_is_obeyed(durable_dsn, monkeypatch):
    """An orchestrator sends it once, then kills."""
    init = Keeper.init

    async def init_late(self):
        signal.raise_signal(signal.SIGTERM)
        await trio.testing.wait_all_tasks_blocked()  # so that it was heard
        await init(self)

    monkeypatch.setattr(Keeper, "init", init_late)
    with trio.fail_after(PATIENCE):
        await da.serve(dsn=durable_dsn, **QUICK)


async def test_a_mistake_that_shows_in_use_is_a_bare_config_error(durable_dsn, monkeypatch):
    async def pooled(node):
        raise da.ConfigError("a pooler; set session_dsn", option="session_dsn")

    monkeypatch.setattr(KeySession, "open", pooled)
    with pytest.raises(da.ConfigError, match="session_dsn"):
        await da.serve(dsn=durable_dsn, **QUICK)


async def test_stop_from_within_a_step(durable_dsn, db):
    """It waits for itself, so it has drain_timeout like any other step."""

    stopped = trio.Event()
    engines_open: list[da.Engine] = []

    @da.job(name="stops")
    async def stops(args):
        try:
            await engines_open[0].stop()
        finally:
            stopped.set()

    async with running(durable_dsn, drain_timeout=0.1) as run:
        engines_open.append(run.engine)
        number = await run.insert(stops, args={})
        with trio.fail_after(PATIENCE):
            await stopped.wait()
    assert db.row(number, "status::text, attempt, crashes, interruptions") == ("runnable", 0, 0, 1)


async def test_a_stop_in_a_schema_that_is_gone(durable_dsn, db):
    async with running(durable_dsn):
        with psycopg.connect(durable_dsn) as conn:
            conn.execute("alter table durable.nodes rename to nodes_away")


@pytest.mark.parametrize("how", ["stop", "cancelled"])
async def test_its_state_can_be_awaited(durable_dsn, how):
    """Whoever waits learns of the drain while steps still run, and of the end when its connections are closed."""
    gate, seen = Gate(), []

    @da.job
    async def step(args):
        await gate.wait()

    def connections(engine: da.Engine) -> int:
        return sum(lane.idle + lane.in_use for lane in engine.connections().lanes)

    async def watch(engine: da.Engine) -> None:
        assert await engine.state.wait_value("draining") == "draining"
        seen.append(("draining", len(engine._node.claims), connections(engine) > 0))
        gate.open()
        assert await engine.state.wait_value("stopped") == "stopped"
        seen.append(("stopped", len(engine._node.claims), connections(engine) > 0))

    async with trio.open_nursery() as nursery:
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as inner:
                engine = await da.start_engine(inner, dsn=durable_dsn, **QUICK)
                assert engine.state.value == "running"
                nursery.start_soon(watch, engine)
                await da.insert(step, args={})
                await gate.wait_entered()
                if how == "cancelled":
                    scope.cancel()
                else:
                    await engine.stop()
    assert seen == [("draining", 1, True), ("stopped", 0, False)]


async def test_an_older_node_that_lives_is_named_with_what_it_ignores(durable_dsn, caplog):
    with psycopg.connect(durable_dsn, autocommit=True) as conn:
        for name, about in (("old:1", '{"version": "0.1.0.dev0"}'), ("gone:1", '{"version": "0.1.0.dev0"}')):
            conn.execute(
                "insert into durable.nodes (incarnation, node, about) values (%s, 'n', %s)", [name, about]
            )
        conn.execute("select pg_advisory_lock(hashtextextended('durable' || chr(2) || 'old:1', 0))")
        async with da.open_engine(dsn=durable_dsn, **QUICK):
            pass
    [line] = [record for record in caplog.records if "which ignores" in record.message]
    assert line.levelname == "WARNING"
    assert line.message.startswith("node old:1 runs 0.1.0.dev0, which ignores: commands to running steps, ")


@pytest.mark.parametrize("migrate", [True, False])
async def test_a_schema_of_the_next_release_is_used_with_a_warning(durable_dsn, caplog, migrate):
    query = "insert into durable.migrations (version, name, works_with) select max(version) + 1, 'next', max(version)"
    with psycopg.connect(durable_dsn, autocommit=True) as conn:
        conn.execute(f"{query} from durable.migrations")
        async with da.open_engine(dsn=durable_dsn, migrate=migrate, **QUICK):
            pass
        assert [r.levelname for r in caplog.records if "a newer release has migrated it" in r.message] == [
            "WARNING"
        ]
        conn.execute("update durable.migrations set works_with = version where name = 'next'")
        with pytest.raises(da.SchemaError, match="Upgrade the package on this node"):
            async with da.open_engine(dsn=durable_dsn, migrate=migrate, **QUICK):
                raise AssertionError("must not start")
