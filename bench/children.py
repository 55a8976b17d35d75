"""8. Fan-out and fan-in: one parent, n children that do nothing, until the parent's next step runs."""

from __future__ import annotations

import time
from typing import Any

import durable_actors as da
import psycopg
import trio

from bench.contest import Figure, Progress, Sample
from bench.meter import Meter
from bench.server import Server
from bench.workload import BEST, QUEUE, engine

_phases: dict[str, float] = {}


@da.job(name="bench:child", queue=QUEUE)
async def child(args: dict[str, Any]) -> None:  # noqa: ARG001 - a job has arguments
    _phases.setdefault("first child", time.perf_counter())


class Parent(da.Machine[dict], name="bench:parent", queue=QUEUE):  # type: ignore[type-arg]
    @da.step(initial=True)
    async def spread(self, ctx: da.Context[dict]) -> da.Outcome:  # type: ignore[type-arg]
        return da.ScheduleChildren(self.join, [da.Child(child, args={})] * ctx.state["n"])

    @da.step
    async def join(self, ctx: da.Context[dict]) -> da.Outcome:  # type: ignore[type-arg]
        return da.Done(len(ctx.children))


async def fan(server: Server, dsn: str, count: int) -> Sample:
    _phases.clear()
    meter = Meter(dsn, server.postmaster)
    async with engine(dsn, BEST) as running:
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute("select pg_stat_statements_reset()")
            begin = time.perf_counter()
            meter.start()
            parent = await running.client.insert(Parent, state={"n": count})
            assert parent is not None
            await running.client.result(parent, timeout=600)
            found = dict(meter.stop(count))
            slowest = connection.execute(
                "select max(max_exec_time) from pg_stat_statements s join pg_database d on d.oid = s.dbid"
                " where d.datname = current_database()"
            ).fetchone()
    meter.close()
    found["insert_s"] = _phases["first child"] - begin
    found["slowest_statement_ms"] = slowest[0] if slowest else 0.0
    return found


def run(server: Server, progress: Progress, *, quick: bool) -> list[Figure]:
    figures: list[Figure] = []
    for count in (1_000, 3_000) if quick else (1_000, 10_000, 100_000):
        samples: list[Sample] = []
        for number in range(1 if quick or count == 100_000 else 3):
            progress(f"children: {count:,} ({number + 1})")
            with server.database() as dsn:
                samples.append(trio.run(fan, server, dsn, count))
        figures.append(Figure.of("children", f"{count:,} children", "child", samples))
    return figures
