"""Tags and meta: stored by every way to insert, shown, filtered by, and free of charge for whoever has none."""

from __future__ import annotations

from typing import Any

import durable_actors as da
import psycopg
import pytest
from durable_actors._postgres.driver.connection import PgConn
from durable_actors._store.insert import in_chunks, insert_call, plan_rows
from durable_actors._store.observe import NEWEST, Filter, list_instances
from durable_actors._store.sql import statement
from tests.engine.kit import running
from tests.support.sql import explain

TAGS = ["a", 'b "c", {d}\\', "NULL", "ü"]
META = {"who": "ada", "nested": {"n": [1, None]}}
LABELS: da.InsertOptions = {"tags": TAGS, "meta": META}


@pytest.fixture
def task():
    @da.job(name="task")
    async def task(args: Any) -> None: ...

    return task


async def test_every_insert_stores_them(durable_dsn: str, task: Any):
    class Family(da.Machine[dict[str, Any]], name="family"):
        @da.step
        async def start(self, ctx):
            started = [
                await ctx.insert(task, **LABELS),
                await ctx.insert(task, **LABELS, unique_key="step"),
                await ctx.start_child(task, key="a", **LABELS),  # type: ignore[misc]
            ]
            return da.ScheduleChildren(
                self.second, [da.Child(task, **LABELS), da.Child(task)], {"ids": started}
            )

        @da.step
        async def second(self, ctx):
            return da.Done([*ctx.state["ids"], *[child.id for child in ctx.children]])

    async with running(durable_dsn) as run:
        client = run.engine.client
        ids = [
            await da.insert(task, **LABELS),
            await da.insert(task, **LABELS, unique_key="k"),
            *await da.insert_many(task, [LABELS, {**LABELS, "unique_key": "l"}]),
            await da.signal_with_start(task, key="m", name="n", **LABELS),  # type: ignore[misc]
        ]
        with psycopg.connect(durable_dsn) as conn:
            ids.append(da.sync.insert(conn, task, **LABELS))
        *found, bare = await da.result(await da.insert(Family), timeout=30)
        for number in [*ids, *found]:
            instance = await client.inspect(number)
            assert (instance.tags, instance.meta) == (tuple(TAGS), META), instance
        assert ((await client.inspect(bare)).tags, (await client.inspect(bare)).meta) == ((), {})


def test_rows_without_them_go_the_short_way(task: Any):
    def way(*rows: da.InsertOptions) -> str:
        return insert_call(plan_rows(task, rows), "durable")[0].name

    assert way({"args": 1}, {"priority": 3}) == way({"tags": []}, {"meta": {}}) == "insert_plain"
    assert way({"args": 1}, {"tags": ["a"]}) == way({"meta": META}) == "insert_instances"


def test_large_meta_counts(task: Any, monkeypatch: pytest.MonkeyPatch):
    [made] = plan_rows(task, [{"meta": {"k": "x" * 450}}])
    monkeypatch.setattr("durable_actors._store.insert.MAX_BYTES", 1000)
    for options in ({"meta": {"k": "x" * 500}}, {"tags": ["x" * 125]}):
        with pytest.raises(da.ConfigError, match="at most 1000 bytes of states and meta"):
            plan_rows(task, [options] * 2)
    assert [len(chunk) for chunk in in_chunks([made] * 5, rows=100)] == [2, 2, 1]


async def test_listed_by_tags(durable_dsn: str, task: Any):
    async with da.open_client(durable_dsn) as client:
        tagged = [["even"], ["odd"], ["even"], ["odd", "three"], ["even"], ["odd"]] * 2
        rows: list[da.InsertOptions] = [
            {"tags": tags, "unique_key": f"{n % 6}", "unique_scope": ()} for n, tags in enumerate(tagged)
        ]
        ids = await client.insert_many(task, [*rows, {}])
    conn = await PgConn.open(durable_dsn)
    try:

        async def found(limit: int = 100, before: int = NEWEST, **filters: Any) -> list[int]:
            listing = await list_instances(conn, "durable", Filter(**filters), limit=limit, before=before)
            return [ids.index(each.id) for each in listing.instances]

        assert await found(tag=("odd",)) == [11, 9, 7, 5, 3, 1]
        assert await found(tag=("odd", "three")) == [9, 3]
        assert await found(tag=("odd",), limit=2, before=ids[9] or 0) == [7, 5]
        assert await found(tag=("odd",), status="done") == []
        assert await found(tag=("odd",), machine="task", queue="default", limit=1) == [11]
        assert await found(tag=("no",)) == []
        assert await found(tag=("three",), unique_key=b"3") == [9, 3]
        assert await found(tag=("even",), unique_key=b"3") == []
    finally:
        conn.close()


@pytest.mark.parametrize("generic", [True, False])
def test_the_index_is_used_for_rare_tags(durable_dsn: str, *, generic: bool):
    with psycopg.connect(durable_dsn, autocommit=True) as conn:
        conn.execute(
            "insert into durable.gen_durable (fsm, step, queue, tags) "
            "select 'm', 's', 'q', case when n % 2000 = 7 then '{rare,odd}'::text[] when n % 3 = 0 then '{often}' end "
            "from generate_series(1, 20000) n"
        )
        conn.execute("vacuum analyze durable.gen_durable")
        sql = statement("list_by_tags", "durable").sql
        plan = explain(conn, sql, (["rare"], NEWEST, 20, *[None] * 9), generic=generic)
        plan.assert_uses("gen_durable_tags")
        plan.assert_no_seq_scan()
        assert plan.buffers < 40
