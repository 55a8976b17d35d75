"""12. One, two and four worker processes on one database; and 6. recovery after kill -9 of one of two."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from typing import Any

import psycopg
import trio

from bench import memory, workload
from bench.contest import ROOT, Figure, Progress, Sample
from bench.meter import process_cpu, server_cpu
from bench.server import Server

HEAD_START = 3.0
"""Seconds until the rows are due: all engines are up by then."""


def start_worker(dsn: str, queue: dict[str, Any], **options: Any) -> subprocess.Popen[bytes]:
    """A process that serves the benchmarks' queue until it is told to stop."""
    order = json.dumps({"dsn": dsn, "queue": queue, "options": options})
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "-m", "bench.processes", order], cwd=ROOT, env=environment, stdout=subprocess.PIPE
    )


def stop(worker: subprocess.Popen[bytes]) -> None:
    worker.kill()
    worker.wait()
    if worker.stdout is not None:
        worker.stdout.close()


def several(server: Server, dsn: str, workers: int, count: int) -> Sample:
    running = [start_worker(dsn, workload.BEST) for _ in range(workers)]
    try:
        for each in running:
            assert each.stdout is not None
            each.stdout.readline()
        workload.fill(dsn, "bench:noop", count, eligible_at=f"now() + interval '{HEAD_START} s'")
        with psycopg.connect(dsn, autocommit=True) as connection:
            due = connection.execute(
                "select extract(epoch from min(eligible_at) - clock_timestamp())::float8 from durable.gen_durable"
            ).fetchone()
            assert due is not None
            time.sleep(max(due[0], 0.0))
            begin, cpu = time.monotonic(), sum(process_cpu(each.pid) for each in running)
            server_before = server_cpu(server.postmaster)
            left = (
                "select exists (select 1 from durable.gen_durable where status in ('runnable', 'executing'))"
            )
            while connection.execute(left).fetchone() == (True,):
                time.sleep(0.02)
            seconds = time.monotonic() - begin
            cpu = sum(process_cpu(each.pid) for each in running) - cpu
            server_used = server_cpu(server.postmaster) - server_before
    finally:
        for each in running:
            stop(each)
    return {
        "per_second": count / seconds,
        "worker_us": cpu * 1e6 / count,
        "server_us": server_used * 1e6 / count,
    }


def recover(dsn: str, count: int, **options: Any) -> Sample:
    """Two workers; the one that holds all the rows is killed. Seconds until the other one has them all."""
    queue = {"concurrency": count}
    first = start_worker(dsn, queue, **options)
    second: subprocess.Popen[bytes] | None = None
    holders = "select locked_by, count(*)::int from durable.gen_durable where status = 'executing' group by 1"
    try:
        assert first.stdout is not None
        first.stdout.readline()
        workload.fill(dsn, "bench:sleeper", count)
        with psycopg.connect(dsn, autocommit=True) as connection:
            while sum(row[1] for row in connection.execute(holders)) < count:
                time.sleep(0.02)
            (dead,) = {row[0] for row in connection.execute(holders)}
            second = start_worker(dsn, queue, **options)
            assert second.stdout is not None
            second.stdout.readline()
            os.kill(first.pid, signal.SIGKILL)
            begin, found = time.monotonic(), dict[str, float]()
            while True:
                mine = sum(row[1] for row in connection.execute(holders) if row[0] != dead)
                if mine:
                    found.setdefault("first_s", time.monotonic() - begin)
                if mine == count:
                    return {**found, "all_s": time.monotonic() - begin}
                time.sleep(0.02)
    finally:
        stop(first)
        if second is not None:
            stop(second)


def run(server: Server, progress: Progress, *, quick: bool) -> list[Figure]:
    count, rounds = (5_000, 1) if quick else (30_000, 2)
    samples: dict[int, list[Sample]] = {1: [], 2: [], 4: []}
    for number in range(rounds):
        for workers, found in samples.items():
            progress(f"processes: {workers} ({number + 1}/{rounds})")
            server.settle()
            with server.database() as dsn:
                found.append(several(server, dsn, workers, count))
    return [
        Figure.of("processes", f"{workers} worker process{'es' if workers > 1 else ''}", "job", found)
        for workers, found in samples.items()
    ]


async def _serve(order: dict[str, Any]) -> None:
    memory._go = trio.Event()
    async with workload.engine(order["dsn"], order["queue"], **order["options"]):
        print("ready", flush=True)
        await trio.sleep_forever()


if __name__ == "__main__":
    trio.run(_serve, json.loads(sys.argv[1]))
