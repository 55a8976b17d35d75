"""PoolChild: a pool as a child of a supervisor."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import trio

from durable_actors.otp._child_spec import ChildSpec, Description, Incarnation, Place
from durable_actors.otp._exit import sole_error
from durable_actors.otp._pool import Pool
from durable_actors.otp._snapshot import NodeKind

# ruff: noqa: SLF001 - a pool and its incarnation are one thing in two files


def _name_of(spec: PoolChild) -> str:
    return spec.pool.name


@attrs.frozen(kw_only=True)
class PoolChild(ChildSpec):
    """A pool as a child of a supervisor.

    On a stop it drains: running tasks may finish within its shutdown time, then they are cancelled.
    """

    pool: Pool = attrs.field(kw_only=False)
    """The pool. The child has the name of the pool."""
    name: str = attrs.field(init=False, default=attrs.Factory(_name_of, takes_self=True))
    """The pool's name."""
    on_kill: Callable[[], None] | None = None
    """Called when the shutdown time is over and the tasks are cancelled, unless a restart follows. Must not raise.

    Not called when the pool crashes: tasks that cannot be cancelled must end before the pool starts again.
    """

    @property
    def kind(self) -> NodeKind:
        """Always "pool"."""
        return "pool"

    def incarnate(self, place: Place) -> Incarnation:  # noqa: ARG002 - the protocol's
        """Return a new incarnation of the same pool."""
        return _PoolRun(self.pool, self.on_kill)

    def close(self) -> None:
        """Do nothing: `wait_free` has already raised `PoolClosed`."""


class _PoolRun:
    """One incarnation of a pool."""

    __slots__ = ("_cancelled", "_ended", "_on_kill", "_pool", "_restarts", "_stop")

    def __init__(self, pool: Pool, on_kill: Callable[[], None] | None) -> None:
        self._pool = pool
        self._on_kill = on_kill
        self._restarts = False
        self._stop = trio.Event()
        self._cancelled = False  # from outside: the shutdown time is over
        self._ended = False

    async def run(self, ready: Callable[[], None]) -> None:
        pool = self._pool
        pool._check_closed()
        failure: BaseException | None = None
        async with trio.open_nursery() as outside:
            outside.start_soon(self._watch)
            try:
                async with trio.open_nursery() as nursery:
                    pool._open(nursery)
                    try:
                        ready()
                        await self._stop.wait()
                        await pool._wait_empty()
                    finally:
                        pool._shut()
            except BaseExceptionGroup as group:
                failure = sole_error(group)
            finally:
                self._ended = True
                pool._closed()
                outside.cancel_scope.cancel()
        if failure is not None:
            raise failure  # outside the handler, so that the group does not become its context

    async def _watch(self) -> None:
        """Wait until the pool is cancelled. Outside its nursery, which a crash of the pool cancels, too."""
        try:
            await trio.sleep_forever()
        except trio.Cancelled:
            # Not raised again: this task ends anyway, and it would hide the error of a crash.
            self._cancelled = True
            self._kill_if_for_good()

    def _kill_if_for_good(self) -> None:
        if self._cancelled and not (self._restarts or self._ended) and self._on_kill is not None:
            self._on_kill()

    def request_stop(self, why: str, *, restart: bool) -> bool:  # noqa: ARG002 - the protocol's
        self._restarts = restart
        self._pool._shut()  # no task starts after this
        self._stop.set()
        self._kill_if_for_good()  # a restart that becomes a stop, after the shutdown time
        return True

    def describe(self, *, tasks: int) -> Description:
        return Description(pool=self._pool.statistics(), children=self._pool._nodes(tasks))
