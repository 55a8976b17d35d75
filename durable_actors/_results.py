"""Waiting for results: one watcher for all waiters of a client, whoever of them happens to lead.

No background task: the first waiter polls for everybody, and passes the lead on when it has its own answer or goes.
A hint (an instance ended in this very process) makes it look at once; polling is the floor.
"""

from __future__ import annotations

import math
from typing import Final

import trio

from durable_actors._postgres.pool.pool import ConnectionPool
from durable_actors._store.read import Ending, read_finals
from durable_actors.errors import NoTarget, StoreUnavailable

FIRST_LOOK: Final = 0.01
SLOWEST_LOOK: Final = 0.25
LOOK_SHARE: Final = 5.0
"""A look at everybody may cost one part in so many: with 10,000 waiters it takes some 50 ms of this process."""
PATIENCE: Final = 30.0
"""Seconds that the store may be away before a waiter without a timeout is told."""

ANSWER: Final = 10.0
"""Seconds for one look; then the connection is taken for dead, and another one asked."""


class _Waiter:
    __slots__ = ("event", "final", "missing", "number", "since")

    def __init__(self, number: int) -> None:
        self.number = number
        self.since = trio.current_time()
        self.event = trio.Event()
        self.final: Ending | None = None
        self.missing = False

    def settled(self) -> bool:
        return self.final is not None or self.missing


class ResultWatch:
    """The waiters of one client."""

    def __init__(self, pool: ConnectionPool, lane: str, schema: str) -> None:
        self._pool = pool
        self._lane = lane
        self._schema = schema
        self._waiters: dict[int, set[_Waiter]] = {}
        self._led = False
        self._hinted: set[int] = set()
        self._hint = trio.Event()
        self._look_at = 0.0  # when to look for everybody
        self._away_since = math.inf

    def hint(self, number: int) -> None:
        """An instance ended here. Costs one test when nobody waits for it."""
        if number in self._waiters:
            self._hinted.add(number)
            self._hint.set()

    async def wait(self, number: int) -> Ending:
        """Wait until the instance has ended. `NoTarget` when it does not exist. Cancelled: nothing is left behind."""
        waiter = _Waiter(number)
        self._waiters.setdefault(number, set()).add(waiter)
        self.hint(number)  # the leader, if there is one, looks for this one, too
        try:
            while not waiter.settled():
                if self._led:
                    await waiter.event.wait()
                    waiter.event = trio.Event()
                else:
                    await self._lead(waiter)
        finally:
            self._leave(waiter)
        if waiter.final is None:
            raise NoTarget(f"there is no instance {number}")
        return waiter.final

    def _leave(self, waiter: _Waiter) -> None:
        """Go, and pass the lead on. Also who was woken to lead and is cancelled instead: the others wait for it."""
        others = self._waiters[waiter.number]
        others.discard(waiter)
        if not others:
            del self._waiters[waiter.number]
        if not self._led and self._waiters:
            next(iter(next(iter(self._waiters.values())))).event.set()

    async def _lead(self, own: _Waiter) -> None:
        self._led = True
        pause = FIRST_LOOK
        try:
            while not own.settled():
                began = trio.current_time()
                everybody = began >= self._look_at
                numbers = sorted(self._waiters if everybody else self._hinted & self._waiters.keys())
                self._hinted.clear()
                self._hint = trio.Event()
                found = await self._look_patiently(numbers, own)
                now = trio.current_time()
                if everybody:
                    pause = FIRST_LOOK if found else min(pause * 1.5, SLOWEST_LOOK)
                    self._look_at = now + max(pause, LOOK_SHARE * (now - began))
                if not own.settled():
                    with trio.move_on_at(self._look_at):
                        await self._hint.wait()
        finally:
            self._led = False

    async def _look_patiently(self, numbers: list[int], own: _Waiter) -> bool:
        """Look; while the store is away, nothing is found, until the leader's patience is over."""
        try:
            found = await self._look(numbers)
        except StoreUnavailable:
            now = trio.current_time()
            self._away_since = min(self._away_since, now)
            if self._pool.closed or now - max(self._away_since, own.since) > PATIENCE:
                raise
            self._look_at = now  # what was hinted is not forgotten: everybody is looked for next
            await trio.sleep(FIRST_LOOK)
            return False
        self._away_since = math.inf
        return found

    async def _look(self, numbers: list[int]) -> bool:
        """Read the rows of those who wait for these; tell whether somebody has an answer."""
        if not numbers:
            return False
        # Those who wait now: whoever comes while it is read may have inserted what is missing in it.
        asked = {number: tuple(self._waiters[number]) for number in numbers}
        async with self._pool.acquire(self._lane, within=ANSWER) as conn:
            finals, missing = await read_finals(conn, self._schema, numbers)
        for number in (*finals, *missing):
            for waiter in asked[number]:
                waiter.final = finals.get(number)
                waiter.missing = number in missing
                waiter.event.set()
        return bool(finals or missing)
