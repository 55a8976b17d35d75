"""Whether the store can be reached, as all actors of one node see it together: so that an outage is told once."""

from __future__ import annotations


class StoreHealth:
    """Who cannot reach the store now, and since when nobody or somebody could. Synchronous; time is an argument."""

    __slots__ = ("_failing", "_since")

    def __init__(self) -> None:
        self._failing: set[str] = set()
        self._since: float | None = None

    def failed(self, actor: str, now: float) -> bool:
        """Note that an actor cannot reach it. True: it is the first one, and an outage begins."""
        self._failing.add(actor)
        if self._since is not None:
            return False
        self._since = now
        return True

    def forget(self, actor: str) -> None:
        """An actor is gone, or a new one has its name: what it saw counts no more."""
        self._failing.discard(actor)

    def works(self, actor: str, now: float) -> float | None:
        """Note that an actor reaches it. The outage's seconds, if this ends one: nobody is left who cannot."""
        self._failing.discard(actor)
        if self._since is None or self._failing:
            return None
        seconds, self._since = now - self._since, None
        return seconds

    @property
    def away(self) -> bool:
        """Whether an outage is under way."""
        return self._since is not None
