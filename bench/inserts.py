"""3. Inserts: batches beside a bare INSERT … SELECT unnest of the same rows; single ones; in a caller's transaction."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import durable_actors as da
import psycopg
import trio
from durable_actors._postgres.driver import encode
from durable_actors._postgres.driver.connection import PgConn
from durable_actors._postgres.driver.statement import Statement

from bench.contest import Contestant, Figure, Progress, Sample, compete
from bench.meter import Meter
from bench.server import Server
from bench.workload import QUEUE, noop

BATCH = 1000
BARE = Statement(
    "bench_bare_insert",
    "insert into durable.gen_durable (fsm, fsm_version, step, state, queue, priority)"
    " select fsm, version, step, state::jsonb, queue, priority"
    " from unnest($1::text[], $2::int[], $3::text[], $4::text[], $5::text[], $6::smallint[])"
    " i(fsm, version, step, state, queue, priority) returning id",
)


async def bare(meter: Meter, dsn: str, count: int) -> None:
    conn = await PgConn.open(dsn)
    states = [b'{"n": %d}' % n for n in range(BATCH)]
    await conn.run(BARE, [b"{}"] * 6)
    meter.start()
    for _ in range(count // BATCH):
        params = [
            encode.text_array(["bench:noop"] * BATCH),
            encode.int_array([1] * BATCH),
            encode.text_array(["perform"] * BATCH),
            encode.json_array(states),
            encode.text_array([QUEUE] * BATCH),
            encode.int_array([0] * BATCH),
        ]
        await conn.run(BARE, params)
    conn.close()


async def many(meter: Meter, dsn: str, count: int) -> None:
    async with da.open_client(dsn) as client:
        await client.insert_many(noop, [{"args": {"n": 0}}])
        meter.start()
        for _ in range(count // BATCH):
            await client.insert_many(noop, [{"args": {"n": n}} for n in range(BATCH)])


async def single(meter: Meter, dsn: str, count: int) -> None:
    async with da.open_client(dsn) as client:
        await client.insert(noop, args={"n": 0})
        meter.start()
        for n in range(count):
            await client.insert(noop, args={"n": n})


async def concurrent(meter: Meter, dsn: str, count: int) -> None:
    """Twenty tasks that insert one row each, as request handlers do."""

    async def some() -> None:
        for n in range(count // 20):
            await client.insert(noop, args={"n": n})

    async with da.open_client(dsn) as client:
        await client.insert(noop, args={"n": 0})
        meter.start()
        async with trio.open_nursery() as nursery:
            for _ in range(20):
                nursery.start_soon(some)


async def in_transaction(meter: Meter, dsn: str, count: int) -> None:
    """`sync.insert` beside a write of the caller's, on a plain psycopg connection: what Django code does."""
    with psycopg.connect(dsn) as connection:
        connection.execute("create table orders (n int)")
        connection.commit()
        meter.start()
        for n in range(count):
            connection.execute("insert into orders values (%s)", [n])
            da.sync.insert(connection, noop, args={"n": n})
            connection.commit()


Inserts = Callable[[Meter, str, int], Awaitable[None]]


def contestant(name: str, insert: Inserts, count: int) -> Contestant:
    def run(server: Server, dsn: str) -> Sample:
        meter = Meter(dsn, server.postmaster)

        async def main() -> Sample:
            await insert(meter, dsn, count)
            return meter.stop(count)

        sample: Any = trio.run(main)
        meter.close()
        return sample

    return Contestant(name, run, "row")


def run(server: Server, progress: Progress, *, quick: bool) -> list[Figure]:
    batch, ones, rounds = (10_000, 300, 3) if quick else (20_000, 1_000, 3)
    contestants = [
        contestant("bare INSERT … SELECT unnest", bare, batch),
        contestant("insert_many, 1,000 rows a call", many, batch),
        contestant("insert, one after the other", single, ones),
        contestant("insert, 20 tasks", concurrent, ones * 2),
        contestant("sync.insert in the caller's transaction", in_transaction, ones),
    ]
    return compete("inserts", server, contestants, rounds=rounds, progress=progress)
