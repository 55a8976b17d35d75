"""Nodes without an engine: what an actor under test needs, made by hand."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import attrs
import durable_actors as da
import psycopg
import trio
from durable_actors._engine import setup
from durable_actors._engine.keys.keeper import Keeper, Keys
from durable_actors._engine.node import Node, lanes
from durable_actors._postgres.pool.pool import open_pool
from durable_actors._store.claim import PickFrom, pick_instances
from durable_actors._store.rows import Claim
from durable_actors.config import Config
from durable_actors.machine import isolated_registry
from durable_actors.otp import ActorChild, Address, Supervisor, open_tree
from durable_actors.telemetry import Event

_numbers = itertools.count(1)

with isolated_registry():

    class _M(da.Machine, name="m", initial="s"):
        @da.step
        async def s(self, ctx: da.Context[Any]) -> da.Outcome:
            return da.Done()


SPEC = _M.__durable__
"""What `Db.insert` inserts instances of."""

INSERT = "insert into durable.gen_durable ({}) values ({}) returning id"


@attrs.frozen
class Db:
    """A connection of the test's own."""

    conn: psycopg.Connection[tuple[Any, ...]]
    dsn: str

    def insert(self, **columns: object) -> int:
        columns = {"fsm": "m", "step": "s"} | columns
        query = INSERT.format(", ".join(columns), ", ".join(["%s"] * len(columns)))
        row = self.conn.execute(query, list(columns.values())).fetchone()
        assert row is not None
        return row[0]

    def row(self, number: int, columns: str = "status, hold, attempt, crashes, claim_id, locked_by") -> tuple:
        query = f"select {columns} from durable.gen_durable where id = %s"
        found = self.conn.execute(query, [number]).fetchone()
        assert found is not None
        return found

    def execute(self, query: str, *args: object) -> list[tuple]:
        cursor = self.conn.execute(query, list(args))
        return cursor.fetchall() if cursor.description else []

    def locks(self) -> int:
        """Session locks of this database."""
        query = (
            "select count(*) from pg_locks where locktype = 'advisory'"
            " and database = (select oid from pg_database where datname = current_database())"
        )
        return self.execute(query)[0][0]

    async def wait(self, query: str, *args: object, timeout: float = 10) -> None:
        """Until the query gives true. The server has no event for us."""
        with trio.fail_after(timeout):
            while not self.execute(query, *args)[0][0]:
                await trio.sleep(0.003)


async def until(condition: Callable[[], object], timeout: float = 10) -> None:
    """Until it holds; for what other tasks of this process do."""
    with trio.fail_after(timeout):
        while not condition():
            await trio.sleep(0.002)


@asynccontextmanager
async def make_node(dsn: str, name: str | None = None, **options: Any) -> AsyncIterator[Node]:
    """A node with a pool of its own and no actors."""
    config = Config(dsn=dsn, **options)
    roles = lanes(config.pool_size, session_dsn=config.session_dsn, keepalive=config.lease_ttl)
    unique = {lane.name: lane for lane in roles.values()}
    async with open_pool(dsn, lanes=unique.values()) as pool:
        with isolated_registry(empty=False) as registry:
            registry.unregister("m", 1)  # another test's machine may have that name
            node = setup.make_node(config, pool, roles, {("m", 1): SPEC})
        node.owner = attrs.evolve(node.owner, name=name or f"node-{next(_numbers)}")
        yield node


def events_of(node: Node) -> list[Event]:
    """What the node tells, from now on."""
    found: list[Event] = []
    node.telemetry.subscribe(found.append)
    return found


async def pick(node: Node, limit: int = 100, queue: str = "default") -> list[Claim]:
    """Claim what a feeder would claim."""
    async with node.pool.acquire(node.lane("claim")) as conn:
        picked = await pick_instances(
            conn,
            node.owner,
            queue=queue,
            limit=limit,
            known=node.catalog.array,
            begin=PickFrom([0], ["-infinity"], [0]),
            now=trio.current_time(),
        )
    return picked.claims


def claim(key: str | None, number: int = 1, **columns: Any) -> Claim:
    """A claim that no row knows of: the keeper only needs its key and its id."""
    values: dict[str, Any] = {field.name: 0 for field in attrs.fields(Claim)}
    values |= {"id": number, "claim_id": f"{key}/{number}", "partition_key": key, "queue": "default"}
    return Claim(**(values | {"fsm": "m", "step": "s", "trusted_until": 1e9} | columns))


@attrs.frozen
class Kept:
    """A node with its keeper running."""

    node: Node
    keys: Keys
    stop: Callable[[], Any]


@asynccontextmanager
async def keep(dsn: str, name: str | None = None, **options: Any) -> AsyncIterator[Kept]:
    """A node and its keeper, under a supervisor that restarts nothing."""
    async with AsyncExitStack() as stack:
        node = await stack.enter_async_context(make_node(dsn, name, **options))
        address: Address[object] = Address("keeper", capacity=1)
        keys = Keys(address)
        root = Supervisor("test", [ActorChild(address, lambda: Keeper(node, keys))], intensity=0)
        tree = await stack.enter_async_context(open_tree(root))
        yield Kept(node, keys, tree.stop)
