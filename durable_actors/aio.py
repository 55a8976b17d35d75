"""Insert in your own transaction on an asyncio `psycopg.AsyncConnection`: FastAPI, Starlette, aiohttp.

::

    async with await psycopg.AsyncConnection.connect(dsn) as conn:
        await conn.execute("insert into orders ...")
        await durable_actors.aio.insert(conn, Checkout, state=Order(42))

The instance exists once your transaction commits. Workers find it at their next poll.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any, Literal, Unpack, overload

import psycopg

from durable_actors._client import insert_on, signal_on
from durable_actors._option_checks import Duration, check_schema_name
from durable_actors._store.connection_kinds import check_aio
from durable_actors._store.dialogues import ResultPolling, ending, inspecting, resolving, retrying, value_of
from durable_actors._store.foreign import polling_async, run_dialogue_async
from durable_actors._store.insert import plan_rows
from durable_actors._store.read import Instance
from durable_actors._store.signal import plan_signal
from durable_actors.errors import NoTarget
from durable_actors.machine import InsertOptions, MachineRef, OnDuplicate, RowOptions

__all__ = ["insert", "insert_many", "inspect", "result", "retry", "signal"]


@overload
async def insert(
    conn: psycopg.AsyncConnection[Any],
    machine: MachineRef,
    *,
    schema: str = "durable",
    on_duplicate: Literal["raise", "return"] = "raise",
    **options: Unpack[RowOptions],
) -> int: ...
@overload
async def insert(
    conn: psycopg.AsyncConnection[Any],
    machine: MachineRef,
    *,
    schema: str = "durable",
    on_duplicate: OnDuplicate = "raise",
    **options: Unpack[RowOptions],
) -> int | None: ...
async def insert(
    conn: psycopg.AsyncConnection[Any],
    machine: MachineRef,
    *,
    schema: str = "durable",
    **options: Unpack[InsertOptions],
) -> int | None:
    """Insert an instance and return its id. Raises `Duplicate` if its unique key is occupied (see `on_duplicate`).

    `Duplicate` does not abort your transaction: you can catch it and continue.
    """
    check_schema_name(schema)
    check_aio(conn)
    plans = plan_rows(machine, [options], on_duplicate="raise")
    return (await insert_on(conn, plans, schema=schema))[0]


async def insert_many(
    conn: psycopg.AsyncConnection[Any],
    machine: MachineRef,
    rows: Iterable[InsertOptions],
    *,
    schema: str = "durable",
) -> list[int | None]:
    """Insert many instances in one statement. Returns their ids in input order, None where a unique key is occupied."""
    check_schema_name(schema)
    check_aio(conn)
    plans = plan_rows(machine, rows)
    return await insert_on(conn, plans, schema=schema)


async def signal(
    conn: psycopg.AsyncConnection[Any],
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
    check_aio(conn)
    [sent] = await signal_on(conn, [plan_signal(target, name, payload, dedup_key)], schema=schema)
    if sent.outcome == "no_target":
        raise NoTarget(f"signal {name!r}: {target!r} does not exist or has ended")


async def inspect(
    conn: psycopg.AsyncConnection[Any], target: int | str | bytes, *, schema: str = "durable"
) -> Instance:
    """Read an instance by id, or by unique key (the current holder, or else the last one). Raises `NoTarget`."""
    check_aio(conn)
    return await run_dialogue_async(conn, inspecting(check_schema_name(schema), target), schema=schema)


async def retry(
    conn: psycopg.AsyncConnection[Any], target: int | str | bytes, *, schema: str = "durable"
) -> int:
    """Run a failed instance again once your transaction commits; return its id.

    Raises `NoTarget` if it does not exist, `Conflict` if it is not failed, and `Duplicate` if another instance now
    occupies its unique key. These errors do not abort your transaction.
    """
    check_aio(conn)
    return (await run_dialogue_async(conn, retrying(check_schema_name(schema), target), schema=schema)).id


async def result(
    conn: psycopg.AsyncConnection[Any],
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
    check_aio(conn)
    polls = ResultPolling(timeout)
    async with polling_async(conn) as looked:
        number = await run_dialogue_async(conn, resolving(schema, target), schema=schema)
        while True:
            final = await run_dialogue_async(conn, ending(schema, number), schema=schema)
            await looked()
            if final is not None:
                return value_of(final, type)
            await asyncio.sleep(polls.pause(number))
