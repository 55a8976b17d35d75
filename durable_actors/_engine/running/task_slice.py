"""`TaskSlice`: what one task of the step pool runs; and the part of the pool that a dispatcher needs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Protocol

from durable_actors._engine.claims import ActiveClaim
from durable_actors._engine.committing.queue import PendingCommit
from durable_actors.otp import PoolTask

if TYPE_CHECKING:
    from durable_actors._engine.running.dispatcher import Dispatcher


class TaskSlice:
    """What one task of the step pool runs: a claim, and after a step that did not wait the next claim."""

    __slots__ = ("active", "dispatcher", "since", "suspended", "task")

    def __init__(
        self, dispatcher: Dispatcher, active: ActiveClaim, since: float, *, suspended: bool = False
    ) -> None:
        self.dispatcher = dispatcher
        self.active = active
        """The claim whose step runs now, or ran last."""
        self.since = since
        self.suspended = suspended
        """The task has waited for something: it ends after this step."""
        self.task: PoolTask | None = None

    def __str__(self) -> str:
        claim = self.active.claim
        return f"instance {claim.id}, {claim.fsm}, step {claim.step}"


RunSlice = Callable[[TaskSlice, PendingCommit | None], Awaitable[object]]
"""The body of a step task (`StepTasks.run`). The second argument is an outcome that Postgres refused."""


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

    def start_nowait(self, fn: RunSlice, *args: Any, key: TaskSlice, deadline: float) -> PoolTask:
        """Start a task, or raise `PoolClosed` or `PoolFull`."""
        ...
