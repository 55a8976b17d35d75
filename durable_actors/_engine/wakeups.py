"""`Wakeups`: the instances that this process made runnable and of which the notifier is still to be told. Sans-I/O.

It stands between the parts that commit and the notifier's actor, and outlives the actor. Nobody waits for it: what does
not fit is dropped and counted, because a wake-up that is lost does no harm. Polling is the floor.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable
from typing import Final

import attrs

from durable_actors.config import Notifier
from durable_actors.otp import Address
from durable_actors.telemetry import NotifierFailed, Telemetry, WakeupsDropped

logger: Final = logging.getLogger("durable_actors.notifier")

MAX_WAITING: Final = 10_000
"""Instances that wait for the notifier. A slow one is behind by this much, and tells no more."""


@attrs.frozen(kw_only=True)
class NotifierStatistics:
    """What became of the wake-ups of one engine or client."""

    told: int = 0
    """The notifier returned."""
    failed: int = 0
    """It raised, took too long, or was not an async function."""
    dropped: int = 0
    """It was too slow and too many waited, or the engine or client was closed before."""
    waiting: int = 0


class Wakeups:
    """What is to be told, once per instance, in the order in which it came; and what became of it."""

    def __init__(self, notifier: Notifier, telemetry: Telemetry | None = None) -> None:
        self.notifier: Final = notifier
        """User code."""
        self.address: Final[Address[object]] = Address("notifier", capacity=1)
        """The notifier's mailbox: a message says that something waits."""
        self.telemetry: Final = telemetry or Telemetry()
        self._waiting: dict[int, None] = {}
        self._told = self._failed = self._dropped = 0
        self._closed = False

    def add(self, numbers: Iterable[int]) -> None:
        """These rows became runnable by a commit of this process, or may have: the notifier reads them first."""
        waiting, over = self._waiting, 0
        most = 0 if self._closed else MAX_WAITING
        for number in numbers:
            if len(waiting) < most or number in waiting:
                waiting[number] = None
            else:
                over += 1
        if over:
            self.drop(over, "too many wait for the notifier")
        if waiting:
            self.address.cast(None)

    def take(self, most: int) -> list[int]:
        """The first `most` of them."""
        taken = [number for number, _ in zip(self._waiting, range(most), strict=False)]
        for number in taken:
            del self._waiting[number]
        return taken

    def put_back(self, numbers: list[int]) -> None:
        """These could not be read: they are the first again."""
        self._waiting = dict.fromkeys(numbers) | self._waiting

    def told(self) -> None:
        """The notifier returned."""
        self._told += 1

    def failed(self, number: int, queue: str, error: BaseException) -> None:
        """It did not. The first failure is a WARNING, the others are events only."""
        self._failed += 1
        with contextlib.suppress(Exception):  # a user's log handler
            if self._failed == 1:
                logger.warning(
                    "the notifier failed for instance %d of queue %r. Nothing else is affected: workers find "
                    "the instance by polling. This is logged once; telemetry.NotifierFailed counts",
                    number,
                    queue,
                    exc_info=error,
                )
            else:
                logger.debug("the notifier failed for instance %d: %r", number, error)
        if self.telemetry.active:
            self.telemetry.emit(NotifierFailed(id=number, queue=queue, error=error, count=self._failed))

    def drop(self, count: int, why: str) -> None:
        """So many are not told. The first time is a WARNING."""
        first, self._dropped = not self._dropped, self._dropped + count
        with contextlib.suppress(Exception):
            logger.log(
                logging.WARNING if first else logging.DEBUG, "%d wake-ups are not told: %s", count, why
            )
        if self.telemetry.active:
            self.telemetry.emit(WakeupsDropped(dropped=count, count=self._dropped))

    def close(self) -> None:
        """Nobody tells what is left, or comes from now on."""
        self._closed = True
        left = self.take(len(self._waiting))
        if left:
            self.drop(len(left), "the engine or client was closed")

    def statistics(self) -> NotifierStatistics:
        """What became of them so far."""
        return NotifierStatistics(
            told=self._told, failed=self._failed, dropped=self._dropped, waiting=len(self._waiting)
        )
