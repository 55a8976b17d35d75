"""Reading a step's inputs: a result that does not decode goes to `handle`, and a refused read is repeated."""

from __future__ import annotations

import durable_actors as da
import pytest
from durable_actors._engine.running import step_inputs as surroundings, step_task
from durable_actors.telemetry import StoreDown, StoreUp
from psycopg.errors import QueryCanceled
from tests.engine.kit import parked, running
from tests.kit import until

pytestmark = pytest.mark.usefixtures("registry")


class Waiter:
    def __init__(self):
        class M(da.Machine, name="waiter"):
            @da.step
            async def start(self, ctx):
                return da.Await("go", then=self.end)

            @da.step
            async def end(self, ctx):
                return da.Done([signal.payload for signal in ctx.awaited])

        self.machine = M


async def test_a_result_that_does_not_decode_goes_through_handle(durable_dsn, monkeypatch):
    async def unreadable(*args, **kwargs):
        raise da.StateError("result of child 2: Number out of range")

    @da.job
    async def child(args):
        return 1

    class Parent(da.Machine):
        @da.step
        async def start(self, ctx):
            return da.ScheduleChildren(self.end, [da.Child(child, args={})])

        @da.step
        async def end(self, ctx):
            return da.Done("not reached")

        async def handle(self, error, ctx):
            return da.Done(f"{ctx.step}: {error}")

    monkeypatch.setattr(surroundings, "read_children", unreadable)
    async with running(durable_dsn) as run:
        row = await run.run(Parent)
    assert row.result == "end: result of child 2: Number out of range"
    assert row.attempt == 0


async def test_a_survey_that_postgres_refuses_is_repeated(durable_dsn, monkeypatch):
    M, real, refusals = Waiter().machine, surroundings.read_inboxes, [QueryCanceled("x")]

    async def refused(*args, **options):
        if refusals:
            raise refusals.pop()
        return await real(*args, **options)

    monkeypatch.setattr(surroundings, "read_inboxes", refused)
    async with running(durable_dsn) as run:
        number = await run.insert(M)
        await da.signal(number, "go", 7)
        row = await run.ended(number)
    assert (row.result, row.attempt, refusals) == ([7], 0, [])


async def test_a_read_that_postgres_refuses_again_and_again_is_reported_once(
    durable_dsn, monkeypatch, caplog
):
    """And one instance whose inbox cannot be read does not keep the others from theirs."""
    M, real, refused_ids = Waiter().machine, surroundings.read_inboxes, set[int]()
    refused = list[list[int]]()

    async def refusing(conn, schema, ids, **options):
        if refused_ids & set(ids):
            refused.append(ids)
            raise QueryCanceled("canceling statement due to statement timeout")
        return await real(conn, schema, ids, **options)

    monkeypatch.setattr(surroundings, "read_inboxes", refusing)
    monkeypatch.setattr(step_task, "LOAD_AGAIN", 0.01)
    async with running(durable_dsn) as run:
        numbers = [await run.insert(M) for _ in range(5)]
        for number in numbers:
            await parked(run, number)
        refused_ids.add(numbers[2])
        for number in numbers:
            await da.signal(number, "go", 7)
        for number in set(numbers) - refused_ids:
            assert (await run.ended(number)).result == [7]
        await until(lambda: refused.count([numbers[2]]) > 3)
        [down] = run.events.all(StoreDown)
        refused_ids.clear()
        assert (await run.ended(numbers[2])).result == [7]
        await run.events.wait(StoreUp, actor=down.actor)
    told = [text for text in caplog.messages if text.startswith(down.actor)]
    assert len(told) == 2
    assert "statement timeout" in told[0]
    assert "works again" in told[1]
