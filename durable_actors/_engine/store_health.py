"""Whether the store can be reached, as seen by all actors of one node: so that an outage is logged once."""

from __future__ import annotations


class StoreHealth:
    """Which actors cannot reach the store now, and when the outage began. Synchronous; time is an argument."""

    __slots__ = ("_failing", "_since")

    def __init__(self) -> None:
        self._failing: set[str] = set()
        self._since: float | None = None

    def failed(self, actor: str, now: float) -> bool:
        """Note that an actor cannot reach the store. True: it is the first one, so an outage begins."""
        self._failing.add(actor)
        if self._since is not None:
            return False
        self._since = now
        return True

    def forget(self, actor: str) -> None:
        """An actor has ended, or a new one has its name: drop what it reported."""
        self._failing.discard(actor)

    def works(self, actor: str, now: float) -> float | None:
        """Note that an actor reaches the store. Returns the length of the outage if it was the last that could not."""
        self._failing.discard(actor)
        if self._since is None or self._failing:
            return None
        seconds, self._since = now - self._since, None
        return seconds

    @property
    def away(self) -> bool:
        """Whether an outage is under way."""
        return self._since is not None
