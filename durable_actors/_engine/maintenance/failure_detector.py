"""Which nodes are proved dead, and when to look again. Pure: observations in, verdicts out; time is an argument.

Every incarnation of a node holds a session lock on its name while it lives. A reaper may take a claim whose lease has
not expired only if all of this holds:

* Two looks at least `dead_after` apart found the lock free, and no look between them found it held.
* Both looks came from one server session: a server that crashes or fails over frees all locks at once, and ends the
  session, too.
* The server has been up for longer than `dead_after`, so every node had time to reconnect.
* The owner's leases did not move in between: a node that claims or renews is alive, even if it lost its lock (its
  route to the server for session locks may be cut). A node with claims renews some of them every `dead_after` / 3
  seconds (`heartbeat.pulse_interval`), so this is evidence even if heartbeats are further apart than `dead_after`.
* The owner is another node, and not a runner (`claim_next`): that has no session, and renews when it likes.

In every other case the lease decides. `dead_after` should be the same on all nodes: a node with a smaller value than
the node that it observes may look twice between two signs of life.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import attrs

from durable_actors._store.lease import RUNNER, OwnerState

EXPIRY_MARGIN: Final = 0.01
"""Seconds to wait after a lease's end, so that it has ended on the server, too."""
LOCKED_ROW_PAUSE: Final = 0.25
"""Seconds until the next attempt at expired claims whose rows were locked."""


@attrs.frozen
class Suspect:
    """A node whose lock was found free."""

    since: float
    """When it was first found free, on Trio's clock."""
    latest_expiry: float
    """The end of its last lease at that time."""


@attrs.frozen
class SuspectLog:
    """What earlier looks have shown."""

    session: object = None
    """The server session of these looks."""
    suspects: Mapping[str, Suspect] = attrs.field(factory=dict[str, Suspect])


@attrs.frozen
class Judgement:
    """What a look has shown."""

    log: SuspectLog
    dead: tuple[str, ...]
    """Owners that are proved dead."""
    next_look: float | None
    """When, on Trio's clock, the next suspect may be proved dead."""


def judge_owners(
    log: SuspectLog,
    owners: Sequence[OwnerState],
    *,
    me: str,
    session: object,
    asked: float,
    seen: float,
    dead_after: float,
) -> Judgement:
    """Judge the owners by this look and the earlier ones.

    `session` identifies the server session. `asked` and `seen`, on Trio's clock, are the times before and after the
    look: what it shows was true at some moment in between.
    """
    known: Mapping[str, Suspect] = log.suspects if log.session == session else dict[str, Suspect]()
    suspects: dict[str, Suspect] = {}
    dead: list[str] = []
    looks: list[float] = []
    for each in owners:
        if each.alive or each.owner == me or each.owner.startswith(RUNNER):
            continue
        suspect = known.get(each.owner)
        if suspect is None or each.latest_expiry > suspect.latest_expiry:
            suspect = Suspect(seen, each.latest_expiry)
        suspects[each.owner] = suspect
        if asked - suspect.since >= dead_after and each.server_up > dead_after:
            dead.append(each.owner)
            looks.append(seen + LOCKED_ROW_PAUSE)  # some of its rows may be locked now
        else:
            looks.append(max(suspect.since + dead_after, seen + dead_after - each.server_up + EXPIRY_MARGIN))
    return Judgement(SuspectLog(session, suspects), tuple(sorted(dead)), min(looks, default=None))


def wait_for_next(
    owners: Sequence[OwnerState],
    *,
    next_look: float | None,
    now: float,
    reap_interval: float,
) -> float:
    """Seconds to sleep after a look: nothing more can be reaped now, because nothing has expired or rows are locked."""
    wait = reap_interval
    for each in owners:
        wait = min(wait, each.soonest_expiry + EXPIRY_MARGIN if each.soonest_expiry > 0 else LOCKED_ROW_PAUSE)
    if next_look is not None:
        wait = min(wait, next_look - now)
    return max(wait, EXPIRY_MARGIN)
