"""Child specifications: what a supervisor runs, and how it starts, restarts and stops it. Values only."""

from __future__ import annotations

import abc
import math
from collections.abc import Awaitable, Callable
from typing import Literal, Protocol, get_args

import attrs
import trio

from durable_actors.otp._errors import SpecError
from durable_actors.otp._events import Observer
from durable_actors.otp._exit import ExitReason
from durable_actors.otp._mailbox import MailboxStatistics
from durable_actors.otp._restart import RestartType
from durable_actors.otp._snapshot import Node, NodeKind, PoolStatistics, SupervisorStatistics

ShutdownTime = float | Literal["brutal"]
"""Seconds that a child has to end by itself, or "brutal" to cancel it at once."""


@attrs.frozen
class Place:
    """The path of an incarnation in its tree, and the observer of that tree."""

    path: str
    observe: Observer


class Incarnation(Protocol):
    """One run of a child from start to exit, as its supervisor sees an actor, a pool, a task or a supervisor."""

    async def run(self, ready: Callable[[], None]) -> ExitReason | None:
        """Run until the end: call `ready` once, return the exit reason (None for Normal), raise on failure."""
        ...

    def request_stop(self, why: str, *, restart: bool) -> bool:
        """Begin a graceful stop; `restart` says that another incarnation follows. False: cancel the task instead.

        Called again, without `restart`, if the tree is stopped while the incarnation ends for a restart.
        """
        ...

    def describe(self, *, tasks: int) -> Description:
        """Return its part of the snapshot, with at most `tasks` pool tasks."""
        ...


@attrs.frozen
class Description:
    """The part of a snapshot that only the child itself knows."""

    mailbox: MailboxStatistics | None = None
    pool: PoolStatistics | None = None
    supervisor: SupervisorStatistics | None = None
    children: tuple[Node, ...] = ()


@attrs.frozen(kw_only=True)
class ChildSpec(abc.ABC):
    """Base class of child specifications. Use ActorChild, TaskChild, PoolChild or Supervisor."""

    name: str = attrs.field(kw_only=False)
    """The name of the child, unique among its siblings."""
    restart: RestartType = "permanent"
    """permanent: always restarted · transient: only after an Error · temporary: never."""
    shutdown: ShutdownTime = 5.0
    """Seconds to end after a request to stop; then it is cancelled. "brutal" cancels it at once."""
    significant: bool = False
    """Whether its end (without a restart) can end the supervisor: see `Supervisor.auto_shutdown`."""
    start_timeout: float = math.inf
    """Seconds to become ready; then the start fails with `StartTimeout`."""

    def __attrs_post_init__(self) -> None:
        if self.restart not in get_args(RestartType):
            raise SpecError(
                f"child {self.name!r}: restart={self.restart!r} is not one of {get_args(RestartType)}"
            )
        if self.shutdown != "brutal" and not self.shutdown >= 0:
            raise SpecError(
                f'child {self.name!r}: shutdown={self.shutdown!r} is neither seconds nor "brutal"'
            )
        if not self.start_timeout > 0:
            raise SpecError(f"child {self.name!r}: start_timeout={self.start_timeout!r} is not positive")
        if self.significant and self.restart == "permanent":
            raise SpecError(
                f"child {self.name!r} is permanent, so it is always restarted and cannot be significant"
            )
        if not self.name or "/" in self.name:
            raise SpecError(f"child {self.name!r}: a name must not be empty and must not contain a slash")

    @property
    @abc.abstractmethod
    def kind(self) -> NodeKind:
        """The kind of child, for the snapshot."""

    @abc.abstractmethod
    def incarnate(self, place: Place) -> Incarnation:
        """Create a new incarnation. It must not fail or block; `Incarnation.run` may."""

    def describe(self) -> Description:
        """Return the child's part of the snapshot while there is no incarnation."""
        return Description()

    @abc.abstractmethod
    def close(self) -> None:
        """Wake everything that waits for the next incarnation: this tree will not start another one."""


@attrs.frozen(kw_only=True)
class TaskChild(ChildSpec):
    """A plain async function as a child: ``TaskChild("ticker", functools.partial(tick, 1.0))``.

    A request to stop cancels it. With `handshake=True` it receives a `task_status` and is ready when it calls
    ``task_status.started()``; otherwise it is ready as soon as it runs.
    """

    fn: Callable[..., Awaitable[object]] = attrs.field(kw_only=False)
    """Called once per incarnation. Its result is ignored."""
    handshake: bool = False
    """Whether `fn` takes `task_status`."""

    @property
    def kind(self) -> NodeKind:
        """Always "task"."""
        return "task"

    def incarnate(self, place: Place) -> Incarnation:  # noqa: ARG002 - the protocol's
        """Return an incarnation that calls `fn` once."""
        return _TaskRun(self)

    def close(self) -> None:
        """Do nothing: nothing can wait for a task."""


class _Ready:
    """A task_status that forwards to the supervisor."""

    __slots__ = ("_ready",)

    def __init__(self, ready: Callable[[], None]) -> None:
        self._ready = ready

    def started(self, value: object = None) -> None:  # noqa: ARG002 - trio's signature
        self._ready()


class _TaskRun:
    __slots__ = ("_spec",)

    def __init__(self, spec: TaskChild) -> None:
        self._spec = spec

    async def run(self, ready: Callable[[], None]) -> None:
        if self._spec.handshake:
            status: trio.TaskStatus[object] = _Ready(ready)
            await self._spec.fn(task_status=status)
        else:
            ready()
            await self._spec.fn()

    def request_stop(self, why: str, *, restart: bool) -> bool:  # noqa: ARG002 - the protocol's
        return False

    def describe(self, *, tasks: int) -> Description:  # noqa: ARG002 - the protocol's
        return Description()
