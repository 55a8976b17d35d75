"""Graphs as large as the contract names them, end to end: every task runs once, and after all that it needs."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import durable_actors as da
import pytest
from tests.engine.kit import Db, running

pytestmark = [pytest.mark.usefixtures("registry"), pytest.mark.slow]

Needs = Sequence[Sequence[int]]


def wide() -> Needs:
    """10,000 tasks with 50,000 edges, each to one of the 500 tasks before it."""
    rng = random.Random(19)
    fans = [min(n, 5) + (10 <= n < 25) for n in range(10_000)]  # the first ones cannot have five
    return [rng.sample(range(max(0, n - 500), n), fan) for n, fan in enumerate(fans)]


def chain() -> Needs:
    """1,000 tasks, one after the other."""
    return [[n - 1] if n else [] for n in range(1000)]


def diamond() -> Needs:
    """One, then 1,000, then 1,000 that come after all of those, then one."""
    first, second = range(1, 1001), range(1001, 2001)
    return [[], *([0] for _ in first), *(list(first) for _ in second), list(second)]


@pytest.mark.parametrize(
    ("make", "tasks", "edges"),
    [(wide, 10_000, 50_000), (chain, 1000, 999), (diamond, 2002, 1_002_000)],
    ids=["wide", "chain", "diamond"],
)
async def test_a_large_graph_runs_in_order_and_once(
    durable_dsn: str, db: Db, make: Callable[[], Needs], tasks: int, edges: int
) -> None:
    needs = make()
    assert (len(needs), sum(map(len, needs))) == (tasks, edges)
    runs = [0] * tasks
    early: list[int] = []

    @da.job(name="large.task")
    async def task(args: int) -> None:
        if not all(runs[each] for each in needs[args]):
            early.append(args)
        runs[args] += 1

    class Large(da.Machine):
        @da.step
        async def start(self, ctx: da.Context) -> da.Outcome:
            children: list[da.Child] = []
            for number, before in enumerate(needs):
                children.append(da.Child(task, args=number, after=[children[each] for each in before]))
            return da.ScheduleChildren(self.join, children)

        @da.step
        async def join(self, ctx: da.Context) -> da.Outcome:
            return da.Done(dict(ctx.children_counts))

    async with running(durable_dsn, queues={"default": da.Queue(100, prefetch=200)}) as run:
        number = await run.engine.client.insert(Large)
        assert await run.engine.client.result(number, timeout=120) == {"done": tasks}
    assert early == []
    assert set(runs) == {1}
    assert db.execute("select count(*), sum(cardinality(needs)) from durable.graph") == [(tasks, edges)]
    assert db.execute("select 1 from durable.untold limit 1") == []
    assert db.execute("select 1 from durable.graph where waits > 0 or owed is not null limit 1") == []
