"""Supervisor: starts its children in order, restarts what fails, stops them in reverse.

Owns       its `Child` records, the restart history, the nursery in which all incarnations run.
Receives   exits of its children; a request to stop.
Sends      nothing; it reports events to the tree's observer.
If it dies (too many restarts, a child that does not start) its children are stopped in reverse order
           first, then its own supervisor decides; at the root the error leaves the tree.
Never      looks at messages, runs user code in its own task, or decides by itself: `_restart.decide` does.

Serving runs in a cancel scope of its own; a request to stop cancels that scope, wherever serving
stands (waiting, starting somebody, stopping somebody), and the ordered stop follows outside it. So
each step of serving must leave the `Child` records true when it is cancelled, and nothing else.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import assert_never, get_args

import attrs
import trio

from durable_actors.otp._child import Child
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
from durable_actors.otp._snapshot import NodeKind


@attrs.frozen(kw_only=True)
class Supervisor(ChildSpec):
    """A supervisor and its children, in start order; itself a child of another, or the root of a tree.

    ::

        Supervisor("shop", [ActorChild(stock, Stock), PoolChild(workers)], strategy="rest_for_one")
    """

    children: Sequence[ChildSpec] = attrs.field(kw_only=False, converter=tuple[ChildSpec, ...])
    """Started in this order, each when the one before it is ready; stopped in reverse."""
    strategy: Strategy = "one_for_one"
    """Who is restarted with a failed child: nobody else · those started after it · everybody."""
    intensity: int = 3
    """How many restarts within `period` are borne; one more, and the supervisor gives up."""
    period: float = 5.0
    """The window in seconds."""
    auto_shutdown: AutoShutdown = "never"
    """Whether the end of any, or of all, significant children ends the supervisor."""
    backoff: Backoff = attrs.field(factory=Backoff)
    """How long to wait before a restart."""
    shutdown: ShutdownTime = math.inf
    """Its children have their own limits, so by default it has as long as they need."""

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
            raise SpecError(f"{where}: intensity={self.intensity!r} in period={self.period!r} makes no sense")
        for child, count in Counter(child.name for child in self.children).items():
            if count > 1:
                raise SpecError(f"{where}: {count} children are named {child!r}")
        if self.auto_shutdown == "never":
            for spec in self.children:
                if spec.significant:
                    raise SpecError(f'{where}: {spec.name!r} is significant, but auto_shutdown is "never"')

    @property
    def kind(self) -> NodeKind:
        """A supervisor."""
        return "supervisor"

    def incarnate(self, place: Place) -> Incarnation:
        """A supervisor whose children all start anew."""
        return SupervisorRun(self, place)

    def close(self) -> None:
        """None of its children will come back."""
        for child in self.children:
            child.close()


class SupervisorRun:
    """One incarnation of a supervisor."""

    def __init__(self, spec: Supervisor, place: Place) -> None:
        self._spec = spec
        self._place = place
        self._children = [
            Child(
                child,
                Place(f"{place.path}/{child.name}", place.observe),
                on_exit=self._on_exit,
                on_fatal=self._on_fatal,
            )
            for child in spec.children
        ]
        self._nursery: trio.Nursery | None = None
        self._serving = trio.CancelScope()
        self._exits: deque[Child] = deque()
        self._wake = trio.Event()
        self._history: tuple[float, ...] = ()
        self._why = "its supervisor ends"
        self._restart = False  # another incarnation will follow: kept mailboxes stay as they are
        self._fatal: list[BaseException] = []
        self._errors: list[Exception] = []  # what children failed with while they were stopped

    # -- the incarnation's face

    async def run(self, ready: Callable[[], None]) -> ExitReason:
        """Start the children, keep them running, stop them."""
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
                # Cancelled in the middle of the stop: what is known by now would be lost with us.
                if not stopped:
                    self._raise(failure)
        self._raise(failure)
        return ended

    def request_stop(self, why: str, *, restart: bool) -> bool:
        """Stop in order, now."""
        self._why = why
        self._restart = restart
        self._serving.cancel(reason=why)
        return True

    def describe(self, *, tasks: int) -> Description:
        """Its children, in start order."""
        return Description(children=tuple(child.node(tasks=tasks) for child in self._children))

    # -- serving

    async def _serve(self, nursery: trio.Nursery, ready: Callable[[], None]) -> ExitReason:
        for child in self._children:
            if not await child.start(nursery):
                child.exit_pending = False
                raise StartFailed(child.place.path) from _error_of(child)
        ready()
        while True:
            # Exits first: a start may only be tried when all that is known has been decided.
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

    def _next_due(self) -> Child | None:
        due = [child for child in self._children if child.due is not None]
        if not due:
            return None
        if self._spec.strategy == "one_for_one":
            return min(due, key=lambda child: child.due or 0.0)  # the first of equals: start order
        return due[0]  # the others may depend on it, so they wait for it

    async def _decide(self, child: Child) -> bool:
        """Act on the exit of `child`. True: the supervisor shall end."""
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

    async def _restart_these(self, cause: Child, plan: RestartThese) -> None:
        backoff = self._spec.backoff
        cause.streak = backoff.next_streak(cause.streak, lived=cause.lived)
        delay = backoff.delay(cause.streak)
        # Marked before anything is awaited: a child is never neither running nor due.
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

    def _give_up(self, child: Child, restarts: int, now: float) -> RestartLimitReached:
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
        """Stop the children in reverse order; collects the errors they fail with *while stopping*.

        A crash before that, not decided on any more, was reported like every crash that is restarted.
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
                    f"supervisor {path!r} failed, and children failed to stop", [failure, *errors]
                )
            raise failure
        if errors:
            raise StopFailed(f"supervisor {path!r} stopped, but children failed meanwhile", errors)

    # -- called by the children's tasks

    def _on_exit(self, child: Child) -> None:
        self._exits.append(child)
        self._wake.set()

    def _on_fatal(self, error: BaseException) -> None:
        self._fatal.append(error)
        self._serving.cancel(reason=repr(error))


def _error_of(child: Child) -> Exception:
    if isinstance(child.reason, Error) and isinstance(child.reason.error, Exception):
        return child.reason.error
    return OtpError(f"child {child.place.path!r} ended although it should run: {child.reason}")
