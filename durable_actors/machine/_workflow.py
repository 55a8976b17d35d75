"""`Workflow`: a machine whose work is a graph of tasks. Subclassing it defines and registers one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from durable_actors.machine._definition import ClassKeywords
from durable_actors.machine._machine import Machine
from durable_actors.machine._registry import current_registry
from durable_actors.machine._spec import MachineSpec
from durable_actors.machine._workflow_definition import define_workflow

if TYPE_CHECKING:
    from typing_extensions import TypeVar  # see _context.py

    ParamsT = TypeVar("ParamsT", default=dict[str, Any])
else:
    from typing import TypeVar

    ParamsT = TypeVar("ParamsT")


class Workflow(Machine[ParamsT]):
    """A durable graph of tasks: each begins when those that it comes after are done, and all others run side by side.

    ::

        class Report(da.Workflow[Month], queue="reports"):
            @da.task(max_attempts=5)
            async def fetch(self, ctx: da.Context[Month]) -> Sales: ...

            @da.task(after=[fetch], queue="cpu", timeout=60)
            def charts(self, ctx: da.Context[Month]) -> list[str]:
                return [draw(each) for each in ctx.result_of(self.fetch).shops]

            async def finish(self, ctx: da.Context[Month]) -> str:  # optional
                return ctx.result_of(self.charts)[0]

    It is inserted with its parameters, `insert(Report, state=Month(...))`; they are `ctx.state` of every task. A task
    is a job with a queue, retries and a timeout of its own, and a child of the workflow. `ctx.result_of` has the result
    of a task that this one comes after, in the type that the task returns. The result of the workflow is
    `{task: result}`, or what `finish` returns, in which `result_of` has every task. If a task fails, those after it are
    cancelled (unless they say `when="ended"`), all others run, and then the workflow fails, with a text that names the
    task and its error. `rerun(id, step="charts")` starts it anew from a task, with the results of the tasks that need
    not run again.

    Class keywords are those of `Machine`, without `initial` and `max_attempts`. Defining a class registers it and its
    tasks; `DefinitionError` is raised if it is invalid: no task, an unknown one in `after`, a cycle.
    """

    @classmethod
    def __durable_define__(cls, given: ClassKeywords) -> MachineSpec:
        spec = define_workflow(cls, Workflow, given)
        for task in spec.tasks.values():
            current_registry().register(task.machine)
        return spec
