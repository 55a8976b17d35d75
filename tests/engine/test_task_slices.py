"""Steps that never suspend share one task: each has its own claim, context, deadline and outcome."""

from __future__ import annotations

from typing import Any

import durable_actors as da
import pytest
import trio
from durable_actors._engine.running.dispatcher import TaskSlice
from durable_actors._store.rows import Claim
from tests.engine.kit import QUIET, Gate, active_claims, dispatcher_of, running
from tests.kit import until

pytestmark = pytest.mark.usefixtures("registry")


async def test_steps_that_wait_for_nothing_share_one_task(durable_dsn):
    """And each has its own claim, context and outcome."""
    seen: list[tuple[int, object]] = []

    @da.job(name="quick")
    async def quick(ctx: da.Context[dict[str, Any]]) -> int:
        seen.append((ctx.id, trio.lowlevel.current_task()))
        return ctx.id

    async with running(durable_dsn, queues={"default": 50}, **QUIET) as run:
        ids = await run.engine.client.insert_many(quick, [{"args": {}} for _ in range(40)])
        rows = [await run.ended(number) for number in ids if number]
        assert run.engine._parts is not None
        assert run.engine._parts.pool is not None
        started = run.engine._parts.pool.statistics().started
    assert [row.result for row in rows] == ids
    assert [row.attempt for row in rows] == [0] * 40
    assert len({task for _, task in seen}) < 20
    assert started < 20


async def test_one_that_waits_ends_its_turn_and_is_cancelled_alone(durable_dsn):
    """What ran before it in the same task is committed; what is lost is the one that waits."""
    gate, ran = Gate(), list[int]()

    @da.job(name="some", max_attempts=5)
    async def some(args: dict[str, Any]) -> None:
        ran.append(args["n"])
        if args["n"] == 5 and ran.count(5) == 1:
            await gate.wait()

    async with running(durable_dsn, queues={"default": 50}, **QUIET) as run:
        ids = await run.engine.client.insert_many(some, [{"args": {"n": n}} for n in range(10)])
        await gate.wait_entered()
        waiting = ids[5]
        assert waiting is not None
        await until(lambda: [each.claim.id for each in active_claims(run)] == [waiting])
        [one] = active_claims(run)
        run.engine._node.claims.interrupt(one, "a test")
        rows = [await run.ended(number) for number in ids if number]
    assert [row.attempt for row in rows] == [0] * 5 + [1] + [0] * 4
    assert sorted(ran) == sorted([*range(10), 5])


async def test_each_has_the_deadline_of_its_own_lease(durable_dsn, monkeypatch):
    """One task runs them all, and is cancelled when the lease of the present one is over."""
    found: list[tuple[float, float]] = []

    @da.job(name="quick")
    async def quick(ctx: da.Context[dict[str, Any]]) -> None:
        one = run.engine._node.claims.find(ctx.claim_id)
        assert one is not None
        assert one.task is not None
        found.append((one.task.deadline, one.claim.trusted_until))

    async with running(durable_dsn, queues={"default": 50}, **QUIET) as run:
        add = dispatcher_of(run).add

        def spread(claims: list[Claim], now: float) -> None:
            for number, claim in enumerate(claims):
                claim.trusted_until += number
            add(claims, now)

        monkeypatch.setattr(dispatcher_of(run), "add", spread)
        ids = await run.engine.client.insert_many(quick, [{"args": {}} for _ in range(20)])
        for number in ids:
            assert number is not None
            await run.ended(number)
    assert len({until for _, until in found}) == 20
    assert all(deadline == until for deadline, until in found)


async def test_whoever_waits_is_noticed_also_after_one_that_has_waited(durable_dsn, monkeypatch):
    noticed: list[int] = []

    @da.job(name="twice")
    async def twice(args: dict[str, Any]) -> None:
        await trio.sleep(0)
        await trio.sleep(0)

    async with running(durable_dsn, queues={"default": da.Queue(1, prefetch=20)}, **QUIET) as run:
        on_suspended = dispatcher_of(run).on_suspended

        def note(task_slice: TaskSlice, now: float) -> None:
            noticed.append(task_slice.active.claim.id)
            on_suspended(task_slice, now)

        monkeypatch.setattr(dispatcher_of(run), "on_suspended", note)
        ids = await run.engine.client.insert_many(twice, [{"args": {}} for _ in range(10)])
        for number in ids:
            assert number is not None
            await run.ended(number)
    assert sorted(noticed) == ids
