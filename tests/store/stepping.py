"""Two transactions of the store, statement by statement, in an order that the test chooses.

A `Stepped` connection stops before every statement and before the commit; `play` gives the turns. A turn of a side that
waits for a lock counts when it gets the lock: so every order can be played, and none hangs.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import psycopg
import trio
from durable_actors._postgres.driver.connection import PgConn
from durable_actors._postgres.driver.statement import Params, Result, Statement
from durable_actors._store.commit import commit_outcomes
from durable_actors._store.rows import Transition
from durable_actors._store.signal import Delivery, send_signals
from tests.store.kit import SCHEMA
from tests.support.interleave import Observer

Act = Callable[[Any], Awaitable[Any]]
"""What one side does, on the connection it is given."""

POLL = 0.002
PATIENT = Statement("patient", "set lock_timeout = 0")
"""A side may wait for the other's lock for several turns: longer than the engine's 100 ms on a busy machine."""


def deliver(
    target: int | str, name: str = "go", *, key: str | None = None, payload: bytes = b"{}"
) -> Delivery:
    """A signal by id or unique key."""
    if isinstance(target, str):
        return Delivery(None, target.encode(), name, payload, key)
    return Delivery(target, None, name, payload, key)


async def commit(conn: Any, *transitions: Transition) -> set[int]:
    """Commit outcomes; return who was committed."""
    return set((await commit_outcomes(conn, SCHEMA, transitions, accept_late=True)).committed)


def commits(*transitions: Transition) -> Act:
    """A side that commits outcomes."""
    return lambda conn: commit(conn, *transitions)


def sends(*deliveries: Delivery) -> Act:
    """A side that sends signals."""
    return lambda conn: send_signals(conn, SCHEMA, deliveries)


def orders(**turns: int) -> Iterable[str]:
    """Every order of so many turns of each side: `orders(a=2, b=1)` gives aab, aba, baa."""
    letters = "".join(name * count for name, count in turns.items())
    return sorted({"".join(order) for order in itertools.permutations(letters)})


class Stepped:
    """Stands in for a `PgConn` in store functions; counts every stop as one turn."""

    def __init__(self, conn: PgConn) -> None:
        self.conn = conn
        self.turns = trio.Semaphore(0)
        self.stopped = False
        self.over = False
        self.result: Any = None
        self.names: list[str] = []

    async def run(self, statement: Statement, params: Params = ()) -> Result:
        if self.conn.in_transaction:
            if statement.name != "will_tell":  # which touches no row
                await self._stop(statement.name)
            return await self.conn.run(statement, params)
        return (await self.batch([(statement, params)]))[0]

    async def batch(self, calls: Sequence[tuple[Statement, Params]]) -> list[Result]:
        async with self.transaction():
            return [await self.run(*call) for call in calls]

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[None]:
        async with self.conn.transaction():
            yield
            await self._stop("commit")

    async def _stop(self, name: str) -> None:
        self.stopped = True
        await self.turns.acquire()
        self.stopped = False
        self.names.append(name)


async def play(db: psycopg.Connection, order: str, sides: dict[str, tuple[PgConn, Act]]) -> dict[str, Any]:
    """Run the sides in this order; return what each of them returned. Turns beyond the order follow, side by side."""
    stepped = {name: Stepped(conn) for name, (conn, _) in sides.items()}
    observer = Observer(db)

    async def act(name: str) -> None:
        side = stepped[name]
        side.result = await sides[name][1](side)
        side.over = True

    def settled(side: Stepped) -> bool:
        at_rest = side.over or (side.stopped and side.turns.value == 0)
        return at_rest or bool(observer.blockers(side.conn.pid))

    with trio.fail_after(30):
        for conn, _ in sides.values():
            await conn.run(PATIENT)
        async with trio.open_nursery() as nursery:
            for name in sides:
                nursery.start_soon(act, name)
            for name in [*order, *(list(sides) * 8)]:
                while not settled(stepped[name]):
                    await trio.sleep(POLL)
                if not stepped[name].over:
                    stepped[name].stopped = False  # releasing wakes its task later, not now
                    stepped[name].turns.release()
                while not settled(stepped[name]):
                    await trio.sleep(POLL)
                if all(side.over for side in stepped.values()):
                    break
    return {name: side.result for name, side in stepped.items()}
