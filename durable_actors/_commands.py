"""`CommandCalls`: commands on instances. `Client` inherits it."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from functools import partial
from typing import Any, Literal, Unpack, cast, overload

import psycopg

from durable_actors._bulk import Bulk, BulkCalls, BulkSaid, one_target, single
from durable_actors._history import TrioConn
from durable_actors._option_checks import choice, count, flag, shown
from durable_actors._store.cascade import COURTESY, cascading
from durable_actors._store.commands import Command, Receipt, Said, plan_command
from durable_actors._store.dialogues import (
    RETRY,
    RUN_NOW,
    CarriedOut,
    InstanceCommand,
    cancelling,
    carrying_out,
    listing_receipts,
    run_dialogue,
)
from durable_actors._store.observe import NEWEST, Filter
from durable_actors._store.rebuild import Rebuilt, rebuilding
from durable_actors._store.recover import RecoveryReport
from durable_actors._store.rerun import rerunning
from durable_actors._store.rerun_tasks import Start
from durable_actors._trio_run import at_home
from durable_actors.errors import ConfigError, StoreUnavailable
from durable_actors.machine import KEEP, StepRef, TaskRef


class CommandCalls(BulkCalls):
    """Gives commands to instances that exist: to one, or with `where` to many."""

    @overload
    async def retry(
        self, target: int | str | bytes, *, conn: TrioConn | None = None, **said: Unpack[Said]
    ) -> int: ...
    @overload
    async def retry(self, *, where: Filter, **said: Unpack[BulkSaid]) -> Bulk: ...
    async def retry(
        self,
        target: int | str | bytes | None = None,
        *,
        where: Filter | None = None,
        conn: TrioConn | None = None,
        **said: Unpack[BulkSaid],
    ) -> int | Bulk:
        """Run a failed or cancelled instance again, or many; see `durable_actors.retry`."""
        if (one := one_target("retry", target, where, conn, said)) is None:
            return await self._bulk("retry", where, said)
        return (await self._command(RETRY, one, plan_command(**single(said)), conn)).id

    @overload
    async def run_now(
        self, target: int | str | bytes, *, conn: TrioConn | None = None, **said: Unpack[Said]
    ) -> Literal["hastened", "paused", "due", "held", "waiting"]: ...
    @overload
    async def run_now(self, *, where: Filter, **said: Unpack[BulkSaid]) -> Bulk: ...
    async def run_now(
        self,
        target: int | str | bytes | None = None,
        *,
        where: Filter | None = None,
        conn: TrioConn | None = None,
        **said: Unpack[BulkSaid],
    ) -> Literal["hastened", "paused", "due", "held", "waiting"] | Bulk:
        """Let a delayed instance run now, or many; see `durable_actors.run_now`."""
        if (one := one_target("run_now", target, where, conn, said)) is None:
            return await self._bulk("run_now", where, said)
        done = await self._command(RUN_NOW, one, plan_command(**single(said)), conn)
        return cast("Literal['hastened', 'paused', 'due', 'held', 'waiting']", done.result)

    @overload
    async def cancel(
        self,
        target: int | str | bytes,
        *,
        children: Literal["leave", "cancel"] = "leave",
        force: bool = False,
        conn: TrioConn | None = None,
        **said: Unpack[Said],
    ) -> Literal["cancelled", "requested"]: ...
    @overload
    async def cancel(
        self,
        *,
        where: Filter,
        children: Literal["leave", "cancel"] = "leave",
        force: bool = False,
        **said: Unpack[BulkSaid],
    ) -> Bulk: ...
    async def cancel(
        self,
        target: int | str | bytes | None = None,
        *,
        where: Filter | None = None,
        children: Literal["leave", "cancel"] = "leave",
        force: bool = False,
        conn: TrioConn | None = None,
        **said: Unpack[BulkSaid],
    ) -> Literal["cancelled", "requested"] | Bulk:
        """Cancel an instance that has not ended, or many; see `durable_actors.cancel`."""
        flag("force", force)
        choice("children", children, "leave", "cancel")
        how = {"force": force, "children": children == "cancel"}
        if (one := one_target("cancel", target, where, conn, said)) is None:
            bulk = await self._bulk("cancel", where, said, options=how)
            if how["children"] and self.cascade is None:
                await self._begin_cascade()
            return bulk
        command = plan_command(**single(said))
        done = await self._dialogue(partial(cancelling, self._schema, one, command, **how), conn)
        if done.found is not None:
            self._after_commit(conn, partial(self._after_cancel, done))
        if done.cascades and conn is None and self.cascade is None:
            await self._begin_cascade()
        return cast("Literal['cancelled', 'requested']", done.result)

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

    async def rerun(
        self,
        target: int | str | bytes,
        *,
        step: str | StepRef[Any] | TaskRef[Any] | None = None,
        state: object = KEEP,
        at_rev: int | None = None,
        conn: TrioConn | None = None,
        **said: Unpack[Said],
    ) -> int:
        """Start a new instance from an old one; see `durable_actors.rerun`."""
        start = Start(step=step, state=state, at_rev=at_rev)
        command = plan_command(**said)
        done = await self._dialogue(partial(rerunning, self._schema, target, command, start), conn)
        if (old := done.old) is not None:
            self._after_commit(conn, partial(self._hint, old.queue, done.id, priority=old.priority))
        return done.id

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
    async def recover(
        self, *, by: str | None = None, reason: str | None = None, dry_run: bool = False
    ) -> RecoveryReport:
        """Correct what the engine never leaves wrong; see `durable_actors.recover`."""
        report = await super().recover(by=by, reason=reason, dry_run=dry_run)
        if self.wakeups is not None and not dry_run:
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
        reading = partial(listing_receipts, self._schema, target, command=command, before=before, limit=limit)
        return await self._run(lambda conn: run_dialogue(conn, reading()))
