"""18. Picks beside a janitor at full speed, on a table of finished rows; what it reads per deleted row, and at rest.

`python -m bench.retention --rows 10000000` does it on a table of 10⁷ rows: five minutes, 10 GB of disk.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import click
import psycopg
import trio
from durable_actors import Config, Retention
from durable_actors._engine.lanes import lanes
from durable_actors._engine.maintenance.janitor import Janitor, Walk
from durable_actors._engine.maintenance.truncation import Truncation
from durable_actors._engine.node import Node
from durable_actors._engine.setup import make_node
from durable_actors._postgres.pool.pool import open_pool
from durable_actors.otp import ActorChild, Address, Supervisor, open_tree
from durable_actors.telemetry import Event, InstancesDeleted

from bench.contest import Figure, Progress, Sample
from bench.growth import BATCH, _insert, picks
from bench.server import Server, open_server
from bench.workload import QUEUE

COUNTED = """
select coalesce(sum(shared_blks_hit + shared_blks_read), 0), coalesce(sum(calls), 0), coalesce(sum(total_exec_time), 0)
  from pg_stat_statements
 where query like %s and dbid = (select oid from pg_database where datname = current_database())
"""
DELETES, PICK, WALK = (
    '%delete from "durable".gen_durable g%',
    '%"durable".judge_siblings($%',
    '%"durable".journal_cut(l.journal%',
)
PICKS = 200
TURNS = 7
CHUNK = 1_000_000
WHOLE = 1_000_000
"""Up to so many rows the janitor works to the end."""
LONG, MOVES = 20, 1000
"""Live instances with a long history, and how many moves of it are kept."""


def counted(connection: psycopg.Connection, what: str) -> tuple[float, float, float]:
    """Pages, calls and milliseconds of a statement so far."""
    found = connection.execute(COUNTED, [what]).fetchone()
    assert found is not None
    return float(found[0]), float(found[1]), float(found[2])


def finished(connection: psycopg.Connection, count: int, age: str) -> None:
    """Rows that ended so long ago."""
    for done in range(0, count, CHUNK):
        connection.execute(
            "insert into durable.gen_durable (fsm, step, queue, status, inserted_at, finished_at, state, result)"
            f" select 'bench:noop', 'perform', '{QUEUE}', 'done', now() - interval '{age}', now() - interval '{age}',"
            f' \'{{"n": 0, "text": "{"x" * 100}"}}\', \'1\' from generate_series(1, {min(CHUNK, count - done)}) n'  # type: ignore[arg-type]
        )


def long_histories(connection: psycopg.Connection) -> None:
    """Live rows with ten times as many records as are kept."""
    connection.execute(
        "with live as (insert into durable.gen_durable (fsm, step, queue, status, awaits, journal, rev, inserted_at)"
        f" select 'bench:noop', 'perform', '{QUEUE}', 'awaiting_signal', '{{x}}', 3, {10 * MOVES},"
        " now() - interval '9 days'"
        f" from generate_series(1, {LONG}) returning id)"
        " insert into durable.journal (instance_id, rev, kind, step, visit, attempt, claim_id, node)"
        " select l.id, n, 'claimed', 'perform', n, 0, gen_random_uuid(), 'bench:1'"
        f" from live l, generate_series(1, {10 * MOVES}) n"  # type: ignore[arg-type]
    )


@asynccontextmanager
async def open_node(dsn: str) -> AsyncGenerator[Node]:
    """A node that has no actors."""
    config = Config(dsn=dsn, retention=Retention(interval=3600))
    roles = lanes(config.pool_size, session_dsn=None, keepalive=config.lease_ttl)
    async with open_pool(dsn, lanes={lane.name: lane for lane in roles.values()}.values()) as pool:
        yield make_node(config, pool, roles, {})


@asynccontextmanager
async def janitor(
    dsn: str, fronts: dict[float, Walk] | None = None
) -> AsyncGenerator[tuple[Address[object], list[Event]]]:
    """The actor of a node that does nothing else. A message makes it begin a round, where `fronts` are."""
    async with open_node(dsn) as node:
        events: list[Event] = []
        node.telemetry.subscribe(events.append)
        actor = Janitor(node)
        actor._fronts = dict(fronts or {})
        address: Address[object] = Address("janitor", capacity=1)
        async with open_tree(Supervisor("bench", [ActorChild(address, lambda: actor)])):
            yield address, events
        if fronts is not None:
            fronts.update(actor._fronts)


async def beside(dsn: str, count: int, fronts: dict[float, Walk]) -> Sample:
    """Picks while a janitor deletes, from its first batch on."""
    async with janitor(dsn, fronts) as (address, _):
        address.cast(None)
        await trio.sleep(0.3)
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


async def shorten(dsn: str) -> None:
    """Look at 10,000 rows for long histories, and shorten those that are there: a snapshot, then another one."""
    async with open_node(dsn) as node:
        await Truncation(node, MOVES).round(10_000)


def measure(server: Server, rows: int, progress: Progress) -> Sample:
    with server.database() as dsn, psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("create extension if not exists pg_stat_statements")
        began = time.monotonic()
        long_histories(connection)
        finished(connection, rows, "9 days")
        finished(connection, rows // 10, "1 day")
        _insert(connection, PICKS * BATCH * (2 * TURNS + 1))
        connection.execute("vacuum analyze durable.gen_durable")
        connection.execute("checkpoint")
        progress(f"retention: loaded in {time.monotonic() - began:.0f} s")
        trio.run(picks, dsn, PICKS)  # warm
        sample = _turns(connection, dsn)
        progress("retention: the rest")
        sample |= _alone(connection, dsn, rows) if rows <= WHOLE else {}
        sample |= _histories(connection, dsn)
    return sample


def _turns(connection: psycopg.Connection, dsn: str) -> Sample:
    """In turns, so that neither has the better half of the run."""
    alone: list[Sample] = []
    busy: list[Sample] = []
    fronts: dict[float, Walk] = {}
    first, deletes = _oldest(connection), counted(connection, DELETES)
    for _ in range(TURNS):
        for found in (alone, busy):
            pages, calls, _ = counted(connection, PICK)
            sample = trio.run(picks, dsn, PICKS) if found is alone else trio.run(beside, dsn, PICKS, fronts)
            after = counted(connection, PICK)
            found.append({**sample, "pages": (after[0] - pages) / max(after[1] - calls, 1)})
    gone = _oldest(connection) - first
    after = counted(connection, DELETES)
    pairs = [one["cpu_ms"] / other["cpu_ms"] for one, other in zip(busy, alone, strict=True)]
    noise = [one["cpu_ms"] / other["cpu_ms"] for one, other in zip(alone[1:], alone, strict=False)]
    return {
        "alone_cpu_ms": _median(alone, "cpu_ms"),
        "beside_cpu_ms": _median(busy, "cpu_ms"),
        "cpu_ratio": _median(busy, "cpu_ms") / _median(alone, "cpu_ms"),
        "least_ratio": min(pairs),
        "most_ratio": max(pairs),
        "noise": max(max(noise), 1 / min(noise)),
        "alone_pages": _median(alone, "pages"),
        "beside_pages": _median(busy, "pages"),
        "alone_ms": _median(alone, "pick_ms"),
        "beside_ms": _median(busy, "pick_ms"),
        "deleted_beside": float(gone),
        "pages_per_row": (after[0] - deletes[0]) / max(gone, 1),
        "server_us_per_row": (after[2] - deletes[2]) * 1e3 / max(gone, 1),
    }


def _alone(connection: psycopg.Connection, dsn: str, rows: int) -> Sample:
    """A janitor that works to the end, and one at rest."""
    left = connection.execute("select count(*) from durable.gen_durable where status = 'done'").fetchone()
    before = int(left[0]) - rows // 10  # type: ignore[index]
    seconds, gone = trio.run(to_the_end, dsn) if before else (0.0, 0)
    assert gone == before
    after = counted(connection, DELETES)
    connection.execute("vacuum durable.gen_durable")  # else the dead entries of the primary key are counted
    trio.run(at_rest, dsn)
    rest = counted(connection, DELETES)
    return {
        "deleted_per_s": gone / seconds if seconds else math.nan,
        "pages_at_rest": rest[0] - after[0],
        "statements_at_rest": rest[1] - after[1],
    }


def _histories(connection: psycopg.Connection, dsn: str) -> Sample:
    """What the walk along long histories reads, and how fast records go."""
    walk = counted(connection, WALK)
    trio.run(shorten, dsn)
    connection.execute(f"update durable.gen_durable set rev = rev + {MOVES} where journal = 3")  # type: ignore[arg-type]
    before = connection.execute("select count(*) from durable.journal").fetchone()
    began = time.monotonic()
    trio.run(shorten, dsn)
    seconds = time.monotonic() - began
    left = connection.execute("select count(*) from durable.journal").fetchone()
    after = counted(connection, WALK)
    return {
        "records_deleted": float(before[0] - left[0]) + LONG,  # type: ignore[index]
        "records_per_s": (float(before[0] - left[0]) + LONG) / seconds,  # type: ignore[index]
        "walk_pages": (after[0] - walk[0]) / 2,
        "walk_ms": (after[2] - walk[2]) / 2,
    }


def _oldest(connection: psycopg.Connection) -> int:
    query = "select id from durable.gen_durable where status = 'done' order by id limit 1"
    found = connection.execute(query).fetchone()
    return 0 if found is None else int(found[0])


def _median(found: list[Sample], name: str) -> float:
    return statistics.median(each[name] for each in found)


def run(server: Server, progress: Progress, *, quick: bool) -> list[Figure]:
    return [_figure(server, progress, 100_000 if quick else 1_000_000)]


def _figure(server: Server, progress: Progress, rows: int) -> Figure:
    progress(f"retention: {rows:,} finished rows")
    server.settle()
    sample = measure(server, rows, progress)
    return Figure.of("retention", f"{rows:,} finished", "a pick of 100 beside a janitor", [sample])


@click.command()
@click.option("--rows", default=10_000_000, show_default=True, help="Finished rows in the table.")
def main(rows: int) -> None:
    """Measure on a table of this size, and print the figures."""
    with open_server() as server:
        figure = _figure(server, click.echo, rows)
    for name, spread in figure.values.items():
        click.echo(f"{name:20} {spread.median:12,.3f}")


if __name__ == "__main__":
    main()
