"""Oban for Python on uvloop, which it asks for itself; one queue with a limit."""

from __future__ import annotations

import asyncio
import os

import psycopg
import uvloop
from oban import Oban, job
from oban.schema import install
from psycopg_pool import AsyncConnectionPool

from bench.peers.finish import Finish


async def _main(dsn: str, finish: Finish, limit: int | None) -> None:
    done = asyncio.Event()
    loop = asyncio.get_running_loop()
    finish.on_over = lambda: loop.call_soon_threadsafe(done.set)

    @job(queue="default")
    async def noop(n: int) -> None:  # noqa: ARG001 - its protocol
        finish.ran()

    pool = AsyncConnectionPool(conninfo=dsn, min_size=2, max_size=10, open=False)
    await pool.open()
    await install(pool)
    async with Oban(pool=pool, name="filler", queues={}) as filler:
        for start in range(0, finish.count, 1000):
            await filler.enqueue_many(*(noop.new(n) for n in range(min(1000, finish.count - start))))
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("vacuum analyze")
    async with Oban(pool=pool, queues={"default": 10 if limit is None else limit}):
        await done.wait()
    os._exit(0)


def run(dsn: str, finish: Finish, *, limit: int | None = None) -> None:
    uvloop.run(_main(dsn, finish, limit))
