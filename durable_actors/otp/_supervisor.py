"""Supervisor: starts its children in order, restarts those that fail, and stops them in reverse order.

Owns       its `ChildRecord`s, the restart history, the nursery in which all incarnations run.
Receives   exits of its children; a request to stop.
Sends      nothing; it emits events to the tree's observer.
If it dies (too many restarts, a child that does not start) it first stops its children in reverse order;
           then its own supervisor decides. At the root, `run_tree` raises the error.
Never      reads messages, runs user code in its own task, or decides on restarts: `_restart.decide` does.

`_serve` runs in a cancel scope of its own. A request to stop cancels that scope wherever `_serve` is waiting
(for an exit, for a child to start or to stop), and the ordered stop follows outside the scope. So every
`await` in `_serve` must leave the `ChildRecord`s correct when it is cancelled.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import assert_never, get_args

import attrs
import trio

from durable_actors.otp._child import ChildRecord
from durable_actors.otp._child_spec import ChildSpec, Description, Incarnation, Place, ShutdownTime
from durable_actors.otp._errors import OtpError, RestartLimitReached, SpecError, StartFailed, StopFailed
from durable_actors.otp._events import ChildRestarting, SupervisorGaveUp
from durable_actors.otp._exit import Error, ExitReason, Shutdown
from durable_actors.otp._restart import (
    AutoShutdown,
    Backoff,
    GiveUp,
    Leave,
    RestartThese,
    StopSupervisor,
    Strategy,
    decide,
)
from durable_actors.otp._snapshot import NodeKind, SupervisorStatistics


@attrs.frozen(kw_only=True)
class Supervisor(ChildSpec):
    """A supervisor and its children in start order. It is a child of another supervisor or the root of a tree.

    ::

        Supervisor("shop", [ActorChild(stock, Stock), PoolChild(workers)], strategy="rest_for_one")
    """

    children: Sequence[ChildSpec] = attrs.field(kw_only=False, converter=tuple[ChildSpec, ...])
    """The children. They start in this order, each when the one before it is ready, and stop in reverse order."""
    strategy: Strategy = "one_for_one"
    """What is restarted with a failed child.

    one_for_one: nothing else · rest_for_one: the children after it · one_for_all: all children.
    """
    intensity: int = 3
    """The number of restarts allowed within `period`. At one more, the supervisor gives up."""
    period: float = 5.0
    """The period in seconds in which restarts are counted."""
    auto_shutdown: AutoShutdown = "never"
    """Whether the supervisor ends when any, or all, of its significant children have ended."""
    backoff: Backoff = attrs.field(factory=Backoff)
    """How long to wait before a restart."""
    shutdown: ShutdownTime = math.inf
    """Seconds for the whole stop. The default is unlimited, since each child has its own limit."""

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        where = f"supervisor {self.name!r}"
        if self.strategy not in get_args(Strategy):
            raise SpecError(f"{where}: strategy={self.strategy!r} is not one of {get_args(Strategy)}")
        if self.auto_shutdown not in get_args(AutoShutdown):
            raise SpecError(
                f"{where}: auto_shutdown={self.auto_shutdown!r} is not one of {get_args(AutoShutdown)}"
            )
        if self.intensity < 0 or not self.period > 0:
            raise SpecError(
                f"{where}: intensity={self.intensity!r} must be 0 or more and period={self.period!r} positive"
            )
        for child, count in Counter(child.name for child in self.children).items():
            if count > 1:
                raise SpecError(f"{where}: {count} children are named {child!r}")
        if self.auto_shutdown == "never":
            for spec in self.children:
                if spec.significant:
                    raise SpecError(f'{where}: {spec.name!r} is significant, but auto_shutdown is "never"')

    @property
    def kind(self) -> NodeKind:
        """Always "supervisor"."""
        return "supervisor"

    def incarnate(self, place: Place) -> Incarnation:
        """Return an incarnation that starts all children anew."""
        return SupervisorRun(self, place)

    def close(self) -> None:
        """Close all children: none of them will be restarted."""
        for child in self.children:
            child.close()


class SupervisorRun:
    """One incarnation of a supervisor."""

    def __init__(self, spec: Supervisor, place: Place) -> None:
        self._spec = spec
        self._place = place
        self._children = [
            ChildRecord(
                child,
                Place(f"{place.path}/{child.name}", place.observe),
                on_exit=self._on_exit,
                on_fatal=self._on_fatal,
            )
            for child in spec.children
        ]
        self._nursery: trio.Nursery | None = None
        self._serving = trio.CancelScope()
        self._exits: deque[ChildRecord] = deque()
        self._wake = trio.Event()
        self._history: tuple[float, ...] = ()
        self._why = "its supervisor ends"
        self._restart = False  # another incarnation follows, so kept mailboxes stay as they are
        self._fatal: list[BaseException] = []
        self._errors: list[Exception] = []  # errors of children while they were being stopped

    # -- the Incarnation protocol

    async def run(self, ready: Callable[[], None]) -> ExitReason:
        """Start the children, restart them as needed, and stop them at the end."""
        failure: Exception | None = None
        ended: ExitReason = Shutdown(self._why)
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            with self._serving:
                try:
                    ended = await self._serve(nursery, ready)
                except Exception as exc:  # noqa: BLE001 - kept until the children are stopped, raised below
                    failure = exc
                    self._restart = True
            stopped = False
            try:
                await self._stop_all()
                stopped = True
            finally:
                # If the stop is cancelled, raise the errors collected so far; otherwise they would be lost.
                if not stopped:
                    self._raise(failure)
        self._raise(failure)
        return ended

    def request_stop(self, why: str, *, restart: bool) -> bool:
        """Begin the ordered stop."""
        self._why = why
        self._restart = restart
        self._serving.cancel(reason=why)
        for child in self._children:
            if child.state == "stopping":  # it may be asked to restart, and it ends for good
                child.request_stop(why, restart=restart)
        return True

    def describe(self, *, tasks: int) -> Description:
        """Return its restarts, and snapshots of the children in start order."""
        spec, now = self._spec, trio.current_time()
        supervisor = SupervisorStatistics(
            strategy=spec.strategy,
            intensity=spec.intensity,
            period=spec.period,
            used=sum(now - at <= spec.period for at in self._history),
        )
        return Description(
            supervisor=supervisor, children=tuple(child.node(tasks=tasks) for child in self._children)
        )

    # -- serving

    async def _serve(self, nursery: trio.Nursery, ready: Callable[[], None]) -> ExitReason:
        for child in self._children:
            if not await child.start(nursery):
                child.exit_pending = False
                raise StartFailed(child.place.path) from _error_of(child)
        ready()
        while True:
            # Handle all known exits before the next start.
            if self._exits:
                child = self._exits.popleft()
                if child.exit_pending and await self._decide(child):
                    return Shutdown(f"{child.place.path} ended and is significant")
                continue
            due = self._next_due()
            if due is not None and due.due is not None and due.due <= trio.current_time():
                await due.start(nursery)  # if it fails, its exit is in the queue
                continue
            with trio.CancelScope(deadline=math.inf if due is None or due.due is None else due.due):
                await self._wake.wait()
            self._wake = trio.Event()

    def _next_due(self) -> ChildRecord | None:
        due = [child for child in self._children if child.due is not None]
        if not due:
            return None
        if self._spec.strategy == "one_for_one":
            return min(due, key=lambda child: child.due or 0.0)  # ties in start order
        return due[0]  # the others may depend on it and start after it

    async def _decide(self, child: ChildRecord) -> bool:
        """Act on the exit of `child`. Returns True if the supervisor must end."""
        assert child.reason is not None
        spec = self._spec
        child.exit_pending = False
        now = trio.current_time()
        decision = decide(
            [c.sibling() for c in self._children],
            self._children.index(child),
            child.reason,
            strategy=spec.strategy,
            auto_shutdown=spec.auto_shutdown,
            intensity=spec.intensity,
            period=spec.period,
            history=self._history,
            now=now,
        )
        match decision:
            case Leave():
                child.spec.close()
                return False
            case StopSupervisor():
                child.spec.close()
                return True
            case GiveUp():
                raise self._give_up(child, decision.restarts, now)
            case RestartThese():
                self._history = decision.history
                await self._restart_these(child, decision)
                return False
            case _:
                assert_never(decision)

    async def _restart_these(self, cause: ChildRecord, plan: RestartThese) -> None:
        backoff = self._spec.backoff
        cause.streak = backoff.next_streak(cause.streak, lived=cause.lived)
        delay = backoff.delay(cause.streak)
        # Mark them before the first await: every child is always either running or due.
        at = trio.current_time() + delay
        to_start = [self._children[i] for i in plan.start]
        for child in to_start:
            if not child.alive:
                child.await_restart(at)
        names = tuple(child.spec.name for child in to_start)
        self._place.observe(ChildRestarting(path=cause.place.path, siblings=names, delay=delay))
        for i in plan.stop:
            child = self._children[i]
            await child.stop(f"restart of {cause.spec.name}", restart=i not in plan.drop)
            if i in plan.drop:
                child.spec.close()
            else:
                child.await_restart(at)

    def _give_up(self, child: ChildRecord, restarts: int, now: float) -> RestartLimitReached:
        spec, path = self._spec, self._place.path
        self._place.observe(
            SupervisorGaveUp(path=path, child=child.place.path, restarts=restarts, period=spec.period)
        )
        error = RestartLimitReached(f"supervisor {path!r} gave up on {child.spec.name!r}", [_error_of(child)])
        window = now - min((at for at in self._history if now - at <= spec.period), default=now)
        error.add_note(
            f"child {child.place.path!r} ended with {child.reason}; supervisor {path!r} had already "
            f"restarted {restarts - 1} times in the last {window:.3g} s "
            f"(limit: {spec.intensity} in {spec.period:g} s)"
        )
        return error

    # -- stopping

    async def _stop_all(self) -> None:
        """Stop the children in reverse order, and collect the errors that they raise *while stopping*.

        An earlier crash that is not decided on any more was already reported, like every crash that is restarted.
        """
        for child in reversed(self._children):
            child.due = None
            was_alive = child.alive
            await child.stop(self._why, restart=self._restart)
            if was_alive and isinstance(child.reason, Error) and isinstance(child.reason.error, Exception):
                self._errors.append(child.reason.error)

    def _raise(self, failure: Exception | None) -> None:
        path, errors = self._place.path, self._errors
        if self._fatal:
            if len(self._fatal) == 1 and not errors and failure is None:
                raise self._fatal[0]
            rest = [*self._fatal, *([] if failure is None else [failure]), *errors]
            raise BaseExceptionGroup(f"supervisor {path!r} was interrupted", rest)
        if failure is not None:
            if errors:
                raise StopFailed(
                    f"supervisor {path!r} failed, and children failed while stopping", [failure, *errors]
                )
            raise failure
        if errors:
            raise StopFailed(f"supervisor {path!r} stopped, but children failed while stopping", errors)

    # -- called by the children's tasks

    def _on_exit(self, child: ChildRecord) -> None:
        self._exits.append(child)
        self._wake.set()

    def _on_fatal(self, error: BaseException) -> None:
        self._fatal.append(error)
        self._serving.cancel(reason=repr(error))


def _error_of(child: ChildRecord) -> Exception:
    if isinstance(child.reason, Error) and isinstance(child.reason.error, Exception):
        return child.reason.error
    return OtpError(f"child {child.place.path!r} ended unexpectedly: {child.reason}")
