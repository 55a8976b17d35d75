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
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import partial
from typing import Any, Literal, TypeVar, Unpack, cast, overload

import psycopg
import trio

from durable_actors._option_checks import Duration, check_schema_name, choice, flag
from durable_actors._store.boundaries import decision_params
from durable_actors._store.commands import Said, plan_command
from durable_actors._store.connection_kinds import check_sync
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
from durable_actors._store.explanation import Explanation
from durable_actors._store.foreign import execute, polling, run_dialogue
from durable_actors._store.insert import Insertion, insert_call, plan_rows
from durable_actors._store.pausing import RESUME, pausing
from durable_actors._store.read import Instance
from durable_actors._store.rerun import Start, rerunning
from durable_actors._store.signal import plan_signal, read_sent, signal_params
from durable_actors._store.sql import statement
from durable_actors._store.tree import Tree
from durable_actors._trio_run import HomeRun
from durable_actors.machine import (
    KEEP,
    Context,
    InsertOptions,
    InsertPlan,
    MachineRef,
    OnDuplicate,
    RowOptions,
    StepRef,
)

__all__ = [
    "approve",
    "cancel",
    "explain",
    "insert",
    "insert_many",
    "inspect",
    "pause",
    "proceed",
    "reject",
    "rerun",
    "result",
    "resume",
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
    conn: psycopg.Connection[Any] | Context[Any],
    machine: MachineRef,
    *,
    schema: str = "durable",
    on_duplicate: Literal["raise", "return"] = "raise",
    **options: Unpack[RowOptions],
) -> int: ...
@overload
def insert(
    conn: psycopg.Connection[Any] | Context[Any],
    machine: MachineRef,
    *,
    schema: str = "durable",
    on_duplicate: OnDuplicate = "raise",
    **options: Unpack[RowOptions],
) -> int | None: ...
def insert(
    conn: psycopg.Connection[Any] | Context[Any],
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
    check_sync(conn)
    check_schema_name(schema)
    return _insert(conn, plan_rows(machine, [options], on_duplicate="raise"), schema)[0]


def insert_many(
    conn: psycopg.Connection[Any],
    machine: MachineRef,
    rows: Iterable[InsertOptions],
    *,
    schema: str = "durable",
) -> list[int | None]:
    """Insert many instances in one statement. Returns their ids in input order, None where a unique key is occupied."""
    check_sync(conn)
    check_schema_name(schema)
    return _insert(conn, plan_rows(machine, rows), schema)


def _insert(conn: psycopg.Connection[Any], plans: list[InsertPlan], schema: str) -> list[int | None]:
    insertion = Insertion(plans)
    while insertion.pending:
        insertion.answered(execute(conn, *insert_call(insertion.pending, schema), schema=schema))
    return insertion.ids()


def signal(
    conn: psycopg.Connection[Any] | Context[Any],
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
        address = cast("int | str", target)  # bytes are a unique key, too
        _from_step(conn, partial(conn.signal, address, name, payload, dedup_key=dedup_key))
        return
    check_sync(conn)
    check_schema_name(schema)
    params = signal_params([plan_signal(target, name, payload, dedup_key)])
    [sent] = read_sent(execute(conn, statement("send_signals", schema), params, schema=schema))
    if sent.outcome == "no_target":
        raise run_dialogue(conn, undelivered(schema, name, target), schema=schema)


def start_child(ctx: Context[Any], machine: MachineRef, *, key: str, **options: Unpack[RowOptions]) -> int:
    """Start a child from a `def` step, or find the one that an earlier run started. See `Context.start_child`."""
    return _from_step(ctx, partial(ctx.start_child, machine, key=key, **options))


def inspect(conn: psycopg.Connection[Any], target: int | str | bytes, *, schema: str = "durable") -> Instance:
    """Read an instance by id, or by unique key (the current holder, or else the last one). Raises `NoTarget`."""
    check_sync(conn)
    return run_dialogue(conn, inspecting(check_schema_name(schema), target), schema=schema)


def explain(
    conn: psycopg.Connection[Any], target: int | str | bytes, *, schema: str = "durable"
) -> Explanation:
    """Explain why an instance waits, runs or has ended; see `durable_actors.explain`. Raises `NoTarget`."""
    check_sync(conn)
    return run_dialogue(conn, explaining(check_schema_name(schema), target), schema=schema)


def tree(
    conn: psycopg.Connection[Any],
    target: int | str | bytes,
    *,
    depth: int = 10,
    children: int = 100,
    limit: int = 1000,
    schema: str = "durable",
) -> Tree:
    """Return the family of an instance; see `durable_actors.tree`. Raises `NoTarget`."""
    check_sync(conn)
    reading = climbing(check_schema_name(schema), target, depth=depth, children=children, limit=limit)
    return run_dialogue(conn, reading, schema=schema)


def retry(
    conn: psycopg.Connection[Any],
    target: int | str | bytes,
    *,
    by: str | None = None,
    reason: str | None = None,
    idempotency_key: str | None = None,
    meta: Mapping[str, Any] | None = None,
    schema: str = "durable",
) -> int:
    """Run a failed or cancelled instance again once your transaction commits; return its id.

    It leaves a receipt, in your transaction or savepoint; `durable_actors.retry` says what the receipt tells, and what
    `idempotency_key` does. Raises `NoTarget` if the instance does not exist, `Conflict` if it has neither failed nor
    been cancelled, and `Duplicate` if another instance now occupies its unique key. These errors do not abort your
    transaction.
    """
    check_sync(conn)
    command = plan_command(by=by, reason=reason, idempotency_key=idempotency_key, meta=meta)
    dialogue = carrying_out(RETRY, check_schema_name(schema), target, command)
    return run_dialogue(conn, dialogue, schema=schema).id


def cancel(
    conn: psycopg.Connection[Any],
    target: int | str | bytes,
    *,
    children: Literal["leave", "cancel"] = "leave",
    force: bool = False,
    by: str | None = None,
    reason: str | None = None,
    idempotency_key: str | None = None,
    meta: Mapping[str, Any] | None = None,
    schema: str = "durable",
) -> Literal["cancelled", "requested"]:
    """Cancel an instance once your transaction commits. Returns "cancelled", or "requested" if a step runs.

    `durable_actors.cancel` says what follows. With `children="cancel"` an engine cancels the children, a second or two
    after your commit. It leaves a receipt, in your transaction or savepoint. Until your
    transaction ends, the instance's row is locked. Raises `NoTarget` if the instance does not exist, and `Conflict` if
    it has ended. These errors do not abort your transaction.
    """
    check_sync(conn)
    flag("force", force)
    choice("children", children, "leave", "cancel")
    command = plan_command(by=by, reason=reason, idempotency_key=idempotency_key, meta=meta)
    dialogue = cancelling(
        check_schema_name(schema), target, command, force=force, children=children == "cancel"
    )
    return cast("Literal['cancelled', 'requested']", run_dialogue(conn, dialogue, schema=schema).result)


def run_now(
    conn: psycopg.Connection[Any],
    target: int | str | bytes,
    *,
    schema: str = "durable",
    **said: Unpack[Said],
) -> Literal["hastened", "due", "held"]:
    """Let a delayed instance run once your transaction commits; `durable_actors.run_now` says what it returns."""
    check_sync(conn)
    dialogue = carrying_out(RUN_NOW, check_schema_name(schema), target, plan_command(**said))
    return cast("Literal['hastened', 'due', 'held']", run_dialogue(conn, dialogue, schema=schema).result)


def rerun(
    conn: psycopg.Connection[Any],
    target: int | str | bytes,
    *,
    step: str | StepRef[Any] | None = None,
    state: object = KEEP,
    at_rev: int | None = None,
    schema: str = "durable",
    **said: Unpack[Said],
) -> int:
    """Start a new instance from an old one once your transaction commits; see `durable_actors.rerun`."""
    check_sync(conn)
    start = Start(step=step, state=state, at_rev=at_rev)
    dialogue = rerunning(check_schema_name(schema), target, plan_command(**said), start)
    return run_dialogue(conn, dialogue, schema=schema).id


def pause(
    conn: psycopg.Connection[Any],
    target: int | str | bytes,
    *,
    by: str | None = None,
    reason: str | None = None,
    idempotency_key: str | None = None,
    meta: Mapping[str, Any] | None = None,
    schema: str = "durable",
) -> Literal["paused", "requested"]:
    """Pause an instance once your transaction commits. Returns "paused", or "requested" if a step runs.

    `durable_actors.pause` says what follows. It leaves a receipt, in your transaction or savepoint. Until your
    transaction ends, the instance's row is locked. Raises `NoTarget` if the instance does not exist, and `Conflict` if
    it has ended, is paused, or is to be cancelled. These errors do not abort your transaction.
    """
    check_sync(conn)
    command = plan_command(by=by, reason=reason, idempotency_key=idempotency_key, meta=meta)
    dialogue = pausing(check_schema_name(schema), target, command)
    done = run_dialogue(conn, dialogue, schema=schema)
    return cast("Literal['paused', 'requested']", done.result)


def resume(
    conn: psycopg.Connection[Any],
    target: int | str | bytes,
    *,
    by: str | None = None,
    reason: str | None = None,
    idempotency_key: str | None = None,
    meta: Mapping[str, Any] | None = None,
    schema: str = "durable",
) -> int:
    """End the pause of an instance once your transaction commits; return its id. It leaves a receipt.

    Raises `NoTarget` if the instance does not exist, and `Conflict` if it is not paused. These errors do not abort your
    transaction.
    """
    check_sync(conn)
    command = plan_command(by=by, reason=reason, idempotency_key=idempotency_key, meta=meta)
    dialogue = carrying_out(RESUME, check_schema_name(schema), target, command)
    return (run_dialogue(conn, dialogue, schema=schema)).id


def proceed(
    conn: psycopg.Connection[Any],
    target: int | str | bytes,
    *,
    comment: str | None = None,
    data: object = None,
    by: str | None = None,
    reason: str | None = None,
    idempotency_key: str | None = None,
    meta: Mapping[str, Any] | None = None,
    schema: str = "durable",
) -> int:
    """Let an instance proceed that waits at a `Pause`, once your transaction commits; return its id.

    See `durable_actors.proceed`. It leaves a receipt, in your transaction or savepoint. Until your transaction ends,
    the instance's row is locked. Raises `NoTarget` if the instance does not exist, and `Conflict` if it does not wait
    at a pause. These errors do not abort your transaction.
    """
    check_sync(conn)
    command = plan_command(by=by, reason=reason, idempotency_key=idempotency_key, meta=meta)
    params = decision_params("proceed", comment, data)
    dialogue = deciding("proceed", check_schema_name(schema), target, command, params)
    return run_dialogue(conn, dialogue, schema=schema).id


def approve(
    conn: psycopg.Connection[Any],
    target: int | str | bytes,
    *,
    comment: str | None = None,
    data: object = None,
    by: str | None = None,
    reason: str | None = None,
    idempotency_key: str | None = None,
    meta: Mapping[str, Any] | None = None,
    schema: str = "durable",
) -> int:
    """Approve what an instance asks with `Approval`, once your transaction commits; return its id.

    See `durable_actors.approve`. It leaves a receipt, in your transaction or savepoint. Until your transaction ends,
    the instance's row is locked. Raises `NoTarget` if the instance does not exist, and `Conflict` if it does not wait
    for an approval, or another decision was first. These errors do not abort your transaction.
    """
    check_sync(conn)
    command = plan_command(by=by, reason=reason, idempotency_key=idempotency_key, meta=meta)
    params = decision_params("approve", comment, data)
    dialogue = deciding("approve", check_schema_name(schema), target, command, params)
    return run_dialogue(conn, dialogue, schema=schema).id


def reject(
    conn: psycopg.Connection[Any],
    target: int | str | bytes,
    *,
    comment: str | None = None,
    data: object = None,
    by: str | None = None,
    reason: str | None = None,
    idempotency_key: str | None = None,
    meta: Mapping[str, Any] | None = None,
    schema: str = "durable",
) -> int:
    """Reject what an instance asks with `Approval`, once your transaction commits; return its id.

    See `durable_actors.reject`. It leaves a receipt, in your transaction or savepoint. Until your transaction ends,
    the instance's row is locked. Raises `NoTarget` if the instance does not exist, and `Conflict` if it does not wait
    for an approval, or another decision was first. These errors do not abort your transaction.
    """
    check_sync(conn)
    command = plan_command(by=by, reason=reason, idempotency_key=idempotency_key, meta=meta)
    params = decision_params("reject", comment, data)
    dialogue = deciding("reject", check_schema_name(schema), target, command, params)
    return run_dialogue(conn, dialogue, schema=schema).id


def result(
    conn: psycopg.Connection[Any],
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
    check_sync(conn)
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
