"""What callers do: insert, wait for results, look. Works in a process that runs no engine.

Each call uses the client (or engine) of the current step, else the only open one of the process, else the one named
"default"; `engine=` names another.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator, Iterable
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from typing import Any, Literal, TypeVar, Unpack, overload

from durable_actors._client import Client, SignalOptions, SignalOutcome, TrioConn
from durable_actors._option_checks import Duration, count, shown
from durable_actors._postgres.pool.lane import Lane
from durable_actors._postgres.pool.lock_retry import CLIENT_SETTINGS, MAX_WAITING_CALLS
from durable_actors._postgres.pool.pool import open_pool
from durable_actors._postgres.starting import when_ready
from durable_actors._postgres.target import open_target
from durable_actors._store.migrate import require_schema
from durable_actors._store.observe import Filter
from durable_actors._store.read import Instance
from durable_actors._trio_run import require_trio
from durable_actors.config import Config
from durable_actors.errors import ConfigError, DurableError
from durable_actors.machine import InsertOptions, MachineRef, OnDuplicate, RowOptions

T = TypeVar("T")

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
    client.home.adopt()


def find_client(engine: object = None) -> Client:
    """Return the client that a helper means. `engine` is a name, a client, or an engine.

    Those of this Trio run come before those of another run of the process.
    """
    require_trio()
    if isinstance(engine, Client):
        return engine
    inner = getattr(engine, "client", None)
    if isinstance(inner, Client):
        return inner
    if engine is not None:
        found = _open.get(engine) if isinstance(engine, str) else None
        if found is None:
            raise DurableError(
                f"no engine or client is named {shown(engine)} in this process; open are {_names()}"
            )
        return found
    current = _current.get()
    if current is not None and _open.get(current.name) is current:
        return current
    near = {name: client for name, client in _open.items() if client.home.is_here()} or _open
    if len(near) == 1:
        return next(iter(near.values()))
    if "default" in near:
        return near["default"]
    if near:
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
    dsn: str | None = None,
    *,
    schema: str = "durable",
    name: str = "default",
    pool_size: int = 4,
    start_timeout: Duration = 30,
) -> AsyncGenerator[Client, None]:
    """Open a client: insert, signal and wait, without running any step here.

    The schema must exist (an engine or `durable-actors migrate` makes it). Waits up to `start_timeout` seconds for a
    Postgres that is starting, recovering or locked for a moment; then `StoreUnavailable`.
    """
    require_trio("open_client")
    count("pool_size", pool_size, least=1, most=1000)
    config = Config(dsn=dsn, schema=schema, name=name, start_timeout=start_timeout)
    async with open_target(config.dsn) as target:
        lane = Lane("client", pool_size, settings=CLIENT_SETTINGS, max_waiting=MAX_WAITING_CALLS)
        async with open_pool(target.dsn, lanes=[lane]) as pool:

            async def check() -> None:
                async with pool.acquire("client") as conn:
                    await require_schema(conn, schema=config.schema)

            await when_ready(check, [target.dsn], start_timeout=config.start_timeout)
            client = Client(config.name, pool, "client", config.schema)
            with opened(client):
                yield client


# -- helpers


@overload
async def insert(
    machine: MachineRef,
    *,
    engine: object = None,
    conn: TrioConn | None = None,
    on_duplicate: Literal["raise", "return"] = "raise",
    **options: Unpack[RowOptions],
) -> int: ...
@overload
async def insert(
    machine: MachineRef,
    *,
    engine: object = None,
    conn: TrioConn | None = None,
    on_duplicate: OnDuplicate = "raise",
    **options: Unpack[RowOptions],
) -> int | None: ...
async def insert(
    machine: MachineRef,
    *,
    engine: object = None,
    conn: TrioConn | None = None,
    **options: Unpack[InsertOptions],
) -> int | None:
    """Insert an instance of a machine or job; return its id. Raises `Duplicate` when its unique key is occupied.

    With `on_duplicate="return"` the id of the instance that occupies the key is returned instead, with `"skip"` None.
    With `conn` (a Trio connection) the row joins the caller's transaction.

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
    """Insert many instances in one statement; ids in input order, None where a unique key is occupied.

    `rows` are options, one dict each: `insert_many(send_email, [dict(args=a), dict(args=b, priority=5)])`. A row with
    `on_duplicate="return"` gives the existing id; one with `"raise"` raises `Duplicate` when all others are inserted.
    """
    return await find_client(engine).insert_many(machine, rows, conn=conn)


@overload
async def result(
    target: int | str | bytes, *, timeout: Duration | None = None, engine: object = None
) -> Any: ...
@overload
async def result(
    target: int | str | bytes,
    *,
    timeout: Duration | None = None,
    type: type[T],
    engine: object = None,
) -> T: ...
async def result(
    target: int | str | bytes,
    *,
    timeout: Duration | None = None,
    type: Any = Any,
    engine: object = None,
) -> Any:
    """Wait until an instance (by id or unique key) has ended; return its result, decoded to `type` if given.

    Raises `InstanceFailed` when it failed, `NoTarget` when there is none, `trio.TooSlowError` after `timeout` seconds.
    """
    return await find_client(engine).result(target, timeout=timeout, type=type)


async def signal(
    target: int | str | bytes,
    name: str,
    payload: object = None,
    *,
    dedup_key: str | None = None,
    engine: object = None,
    conn: TrioConn | None = None,
) -> None:
    """Send a durable message to an instance, by id or unique key; it wakes if it awaits that name.

    `dedup_key` makes redelivery harmless, also after the first one was consumed. Raises `NoTarget` when the instance
    has ended or does not exist; nothing is written then. With `conn` it joins the caller's transaction.
    """
    await find_client(engine).signal(target, name, payload, dedup_key=dedup_key, conn=conn)


async def signal_many(
    signals: Iterable[SignalOptions], *, engine: object = None, conn: TrioConn | None = None
) -> list[SignalOutcome]:
    """Send many signals in one statement: dicts with target, name, and payload and dedup_key as needed.

    Returns "sent", "duplicate" or "no_target" for each, in input order; a missing target is no error here.
    """
    return await find_client(engine).signal_many(signals, conn=conn)


async def signal_with_start(
    machine: MachineRef,
    *,
    key: str | bytes,
    name: str,
    payload: object = None,
    dedup_key: str | None = None,
    engine: object = None,
    **options: Unpack[RowOptions],
) -> int:
    """Deliver a signal to the live instance of a unique key, or start one with the signal in its inbox; atomically.

    Returns the instance's id. The options are those of `insert`, and matter only when it is started.
    """
    return await find_client(engine).signal_with_start(
        machine, key=key, name=name, payload=payload, dedup_key=dedup_key, **options
    )


async def retry(target: int | str | bytes, *, engine: object = None) -> int:
    """Let a failed instance (by id or unique key) run again in the step where it failed; return its id.

    Attempts count from 0. Raises `NoTarget` when there is none, `Conflict` when it is not failed, `Duplicate` when
    another instance occupies its unique key by now. Nothing is written then.
    """
    return await find_client(engine).retry(target)


async def list_instances(
    where: Filter | None = None,
    *,
    limit: int = 100,
    after: int | None = None,
    full: bool = False,
    engine: object = None,
) -> list[Instance]:
    """List instances, newest first: `list_instances(Filter(status="failed", machine=Checkout))`.

    Without `full` they come without state, result and errors. A list that is shorter than `limit` (at most 10,000) has
    all there are; with `after`, an id, it goes on below that one. Filters by unique key, parent
    or tag have an index; others read rows, newest first, until `limit` of them pass.
    """
    return await find_client(engine).list_instances(where, limit=limit, after=after, full=full)


async def inspect(target: int | str | bytes, *, engine: object = None) -> Instance:
    """Read an instance by id, or by unique key (who occupies it, else who had it last). Raises `NoTarget`."""
    return await find_client(engine).inspect(target)
