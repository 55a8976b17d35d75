"""ChildRecord: a supervisor's record of one child and its current incarnation.

It owns the incarnation's cancel scope. A graceful stop sets the deadline of that scope, so "ask, wait, then
cancel" needs no timer and can be requested twice. However the task ends, `_exit` runs exactly once per
incarnation, with the reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import trio

from durable_actors.otp._child_spec import ChildSpec, Incarnation, Place
from durable_actors.otp._errors import OtpError, StartTimeout
from durable_actors.otp._events import ChildExited, ChildStarted
from durable_actors.otp._exit import NORMAL, Error, ExitReason, Shutdown, contains_cancelled
from durable_actors.otp._restart import Sibling
from durable_actors.otp._snapshot import ChildState, Node, waits_for


class ChildRecord:
    """A supervisor's record of one child."""

    def __init__(
        self,
        spec: ChildSpec,
        place: Place,
        *,
        on_exit: Callable[[ChildRecord], None],
        on_fatal: Callable[[BaseException], None],
    ) -> None:
        self.spec = spec
        self.place = place
        self._on_exit = on_exit
        self._on_fatal = on_fatal
        self.state: ChildState = "new"
        self.since = trio.current_time()
        self.starts = 0
        self.streak = 0  # restarts in a row, for the back-off
        self.due: float | None = None  # when to start it again
        self.reason: ExitReason | None = None
        self.lived = 0.0
        self.exit_pending = False  # ended, and the supervisor has not decided yet what follows
        self.last_error: str | None = None
        self._run: Incarnation | None = None
        self._task: trio.lowlevel.Task | None = None
        self._scope = trio.CancelScope()
        self._settled = trio.Event()  # ready, or ended before it was ready
        self._ended = trio.Event()
        self._began = 0.0
        self._stop_why: str | None = None
        self._graceful = False
        self._restarts = False
        self._was_ready = False

    @property
    def alive(self) -> bool:
        """Whether an incarnation exists."""
        return self.state in ("starting", "running", "stopping")

    def sibling(self) -> Sibling:
        """Return what `decide` needs to know about this child."""
        spec = self.spec
        if self.alive or self.exit_pending:
            return Sibling(spec.restart, spec.significant, "alive")
        return Sibling(spec.restart, spec.significant, "ended" if self.due is None else "due")

    # -- start

    async def start(self, nursery: trio.Nursery) -> bool:
        """Start an incarnation and wait until it is ready. Returns False if it ended before that; see `reason`.

        An incarnation that was ready and has already ended counts as started; its exit is in the queue.
        If this raises Cancelled, the incarnation exists and must be stopped.
        """
        assert not self.alive, self.place.path
        run = self.spec.incarnate(self.place)
        self._run = run
        self._scope = trio.CancelScope()
        self._settled = trio.Event()
        self._ended = trio.Event()
        self._began = trio.current_time()
        self._scope.deadline = self._began + self.spec.start_timeout
        self._stop_why = None
        self._graceful = False
        self._was_ready = False
        self.due = None
        self.exit_pending = False
        self.starts += 1
        self._enter("starting")
        nursery.start_soon(self._main, run, name=self.place.path)
        await self._settled.wait()
        return self._was_ready

    def _ready(self) -> None:
        if self.state != "starting":  # called twice, or asked to stop in the meantime
            return
        self._scope.deadline = math.inf
        self._was_ready = True
        self._enter("running")
        self._settled.set()
        self.place.observe(ChildStarted(path=self.place.path, restarts=self.starts - 1))

    # -- stop

    def request_stop(self, why: str, *, restart: bool) -> None:
        """Ask the incarnation to end. If it was already asked, only a restart that becomes a stop is news."""
        if self.state == "stopping" and self._graceful and self._restarts and not restart:
            assert self._run is not None
            self._restarts = False
            self._run.request_stop(why, restart=False)
        if self.state not in ("starting", "running"):
            return
        self._enter("stopping")
        self._stop_why = why
        self._restarts = restart
        assert self._run is not None
        time = self.spec.shutdown
        if time == "brutal" or not self._run.request_stop(why, restart=restart):
            self._scope.cancel(reason=why)
            return
        self._graceful = True
        self._scope.deadline = trio.current_time() + time

    async def stop(self, why: str, *, restart: bool) -> None:
        """Ask the incarnation to end, and wait until it has ended. Its exit counts as handled.

        If this raises Cancelled, the incarnation is still ending; call `stop` again.
        """
        self.request_stop(why, restart=restart)
        if self.alive:
            await self._ended.wait()
        self.exit_pending = False

    async def wait_ended(self) -> None:
        """Wait until no incarnation is running."""
        if self.alive:
            await self._ended.wait()

    # -- the incarnation's task

    async def _main(self, run: Incarnation) -> None:
        reason: ExitReason = Shutdown("cancelled from outside")  # unless replaced below: Cancelled propagates
        self._task = trio.lowlevel.current_task()
        try:
            with self._scope:
                reason = self._returned(await run.run(self._ready))
            if self._scope.cancelled_caught:
                reason = self._cancelled()
        except Exception as exc:  # the supervisor turns every crash into an exit reason
            reason = Error(exc)
            if _cancelled_from_outside():
                raise
        except BaseException as exc:
            if contains_cancelled(exc):
                raise
            reason = Error(exc)
            if _cancelled_from_outside():
                raise
            self._on_fatal(exc)  # KeyboardInterrupt, SystemExit: stop in reverse order, then raise it again
        finally:
            self._exit(reason)

    def _returned(self, reason: ExitReason | None) -> ExitReason:
        if self._stop_why is not None:
            return Shutdown(self._stop_why)
        if self.state == "starting":
            return Error(OtpError(f"{self.place.path!r} returned before it was ready"))
        return NORMAL if reason is None else reason

    def _cancelled(self) -> ExitReason:
        if self._stop_why is not None:
            return Shutdown(self._stop_why, killed=self._graceful or self.spec.shutdown == "brutal")
        return Error(StartTimeout(f"{self.place.path!r} was not ready within {self.spec.start_timeout:g} s"))

    def _exit(self, reason: ExitReason) -> None:
        self._task = None
        self._run = None
        self.reason = reason
        self.lived = trio.current_time() - self._began
        if isinstance(reason, Error):
            self.last_error = repr(reason.error)
        self.exit_pending = True
        self._enter("ended")
        self._settled.set()
        self._ended.set()
        self._on_exit(self)
        self.place.observe(ChildExited(path=self.place.path, reason=reason, lived=self.lived))

    # -- introspection

    def _enter(self, state: ChildState) -> None:
        self.state = state
        self.since = trio.current_time()

    def await_restart(self, at: float) -> None:
        """Schedule a restart at `at`, or later if it is already scheduled for later."""
        self.exit_pending = False
        self.due = at if self.due is None else max(self.due, at)
        self._enter("waiting")

    def node(self, *, tasks: int) -> Node:
        """Return a snapshot of this child and its descendants."""
        about = self.spec.describe() if self._run is None else self._run.describe(tasks=tasks)
        return Node(
            name=self.spec.name,
            kind=self.spec.kind,
            state=self.state,
            since=trio.current_time() - self.since,
            restarts=max(0, self.starts - 1),
            last_error=self.last_error,
            waits_for=waits_for(self._task) if self.spec.kind in ("actor", "task") else None,
            mailbox=about.mailbox,
            pool=about.pool,
            supervisor=about.supervisor,
            children=about.children,
        )


def _cancelled_from_outside() -> bool:
    """Return whether the supervisor is cancelled as well: it cannot decide, so errors must propagate to its owner."""
    return trio.current_effective_deadline() == -math.inf
