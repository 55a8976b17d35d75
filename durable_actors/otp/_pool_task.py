"""A task in a pool, and the worker that runs it."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Hashable
from typing import Any

import trio


class ContextReset:
    """Returned by a task (the class itself) to say that its contextvars context is unchanged and may be reused.

    The next task that `on_exit` starts can then run at once in the same worker.
    """


class PoolWorker:
    """A Trio task that runs one pool task after another."""

    __slots__ = ("busy_since", "job", "scope", "spent", "task")

    def __init__(self, job: PoolTask, deadline: float) -> None:
        self.job: PoolTask | None = job
        self.busy_since: float | None = job.since  # runs without a checkpoint since then; None: it waited
        self.scope = trio.CancelScope(deadline=deadline)
        self.task: trio.lowlevel.Task | None = None
        self.spent = False  # it must not run another task


class PoolTask:
    """A task in a pool. `Pool.start_nowait` returns it, and `on_exit` receives it."""

    __slots__ = ("_args", "_fn", "_why", "_worker", "key", "since")

    def __init__(
        self, fn: Callable[..., Awaitable[object]], args: tuple[Any, ...], key: Hashable, since: float
    ) -> None:
        self._fn = fn
        self._args = args
        self._worker: PoolWorker | None = None
        self._why: str | None = None
        self.key: Hashable = self if key is None else key
        """The key given to `start_nowait`; without one, the task object itself."""
        self.since: float = since
        """When it started, on Trio's clock."""

    def __repr__(self) -> str:
        name = getattr(self._fn, "__qualname__", repr(self._fn))
        return f"<PoolTask {name}{'' if self.key is self else f' key={self.key!r}'}>"

    @property
    def running(self) -> bool:
        """Whether it still occupies its slot."""
        return self._worker is not None

    def cancel(self, why: str) -> bool:
        """Cancel the task; `why` becomes its exit reason. Returns False if it has already ended."""
        worker = self._worker
        if worker is None:
            return False  # its worker may be running another task
        if self._why is None:
            self._why = why
        worker.scope.cancel(reason=why)
        return True

    def spend(self) -> None:
        """Do not reuse the worker of this task, because the task left something open in it."""
        if self._worker is not None:
            self._worker.spent = True

    @property
    def cancelling(self) -> bool:
        """Whether `cancel` was called."""
        return self._why is not None

    @property
    def deadline(self) -> float:
        """When the task is cancelled, on Trio's clock. It can be moved while the task runs."""
        return math.inf if self._worker is None else self._worker.scope.deadline

    @deadline.setter
    def deadline(self, at: float) -> None:
        if self._worker is not None:
            self._worker.scope.deadline = at
