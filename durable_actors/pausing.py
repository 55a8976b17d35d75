"""Pauses, as plain functions: `durable_actors.pause`, `pause_queue`, … They find their client themselves."""

from __future__ import annotations

from typing import Any, Literal, Unpack, overload

from durable_actors._bulk import Bulk, BulkSaid
from durable_actors._history import TrioConn
from durable_actors._store.commands import Said
from durable_actors._store.observe import Filter
from durable_actors._store.pauses import QueuePause
from durable_actors._store.pausing import Until
from durable_actors.client import find_client
from durable_actors.machine import MachineRef


@overload
async def pause(
    target: int | str | bytes, *, engine: object = None, conn: TrioConn | None = None, **said: Unpack[Said]
) -> Literal["paused", "requested"]: ...
@overload
async def pause(*, where: Filter, engine: object = None, **said: Unpack[BulkSaid]) -> Bulk: ...
async def pause(target: Any = None, *, engine: object = None, **options: Any) -> Any:
    """Let nothing run an instance (by id or unique key) until `resume`. Returns "paused"; "requested" if a step runs.

    A step that runs finishes, and its outcome is committed; the instance is paused from then on, and does not run
    ahead. An instance that awaits a signal or children keeps waiting: signals are stored, deadlines pass and children
    are counted, but what would run then waits for `resume`. While it is paused, others of its partition key go first.

    Raises `NoTarget` if it does not exist, and `Conflict` if it has ended, is paused already, or is to be cancelled. A
    paused instance can be cancelled. It is a command, like `retry`: it leaves a `Receipt`, and with an
    `idempotency_key` it is safe to call again. With `conn` (a Trio connection) it is part of your transaction. With
    `where` instead of a target it pauses all that match the filter, and returns a `Bulk`; see `retry`.
    """
    return await find_client(engine).pause(target, **options)


@overload
async def resume(
    target: int | str | bytes, *, engine: object = None, conn: TrioConn | None = None, **said: Unpack[Said]
) -> int: ...
@overload
async def resume(*, where: Filter, engine: object = None, **said: Unpack[BulkSaid]) -> Bulk: ...
async def resume(target: Any = None, *, engine: object = None, **options: Any) -> Any:
    """End the pause of an instance (by id or unique key); return its id. What is due runs, what waits keeps waiting.

    Raises `NoTarget` if it does not exist, and `Conflict` if it is not paused. A command, like `pause`, and takes
    `where` like it: all paused instances that match.
    """
    return await find_client(engine).resume(target, **options)


async def pause_queue(
    queue: str,
    machine: MachineRef | str | None = None,
    until: Until | None = None,
    *,
    engine: object = None,
    conn: TrioConn | None = None,
    **said: Unpack[Said],
) -> QueuePause:
    """Let nothing pick from a queue, on any node, until `resume_queue` or until a time has passed.

    Exact: no pick that begins after this has returned claims a row of the queue. Steps that run finish, and nodes
    release within about two seconds what they have claimed and not begun; a machine that runs one step after the other
    on its claim stops as soon. Deploys and restarts change nothing, and a node that drains does not touch it. Inserts
    and signals go on. With `machine` (the class, the job, or its name) only instances of this machine are concerned, in
    all versions. Rows of a paused queue or machine give up their place in their partition keys.

    `until` is an instant with a time zone, or seconds or a timedelta from now. To pause a queue that is paused already
    changes `until`, `by` and `reason`. An instant that has passed is a `Conflict`, and changes nothing. It is a
    command: it leaves a `Receipt` (scope "queue"). Nodes of the release before ignore it: `durable-actors nodes` shows
    them.
    """
    return await find_client(engine).pause_queue(queue, machine, until, conn=conn, **said)


async def resume_queue(
    queue: str,
    machine: MachineRef | str | None = None,
    *,
    engine: object = None,
    conn: TrioConn | None = None,
    **said: Unpack[Said],
) -> QueuePause:
    """End the pause of a queue, or of one machine in it; return the pause as it was.

    Nodes notice within a second; those without the long poll within `max_poll_interval`. The pause of a queue and those
    of machines in it are separate: each is resumed by itself. Instances that were paused themselves stay paused. Raises
    `Conflict` if it is not paused. A command, like `pause_queue`.
    """
    return await find_client(engine).resume_queue(queue, machine, conn=conn, **said)


async def pauses(*, engine: object = None) -> list[QueuePause]:
    """List the paused queues, and the paused machines in queues: since when, until when, by whom and why."""
    return await find_client(engine).pauses()
