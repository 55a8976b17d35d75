"""Which nodes are proved dead, and when to look again. Pure: looks in, verdicts out; time is an argument.

Every incarnation of a node holds a session lock on its name for as long as it lives. A claim whose lease is not over
may be taken from its owner only when

* the lock was seen free on two looks at least `dead_after` apart, and never held in between;
* both looks came from one server session: a server that crashed or failed over frees all locks at once, and ends the
  session, too;
* the server has been up for longer than `dead_after`, so that everybody had the time to come back;
* nothing of the owner moved in between: one that claims or renews lives, whatever became of its lock (its way to the
  server for session locks may be cut). A node that holds claims renews some of them every `dead_after` / 3 seconds
  (`heartbeat.pulse_interval`), so that this is evidence also where heartbeats are further apart than `dead_after`;
* it is not ourselves.

In every other case the lease decides. `dead_after` should be the same on all nodes: whoever has a smaller one than the
node that it looks at may look between two signs of life.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import attrs

from durable_actors._store.lease import OwnerState

HAIR: Final = 0.01
"""Seconds after a lease's end: then the server agrees that it is over."""
LOCKED_AGAIN: Final = 0.25
"""Seconds until another attempt at expired claims whose rows were locked."""


@attrs.frozen
class Suspect:
    """A node whose lock was seen free."""

    since: float
    """When first, on Trio's clock."""
    latest_expiry: float
    """The end of its last lease, as seen then."""


@attrs.frozen
class Watch:
    """What earlier looks have shown."""

    session: object = None
    """Which server session looked."""
    suspects: Mapping[str, Suspect] = attrs.field(factory=dict[str, Suspect])


@attrs.frozen
class Verdict:
    """What a look has shown."""

    watch: Watch
    dead: tuple[str, ...]
    """Owners that are proved dead."""
    next_look: float | None
    """When, on Trio's clock, the next suspect may be proved dead."""


def judge_owners(
    watch: Watch,
    owners: Sequence[OwnerState],
    *,
    me: str,
    session: object,
    asked: float,
    seen: float,
    dead_after: float,
) -> Verdict:
    """Judge by what was seen just now and by what is remembered.

    `session` tells one server session from the next. `asked` and `seen`, on Trio's clock, are from before and after
    the look: what it shows was true at some moment in between.
    """
    known: Mapping[str, Suspect] = watch.suspects if watch.session == session else dict[str, Suspect]()
    suspects: dict[str, Suspect] = {}
    dead: list[str] = []
    looks: list[float] = []
    for each in owners:
        if each.alive or each.owner == me:
            continue
        suspect = known.get(each.owner)
        if suspect is None or each.latest_expiry > suspect.latest_expiry:
            suspect = Suspect(seen, each.latest_expiry)
        suspects[each.owner] = suspect
        if asked - suspect.since >= dead_after and each.server_up > dead_after:
            dead.append(each.owner)
            looks.append(seen + LOCKED_AGAIN)  # should some of its rows be locked now
        else:
            looks.append(max(suspect.since + dead_after, seen + dead_after - each.server_up + HAIR))
    return Verdict(Watch(session, suspects), tuple(sorted(dead)), min(looks, default=None))


def wait_for_next(
    owners: Sequence[OwnerState],
    *,
    next_look: float | None,
    now: float,
    reap_interval: float,
) -> float:
    """Seconds to sleep after a look that left nothing to reap, or whose expired rows were locked."""
    wait = reap_interval
    for each in owners:
        wait = min(wait, each.soonest_expiry + HAIR if each.soonest_expiry > 0 else LOCKED_AGAIN)
    if next_look is not None:
        wait = min(wait, next_look - now)
    return max(wait, HAIR)
