"""A task in a pool, and the worker that runs it."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Hashable
from typing import Any

import trio


class ContextReset:
    """What a task returns, the class itself, when its context is as good as new: what follows may have it."""


class Worker:
    """A task that runs one pool task after the other."""

    __slots__ = ("busy_since", "job", "scope", "spent", "task")

    def __init__(self, job: PoolTask, deadline: float) -> None:
        self.job: PoolTask | None = job
        self.busy_since: float | None = job.since  # others could run until then; None: its task has waited
        self.scope = trio.CancelScope(deadline=deadline)
        self.task: trio.lowlevel.Task | None = None
        self.spent = False  # it must run nothing else


class PoolTask:
    """A task in a pool: what `start_nowait` returns and `on_exit` gets."""

    __slots__ = ("_args", "_fn", "_why", "_worker", "key", "since")

    def __init__(
        self, fn: Callable[..., Awaitable[object]], args: tuple[Any, ...], key: Hashable, since: float
    ) -> None:
        self._fn = fn
        self._args = args
        self._worker: Worker | None = None
        self._why: str | None = None
        self.key: Hashable = self if key is None else key
        """What it is known by; itself when it got no key."""
        self.since: float = since
        """When it was started, on Trio's clock."""

    def __repr__(self) -> str:
        name = getattr(self._fn, "__qualname__", repr(self._fn))
        return f"<PoolTask {name}{'' if self.key is self else f' key={self.key!r}'}>"

    @property
    def running(self) -> bool:
        """Whether it still holds its slot."""
        return self._worker is not None

    def cancel(self, why: str) -> bool:
        """Cancel it; `why` becomes its exit reason. False: it has ended already."""
        worker = self._worker
        if worker is None:
            return False  # its worker may be running somebody else by now
        if self._why is None:
            self._why = why
        worker.scope.cancel(reason=why)
        return True

    def spend(self) -> None:
        """Its worker runs nothing after this: something was left open in it. What follows gets another one."""
        if self._worker is not None:
            self._worker.spent = True

    @property
    def cancelling(self) -> bool:
        """Whether `cancel` was called."""
        return self._why is not None

    @property
    def deadline(self) -> float:
        """When it is cancelled, on Trio's clock; may be moved while it runs. A lease is a deadline."""
        return math.inf if self._worker is None else self._worker.scope.deadline

    @deadline.setter
    def deadline(self, at: float) -> None:
        if self._worker is not None:
            self._worker.scope.deadline = at
