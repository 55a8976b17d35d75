"""The helpers `insert`, `signal`, `result`, …, and `open_client`. They work in a process without an engine.

Each call uses the engine of the current step, or the only open engine or client of the process, or the one named
"default". `engine=` selects another one.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator, Iterable
from contextlib import aclosing, asynccontextmanager, contextmanager
from typing import Any, Literal, TypeVar, Unpack, overload

from durable_actors._bulk_machine import BulkMachine
from durable_actors._client import Client, SignalOptions, SignalOutcome, current_client
from durable_actors._engine.executor import Executor
from durable_actors._engine.lanes import client_lanes
from durable_actors._engine.maintenance.notifier import open_notifier
from durable_actors._engine.wakeups import Wakeups
from durable_actors._history import TrioConn
from durable_actors._option_checks import Duration, count, shown
from durable_actors._postgres.pool.pool import open_pool
from durable_actors._postgres.starting import when_ready
from durable_actors._postgres.target import open_target
from durable_actors._store.commands import Receipt
from durable_actors._store.drawing import MOST_NODES
from durable_actors._store.explanation import Explanation
from durable_actors._store.migrate import require_schema
from durable_actors._store.observe import Filter
from durable_actors._store.read import Instance
from durable_actors._store.tree import Tree
from durable_actors._trio_run import require_trio
from durable_actors.config import Config, Notifier
from durable_actors.diagrams import Diagram
from durable_actors.errors import ConfigError, DurableError
from durable_actors.journal import Problem, Record, VerifyReport
from durable_actors.machine import (
    Defined,
    InsertOptions,
    InsertRows,
    MachineRef,
    OnDuplicate,
    RowOptions,
    add_builtin,
)

T = TypeVar("T")

_open: dict[str, Client] = {}

add_builtin(BulkMachine)


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
    current = current_client.get()
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
    session_dsn: str | None = None,
    start_timeout: Duration = 30,
    notifier: Notifier | None = None,
) -> AsyncGenerator[Client, None]:
    """Open a client, to insert instances, send signals and wait for results without an engine.

    The schema must exist; an engine or `durable-actors migrate` creates it. Waits up to `start_timeout` seconds while
    Postgres is starting, recovering or briefly locked, and then raises `StoreUnavailable`. `session_dsn` is for
    `execute_next`: a direct connection for the locks of partition keys, if `dsn` goes through a transaction pooler.
    `notifier` is that of `Config`: it is told of the work that this client's calls make.
    """
    require_trio("open_client")
    count("pool_size", pool_size, least=1, most=1000)
    config = Config(
        dsn=dsn, schema=schema, name=name, session_dsn=session_dsn, start_timeout=start_timeout, notifier=notifier
    )  # fmt: skip
    roles = client_lanes(pool_size, session_dsn=session_dsn, keepalive=config.lease_ttl)
    lanes = {lane.name: lane for lane in roles.values()}.values()
    async with open_target(config.dsn) as target, open_pool(target.dsn, lanes=lanes) as pool:

        async def check() -> None:
            async with pool.acquire("client") as conn:
                await require_schema(conn, schema=config.schema)

        await when_ready(check, [target.dsn], start_timeout=config.start_timeout)
        client = Client(config.name, pool, "client", config.schema, journal=config.journal)
        client.wakeups = wakeups = None if config.notifier is None else Wakeups(config.notifier)
        client.executor = Executor(
            config, pool, roles, telemetry=client.telemetry, on_final=client.results.hint, wakeups=wakeups
        )
        async with open_notifier(wakeups, pool=pool, lane="client", schema=config.schema):
            with opened(client):
                yield client


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
    rows: InsertRows,
    *,
    engine: object = None,
    conn: TrioConn | None = None,
) -> list[int | None]:
    """Insert many instances in one statement. Returns their ids in input order, None where a unique key is occupied.

    `rows` has one dict of options per instance: `insert_many(send_email, [dict(args=a), dict(args=b, priority=5)])`. A
    misspelt option is a `ConfigError`; type checkers find it in rows that are declared as `InsertOptions`.
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


async def history(
    target: int | str | bytes, *, after: int = 0, limit: int = 1000, engine: object = None
) -> list[Record]:
    """Return the records of an instance (by id or unique key) with greater revisions than `after`, oldest first.

    A list shorter than `limit` (at most 10,000) is complete; for the next page, pass the last `rev` as `after`. What is
    recorded depends on the level, `journal=`: without one, the list is empty. Raises `NoTarget` if there is neither an
    instance nor a record of it, and `InvalidJournalEntry` if a record is damaged or missing; if somebody has accepted
    the row since (`accept`), there is a record of kind "damaged" in its place, whose `error` says how.

    The history of an instance that lives for long may begin with a `snapshot` whose `data["retention"]` is true: then
    retention has deleted what lies before.
    """
    return await find_client(engine).history(target, after=after, limit=limit)


async def iter_history(target: int | str | bytes, *, engine: object = None) -> AsyncGenerator[Record, None]:
    """Iterate over all records of an instance, oldest first, a page at a time. Raises as `history`.

    `async with contextlib.aclosing(iter_history(42)) as records: async for record in records: ...`
    """
    async with aclosing(find_client(engine).iter_history(target)) as records:
        async for record in records:
            yield record


async def state_at(target: int | str | bytes, rev: int, *, engine: object = None) -> Any:
    """Return the state of an instance at a revision, as JSON values.

    Raises `Conflict` if the revision has no record, or not at level "full"; otherwise as `history`.
    """
    return await find_client(engine).state_at(target, rev)


async def diff(
    target: int | str | bytes, rev_a: int, rev_b: int, *, engine: object = None
) -> dict[str, tuple[Any, Any]]:
    """Return what changed in a row between two revisions: column → (value at `rev_a`, value at `rev_b`).

    Raises `Conflict` if one of them has no record, or not at level "full"; otherwise as `history`.
    """
    return await find_client(engine).diff(target, rev_a, rev_b)


async def verify(
    target: int | str | bytes | None = None,
    *,
    machine: MachineRef | str | None = None,
    sample: float | None = None,
    engine: object = None,
) -> VerifyReport:
    """Compare rows with their journals: of one instance, of one machine, or all that are recorded.

    `sample=0.01` checks a random hundredth of them. Each `Problem` names the instance, the reason, the revision and the
    details. Reads in batches: memory does not grow with the number of instances, and moves that are committed meanwhile
    disturb nothing. Records without a row are looked for unless `machine` or `sample` is given.
    """
    return await find_client(engine).verify(target, machine=machine, sample=sample)


async def anomalies(
    target: int | str | bytes | None = None,
    *,
    machine: MachineRef | str | None = None,
    engine: object = None,
) -> list[Problem]:
    """Return the records that do not fit the records before them: of one instance, of one machine, or of all.

    These are the problems of `verify` with the reason "anomaly"; `Problem.anomaly` has the details.
    """
    return await find_client(engine).anomalies(target, machine=machine)


async def export_history(target: int | str | bytes, *, engine: object = None) -> AsyncGenerator[str, None]:
    """Iterate over the records of an instance as lines of JSON, without line ends. Raises as `history`."""
    async with aclosing(find_client(engine).export_history(target)) as lines:
        async for line in lines:
            yield line


async def import_history(lines: Iterable[str | bytes], *, engine: object = None) -> int:
    """Write the records of an instance that `export_history` returned; return its id. `rebuild` then writes the row.

    All or nothing. Raises `Conflict` if the database has a row or a record of this id, `InvalidJournalEntry` if a
    record is damaged or missing, and `ConfigError` for a line that is not a record. Ids that are given out from then on
    are greater. Import while nobody inserts.
    """
    return await find_client(engine).import_history(lines)


async def receipts(
    target: int | str | bytes | None = None,
    *,
    command: str | None = None,
    after: int = 0,
    limit: int = 100,
    engine: object = None,
) -> list[Receipt]:
    """List the commands that were carried out, newest first: on one instance (by id or unique key), or on all.

    `command="retry"` lists only this command. A list shorter than `limit` (at most 10,000) is complete; for the next
    page, pass the last id as `after`. Raises `NoTarget` if no instance has or had the unique key.
    """
    return await find_client(engine).receipts(target, command=command, after=after, limit=limit)


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


async def execute_next(
    queue: str = "default",
    *,
    lease_ttl: Duration | None = None,
    node: str | None = None,
    engine: object = None,
) -> Instance | None:
    """Execute the step of one due instance of a queue inside this call; return the instance after its commit.

    For workers of your own, without an engine: call it in a loop, and wait a little when it returns None, which means
    that nothing is due. It reaps a few expired claims, wakes instances whose deadline has passed, claims the most
    urgent row whose machine and step this process knows, runs the step and commits its outcome. Meanwhile it renews the
    claim every few seconds, so a step may take longer than `lease_ttl` (default: 60 seconds). It runs one step: the
    next one of the instance is another call's. `node` names the owner of the claim (default: the host).

    Raises `LeaseLost` if the claim was lost while the step ran; the step was cancelled, and nothing was committed. A
    step that raises ends as in an engine: `handle` decides, and the call returns the instance. Cancelled: the step was
    cancelled and its row released, or the commit that was under way was completed. A `def` step runs in a thread, which
    cannot be cancelled: the call returns when the thread does.
    """
    return await find_client(engine).execute_next(queue, lease_ttl=lease_ttl, node=node)


async def inspect(target: int | str | bytes, *, engine: object = None) -> Instance:
    """Read an instance by id, or by unique key (the current holder, or else the last one). Raises `NoTarget`."""
    return await find_client(engine).inspect(target)


async def explain(target: int | str | bytes, *, engine: object = None) -> Explanation:
    """Explain why an instance (by id or unique key) waits, runs or has ended. Raises `NoTarget`.

    `summary` is one sentence, `blockers` name what it waits for, `next_actions` what one can do. The reason is "ready"
    exactly if a live node takes the instance as soon as it has a free slot, nothing is ahead of it in the queue and no
    transaction has locked it. Two statements, which lock nothing.
    """
    return await find_client(engine).explain(target)


async def tree(
    target: int | str | bytes,
    *,
    depth: int = 10,
    children: int = 100,
    limit: int = 1000,
    engine: object = None,
) -> Tree:
    """Return the family of an instance (by id or unique key): its ancestors, and all descendants of the first of them.

    Down to `depth` levels below the instance, of each at most so many `children`, and at most `limit` instances beside
    the ancestors. Every node has the `counts` of all its children and says how many are `hidden`; those that have not
    ended are shown first, then those that failed. Two statements, which lock nothing. Raises `NoTarget`.
    """
    return await find_client(engine).tree(target, depth=depth, children=children, limit=limit)


async def graph(
    target: int | str | bytes | Defined,
    *,
    barrier: int | None = None,
    steps: bool = False,
    limit: int = MOST_NODES,
    engine: object = None,
) -> Diagram:
    """Return the diagram of an instance (by id or unique key), or of a machine (its class or job).

    Of an instance whose children come after each other: these children, with how far each is; `barrier` names an
    earlier visit that scheduled children. Of another, or with `steps`: the steps of its machine, where it stands and
    what it has passed. Of a machine: its steps, from its source and from the journals of its newest instances; what
    only journals show is `observed`. `machine_graph` needs no database.

    At most `limit` nodes: of more, tasks that look the same are one, and what is still too much is counted in `hidden`.
    `durable_actors.diagrams.render` draws it as text, Mermaid, DOT or SVG. Reads only, and locks nothing. Raises
    `NoTarget`.
    """
    return await find_client(engine).graph(target, barrier=barrier, steps=steps, limit=limit)
