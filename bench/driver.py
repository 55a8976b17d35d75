"""CPU per statement in the Python process: psycopg on asyncio, TrioConnection, and the engine's own driver.

One process, short slices in random order, medians: on a machine whose speed changes by the minute the three are
comparable with each other, the absolute figures are not. CPU is `time.process_time`, the server's is not in it.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Coroutine
from time import monotonic, process_time
from typing import Any, Protocol

import attrs
import msgspec
import psycopg
import trio
from durable_actors._postgres.driver import encode
from durable_actors._postgres.driver.connection import PgConn
from durable_actors._postgres.driver.statement import Statement
from durable_actors.testing.database import open_server

from bench.driver_trio import BATCH, DOCUMENT, ROWS, SETUP, OnAsyncio, OnTrio

BASE = OnAsyncio.name
GOALS = {
    ("round trip", "TrioConnection"): 1.0,
    ("round trip", "PgConn"): 0.7,
    ("100-row batch", "PgConn"): 0.35,
}
"""Most of the asyncio connection's CPU that each may take."""


class Contender(Protocol):
    name: str

    def round_trips(self, count: int) -> float: ...
    def batches(self, count: int) -> float: ...
    def close(self) -> None: ...


class Document(msgspec.Struct):
    order: int
    items: list[str]
    note: str
    paid: bool
    total: float


_SELECT = Statement("bench_select", "select $1::int")
_UPDATE = Statement("bench_update", BATCH.replace("%s", "$1", 1).replace("%s", "$2", 1))
_decode = msgspec.json.Decoder(Document).decode


class OnPgConn:
    """The engine's driver: prepared statements on libpq, array literals by hand, msgspec for the documents."""

    name = "PgConn"

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn

    async def _round_trips(self, conn: PgConn, count: int) -> float:
        began = process_time()
        for number in range(count):
            result = await conn.run(_SELECT, [b"%d" % number])
            if int(result.rows[0][0] or b"-1") != number:
                raise AssertionError(result)
        return (process_time() - began) / count

    async def _batches(self, conn: PgConn, count: int) -> float:
        began = process_time()
        for _ in range(count):
            first = random.randrange(9 * ROWS) + 1
            ids = range(first, first + ROWS)
            result = await conn.run(_UPDATE, [encode.int_array(ids), encode.text_array([DOCUMENT] * ROWS)])
            rows = [(int(a or b""), int(b or b""), _decode(c or b"")) for a, b, c in result.rows]
            if len(rows) != ROWS or rows[0][2].order != 42:
                raise AssertionError(rows)
        return (process_time() - began) / count

    async def _slice(self, work: Callable[..., Coroutine[Any, Any, float]], count: int) -> float:
        conn = await PgConn.open(self._dsn)
        try:
            await work(conn, 5)
            return await work(conn, count)
        finally:
            conn.close()

    def round_trips(self, count: int) -> float:
        return trio.run(self._slice, self._round_trips, count)

    def batches(self, count: int) -> float:
        return trio.run(self._slice, self._batches, count)

    def close(self) -> None:
        """Nothing is kept between slices."""


@attrs.frozen(kw_only=True)
class Figure:
    """One contender at one workload."""

    workload: str
    contender: str
    median: float
    """CPU microseconds per operation, median of the slices."""
    best: float
    ratio: float
    """Of its median to the asyncio connection's."""
    goal: float | None
    slices: int

    @property
    def met(self) -> bool:
        return self.goal is None or self.ratio <= self.goal


def measure(dsn: str, *, seconds: float) -> list[Figure]:
    """Interleave slices of all contenders for about so long."""
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute(SETUP)
    contenders: list[Contender] = [OnAsyncio(dsn), OnTrio(dsn), OnPgConn(dsn)]
    workloads: list[tuple[str, Callable[[Contender], float]]] = [
        ("round trip", lambda contender: contender.round_trips(300)),
        ("100-row batch", lambda contender: contender.batches(15)),
    ]
    found: dict[tuple[str, str], list[float]] = {}
    plan = [(workload, run, contender) for workload, run in workloads for contender in contenders]
    for _, run, contender in plan:
        run(contender)  # warm up
    until = monotonic() + seconds
    while monotonic() < until:
        random.shuffle(plan)
        for workload, run, contender in plan:
            found.setdefault((workload, contender.name), []).append(run(contender) * 1e6)
    for contender in contenders:
        contender.close()
    return [_figure(found, workload, contender.name) for workload, _ in workloads for contender in contenders]


def _figure(found: dict[tuple[str, str], list[float]], workload: str, name: str) -> Figure:
    slices = found[workload, name]
    median = statistics.median(slices)
    return Figure(
        workload=workload,
        contender=name,
        median=round(median, 1),
        best=round(min(slices), 1),
        ratio=round(median / statistics.median(found[workload, BASE]), 3),
        goal=GOALS.get((workload, name)),
        slices=len(slices),
    )


def run(*, seconds: float) -> list[Figure]:
    with open_server() as server, server.database() as dsn:
        return measure(f"{dsn} options='-c synchronous_commit=off'", seconds=seconds)
