"""What callers do: insert, wait for results, look. Works in a process that runs no engine.

Each call uses the client (or engine) of the current step, else the only open one of the process, else the one named
"default"; `engine=` names another.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Generator, Iterable
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from typing import Any, Final, TypeVar, Unpack, overload

import psycopg
import trio
from psycopg.rows import tuple_row

from durable_actors._postgres.lane import Lane
from durable_actors._postgres.pool import Pool, open_pool
from durable_actors._postgres.target import open_target
from durable_actors._results import ResultWatch
from durable_actors._store.foreign import foreign_rows, insert_call
from durable_actors._store.insert import MAX_ROWS, insert_instances, read_inserted
from durable_actors._store.migrate import require_schema
from durable_actors._store.read import Instance, find_by_key, read_by_ids
from durable_actors.config import Config
from durable_actors.errors import ConfigError, DurableError, InstanceFailed, NoTarget
from durable_actors.machine import (
    InsertOptions,
    InsertPlan,
    MachineRef,
    current_registry,
    decode_json,
    plan_insert,
)

T = TypeVar("T")

TrioConn = psycopg.AsyncConnection[Any]
"""A `TrioConnection`, or what behaves like one."""


class Client:
    """Calls on one schema of one database. `open_client` makes one; every engine has one."""

    def __init__(self, name: str, pool: Pool, lane: str, schema: str) -> None:
        self.name = name
        """What `engine=` calls it."""
        self._pool = pool
        self._lane = lane
        self._schema = schema
        self.results: Final = ResultWatch(pool, lane, schema)
        """Who waits for results here."""
        self.poke: Callable[[InsertPlan, int], None] = lambda _plan, _number: None
        """Called after a new instance was committed; an engine of this process starts it at once."""

    async def insert(
        self, machine: MachineRef, *, conn: TrioConn | None = None, **options: Unpack[InsertOptions]
    ) -> int | None:
        """Insert one instance; see `durable_actors.insert`."""
        return (await self.insert_many(machine, [options], conn=conn))[0]

    async def insert_many(
        self, machine: MachineRef, rows: Iterable[InsertOptions], *, conn: TrioConn | None = None
    ) -> list[int | None]:
        """Insert many instances in one statement; see `durable_actors.insert_many`."""
        spec = current_registry().find(machine)
        plans = [plan_insert(spec, options) for options in rows]
        if len(plans) > MAX_ROWS:
            raise ConfigError(
                f"insert_many takes up to {MAX_ROWS} rows at a time, not {len(plans)}", option="rows"
            )
        if conn is not None:
            ids = await insert_on(conn, plans, schema=self._schema)
        else:
            async with self._pool.acquire(self._lane) as own:
                ids = await insert_instances(own, self._schema, plans)
        for plan, number in zip(plans, ids, strict=True):
            if number is not None and not plan.delay and plan.eligible_at is None:
                self.poke(plan, number)
        return ids

    async def result(
        self, target: int | str | bytes, *, timeout: float | None = None, type: Any = Any
    ) -> Any:
        """Wait until an instance has ended; see `durable_actors.result`."""
        with trio.fail_after(float("inf") if timeout is None else timeout):
            number = await self._resolve(target)
            final = await self.results.wait(number)
        if final.status == "failed":
            raise InstanceFailed(number, final.last_error or "no reason was stored")
        return (
            None
            if final.result is None
            else decode_json(final.result, what=f"result of instance {number}", type=type)
        )

    async def inspect(self, target: int | str | bytes) -> Instance:
        """Read an instance; see `durable_actors.inspect`."""
        number = await self._resolve(target)
        async with self._pool.acquire(self._lane) as conn:
            found = (await read_by_ids(conn, self._schema, [number])).get(number)
        if found is None:
            raise NoTarget(f"there is no instance {number}")
        return found

    async def _resolve(self, target: int | str | bytes) -> int:
        if isinstance(target, int):
            return target
        key = target.encode() if isinstance(target, str) else target
        async with self._pool.acquire(self._lane) as conn:
            number = await find_by_key(conn, self._schema, key)
        if number is None:
            raise NoTarget(f"no instance has or had the unique key {target!r}")
        return number


async def insert_on(conn: TrioConn, plans: list[InsertPlan], *, schema: str) -> list[int | None]:
    """Insert in the caller's transaction, on the caller's connection."""
    sql, params = insert_call(plans, schema)
    async with psycopg.AsyncRawCursor(conn, row_factory=tuple_row) as cursor:
        await cursor.execute(sql, params)
        return read_inserted(plans, foreign_rows(await cursor.fetchall()))


# -- which client a call means

_open: dict[str, Client] = {}
_current: ContextVar[Client | None] = ContextVar("durable_actors_client", default=None)


@contextmanager
def opened(client: Client) -> Generator[None, None, None]:
    """Let helpers find this client while the block runs."""
    if client.name in _open:
        raise ConfigError(
            f"name={client.name!r}: an engine or client of that name is open in this process already",
            option="name",
            value=client.name,
        )
    _open[client.name] = client
    try:
        yield
    finally:
        del _open[client.name]


def use(client: Client) -> None:
    """Let helpers in this task, and in tasks started from it, mean this client."""
    _current.set(client)


def find_client(engine: object = None) -> Client:
    """Return the client that a helper means. `engine` is a name, a client, or an engine."""
    if isinstance(engine, Client):
        return engine
    inner = getattr(engine, "client", None)
    if isinstance(inner, Client):
        return inner
    if engine is not None:
        found = _open.get(engine) if isinstance(engine, str) else None
        if found is None:
            raise DurableError(
                f"no engine or client is named {engine!r} in this process; open are {_names()}"
            )
        return found
    current = _current.get()
    if current is not None and _open.get(current.name) is current:
        return current
    if len(_open) == 1:
        return next(iter(_open.values()))
    if "default" in _open:
        return _open["default"]
    if _open:
        raise DurableError(
            f"several engines are open ({_names()}) and none is named 'default': say which, engine=..."
        )
    raise DurableError(
        "no engine or client is open in this process: use open_engine, start_engine or open_client"
    )


def _names() -> str:
    return ", ".join(sorted(_open)) or "none"


@asynccontextmanager
async def open_client(
    dsn: str | None = None, *, schema: str = "durable", name: str = "default", pool_size: int = 4
) -> AsyncGenerator[Client, None]:
    """Open a client: insert, signal and wait, without running any step here.

    The schema must exist (an engine or `durable-actors migrate` makes it).
    """
    config = Config(dsn=dsn, schema=schema, name=name, pool_size=max(pool_size, 3))
    async with open_target(config.dsn) as target:
        lane = Lane("client", pool_size, settings={"jit": "off"})
        async with open_pool(target.dsn, lanes=[lane]) as pool:
            async with pool.acquire("client") as conn:
                await require_schema(conn, schema=config.schema)
            client = Client(config.name, pool, "client", config.schema)
            with opened(client):
                yield client


# -- helpers


async def insert(
    machine: MachineRef,
    *,
    engine: object = None,
    conn: TrioConn | None = None,
    **options: Unpack[InsertOptions],
) -> int | None:
    """Insert an instance of a machine or job; return its id, or None when its unique key is occupied.

    With `on_duplicate="raise"` an occupied key raises `Duplicate`, with `"return"` the existing id is returned. With
    `conn` (a Trio connection) the row joins the caller's transaction.

    Cancelled or `CommitUnknown`: it may have been inserted; a `unique_key` makes repeating harmless.
    """
    return await find_client(engine).insert(machine, conn=conn, **options)


async def insert_many(
    machine: MachineRef,
    rows: Iterable[InsertOptions],
    *,
    engine: object = None,
    conn: TrioConn | None = None,
) -> list[int | None]:
    """Insert many instances in one statement; ids in input order, None where deduplicated.

    `rows` are options, one dict each: `insert_many(send_email, [dict(args=a), dict(args=b, priority=5)])`.
    """
    return await find_client(engine).insert_many(machine, rows, conn=conn)


@overload
async def result(
    target: int | str | bytes, *, timeout: float | None = None, engine: object = None
) -> Any: ...
@overload
async def result(
    target: int | str | bytes,
    *,
    timeout: float | None = None,
    type: type[T],
    engine: object = None,
) -> T: ...
async def result(
    target: int | str | bytes,
    *,
    timeout: float | None = None,
    type: Any = Any,
    engine: object = None,
) -> Any:
    """Wait until an instance (by id or unique key) has ended; return its result, decoded to `type` if given.

    Raises `InstanceFailed` when it failed, `NoTarget` when there is none, `trio.TooSlowError` after `timeout` seconds.
    """
    return await find_client(engine).result(target, timeout=timeout, type=type)


async def inspect(target: int | str | bytes, *, engine: object = None) -> Instance:
    """Read an instance by id, or by unique key (who occupies it, else who had it last). Raises `NoTarget`."""
    return await find_client(engine).inspect(target)
