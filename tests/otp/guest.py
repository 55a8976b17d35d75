"""Trio driven from synchronous code, so that Hypothesis can decide step by step."""

from __future__ import annotations

import queue
from collections.abc import Awaitable, Callable
from typing import Any

import outcome
import trio
from trio.testing import MockClock


class Guest:
    """A Trio run, in guest mode on the autojump clock, that does one thing at a time on request."""

    def __init__(self) -> None:
        self._ticks: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._result: outcome.Outcome[Any] | None = None
        self._end: outcome.Outcome[Any] | None = None
        self._orders: trio.MemorySendChannel[Callable[[], Awaitable[Any]]]
        self._token: trio.lowlevel.TrioToken | None = None
        trio.lowlevel.start_guest_run(
            self._main,
            run_sync_soon_threadsafe=self._ticks.put,
            done_callback=self._done,
            clock=MockClock(autojump_threshold=0),
        )
        self._pump(lambda: self._token is not None)

    async def _main(self) -> None:
        self._orders, orders = trio.open_memory_channel[Callable[[], Awaitable[Any]]](1)
        self._token = trio.lowlevel.current_trio_token()
        async for order in orders:
            self._result = await outcome.acapture(order)

    def _done(self, end: outcome.Outcome[Any]) -> None:
        self._end = end

    def _pump(self, until: Callable[[], bool]) -> None:
        while not until():
            self._ticks.get(timeout=30)()
            if self._end is not None:
                self._end.unwrap()

    def run(self, fn: Callable[..., Awaitable[Any]], *args: object) -> Any:
        """Run ``fn(*args)`` in Trio and return its result; other tasks go on meanwhile."""
        assert self._token is not None
        self._result = None
        self._token.run_sync_soon(self._orders.send_nowait, lambda: fn(*args))
        self._pump(lambda: self._result is not None)
        assert self._result is not None
        return self._result.unwrap()

    def close(self) -> None:
        assert self._token is not None
        self._token.run_sync_soon(self._orders.close)
        while self._end is None:
            self._ticks.get(timeout=30)()
        self._end.unwrap()
