"""The buffer of a dispatcher: claims that wait for a slot, most urgent first. Sans-I/O.

Claims that lack their partition key stand apart, so that whoever looks for the next claim never walks past them: while
the keys of a thousand picked claims were asked for, every step that ended looked at all of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator

from durable_actors._engine.claims import ActiveClaim
from durable_actors._store.rows import Claim


class ClaimBuffer:
    """BUFFERED claims of one queue. Of the same priority, those go first that had all they need first."""

    __slots__ = ("_lacking", "_owns", "startable")

    def __init__(self, owns: Callable[[Claim], bool]) -> None:
        self._owns = owns
        self.startable: deque[ActiveClaim] = deque()
        """Claims without a key, and those that had theirs when that was last looked at. Only read outside."""
        self._lacking: deque[ActiveClaim] = deque()  # with a key that is being taken, or is to be taken

    def __len__(self) -> int:
        return len(self.startable) + len(self._lacking)

    def __iter__(self) -> Iterator[ActiveClaim]:
        yield from self.startable
        yield from self._lacking

    def _may_start(self, active: ActiveClaim) -> bool:
        return active.claim.partition_key is None or self._owns(active.claim)

    @property
    def priority(self) -> int:
        """The priority of the most urgent claim. There must be one."""
        return min(part[0].claim.priority for part in (self.startable, self._lacking) if part)

    def add(self, added: Iterable[ActiveClaim], *, keyed: bool) -> None:
        """Claims in their order, the most urgent first; `keyed`: some of them have a key."""
        if not keyed:
            self._append(added)
            return
        startable: list[ActiveClaim] = []
        lacking: list[ActiveClaim] = []
        for active in added:
            (startable if self._may_start(active) else lacking).append(active)
        self._append(startable)
        self._lacking = _appended(self._lacking, lacking)

    def _append(self, added: Iterable[ActiveClaim]) -> None:
        self.startable = _appended(self.startable, added)

    def put_back(self, active: ActiveClaim) -> None:
        """It was popped, and could not start: it stays the first."""
        self.startable.appendleft(active)

    def sort_out(self) -> None:
        """Claims may have got their keys: from now on they may be popped."""
        if self._lacking:
            granted: list[ActiveClaim] = []
            lacking: deque[ActiveClaim] = deque()
            for active in self._lacking:
                (granted if self._owns(active.claim) else lacking).append(active)
            if granted:
                self._lacking = lacking
                self._append(granted)

    def pop_startable(self) -> ActiveClaim | None:
        """Remove the most urgent claim that has what it needs."""
        while self.startable:
            active = self.startable.popleft()
            if active.claim.partition_key is None or self._owns(active.claim):
                return active
            self._lacking = _appended(self._lacking, [active])  # its key went with the session
        return None

    def pop_last(self) -> ActiveClaim:
        """Remove the least urgent claim. There must be one."""
        startable, lacking = self.startable, self._lacking
        if not startable or (lacking and lacking[-1].claim.priority >= startable[-1].claim.priority):
            return lacking.pop()
        return startable.pop()

    def pop_first(self) -> ActiveClaim:
        """Remove the most urgent claim, whatever it lacks. There must be one."""
        startable, lacking = self.startable, self._lacking
        if not startable or (lacking and lacking[0].claim.priority < startable[0].claim.priority):
            return lacking.popleft()
        return startable.popleft()

    def without_key(self, *, lost: bool) -> list[ActiveClaim]:
        """Claims that lack their key; `lost`: some of those that had it may have lost it."""
        if lost:
            gone = [active for active in self.startable if not self._may_start(active)]
            if gone:
                self.remove(gone)
                self._lacking = _appended(self._lacking, gone)
        return [active for active in self._lacking if not self._owns(active.claim)]

    def remove(self, removed: Iterable[ActiveClaim]) -> None:
        """Remove these claims, which are here."""
        gone, before = set(removed), len(self)
        self.startable = deque([active for active in self.startable if active not in gone])
        self._lacking = deque([active for active in self._lacking if active not in gone])
        assert before - len(self) == len(gone)


def _appended(claims: deque[ActiveClaim], added: Iterable[ActiveClaim]) -> deque[ActiveClaim]:
    """Both, the most urgent first; `added` is in that order."""
    last = claims[-1].claim.priority if claims else None
    count = len(claims)
    claims.extend(added)
    if last is not None and len(claims) > count and claims[count].claim.priority < last:
        return deque(sorted(claims, key=lambda active: active.claim.priority))
    return claims
