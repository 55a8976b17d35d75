"""Procrastinate on its psycopg connector."""

from __future__ import annotations

import asyncio

import procrastinate
import psycopg

from bench.peers.finish import Finish


async def _main(dsn: str, finish: Finish, concurrency: int | None) -> None:
    app = procrastinate.App(connector=procrastinate.PsycopgConnector(conninfo=dsn))

    @app.task(queue="bench", name="noop")
    async def noop(n: int) -> None:  # noqa: ARG001 - its protocol
        finish.ran()

    async with app.open_async():
        await app.schema_manager.apply_schema_async()
        for start in range(0, finish.count, 1000):
            await noop.batch_defer_async(*({"n": n} for n in range(min(1000, finish.count - start))))
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute("vacuum analyze")
        settings = {} if concurrency is None else {"concurrency": concurrency}
        await app.run_worker_async(queues=["bench"], wait=False, install_signal_handlers=False, **settings)


def run(dsn: str, finish: Finish, *, concurrency: int | None = None) -> None:
    asyncio.run(_main(dsn, finish, concurrency))
