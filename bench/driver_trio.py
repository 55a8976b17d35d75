"""The psycopg contenders: the same coroutine on the same connection class, under asyncio and under Trio."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from time import process_time
from typing import Any

import psycopg
import trio
from durable_actors._postgres.trio.connection import TrioConnection

ROWS = 100
"""Rows of one batch."""

ROUND_TRIP = "select %s::int"
BATCH = """
    update bench_rows r set attempts = r.attempts + 1, state = x.state::jsonb
    from unnest(%s::bigint[], %s::text[]) as x (id, state)
    where r.id = x.id
    returning r.id, r.attempts, r.state
"""
DOCUMENT = '{"order": 42, "items": ["a", "b", "c"], "note": "say \\"hello\\"", "paid": true, "total": 129.5}'

SETUP = f"""
    drop table if exists bench_rows;
    create table bench_rows (id bigint primary key, attempts int not null default 0, state jsonb not null)
        with (fillfactor = 50);
    insert into bench_rows (id, state) select n, '{DOCUMENT}' from generate_series(1, {10 * ROWS}) n;
    analyze bench_rows;
"""

Slice = Callable[[int], float]
"""Runs so many operations and returns the CPU seconds that one took."""


async def round_trips(conn: psycopg.AsyncConnection[Any], count: int) -> float:
    began = process_time()
    for number in range(count):
        cursor = await conn.execute(ROUND_TRIP, [number])
        row = await cursor.fetchone()
        if row is None or row[0] != number:
            raise AssertionError(row)
    return (process_time() - began) / count


async def batches(conn: psycopg.AsyncConnection[Any], count: int) -> float:
    began = process_time()
    for _ in range(count):
        first = random.randrange(9 * ROWS) + 1
        ids = list(range(first, first + ROWS))
        cursor = await conn.execute(BATCH, [ids, [DOCUMENT] * ROWS])
        rows = await cursor.fetchall()
        if len(rows) != ROWS or rows[0][2]["order"] != 42:
            raise AssertionError(rows)
    return (process_time() - began) / count


class OnAsyncio:
    """psycopg's AsyncConnection on one asyncio loop that is run slice by slice."""

    name = "AsyncConnection"

    def __init__(self, dsn: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._conn = self._run(psycopg.AsyncConnection.connect(dsn, autocommit=True, prepare_threshold=0))

    def _run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return self._loop.run_until_complete(coroutine)

    def round_trips(self, count: int) -> float:
        return self._run(round_trips(self._conn, count))

    def batches(self, count: int) -> float:
        return self._run(batches(self._conn, count))

    def close(self) -> None:
        self._run(self._conn.close())
        self._loop.close()


class OnTrio:
    """TrioConnection, a Trio run per slice; what a run costs to start is outside of the measurement."""

    name = "TrioConnection"

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn

    async def _slice(self, work: Callable[..., Coroutine[Any, Any, float]], count: int) -> float:
        conn = await TrioConnection.connect(self._dsn, autocommit=True, prepare_threshold=0)
        try:
            await work(conn, 5)
            return await work(conn, count)
        finally:
            await conn.close()

    def round_trips(self, count: int) -> float:
        return trio.run(self._slice, round_trips, count)

    def batches(self, count: int) -> float:
        return trio.run(self._slice, batches, count)

    def close(self) -> None:
        """Nothing is kept between slices."""
