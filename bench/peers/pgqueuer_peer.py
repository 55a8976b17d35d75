"""PgQueuer on asyncpg and uvloop. Its tool's own settings: batch_size, everything else as it is."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import asyncpg
import uvloop
from pgqueuer import PgQueuer
from pgqueuer.db import AsyncpgDriver
from pgqueuer.models import Job
from pgqueuer.queries import Queries
from psycopg.conninfo import conninfo_to_dict

from bench.peers.finish import Finish


async def _main(dsn: str, finish: Finish, batch: int | None) -> None:
    parts: Any = conninfo_to_dict(dsn)
    where = {"host": parts["host"], "user": parts["user"], "database": parts["dbname"]}
    filler = await asyncpg.connect(**where)
    queries = Queries(AsyncpgDriver(filler))
    await queries.install()
    for start in range(0, finish.count, 1000):
        some = min(1000, finish.count - start)
        await queries.enqueue(["noop"] * some, [b"{}"] * some, [0] * some)
    await filler.execute("vacuum analyze")
    await filler.close()
    queuer = PgQueuer(AsyncpgDriver(await asyncpg.connect(**where)))

    @queuer.entrypoint("noop")
    async def noop(job: Job) -> None:  # noqa: ARG001 - its protocol
        finish.ran()

    finish.on_over = queuer.shutdown.set
    settings = {} if batch is None else {"batch_size": batch}
    await queuer.run(dequeue_timeout=timedelta(seconds=1), **settings)


def run(dsn: str, finish: Finish, *, batch: int | None = None, uv: bool = True) -> None:
    if uv:
        uvloop.run(_main(dsn, finish, batch))
    else:
        asyncio.run(_main(dsn, finish, batch))
