"""Waiting for results: one poll loop for all waiters of a client.

There is no background task: the first waiter becomes the leader and polls for all of them. When it has its own result
or is cancelled, the next waiter becomes the leader. A hint (an instance ended in this process) triggers a query at
once; without hints, the leader polls.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

import trio

from durable_actors._postgres.pool.pool import ConnectionPool
from durable_actors._store.read import Ending, read_finals
from durable_actors.errors import NoTarget, StoreUnavailable

MIN_POLL_INTERVAL: Final = 0.01
"""Seconds between polls at first, and after a result was found."""
MAX_POLL_INTERVAL: Final = 0.25
"""Seconds between polls while no instance ends."""
POLL_COST_FACTOR: Final = 5.0
"""The pause after a poll is at least its duration times this factor. A poll for 10,000 waiters takes about 50 ms."""
OUTAGE_TIMEOUT: Final = 30.0
"""Seconds for which Postgres may be unavailable before a waiter without a timeout gets `StoreUnavailable`."""
QUERY_TIMEOUT: Final = 10.0
"""Seconds for one query; then the connection counts as dead, and another one is used."""


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
    """All tasks that wait for results through one client."""

    def __init__(self, pool: ConnectionPool, lane: str, schema: str) -> None:
        self._pool = pool
        self._lane = lane
        self._schema = schema
        self._waiters: dict[int, set[_Waiter]] = {}
        self._led = False
        self._hinted: set[int] = set()
        self._hint = trio.Event()
        self._poll_at = 0.0  # when to query for all waiters
        self._away_since = math.inf
        self.runs_here: Callable[[int], bool] = lambda _: False
        """Whether the engine of this process runs an instance. If its row is gone, its result will be told."""

    def hint(self, number: int, ending: Ending | None = None) -> None:
        """An instance ended in this process. If a task waits for it, query at once.

        With its `ending`, which need not be in the database any more, there is nothing to query.
        """
        if number not in self._waiters:
            return
        if ending is None:
            self._hinted.add(number)
        else:
            for waiter in self._waiters[number]:
                waiter.final = ending
                waiter.event.set()
        self._hint.set()

    async def wait(self, number: int) -> Ending:
        """Wait until the instance has ended. Raises `NoTarget` if it does not exist."""
        waiter = _Waiter(number)
        self._waiters.setdefault(number, set()).add(waiter)
        self.hint(number)  # a leader queries for this one as well
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
        """Remove a waiter and wake the next leader, also if this waiter was woken to lead and then cancelled."""
        others = self._waiters[waiter.number]
        others.discard(waiter)
        if not others:
            del self._waiters[waiter.number]
        if not self._led and self._waiters:
            next(iter(next(iter(self._waiters.values())))).event.set()

    async def _lead(self, own: _Waiter) -> None:
        self._led = True
        pause = MIN_POLL_INTERVAL
        try:
            while not own.settled():
                began = trio.current_time()
                poll_all = began >= self._poll_at
                numbers = sorted(self._waiters if poll_all else self._hinted & self._waiters.keys())
                self._hinted.clear()
                self._hint = trio.Event()
                found = await self._query_through_outage(numbers, own)
                now = trio.current_time()
                if poll_all:
                    pause = MIN_POLL_INTERVAL if found else min(pause * 1.5, MAX_POLL_INTERVAL)
                    self._poll_at = now + max(pause, POLL_COST_FACTOR * (now - began))
                if not own.settled():
                    with trio.move_on_at(self._poll_at):
                        await self._hint.wait()
        finally:
            self._led = False

    async def _query_through_outage(self, numbers: list[int], own: _Waiter) -> bool:
        """Query; while Postgres is unavailable return False, for at most OUTAGE_TIMEOUT."""
        try:
            found = await self._query(numbers)
        except StoreUnavailable:
            now = trio.current_time()
            self._away_since = min(self._away_since, now)
            if self._pool.closed or now - max(self._away_since, own.since) > OUTAGE_TIMEOUT:
                raise
            self._poll_at = now  # the hints are lost, so query for all waiters next
            await trio.sleep(MIN_POLL_INTERVAL)
            return False
        self._away_since = math.inf
        return found

    async def _query(self, numbers: list[int]) -> bool:
        """Read these rows and wake the tasks that wait for them. Returns whether a result was found."""
        if not numbers:
            return False
        # Only the current waiters: one that arrives during the query may have inserted a row that the query misses.
        asked = {number: tuple(self._waiters[number]) for number in numbers}
        async with self._pool.acquire(self._lane, within=QUERY_TIMEOUT) as conn:
            finals, missing = await read_finals(conn, self._schema, numbers)
        # A commit may have deleted the row, and its verdict is on the way: see `hint`.
        missing = {number for number in missing if not self.runs_here(number)}
        for number in (*finals, *missing):
            for waiter in asked[number]:
                if waiter.settled():
                    continue  # told meanwhile
                waiter.final = finals.get(number)
                waiter.missing = number in missing
                waiter.event.set()
        return bool(finals or missing)
