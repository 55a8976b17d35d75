"""`rerun` of a workflow: from one of its tasks, or from its beginning. Sans-I/O; reads only.

The definition says which tasks there are, if this process knows it; otherwise the children of the old instance do: an
operator's command line imports no machines. The results are read from the children, and a task that is done never
changes. The new instance gets them in its first state, so it does not matter what becomes of the old rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from durable_actors._option_checks import shown
from durable_actors._postgres.driver import encode
from durable_actors._postgres.driver.decode import decode_int_array
from durable_actors._postgres.driver.statement import Row
from durable_actors._store.foreign import Dialogue
from durable_actors._store.read import Instance
from durable_actors._store.sql import statement
from durable_actors.errors import ConfigError, Conflict
from durable_actors.machine import (
    KEEP,
    RERUN,
    START,
    MachineSpec,
    StepRef,
    TaskRef,
    current_registry,
    decode_json,
    first_state,
    owns_task,
    run_again,
    split_state,
)


@attrs.frozen(kw_only=True)
class Start:
    """Where the new instance begins, as far as the caller says it."""

    step: str | StepRef[Any] | TaskRef[Any] | None = None
    """None: where the old one began. Of a workflow: the task from which it is run again."""
    state: object = KEEP
    """`KEEP`: with what the old one began."""
    at_rev: int | None = None
    """The revision of the old one whose step and state are meant instead."""


@attrs.frozen
class OldTask:
    """A task of the old instance, as its child shows it."""

    key: str
    machine: str
    done: bool
    result: bytes | None
    after: tuple[str, ...]


def planning_tasks(schema: str, old: Instance, start: Start) -> Dialogue[Start]:
    """Where the new instance begins, in terms of steps; `start` itself if it is no workflow.

    Raises `ConfigError` for an unknown task, `Conflict` if nobody here knows the tasks.
    """
    spec = current_registry().get(old.machine, old.version)
    name = start.step.name if isinstance(start.step, StepRef | TaskRef) else start.step
    if (spec is not None and not spec.tasks) or start.at_rev is not None:
        if isinstance(start.step, TaskRef) or (spec is not None and name in spec.tasks):
            raise ConfigError(f"step={start.step!r}: {_no_task(spec)}", option="step", value=name)
        return start
    params, carried = split_state(old.step, old.state)
    unbegun = params is not old.state  # itself a rerun, whose children are not inserted yet
    if spec is None and name is None and old.visit == 1 and not unbegun:
        return start  # no outcome has changed its state yet
    tasks = yield from _read_tasks(schema, old)
    if spec is None:
        if not unbegun and not _is_workflow(old, tasks):
            return start
        after: Mapping[str, tuple[str, ...]] = {key: task.after for key, task in tasks.items()}
    else:
        after = {key: task.after for key, task in spec.tasks.items()}
    params = params if start.state is KEEP else _checked(spec, start.state)
    if name is None or name == START:
        return Start(step=START, state=params)
    if unbegun and spec is None:
        raise Conflict(
            f"instance {old.id} has not begun, so its tasks are not known here: rerun instance {old.rerun_of}, from "
            "which it was started, or wait until it has begun"
        )
    _check_task(old, spec, start.step, after)
    results = carried | _results(old, tasks)
    again = run_again(after, name, results)
    kept = {key: value for key, value in results.items() if key in after and key not in again}
    return Start(step=RERUN, state=first_state(params, kept))


def _no_task(spec: MachineSpec | None) -> str:
    if spec is not None and not spec.tasks:
        return f"{spec} is not a workflow"
    return (
        "at_rev cannot be given with a task: a workflow is run again from a task with the results that its tasks have "
        "now; leave at_rev out"
    )


def _results(old: Instance, tasks: Mapping[str, OldTask]) -> dict[str, Any]:
    """The results of the tasks that are done. Raises `StateError` for one that Python cannot represent."""
    return {
        key: decode_json(task.result or b"null", what=f"the result of task {key} of instance {old.id}")
        for key, task in tasks.items()
        if task.done
    }


def _read_tasks(schema: str, old: Instance) -> Dialogue[dict[str, OldTask]]:
    rows = yield (
        statement("read_tasks", schema, read_only=True),
        [encode.number(old.id), encode.number(old.visit)],
    )
    keys = {int(row[0] or 0): (row[1] or b"").decode() for row in rows}
    return {keys[int(row[0] or 0)]: _old_task(row, keys) for row in rows}


def _old_task(row: Row, keys: Mapping[int, str]) -> OldTask:
    number, _, fsm, status, result, needs = row
    before = () if needs is None else decode_int_array(needs)
    return OldTask(
        keys[int(number or 0)],
        (fsm or b"").decode(),
        status == b"done",
        result,
        tuple(keys[each] for each in before if each in keys),
    )


def _is_workflow(old: Instance, tasks: Mapping[str, OldTask]) -> bool:
    """Whether these are the tasks of a workflow, by the names that tasks have by default."""
    return any(task.machine == f"{old.machine}.{task.key}" for task in tasks.values())


def _checked(spec: MachineSpec | None, params: object) -> Any:
    """The given parameters as JSON values, checked by the workflow if it is known here. Raises `StateError`."""
    return params if spec is None else decode_json(spec.codec.encode(params, step=START), what="state")


def _check_task(
    old: Instance,
    spec: MachineSpec | None,
    step: str | StepRef[Any] | TaskRef[Any] | None,
    known: Mapping[str, object],
) -> None:
    """Raise `ConfigError` if this is not a task of the workflow."""
    machine = f"{old.machine} v{old.version}"
    if isinstance(step, TaskRef) and spec is not None and not owns_task(spec, step):
        raise ConfigError(f"step={step!r} belongs to another workflow, not to {machine}", option="step")
    name = step.name if isinstance(step, StepRef | TaskRef) else step
    if name not in known:
        raise ConfigError(
            f"{machine} has no task {shown(name)}; its tasks are {', '.join(known)}",
            option="step",
            value=name,
        )
