"""`HintCalls`: what follows a call that has made work: hints to the feeders of this process, and its notifier."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

from durable_actors._engine.node import NO_CLAIMS, ClaimsForCalls
from durable_actors._engine.wakeups import NotifierStatistics, Wakeups
from durable_actors._history import TrioConn
from durable_actors._postgres.pool.pool import ConnectionPool
from durable_actors._postgres.trio.connection import TrioConnection
from durable_actors._runners import RunnerCalls
from durable_actors._store.dialogues import CarriedOut


class Notify(Protocol):
    """A hint to the feeder of a queue that there may be work."""

    def __call__(
        self,
        queue: str,
        /,
        *,
        instance_id: int | None = None,
        priority: int | None = None,
        new_unkeyed: bool = False,
        by_signal: bool = False,
    ) -> None:
        """Hint at work in this queue, optionally with its instance id and priority.

        `new_unkeyed`: the instance is new, due and has no partition key. `by_signal`: a signal woke it.
        """


def _no_notify(
    queue: str,
    /,
    *,
    instance_id: int | None = None,
    priority: int | None = None,
    new_unkeyed: bool = False,
    by_signal: bool = False,
) -> None:
    """Do nothing: there is no engine in this process, and feeders elsewhere poll."""


class HintCalls(RunnerCalls):
    """Hints at the work that calls have made. `Client` inherits it."""

    def __init__(self, pool: ConnectionPool, lane: str, schema: str) -> None:
        super().__init__(pool, lane, schema)
        self.notify: Notify = _no_notify
        """Called after a commit that created work. An engine sets it to `Node.notify`, to start the work at once."""
        self.wakeups: Wakeups | None = None
        """What the notifier is to be told of this client's calls; None: there is no notifier."""
        self.at_once: ClaimsForCalls = NO_CLAIMS
        """What an insert or a signal may claim in its own transaction. An engine sets it to `Node.at_once`."""
        self.cascade: Callable[[], object] | None = None
        """Called after a commit that decided to cancel children. None: no engine runs here that would do it."""

    def _after_commit(self, conn: TrioConn | None, notify: Callable[[], None]) -> None:
        """Notify the feeders after the commit. Only a `TrioConnection` reports that; else polling finds the rows."""
        if conn is None:
            self.home.soon(notify)
        elif isinstance(conn, TrioConnection):
            conn.after_commit(partial(self.home.soon, notify))

    def _hint(
        self, queue: str, instance_id: int, *, priority: int | None = None, by_signal: bool = False
    ) -> None:
        """An instance became runnable: wake the feeder of its queue, and tell the notifier."""
        self.notify(queue, instance_id=instance_id, priority=priority, by_signal=by_signal)
        if self.wakeups is not None:
            self.wakeups.add((instance_id,))

    def notifications(self) -> NotifierStatistics:
        """Return how many wake-ups the notifier was told, how many failed, were dropped or wait. None: all zero."""
        return NotifierStatistics() if self.wakeups is None else self.wakeups.statistics()

    def _ended(self, instance_id: int) -> None:
        """An instance has ended: a hint for whoever waits for its result. `Client` knows them."""

    def _after_cancel(self, done: CarriedOut) -> None:
        """Hint at its end to whoever waits for it, and at what it has held up to the feeders."""
        if done.result == "cancelled":
            self._ended(done.id)
        for each in done.offered:
            self._hint(each.queue, each.id)
        if (
            done.cascades or done.result == "cancelled"
        ) and self.cascade is not None:  # dependents are told, too
            self.cascade()
