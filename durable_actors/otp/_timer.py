"""`periodic`: ticks on a fixed grid."""

from __future__ import annotations

import math

import trio

from durable_actors.otp._errors import SpecError


class periodic:  # noqa: N801 - used like a function
    """Tick every `period` seconds: ``async for tick in periodic(1.0)``.

    The first tick comes at once, and tick n at start + n x period, however long the body takes: the ticks do not
    drift. Ticks that pass while the body runs are skipped; the value of the loop variable is the number of the
    tick (0, 1, 2, …), so the body can see the gap.

    (`trio_util.periodic` measures each period from the last wake-up, so it drifts with every delay, and an overrun
    moves the whole grid.)
    """

    __slots__ = ("_next", "_period", "_start")

    def __init__(self, period: float) -> None:
        if not 0 < period < math.inf:
            raise SpecError(f"period must be positive, not {period!r}")
        self._period = period
        self._start = -1.0
        self._next = 0

    def __aiter__(self) -> periodic:
        return self

    async def __anext__(self) -> int:
        now = trio.current_time()
        if self._next == 0:
            self._start = now
        await trio.sleep_until(self._start + self._next * self._period)
        behind = math.floor((trio.current_time() - self._start) / self._period)
        tick = max(self._next, behind)
        self._next = tick + 1
        return tick
