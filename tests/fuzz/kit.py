"""What the fuzzers share: how many examples, odd values, machines, rows made by hand."""

from __future__ import annotations

import math
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta, timezone
from typing import Any, TypeVar

import attrs
import durable_actors as da
import psycopg
from durable_actors._option_checks import shown
from hypothesis import HealthCheck, settings, strategies as st
from psycopg import sql

F = TypeVar("F", bound=Callable[..., Any])

FACTOR = int(os.environ.get("DURABLE_FUZZ", "1"))
"""How many times as many examples as `make test` takes; more than 1 are drawn at random."""

QUEUE = "q"
LIVE = "{runnable,executing,awaiting_signal,awaiting_children}"


def fuzz(examples: int) -> Callable[[F], F]:
    """The same examples every time, unless many are asked for."""
    return settings(  # type: ignore[return-value]
        max_examples=examples * FACTOR,
        derandomize=FACTOR == 1,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


# -- values


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("no repr")


def cyclic() -> list[Any]:
    found: list[Any] = []
    found.append({"again": found})
    return found


def deep(levels: int = 5_000) -> list[Any]:
    found: list[Any] = []
    for _ in range(levels):
        found = [found]
    return found


ODD: list[Any] = [
    None, True, False, 0, -1, 1, 7, 2**31, 2**63, -(2**63) - 1, 10**5000, -(10**5000),
    0.0, -0.0, 0.5, 1e-300, 5e-324, 1e300, math.nan, math.inf, -math.inf, 3 + 4j,
    "", " ", "a", "\0", "a\0b", "\ud800", "x" * 100_000, "'; drop table canary; --", "\u202e\n\x1b[31m", "embedded",
    b"", b"\xff", [], {}, (), set(), [[]], {"a": {}}, {1: 2}, {"": 5}, {"\0": 5}, {"\ud800": 1}, ["runnable"], range(3),
    cyclic(), deep(), Unprintable(), Unprintable, object(), int, len,
    timedelta.max, timedelta.min, timedelta(0), datetime.min, datetime.max,  # noqa: DTZ901 - without, on purpose
    datetime(1, 1, 1, tzinfo=timezone(timedelta(hours=14))), datetime(2030, 1, 1, tzinfo=UTC),
    datetime(9999, 12, 31, 23, tzinfo=timezone(timedelta(hours=-14))),
]  # fmt: skip
"""What nobody should pass anywhere, and somebody will."""


def odd(index: int) -> Any:
    return ODD[index]


any_text = st.text(st.characters(codec=None, exclude_categories=()), max_size=40)
"""With NUL, lone surrogates and everything else that a str holds."""

leaves = st.one_of(
    st.integers(0, len(ODD) - 1).map(odd),  # not sampled_from: Hypothesis would print all of them
    any_text,
    st.integers(),
    st.floats(),
    st.binary(max_size=20),
    st.datetimes(),
    st.timedeltas(),
)


@attrs.frozen(repr=False)
class Drawn:
    """A value that Hypothesis can print when it has failed."""

    it: Any

    def __repr__(self) -> str:
        return shown(self.it)


values = st.one_of(
    st.integers(0, len(ODD) - 1).map(odd),
    st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.lists(inner, max_size=4),
            st.tuples(inner),
            st.dictionaries(st.one_of(any_text, st.integers()), inner, max_size=4),
        ),
        max_leaves=8,
    ),
).map(Drawn)


# -- machines


@attrs.frozen
class Order:
    order: int


def define() -> Any:
    """Machines for rows by hand; the job that is returned is the good neighbour."""

    @da.job(name="good", queue=QUEUE)
    async def good(args: dict[str, Any]) -> str:
        return "ran"

    class Orders(da.Machine[Order], name="order", queue=QUEUE):
        @da.step
        async def start(self, ctx: da.Context[Order]) -> da.Outcome:
            return da.Done("ran")

        @da.step
        async def again(self, ctx: da.Context[Order]) -> da.Outcome:
            return da.Retry(delay=1000)

        @da.step
        async def on(self, ctx: da.Context[Order]) -> da.Outcome:
            return da.Next(self.start)

        @da.step
        async def park(self, ctx: da.Context[Order]) -> da.Outcome:
            return da.Await("go", then=self.start)

        @da.step
        async def split(self, ctx: da.Context[Order]) -> da.Outcome:
            return da.ScheduleChildren(self.start, [da.Child(good, args={})])

        @da.step
        async def inbox(self, ctx: da.Context[Order]) -> da.Outcome:
            return da.Done([[signal.name, str(signal.payload)[:20]] for signal in ctx.signals])

    class Free(da.Machine, name="free", queue=QUEUE):
        @da.step
        async def start(self, ctx: da.Context[Any]) -> da.Outcome:
            return da.Done("ran")

    @da.job(name="typed job", queue=QUEUE)
    async def typed(args: Order) -> str:
        return "ran"

    return good


# -- rows


def add(conn: psycopg.Connection[Any], table: str = "gen_durable", /, **columns: Any) -> int:
    """A row by hand."""
    query = sql.SQL("insert into durable.{} ({}) overriding system value values ({}) returning id").format(
        sql.Identifier(table),
        sql.SQL(", ").join(map(sql.Identifier, columns)),
        sql.SQL(", ").join([sql.Placeholder()] * len(columns)),
    )
    row = conn.execute(query, list(columns.values())).fetchone()
    assert row is not None
    return int(row[0])


@asynccontextmanager
async def engine(dsn: str, **options: Any) -> AsyncIterator[da.Engine]:
    """One that looks often: what a hand wrote is found by polls, sweeps and the reaper alone."""
    quick = {"poll_interval": 0.05, "max_poll_interval": 0.05, "reap_interval": 0.05, "node": "test"}
    async with da.open_engine(**{"dsn": dsn, **quick, **options}) as found:
        yield found


def scars(running: da.Engine) -> list[str]:
    """Actors that died, and step tasks that ended by a bug of ours: there must be none."""
    return [
        f"{node.name}: {node.restarts} restarts, {node.last_error}, {node.pool}"
        for node in running.snapshot().walk()
        if node.restarts or node.last_error or (node.pool is not None and node.pool.failed)
    ]
