"""`CommandCalls`: commands on instances, and what follows a call that has made work. `Client` inherits it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, Literal, Protocol, cast

import psycopg

from durable_actors._engine.wakeups import NotifierStatistics, Wakeups
from durable_actors._history import TrioConn
from durable_actors._option_checks import choice, count, flag, shown
from durable_actors._postgres.pool.pool import ConnectionPool
from durable_actors._postgres.trio.connection import TrioConnection
from durable_actors._runners import RunnerCalls
from durable_actors._store.cascade import cascading
from durable_actors._store.commands import Command, Receipt, plan_command
from durable_actors._store.dialogues import (
    RETRY,
    CarriedOut,
    InstanceCommand,
    cancelling,
    carrying_out,
    listing_receipts,
    run_dialogue,
)
from durable_actors._store.observe import NEWEST
from durable_actors._store.rebuild import Rebuilt, rebuilding
from durable_actors._store.recover import RecoveryReport
from durable_actors._trio_run import at_home
from durable_actors.errors import ConfigError, StoreUnavailable

COURTESY: Final = 20
"""Statements by which a call cancels children, where no engine runs in this process."""


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


class CommandCalls(RunnerCalls):
    """Gives commands, and hints at the work that they and other calls have made."""

    def __init__(self, pool: ConnectionPool, lane: str, schema: str) -> None:
        super().__init__(pool, lane, schema)
        self.notify: Notify = _no_notify
        """Called after a commit that created work. An engine sets it to `Node.notify`, to start the work at once."""
        self.wakeups: Wakeups | None = None
        """What the notifier is to be told of this client's calls; None: there is no notifier."""
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

    async def retry(
        self,
        target: int | str | bytes,
        *,
        by: str | None = None,
        reason: str | None = None,
        idempotency_key: str | None = None,
        meta: Mapping[str, Any] | None = None,
        conn: TrioConn | None = None,
    ) -> int:
        """Run a failed or cancelled instance again; see `durable_actors.retry`."""
        command = plan_command(by=by, reason=reason, idempotency_key=idempotency_key, meta=meta)
        return (await self._command(RETRY, target, command, conn)).id

    async def cancel(
        self,
        target: int | str | bytes,
        *,
        children: Literal["leave", "cancel"] = "leave",
        force: bool = False,
        by: str | None = None,
        reason: str | None = None,
        idempotency_key: str | None = None,
        meta: Mapping[str, Any] | None = None,
        conn: TrioConn | None = None,
    ) -> Literal["cancelled", "requested"]:
        """Cancel an instance that has not ended; see `durable_actors.cancel`."""
        command = plan_command(by=by, reason=reason, idempotency_key=idempotency_key, meta=meta)
        flag("force", force)
        choice("children", children, "leave", "cancel")
        start = partial(cancelling, self._schema, target, command, force=force, children=children == "cancel")
        done = await self._dialogue(start, conn)
        if done.found is not None:
            self._after_commit(conn, partial(self._after_cancel, done))
        if done.cascades and conn is None and self.cascade is None:
            await self._begin_cascade()
        return cast("Literal['cancelled', 'requested']", done.result)

    def _after_cancel(self, done: CarriedOut) -> None:
        """Hint at its end to whoever waits for it, and at what it has held up to the feeders."""
        if done.result == "cancelled":
            self._ended(done.id)
        for each in done.offered:
            self._hint(each.queue, each.id)
        if done.cascades and self.cascade is not None:
            self.cascade()

    async def _begin_cascade(self) -> None:
        """Begin to cancel children, as there is no engine here. What is left, or fails here, engines elsewhere do.

        The command itself is committed: an error, or a cancellation of the caller, changes nothing of that.
        """
        with contextlib.suppress(StoreUnavailable, psycopg.Error):
            done = await self._dialogue(partial(cascading, self._schema, rounds=COURTESY), None)
            for number in done.ended:
                self._ended(number)
            for each in done.offered:
                self._hint(each.queue, each.id)

    def _ended(self, instance_id: int) -> None:
        """An instance has ended: a hint for whoever waits for its result. `Client` knows them."""

    async def _command(
        self, kind: InstanceCommand, target: int | str | bytes, command: Command, conn: TrioConn | None
    ) -> CarriedOut:
        """Carry out a command, in the caller's transaction if there is one, and notify the instance's queue."""
        done = await self._dialogue(partial(carrying_out, kind, self._schema, target, command), conn)
        if (found := done.found) is not None:
            self._after_commit(conn, partial(self._hint, found.queue, found.id, priority=found.priority))
        return done

    async def rebuild(
        self,
        target: int | str | bytes,
        *,
        by: str | None = None,
        reason: str | None = None,
        idempotency_key: str | None = None,
        meta: Mapping[str, Any] | None = None,
        conn: TrioConn | None = None,
        at_last_record: bool = False,
    ) -> int:
        """Write a row as its journal says; see `durable_actors.rebuild`."""
        command = plan_command(by=by, reason=reason, idempotency_key=idempotency_key, meta=meta)
        return (await self.rebuild_row(target, command, conn, at_last_record=at_last_record)).id

    async def rebuild_row(
        self,
        target: int | str | bytes,
        command: Command,
        conn: TrioConn | None = None,
        *,
        at_last_record: bool = False,
    ) -> Rebuilt:
        """As `rebuild`; returns what was changed, too."""
        flag("at_last_record", at_last_record)
        start = partial(rebuilding, self._schema, target, command, at_last_record=at_last_record)
        done = await self._dialogue(start, conn)
        if done.queue is not None:
            self._after_commit(conn, partial(self._hint, done.queue, done.id))
        return done

    @at_home
    async def recover(self, *, by: str | None = None, reason: str | None = None) -> RecoveryReport:
        """Correct what the engine never leaves wrong; see `durable_actors.recover`."""
        report = await super().recover(by=by, reason=reason)
        if self.wakeups is not None:
            self.wakeups.add((*report.woken, *report.recounted, *report.offered, *report.reaped))
        return report

    @at_home
    async def receipts(
        self,
        target: int | str | bytes | None = None,
        *,
        command: str | None = None,
        after: int = 0,
        limit: int = 100,
    ) -> list[Receipt]:
        """List the commands that were carried out, newest first; see `durable_actors.receipts`."""
        count("limit", limit, least=1, most=10_000)
        before = count("after", after, least=0, most=NEWEST) or NEWEST
        if command is not None and not isinstance(command, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"command={shown(command)} must be a string", option="command", value=command)
        async with self._pool.acquire(self._lane) as conn:
            return await run_dialogue(
                conn, listing_receipts(self._schema, target, command=command, before=before, limit=limit)
            )
