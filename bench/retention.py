"""18. Picks beside a janitor at full speed, on a table of finished rows; what it reads per deleted row, and at rest."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import psycopg
import trio
from durable_actors import Config, Retention
from durable_actors._engine.lanes import lanes
from durable_actors._engine.maintenance.janitor import Janitor
from durable_actors._engine.setup import make_node
from durable_actors._postgres.pool.pool import open_pool
from durable_actors.otp import ActorChild, Address, Supervisor, open_tree
from durable_actors.telemetry import Event, InstancesDeleted

from bench.contest import Figure, Progress, Sample
from bench.growth import BATCH, _insert, picks
from bench.server import Server
from bench.workload import QUEUE

COUNTED = """
select coalesce(sum(shared_blks_hit + shared_blks_read), 0), coalesce(sum(calls), 0), coalesce(sum(total_exec_time), 0)
  from pg_stat_statements where query like '%delete from "durable".gen_durable g%' and dbid =
       (select oid from pg_database where datname = current_database())
"""
PICKS = 60


def finished(connection: psycopg.Connection, count: int, age: str) -> None:
    """Rows that ended so long ago."""
    connection.execute(
        "insert into durable.gen_durable (fsm, step, queue, status, inserted_at, finished_at, state, result)"
        f" select 'bench:noop', 'perform', '{QUEUE}', 'done', now() - interval '{age}', now() - interval '{age}',"
        f' \'{{"n": 0, "text": "{"x" * 100}"}}\', \'1\' from generate_series(1, {count}) n'  # type: ignore[arg-type]
    )


@asynccontextmanager
async def janitor(dsn: str) -> AsyncGenerator[tuple[Address[object], list[Event]]]:
    """The actor of a node that does nothing else. A message makes it begin a round."""
    config = Config(dsn=dsn, retention=Retention(interval=3600))
    roles = lanes(config.pool_size, session_dsn=None, keepalive=config.lease_ttl)
    async with open_pool(dsn, lanes={lane.name: lane for lane in roles.values()}.values()) as pool:
        node = make_node(config, pool, roles, {})
        events: list[Event] = []
        node.telemetry.subscribe(events.append)
        address: Address[object] = Address("janitor", capacity=1)
        async with open_tree(Supervisor("bench", [ActorChild(address, lambda: Janitor(node))])):
            yield address, events


async def beside(dsn: str, count: int) -> Sample:
    """Picks while a janitor deletes, from its first batch on."""
    async with janitor(dsn) as (address, _):
        address.cast(None)
        await trio.sleep(0.2)
        return await picks(dsn, count)


async def to_the_end(dsn: str) -> tuple[float, int]:
    """A whole round: seconds, and rows deleted."""
    async with janitor(dsn) as (address, events):
        began = trio.current_time()
        address.cast(None)
        while not events:
            await trio.sleep(0.02)
        gone = events[0]
        assert isinstance(gone, InstancesDeleted)
        return trio.current_time() - began, gone.done


async def at_rest(dsn: str) -> None:
    """One round with nothing to delete."""
    async with janitor(dsn) as (address, _):
        address.cast(None)
        await trio.sleep(1.0)


def measure(server: Server, rows: int) -> Sample:
    with server.database() as dsn, psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("create extension if not exists pg_stat_statements")
        finished(connection, rows, "9 days")
        finished(connection, rows // 10, "1 day")
        _insert(connection, PICKS * BATCH * 7)
        connection.execute("vacuum analyze durable.gen_durable")
        # In turns, so that neither has the better half of the run.
        alone, busy = [], []
        for _ in range(3):
            alone.append(trio.run(picks, dsn, PICKS))
            busy.append(trio.run(beside, dsn, PICKS))
        pages, calls, ms = connection.execute(COUNTED).fetchone()  # type: ignore[misc]
        left = connection.execute("select count(*) from durable.gen_durable where status = 'done'").fetchone()
        before = int(left[0]) - rows // 10  # type: ignore[index]
        seconds, gone = trio.run(to_the_end, dsn)
        after = connection.execute(COUNTED).fetchone()
        assert after is not None
        assert gone == before
        connection.execute(
            "vacuum durable.gen_durable"
        )  # else the dead entries of the primary key are counted
        trio.run(at_rest, dsn)
        rest = connection.execute(COUNTED).fetchone()
        assert rest is not None
    median = lambda found, name: sorted(each[name] for each in found)[len(found) // 2]  # noqa: E731
    return {
        "alone_cpu_ms": median(alone, "cpu_ms"),
        "beside_cpu_ms": median(busy, "cpu_ms"),
        "cpu_ratio": median(busy, "cpu_ms") / median(alone, "cpu_ms"),
        "alone_ms": median(alone, "pick_ms"),
        "beside_ms": median(busy, "pick_ms"),
        "deleted_per_s": gone / seconds if seconds else math.nan,
        "pages_per_row": float(after[0] - pages) / max(gone, 1),
        "server_us_per_row": float(after[2] - ms) * 1e3 / max(gone, 1),
        "pages_at_rest": float(rest[0] - after[0]),
        "statements_at_rest": float(rest[1] - after[1]),
        "batches": float(calls),
    }


def run(server: Server, progress: Progress, *, quick: bool) -> list[Figure]:
    rows = 100_000 if quick else 1_000_000
    progress(f"retention: {rows:,} finished rows")
    server.settle()
    return [
        Figure.of(
            "retention", f"{rows:,} finished", "a pick of 100 beside a janitor", [measure(server, rows)]
        )
    ]
