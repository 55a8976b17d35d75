"""Fair queues with whole engines: a flood of one tenant does not stop another."""

from __future__ import annotations

from typing import Any

import durable_actors as da
import psycopg
import pytest
import trio
from durable_actors import errors
from durable_actors.telemetry import StepStarted
from tests.engine.kit import QUICK, QUIET, Gate, gated, running, simple
from tests.kit import until

pytestmark = pytest.mark.usefixtures("registry")

FLOOD = """
insert into durable.gen_durable (fsm, fsm_version, step, fair_key, eligible_at)
select %s, 1, %s, %s, now() - interval '1 hour' + n * interval '1 ms' from generate_series(1, %s) n
"""


def flood(dsn: str, machine: Any, key: str | None, count: int) -> None:
    spec = machine.__durable__
    with psycopg.connect(dsn, autocommit=True) as db:
        db.execute(FLOOD, [spec.name, spec.initial, key, count])


def fair(concurrency: int = 1, **options: Any) -> dict[str, da.Queue]:
    return {"default": da.Queue(concurrency, fair=True, **options)}


def order(run: Any) -> list[int]:
    return [event.id for event in run.events.all(StepStarted)]


async def test_the_one_job_of_a_tenant_is_in_the_next_pick(durable_dsn):
    """A has a backlog of 20,000 rows, B sends one: it runs as soon as a slot is free."""
    gate = Gate()
    M = gated(gate)
    flood(durable_dsn, M, "a", 20_000)
    async with running(durable_dsn, queues=fair(prefetch=0), **QUIET) as run:
        await gate.wait_entered()
        number = await run.engine.client.insert(M, fair_key="b")
        gate.open()
        await run.ended(number)
        assert order(run).index(number) <= 2


async def test_the_flood_starves_others_without_fairness(durable_dsn):
    """What the one above is measured against."""
    gate = Gate()
    M = gated(gate)
    flood(durable_dsn, M, "a", 300)
    async with running(durable_dsn, queues={"default": 1}, **QUIET) as run:
        await gate.wait_entered()
        number = await run.engine.client.insert(M, fair_key="b")
        gate.open()
        await run.ended(number)
        assert order(run).index(number) == 300


async def test_everything_runs_in_the_end_in_order_within_a_key(durable_dsn):
    """Keys, rows without one, partition keys, delays and priorities together; work-conserving: the queue empties."""
    M = simple()
    rows: list[da.InsertOptions] = [
        {
            "state": {"n": n},
            "fair_key": (None, "a", "b", "c")[n % 4],
            "partition_key": "p" if n % 5 == 0 else None,
            "priority": n % 3,
            "schedule_in": 0.1 if n % 7 == 0 else None,
        }
        for n in range(200)
    ]
    async with running(durable_dsn, queues=fair(4), **QUICK) as run:
        ids = await run.engine.client.insert_many(M, rows)
        assert [(await run.ended(number)).result for number in ids if number] == list(range(200))


async def test_equal_rows_of_a_key_run_in_the_order_of_their_insert(durable_dsn):
    class M(da.Machine, name="waits"):  # so nothing is claimed ahead, and given back when it takes long
        @da.step
        async def start(self, ctx):
            await trio.sleep(0.001)
            return da.Done()

    async with running(durable_dsn, queues=fair(1, prefetch=0), **QUIET) as run:
        rows: list[da.InsertOptions] = [{"fair_key": "ab"[n % 2]} for n in range(40)]
        ids = [number for number in await run.engine.client.insert_many(M, rows) if number]
        for number in ids:
            await run.ended(number)
        ran = order(run)
        for key in (0, 1):
            mine = ids[key::2]
            assert [number for number in ran if number in mine] == mine


async def test_a_fair_queue_of_rows_without_keys_works_like_any_other(durable_dsn):
    M = simple()
    async with running(durable_dsn, queues=fair(2), **QUIET) as run:
        ids = await run.engine.client.insert_many(M, [{"state": {"n": n}} for n in range(300)])
        assert [(await run.ended(number)).result for number in ids if number] == list(range(300))


async def test_rows_without_a_key_share_one_place(durable_dsn):
    gate = Gate()
    M = gated(gate)
    flood(durable_dsn, M, "a", 2_000)
    async with running(durable_dsn, queues=fair(prefetch=0), **QUIET) as run:
        await gate.wait_entered()
        number = await run.engine.client.insert(M)
        gate.open()
        await run.ended(number)
        assert order(run).index(number) <= 2_000 // 200  # a look reads 256 rows of the flood


async def test_keys_are_paused_shelved_and_resumed_with_their_queue(durable_dsn):
    M = simple()
    async with running(durable_dsn, queues=fair(2), **QUICK) as run:
        await run.engine.client.pause_queue("default")
        ids = await run.engine.client.insert_many(M, [{"fair_key": "ab"[n % 2]} for n in range(10)])
        await run.engine.client.resume_queue("default")
        for number in ids:
            assert (await run.ended(number)).status == "done"


async def test_limits_hold_in_a_fair_queue(durable_dsn):
    """Throttled rows come back when their token does, whatever their key; others run meanwhile."""
    most = now = 0

    @da.job(name="render", queue="fair", slot="gpu")
    async def render(args: int) -> None:
        nonlocal most, now
        now += 1
        most = max(most, now)
        await trio.sleep(0.005)
        now -= 1

    @da.job(name="free", queue="fair")
    async def free(args: int) -> None: ...

    limits = {"gpu": da.Limit(slots=2)}
    async with running(durable_dsn, queues={"fair": da.Queue(10, fair=True)}, limits=limits) as run:
        rows = [{"args": n, "fair_key": "ab"[n % 2]} for n in range(20)]
        limited = await run.engine.client.insert_many(render, rows)
        others = await run.engine.client.insert_many(free, [{"args": n, "fair_key": "c"} for n in range(5)])
        for number in [*others, *limited]:
            await run.engine.client.result(number or 0, timeout=20)
    assert most == 2


async def test_children_and_a_rerun_keep_their_key(durable_dsn):
    M = simple()

    class Parent(da.Machine):
        @da.step
        async def start(self, ctx: da.Context[Any]) -> da.Outcome:
            await ctx.start_child(M, key="x", fair_key="started")
            return da.ScheduleChildren(
                self.end, [da.Child(M, fair_key="child"), da.Child(M, key="g", fair_key="graph")]
            )

        @da.step
        async def end(self, ctx: da.Context[Any]) -> da.Outcome:
            return da.Done()

    async with running(durable_dsn, queues=fair(4), **QUICK) as run:
        number = await run.engine.client.insert(Parent, fair_key="parent", journal="full")
        assert (await run.ended(number)).status == "done"
        again = await run.engine.client.rerun(number)
        await run.ended(again)
    with psycopg.connect(durable_dsn) as db:
        found = db.execute(
            "select fair_key, count(*) from durable.gen_durable group by 1 order by 1"
        ).fetchall()
    assert found == [("child", 2), ("graph", 2), ("parent", 2), ("started", 2)]


async def test_two_nodes_share_a_flood_and_both_serve_the_other_tenant(durable_dsn):
    M = simple()
    flood(durable_dsn, M, "a", 400)
    flood(durable_dsn, M, "b", 20)
    options = {**QUICK, "queues": fair(2, prefetch=0)}
    async with (
        running(durable_dsn, **options) as one,
        running(durable_dsn, **{**options, "name": "two"}) as two,
    ):
        with psycopg.connect(durable_dsn, autocommit=True) as db:
            left = "select count(*) from durable.gen_durable where status <> 'done'"
            await until(lambda: db.execute(left).fetchone() == (0,))
    assert sorted(order(one) + order(two)) == list(range(1, 421))  # each ran once


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"weights": {"a": 2}}, "fair=True"),
        ({"fair": True, "weights": {"a": 0}}, "0.001 to 1000"),
        ({"fair": True, "weights": {1: 1}}, "a text"),
        ({"fair": True, "weights": 3}, "must map"),
        ({"fair": 1}, "fair"),
    ],
)
def test_invalid_options_are_refused(options: dict[str, Any], text: str):
    with pytest.raises(errors.ConfigError, match=text):
        da.Queue(1, **options)


async def test_an_invalid_key_is_refused(durable_dsn):
    M = simple()
    async with running(durable_dsn, **QUIET) as run:
        for key in ("", 3, "x" * 256, "a\0"):
            with pytest.raises(errors.ConfigError, match="fair_key"):
                await run.engine.client.insert(M, fair_key=key)  # type: ignore[arg-type]
