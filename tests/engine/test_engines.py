"""Opening engines: names, errors, who a helper means, what a bad option does."""

from __future__ import annotations

import logging
from functools import partial

import durable_actors as da
import psycopg
import pytest
import trio
from durable_actors.machine import isolated_registry
from durable_actors.telemetry import NodeStarted
from tests.engine.kit import Recorder, running

pytestmark = pytest.mark.usefixtures("registry")


def where(name: str = "where", **options):
    class M(da.Machine, name=name, **options):
        @da.step
        async def start(self, ctx):
            another = await da.insert("leaf", queue="nobody")
            return da.Done({"another": another})

    class Leaf(da.Machine, name="leaf"):
        @da.step
        async def start(self, ctx):
            return da.Done()

    return M


async def test_every_way_to_start(durable_dsn):
    M = where()
    async with trio.open_nursery() as nursery:
        engine = await nursery.start(da.serve, da.Config(dsn=durable_dsn, poll_interval=0.05))
        assert isinstance(engine, da.Engine)
        number = await da.insert(M)
        assert (await da.result(number, timeout=30))["another"]
        await engine.stop()
    async with trio.open_nursery() as nursery:
        engine = await nursery.start(partial(da.serve, dsn=durable_dsn))
        await engine.stop()
        engine = await da.start_engine(nursery, dsn=durable_dsn, queues={"default": 5})
        await engine.stop()
        engine = await da.start_engine(nursery, da.Config(dsn=durable_dsn))
        await engine.stop()
    async with da.open_engine(da.Config(dsn=durable_dsn)) as engine:
        assert engine.name == "default"
        assert engine.config.schema == "durable"
        assert engine.incarnation.rpartition(":")[0] == engine.config.node
        assert "flusher" in engine.snapshot().render()
        assert {lane.name for lane in engine.connections().lanes} >= {"claim", "commit", "heartbeat"}


async def test_each_start_is_an_incarnation_of_its_own(durable_dsn):
    names = set()
    for _ in range(2):
        async with da.open_engine(dsn=durable_dsn, node="same") as engine:
            names.add(engine.incarnation)
    assert len(names) == 2
    assert all(name.startswith("same:") for name in names)


async def test_an_error_of_the_body_leaves_unwrapped(durable_dsn):
    with pytest.raises(ZeroDivisionError):
        async with da.open_engine(dsn=durable_dsn):
            1 / 0  # noqa: B018
    group = ExceptionGroup("mine", [ValueError()])
    with pytest.raises(ExceptionGroup) as caught:
        async with da.open_engine(dsn=durable_dsn):
            raise group
    assert caught.value is group
    with trio.move_on_after(0.2) as scope:
        async with da.open_engine(dsn=durable_dsn):
            await trio.sleep_forever()
    assert scope.cancelled_caught


async def test_two_databases_by_name(durable_server, durable_template, durable_dsn):
    M = where()
    with durable_server.database(template=durable_template) as other_dsn:
        async with running(durable_dsn, name="one") as one, running(other_dsn, name="two") as two:
            for run in (one, two):
                number = await da.insert(M, engine=run.engine.name)
                another = (await da.result(number, timeout=30, engine=run.engine))["another"]
                # The helper inside the step meant the step's own engine.
                assert (await da.inspect(another, engine=run.engine.name)).machine == "leaf"
            with pytest.raises(da.DurableError, match=r"one, two.*engine="):
                await da.insert(M)
            with pytest.raises(da.DurableError, match=r"'three'.*one, two"):
                await da.insert(M, engine="three")
        async with running(durable_dsn, name="other"), running(other_dsn, name="default") as default:
            number = await da.insert(M)  # the one named default
            assert (await da.inspect(number, engine=default.engine)).machine == "where"
    with pytest.raises(da.DurableError, match=r"no engine.*open_engine"):
        await da.insert(M)


async def test_the_only_one_is_meant_whatever_its_name(durable_dsn):
    M = where()
    async with running(durable_dsn, name="only"):
        assert await da.insert(M)
    async with da.open_client(durable_dsn, name="client") as client:
        number = await da.insert(M)
        assert number is not None
        assert (await client.inspect(number)).machine == "where"


async def test_a_name_is_taken_once(durable_dsn, db):
    async with da.open_client(durable_dsn, name="mine"):
        with pytest.raises(da.ConfigError, match="name='mine'"):
            async with da.open_engine(dsn=durable_dsn, name="mine"):
                raise AssertionError("must not start")
        assert db.execute("select count(*)::int from durable.nodes") == [(0,)]
    async with da.open_engine(dsn=durable_dsn, name="mine"):
        pass


BAD = [
    ({"queues": {"a": 0}}, "concurrency=0"),
    ({"lease_ttl": 1, "heartbeat_interval": 0.5}, "heartbeat_interval=0.5"),
    ({"schema": "No"}, "schema='No'"),
    ({"modules": ["no.such.module"]}, r"modules.*no\.such\.module"),
    ({"machines": [object]}, "machines"),
    ({"machines": 5}, "machines=5"),
    ({"nonsense": 5}, "nonsense=5: there is no such option; the options are dsn, "),
    ({"lease_tll": 5}, "lease_tll=5: there is no such option; did you mean lease_ttl?"),
]


@pytest.mark.parametrize(("options", "text"), BAD)
async def test_a_bad_option_is_told_before_anything_is_written(empty_dsn, options, text):
    async def start_it(nursery):
        await da.start_engine(nursery, dsn=empty_dsn, **options)

    with pytest.raises(da.ConfigError, match=text):
        async with da.open_engine(dsn=empty_dsn, **options):
            raise AssertionError("must not start")
    with pytest.raises(da.ConfigError, match=text):
        await da.serve(dsn=empty_dsn, **options)
    async with trio.open_nursery() as nursery:
        with pytest.raises(da.ConfigError, match=text):
            await start_it(nursery)
    with psycopg.connect(empty_dsn) as conn:
        assert conn.execute("select count(*) from pg_namespace where nspname = 'durable'").fetchone() == (0,)


async def test_a_config_or_options(durable_dsn):
    with pytest.raises(da.ConfigError, match="not both: queues"):
        await da.serve(da.Config(dsn=durable_dsn), queues={})
    with pytest.raises(da.ConfigError, match="Config"):
        await da.serve({"dsn": durable_dsn})


@pytest.mark.parametrize("dsn", ["no equals sign", "host=localhost nonsense=1"])
async def test_a_dsn_that_is_none(dsn):
    with pytest.raises(da.ConfigError, match="dsn"):
        async with da.open_engine(dsn=dsn):
            raise AssertionError("must not start")
    with pytest.raises(da.ConfigError, match="dsn"):
        async with da.open_client(dsn):
            raise AssertionError("must not start")


async def test_the_schema_is_made_on_request(empty_dsn):
    with pytest.raises(da.SchemaError, match="migrate"):
        async with da.open_engine(dsn=empty_dsn, migrate=False):
            raise AssertionError("must not start")
    with pytest.raises(da.SchemaError, match="migrate"):
        async with da.open_client(empty_dsn):
            raise AssertionError("must not start")
    M = where()
    async with running(empty_dsn, schema="elsewhere") as run:
        assert (await run.run(M)).status == "done"
    async with running(empty_dsn, schema="elsewhere", migrate=False) as run:
        assert (await run.run(M)).status == "done"


async def test_a_client_only_node(durable_dsn):
    M = where()
    async with running(durable_dsn, queues={}) as run:
        number = await run.insert(M)
        with pytest.raises(trio.TooSlowError):
            await da.result(number, timeout=0.2)
        assert not run.engine._node.queues


async def test_a_machine_that_nobody_serves_is_warned_of(durable_dsn, caplog):
    where(queue="lonely")
    caplog.set_level(logging.WARNING, logger="durable_actors.engine")
    async with running(durable_dsn, queues={"default": 1}):
        pass
    assert "'lonely'" in caplog.text


async def test_machines_are_served_though_not_registered(durable_dsn):
    with isolated_registry():
        M = where()
    async with running(durable_dsn, machines=[M]) as run:
        number = await run.insert(M)
        await run.ended(number)


async def test_a_module_is_imported_at_start(durable_dsn, tmp_path, monkeypatch):
    text = 'import durable_actors as da\n@da.job(name="from module")\nasync def j(args: dict): return 5\n'
    (tmp_path / "machines_of_this_test.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(__import__("sys").path))
    async with running(durable_dsn, modules="machines_of_this_test") as run:
        assert (await run.run("from module", args={})).result == 5


async def test_observers_hear_the_first_event(durable_dsn):
    events = Recorder()
    async with da.open_engine(dsn=durable_dsn, observers=[events]) as engine:
        [event] = events.all(NodeStarted)
        assert (event.node, event.queues) == (engine.incarnation, ("default",))


async def test_a_small_budget_of_connections(durable_dsn, db):
    M = where()
    async with running(durable_dsn, pool_size=3) as run:
        assert (await run.run(M)).status == "done"
        query = "select count(*)::int from pg_stat_activity where datname = current_database()"
        assert db.execute(query)[0][0] <= 3 + 1  # and the test's own
