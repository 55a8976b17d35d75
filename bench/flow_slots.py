"""How exactly a rate is kept, and how many of K slots are in use: an engine under backlog, watched from outside."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import attrs
import durable_actors as da
import psycopg
import trio

from bench.server import Server
from bench.workload import QUEUE, fill

CLAIMS = """
select extract(epoch from at)::float8 from durable.journal where kind = 'claimed' order by at
"""
IN_USE = "select count(*) from durable.gen_durable where status = 'executing' and queue = %s"


@da.job(name="bench:called", queue=QUEUE)
async def called(args: dict[str, Any]) -> None:
    """A call that takes no time."""


@da.job(name="bench:held", queue=QUEUE)
async def held(args: dict[str, Any]) -> None:  # noqa: ARG001 - a job has arguments
    await trio.sleep(0.5)


@attrs.frozen
class Kept:
    """How a rate was kept."""

    rate: float
    """Claims a second after the burst."""
    excess: float
    """By how many claims the worst window has more than burst + R·t; 0: none has."""


@attrs.frozen
class Used:
    """How many had a slot."""

    used: float
    """The part of the slots that was in use, on average."""
    most: int


async def rate_kept(server: Server, rate: int, burst: int, seconds: float) -> Kept:
    """Run a backlog under a rate; when each row was claimed is in the journal."""
    with server.database() as dsn:
        count = int(rate * seconds * 1.5) + burst
        columns = {"rate_limit": "'api'", "journal": "3"}
        await trio.to_thread.run_sync(lambda: fill(dsn, "bench:called", count, **columns))
        async with da.open_engine(
            dsn=dsn, queues={QUEUE: 20}, limits={"api": da.Limit(rate, burst=burst)}, migrate=False
        ):
            await trio.sleep(seconds)
        with psycopg.connect(dsn) as db:
            times = [at for (at,) in db.execute(CLAIMS)]
    return Kept(steady_rate(times, burst), worst_window(times, rate, burst))


def steady_rate(times: Sequence[float], burst: int) -> float:
    """Claims a second, the burst left out. Pure."""
    return (len(times) - 1 - burst) / (times[-1] - times[burst])


def worst_window(times: Sequence[float], rate: float, burst: int) -> float:
    """By how much the worst window has more claims than burst + R·t. Pure, one pass.

    The window from claim i to claim j has j - i + 1 claims: the excess is the difference of n - R·t at its two ends.
    """
    low, excess = float("inf"), 0.0
    for n, at in enumerate(times):
        level = n - rate * at
        low = min(low, level)
        excess = max(excess, level - low + 1 - burst)
    return round(excess, 3)


async def slots_in_use(server: Server, slots: int, seconds: float) -> Used:
    """Run a backlog of jobs that take half a second under K slots; count who executes."""
    with server.database() as dsn:
        count = int(slots * seconds * 3) + 10
        await trio.to_thread.run_sync(lambda: fill(dsn, "bench:held", count, rate_limit="'!gpu'"))
        counts: list[int] = []
        async with da.open_engine(
            dsn=dsn, queues={QUEUE: slots + 10}, limits={"gpu": da.Limit(slots=slots)}, migrate=False
        ):
            with psycopg.connect(dsn, autocommit=True) as db:
                began = trio.current_time()
                for _ in itertools.count():
                    found = await trio.to_thread.run_sync(lambda: db.execute(IN_USE, [QUEUE]).fetchone())
                    now = trio.current_time() - began
                    if now > 1.5:  # until then it starts
                        counts.append(found[0] if found else 0)
                    if now > seconds + 1.5:
                        break
                    await trio.sleep(0.02)
    return Used(sum(counts) / len(counts) / slots, max(counts))
