"""Insert in your own transaction on an asyncio `psycopg.AsyncConnection`: FastAPI, Starlette, aiohttp.

::

    async with await psycopg.AsyncConnection.connect(dsn) as conn:
        await conn.execute("insert into orders ...")
        await durable_actors.aio.insert(conn, Checkout, state=Order(42))

The instance exists once your transaction commits. Workers find it at their next poll.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any, Literal, Unpack, cast, overload

import psycopg

from durable_actors._client import insert_on, signal_on
from durable_actors._option_checks import Duration, check_schema_name, choice, flag
from durable_actors._store.boundaries import DecisionSaid, plan_decision
from durable_actors._store.cascade import COURTESY, cascading
from durable_actors._store.commands import Said, plan_command
from durable_actors._store.connection_kinds import AioConnection, aio_connection
from durable_actors._store.dialogues import (
    RETRY,
    RUN_NOW,
    ResultPolling,
    cancelling,
    carrying_out,
    climbing,
    deciding,
    ending,
    explaining,
    inspecting,
    resolving,
    undelivered,
    value_of,
)
from durable_actors._store.drawing import MOST_NODES, drawing
from durable_actors._store.explanation import Explanation
from durable_actors._store.foreign import committed, polling_async, run_dialogue_async
from durable_actors._store.insert import Insertion, plan_rows
from durable_actors._store.pauses import QueuePause
from durable_actors._store.pausing import RESUME, Until, pausing, pausing_queue, plan_queue, resuming_queue
from durable_actors._store.read import Instance
from durable_actors._store.rerun import rerunning
from durable_actors._store.rerun_tasks import Start
from durable_actors._store.signal import plan_signal
from durable_actors._store.tree import Tree
from durable_actors._tracing import sending
from durable_actors.diagrams import Diagram
from durable_actors.errors import DurableError
from durable_actors.machine import (
    KEEP,
    Defined,
    InsertOptions,
    InsertRows,
    MachineRef,
    OnDuplicate,
    RowOptions,
    StepRef,
    TaskRef,
)

__all__ = [
    "approve",
    "cancel",
    "explain",
    "graph",
    "insert",
    "insert_many",
    "inspect",
    "pause",
    "pause_queue",
    "proceed",
    "reject",
    "rerun",
    "result",
    "resume",
    "resume_queue",
    "retry",
    "run_now",
    "signal",
    "tree",
]


@overload
async def insert(
    conn: AioConnection,
    machine: MachineRef,
    *,
    schema: str = "durable",
    on_duplicate: Literal["raise", "return"] = "raise",
    **options: Unpack[RowOptions],
) -> int: ...
@overload
async def insert(
    conn: AioConnection,
    machine: MachineRef,
    *,
    schema: str = "durable",
    on_duplicate: OnDuplicate = "raise",
    **options: Unpack[RowOptions],
) -> int | None: ...
async def insert(
    conn: AioConnection,
    machine: MachineRef,
    *,
    schema: str = "durable",
    **options: Unpack[InsertOptions],
) -> int | None:
    """Insert an instance and return its id. Raises `Duplicate` if its unique key is occupied (see `on_duplicate`).

    `Duplicate` does not abort your transaction: you can catch it and continue.
    """
    check_schema_name(schema)
    conn = await aio_connection(conn)
    with sending() as span:
        insertion = Insertion(plan_rows(machine, [options], on_duplicate="raise"))
        await insert_on(conn, insertion, schema=schema)
        ids = insertion.ids()
        span.sent(ids)
    return ids[0]


async def insert_many(
    conn: AioConnection,
    machine: MachineRef,
    rows: InsertRows,
    *,
    schema: str = "durable",
) -> list[int | None]:
    """Insert many instances in one statement. Returns their ids in input order, None where a unique key is occupied."""
    check_schema_name(schema)
    conn = await aio_connection(conn)
    with sending() as span:
        insertion = Insertion(plan_rows(machine, rows))
        await insert_on(conn, insertion, schema=schema)
        ids = insertion.ids()
        span.sent(ids)
    return ids


async def signal(
    conn: AioConnection,
    target: int | str | bytes,
    name: str,
    payload: object = None,
    *,
    dedup_key: str | None = None,
    schema: str = "durable",
) -> None:
    """Send a signal to an instance, by id or unique key. The instance wakes when your transaction commits.

    Raises `NoTarget` if the instance has ended or does not exist. Its row stays locked until your transaction ends.
    """
    check_schema_name(schema)
    conn = await aio_connection(conn)
    [sent] = await signal_on(conn, [plan_signal(target, name, payload, dedup_key)], schema=schema)
    if sent.outcome == "no_target":
        raise await run_dialogue_async(conn, undelivered(schema, name, target), schema=schema)


async def inspect(conn: AioConnection, target: int | str | bytes, *, schema: str = "durable") -> Instance:
    """Read an instance by id, or by unique key (the current holder, or else the last one). Raises `NoTarget`."""
    conn = await aio_connection(conn)
    return await run_dialogue_async(conn, inspecting(check_schema_name(schema), target), schema=schema)


async def explain(conn: AioConnection, target: int | str | bytes, *, schema: str = "durable") -> Explanation:
    """Explain why an instance waits, runs or has ended; see `durable_actors.explain`. Raises `NoTarget`."""
    conn = await aio_connection(conn)
    return await run_dialogue_async(conn, explaining(check_schema_name(schema), target), schema=schema)


async def tree(
    conn: AioConnection,
    target: int | str | bytes,
    *,
    depth: int = 10,
    children: int = 100,
    limit: int = 1000,
    schema: str = "durable",
) -> Tree:
    """Return the family of an instance; see `durable_actors.tree`. Raises `NoTarget`."""
    conn = await aio_connection(conn)
    reading = climbing(check_schema_name(schema), target, depth=depth, children=children, limit=limit)
    return await run_dialogue_async(conn, reading, schema=schema)


async def graph(
    conn: AioConnection,
    target: int | str | bytes | Defined,
    *,
    barrier: int | None = None,
    steps: bool = False,
    limit: int = MOST_NODES,
    schema: str = "durable",
) -> Diagram:
    """Return the diagram of an instance or a machine; see `durable_actors.graph`. Raises `NoTarget`."""
    conn = await aio_connection(conn)
    reading = drawing(check_schema_name(schema), target, barrier=barrier, steps=steps, limit=limit)
    return await run_dialogue_async(conn, reading, schema=schema)


async def retry(
    conn: AioConnection,
    target: int | str | bytes,
    *,
    schema: str = "durable",
    **said: Unpack[Said],
) -> int:
    """Run a failed or cancelled instance again once your transaction commits; return its id.

    It leaves a receipt, in your transaction or savepoint; `durable_actors.retry` says what the receipt tells, and what
    `idempotency_key` does. Raises `NoTarget` if the instance does not exist, `Conflict` if it has neither failed nor
    been cancelled, and `Duplicate` if another instance now occupies its unique key. These errors do not abort your
    transaction.
    """
    conn = await aio_connection(conn)
    dialogue = carrying_out(RETRY, check_schema_name(schema), target, plan_command(**said))
    return (await run_dialogue_async(conn, dialogue, schema=schema)).id


async def cancel(
    conn: AioConnection,
    target: int | str | bytes,
    *,
    children: Literal["leave", "cancel"] = "leave",
    force: bool = False,
    schema: str = "durable",
    **said: Unpack[Said],
) -> Literal["cancelled", "requested"]:
    """Cancel an instance once your transaction commits. Returns "cancelled", or "requested" if a step runs.

    `durable_actors.cancel` says what follows. With `children="cancel"` this call cancels the children, too, if it has
    committed (the connection is in autocommit mode, and no transaction is open). Otherwise an engine or a runner does,
    after your commit: an engine within about a second, without the long poll within `reap_interval`. It leaves a
    receipt, in your transaction or savepoint. Until your transaction ends, the instance's row is locked. Raises
    `NoTarget` if the instance does not exist, and `Conflict` if it has ended. These errors do not abort your
    transaction.
    """
    conn = await aio_connection(conn)
    flag("force", force)
    choice("children", children, "leave", "cancel")
    dialogue = cancelling(
        check_schema_name(schema), target, plan_command(**said), force=force, children=children == "cancel"
    )
    done = await run_dialogue_async(conn, dialogue, schema=schema)
    if done.cascades and committed(conn):
        with suppress(DurableError, psycopg.Error):  # the command is committed; what is left here, engines do
            await run_dialogue_async(conn, cascading(schema, rounds=COURTESY), schema=schema)
    return cast("Literal['cancelled', 'requested']", done.result)


async def run_now(
    conn: AioConnection,
    target: int | str | bytes,
    *,
    schema: str = "durable",
    **said: Unpack[Said],
) -> Literal["hastened", "paused", "due", "held", "waiting"]:
    """Let a delayed instance run once your transaction commits; `durable_actors.run_now` says what it returns."""
    conn = await aio_connection(conn)
    dialogue = carrying_out(RUN_NOW, check_schema_name(schema), target, plan_command(**said))
    done = await run_dialogue_async(conn, dialogue, schema=schema)
    return cast("Literal['hastened', 'paused', 'due', 'held', 'waiting']", done.result)


async def rerun(
    conn: AioConnection,
    target: int | str | bytes,
    *,
    step: str | StepRef[Any] | TaskRef[Any] | None = None,
    state: object = KEEP,
    at_rev: int | None = None,
    schema: str = "durable",
    **said: Unpack[Said],
) -> int:
    """Start a new instance from an old one once your transaction commits; see `durable_actors.rerun`."""
    conn = await aio_connection(conn)
    start = Start(step=step, state=state, at_rev=at_rev)
    dialogue = rerunning(check_schema_name(schema), target, plan_command(**said), start)
    return (await run_dialogue_async(conn, dialogue, schema=schema)).id


async def pause(
    conn: AioConnection,
    target: int | str | bytes,
    *,
    schema: str = "durable",
    **said: Unpack[Said],
) -> Literal["paused", "requested"]:
    """Pause an instance once your transaction commits. Returns "paused", or "requested" if a step runs.

    `durable_actors.pause` says what follows. It leaves a receipt, in your transaction or savepoint. Until your
    transaction ends, the instance's row is locked. Raises `NoTarget` if the instance does not exist, and `Conflict` if
    it has ended, is paused, or is to be cancelled. These errors do not abort your transaction.
    """
    conn = await aio_connection(conn)
    dialogue = pausing(check_schema_name(schema), target, plan_command(**said))
    done = await run_dialogue_async(conn, dialogue, schema=schema)
    return cast("Literal['paused', 'requested']", done.result)


async def resume(
    conn: AioConnection,
    target: int | str | bytes,
    *,
    schema: str = "durable",
    **said: Unpack[Said],
) -> int:
    """End the pause of an instance once your transaction commits; return its id. It leaves a receipt.

    Raises `NoTarget` if the instance does not exist, and `Conflict` if it is not paused. These errors do not abort your
    transaction.
    """
    conn = await aio_connection(conn)
    dialogue = carrying_out(RESUME, check_schema_name(schema), target, plan_command(**said))
    return (await run_dialogue_async(conn, dialogue, schema=schema)).id


async def pause_queue(
    conn: AioConnection,
    queue: str,
    machine: MachineRef | str | None = None,
    until: Until | None = None,
    *,
    schema: str = "durable",
    **said: Unpack[Said],
) -> QueuePause:
    """Let nothing pick from a queue, or one machine in it, once your transaction commits; return the pause.

    `durable_actors.pause_queue` says what follows. It leaves a receipt, in your transaction or savepoint. Raises
    `Conflict` if `until` has passed. That error does not abort your transaction.
    """
    conn = await aio_connection(conn)
    plan = plan_queue(queue, machine, until)
    dialogue = pausing_queue(check_schema_name(schema), plan, plan_command(**said))
    return (await run_dialogue_async(conn, dialogue, schema=schema)).pause


async def resume_queue(
    conn: AioConnection,
    queue: str,
    machine: MachineRef | str | None = None,
    *,
    schema: str = "durable",
    **said: Unpack[Said],
) -> QueuePause:
    """End the pause of a queue, or of one machine in it, once your transaction commits; return the pause as it was.

    Nodes notice within about a second. It leaves a receipt. Raises `Conflict` if it is not paused. That error does not
    abort your transaction.
    """
    conn = await aio_connection(conn)
    dialogue = resuming_queue(check_schema_name(schema), plan_queue(queue, machine), plan_command(**said))
    return (await run_dialogue_async(conn, dialogue, schema=schema)).pause


async def proceed(
    conn: AioConnection,
    target: int | str | bytes,
    *,
    schema: str = "durable",
    **said: Unpack[DecisionSaid],
) -> int:
    """Let an instance proceed that waits at a `Pause`, once your transaction commits; return its id.

    See `durable_actors.proceed`. It leaves a receipt, in your transaction or savepoint. Until your transaction ends,
    the instance's row is locked. Raises `NoTarget` if the instance does not exist, and `Conflict` if it does not wait
    at a pause. These errors do not abort your transaction.
    """
    conn = await aio_connection(conn)
    dialogue = deciding(check_schema_name(schema), target, plan_decision("proceed", **said))
    return (await run_dialogue_async(conn, dialogue, schema=schema)).id


async def approve(
    conn: AioConnection,
    target: int | str | bytes,
    *,
    schema: str = "durable",
    **said: Unpack[DecisionSaid],
) -> int:
    """Approve what an instance asks with `Approval`, once your transaction commits; return its id.

    See `durable_actors.approve`. It leaves a receipt, in your transaction or savepoint. Until your transaction ends,
    the instance's row is locked. Raises `NoTarget` if the instance does not exist, and `Conflict` if it does not wait
    for an approval, or another decision was first. These errors do not abort your transaction.
    """
    conn = await aio_connection(conn)
    dialogue = deciding(check_schema_name(schema), target, plan_decision("approve", **said))
    return (await run_dialogue_async(conn, dialogue, schema=schema)).id


async def reject(
    conn: AioConnection,
    target: int | str | bytes,
    *,
    schema: str = "durable",
    **said: Unpack[DecisionSaid],
) -> int:
    """Reject what an instance asks with `Approval`, once your transaction commits; return its id.

    See `durable_actors.reject`. It leaves a receipt, in your transaction or savepoint. Until your transaction ends,
    the instance's row is locked. Raises `NoTarget` if the instance does not exist, and `Conflict` if it does not wait
    for an approval, or another decision was first. These errors do not abort your transaction.
    """
    conn = await aio_connection(conn)
    dialogue = deciding(check_schema_name(schema), target, plan_decision("reject", **said))
    return (await run_dialogue_async(conn, dialogue, schema=schema)).id


async def result(
    conn: AioConnection,
    target: int | str | bytes,
    *,
    timeout: Duration | None = None,
    type: Any = Any,
    schema: str = "durable",
) -> Any:
    """Wait until an instance (by id or unique key) has ended, and return its result, decoded to `type` if given.

    It polls: first after 50 ms, later every second. Raises `InstanceFailed` if the instance failed, `NoTarget` if it
    does not exist, and `TimeoutError` after `timeout` seconds. Commit first: an instance that you inserted in a
    transaction that is still open cannot run.
    """
    check_schema_name(schema)
    conn = await aio_connection(conn)
    polls = ResultPolling(timeout)
    async with polling_async(conn) as looked:
        number = await run_dialogue_async(conn, resolving(schema, target), schema=schema)
        while True:
            final = await run_dialogue_async(conn, ending(schema, number), schema=schema)
            await looked()
            if final is not None:
                return value_of(final, type)
            await asyncio.sleep(polls.pause(number))
