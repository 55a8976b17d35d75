"""Before an engine runs: connections shared out to lanes, queues planned, passwords hidden."""

from __future__ import annotations

import durable_actors as da
import pytest
from durable_actors._engine.lanes import lanes
from durable_actors._engine.setup import plan_queues
from durable_actors._postgres.pool.lane import Lane
from hypothesis import given, strategies as st
from tests.engine.kit import running

ROLES = {"session", "heartbeat", "commit", "claim", "client"}


@pytest.mark.parametrize(
    ("size", "shared", "client"),
    [
        (3, {"commit", "claim", "client"}, 1),
        (4, {"claim", "client"}, 1),
        (5, set(), 1),
        (6, set(), 2),
        (20, set(), 16),
    ],
)
def test_connections(size, shared, client):
    roles = lanes(size, session_dsn=None, keepalive=60)
    assert set(roles) == ROLES
    assert {role for role, lane in roles.items() if lane.name == "shared"} == shared
    assert roles["client"].size == client


@given(st.integers(3, 1000))
def test_the_budget_is_kept(size):
    roles = lanes(size, session_dsn=None, keepalive=60)
    assert sum({lane.name: lane.size for lane in roles.values()}.values()) == size
    # Session locks and heartbeats must not wait for anybody.
    for role in ("session", "heartbeat"):
        assert [other for other in ROLES if roles[other].name == roles[role].name] == [role]


def test_queues_take_what_they_lack_from_the_engine():
    queue = da.Queue(3, prefetch=7, poll_interval=0.5)
    config = da.Config(dsn="x=y", queues={"a": 2, "b": queue}, prefetch=1, min_demand=4, poll_interval=2)
    found = plan_queues(config, {})
    assert (found["a"].concurrency, found["a"].prefetch, found["a"].min_demand) == (2, 1, 4)
    assert (found["a"].poll_interval, found["a"].max_poll_interval) == (2, 5)
    assert (found["b"].prefetch, found["b"].min_demand, found["b"].poll_interval) == (7, 4, 0.5)
    slow = da.Config(dsn="x=y", queues={"a": da.Queue(1, poll_interval=9)})
    assert plan_queues(slow, {})["a"].max_poll_interval == 9


@pytest.mark.usefixtures("registry")
async def test_the_session_may_have_a_way_of_its_own(durable_dsn, db):
    """Locks that belong to a session need a direct way when the others go through a pooler."""

    class M(da.Machine):
        @da.step
        async def start(self, ctx):
            return da.Done()

    named = f"{durable_dsn} application_name=direct"
    async with running(durable_dsn, session_dsn=named) as run:
        assert (await run.run(M, partition_key="k")).status == "done"
        query = (
            "select count(*) > 0 from pg_locks join pg_stat_activity using (pid)"
            " where locktype = 'advisory' and application_name = %s and datname = current_database()"
        )
        await db.eventually(query, "direct")


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


@pytest.mark.parametrize(
    "dsn", ["postgresql://user:geheim@host/db", "host=x password=geheim", "host=x password = 'geheim'"]
)
def test_no_password_is_shown(dsn):
    config = da.Config(dsn=dsn, session_dsn=dsn)
    assert "geheim" not in repr(config)
    assert config.dsn == dsn
    assert "geheim" not in repr(Lane("session", 1, dsn=dsn))
    assert "host=x dbname=y" in repr(da.Config(dsn="host=x dbname=y"))
