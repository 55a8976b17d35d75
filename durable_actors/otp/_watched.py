"""`Watched`: a wrapper around a coroutine that reports its first wait."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from types import FrameType
from typing import Any


class Watched:
    """An awaitable that runs a coroutine and calls `on_first_wait`, in the same task, when it first suspends.

    After that, `send` and `throw` go directly to the coroutine, so the wrapper adds no frame and no cost. Code that
    reads the task's stack (`trio.lowlevel.Task.iter_await_frames`) sees the coroutine's frame.
    """

    __slots__ = ("_coro", "_on_first_wait", "close", "send", "throw")

    def __init__(self, coro: Coroutine[Any, Any, Any], on_first_wait: Callable[[], None]) -> None:
        self._coro = coro
        self._on_first_wait = on_first_wait
        self.send = coro.send
        self.throw = coro.throw
        self.close = coro.close

    def __await__(self) -> Watched:
        return self

    def __iter__(self) -> Watched:
        return self

    def __next__(self) -> Any:
        trap = self._coro.send(None)  # StopIteration if it returns without waiting
        on_first_wait, self._on_first_wait = self._on_first_wait, _do_nothing
        try:
            on_first_wait()
        except BaseException:
            self._coro.close()  # it is never resumed
            raise
        return trap

    @property
    def cr_frame(self) -> FrameType | None:
        """The coroutine's frame, for `Task.iter_await_frames`."""
        frame: FrameType | None = getattr(self._coro, "cr_frame", None)
        return frame

    @property
    def cr_await(self) -> Any:
        """The object that the coroutine awaits."""
        return getattr(self._coro, "cr_await", None)


def _do_nothing() -> None:
    """Replace the callback after the first wait."""
