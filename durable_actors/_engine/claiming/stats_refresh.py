"""StatsRefresh: when a feeder reads the statistics of its queue after a pick. Sans-I/O; time is an argument.

Reading them (`read_queue.sql`) walks dead index entries, so an expensive refresh is not repeated at once. Its price can
be measured only when nothing else runs on the loop: claims of the pick start before the refresh, and their CPU time
must not be mistaken for the server's.
"""

from __future__ import annotations

from typing import Final

REFRESH_INTERVAL: Final = 2.0
"""Seconds between refreshes of a busy queue; an idle one refreshes whenever it finds nothing."""
CHEAP_REFRESH: Final = 0.02
"""A refresh that took less than so many seconds may be repeated at once."""
REFRESH_SHARE: Final = 20.0
"""Of other refreshes, a busy feeder spends at most one part in so many of its time on them."""
MAX_REFRESH_PAUSE: Final = 2.0


def refresh_pause(seconds: float) -> float:
    """Seconds from one refresh to the next, the first having taken so long.

    When nothing can remove dead index entries (an old transaction, a backup) there may be a million of them, and a busy
    feeder would walk them after every short pick.
    """
    return 0.0 if seconds < CHEAP_REFRESH else min(seconds * REFRESH_SHARE, MAX_REFRESH_PAUSE)


class StatsRefresh:
    """When to read the queue's statistics after a pick."""

    __slots__ = ("_due", "_requests", "last_was_slow", "not_before", "postponed")

    def __init__(self) -> None:
        self.postponed = False
        """The last pick wanted a refresh, and it was too soon for one."""
        self.last_was_slow = False
        """The last one, or what ran beside it, took long: the next one is made before claims start."""
        self.not_before = 0.0
        """Too soon until then for a refresh after a short pick."""
        self._requests = 0
        self._due = 0.0

    def request(self) -> None:
        """Refresh after the next pick, whatever it finds."""
        self._due = 0.0
        self._requests += 1

    def wanted(self, now: float, *, short: bool) -> bool:
        """After a pick: refresh now? `short`: it found less than it wanted."""
        self.postponed = short and now < min(self.not_before, self._due)
        return now >= self._due or (short and not self.postponed)

    def begin(self) -> int:
        """What to give to `done` with the answer."""
        return self._requests

    def done(self, begun: int, now: float) -> None:
        """The answer is there. It does not show what caused a request while it was on its way."""
        self._due = now + REFRESH_INTERVAL if begun == self._requests else 0.0
        # Else an idle feeder would wake at once, again and again, for a refresh that has been made.
        self.postponed = False

    def took(self, began: float, seconds: float, *, alone: bool) -> None:
        """A refresh after a pick took so long; `alone`: no claim had started beside it."""
        if alone:
            self.not_before = began + refresh_pause(seconds)
        self.last_was_slow = seconds >= CHEAP_REFRESH
