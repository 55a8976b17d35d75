"""Batched reads: many tasks ask for one key each, and one statement answers all of them.

There is no actor and no delay: the first task that asks reads for all tasks that have asked so far. A task that asks
during a read is in the next batch. A task that exits, answered or cancelled, wakes the next one to read.

A batch that is refused is read again in halves: a key that cannot be read must not cost the others their answers.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Final, Generic, TypeVar

import trio

K = TypeVar("K")
V = TypeVar("V")

MAX_REFUSALS: Final = 32
"""Refusals of one batch, after which it is not halved any more: probably no key can be read now. One key that cannot be
read costs up to ten in a batch of 500.
"""


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

    def __init__(
        self,
        fetch: Callable[[list[K]], Awaitable[Mapping[K, V]]],
        *,
        limit: int = 500,
        split_on: type[Exception] | None = None,
    ) -> None:
        """`split_on`: an error that a single key may cause."""
        self._split_on = split_on
        self._fetch = fetch
        self._limit = limit
        self._asks: list[_Ask[K, V]] = []
        self._reading = False

    async def get(self, key: K) -> V:
        """The answer for this key. If `fetch` raises, every task of the batch gets the error, unless it is split."""
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
            await self._answer(batch)
        except BaseException:
            # Drop the requests of tasks that were cancelled meanwhile: they cannot read.
            self._asks = [ask for ask in batch if not (ask.gone or ask.done)] + self._asks
            raise
        finally:
            self._reading = False

    async def _answer(self, batch: list[_Ask[K, V]]) -> None:
        parts, refusals = [batch], 0
        while parts:
            part = [ask for ask in parts.pop() if not ask.gone]
            if not part:
                continue
            try:
                answers = await self._fetch([ask.key for ask in part])
            except Exception as exc:  # noqa: BLE001 - raised in the tasks that asked
                refusals += 1
                if len(part) > 1 and refusals < MAX_REFUSALS and self._may_split(exc):
                    half = len(part) // 2
                    parts += [part[half:], part[:half]]
                else:
                    for ask in part:
                        ask.settle(None, exc)
            else:
                for ask in part:
                    ask.settle(answers[ask.key], None)

    def _may_split(self, error: Exception) -> bool:
        return self._split_on is not None and isinstance(error, self._split_on)
