"""`TaskPool`: the part of `otp.Pool` that a dispatcher needs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from durable_actors.otp import PoolTask


class TaskPool(Protocol):
    """The part of `otp.Pool` that is needed here."""

    @property
    def free(self) -> int:
        """Tasks that can be started now."""
        ...

    @property
    def can_follow(self) -> bool:
        """Whether a task started now runs on in the worker of the task that is just ending."""
        ...

    def start_nowait(
        self, fn: Callable[..., Awaitable[object]], *args: Any, key: object, deadline: float
    ) -> PoolTask:
        """Start a task, or raise `PoolClosed` or `PoolFull`."""
        ...
