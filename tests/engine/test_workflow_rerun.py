"""`rerun(id, step="task")`: a workflow is run again from a task, with the results of what need not run again."""

from __future__ import annotations

from typing import Any

import attrs
import durable_actors as da
import psycopg
import pytest
from durable_actors import sync
from durable_actors._store.rerun import _unknown
from durable_actors.machine import isolated_registry
from durable_actors.testing import Bench

RUNS: list[str] = []
FAILING: set[str] = set()


@pytest.fixture(autouse=True)
def _clean():
    RUNS.clear()
    FAILING.clear()


@attrs.frozen
class Params:
    base: int = 1


def ran(ctx: da.Context[Params], result: int) -> int:
    name = ctx.machine.rpartition(".")[2]
    RUNS.append(name)
    if name in FAILING:
        raise da.Cancel(f"{name} is broken")
    return result + ctx.state.base


class Chain(da.Workflow[Params], name="rr:chain", queue="q"):
    """a ─> b ─> c ─> d, and beside it x ─> y; d comes after y, too."""

    @da.task
    async def a(self, ctx: da.Context[Params]) -> int:
        return ran(ctx, 10)

    @da.task(after=a)
    async def b(self, ctx: da.Context[Params]) -> int:
        return ran(ctx, ctx.result_of(self.a))

    @da.task(after=b)
    async def c(self, ctx: da.Context[Params]) -> int:
        return ran(ctx, ctx.result_of(self.b))

    @da.task
    async def x(self, ctx: da.Context[Params]) -> int:
        return ran(ctx, 100)

    @da.task(after=x, when="ended")
    async def y(self, ctx: da.Context[Params]) -> int:
        return ran(ctx, 1000)

    @da.task(after=[c, y])
    async def d(self, ctx: da.Context[Params]) -> list[int]:
        return [ran(ctx, ctx.result_of(self.c)), ctx.result_of(self.y)]


class Plain(da.Machine[Params], name="rr:plain", queue="q"):
    @da.step(initial=True)
    async def start(self, ctx: da.Context[Params]) -> da.Outcome:
        return da.ScheduleChildren(self.c, [da.Child("rr:job", key="c")])

    @da.step
    async def c(self, ctx: da.Context[Params]) -> da.Outcome:
        return da.Done()


@da.job(name="rr:job", queue="q")
async def job(args: dict[str, Any]) -> None: ...


RESULTS = {"a": 11, "b": 12, "c": 13, "x": 101, "y": 1001, "d": [14, 1001]}


def state_of(bench: Bench, number: int) -> tuple[Any, ...]:
    with psycopg.connect(bench.dsn) as db:
        found = db.execute("select step, state from durable.gen_durable where id = %s", [number]).fetchone()
    assert found is not None
    return found


async def failed_at(durable: Bench, *names: str) -> int:
    FAILING.update(names)
    number = await durable.insert(Chain, state=Params())
    await durable.drain()
    await durable.assert_failed(number)
    FAILING.clear()
    RUNS.clear()
    return number


async def test_from_the_failed_task(durable: Bench):
    old = await failed_at(durable, "c")
    explanation = await durable.explain(old)
    assert explanation.summary.endswith(f"; `durable-actors rerun {old} --step c` runs it again from there")
    assert explanation.next_actions[0].call == f"durable_actors.rerun({old}, step='c')"
    new = await durable.rerun(old, step="c", by="ada", reason="mended", idempotency_key="k")
    assert new != old
    carried = {"a": 11, "b": 12, "x": 101, "y": 1001}
    assert state_of(durable, new) == ("rerun", {"params": {"base": 1}, "carried": carried})
    assert await durable.rerun(old, step="c", idempotency_key="k") == new
    await durable.drain()
    assert RUNS == ["c", "d"]
    await durable.assert_done(new, RESULTS)
    assert (await durable.inspect(new)).rerun_of == old
    assert state_of(durable, new) == ("finish", {"base": 1})
    steps = {node.machine: node.step for node in (await durable.tree(new)).root.children}
    assert steps["rr:chain.a"] == "carried"
    assert steps["rr:chain.c"] == "perform"


async def test_a_task_that_was_done_and_all_after_it_run_again(durable: Bench):
    old = await durable.insert(Chain, state=Params())
    await durable.drain()
    RUNS.clear()
    new = await durable.rerun(old, step=Chain.x)
    await durable.drain()
    assert sorted(RUNS) == ["d", "x", "y"]
    await durable.assert_done(new, RESULTS)


async def test_tasks_without_a_result_run_again_wherever_they_are(durable: Bench):
    """`y` ran after the failed `x`: now that `x` runs again, `y` does as well."""
    old = await failed_at(durable, "c", "x")
    new = await durable.rerun(old, step="c")
    await durable.drain()
    assert sorted(RUNS) == ["c", "d", "x", "y"]
    await durable.assert_done(new, RESULTS)


async def test_the_old_rows_may_be_gone_before_the_new_one_starts(durable: Bench):
    old = await failed_at(durable, "c")
    new = await durable.rerun(old, step="c")
    with psycopg.connect(durable.dsn, autocommit=True) as db:
        db.execute("delete from durable.graph")
        db.execute("delete from durable.gen_durable where id <> %s", [new])
    await durable.drain()
    assert RUNS == ["c", "d"]
    await durable.assert_done(new, RESULTS)


async def test_again_and_again(durable: Bench):
    old = await failed_at(durable, "c")
    FAILING.add("d")
    second = await durable.rerun(old, step="c")
    third = await durable.rerun(second, step="d")  # second has not begun: c has no result yet
    await durable.drain()
    assert sorted(RUNS) == ["c", "c", "d", "d"]
    await durable.assert_failed(third, "failed: d is broken")
    FAILING.clear()
    RUNS.clear()
    last = await durable.rerun(third, step="d")
    await durable.drain()
    assert RUNS == ["d"]
    await durable.assert_done(last, RESULTS)


async def test_with_other_parameters(durable: Bench):
    old = await failed_at(durable, "c")
    new = await durable.rerun(old, step="c", state=Params(5))
    await durable.drain()
    await durable.assert_done(new, RESULTS | {"c": 17, "d": [22, 1001]})
    with pytest.raises(da.StateError):
        await durable.rerun(old, step="c", state={"base": "x"})


async def test_from_the_beginning(durable: Bench):
    old = await failed_at(durable, "c")
    again = await durable.rerun(old, step="c")
    for target, options in ((old, {}), (old, {"step": "start"}), (again, {})):
        assert state_of(durable, await durable.rerun(target, **options)) == ("start", {"base": 1})
    await durable.drain()
    assert len(RUNS) == 3 * 6 + 2


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"step": "nowhere"}, r"rr:chain v1 has no task 'nowhere'; its tasks are a, b, c, x, y, d"),
        ({"step": "finish"}, "has no task 'finish'"),
        ({"step": "rerun"}, "has no task 'rerun'"),
        ({"step": Chain.c, "at_rev": 1}, "step=<task Chain.c>: at_rev cannot be given with a task"),
        ({"step": "c", "at_rev": 1}, "step='c': at_rev cannot be given with a task"),
    ],
)
async def test_what_is_refused(durable: Bench, options, told):
    old = await failed_at(durable, "c")
    with pytest.raises(da.ConfigError, match=told):
        await durable.rerun(old, **options)


async def test_a_rerun_of_a_single_task_names_its_workflow(durable: Bench):
    old = await failed_at(durable, "c")
    [task] = [each for each in await durable.list_instances(da.Filter(parent=old)) if each.key == "c"]
    with pytest.raises(da.Conflict, match=rf"run its workflow again from it: instance {old}, step c"):
        _unknown(await durable.inspect(task.id), None)  # its first state is not recorded


async def test_a_task_of_another_workflow_is_refused(durable: Bench):
    class Other(da.Workflow[Params], name="rr:other"):
        @da.task
        async def c(self, ctx: da.Context[Params]) -> int: ...

    old = await failed_at(durable, "c")
    with pytest.raises(
        da.ConfigError, match=r"step=<task .*Other.c> belongs to another workflow, not to rr:chain v1"
    ):
        await durable.rerun(old, step=Other.c)
    plain = await durable.insert(Plain, state=Params())
    with pytest.raises(da.ConfigError, match=r"step=<task Chain.c>: rr:plain v1 is not a workflow"):
        await durable.rerun(plain, step=Chain.c)


async def test_where_the_workflow_is_not_known(durable: Bench):
    """As on the command line: the graph is read from the children of the old one."""
    old = await failed_at(durable, "c", "x")
    with isolated_registry():
        new = await durable.rerun(old, step="c")
        assert state_of(durable, new) == ("rerun", {"params": {"base": 1}, "carried": {"a": 11, "b": 12}})
        with pytest.raises(
            da.ConfigError, match="rr:chain v1 has no task 'nowhere'; its tasks are a, b, c, x, y, d"
        ):
            await durable.rerun(old, step="nowhere")
        assert state_of(durable, await durable.rerun(old)) == ("start", {"base": 1})
    await durable.drain()
    await durable.assert_done(new, RESULTS)
    with isolated_registry():
        last = await durable.rerun(new, step="a")
        assert state_of(durable, last)[1]["carried"] == {"x": 101, "y": 1001}, "the graph of a rerun is whole"


async def test_a_machine_with_named_children_is_no_workflow(durable: Bench):
    old = await durable.insert(Plain, state=Params())
    await durable.drain()
    with isolated_registry():
        assert state_of(durable, await durable.rerun(old, step="c", state={"base": 3})) == ("c", {"base": 3})


async def test_in_a_transaction_of_plain_psycopg(durable: Bench):
    old = await failed_at(durable, "c")
    with psycopg.connect(durable.dsn) as db:
        new = sync.rerun(db, old, step=Chain.c)
        db.commit()
    await durable.drain()
    await durable.assert_done(new, RESULTS)


async def test_mended_in_place(durable: Bench):
    """Instead of a rerun: the cancelled task is retried and waits, then the failed one, then the workflow."""
    number = await failed_at(durable, "c")
    tasks = {node.machine[-1]: node.id for node in (await durable.tree(number)).root.children}
    await durable.retry(tasks["d"])
    await durable.drain()
    assert (await durable.inspect(tasks["d"])).status == "runnable"
    await durable.retry(tasks["c"])
    await durable.drain()
    assert RUNS == ["c", "d"]
    await durable.retry(number)
    await durable.drain()
    await durable.assert_done(number, RESULTS)


async def test_a_workflow_is_cancelled_with_its_tasks(durable: Bench):
    number = await durable.insert(Chain, state=Params())
    assert await durable.execute_next("q") is not None
    await durable.cancel(number, children="cancel", reason="not needed")
    await durable.drain()
    assert RUNS == []
    assert {node.status for node in (await durable.tree(number)).walk()} == {"cancelled"}
