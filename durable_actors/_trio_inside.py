"""The inside of Trio, as far as we depend on it. tests/test_trio_inside.py fails when Trio changes any of it.

Worker tasks run the code of one step after the other. What a step leaves open in its task (a cancel scope, a nursery, a
lock) would hit the next ones: most often it is an async generator with a cancel scope inside that the step has left by
`return` or `break`. Trio has no public way to see or close that. The hot paths of `_engine/running/step_task.py` and
`otp/_pool.py` read `_cancel_status` and `_child_nurseries` of a task in place, for a call costs three times as much;
all other private names are here.

A generator that nobody refers to any more is closed by Trio, in a task of its own. With a scope inside that is refused,
and changes nothing. With a nursery inside it waits there for ever, while the task that had opened the nursery is woken
from whatever it waits for, and if that has ended, the whole run dies (TrioInternalError). So such a generator is kept
with its nursery, and closed where that was opened.
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
"""The tasks that hold a lock, and which. Trio breaks it when such a task ends, so that nobody waits for ever."""


def innermost(task: trio.lowlevel.Task) -> object:
    """The same object as long as the same cancel scopes are open in a task."""
    return cast("Any", task)._cancel_status


def left_open(task: trio.lowlevel.Task, home: object) -> bool:
    """Whether code has left something open in its task since `home` was `innermost`."""
    return innermost(task) is not home or bool(task.child_nurseries) or task in LOCKS


def is_cancelled() -> bool:
    """Whether a scope around the current task is cancelled, so that a `Cancelled` finds its way."""
    return trio.current_effective_deadline() == -float("inf")


async def close_left(home: object) -> list[str]:
    """Close what code has left open in the current task since `home` was `innermost`; return what that was.

    Innermost first, as the code should have done. Children of a nursery are cancelled and waited for; what they raise
    is added to the names. A generator that had opened all this and is still in use finds its scopes and nurseries
    closed. A lock stays: only the end of the task breaks it.
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
            task._activate_cancel_status(home)  # closed in the wrong order before, it leads nowhere
    if task in LOCKS:
        closed.append("a lock")
    return closed


async def _close_generator(generator: AsyncGeneratorType[Any, Any], nursery: Any) -> str:
    told = f"an async generator ({generator.__qualname__}) with a nursery"
    nursery.cancel_scope.cancel()  # what it would still want to do is for nobody
    try:
        await generator.aclose()
    except BaseException as exc:  # noqa: BLE001 - user code; what it has not closed is closed by the caller
        return f"{told}, which raised {type(exc).__name__}"
    return told


async def _close_nursery(nursery: Any, scope: Any) -> str:
    count = len(nursery.child_tasks)
    finish = nursery._nested_child_finished
    # Whoever closes it again, in another task, would wait there for ever, and wake this one instead.
    nursery._nested_child_finished = _closed_already
    nursery.cancel_scope.cancel()
    error = await finish(None)
    if scope is not None:
        _exit(scope, error)
    if isinstance(error, BaseExceptionGroup):
        error = cast("BaseExceptionGroup[BaseException]", error).split(trio.Cancelled)[1]
    told = f"a nursery with {count} {'task' if count == 1 else 'tasks'}"
    return told if error is None else f"{told}, which raised {type(error).__name__}"


def _exit(scope: trio.CancelScope, error: BaseException | None) -> None:
    with contextlib.suppress(
        BaseException
    ):  # what is left of `error`; or Trio's, about scopes in the wrong order
        scope.__exit__(None if error is None else type(error), error, None)


def keep_generators() -> None:
    """From now on, in this run, keep generators that nobody refers to with the nursery inside them, if it is open."""
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
    sys.set_asyncgen_hooks(finalizer=finalizer)  # Trio puts back what was there before it when its run ends


_GENERATOR: Final = "durable_actors_generator"


def _nursery_in(generator: AsyncGenerator[Any, Any]) -> Any:
    """The open nursery in which a suspended generator stands, directly or in a context manager or another generator."""
    todo: list[Any] = [generator]
    for _ in range(_DEEP):
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


_DEEP: Final = 1000
"""So many objects are looked at."""


async def _closed_already(error: BaseException | None) -> BaseException | None:
    return error


@attrs.frozen(eq=False)
class Running:
    """What a loop runs at this moment."""

    task: trio.lowlevel.Task
    turns: int
    """How often the task has given way to others."""
    where: str
    """The line of code."""


def what_runs(thread: int) -> Running | None:
    """What the loop in a thread runs; None: it waits, or is between two tasks. May be called in any thread."""
    top = frame = sys._current_frames().get(thread)
    while frame is not None and frame.f_code is not _run.unrolled_run.__code__:
        frame = frame.f_back
    task: Any = None if frame is None else frame.f_locals.get("task")
    if top is None or task is None or not getattr(task.coro, "cr_running", False):
        return None
    where = f"{top.f_code.co_filename}:{top.f_lineno} in {top.f_code.co_qualname}"
    return Running(task, task._schedule_points, where)


def runs_in_real_time() -> bool:
    """Whether the clock of this run is the system's."""
    return isinstance(trio.lowlevel.current_clock(), _run.SystemClock)
