"""Limits without an engine: `execute_next`, runners, and what `explain` says of rows that no pick has met yet."""

from __future__ import annotations

from typing import Any

import durable_actors as da
import psycopg
import pytest
from durable_actors.testing import Bench

pytestmark = pytest.mark.usefixtures("registry")

LIMITS = {"api": da.Limit(1, per=60), "gpu": da.Limit(slots=1)}


@pytest.fixture
def call() -> Any:
    @da.job(name="call", queue="q", rate_limit="api", max_attempts=2, backoff=lambda _: 0)
    async def call(args: dict[str, Any]) -> int:
        return 1

    return call


def uses(durable: Bench, number: int) -> str:
    with psycopg.connect(durable.dsn) as conn:
        found = conn.execute("select rate_limit from durable.gen_durable where id = %s", [number]).fetchone()
    assert found is not None
    return str(found[0])


async def sound(durable: Bench) -> bool:
    report = await durable.verify()
    assert not report.problems
    return report.ok


async def test_execute_next_runs_what_was_throttled_when_its_token_comes(durable: Bench, call: Any) -> None:
    await durable.declare_limits(LIMITS)
    ids = [await durable.insert(call, args={}, journal="full") for _ in range(3)]
    first = await durable.execute_next("q")
    assert first is not None
    assert first.id == ids[0]
    assert await durable.execute_next("q") is None
    await durable.advance("60s")
    second = await durable.execute_next("q")
    assert second is not None
    assert (second.id, second.status) == (ids[1], "done")
    assert await durable.execute_next("q") is None
    assert await sound(durable)


async def test_execute_next_returns_the_instance_that_was_told_to_wait(durable: Bench) -> None:
    @da.job(name="call", queue="q", rate_limit="api")
    async def call(args: dict[str, Any]) -> int:
        raise da.RateLimited(retry_after=30)

    await durable.declare_limits({"api": da.Limit(10, per=60)})
    number = await durable.insert(call, args={}, journal="full")
    found = await durable.execute_next("q")
    assert found is not None
    assert (found.id, found.status, found.attempt, found.interruptions) == (number, "runnable", 0, 1)
    assert await durable.execute_next("q") is None
    assert await sound(durable)


async def test_explain_foresees_that_a_limit_will_hold_it(durable: Bench, call: Any) -> None:
    """No pick has met them: they are on offer, and the next pick throttles them."""
    await durable.declare_limits(LIMITS)
    async with da.open_engine(dsn=durable.dsn, queues={"q": 1}) as engine:
        await engine.client.pause_queue("q")
        before = await durable.insert(call, args={})
        [spent] = [await durable.insert(call, args={}, queue="own")]
        unknown = await durable.insert(call, args={}, rate_limit="nobody")
        assert (await durable.execute_next("own") or await durable.inspect(before)).id == spent
        assert (await durable.explain(before)).reason == "queue_paused"
        await engine.client.resume_queue("q")
        told = await durable.explain(unknown)
        assert told.reason == "throttled"
        assert "no node has declared 'nobody'" in told.summary
        told = await durable.explain(before)
        assert told.reason == "throttled"
        assert told.until is not None
        assert [each.name for each in told.blockers] == ["api"]
        assert "durable-actors limits" in [each.command for each in told.next_actions]


async def test_a_runner_enters_a_step_with_its_limits(durable: Bench) -> None:
    class M(da.Machine[Any], name="limited", queue="q"):
        @da.step
        async def start(self, ctx: da.Context[Any]) -> da.Outcome:
            return da.Done()

        @da.step(slot="gpu")
        async def draw(self, ctx: da.Context[Any]) -> da.Outcome:
            return da.Done()

    await durable.declare_limits(LIMITS)
    given, declared, awaiting = [await durable.insert(M, journal="full") for _ in range(3)]
    for outcome in (
        da.Next("draw", rate_limit=[da.Use("api", "acme", weight=3)], slot=("gpu", "a")),
        da.Next("draw"),
        da.Await("go", then="draw"),
    ):
        claimed = await durable.claim_next("q", steps=["limited/start"])
        assert claimed is not None
        await durable.complete(claimed, outcome)
    assert uses(durable, given) == "api:acme\x1e3\x1f!gpu:a"
    assert uses(durable, declared) == uses(durable, awaiting) == "!gpu"
    await durable.signal(awaiting, "go")

    holder = await durable.claim_next("q")
    second = await durable.claim_next("q")
    assert holder is not None
    assert second is not None
    assert {holder.id, second.id} == {given, declared}
    assert await durable.claim_next("q") is None
    told = await durable.explain(awaiting)
    assert (told.reason, [each.id for each in told.blockers]) == ("throttled", [None, declared])
    assert told.until is None
    for claimed in (holder, second):
        await durable.complete(claimed, da.Done())
    last = await durable.claim_next("q")
    assert last is not None
    assert last.id == awaiting
    await durable.complete(last, da.Done())
    assert uses(durable, awaiting) == "!gpu"
    assert await sound(durable)


async def test_a_runner_starts_no_child_that_uses_limits(durable: Bench, call: Any) -> None:
    class Parent(da.Machine[Any], name="parent", queue="parents"):
        @da.step
        async def start(self, ctx: da.Context[Any]) -> da.Outcome:
            return da.Done()

    number = await durable.insert(Parent)
    claimed = await durable.claim_next("parents")
    assert claimed is not None
    with pytest.raises(da.InvalidOutcome, match="a child of a runner uses no limits, and call does"):
        await durable.complete(claimed, da.ScheduleChildren("start", [da.Child(call, args={})]))
    free = da.Child(call, args={}, rate_limit=None)
    await durable.complete(claimed, da.ScheduleChildren("start", [free]))
    await durable.assert_waiting(number, waiting="children")


async def test_a_limited_keyed_row_goes_through_runners(durable: Bench, call: Any) -> None:
    """Throttled at the head of its key, paused there, failed, resumed: its place is kept, and its history sound."""
    await durable.declare_limits(LIMITS)
    ids = [await durable.insert(call, args={}, partition_key="k", journal="full") for _ in range(3)]
    free = await durable.insert(call, args={}, rate_limit=None, partition_key="k", journal="full")
    claimed = await durable.claim_next("q")
    assert claimed is not None
    assert claimed.id == ids[0]
    assert await durable.claim_next("q") is None
    await durable.complete(claimed, 1)
    assert await durable.claim_next("q") is None, (
        "the next one of the key has no token, and nobody overtakes it"
    )
    assert (await durable.explain(ids[1])).reason == "throttled"

    await durable.advance("60s")
    claimed = await durable.claim_next("q")
    assert claimed is not None
    assert claimed.id == ids[1]
    assert (await durable.fail(claimed, "no")).status == "runnable"
    await durable.pause(ids[1], by="ada")
    assert await durable.claim_next("q") is None
    await durable.pause(ids[2], by="ada")
    claimed = await durable.claim_next("q")
    assert claimed is not None
    assert claimed.id == free, "what is paused gives up its place"
    await durable.complete(claimed, 1)
    await durable.resume(ids[1])
    await durable.resume(ids[2])
    for number in (ids[2], ids[1]):  # one that has failed is due later than those that have not run
        await durable.advance("60s")
        claimed = await durable.claim_next("q")
        assert claimed is not None
        assert claimed.id == number
        await durable.complete(claimed, 1)
    assert await sound(durable)


async def test_a_job_that_kills_its_runners_ends(durable: Bench, call: Any) -> None:
    """As one that kills its engine: what has used up its runs is not handed out."""
    await durable.declare_limits({"api": da.Limit(100, per=1)})
    first = await durable.insert(call, args={}, journal="full")
    second = await durable.insert(call, args={}, max_attempts=3, journal="full")
    runs: list[int] = []
    for _ in range(20):
        claimed = await durable.claim_next("q")
        if claimed is not None:
            runs.append(claimed.id)
            with psycopg.connect(durable.dsn) as conn:  # its lease ends
                conn.execute(
                    "update durable.gen_durable set lease_expires_at = now() - interval '1 s' where locked_by <> ''"
                )
        await durable.advance("10m")
    assert sorted(runs) == [first, first, second, second, second]
    await durable.assert_failed(first, "was executed 2 times (max_attempts=2) and never finished")
    await durable.assert_failed(second, "was executed 3 times (max_attempts=3) and never finished")
