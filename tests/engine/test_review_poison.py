"""Rows that nobody can read, and bugs: neither spins, neither takes others with it."""

from __future__ import annotations

import durable_actors as da
import pytest
import trio
from durable_actors._engine.running import step_inputs as surroundings, step_run
from durable_actors.telemetry import ClaimsReaped, StepStarted
from psycopg.errors import QueryCanceled
from tests.engine.engine_kit import Gate, running

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


async def test_a_bug_of_ours_is_a_crash(durable_dsn, monkeypatch):
    """Given back at once it would spin; the lease ends the claim, and the reaper counts the crash."""
    real_run, bugs = step_run.StepRun.run, [AssertionError("a bug")]

    async def buggy(self, ahead):
        if bugs:
            raise bugs.pop()
        return await real_run(self, ahead)

    monkeypatch.setattr(step_run.StepRun, "run", buggy)

    @da.job
    async def quick(args):
        return "finished"

    async with running(durable_dsn, lease_ttl=1, reap_interval=0.2) as run:
        number = await run.insert(quick, args={})
        await run.events.wait(ClaimsReaped)
        row = await run.ended(number)
    assert (row.result, row.attempt, row.crashes) == ("finished", 1, 1)


async def test_a_clean_up_that_fails_at_the_end_of_a_drain(durable_dsn, db):
    """Cancelled and an error, in one group: interrupted, so the row goes back at once."""
    gate = Gate()

    async def untidy():
        try:
            await gate.wait()
        finally:
            raise ValueError("in the clean-up")

    @da.job
    async def nursed(args):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(untidy)
            nursery.start_soon(trio.sleep_forever)

    async with running(durable_dsn, drain_timeout=0) as run:
        number = await run.insert(nursed, args={})
        await gate.wait_entered()
        assert len(run.events.all(StepStarted)) == 1
    status, attempt, crashes, locked = db.row(number, "status::text, attempt, crashes, locked_by")
    assert (status, crashes, locked) == ("runnable", 0, None)
    assert attempt == 0  # a drain spends none
