"""The helpers `insert`, `signal`, `result`, …, and `open_client`. They work in a process without an engine.

Each call uses the engine of the current step, or the only open engine or client of the process, or the one named
"default". `engine=` selects another one.
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
    """Make this client available to the helpers while the block runs."""
    if client.name in _open:
        raise ConfigError(
            f"name={client.name!r}: an engine or client with this name is already open in this process",
            option="name",
            value=client.name,
        )
    _open[client.name] = client
    try:
        yield
    finally:
        del _open[client.name]


def use(client: Client) -> None:
    """Make this client the default in this task and in the tasks that it starts."""
    _current.set(client)
    client.home.adopt()


def find_client(engine: object = None) -> Client:
    """Return the client that a helper uses. `engine` is a name, a client or an engine.

    Clients of the current Trio run take precedence over those of other runs in the process.
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
                f"no engine or client named {shown(engine)} is open in this process; open are: {_names()}"
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
            f"several engines are open ({_names()}) and none is named 'default': choose one with engine=..."
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
    """Open a client, to insert instances, send signals and wait for results without running steps.

    The schema must exist; an engine or `durable-actors migrate` creates it. Waits up to `start_timeout` seconds while
    Postgres is starting, recovering or briefly locked, and then raises `StoreUnavailable`.
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
    """Insert an instance of a machine or job, and return its id.

    Raises `Duplicate` if its unique key is occupied; `on_duplicate="return"` returns the id of the instance that
    occupies the key instead, and `"skip"` returns None. With `conn` (a Trio connection) the insert is part of your
    transaction.

    If this raises Cancelled or `CommitUnknown`, the instance may or may not be inserted; with a `unique_key` it is safe
    to try again.
    """
    return await find_client(engine).insert(machine, conn=conn, **options)


async def insert_many(
    machine: MachineRef,
    rows: Iterable[InsertOptions],
    *,
    engine: object = None,
    conn: TrioConn | None = None,
) -> list[int | None]:
    """Insert many instances in one statement. Returns their ids in input order, None where a unique key is occupied.

    `rows` has one dict of options per instance: `insert_many(send_email, [dict(args=a), dict(args=b, priority=5)])`.
    For a row with `on_duplicate="return"` the existing id is returned; with `"raise"`, `Duplicate` is raised after all
    other rows are inserted.
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
    """Wait until an instance (by id or unique key) has ended, and return its result, decoded to `type` if given.

    Raises `InstanceFailed` if the instance failed, `NoTarget` if it does not exist, and `trio.TooSlowError` after
    `timeout` seconds. Waiting does not affect the instance: if this raises Cancelled, it continues.
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
    """Send a durable signal to an instance, by id or unique key. The instance wakes if it awaits this name.

    With a `dedup_key` it is safe to send the same signal again, even after the first one was consumed. Raises
    `NoTarget` if the instance has ended or does not exist; nothing is written then. With `conn` (a Trio connection) the
    signal is part of your transaction. If this raises Cancelled or `CommitUnknown`, it may or may not be sent.
    """
    await find_client(engine).signal(target, name, payload, dedup_key=dedup_key, conn=conn)


async def signal_many(
    signals: Iterable[SignalOptions], *, engine: object = None, conn: TrioConn | None = None
) -> list[SignalOutcome]:
    """Send many signals in one statement. Each is a dict with target, name, and optionally payload and dedup_key.

    Returns "sent", "duplicate" or "no_target" for each signal, in input order. A missing target is not an error.
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
    """Send a signal to the live instance with a unique key; start it with the signal in its inbox if there is none.

    Both happen in one transaction. Returns the id of the instance. The options are those of `insert` and are used only
    if an instance is started. Raises `NoTarget` if an ended instance occupies the key.
    """
    return await find_client(engine).signal_with_start(
        machine, key=key, name=name, payload=payload, dedup_key=dedup_key, **options
    )


async def retry(target: int | str | bytes, *, engine: object = None) -> int:
    """Run a failed instance (by id or unique key) again, from the step in which it failed; return its id.

    Attempts start again at 0. Raises `NoTarget` if it does not exist, `Conflict` if it is not failed, and `Duplicate`
    if another instance now occupies its unique key; nothing is written then.
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

    Without `full`, the instances have no state, result and errors. A list shorter than `limit` (at most 10,000) is
    complete; for the next page, pass the last id as `after`. Filters by unique key, parent and tag use an index;
    others read rows, newest first, until `limit` of them match.
    """
    return await find_client(engine).list_instances(where, limit=limit, after=after, full=full)


async def inspect(target: int | str | bytes, *, engine: object = None) -> Instance:
    """Read an instance by id, or by unique key (the current holder, or else the last one). Raises `NoTarget`."""
    return await find_client(engine).inspect(target)
