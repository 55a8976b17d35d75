"""Before an engine runs: connections shared out, queues planned."""

from __future__ import annotations

import durable_actors as da
import pytest
from durable_actors._engine.node import lanes
from durable_actors._engine.setup import plan_queues
from hypothesis import given, strategies as st
from tests.engine.engine_kit import running

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
        await db.wait(query, "direct")
