"""A retry policy, and a limit that the insert gave, through the engine and the database."""

from __future__ import annotations

import durable_actors as da
import pytest
import trio
from durable_actors.machine import isolated_registry
from durable_actors.testing import Bench
from tests.engine.kit import running

pytestmark = pytest.mark.usefixtures("registry")

POLICY = da.Backoff(max_attempts=3, initial=60, jitter=0, on=ConnectionError)


class Doubt(Exception): ...


async def has_failed(number: int) -> bool:
    row = await da.inspect(number)
    return row.status == "runnable" and row.last_error is not None


async def pass_time(durable: Bench, *delays: float) -> None:
    """Run what is due, then what is due after each delay."""
    await durable.drain()
    for delay in delays:
        await durable.advance(delay)
        await durable.drain()


def transfer(*, handled: bool = False) -> type[da.Machine]:
    class Transfer(da.Machine, name="bank:transfer"):
        @da.step(initial=True, retry=POLICY)
        async def debit(self, ctx: da.Context) -> da.Outcome:
            if ctx.attempt < ctx.state.get("fails", 99):
                raise ConnectionError("no answer") if "doubt" not in ctx.state else Doubt("what?")
            return da.Next(self.credit, {**ctx.state, "runs": ctx.attempt + 1})

        @da.step
        async def credit(self, ctx: da.Context) -> da.Outcome:
            return da.Done(ctx.state["runs"])

        if handled:

            async def handle(self, error: Exception, ctx: da.Context) -> da.Outcome:
                return da.Next(self.credit, {"runs": f"{type(error).__name__} after {ctx.attempt + 1}"})

    return Transfer


async def test_a_machine_without_handle_is_retried(durable: Bench) -> None:
    number = await durable.insert(transfer(), state={"fails": 2})
    await durable.drain()
    waits = await da.explain(number)
    assert waits.reason == "scheduled"
    assert "(run 2 of 3)" in waits.summary
    assert waits.until is not None
    await pass_time(durable, 60, 119)
    assert (await da.inspect(number)).attempt == 2
    await pass_time(durable, 1)
    await durable.assert_done(number, 3)
    failed = [record for record in await da.history(number) if record.error is not None]
    assert [record.kind for record in failed] == ["retry", "retry"]


async def test_a_process_without_the_code_knows_how_many(durable_dsn: str) -> None:
    """From what nodes publish."""
    machine = transfer()
    async with running(durable_dsn):
        number = await da.insert(machine)
        with trio.fail_after(30):
            while not await has_failed(number):
                await trio.sleep(0.01)
        with isolated_registry():
            waits = await da.explain(number)
    assert "(run 2 of 3)" in waits.summary


async def test_it_fails_when_no_run_is_left(durable: Bench) -> None:
    number = await durable.insert(transfer())
    await pass_time(durable, 1000, 1000)
    await durable.assert_failed(number, "no answer")
    assert (await da.inspect(number)).attempt == 2


async def test_an_exception_that_the_policy_does_not_name(durable: Bench) -> None:
    number = await durable.insert(transfer(), state={"doubt": True})
    await durable.drain()
    await durable.assert_failed(number, "what?")


async def test_handle_is_asked_when_no_run_is_left(durable: Bench) -> None:
    last, other = transfer(handled=True), await durable.insert(transfer(handled=True), state={"doubt": True})
    number = await durable.insert(last)
    await pass_time(durable, 1000, 1000)
    await durable.assert_done(number, "ConnectionError after 3")
    await durable.assert_done(other, "Doubt after 1")


@pytest.mark.parametrize("limit", [1, 2, 5])
async def test_an_insert_limits_the_runs(durable: Bench, limit: int) -> None:
    runs: list[int] = []

    @da.job(name="mail", max_attempts=3, backoff=da.Backoff(initial=1, jitter=0))
    async def mail(args: dict, ctx: da.Context[dict]) -> None:
        runs.append(ctx.attempt)
        raise ConnectionError("no answer")

    jobs = [
        await durable.insert(mail, max_attempts=limit),
        *await da.insert_many(mail, [{"max_attempts": limit}, {"max_attempts": limit, "unique_key": "k"}]),
    ]
    machine = await durable.insert(transfer(), max_attempts=limit)
    await pass_time(durable, *[1000] * limit)
    assert sorted(runs) == sorted([*range(limit)] * 3)
    for number in (*jobs, machine):
        assert number is not None
        ended = await da.inspect(number)
        assert (ended.status, ended.attempt, ended.max_attempts) == ("failed", limit - 1, limit)
    again = await da.rerun(machine, state={})
    assert (await da.inspect(again)).max_attempts == limit
    assert (await da.verify()).problems == []


async def test_a_child_has_a_limit_of_its_own(durable: Bench) -> None:
    @da.job(name="mail", backoff=lambda attempt: 0)
    async def mail(args: dict) -> None:
        raise ConnectionError("no answer")

    class Parent(da.Machine, name="parent"):
        @da.step
        async def start(self, ctx: da.Context) -> da.Outcome:
            await ctx.start_child(mail, key="one", max_attempts=2)
            return da.ScheduleChildren(self.end, [da.Child(mail, max_attempts=3)])

        @da.step
        async def end(self, ctx: da.Context) -> da.Outcome:
            return da.Done([child.status for child in ctx.children])

    number = await durable.insert(Parent)
    await durable.drain()
    await durable.assert_done(number, ["failed"])
    found = await da.list_instances(da.Filter(parent=number))
    assert sorted((each.attempt, each.max_attempts or 0) for each in found) == [(1, 2), (2, 3)]


async def test_a_crash_counts_as_a_run_of_a_job(durable: Bench) -> None:
    @da.job(name="mail")
    async def mail(args: dict) -> str:
        return "done"

    number = await durable.insert(mail, max_attempts=1)
    with durable.crash_after(mail):
        await durable.drain()
    await durable.drain()
    await durable.assert_failed(number, "max_attempts=1")


@pytest.mark.parametrize("machine", [False, True])
async def test_runners_know_both(durable: Bench, machine: bool) -> None:
    @da.job(name="mail", max_attempts=3, backoff=da.Backoff(initial=60, jitter=0, on=ConnectionError))
    async def mail(args: dict) -> None: ...

    what = transfer() if machine else mail
    limited, plain, odd = [
        await durable.insert(what, **options) for options in ({"max_attempts": 1}, {}, {"max_attempts": 9})
    ]
    ends: dict[int, da.Instance] = {}
    for error in (ConnectionError("no"), ConnectionError("no"), Doubt("what?")):
        claimed = await da.claim_next("default", machines=[what])
        assert claimed is not None
        ends[claimed.id] = await da.fail(claimed, error)
    assert {number: each.status for number, each in ends.items()} == {
        limited: "failed",
        plain: "runnable",
        odd: "failed",
    }
    delay = (ends[plain].eligible_at - ends[plain].updated_at).total_seconds()
    assert delay == pytest.approx(60)
