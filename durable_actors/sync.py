"""Insert in your own transaction on a plain `psycopg.Connection`: Django, Flask, scripts.

::

    with psycopg.connect(dsn) as conn:
        conn.execute("insert into orders ...")
        durable_actors.sync.insert(conn, Checkout, state=Order(42))

The instance exists when your transaction commits, and only then. Workers find it at their next poll.

Inside a `def` step, give the step's context instead of a connection: `insert`, `signal` and `start_child` then do what
`ctx.insert`, `ctx.signal` and `ctx.start_child` do, and return when it is done::

    @da.job
    def resize(args: Image, ctx: da.Context[Image]) -> None:
        da.sync.insert(ctx, thumbnail, args=args)
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import Any, Literal, TypeVar, Unpack, cast, overload

import psycopg
import trio
from psycopg.rows import tuple_row

from durable_actors._option_checks import check_schema_name
from durable_actors._store.connection_kinds import check_sync
from durable_actors._store.foreign import explained, foreign_call, foreign_rows, signal_call
from durable_actors._store.insert import Insertion, insert_call, plan_rows
from durable_actors._store.signal import plan_signal, read_sent
from durable_actors._trio_run import HomeRun
from durable_actors.errors import NoTarget
from durable_actors.machine import Context, InsertOptions, InsertPlan, MachineRef, OnDuplicate, RowOptions

__all__ = ["insert", "insert_many", "signal", "start_child"]

R = TypeVar("R")


def _from_step(ctx: Context[Any], call: Callable[[], Awaitable[R]]) -> R:
    """Run a call of a step's context, from the thread of that step."""
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
    """Insert an instance; return its id. Raises `Duplicate` when its unique key is occupied (see `on_duplicate`).

    The `Duplicate` is raised after the statement: your transaction goes on if you catch it.
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
    """Insert many instances in one statement; ids in input order, None where a unique key is occupied."""
    check_sync(conn)
    check_schema_name(schema)
    return _insert(conn, plan_rows(machine, rows), schema)


def _insert(conn: psycopg.Connection[Any], plans: list[InsertPlan], schema: str) -> list[int | None]:
    insertion = Insertion(plans)
    while insertion.pending:
        sql, params = foreign_call(*insert_call(insertion.pending, schema))
        with psycopg.RawCursor(conn, row_factory=tuple_row) as cursor:
            with explained(schema):
                cursor.execute(sql, params)
            insertion.answered(foreign_rows(cursor.fetchall()))
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
    """Send a signal to an instance, by id or unique key; it wakes when your transaction commits.

    Raises `NoTarget` when the instance has ended or does not exist. Its row stays locked until you commit.
    """
    if isinstance(conn, Context):
        address = cast("int | str", target)  # bytes are a unique key, too
        _from_step(conn, partial(conn.signal, address, name, payload, dedup_key=dedup_key))
        return
    check_sync(conn)
    check_schema_name(schema)
    sql, params = signal_call([plan_signal(target, name, payload, dedup_key)], schema)
    with psycopg.RawCursor(conn, row_factory=tuple_row) as cursor:
        with explained(schema):
            cursor.execute(sql, params)
        [sent] = read_sent(foreign_rows(cursor.fetchall()))
    if sent.outcome == "no_target":
        raise NoTarget(f"signal {name!r}: {target!r} does not exist or has ended")


def start_child(ctx: Context[Any], machine: MachineRef, *, key: str, **options: Unpack[RowOptions]) -> int:
    """Start a child from a `def` step, or find the one that an earlier run started; see `Context.start_child`."""
    return _from_step(ctx, partial(ctx.start_child, machine, key=key, **options))
