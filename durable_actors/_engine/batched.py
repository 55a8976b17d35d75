"""Batched reads: many tasks ask for one thing each, one statement answers them all.

No actor and no lingering: the first task that asks reads for everybody who has asked until then; who asks meanwhile is
in the next batch. A reader that is cancelled passes its turn on.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Generic, TypeVar

import trio

K = TypeVar("K")
V = TypeVar("V")


class _Ask(Generic[K, V]):
    __slots__ = ("answer", "error", "event", "key")

    def __init__(self, key: K) -> None:
        self.key = key
        self.event = trio.Event()
        self.answer: V | None = None
        self.error: Exception | None = None


class Batched(Generic[K, V]):
    """`await batched.get(key)` with `fetch(keys)` behind it; every key must get an answer."""

    def __init__(self, fetch: Callable[[list[K]], Awaitable[Mapping[K, V]]], *, limit: int = 500) -> None:
        self._fetch = fetch
        self._limit = limit
        self._asks: list[_Ask[K, V]] = []
        self._reading = False

    async def get(self, key: K) -> V:
        """The answer for this key. What `fetch` raises is raised to all of its batch. Cancelled: nothing is left."""
        ask: _Ask[K, V] = _Ask(key)
        self._asks.append(ask)
        try:
            while not ask.event.is_set():
                if self._reading:
                    await ask.event.wait()
                    if ask.answer is None and ask.error is None:
                        ask.event = trio.Event()  # woken to read
                else:
                    await self._read()
        finally:
            if ask in self._asks:
                self._asks.remove(ask)
        if ask.error is not None:
            raise ask.error
        assert ask.answer is not None
        return ask.answer

    async def _read(self) -> None:
        self._reading = True
        batch, self._asks = self._asks[: self._limit], self._asks[self._limit :]
        try:
            try:
                answers = await self._fetch([ask.key for ask in batch])
            except trio.Cancelled:
                self._asks = batch + self._asks
                raise
            except Exception as exc:  # noqa: BLE001 - it is everybody's in the batch, and raised there
                for ask in batch:
                    ask.error = exc
                    ask.event.set()
            else:
                for ask in batch:
                    ask.answer = answers[ask.key]
                    ask.event.set()
        finally:
            self._reading = False
            if self._asks:
                self._asks[0].event.set()
