"""The private parts of Trio that this package uses. tests/test_trio_inside.py fails if Trio changes one of them.

Worker tasks run the code of one step after another. If a step leaves something open in its task (a cancel scope, a
nursery, a lock), it affects the next steps. The usual cause is an async generator with a cancel scope inside that the
step leaves by `return` or `break`. Trio has no public way to detect or close this. The hot paths of
`_engine/running/step_task.py` and `otp/_pool.py` read `_cancel_status` and `_child_nurseries` of a task directly,
because a function call costs three times as much; all other private names are used only here.

Trio closes an async generator that is garbage-collected, in a task of its own. If the generator has an open cancel
scope, Trio refuses, and nothing changes. If it has an open nursery, the close waits there forever, while the task that
opened the nursery is woken from whatever it waits for; if that task has ended, the whole run dies (TrioInternalError).
So such a generator is stored with its nursery, and closed in the task that opened the nursery.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections import deque
from collections.abc import AsyncGenerator, Mapping
from types import AsyncGeneratorType, MethodType
from typing import Any, Final, cast

import attrs
import trio
from trio._core import _parking_lot, _run

# ruff: noqa: SLF001 - that is what this file is for

LOCKS: Final[Mapping[trio.lowlevel.Task, object]] = _parking_lot.GLOBAL_PARKING_LOT_BREAKER
"""The tasks that hold a lock, with their locks. Trio breaks the lock when its task ends, so no task waits forever."""


def innermost(task: trio.lowlevel.Task) -> object:
    """Return an object that stays the same as long as the same cancel scopes are open in a task."""
    return cast("Any", task)._cancel_status


def left_open(task: trio.lowlevel.Task, home: object) -> bool:
    """Return whether code left something open in its task since `home` was `innermost`."""
    return innermost(task) is not home or bool(task.child_nurseries) or task in LOCKS


def is_cancelled() -> bool:
    """Return whether a scope around the current task is cancelled, so that it will catch a `Cancelled`."""
    return trio.current_effective_deadline() == -float("inf")


async def close_left(home: object) -> list[str]:
    """Close what code left open in the current task since `home` was `innermost`; return descriptions of it.

    The innermost is closed first. Child tasks of a nursery are cancelled and awaited; the type of an exception that
    they raise is part of the description. A generator that opened these and is still in use finds its scopes and
    nurseries closed. Locks stay held until the task ends.
    """
    task: Any = trio.lowlevel.current_task()
    closed: list[str] = []
    while (status := task._cancel_status) is not home or task._child_nurseries:
        scope = None if status is None or status is home else status._scope
        nursery = task._child_nurseries[-1] if task._child_nurseries else None
        generator = None if nursery is None else nursery.__dict__.pop(_GENERATOR, None)
        if generator is not None:
            closed.append(await _close_generator(generator, nursery))
        elif nursery is not None and scope in {None, nursery.cancel_scope}:
            closed.append(await _close_nursery(nursery, scope))
        elif scope is not None:
            closed.append("a cancel scope")
            _exit(scope, None)
        if task._cancel_status is None or (
            scope is not None and generator is None and task._cancel_status is status
        ):
            task._activate_cancel_status(home)  # it was closed in the wrong order before
    if task in LOCKS:
        closed.append("a lock")
    return closed


async def _close_generator(generator: AsyncGeneratorType[Any, Any], nursery: Any) -> str:
    description = f"an async generator ({generator.__qualname__}) with a nursery"
    nursery.cancel_scope.cancel()  # the results of its tasks are not needed
    try:
        await generator.aclose()
    except BaseException as exc:  # noqa: BLE001 - user code; the caller closes the rest
        return f"{description}, which raised {type(exc).__name__}"
    return description


async def _close_nursery(nursery: Any, scope: Any) -> str:
    count = len(nursery.child_tasks)
    finish = nursery._nested_child_finished
    # Closing it a second time, in another task, would wait there forever and wake this task instead.
    nursery._nested_child_finished = _closed_already
    nursery.cancel_scope.cancel()
    error = await finish(None)
    if scope is not None:
        _exit(scope, error)
    if isinstance(error, BaseExceptionGroup):
        error = cast("BaseExceptionGroup[BaseException]", error).split(trio.Cancelled)[1]
    description = f"a nursery with {count} {'task' if count == 1 else 'tasks'}"
    return description if error is None else f"{description}, which raised {type(error).__name__}"


def _exit(scope: trio.CancelScope, error: BaseException | None) -> None:
    with contextlib.suppress(
        BaseException
    ):  # the rest of `error`, or an error of Trio about scopes in the wrong order
        scope.__exit__(None if error is None else type(error), error, None)


def keep_generators() -> None:
    """For the rest of this Trio run, store garbage-collected generators with the open nursery inside them."""
    finalize = sys.get_asyncgen_hooks().finalizer
    if finalize is None or getattr(finalize, _GENERATOR, False):
        return

    def finalizer(generator: AsyncGenerator[Any, Any]) -> None:
        nursery = _nursery_in(generator)
        if nursery is None:
            finalize(generator)
        else:
            nursery.__dict__[_GENERATOR] = generator

    setattr(finalizer, _GENERATOR, True)
    sys.set_asyncgen_hooks(finalizer=finalizer)  # Trio restores the original hooks when its run ends


_GENERATOR: Final = "durable_actors_generator"


def _nursery_in(generator: AsyncGenerator[Any, Any]) -> Any:
    """Return the open nursery in a suspended generator, directly or in a context manager or another generator."""
    todo: list[Any] = [generator]
    for _ in range(_MAX_OBJECTS):
        if not todo:
            break
        each = todo.pop()
        each = each.__self__ if isinstance(each, MethodType) else each
        if isinstance(each, _run.NurseryManager):
            nursery: Any = getattr(each, "_nursery", None)
            if nursery is not None and nursery in nursery._parent_task._child_nurseries:
                return nursery
        elif isinstance(each, AsyncGeneratorType | contextlib.AsyncExitStack | deque | tuple):
            todo += gc.get_referents(each)
        elif isinstance(each, contextlib.AbstractAsyncContextManager):
            todo += vars(each).values()
        elif isinstance(each, dict) and "_exit_callbacks" in each:
            todo.append(each["_exit_callbacks"])
    return None


_MAX_OBJECTS: Final = 1000
"""The largest number of objects that `_nursery_in` inspects."""


async def _closed_already(error: BaseException | None) -> BaseException | None:
    return error


@attrs.frozen(eq=False)
class Running:
    """The task that an event loop is running."""

    task: trio.lowlevel.Task
    turns: int
    """How often the task has been scheduled."""
    where: str
    """The current line of code."""


def what_runs(thread: int) -> Running | None:
    """Return what the loop in a thread is running, or None if it is waiting. Can be called from any thread."""
    top = frame = sys._current_frames().get(thread)
    while frame is not None and frame.f_code is not _run.unrolled_run.__code__:
        frame = frame.f_back
    task: Any = None if frame is None else frame.f_locals.get("task")
    if top is None or task is None or not getattr(task.coro, "cr_running", False):
        return None
    where = f"{top.f_code.co_filename}:{top.f_lineno} in {top.f_code.co_qualname}"
    return Running(task, task._schedule_points, where)


def runs_in_real_time() -> bool:
    """Return whether this run uses the system clock."""
    return isinstance(trio.lowlevel.current_clock(), _run.SystemClock)
