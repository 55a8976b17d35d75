"""The Python side of the workers in bash and Node: the machine that they run, which this program only starts.

Python needs the machine's name, its queue and the step that it begins with. The code of that step, and the other steps,
are in worker.sh and worker.js. No engine serves the queue "reports". Start a worker, then::

    python reports.py

prints `{'by': 'ada', 'pages': ['page 1', 'page 2']}`.
"""

from __future__ import annotations

import os
from typing import Any

import durable_actors as da
import trio


class Report(da.Machine[dict[str, Any]], name="report", queue="reports"):
    """Waits for an approval, has its pages written, and puts them together."""

    @da.step(initial=True)
    async def start(self, ctx: da.Context[dict[str, Any]]) -> da.Outcome:  # noqa: ARG002 - nothing runs it here
        """Written in another language."""
        raise AssertionError("a worker in another language runs this")


async def main() -> None:
    """Start one report, approve it, and print it."""
    await da.migrate(os.environ["DURABLE_DSN"])
    async with da.open_client(os.environ["DURABLE_DSN"]) as client:
        number = await client.insert(Report, state={"pages": 2}, journal="full")
        await client.signal(number, "approved", {"by": "ada"})
        print(await client.result(number, timeout=60))


if __name__ == "__main__":
    trio.run(main)
