"""`Workflow` and `@task`: what a class becomes, what is refused when it is defined, and what its steps do."""

import abc
import json
from datetime import date
from typing import Any

import attrs
import durable_actors as da
import pytest
from durable_actors._engine.committing.transition import plan_children
from durable_actors.machine import current_registry, failed_task, job_failure, plan_insert, run_again


@attrs.frozen
class Month:
    year: int
    month: int = 1


@attrs.frozen
class Sales:
    day: date
    total: int


@pytest.fixture
def report(registry):
    class Report(da.Workflow[Month], name="report", version=3, queue="reports", journal="full", keep=60):
        @da.task(max_attempts=5, queue="net", timeout=30, backoff=lambda attempt: attempt + 1.0)
        async def fetch(self, ctx: da.Context[Month]) -> Sales:
            """Read the sales."""
            return Sales(date(ctx.state.year, ctx.state.month, 1), 7)

        @da.task
        def rates(self, ctx: da.Context[Month]) -> dict[str, float]:
            return {"eur": 1.0}

        @da.task(after=[fetch, "rates", fetch], when="ended", name="convert", journal="outcomes", keep=None)
        async def convert(self, ctx: da.Context[Month]) -> float:
            return ctx.result_of(self.fetch).total * ctx.result_of(Report.rates)["eur"]

    return Report


def view(
    key: str, status: Any = "done", result: object = None, error: str | None = None, number: int = 1
) -> da.ChildView:
    return da.ChildView(number, f"report.{key}", status, result, error, key)


# -- what it becomes


def test_a_workflow_is_a_machine_and_each_task_a_job(report):
    spec = report.__durable__
    assert (spec.name, spec.version, spec.kind, spec.queue, spec.initial) == (
        "report",
        3,
        "machine",
        "reports",
        "start",
    )
    assert list(spec.steps) == ["start", "rerun", "finish"]
    assert {name: (task.after, task.any_end) for name, task in spec.tasks.items()} == {
        "fetch": ((), False),
        "rates": ((), False),
        "convert": (("fetch", "rates"), True),
    }
    fetch, rates, convert = (task.machine for task in spec.tasks.values())
    assert (fetch.name, fetch.version, fetch.kind, fetch.queue, fetch.max_attempts) == (
        "report.fetch",
        3,
        "job",
        "net",
        5,
    )
    assert (fetch.steps["perform"].timeout, fetch.backoff(1), fetch.steps["perform"].is_async) == (
        30.0,
        2.0,
        True,
    )
    assert (rates.name, rates.queue, rates.max_attempts, rates.journal, rates.keep) == (
        "report.rates", "reports", 20, "full", 60.0,
    )  # fmt: skip
    assert not rates.steps["perform"].is_async
    assert (convert.name, convert.journal, convert.keep) == ("convert", "outcomes", None)
    registry = current_registry()
    assert {spec.name for spec in registry.specs.values()} == {
        "report",
        "report.fetch",
        "report.rates",
        "convert",
    }
    assert registry.find(report.fetch) is fetch
    assert report.fetch.__doc__ == "Read the sales."
    assert fetch.codec.type is Month


def test_the_default_name_of_a_task_is_that_of_its_class(registry):
    class Plain(da.Workflow[Month]):
        @da.task
        async def work(self, ctx: da.Context[Month]) -> None: ...

    assert Plain.work.__durable__ is not None
    assert Plain.work.__durable__.name == f"{Plain.__durable__.name}.work"
    assert Plain.work.__durable__.name.endswith("Plain.work")


async def test_a_task_uses_limits_and_a_carried_result_uses_none(registry):
    class Drawn(da.Workflow[Month], name="drawn"):
        @da.task(slot="gpu")
        async def draw(self, ctx: da.Context[Month]) -> int:
            return 1

        @da.task(after=draw, rate_limit=("stripe", "acme"), weight=3, slot=("gpu", "acme"))
        async def pay(self, ctx: da.Context[Month]) -> int:
            return 2

    draw, pay = (task.machine for task in Drawn.__durable__.tasks.values())
    assert plan_insert(draw, {"args": Month(2026, 1)}).limits == "!gpu"
    assert plan_insert(pay, {"args": Month(2026, 1)}).limits == "stripe:acme\x1e3\x1f!gpu:acme"
    assert plan_insert(draw, {"state": 1, "step": "carried"}).limits is None
    assert plan_insert(draw, {"args": Month(2026, 1), "slot": "cpu"}).limits == "!cpu"


async def test_tasks_are_functions_that_a_test_can_call(report):
    ctx = da.Context(state=Month(2026, 2))
    assert await report().fetch(ctx) == Sales(date(2026, 2, 1), 7)
    assert await report.fetch(report(), ctx) == Sales(date(2026, 2, 1), 7)
    assert report().rates(ctx) == {"eur": 1.0}
    given = {
        "fetch": view("fetch", result={"day": "2026-02-01", "total": 4}),
        "rates": view("rates", result={"eur": 2}),
    }
    assert await report().convert(da.Context(state=Month(2026), dependencies=given)) == 8


async def test_the_first_step_schedules_a_child_per_task(report):
    outcome = await report.__durable__.steps["start"].call(da.Context(state=Month(2026)))
    spawn = plan_children(outcome)
    assert outcome.then == "finish"
    assert outcome.state is da.KEEP
    assert spawn.graph is not None
    assert list(spawn.graph.keys) == ["fetch", "rates", "convert"]
    assert list(spawn.graph.needs) == [(), (), (0, 1)]
    assert list(spawn.graph.any_end) == [False, False, True]
    assert [(plan.machine, plan.step, plan.queue) for plan in spawn.plans] == [
        ("report.fetch", "perform", "net"),
        ("report.rates", "perform", "reports"),
        ("convert", "perform", "reports"),
    ]
    assert [json.loads(plan.state) for plan in spawn.plans] == [{"year": 2026, "month": 1}] * 3


async def test_a_rerun_carries_results_into_the_same_graph(report):
    state = {"params": {"year": 2026}, "carried": {"fetch": {"day": "2026-01-01", "total": 4}, "gone": 1}}
    spec = report.__durable__
    stored = spec.codec.decode(spec.codec.encode(state, step="rerun"), step="rerun")
    spawn = plan_children(outcome := await spec.steps["rerun"].call(da.Context(state=stored)))
    assert outcome.state == {"year": 2026}
    assert [(plan.machine, plan.step) for plan in spawn.plans] == [
        ("report.fetch", "carried"),
        ("report.rates", "perform"),
        ("convert", "perform"),
    ]
    assert spawn.graph is not None
    assert list(spawn.graph.needs) == [(), (), (0, 1)]
    carried = spec.tasks["fetch"].machine
    ctx = da.Context(state=carried.codec.decode(spawn.plans[0].state, step="carried"))
    assert await carried.steps["carried"].call(ctx) == da.Done({"day": "2026-01-01", "total": 4})
    with pytest.raises(da.StateError):
        spec.codec.encode({"nothing": 1}, step="start")
    for wrong in ({"year": 2026}, {"params": {}, "carried": []}, None):  # written by hand
        with pytest.raises(da.StateError, match="begins with parameters and results"):
            await spec.steps["rerun"].call(da.Context(state=wrong))


# -- results


def test_a_result_has_the_type_of_its_task(report):
    ctx = da.Context(
        state=Month(2026),
        machine="report.convert",
        dependencies={"fetch": view("fetch", result={"day": "2026-01-02", "total": 4})},
    )
    assert ctx.result_of(report.fetch) == ctx.result_of(report().fetch) == Sales(date(2026, 1, 2), 4)
    assert ctx.result_of("fetch") == {"day": "2026-01-02", "total": 4}
    with pytest.raises(
        da.DefinitionError, match=r"report.convert does not come after 'rates'.*it comes after fetch"
    ):
        ctx.result_of(report.rates)


def test_a_result_that_does_not_fit_is_an_error(report):
    ctx = da.Context(state=None, dependencies={"fetch": view("fetch", result={"day": "soon"})})
    with pytest.raises(da.StateError, match="the result of task fetch does not fit Sales"):
        ctx.result_of(report.fetch)


def test_a_dependency_that_did_not_succeed_has_no_result(report):
    ctx = da.Context(
        state=None,
        dependencies={
            "fetch": view("fetch", "failed", error="boom"),
            "rates": view("rates", "cancelled", error="no"),
        },
    )
    with pytest.raises(da.InstanceFailed, match="task fetch: boom"):
        ctx.result_of(report.fetch)
    with pytest.raises(da.InstanceCancelled, match="task rates: no"):
        ctx.result_of(report.rates)
    assert ctx.dependencies["fetch"].last_error == "boom"


def test_a_task_that_asks_for_another_ones_result_fails_at_once(report):
    spec = report.__durable__.tasks["convert"].machine
    with pytest.raises(da.DefinitionError) as error:
        da.Context(state=None).result_of(report.fetch)
    assert job_failure(error.value, spec, attempt=0, random=lambda: 0.5) == da.Stop(error.value)
    assert isinstance(job_failure(da.DefinitionError("?"), spec, attempt=0, random=lambda: 0.5), da.Retry)


def test_a_keyed_child_has_its_result_after_the_barrier():
    ctx = da.Context(state=None, children=(view("left", result=1), view("right", result=2)))
    assert ctx.result_of("left") + ctx.result_of("right") == 3


async def finish(workflow: Any, *children: da.ChildView) -> Any:
    ctx = da.Context(state=Month(2026), children=children)
    found = workflow.__durable__.steps["finish"].call(ctx)
    return await found if workflow.__durable__.steps["finish"].is_async else found


async def test_without_finish_the_result_has_every_task(report):
    outcome = await finish(report, view("fetch", result=1), view("rates", result=None))
    assert outcome == da.Done({"fetch": 1, "rates": None})


@pytest.mark.parametrize("form", ["async", "def", "outcome"])
async def test_finish_makes_the_result(registry, form):
    class Base(da.Workflow[Month], abc.ABC):
        @da.task
        async def one(self, ctx: da.Context[Month]) -> Sales: ...

    if form == "async":

        class Sub(Base):
            async def finish(self, ctx: da.Context[Month]) -> int:
                return ctx.result_of(self.one).total
    elif form == "def":

        class Sub(Base):
            def finish(self, ctx: da.Context[Month]) -> int:
                return ctx.result_of(self.one).total
    else:

        class Sub(Base):
            def finish(self, ctx: da.Context[Month]) -> da.Outcome:
                return da.Stop("too little") if ctx.result_of(Base.one).total < 9 else da.Done()

    outcome = await finish(Sub, view("one", result={"day": "2026-01-01", "total": 5}))
    assert outcome == (da.Stop("too little") if form == "outcome" else da.Done(5))
    assert Sub.__durable__.steps["finish"].is_async is (form == "async")
    assert isinstance(await finish(Sub, view("one", "failed", error="boom")), da.Stop)


@pytest.mark.parametrize(
    ("children", "told"),
    [
        (
            [view("fetch", "failed", error="ValueError", number=7), view("convert", "cancelled", error="upstream")],
            "task fetch (instance 7) failed: ValueError (1 task after it did not run)",
        ),
        (
            [view("fetch", "failed", error="no"), view("rates", "failed", error="none", number=2), view("convert")],
            "task fetch (instance 1) failed: no; task rates (instance 2) failed: none",
        ),
        ([view("fetch", "cancelled", error="by hand")], "task fetch (instance 1) was cancelled: by hand"),
        ([view("fetch", "failed"), view("convert", "failed", error="x")],
         "task fetch (instance 1) failed; task convert (instance 1) failed: x"),
    ],
)  # fmt: skip
async def test_a_failed_task_fails_the_workflow_by_name(report, children, told):
    assert await finish(report, *children) == da.Stop(told)
    assert failed_task("finish", told) == "fetch"
    assert (
        failed_task("begin", told)
        is failed_task("finish", "task force")
        is failed_task("finish", None)
        is None
    )


# -- inheritance


def test_a_subclass_has_tasks_of_its_own(report):
    class Short(report, name="short"):
        @da.task(after="fetch")
        async def rates(self, ctx: da.Context[Month]) -> dict[str, float]:
            return {}

    assert Short.fetch is not report.fetch
    assert Short.fetch.__durable__.name == "short.fetch"
    assert report.fetch.__durable__.name == "report.fetch"
    assert Short.__durable__.tasks["rates"].after == ("fetch",)
    assert Short.__durable__.codec.type is Month
    assert Short.__durable__.queue == "reports"


def test_a_base_without_tasks_is_abstract(registry):
    class Base(da.Workflow[Month], abc.ABC, queue="base"):
        def helper(self) -> int:
            return 1

    class Sub(Base):
        @da.task
        async def work(self, ctx: da.Context[Month]) -> int:
            return self.helper()

    assert Base.__durable__ is None
    assert Sub.__durable__.queue == "base"


def test_a_changed_graph_is_another_definition(registry):
    def make(after: list[str]) -> str:
        class Same(da.Workflow[Month], name="same"):
            @da.task
            async def one(self, ctx: da.Context[Month]) -> int: ...

            @da.task(after=after)
            async def two(self, ctx: da.Context[Month]) -> int: ...

        return Same.__durable__.fingerprint

    assert make(["one"]) == make(["one"])
    assert make(["one"]) != make([])


# -- running again


def test_what_runs_again_from_a_task():
    after = {"a": (), "b": ("a",), "c": ("a",), "d": ("b", "c"), "e": ("d",), "lone": ()}
    everything = set(after)
    assert run_again(after, "c", everything) == {"c", "d", "e"}
    assert run_again(after, "a", everything) == everything - {"lone"}
    assert run_again(after, "e", everything) == {"e"}
    # A task without a result runs, too, and so does all that comes after it.
    assert run_again(after, "c", everything - {"lone", "c", "d", "e"}) == {"c", "d", "e", "lone"}
    assert run_again(after, "e", everything - {"b"}) == {"b", "d", "e"}


# -- what is refused


def define(body: str) -> None:
    names = {"da": da, "Month": Month, "Sales": Sales, "__name__": "tests.defined", "abc": abc}
    exec(body, names)


def body(*lines: str, name: str = "W", base: str = "da.Workflow[Month]", options: str = "") -> str:
    return f"class {name}({base}{options}):\n" + "".join(f"    {line}\n" for line in lines)


WORK = "@da.task", "def work(self, ctx): ..."


def work(options: str, result: str = "None") -> str:
    return body(f"@da.task({options})", f"def work(self, ctx) -> {result}: ...")


@pytest.mark.parametrize(
    ("source", "told"),
    [
        (body("pass"), "W has no task: decorate at least one method"),
        (body("def work(self, ctx): ..."), "W has no task"),
        (
            body(*WORK, "@da.step", "async def start(self, ctx): ..."),
            "W.start is a step, and a workflow has tasks",
        ),
        (work("after='x'"), "W.work comes after 'x', which is not a task of W; its tasks are work"),
        (
            body(*WORK) + body("@da.task(after=W.work)", "def work(self, ctx): ...", name="V"),
            "V.work comes after <task W.work>, which is not a task of V",
        ),
        (
            body(
                "@da.task(after='b')", "def a(self, ctx): ...", "@da.task(after=a)", "def b(self, ctx): ..."
            ),
            "W: these tasks come after each other, .*: (a -> b -> a|b -> a -> b)$",
        ),
        (work("after='work'"), "work -> work"),
        *(
            (body("@da.task", f"def {name}(self, ctx): ..."), f"a task cannot be named {name}")
            for name in ("start", "rerun", "finish", "handle", "perform", "backoff", "State", "__work__")
        ),
        (body(*WORK, "again = work"), "one task has several names"),
        (
            body(*WORK) + body("def work(self, ctx): ...", name="V", base="W"),
            "V.work hides the task <task W.work>",
        ),
        (body(*WORK) + body("work = W.work", name="V"), "of another class"),
        (body("@da.task", "async def work(self): ..."), "cannot be called.*write async def work"),
        (body("@da.task", "async def work(self, ctx): yield"), "is a generator"),
        (body("@da.task", "class work: pass"), "@task decorates a method.*not a class"),
        (body("@da.task", "@da.step", "def work(self, ctx): ..."), "decorated twice"),
        (work("after=[7]"), "tasks or their names, not 7"),
        (work("after=7"), "tasks or their names, not 7"),
        (
            body("def a(self, ctx): ...", "@da.task(after=[a])", "def b(self, ctx): ..."),
            "decorate it with @da.task",
        ),
        (work("when='done'"), '"succeeded" or "ended"'),
        (work("timeout=0"), r"@task\(timeout=...\)"),
        (work("max_attempts=0"), "max_attempts="),
        (work("backoff=3"), "backoff="),
        (work("queue=''"), "W.work: queue="),
        (work("slot=3"), "slot must be a name"),
        (work("slot='a b'"), "slot: the name of a limit"),
        (work("weight=2"), "weight=2 is that of a single rate_limit"),
        (work("name=7"), "W.work: name="),
        (work("", "'Nowhere'"), "the annotation 'Nowhere' of its result"),
        (work("", "type"), "the result type type.*cannot be stored"),
        (body(*WORK, options=", initial='work'"), "initial= is for machines with steps"),
        (body(*WORK, options=", max_attempts=3"), "give it to the tasks"),
        (body(*WORK, "finish = 3"), "W.finish must be a method"),
        (body(*WORK, "def finish(self): ..."), "cannot be called"),
        (body(*WORK, "def __init__(self, x): ..."), "takes arguments"),
    ],
)
def test_a_mistake_is_found_when_the_class_is_defined(registry, source, told):
    with pytest.raises(da.DefinitionError, match=told):
        define(source)


def test_outcomes_of_a_job_are_no_results(registry):
    class Outcomes(da.Workflow):
        @da.task
        async def retried(self, ctx: da.Context[dict[str, Any]]) -> int | da.Retry | da.Error: ...

        @da.task
        async def done(self, ctx: da.Context[dict[str, Any]]) -> da.Done: ...

        @da.task
        async def never(self, ctx: da.Context[dict[str, Any]]) -> da.Stop | da.Cancel: ...

    assert Outcomes.retried.result_type is int
    assert Outcomes.done.result_type is Any
    assert Outcomes.never.result_type is None
    assert Outcomes.__durable__.codec.type is dict
