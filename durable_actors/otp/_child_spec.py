"""Child specifications: what a supervisor runs, and how it treats it. Values; nothing runs here."""

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
from durable_actors.otp._snapshot import Node, NodeKind, PoolStatistics

ShutdownTime = float | Literal["brutal"]
"""Seconds that a child gets to end by itself, or "brutal": cancelled at once."""


@attrs.frozen
class Place:
    """Where in which tree an incarnation runs."""

    path: str
    observe: Observer


class Incarnation(Protocol):
    """One life of a child, from start to exit. The supervisor's side of an actor, a pool and so on."""

    async def run(self, ready: Callable[[], None]) -> ExitReason | None:
        """Live: call `ready` once, return at the end (None: ended normally), raise on failure."""
        ...

    def request_stop(self, why: str, *, restart: bool) -> bool:
        """Begin to end; `restart` tells that another life will follow. False: cancel me, that is how."""
        ...

    def describe(self, *, tasks: int) -> Description:
        """For the snapshot; at most `tasks` pool tasks are listed."""
        ...


@attrs.frozen
class Description:
    """What only the incarnation itself knows for the snapshot."""

    mailbox: MailboxStatistics | None = None
    pool: PoolStatistics | None = None
    children: tuple[Node, ...] = ()


@attrs.frozen(kw_only=True)
class ChildSpec(abc.ABC):
    """What a supervisor knows of each child. Use ActorChild, TaskChild, PoolChild or Supervisor."""

    name: str = attrs.field(kw_only=False)
    """Unique among its siblings."""
    restart: RestartType = "permanent"
    """permanent: always restarted · transient: only after an Error · temporary: never."""
    shutdown: ShutdownTime = 5.0
    """Seconds to end by itself once asked to, then it is cancelled; "brutal" cancels at once."""
    significant: bool = False
    """Its end (without restart) can end the supervisor: see `auto_shutdown`."""
    start_timeout: float = math.inf
    """Seconds to become ready."""

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
            raise SpecError(f"child {self.name!r} is permanent: it never ends, so it cannot be significant")
        if not self.name or "/" in self.name:
            raise SpecError(f"child {self.name!r}: a name is not empty and has no slash")

    @property
    @abc.abstractmethod
    def kind(self) -> NodeKind:
        """What it is, for the snapshot."""

    @abc.abstractmethod
    def incarnate(self, place: Place) -> Incarnation:
        """A new life. Must not fail or block: that belongs into `Incarnation.run`."""

    def describe(self) -> Description:
        """For the snapshot, while there is no incarnation."""
        return Description()

    @abc.abstractmethod
    def close(self) -> None:
        """No further incarnation will come from this tree: whoever waits for one must be told."""


@attrs.frozen(kw_only=True)
class TaskChild(ChildSpec):
    """A plain async function as a child: ``TaskChild("ticker", functools.partial(tick, 1.0))``.

    Asked to stop, it is cancelled. With `handshake=True` it gets a `task_status` and is ready when
    it calls ``task_status.started()``; without, it is ready as soon as it runs.
    """

    fn: Callable[..., Awaitable[object]] = attrs.field(kw_only=False)
    """Called anew for each incarnation; its result is ignored."""
    handshake: bool = False
    """Whether it takes `task_status`."""

    @property
    def kind(self) -> NodeKind:
        """A task."""
        return "task"

    def incarnate(self, place: Place) -> Incarnation:  # noqa: ARG002 - the protocol's
        """One call of `fn`."""
        return _TaskRun(self)

    def close(self) -> None:
        """Nobody waits for a task."""


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
