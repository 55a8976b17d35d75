"""Events about the engine itself rather than about instances: its actors, mailboxes and connections."""

from __future__ import annotations

from collections.abc import Mapping

import attrs


@attrs.frozen(kw_only=True)
class ActorRestarted:
    """A child of the engine's supervision tree ended, and its supervisor starts it again."""

    actor: str
    """What it is: "feeder", "flusher", "heartbeat"; the feeders of all queues are one."""
    path: str
    """Where it is in the tree, as `Engine.snapshot` shows it."""
    delay: float
    """Seconds until it starts."""


@attrs.frozen(kw_only=True)
class LaneMeasured:
    """One lane of the connection pool, as part of `EngineMeasured`."""

    lane: str
    size: int
    """How many connections it may have."""
    in_use: int
    idle: int
    """Open and unused."""
    waiting: int
    """Tasks that wait for a connection."""
    timeouts: int
    """Tasks that waited in vain since the event before."""


@attrs.frozen(kw_only=True)
class EngineMeasured:
    """The mailboxes and connections of an engine. About every ten seconds, while somebody listens."""

    mailboxes: Mapping[str, int]
    """Kind of actor → messages that wait in its mailbox: of several feeders, in the fullest."""
    lanes: tuple[LaneMeasured, ...]
    janitor_lag: float | None
    """Seconds since the janitor last deleted all that was due; None if this node deletes nothing."""
