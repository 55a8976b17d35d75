"""Commands on instances that exist, as plain functions: `cancel`, `retry`, … They find their client themselves."""

from __future__ import annotations

from typing import Any, Literal, Unpack, overload

from durable_actors._bulk import Bulk, BulkSaid
from durable_actors._history import TrioConn
from durable_actors._store.commands import Said
from durable_actors._store.observe import Filter
from durable_actors.client import find_client
from durable_actors.machine import KEEP, StepRef, TaskRef


@overload
async def cancel(
    target: int | str | bytes,
    *,
    children: Literal["leave", "cancel"] = "leave",
    force: bool = False,
    engine: object = None,
    conn: TrioConn | None = None,
    **said: Unpack[Said],
) -> Literal["cancelled", "requested"]: ...
@overload
async def cancel(
    *,
    where: Filter,
    children: Literal["leave", "cancel"] = "leave",
    force: bool = False,
    engine: object = None,
    **said: Unpack[BulkSaid],
) -> Bulk: ...
async def cancel(target: Any = None, *, engine: object = None, **options: Any) -> Any:
    """Cancel an instance (by id or unique key) that has not ended. Returns "cancelled", or "requested" if a step runs.

    Not executing: it has ended when this returns. Executing: its node is asked to, and cancels the step within two
    seconds, wherever it runs; a `def` step runs to its end, because a thread cannot be cancelled. If the step still
    commits `Done` first, the instance is done; with any other outcome, a crash or the death of its node it is
    cancelled, and children that it would schedule are not inserted. `force=True` does not ask: the instance is
    cancelled at once, and the step that still runs can commit nothing.

    An instance of a machine with `@step(on_cancel=True)` enters that step instead of ending ("requested"), with `force`
    at once. When it ends, the instance is cancelled. To cancel it while it compensates is a `Conflict`;
    `force=True` ends it then.

    A cancelled instance has ended: `result` raises `InstanceCancelled`, its parent's barrier counts it as failed, its
    partition key is free. It keeps its inbox, and `retry` runs it again. Its children go on; with `children="cancel"`
    they are cancelled, too, and theirs: soon after, in batches, by this call or by any engine. Raises `NoTarget` if it
    does not exist, and `Conflict` if it has ended. To ask again is no error: "requested".

    It is a command, like `retry`: it leaves a `Receipt` with `by`, `reason` and `meta`, and with an `idempotency_key`
    it is safe to call again. With `conn` (a Trio connection) it is part of your transaction; cancel several instances
    of one transaction in the order of their ids.

    With `where` instead of a target it cancels all that match the filter, and returns a `Bulk`; see `retry`.
    """
    return await find_client(engine).cancel(target, **options)


@overload
async def retry(
    target: int | str | bytes, *, engine: object = None, conn: TrioConn | None = None, **said: Unpack[Said]
) -> int: ...
@overload
async def retry(*, where: Filter, engine: object = None, **said: Unpack[BulkSaid]) -> Bulk: ...
async def retry(target: Any = None, *, engine: object = None, **options: Any) -> Any:
    """Run a failed or cancelled instance (by id or unique key) again, from the step in which it ended; return its id.

    Attempts start again at 0. Raises `NoTarget` if it does not exist, `Conflict` if it has neither failed nor been
    cancelled, and `Duplicate` if another instance now occupies its unique key; nothing is written then.

    This is a command: it leaves one `Receipt`, which tells who gave it (`by`), why (`reason`) and what you add as
    `meta`, a dict in which the values of `password`, `token`, `api_key` and the like are stored as "[redacted]". With
    an `idempotency_key` it is safe to call again, also after `CommitUnknown`: the same key on the same instance returns
    what the first call returned, and does nothing. With `conn` (a Trio connection) it is part of your transaction.

    With `where=Filter(error="timed out")` instead of a target it retries all failed instances that match, and returns a
    `Bulk`: in batches, each instance in a transaction of its own and with a receipt of its own. Which are meant is
    decided at the beginning; one that has changed when its turn comes is skipped. `Filter(status="cancelled")` retries
    cancelled ones. `dry_run=True` only counts. `progress` is called after each batch. With `background=True` a worker
    does it, and another one goes on if that dies. If the call is interrupted, call it again with the same
    `idempotency_key`: the bulk goes on, and does nothing twice.
    """
    return await find_client(engine).retry(target, **options)


@overload
async def run_now(
    target: int | str | bytes, *, engine: object = None, conn: TrioConn | None = None, **said: Unpack[Said]
) -> Literal["hastened", "paused", "due", "held", "waiting"]: ...
@overload
async def run_now(*, where: Filter, engine: object = None, **said: Unpack[BulkSaid]) -> Bulk: ...
async def run_now(target: Any = None, *, engine: object = None, **options: Any) -> Any:
    """Let a runnable instance (by id or unique key) run now: skip its delay, its schedule or its back-off.

    Returns "hastened"; "paused" if it is paused, too: its delay is skipped, and it runs as soon as it is resumed; "due"
    if it was due already, "waiting" if it waits for instances that it comes after, and "held" if something else than
    time holds it, such as another instance of its partition key: then nothing changes. Raises `NoTarget` if it does not
    exist, and `Conflict` if it runs, waits for signals or children, or has ended.

    It is a command, like `retry`, and takes `where` like it: all delayed instances that match.
    """
    return await find_client(engine).run_now(target, **options)


async def rerun(
    target: int | str | bytes,
    *,
    step: str | StepRef[Any] | TaskRef[Any] | None = None,
    state: object = KEEP,
    at_rev: int | None = None,
    engine: object = None,
    conn: TrioConn | None = None,
    **said: Unpack[Said],
) -> int:
    """Start a new instance from an old one (by id or unique key), whether that has ended or not; return the new id.

    It has the machine, version, queue, priority, partition key, tags and meta of the old one, and `Instance.rerun_of`
    names that. It has no unique key and no parent. It begins where the old one began: in its first step, with its first
    state. `step` and `state` say otherwise; `at_rev` takes both as they were at a revision of the old one (see
    `history`), which needs journal level "full".

    For a `Workflow`, `step` is a task (`Report.charts`, or its name). That task runs, every task that has no result,
    and all that come after one of these; the results of the others are carried into the new instance. Without `step`
    everything runs again. The parameters are those of the old one, or `state`. An unknown task is a `ConfigError`.

    Raises `NoTarget` if the old one does not exist, and `Conflict` if its first state is not known: it is recorded at
    level "full", or no outcome can have changed it yet. A state is checked by the machine if this process knows it;
    otherwise it must be a JSON value. Limits are those that the old one used in that step, if that is known, else those
    that the code of this process says of it.

    It is a command, like `retry`: with an `idempotency_key` a second call returns the id of the first.
    """
    return await find_client(engine).rerun(target, step=step, state=state, at_rev=at_rev, conn=conn, **said)
