"""DBOS: workflows from a queue; best with a short poll and a concurrency of its own."""

from __future__ import annotations

import logging
import os

from dbos import DBOS, DBOSClient, DBOSConfig

from bench.peers.finish import Finish, url


def run(
    dsn: str,
    finish: Finish,
    *,
    steps: int = 0,
    poll: float | None = None,
    worker_concurrency: int | None = None,
    pool: int | None = None,
) -> None:
    config: DBOSConfig = {"name": "bench", "system_database_url": url(dsn), "log_level": "ERROR"}
    if pool is not None:
        config["sys_db_pool_size"] = pool
    DBOS(config=config)

    @DBOS.step()
    def one(n: int) -> int:
        return n + 1

    @DBOS.workflow()
    def noop(n: int) -> int:
        for _ in range(steps):
            n = one(n)
        finish.ran()
        return n

    DBOS.launch()
    logging.disable(logging.INFO)
    settings = {}
    if poll is not None:
        settings["polling_interval_sec"] = poll
    if worker_concurrency is not None:
        settings["worker_concurrency"] = worker_concurrency
    # Its worker runs from the launch on: the queue is registered after the rows are there.
    client = DBOSClient(system_database_url=url(dsn))
    for n in range(finish.count):
        client.enqueue({"queue_name": "bench", "workflow_name": noop.__qualname__}, n)
    finish.begin()
    DBOS.register_queue("bench", **settings)
    finish.over.wait()
    os._exit(0)
