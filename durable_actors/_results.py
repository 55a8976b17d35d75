"""Waiting for results: one watcher for all waiters of a client, whoever of them happens to lead.

No background task: the first waiter polls for everybody, and passes the lead on when it has its own answer or goes.
A hint (an instance ended in this very process) makes it look at once; polling is the floor.
"""

from __future__ import annotations

from typing import Final as Constant

import trio

from durable_actors._postgres.pool import Pool
from durable_actors._store.read import Final, read_finals
from durable_actors.errors import NoTarget, StoreUnavailable

FIRST_LOOK: Constant = 0.01
SLOWEST_LOOK: Constant = 0.25
PATIENCE: Constant = 30.0
"""Seconds that the store may be away before a waiter without a timeout is told."""


class _Waiter:
    __slots__ = ("event", "final", "missing", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self.event = trio.Event()
        self.final: Final | None = None
        self.missing = False

    def settled(self) -> bool:
        return self.final is not None or self.missing


class ResultWatch:
    """The waiters of one client."""

    def __init__(self, pool: Pool, lane: str, schema: str) -> None:
        self._pool = pool
        self._lane = lane
        self._schema = schema
        self._waiters: set[_Waiter] = set()
        self._led = False
        self._hint = trio.Event()

    def hint(self, number: int) -> None:
        """An instance ended here. Costs one test when nobody waits."""
        if self._waiters and any(waiter.number == number for waiter in self._waiters):
            self._hint.set()

    async def wait(self, number: int) -> Final:
        """Wait until the instance has ended. `NoTarget` when it does not exist. Cancelled: nothing is left behind."""
        waiter = _Waiter(number)
        self._waiters.add(waiter)
        self._hint.set()  # the leader, if there is one, looks for this one, too
        try:
            while not waiter.settled():
                if self._led:
                    await waiter.event.wait()
                    waiter.event = trio.Event()
                else:
                    await self._lead(waiter)
        finally:
            self._waiters.discard(waiter)
        if waiter.final is None:
            raise NoTarget(f"there is no instance {number}")
        return waiter.final

    async def _lead(self, own: _Waiter) -> None:
        self._led = True
        pause = FIRST_LOOK
        away_since: float | None = None
        try:
            while not own.settled():
                self._hint = trio.Event()
                try:
                    found = await self._look()
                    away_since = None
                except StoreUnavailable:
                    now = trio.current_time()
                    away_since = now if away_since is None else away_since
                    if now - away_since > PATIENCE:
                        raise
                    found = False
                pause = FIRST_LOOK if found else min(pause * 1.5, SLOWEST_LOOK)
                if not own.settled():
                    with trio.move_on_after(pause):
                        await self._hint.wait()
        finally:
            self._led = False
            for waiter in self._waiters:
                if waiter is not own:
                    waiter.event.set()  # one of them leads, the others go on waiting
                    break

    async def _look(self) -> bool:
        """Read the rows of everybody who waits; tell whether somebody has an answer."""
        waiters = list(self._waiters)
        async with self._pool.acquire(self._lane) as conn:
            finals, missing = await read_finals(conn, self._schema, sorted({each.number for each in waiters}))
        for waiter in waiters:
            waiter.final = finals.get(waiter.number)
            waiter.missing = waiter.number in missing
            if waiter.settled():
                waiter.event.set()
        return bool(finals or missing)
