"""Insert in your own transaction on a plain `psycopg.Connection`: Django, Flask, scripts.

::

    with psycopg.connect(dsn) as conn:
        conn.execute("insert into orders ...")
        durable_actors.sync.insert(conn, Checkout, state=Order(42))

The instance exists once your transaction commits. Workers find it at their next poll.

Inside a `def` step, pass the step's context instead of a connection: `insert`, `signal` and `start_child` then do what
`ctx.insert`, `ctx.signal` and `ctx.start_child` do, and block until it is done::

    @da.job
    def resize(args: Image, ctx: da.Context[Image]) -> None:
        da.sync.insert(ctx, thumbnail, args=args)
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any, Literal, TypeVar, Unpack, cast, overload

import psycopg
import trio

from durable_actors._option_checks import Duration, check_schema_name, choice, flag
from durable_actors._store.boundaries import DecisionSaid, plan_decision
from durable_actors._store.cascade import COURTESY, cascading
from durable_actors._store.commands import Said, plan_command
from durable_actors._store.connection_kinds import SyncConnection, sync_connection
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
from durable_actors._store.foreign import committed, execute, polling, run_dialogue
from durable_actors._store.insert import Insertion, insert_call, plan_rows
from durable_actors._store.pauses import QueuePause
from durable_actors._store.pausing import RESUME, Until, pausing, pausing_queue, plan_queue, resuming_queue
from durable_actors._store.read import Instance
from durable_actors._store.rerun import rerunning
from durable_actors._store.rerun_tasks import Start
from durable_actors._store.signal import plan_signal, read_sent, signal_params
from durable_actors._store.sql import statement
from durable_actors._store.tree import Tree
from durable_actors._tracing import sending
from durable_actors._trio_run import HomeRun
from durable_actors.diagrams import Diagram
from durable_actors.errors import DurableError
from durable_actors.machine import (
    KEEP,
    Context,
    Defined,
    InsertOptions,
    InsertPlan,
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
    "start_child",
    "tree",
]

R = TypeVar("R")


def _from_step(ctx: Context[Any], call: Callable[[], Awaitable[R]]) -> R:
    """Run a call of a step's context in the engine's Trio run, from the thread of that step."""
    home: object = getattr(ctx.port, "home", None)
    return home.call_from_thread(call) if isinstance(home, HomeRun) else trio.from_thread.run(call)


@overload
def insert(
    conn: SyncConnection | Context[Any],
    machine: MachineRef,
    *,
    schema: str = "durable",
    on_duplicate: Literal["raise", "return"] = "raise",
    **options: Unpack[RowOptions],
) -> int: ...
@overload
def insert(
    conn: SyncConnection | Context[Any],
    machine: MachineRef,
    *,
    schema: str = "durable",
    on_duplicate: OnDuplicate = "raise",
    **options: Unpack[RowOptions],
) -> int | None: ...
def insert(
    conn: SyncConnection | Context[Any],
    machine: MachineRef,
    *,
    schema: str = "durable",
    **options: Unpack[InsertOptions],
) -> int | None:
    """Insert an instance and return its id. Raises `Duplicate` if its unique key is occupied (see `on_duplicate`).

    `Duplicate` does not abort your transaction: you can catch it and continue.
    """
    if isinstance(conn, Context):
        return _from_step(conn, partial(conn.insert, machine, **options))
    conn = sync_connection(conn)
    check_schema_name(schema)
    return _insert(conn, partial(plan_rows, machine, [options], on_duplicate="raise"), schema)[0]


def insert_many(
    conn: SyncConnection,
    machine: MachineRef,
    rows: InsertRows,
    *,
    schema: str = "durable",
) -> list[int | None]:
    """Insert many instances in one statement. Returns their ids in input order, None where a unique key is occupied."""
    conn = sync_connection(conn)
    check_schema_name(schema)
    return _insert(conn, partial(plan_rows, machine, rows), schema)


def _insert(
    conn: psycopg.Connection[Any], plan: Callable[[], list[InsertPlan]], schema: str
) -> list[int | None]:
    with sending() as span:
        insertion = Insertion(plan())
        while insertion.pending:
            insertion.answered(execute(conn, *insert_call(insertion.pending, schema), schema=schema))
        ids = insertion.ids()
        span.sent(ids)
    return ids


def signal(
    conn: SyncConnection | Context[Any],
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
    if isinstance(conn, Context):
        _from_step(conn, partial(conn.signal, target, name, payload, dedup_key=dedup_key))
        return
    conn = sync_connection(conn)
    check_schema_name(schema)
    params = signal_params([plan_signal(target, name, payload, dedup_key)])
    [sent] = read_sent(execute(conn, statement("send_signals", schema), params, schema=schema))
    if sent.outcome == "no_target":
        raise run_dialogue(conn, undelivered(schema, name, target), schema=schema)


def start_child(ctx: Context[Any], machine: MachineRef, *, key: str, **options: Unpack[RowOptions]) -> int:
    """Start a child from a `def` step, or find the one that an earlier run started. See `Context.start_child`."""
    return _from_step(ctx, partial(ctx.start_child, machine, key=key, **options))


def inspect(conn: SyncConnection, target: int | str | bytes, *, schema: str = "durable") -> Instance:
    """Read an instance by id, or by unique key (the current holder, or else the last one). Raises `NoTarget`."""
    conn = sync_connection(conn)
    return run_dialogue(conn, inspecting(check_schema_name(schema), target), schema=schema)


def explain(conn: SyncConnection, target: int | str | bytes, *, schema: str = "durable") -> Explanation:
    """Explain why an instance waits, runs or has ended; see `durable_actors.explain`. Raises `NoTarget`."""
    conn = sync_connection(conn)
    return run_dialogue(conn, explaining(check_schema_name(schema), target), schema=schema)


def tree(
    conn: SyncConnection,
    target: int | str | bytes,
    *,
    depth: int = 10,
    children: int = 100,
    limit: int = 1000,
    schema: str = "durable",
) -> Tree:
    """Return the family of an instance; see `durable_actors.tree`. Raises `NoTarget`."""
    conn = sync_connection(conn)
    reading = climbing(check_schema_name(schema), target, depth=depth, children=children, limit=limit)
    return run_dialogue(conn, reading, schema=schema)


def graph(
    conn: SyncConnection,
    target: int | str | bytes | Defined,
    *,
    barrier: int | None = None,
    steps: bool = False,
    limit: int = MOST_NODES,
    schema: str = "durable",
) -> Diagram:
    """Return the diagram of an instance or a machine; see `durable_actors.graph`. Raises `NoTarget`."""
    conn = sync_connection(conn)
    reading = drawing(check_schema_name(schema), target, barrier=barrier, steps=steps, limit=limit)
    return run_dialogue(conn, reading, schema=schema)


def retry(
    conn: SyncConnection,
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
    conn = sync_connection(conn)
    dialogue = carrying_out(RETRY, check_schema_name(schema), target, plan_command(**said))
    return run_dialogue(conn, dialogue, schema=schema).id


def cancel(
    conn: SyncConnection,
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
    conn = sync_connection(conn)
    flag("force", force)
    choice("children", children, "leave", "cancel")
    dialogue = cancelling(
        check_schema_name(schema), target, plan_command(**said), force=force, children=children == "cancel"
    )
    done = run_dialogue(conn, dialogue, schema=schema)
    if done.cascades and committed(conn):
        with suppress(DurableError, psycopg.Error):  # the command is committed; what is left here, engines do
            run_dialogue(conn, cascading(schema, rounds=COURTESY), schema=schema)
    return cast("Literal['cancelled', 'requested']", done.result)


def run_now(
    conn: SyncConnection,
    target: int | str | bytes,
    *,
    schema: str = "durable",
    **said: Unpack[Said],
) -> Literal["hastened", "paused", "due", "held", "waiting"]:
    """Let a delayed instance run once your transaction commits; `durable_actors.run_now` says what it returns."""
    conn = sync_connection(conn)
    dialogue = carrying_out(RUN_NOW, check_schema_name(schema), target, plan_command(**said))
    return cast(
        "Literal['hastened', 'paused', 'due', 'held', 'waiting']",
        run_dialogue(conn, dialogue, schema=schema).result,
    )


def rerun(
    conn: SyncConnection,
    target: int | str | bytes,
    *,
    step: str | StepRef[Any] | TaskRef[Any] | None = None,
    state: object = KEEP,
    at_rev: int | None = None,
    schema: str = "durable",
    **said: Unpack[Said],
) -> int:
    """Start a new instance from an old one once your transaction commits; see `durable_actors.rerun`."""
    conn = sync_connection(conn)
    start = Start(step=step, state=state, at_rev=at_rev)
    dialogue = rerunning(check_schema_name(schema), target, plan_command(**said), start)
    return run_dialogue(conn, dialogue, schema=schema).id


def pause(
    conn: SyncConnection,
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
    conn = sync_connection(conn)
    dialogue = pausing(check_schema_name(schema), target, plan_command(**said))
    done = run_dialogue(conn, dialogue, schema=schema)
    return cast("Literal['paused', 'requested']", done.result)


def resume(
    conn: SyncConnection,
    target: int | str | bytes,
    *,
    schema: str = "durable",
    **said: Unpack[Said],
) -> int:
    """End the pause of an instance once your transaction commits; return its id. It leaves a receipt.

    Raises `NoTarget` if the instance does not exist, and `Conflict` if it is not paused. These errors do not abort your
    transaction.
    """
    conn = sync_connection(conn)
    dialogue = carrying_out(RESUME, check_schema_name(schema), target, plan_command(**said))
    return run_dialogue(conn, dialogue, schema=schema).id


def pause_queue(
    conn: SyncConnection,
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
    conn = sync_connection(conn)
    plan = plan_queue(queue, machine, until)
    dialogue = pausing_queue(check_schema_name(schema), plan, plan_command(**said))
    return run_dialogue(conn, dialogue, schema=schema).pause


def resume_queue(
    conn: SyncConnection,
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
    conn = sync_connection(conn)
    dialogue = resuming_queue(check_schema_name(schema), plan_queue(queue, machine), plan_command(**said))
    return run_dialogue(conn, dialogue, schema=schema).pause


def proceed(
    conn: SyncConnection,
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
    conn = sync_connection(conn)
    dialogue = deciding(check_schema_name(schema), target, plan_decision("proceed", **said))
    return run_dialogue(conn, dialogue, schema=schema).id


def approve(
    conn: SyncConnection,
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
    conn = sync_connection(conn)
    dialogue = deciding(check_schema_name(schema), target, plan_decision("approve", **said))
    return run_dialogue(conn, dialogue, schema=schema).id


def reject(
    conn: SyncConnection,
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
    conn = sync_connection(conn)
    dialogue = deciding(check_schema_name(schema), target, plan_decision("reject", **said))
    return run_dialogue(conn, dialogue, schema=schema).id


def result(
    conn: SyncConnection,
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
    conn = sync_connection(conn)
    check_schema_name(schema)
    polls = ResultPolling(timeout)
    with polling(conn) as looked:
        number = run_dialogue(conn, resolving(schema, target), schema=schema)
        while True:
            final = run_dialogue(conn, ending(schema, number), schema=schema)
            looked()
            if final is not None:
                return value_of(final, type)
            time.sleep(polls.pause(number))
