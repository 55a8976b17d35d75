"""Batched reads: many tasks ask for one key each, and one statement answers all of them.

There is no actor and no delay: the first task that asks reads for all tasks that have asked so far. A task that asks
during a read is in the next batch. A task that exits, answered or cancelled, wakes the next one to read.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Generic, TypeVar

import trio

K = TypeVar("K")
V = TypeVar("V")


class _Ask(Generic[K, V]):
    __slots__ = ("answer", "done", "error", "gone", "key", "turn")

    def __init__(self, key: K) -> None:
        self.key = key
        self.turn = trio.Event()
        """Set when the request is answered, and when its task is to read."""
        self.done = False
        self.gone = False
        self.answer: V | None = None
        self.error: Exception | None = None

    def settle(self, answer: V | None, error: Exception | None) -> None:
        self.answer, self.error, self.done = answer, error, True
        self.turn.set()


class Batched(Generic[K, V]):
    """`await batched.get(key)` with `fetch(keys)` behind it; every key must get an answer."""

    def __init__(self, fetch: Callable[[list[K]], Awaitable[Mapping[K, V]]], *, limit: int = 500) -> None:
        self._fetch = fetch
        self._limit = limit
        self._asks: list[_Ask[K, V]] = []
        self._reading = False

    async def get(self, key: K) -> V:
        """The answer for this key. If `fetch` raises, every task of the batch gets the error."""
        ask: _Ask[K, V] = _Ask(key)
        self._asks.append(ask)
        try:
            while not ask.done:
                if self._reading:
                    ask.turn = trio.Event()
                    await ask.turn.wait()
                else:
                    await self._read()
        finally:
            ask.gone = True
            if not ask.done and ask in self._asks:
                self._asks.remove(ask)
            # Also if this task was woken to read and is cancelled: otherwise the others would wait for ever.
            if not self._reading and self._asks:
                self._asks[0].turn.set()
        if ask.error is not None:
            raise ask.error
        return ask.answer  # type: ignore[return-value] # settled without an error

    async def _read(self) -> None:
        """Read the next batch. Cancelled: its requests stay."""
        self._reading = True
        batch, self._asks = self._asks[: self._limit], self._asks[self._limit :]
        try:
            answers = await self._fetch([ask.key for ask in batch])
        except Exception as exc:  # noqa: BLE001 - raised in every task of the batch
            for ask in batch:
                ask.settle(None, exc)
        except BaseException:
            # Drop the requests of tasks that were cancelled meanwhile: they cannot read.
            self._asks = [ask for ask in batch if not ask.gone] + self._asks
            raise
        else:
            for ask in batch:
                ask.settle(answers[ask.key], None)
        finally:
            self._reading = False
