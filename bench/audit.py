"""16. Reading journals: `verify` over many instances, and the first page of a long history. In a process of its own."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import durable_actors as da
import psycopg
import trio

from bench import workload
from bench.contest import Figure, Progress, Sample, run_python
from bench.memory import resident
from bench.server import Server
from bench.workload import QUEUE, Count

STEPS = 9
"""Outcomes per instance; with its start, ten records."""


class Nine(da.Machine[Count], name="bench:nine", queue=QUEUE, journal="outcomes"):
    """Goes through one step nine times."""

    @da.step
    async def start(self, ctx: da.Context[Count]) -> da.Outcome:
        n = ctx.state.n + 1
        return da.Done(n) if n == STEPS else da.Next(self.start, Count(n))


async def one(dsn: str) -> int:
    """Run one instance, with all its records."""
    async with workload.engine(dsn, {"concurrency": 1}) as running:
        number = await running.client.insert(Nine, state=Count())
        await running.client.result(number, timeout=30)
    return number


def copy(dsn: str, number: int, count: int) -> None:
    """Copy a row and its records: other ids, else the same."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        columns = ", ".join(
            name
            for (name,) in connection.execute(
                "select column_name from information_schema.columns where table_schema = 'durable'"
                " and table_name = 'gen_durable' and column_name <> 'id' and is_generated = 'NEVER'"
            )
        )
        fields = "rev, at, visit, seconds, claim_id, attempt, kind, step, to_step, node, by, error, data"
        many = f"generate_series(1, {count}) n"
        connection.execute(
            f"insert into durable.gen_durable (id, {columns}) overriding system value"
            f" select id + n, {columns} from durable.gen_durable, {many} where id = {number}"
        )
        connection.execute(
            f"insert into durable.journal (instance_id, {fields})"
            f" select instance_id + n, {fields} from durable.journal, {many} where instance_id = {number}"
        )
        connection.execute("vacuum analyze durable.gen_durable, durable.journal")


async def measure(dsn: str, count: int, long: int) -> None:
    """A tenth of the instances, then all of them: how fast, and what the process keeps."""
    number = await one(dsn)
    few = count // 10
    await trio.to_thread.run_sync(copy, dsn, number, few)
    found: dict[str, Any] = {}
    async with da.open_client(dsn) as client:
        assert not (await client.verify()).problems
        small = resident()
        await trio.to_thread.run_sync(copy, dsn, number + few, count - few)
        began, cpu = time.perf_counter(), time.process_time()
        report = await client.verify()
        seconds = time.perf_counter() - began
        assert not report.problems, report.problems[:3]
        found["per_second"] = report.checked / seconds
        found["worker_us"] = (time.process_time() - cpu) / report.checked * 1e6
        found["growth_mb"] = (resident() - small) / 1e6
        await trio.to_thread.run_sync(lengthen, dsn, number, long)
        began = time.perf_counter()
        assert len(await client.history(number)) == 1000
        found["first_page_ms"] = (time.perf_counter() - began) * 1e3
    print(json.dumps(found))


def lengthen(dsn: str, number: int, records: int) -> None:
    """Give an instance so many records more."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(
            "insert into durable.journal (instance_id, rev, kind, step, visit, attempt)"
            " select %s, 100 + n, 'offered', 'start', 9, 0 from generate_series(1, %s) n",
            [number, records],
        )


def run(server: Server, progress: Progress, *, quick: bool) -> list[Figure]:
    samples: list[Sample] = []
    for number in range(1 if quick else 3):
        progress(f"audit ({number + 1})")
        with server.database() as dsn:
            order = json.dumps({"dsn": dsn, "count": 20_000 if quick else 100_000, "long": 100_000})
            samples.append(run_python(sys.executable, "bench.audit", order))
    return [Figure.of("audit", "verify, ten records each", "instance", samples)]


if __name__ == "__main__":
    _order = json.loads(sys.argv[1])
    trio.run(measure, _order["dsn"], _order["count"], _order["long"])
