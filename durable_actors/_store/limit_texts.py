"""What `explain` says of an instance that waits for a limit. Pure."""

from __future__ import annotations

from datetime import datetime

import attrs

from durable_actors._store.explanation import Blocker
from durable_actors._wording import seconds


@attrs.frozen
class LimitSeen:
    """The limit that an instance waits for, or would wait for, as observe_instances.sql reads it."""

    name: str
    """Name and key."""
    known: bool
    """Whether it is defined."""
    slots: int | None
    """How many steps may have a slot at a time, if it waits for one."""
    next_in: float | None
    """Seconds until it is looked at again: the time of the next token."""
    next_at: datetime | None
    blocked: bool
    """A step has said that everybody has to wait (`RateLimited`)."""
    holders: tuple[int, ...]
    """Instances that have a slot, three at most."""
    free: bool = False
    """All its limits let it go: a pick that meets it claims it."""
    ahead: int | None = None
    """A throttled instance of its queue that goes first under this limit: nobody overtakes."""

    @property
    def until(self) -> datetime | None:
        """When it may run, if only the time of its own token is in its way; None: nobody can tell."""
        return self.next_at if self.known and self.slots is None and self.ahead is None else None


def throttled(limit: LimitSeen | None) -> tuple[str, list[Blocker]]:
    """One sentence, and what blocks the instance."""
    if limit is None:
        text = "it waits for a limit"
        return text, [Blocker(kind="limit", name="", text="a limit is used up")]
    if not limit.known:
        name = limit.name.partition(":")[0]
        text = f"it waits for the limit {limit.name!r}, and no node has declared {name!r}: Config(limits={{...}})"
        return text, [Blocker(kind="limit", name=limit.name, text="nobody has declared it")]
    first = "" if limit.ahead is None else f"; instance {limit.ahead} goes first"
    ahead = (
        []
        if limit.ahead is None
        else [Blocker(kind="instance", name=str(limit.ahead), text="it goes first", id=limit.ahead)]
    )
    if limit.slots is not None and not limit.blocked:
        ids = ", ".join(map(str, limit.holders))
        text = f"it waits for one of {limit.slots} slots of the limit {limit.name!r}{first}"
        holders = [
            Blocker(kind="instance", name=str(each), text="it has a slot", id=each) for each in limit.holders
        ]
        full = f"all {limit.slots} slots are taken, by instances {ids}" if ids else "a slot is free now"
        return text, [Blocker(kind="limit", name=limit.name, text=full), *holders, *ahead]
    when = "now" if limit.next_in is None or limit.next_in <= 0 else f"in {seconds(limit.next_in)}"
    why = "a step was told to wait by what it calls" if limit.blocked else "its tokens are spent"
    text = f"it waits for the limit {limit.name!r}: {why}, the next one may run {when}{first}"
    return text, [Blocker(kind="limit", name=limit.name, text=why), *ahead]
