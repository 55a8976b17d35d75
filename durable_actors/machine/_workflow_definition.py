"""From the body of a workflow class to its `MachineSpec`, and what its steps do. Pure.

A workflow is a machine of three steps, and each task is a job of its own::

    start ───┬─ ScheduleChildren: one child per task, named by its key ─> finish ─> Done, or Stop if a task failed
    rerun ───┘

`rerun` begins with results of an earlier instance, too (`_workflow_rerun`). The child of a task whose result is known
begins in the step "carried" of its job, which returns it: so every task is a child, however its result came about, and
those after it find it in `ctx.dependencies`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any, Final, TypeGuard

from durable_actors._option_checks import shown
from durable_actors._wording import counted
from durable_actors.errors import DefinitionError
from durable_actors.machine._checks import MAX_NAME, keep_seconds, text
from durable_actors.machine._child import Child, When, cycle_text, graph_cycle
from durable_actors.machine._codec import StepwiseCodec
from durable_actors.machine._context import ChildView, Context
from durable_actors.machine._declared_state import declared_state
from durable_actors.machine._definition import (
    ClassKeywords,
    check_complete,
    check_constructor,
    check_name,
    check_queue,
    check_run_ahead,
    check_version,
    default_name,
    handle_of,
    optional_journal,
    parent_of,
)
from durable_actors.machine._outcome import OUTCOME_TYPES, Done, Outcome, ScheduleChildren, Stop
from durable_actors.machine._spec import HandleSpec, MachineSpec, StepSpec, TaskSpec, identity_of
from durable_actors.machine._step import check_call
from durable_actors.machine._step_collection import RESERVED
from durable_actors.machine._step_ref import StepRef
from durable_actors.machine._task import Task
from durable_actors.machine._task_ref import TaskRef
from durable_actors.machine._workflow_rerun import RERUN, START, carried_in

FINISH: Final = "finish"
PERFORM: Final = "perform"
CARRIED: Final = "carried"
"""The step of a task whose result is known."""
NOT_TASKS: Final = RESERVED | {START, RERUN, FINISH}
"""Names that have another meaning in a workflow and cannot be tasks."""
MOST_NAMED: Final = 5
"""How many tasks the error of a workflow names."""

AnyTask = Task[Any, Any, Any, Any]


def define_workflow(cls: type[Any], base: type[Any], given: ClassKeywords) -> MachineSpec:
    """Return the definition of a workflow class, with those of its tasks. `base` is `Workflow`."""
    subject = cls.__qualname__
    check_complete(cls)
    _refuse_keywords(subject, given)
    tasks = collect_tasks(cls)
    check_constructor(cls)
    name = check_name(default_name(cls) if given.name is None else given.name, subject)
    version = check_version(1 if given.version is None else given.version, subject)
    params = declared_state(cls, base, given.state, parent_of(cls))
    params = given.base_state if params is None else params
    identity = identity_of(cls)
    workflow = MachineSpec(
        name=name,
        version=version,
        kind="machine",
        queue=check_queue("default" if given.queue is None else given.queue, subject),
        initial=START,
        steps={},
        codec=StepwiseCodec(
            dict if params is None else params, machine=name, version=version, free_step=RERUN
        ),
        handle=handle_of(cls, base),
        max_attempts=None,
        backoff=None,
        run_ahead=check_run_ahead(True if given.run_ahead is None else given.run_ahead, subject),
        journal=optional_journal(given.journal, subject),
        keep=keep_seconds(given.keep, what=f"{subject}: keep=", error=DefinitionError),
        definition=cls,
        identity=identity,
        lineage=frozenset(identity_of(each) for each in cls.__mro__),
        tasks={},
    )
    edges = _edges(cls, tasks)
    specs = {each: _task_spec(cls, workflow, task, edges[each]) for each, task in tasks.items()}
    return _complete(workflow, specs, _steps(cls, specs))


def _complete(
    workflow: MachineSpec, tasks: Mapping[str, TaskSpec], steps: Mapping[str, StepSpec]
) -> MachineSpec:
    """Steps refer to the tasks, which refer to what the workflow says."""
    object.__setattr__(workflow, "steps", steps)
    object.__setattr__(workflow, "tasks", tasks)
    return workflow


def collect_tasks(cls: type[Any]) -> dict[str, AnyTask]:
    """Return the tasks of a class by name, those of its bases first and as its own; raise `DefinitionError`."""
    visible: dict[str, Any] = {}
    for body in reversed(cls.__mro__):
        for name, value in vars(body).items():
            hidden = visible.get(name)
            if isinstance(value, StepRef):
                raise DefinitionError(
                    f"{body.__qualname__}.{name} is a step, and a workflow has tasks: decorate it with @da.task, or "
                    "inherit from da.Machine"
                )
            if isinstance(hidden, TaskRef) and not isinstance(value, TaskRef):
                raise DefinitionError(
                    f"{body.__qualname__}.{name} hides the task {hidden!r}: decorate it with @da.task, or rename it"
                )
            if isinstance(value, TaskRef):
                visible[name] = value
    tasks: dict[str, AnyTask] = {}
    for name, value in visible.items():
        task = _checked(cls, name, value)
        if task.owner is not cls:
            task = task.inherited_by(cls)
            setattr(cls, name, task)
        tasks[name] = task
    if not tasks:
        raise DefinitionError(
            f"{cls.__qualname__} has no task: decorate at least one method (self, ctx) with @da.task. "
            "(A base class without tasks must also inherit from abc.ABC.)"
        )
    return tasks


def _checked(cls: type[Any], name: str, value: TaskRef[Any]) -> AnyTask:
    where = f"{cls.__qualname__}.{name}"
    if not _is_task(value) or not _is_own(cls, value):
        raise DefinitionError(
            f"{where} is the task {value!r} of another class; inherit from that class or define it here"
        )
    if len(value.aliases) > 1:
        raise DefinitionError(
            f"{where}: one task has several names ({', '.join(sorted(value.aliases))}); keep only one"
        )
    if name in NOT_TASKS:
        raise DefinitionError(
            f"{where}: a task cannot be named {name}, which has another meaning in a workflow"
        )
    if name.startswith("__"):
        raise DefinitionError(
            f"{where}: a task cannot be named {name}; names with two underscores are reserved by Python"
        )
    text(name, what=f"{where}: a task's name", error=DefinitionError, maximum=MAX_NAME)
    return value


def _refuse_keywords(subject: str, given: ClassKeywords) -> None:
    if given.initial is not None:
        raise DefinitionError(
            f"{subject}: initial= is for machines with steps; a workflow begins with its tasks"
        )
    if given.max_attempts is not None:
        raise DefinitionError(f"{subject}: max_attempts= is for jobs; give it to the tasks")


def _edges(cls: type[Any], tasks: Mapping[str, AnyTask]) -> dict[str, tuple[str, ...]]:
    """Return what each task comes after; refuse unknown tasks and cycles."""
    subject = cls.__qualname__
    edges: dict[str, tuple[str, ...]] = {}
    for name, task in tasks.items():
        found: dict[str, None] = {}
        for each in task.options.after:
            known = each if isinstance(each, str) else each.name
            if known not in tasks or (isinstance(each, TaskRef) and not _is_own(cls, each)):
                shown_task = shown(each) if isinstance(each, str) else repr(each)
                raise DefinitionError(
                    f"{subject}.{name} comes after {shown_task}, which is not a task of {subject}; its tasks are "
                    f"{', '.join(tasks)}"
                )
            found[known] = None
        edges[name] = tuple(found)
    names = list(tasks)
    position = {name: index for index, name in enumerate(names)}
    cycle = graph_cycle([[position[each] for each in after] for after in edges.values()])
    if cycle is not None:
        raise DefinitionError(
            f"{subject}: these tasks come after each other, so none of them could run: "
            f"{cycle_text([names[index] for index in cycle])}"
        )
    return edges


def _is_task(value: TaskRef[Any]) -> TypeGuard[AnyTask]:
    return isinstance(value, Task)


def owns_task(spec: MachineSpec, task: TaskRef[Any]) -> bool:
    """Return whether a reference names a task of this workflow, or of one that it inherits from."""
    return task.owner is not None and identity_of(task.owner) in spec.lineage


def _is_own(cls: type[Any], task: TaskRef[Any]) -> bool:
    return task.owner is not None and identity_of(task.owner) in {identity_of(each) for each in cls.__mro__}


def _task_spec(cls: type[Any], workflow: MachineSpec, task: AnyTask, after: tuple[str, ...]) -> TaskSpec:
    subject, options, func = f"{cls.__qualname__}.{task.name}", task.options, task.func
    module, qualname = workflow.identity
    name = check_name(f"{workflow.name}.{task.name}" if options.name is None else options.name, subject)
    perform = StepSpec(
        name=PERFORM,
        func=func,
        call=lambda ctx: func(cls(), ctx),
        is_async=inspect.iscoroutinefunction(func),
        timeout=options.timeout,
        limits=options.limits,
    )
    carried = StepSpec(name=CARRIED, func=_carried, call=_carried, is_async=True)
    keep = keep_seconds(options.keep, what=f"{subject}: keep=", error=DefinitionError)
    journal = optional_journal(options.journal, subject)
    machine = MachineSpec(
        name=name,
        version=workflow.version,
        kind="job",
        queue=workflow.queue if options.queue is None else check_queue(options.queue, subject),
        initial=PERFORM,
        steps={PERFORM: perform, CARRIED: carried},
        codec=StepwiseCodec(workflow.codec.type, machine=name, version=workflow.version, free_step=CARRIED),
        handle=HandleSpec(call=lambda error, _ctx: Stop(error), is_async=False, is_default=True),
        max_attempts=options.max_attempts,
        backoff=options.backoff,
        run_ahead=True,
        journal=workflow.journal if journal is None else journal,
        keep=workflow.keep if keep == "default" else keep,
        definition=task,
        identity=(module, f"{qualname}.{task.name}"),
        lineage=frozenset({(module, f"{qualname}.{task.name}")}),
    )
    task.__durable__ = machine
    return TaskSpec(task.name, machine, after, options.when == "ended")


async def _carried(ctx: Context[Any]) -> object:
    """The task has run in an earlier instance, and this is its result."""
    return Done(ctx.state)


def _steps(cls: type[Any], tasks: Mapping[str, TaskSpec]) -> dict[str, StepSpec]:
    async def start(ctx: Context[Any]) -> Outcome:
        return ScheduleChildren(FINISH, _children(tasks, ctx.state, {}))

    async def rerun(ctx: Context[Any]) -> Outcome:
        params, carried = carried_in(ctx.state)
        return ScheduleChildren(FINISH, _children(tasks, params, carried), params)

    finish, is_async = _finish(cls, tasks)
    return {
        START: StepSpec(name=START, func=start, call=start, is_async=True),
        RERUN: StepSpec(name=RERUN, func=rerun, call=rerun, is_async=True),
        FINISH: StepSpec(name=FINISH, func=finish, call=finish, is_async=is_async),
    }


def _children(tasks: Mapping[str, TaskSpec], params: object, carried: Mapping[str, Any]) -> list[Child]:
    children: list[Child] = []
    for name, task in tasks.items():
        machine = task.machine.definition
        when: When = "ended" if task.any_end else "succeeded"
        # A result for which there is no task any more is left out; a carried task keeps its place in the graph.
        if name in carried:
            child = Child(machine, key=name, after=task.after, when=when, step=CARRIED, state=carried[name])
        else:
            child = Child(machine, key=name, after=task.after, when=when, state=params)
        children.append(child)
    return children


def _finish(cls: type[Any], tasks: Mapping[str, TaskSpec]) -> tuple[Callable[[Any], Any], bool]:
    """Return the function of the last step, and whether it is async."""
    method = inspect.getattr_static(cls, FINISH, None)
    if method is None:

        async def default(ctx: Context[Any]) -> Outcome:
            return _failure(ctx, tasks) or Done({str(child.key): child.result for child in ctx.children})

        return default, True
    form = "async def finish(self, ctx)"
    if not isinstance(method, FunctionType):
        raise DefinitionError(f"{cls.__qualname__}.finish must be a method: {form}")
    check_call(method, 2, form=form)
    if inspect.iscoroutinefunction(method):

        async def finish(ctx: Context[Any]) -> Outcome:
            return _failure(ctx, tasks) or _ended(await method(cls(), ctx))

        return finish, True

    def finish_in_thread(ctx: Context[Any]) -> Outcome:
        return _failure(ctx, tasks) or _ended(method(cls(), ctx))

    return finish_in_thread, False


def _ended(value: Any) -> Outcome:
    return value if isinstance(value, OUTCOME_TYPES) else Done(value)


def _failure(ctx: Context[Any], tasks: Mapping[str, TaskSpec]) -> Stop | None:
    """Return why the workflow fails, by the tasks that did; None if all are done."""
    bad = {str(child.key): child for child in ctx.children if child.status != "done"}
    if not bad:
        return None
    causes = {
        name: child
        for name, child in bad.items()
        if child.status == "failed" or name not in tasks or not bad.keys() & set(tasks[name].after)
    }
    told = [f"{_end_of(name, child)}" for name, child in list(causes.items() or bad.items())[:MOST_NAMED]]
    if len(causes) > MOST_NAMED:
        told.append(f"and {len(causes) - MOST_NAMED} more")
    others = len(bad) - len(causes)
    after = f" ({counted(others, 'task')} after it did not run)" if others and len(causes) == 1 else ""
    return Stop("; ".join(told) + after)


def failed_task(step: str, last_error: str | None) -> str | None:
    """Return the task that the error of a workflow names first; None for other errors, and other machines."""
    found = _NAMED.match(last_error or "") if step == FINISH else None
    return None if found is None else found[1]


_NAMED: Final = re.compile(r"task (\w+) \(instance \d+\) (?:failed|was cancelled)\b")


def _end_of(name: str, child: ChildView) -> str:
    how = "was cancelled" if child.status == "cancelled" else child.status
    return f"task {name} (instance {child.id}) {how}" + (
        "" if not child.last_error else f": {child.last_error}"
    )
