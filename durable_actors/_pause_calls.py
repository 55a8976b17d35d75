"""`PauseCalls`: pausing and resuming instances and queues. `Client` inherits it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal, Unpack, cast, overload

from durable_actors._bulk import Bulk, BulkSaid, one_target, single
from durable_actors._commands import CommandCalls
from durable_actors._history import TrioConn
from durable_actors._postgres.pool.pool import ConnectionPool
from durable_actors._store.commands import Said, plan_command
from durable_actors._store.dialogues import CarriedOut
from durable_actors._store.observe import Filter
from durable_actors._store.pauses import QueuePause, read_pauses
from durable_actors._store.pausing import RESUME, Until, pausing, pausing_queue, plan_queue, resuming_queue
from durable_actors._trio_run import at_home
from durable_actors.machine import MachineRef


def _nobody_listens(queue: str, /) -> None:
    """Do nothing: there is no engine in this process, and nodes elsewhere find it out themselves."""


class PauseCalls(CommandCalls):
    """Gives the commands `pause` and `resume`."""

    def __init__(self, pool: ConnectionPool, lane: str, schema: str) -> None:
        super().__init__(pool, lane, schema)
        self.pauses_changed: Callable[[str], None] = _nobody_listens
        """Called after a commit that paused or resumed a queue. An engine sets it to `Node.pauses_changed`."""

    @overload
    async def pause(
        self, target: int | str | bytes, *, conn: TrioConn | None = None, **said: Unpack[Said]
    ) -> Literal["paused", "requested"]: ...
    @overload
    async def pause(self, *, where: Filter, **said: Unpack[BulkSaid]) -> Bulk: ...
    async def pause(
        self,
        target: int | str | bytes | None = None,
        *,
        where: Filter | None = None,
        conn: TrioConn | None = None,
        **said: Unpack[BulkSaid],
    ) -> Literal["paused", "requested"] | Bulk:
        """Let nothing pick an instance until it is resumed, or many; see `durable_actors.pause`."""
        if (one := one_target("pause", target, where, conn, said)) is None:
            return await self._bulk("pause", where, said)
        done = await self._dialogue(partial(pausing, self._schema, one, plan_command(**single(said))), conn)
        if done.offered:
            self._after_commit(conn, partial(self._hint_offered, done))
        return cast("Literal['paused', 'requested']", done.result)

    def _hint_offered(self, done: CarriedOut) -> None:
        for each in done.offered:
            self._hint(each.queue, each.id)

    @overload
    async def resume(
        self, target: int | str | bytes, *, conn: TrioConn | None = None, **said: Unpack[Said]
    ) -> int: ...
    @overload
    async def resume(self, *, where: Filter, **said: Unpack[BulkSaid]) -> Bulk: ...
    async def resume(
        self,
        target: int | str | bytes | None = None,
        *,
        where: Filter | None = None,
        conn: TrioConn | None = None,
        **said: Unpack[BulkSaid],
    ) -> int | Bulk:
        """End the pause of an instance, or of many; see `durable_actors.resume`."""
        if (one := one_target("resume", target, where, conn, said)) is None:
            return await self._bulk("resume", where, said)
        return (await self._command(RESUME, one, plan_command(**single(said)), conn)).id

    async def pause_queue(
        self,
        queue: str,
        machine: MachineRef | str | None = None,
        until: Until | None = None,
        *,
        conn: TrioConn | None = None,
        **said: Unpack[Said],
    ) -> QueuePause:
        """Let nothing pick from a queue; see `durable_actors.pause_queue`."""
        command = plan_command(**said)
        plan = plan_queue(queue, machine, until)
        done = await self._dialogue(partial(pausing_queue, self._schema, plan, command), conn)
        self._after_commit(conn, partial(self.pauses_changed, plan.queue))
        return done.pause

    async def resume_queue(
        self,
        queue: str,
        machine: MachineRef | str | None = None,
        *,
        conn: TrioConn | None = None,
        **said: Unpack[Said],
    ) -> QueuePause:
        """End the pause of a queue; see `durable_actors.resume_queue`."""
        command = plan_command(**said)
        plan = plan_queue(queue, machine)
        done = await self._dialogue(partial(resuming_queue, self._schema, plan, command), conn)
        self._after_commit(conn, partial(self.pauses_changed, plan.queue))
        return done.pause

    @at_home
    async def pauses(self) -> list[QueuePause]:
        """List what is paused: queues, and machines in queues; see `durable_actors.pauses`."""
        return await self._run(lambda conn: read_pauses(conn, self._schema))
