"""Limits, as engines, callers and steps see them. tests/store/test_limits.py has what the database guarantees."""

from __future__ import annotations

from typing import Any

import durable_actors as da
import pytest
import trio
from tests.engine.kit import Db, running
from tests.kit import until

pytestmark = pytest.mark.usefixtures("registry")


async def test_a_rate_is_kept_and_every_throttled_job_runs(db: Db):
    ran: list[float] = []

    @da.job(name="call", rate_limit="api")
    async def call(args: int) -> None:
        ran.append(trio.current_time())

    async with running(db.dsn, limits={"api": da.Limit(20, per=1, burst=2)}):
        ids = await da.insert_many(call, [{"args": n} for n in range(12)])
        for number in ids:
            await da.result(number or 0, timeout=10)
    assert len(ran) == 12
    assert ran[-1] - ran[0] > 0.35, "ten tokens at 20 a second, after a burst of two"


async def test_slots_hold_over_two_nodes(db: Db):
    now = most = 0

    @da.job(name="render", slot="gpu")
    async def render(args: int) -> None:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await trio.sleep(0.01)
        now -= 1

    limits = {"gpu": da.Limit(slots=3)}
    async with (
        running(db.dsn, limits=limits, name="a", node="a"),
        running(db.dsn, limits=limits, name="b", node="b"),
    ):
        ids = await da.insert_many(render, [{"args": n} for n in range(40)], engine="a")
        for number in ids:
            await da.result(number or 0, timeout=20, engine="a")
    assert most == 3


async def test_a_limited_step_never_runs_ahead(db: Db):
    class M(da.Machine[Any], name="m"):
        @da.step
        async def start(self, ctx: da.Context[Any]) -> da.Outcome:
            return da.Next(self.call, rate_limit=("api", "acme"), weight=2, slot="gpu")

        @da.step
        async def call(self, ctx: da.Context[Any]) -> da.Outcome:
            return da.Next(self.end)

        @da.step
        async def end(self, ctx: da.Context[Any]) -> da.Outcome:
            return da.Done(ctx.claim_id)

    async with running(db.dsn, limits={"api": da.Limit(1, per=60), "gpu": da.Limit(slots=1)}):
        first = await da.insert(M)
        await da.result(first, timeout=5)
        second = await da.insert(M)
        await until(lambda: db.row(second, "hold, limited_by") == (3, "api:acme"))
        assert db.row(second, "rate_limit, step") == ("api:acme\x1e2\x1f!gpu", "call")
        assert db.row(first, "rate_limit") == (None,)


async def test_an_unknown_limit_waits_until_a_node_declares_it(db: Db):
    @da.job(name="call", rate_limit="later")
    async def call(args: int) -> int:
        return args

    async with running(db.dsn):
        number = await da.insert(call, args=1, engine="default")
        await until(lambda: db.row(number, "hold") == (3,))
        async with running(db.dsn, limits={"later": da.Limit(10)}, name="other"):
            assert await da.result(number, timeout=5, engine="default") == 1


async def test_one_that_is_told_to_wait_stops_its_key_and_spends_no_attempt(db: Db):
    ran: list[tuple[int, int]] = []

    @da.job(name="call", rate_limit=("api", "acme"), max_attempts=1)
    async def call(args: int, ctx: da.Context[int]) -> None:
        ran.append((args, ctx.attempt))
        if len(ran) == 1:
            raise da.RateLimited(retry_after=0.4)

    async with running(db.dsn, limits={"api": da.Limit(1000)}, queues={"default": 1}):
        began = trio.current_time()
        ids = await da.insert_many(call, [{"args": n} for n in range(3)])
        for number in ids:
            await da.result(number or 0, timeout=10)
    assert trio.current_time() - began > 0.35
    assert sorted(ran) == [(0, 0), (0, 0), (1, 0), (2, 0)], "two others have not even asked"


async def test_what_was_spent_is_charged_after_the_fact(db: Db):
    @da.job(name="call", rate_limit="tpm")
    async def call(args: int, ctx: da.Context[int]) -> None:
        await ctx.spent("tpm", args)

    async with running(db.dsn, limits={"tpm": da.Limit(1000, per=1000, burst=100)}):
        await da.result(await da.insert(call, args=99), timeout=5)
        waits = await da.insert(call, args=1)
        await until(lambda: db.row(waits, "hold, limited_by") == (3, "tpm"))
