"""A coroutine that is watched until it waits for the first time."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from types import FrameType
from typing import Any


class Watched:
    """Awaiting it runs the coroutine; `waits` is called, in that task, when it first waits for something.

    It then steps aside: what it is sent goes straight to the coroutine, without a frame of its own. Whoever looks at
    the stack of the task (as `Task.iter_await_frames` of Trio does) sees the coroutine in its place.
    """

    __slots__ = ("_coro", "_waits", "close", "send", "throw")

    def __init__(self, coro: Coroutine[Any, Any, Any], waits: Callable[[], None]) -> None:
        self._coro = coro
        self._waits = waits
        self.send = coro.send
        self.throw = coro.throw
        self.close = coro.close

    def __await__(self) -> Watched:
        return self

    def __iter__(self) -> Watched:
        return self

    def __next__(self) -> Any:
        trap = self._coro.send(None)  # ended without waiting: StopIteration, which carries its value
        waits, self._waits = self._waits, _nothing
        try:
            waits()
        except BaseException:
            self._coro.close()  # nobody will ever resume it
            raise
        return trap

    @property
    def cr_frame(self) -> FrameType | None:
        """Where the coroutine is."""
        frame: FrameType | None = getattr(self._coro, "cr_frame", None)
        return frame

    @property
    def cr_await(self) -> Any:
        """What it waits for."""
        return getattr(self._coro, "cr_await", None)


def _nothing() -> None:
    """It has waited before."""
