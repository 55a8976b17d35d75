"""Few connections, no connection, and what is shown of the way to them."""

from __future__ import annotations

import durable_actors as da
import pytest
from durable_actors._engine.node import lanes
from durable_actors._engine.running import context_port as port
from durable_actors._postgres.pool.lane import Lane
from durable_actors.errors import CommitUnknown, StoreUnavailable
from tests.engine.engine_kit import running

pytestmark = pytest.mark.usefixtures("registry")


@pytest.mark.parametrize("size", range(3, 12))
def test_the_lanes_are_within_the_budget(size):
    roles = lanes(size, session_dsn=None, keepalive=60)
    assert set(roles) == {"session", "heartbeat", "commit", "claim", "client"}
    assert sum({lane.name: lane.size for lane in roles.values()}.values()) == size
    assert roles["claim"].size == 1  # the reaper's two looks must come from one session


@pytest.mark.parametrize("size", [3, 4, 5])
async def test_everything_works_with_few_connections(durable_dsn, size):
    @da.job
    async def leaf(args):
        return args["n"]

    class Parent(da.Machine):
        @da.step
        async def start(self, ctx):
            await ctx.signal(ctx.id, "go", 1)
            return da.Await("go", then=self.spread)

        @da.step
        async def spread(self, ctx):
            children = [da.Child(leaf, args={"n": n}, partition_key="k") for n in range(3)]
            return da.ScheduleChildren(self.end, children)

        @da.step
        async def end(self, ctx):
            await ctx.insert(leaf, args={"n": 9})
            return da.Done(sorted(child.result for child in ctx.children))

    async with running(durable_dsn, pool_size=size) as run:
        numbers = [await run.insert(Parent) for _ in range(5)]
        rows = [await run.ended(number) for number in numbers]
        used = sum(lane.idle + lane.in_use for lane in run.engine.connections().lanes)
    assert [row.result for row in rows] == [[0, 1, 2]] * 5
    assert used <= size


@pytest.mark.parametrize("done", [False, True], ids=["not done", "done and unknown"])
async def test_a_step_bears_an_outage_in_its_calls(durable_dsn, db, monkeypatch, done):
    """Through `handle` it would end the instance for good, although the database is back in a second."""
    real_start, real_signal, failures = port.start_child, port.signal_from_step, []

    def flaky(real):
        async def call(conn, *args, **options):
            if len(failures) >= 4:
                return await real(conn, *args, **options)
            failures.append(real.__name__)
            if done:
                await real(conn, *args, **options)
                raise CommitUnknown("x")
            raise StoreUnavailable("x")

        return call

    monkeypatch.setattr(port, "start_child", flaky(real_start))
    monkeypatch.setattr(port, "signal_from_step", flaky(real_signal))

    @da.job
    async def leaf(args):
        return 1

    class M(da.Machine):
        @da.step
        async def start(self, ctx):
            await ctx.insert(leaf, args={})
            await ctx.start_child(leaf, key="one", args={})
            await ctx.signal(ctx.id, "go")
            return da.Await("go", then=self.end)

        @da.step
        async def end(self, ctx):
            return da.Done(len(ctx.awaited))

    async with running(durable_dsn) as run:
        row = await run.run(M)
    assert (row.result, row.attempt) == (1, 0)
    assert len(failures) == 4
    assert db.execute("select count(*)::int from durable.gen_durable") == [(3,)]


@pytest.mark.parametrize(
    "dsn", ["postgresql://user:geheim@host/db", "host=x password=geheim", "host=x password = 'geheim'"]
)
def test_no_password_is_shown(dsn):
    config = da.Config(dsn=dsn, session_dsn=dsn)
    assert "geheim" not in repr(config)
    assert config.dsn == dsn
    assert "geheim" not in repr(Lane("session", 1, dsn=dsn))
    assert "host=x dbname=y" in repr(da.Config(dsn="host=x dbname=y"))
