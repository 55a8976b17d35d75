"""The machines that the benchmarks run, rows for them, and an engine that runs them to the end."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import attrs
import durable_actors as da
import psycopg
import trio

from bench.meter import Meter

QUEUE = "bench"
BEST = {"concurrency": 1000, "prefetch": 2000, "min_demand": 1000}
"""The best of the settings tried for short steps: a pick brings a third of what is in hand, steps never wait for it."""

GC = [50_000, 20, 20]
"""As `durable-actors serve` sets it: a thousand steps in flight are no garbage."""


class Tally:
    """Counts runs; tells the first and the last."""

    def __init__(self) -> None:
        self.left = 0
        self.meter: Meter | None = None
        self.over = trio.Event()

    def expect(self, count: int, meter: Meter | None = None) -> None:
        self.left, self.meter, self.over = count, meter, trio.Event()

    def began(self) -> None:
        if self.meter is not None and not self.meter.running:
            self.meter.start()

    def ran(self) -> None:
        self.began()
        self.left -= 1
        if self.left == 0:
            self.over.set()


tally = Tally()


@da.job(name="bench:noop", queue=QUEUE)
async def noop(args: dict[str, Any]) -> None:  # noqa: ARG001 - a job has arguments
    tally.ran()


# bench.ab runs older commits, too, which keep every row.
BRIEF: dict[str, Any] = {"keep": 0} if "keep" in inspect.signature(da.job).parameters else {}


@da.job(name="bench:brief", queue=QUEUE, **BRIEF)
async def brief(args: dict[str, Any]) -> None:  # noqa: ARG001 - a job has arguments
    """Its row is deleted when it is done, as Graphile Worker and PgQueuer do."""
    tally.ran()


@da.job(name="bench:hot", queue=QUEUE)
async def hot(args: dict[str, Any]) -> None:
    """Work that nobody counts."""


@attrs.frozen
class Count:
    n: int = 0


class _Five(da.Machine[Count], name="bench:base", queue=QUEUE):
    @da.step(initial=True)
    async def s0(self, ctx: da.Context[Count]) -> da.Outcome:
        tally.began()
        return da.Next(self.s1, Count(ctx.state.n + 1))

    @da.step
    async def s1(self, ctx: da.Context[Count]) -> da.Outcome:
        return da.Next(self.s2, Count(ctx.state.n + 1))

    @da.step
    async def s2(self, ctx: da.Context[Count]) -> da.Outcome:
        return da.Next(self.s3, Count(ctx.state.n + 1))

    @da.step
    async def s3(self, ctx: da.Context[Count]) -> da.Outcome:
        return da.Next(self.s4, Count(ctx.state.n + 1))

    @da.step
    async def s4(self, ctx: da.Context[Count]) -> da.Outcome:
        tally.ran()
        return da.Done(ctx.state.n + 1)


class Five(_Five, name="bench:five", queue=QUEUE):
    """Run-ahead: a committed step is followed by the next one on the same claim."""


class Released(_Five, name="bench:released", queue=QUEUE, run_ahead=False):
    """Every step is claimed anew."""


MACHINES = {
    "bench:noop": "perform",
    "bench:brief": "perform",
    "bench:hot": "perform",
    "bench:called": "perform",
    "bench:held": "perform",
    "bench:five": "s0",
    "bench:released": "s0",
}


def fill(dsn: str, machine: str, count: int, **columns: str) -> None:
    """Insert runnable rows by plain SQL; `columns` are SQL expressions over the row's number n."""
    names = "".join(f", {name}" for name in columns)
    values = "".join(f", {value}" for value in columns.values())
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(
            f"insert into durable.gen_durable (fsm, step, queue, state{names})"
            f" select %s, %s, '{QUEUE}', '{{\"n\": 0}}'{values} from generate_series(1, %s) n",
            [machine, MACHINES.get(machine, "start"), count],
        )
        connection.execute("vacuum analyze durable.gen_durable")


@contextlib.asynccontextmanager
async def engine(dsn: str, queue: Mapping[str, Any] | None, **options: Any) -> AsyncGenerator[da.Engine]:
    """An engine that serves the benchmarks' queue; None: with the defaults."""
    queues = None if queue is None else {QUEUE: da.Queue(**queue)}
    async with da.open_engine(dsn=dsn, queues=queues, migrate=False, **options) as running:
        yield running


async def committed(running: da.Engine) -> None:
    """Wait until every claim of the engine is given up: all outcomes are committed."""
    node: Any = running._node
    claims = node.claims if hasattr(node, "claims") else node.leases  # bench.ab runs older commits, too
    while len(claims):
        await trio.sleep(0.001)


async def drain(
    meter: Meter,
    dsn: str,
    *,
    count: int,
    queue: Mapping[str, Any] | None,
    alone: bool = True,
    **options: Any,
) -> dict[str, float]:
    """Run what `fill` has made; the clock runs from the first step to the last commit.

    Not `alone`: other work stays in the queue, so it runs to the last step.
    """
    tally.expect(count, meter)
    async with engine(dsn, queue, **options) as running:
        await tally.over.wait()
        if alone:
            await committed(running)
        return meter.stop(count)
