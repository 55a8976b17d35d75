"""Workflows: tasks in order, results in their types, failures, conditions, options of each task, crashes."""

from __future__ import annotations

from datetime import date
from typing import Any

import attrs
import durable_actors as da
import pytest
import trio
from durable_actors.testing import Bench, crash_anywhere

RUNS: list[str] = []
FAILING: set[str] = set()


@pytest.fixture(autouse=True)
def _clean():
    RUNS.clear()
    FAILING.clear()


@attrs.frozen
class Month:
    year: int
    days: tuple[date, ...] = ()


@attrs.frozen
class Sales:
    day: date
    total: int


def ran(ctx: da.Context[Any]) -> None:
    name = ctx.machine.rpartition(".")[2]
    RUNS.append(name)
    if name in FAILING:
        raise ValueError(f"{name} is broken")


class Report(da.Workflow[Month], name="wf:report", queue="reports"):
    @da.task(max_attempts=1)
    async def fetch(self, ctx: da.Context[Month]) -> Sales:
        ran(ctx)
        return Sales(ctx.state.days[0], 7)

    @da.task(queue="other", max_attempts=1)
    def rates(self, ctx: da.Context[Month]) -> dict[int, float]:
        ran(ctx)
        return {ctx.state.year: 2.0}

    @da.task(after=[fetch, rates], max_attempts=1)
    async def convert(self, ctx: da.Context[Month]) -> float:
        ran(ctx)
        sales = ctx.result_of(self.fetch)
        return sales.total * ctx.result_of(self.rates)[sales.day.year]

    @da.task(after="convert", max_attempts=1)
    async def mail(self, ctx: da.Context[Month]) -> None:
        ran(ctx)
        assert list(ctx.dependencies) == ["convert"]

    @da.task(after=[rates], max_attempts=1)
    async def archive(self, ctx: da.Context[Month]) -> str:
        ran(ctx)
        return str(ctx.id)


MONTH = Month(2026, (date(2026, 3, 1),))


async def children(durable: Bench, number: int) -> dict[str, da.Instance]:
    found = [await durable.inspect(node.id) for node in (await durable.tree(number)).root.children]
    return {each.machine.rpartition(".")[2]: each for each in found}


async def test_tasks_run_in_order_and_hand_on_their_results(durable: Bench):
    number = await durable.insert(Report, state=MONTH)
    await durable.drain()
    for before, after in [
        ("fetch", "convert"),
        ("rates", "convert"),
        ("convert", "mail"),
        ("rates", "archive"),
    ]:
        assert RUNS.index(before) < RUNS.index(after)
    assert len(RUNS) == 5
    found = await children(durable, number)
    await durable.assert_done(
        number,
        {
            "fetch": {"day": "2026-03-01", "total": 7},
            "rates": {"2026": 2.0},
            "convert": 14.0,
            "mail": None,
            "archive": str(found["archive"].id),
        },
    )
    assert {name: each.queue for name, each in found.items()} == dict.fromkeys(found, "reports") | {
        "rates": "other"
    }
    assert {each.status for each in found.values()} == {"done"}


async def test_a_failed_task_fails_the_workflow_and_cancels_what_comes_after_it(durable: Bench):
    FAILING.add("fetch")
    number = await durable.insert(Report, state=MONTH)
    await durable.drain()
    found = await children(durable, number)
    assert {name: each.status for name, each in found.items()} == {
        "fetch": "failed",
        "rates": "done",
        "convert": "cancelled",
        "mail": "cancelled",
        "archive": "done",
    }
    assert sorted(RUNS) == ["archive", "fetch", "rates"]
    assert "upstream failed" in (found["convert"].last_error or "")
    broken = f"task fetch (instance {found['fetch'].id}) failed: ValueError: fetch is broken"
    assert (await durable.assert_failed(number)).last_error == f"{broken} (2 tasks after it did not run)"


class Careful(da.Workflow[dict[str, Any]], name="wf:careful"):
    @da.task(max_attempts=2, backoff=lambda attempt: 30 * (attempt + 1))
    async def risky(self, ctx: da.Context[dict[str, Any]]) -> int:
        ran(ctx)
        return 1

    @da.task(after=risky, when="ended")
    async def report(self, ctx: da.Context[dict[str, Any]]) -> list[Any]:
        risky = ctx.dependencies["risky"]
        return [risky.status, risky.last_error, risky.key, risky.machine]

    @da.task(after=report)
    async def last(self, ctx: da.Context[dict[str, Any]]) -> int:
        return len(ctx.result_of(self.report))

    async def finish(self, ctx: da.Context[dict[str, Any]]) -> int:
        return ctx.result_of(self.last) + ctx.result_of(self.risky)


async def test_a_task_may_run_after_any_end_and_retries_are_its_own(durable: Bench):
    FAILING.add("risky")
    number = await durable.insert(Careful)
    await durable.drain()
    assert RUNS == ["risky"]
    await durable.advance("31s")
    await durable.drain()
    assert RUNS == ["risky", "risky"]
    found = await children(durable, number)
    assert found["report"].result == ["failed", "ValueError: risky is broken", "risky", "wf:careful.risky"]
    assert found["last"].result == 4
    await durable.assert_failed(number, "task risky")


async def test_finish_makes_the_result_of_all_tasks(durable: Bench):
    number = await durable.insert(Careful)
    await durable.drain()
    await durable.assert_done(number, 5)


class Broken(da.Workflow[dict[str, Any]], name="wf:broken"):
    @da.task
    async def one(self, ctx: da.Context[dict[str, Any]]) -> int:
        return 1

    @da.task(after=one)
    async def two(self, ctx: da.Context[dict[str, Any]]) -> int:
        return 2

    @da.task(after=two)
    async def three(self, ctx: da.Context[dict[str, Any]]) -> int:
        return ctx.result_of(self.one)  # it comes after it only through two


async def test_a_task_has_only_the_results_of_what_it_comes_after_directly(durable: Bench):
    number = await durable.insert(Broken)
    await durable.drain()
    [told] = [child.last_error for child in (await children(durable, number)).values() if child.last_error]
    assert told == (
        "durable_actors.errors.NotADependency: wf:broken.three does not come after 'one', so it has no result of that: "
        "add it to after=[...] (it comes after two)"
    )
    await durable.assert_failed(number, f"failed: {told}")


async def test_a_task_that_was_inserted_or_rerun_without_its_workflow_says_so(durable: Bench):
    number = await durable.insert("wf:broken.three", args={})
    await durable.drain()
    await durable.assert_failed(
        number, "wf:broken.three runs alone, without its workflow, so it has no result of 'one'"
    )


async def test_a_task_alone(durable: Bench):
    outcome = await durable.run_step(
        Report.convert, MONTH, dependencies={"fetch": Sales(date(2026, 1, 1), 3), "rates": {2026: 1.5}}
    )
    assert outcome == da.Done(4.5)
    failed = da.ChildView(1, "wf:careful.risky", "failed", None, "boom", "risky")
    assert await durable.run_step(Careful.report, {}, dependencies={"risky": failed}) == da.Done(
        ["failed", "boom", "risky", "wf:careful.risky"]
    )
    with pytest.raises(da.DefinitionError, match="runs alone"):
        await durable.run_step(Report.convert, MONTH)
    views = [da.ChildView(1, "", "done", result, key=key) for key, result in (("last", 4), ("risky", 1))]
    assert await durable.run_step("finish", {}, machine=Careful, children=views) == da.Done(5)
    number = await durable.insert(Report.fetch, args=MONTH)  # a task is a job
    await durable.drain()
    await durable.assert_done(number, {"day": "2026-03-01", "total": 7})


async def test_the_same_result_wherever_a_worker_dies(durable: Bench):
    async def run(durable: Bench) -> Any:
        number = await durable.insert(Careful)
        await durable.drain()
        return await durable.result(number)

    points = await crash_anywhere(durable, run)
    assert len(points) == 2 * 5  # start, three tasks, finish


async def test_a_workflow_with_an_engine(durable_dsn: str):
    async with da.open_engine(dsn=durable_dsn, queues={"reports": 4, "other": 1}):
        number = await da.insert(Report, state=MONTH)
        result = await da.result(number, timeout=30)
        assert result["convert"] == 14.0
        FAILING.add("convert")
        failed = await da.insert(Report, state=MONTH)
        with pytest.raises(da.InstanceFailed, match=r"task convert .* failed: ValueError: convert is broken"):
            await da.result(failed, timeout=30)
        FAILING.clear()
        RUNS.clear()
        again = await da.rerun(failed, step=Report.convert)
        with trio.fail_after(30):
            assert (await da.result(again))["convert"] == 14.0
        assert RUNS == ["convert", "mail"]
