"""The feeder at its edges: a drain in the middle of a pick, a pool that is down, a buffer that is overtaken."""

from __future__ import annotations

import durable_actors as da
import pytest
import trio
from durable_actors._engine.claiming import feeder
from durable_actors._engine.claiming.cursor import MAX_EXTRAS, PickCursor
from durable_actors.otp import Pool, PoolClosed
from durable_actors.telemetry import DrainStarted, Picked, StepStarted
from tests.engine.engine_kit import Gate, running, until

pytestmark = pytest.mark.usefixtures("registry")


async def test_a_pick_that_waits_for_its_connection_claims_nothing_in_a_drain(durable_dsn, db):
    @da.job
    async def quick(args):
        return 1

    async with running(durable_dsn) as run:
        node = run.engine._node
        async with node.pool.acquire("claim"):
            number = await run.insert(quick, args={})
            await until(
                lambda: any(lane.name == "claim" and lane.waiting for lane in run.engine.connections().lanes)
            )
            run.engine.request_stop()
            await run.events.wait(DrainStarted)
        await run.engine.stop()
        assert run.events.all(StepStarted) == []
    assert db.row(number, "status::text, attempt, updated_at = inserted_at") == ("runnable", 0, True)


async def test_a_claim_is_not_forgotten_when_the_pool_is_down(durable_dsn, monkeypatch):
    """Neither buffered nor running, it would be renewed for ever and run by nobody."""
    real, failures = Pool.start_nowait, [PoolClosed("x")]

    def start_nowait(self, *args, **kwargs):
        if failures:
            raise failures.pop()
        return real(self, *args, **kwargs)

    @da.job
    async def quick(args):
        return "finished"

    monkeypatch.setattr(Pool, "start_nowait", start_nowait)
    async with running(durable_dsn, lease_ttl=3600, reap_interval=3600) as run:
        row = await run.run(quick, args={})
    assert (row.result, row.attempt, row.crashes, failures) == ("finished", 0, 0, [])


async def test_urgent_rows_overtake_prefetched_ones(durable_dsn):
    gate, order = Gate(), []

    @da.job
    async def ordered(args):
        order.append(args["name"])
        await gate.wait()

    async with running(durable_dsn, queues={"default": da.Queue(1, prefetch=3)}) as run:
        await run.insert(ordered, args={"name": "first"})
        await gate.wait_entered()
        numbers = [await run.insert(ordered, args={"name": "later"}, priority=5)]
        await run.events.wait(Picked, claimed=1, count=2)
        numbers.append(await run.insert(ordered, args={"name": "urgent"}, priority=-5))
        await run.events.wait(Picked, claimed=1, count=3)
        gate.open()
        for number in numbers:
            await run.ended(number)
    assert order == ["first", "urgent", "later"]


def test_hints_are_bounded():
    cursor = PickCursor()
    for number in range(MAX_EXTRAS + 5):
        cursor.hint(number)
    assert len(cursor.begin(1.0, limit=10**6, known=frozenset()).extras) == MAX_EXTRAS


async def test_a_burst_of_inserts_is_served(durable_dsn):
    @da.job
    async def quick(args):
        return args["n"]

    ids: list[int] = []

    async with running(durable_dsn, queues={}) as run:

        async def insert(n):
            ids.append(await run.insert(quick, args={"n": n}))

        async with trio.open_nursery() as nursery:
            for n in range(1200):
                nursery.start_soon(insert, n)
    assert len(set(ids)) == 1200


async def test_what_was_claimed_begins_before_the_queue_is_looked_at_again(durable_dsn, monkeypatch):
    """At rest every pick is short, and the look after it took as long as half of it."""
    read, pick, look, step, claimed = feeder.read_queue, feeder.pick_instances, Gate(), Gate(), []

    @da.job
    async def quick(args):
        await step.wait()

    async def picked(*args, **kwargs):
        found = await pick(*args, **kwargs)
        claimed.extend(found.claims)
        return found

    async def held(*args):
        if claimed:
            await look.wait()
        return await read(*args)

    monkeypatch.setattr(feeder, "pick_instances", picked)
    monkeypatch.setattr(feeder, "read_queue", held)
    async with running(durable_dsn) as run:
        await run.insert(quick, args={})
        await step.wait_entered()
        await look.wait_entered()
        step.open()
        look.open()
