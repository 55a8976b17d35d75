"""The worker processes of the demo (`durable-actors serve`): start, kill and stop. None outlives the demo."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Final

import trio

from durable_actors._postgres.driver.connection import PgConn
from durable_actors._store.observe import NodeView, read_nodes
from durable_actors.errors import DurableError

# Short, so that the demo is short: the claims of a dead node are released after a second. The defaults are 60, 10, 30,
# 1 and 5 s.
OPTIONS: Final = ("--lease", "6", "--dead-after", "1", "--reap", "1", "--poll", "200ms", "--drain", "3")
MACHINES: Final = "durable_actors.cli.demo_orders"
QUEUES: Final = ("--queue", "orders=6", "--queue", "mail=4")
START_TIMEOUT: Final = 25.0
"""Seconds for the workers to start."""
STOP_TIMEOUT: Final = 4.0
"""Seconds for a worker to drain before it is killed."""
POLL_INTERVAL: Final = 0.1
"""Seconds between looks at the progress."""


class Worker:
    """One worker process."""

    def __init__(self, name: str, process: trio.Process) -> None:
        self.name: Final = name
        self.process: Final = process
        self.said: Final[deque[str]] = deque(maxlen=20)
        """The last lines that it wrote to stderr, for error messages."""

    def kill(self) -> None:
        """Send SIGKILL."""
        self.process.kill()

    async def stop(self) -> int:
        """Send SIGTERM, wait while it drains, and return its exit code. Kill it if it takes too long."""
        self.process.terminate()
        with trio.move_on_after(STOP_TIMEOUT):
            return await self.process.wait()
        self.process.kill()
        return await self.process.wait()

    async def listen(self) -> None:
        """Collect its output until it ends."""
        assert self.process.stderr is not None
        rest = b""
        async for chunk in self.process.stderr:
            *lines, rest = (rest + chunk).split(b"\n")
            self.said.extend(line.decode("utf-8", "replace") for line in lines)


@asynccontextmanager
async def open_workers(
    names: tuple[str, ...], *, dsn: str, schema: str
) -> AsyncGenerator[list[Worker], None]:
    """Start workers. All of them have ended when the block ends, also after an error."""
    environ = {**os.environ, "DURABLE_DSN": dsn, "DURABLE_SCHEMA": schema}
    workers: list[Worker] = []
    async with trio.open_nursery() as nursery:
        try:
            for name in names:
                command = [
                    sys.executable,
                    "-m",
                    "durable_actors.cli",
                    "serve",
                    MACHINES,
                ]
                process = await trio.lowlevel.open_process(
                    [*command, "--node", name, *QUEUES, *OPTIONS, "--stop-on-eof"],
                    stdin=subprocess.PIPE,  # ends with this process, even if it is killed
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    env=environ,
                    start_new_session=True,  # Ctrl-C reaches only this process, which stops them
                )
                workers.append(Worker(name, process))
                nursery.start_soon(workers[-1].listen)
            yield workers
        finally:
            with trio.CancelScope(shield=True):
                for worker in workers:
                    if worker.process.poll() is None:
                        worker.process.send_signal(signal.SIGTERM)
                for worker in workers:
                    await worker.stop()


async def wait_alive(conn: PgConn, schema: str, workers: list[Worker]) -> dict[str, NodeView]:
    """Wait until every worker is running; return their nodes by name."""
    with trio.move_on_after(START_TIMEOUT):
        while True:
            for worker in workers:
                if worker.process.poll() is not None:
                    raise DurableError(f"{worker.name} ended: {' · '.join(worker.said) or 'no output'}")
            nodes = {each.node: each for each in await read_nodes(conn, schema) if each.alive and each.node}
            if all(worker.name in nodes for worker in workers):
                return {worker.name: nodes[worker.name] for worker in workers}
            await trio.sleep(POLL_INTERVAL)
    said = " · ".join(line for worker in workers for line in worker.said)
    raise DurableError(f"the workers did not start within {START_TIMEOUT:.0f} s: {said or 'no output'}")
