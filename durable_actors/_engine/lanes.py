"""How a node's connections are shared out: which lane each role uses. Pure."""

from __future__ import annotations

from typing import Final

from durable_actors._postgres.pool.lane import Lane
from durable_actors._postgres.pool.lock_retry import CLIENT_SETTINGS, MAX_WAITING_CALLS, SHORT_LOCK_TIMEOUT

# The planner of a queue table: statistics say "almost no row is executing" or "the table is empty" and are right a
# minute later. Generic plans with index paths are right always (docs/explanation/performance.md).
_PLANS: Final = {
    "plan_cache_mode": "force_generic_plan",
    "enable_seqscan": "off",
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
    "jit": "off",
}

SHORTEST_PATIENCE: Final = 5.0
SHORTEST_BEAT: Final = 2.0
"""Seconds, of the patience with heartbeats."""


def answer_patience(lease_ttl: float) -> float:
    """Seconds for which the engine waits for an answer to what it asks. Pure.

    Half a lease; not less than what a loaded server may take. One connection may fall silent while the others work (a
    firewall forgot it): the leases would be renewed for ever, and nothing would be committed or picked.
    """
    return max(lease_ttl / 2, SHORTEST_PATIENCE)


def lanes(pool_size: int, *, session_dsn: str | None, keepalive: float) -> dict[str, Lane]:
    """Share the node's connections out: which lane each role uses. Pure.

    Session locks and heartbeats never share; then commits, then claims get a connection of their own; what is left
    is for clients and maintenance.
    """
    keep = max(1, int(keepalive / 4))
    patience = answer_patience(keepalive)
    session = {
        "tcp_keepalives_idle": str(keep),
        "tcp_keepalives_interval": str(keep),
        "tcp_keepalives_count": "2",
    }
    # Whoever waits for a lock here holds up the renewal of every lease: see the heartbeat.
    beats = _PLANS | SHORT_LOCK_TIMEOUT
    heartbeat = Lane("heartbeat", 1, settings=beats, answer_within=max(keepalive / 2, SHORTEST_BEAT))
    found = {
        "session": Lane("session", 1, settings=session, dsn=session_dsn),
        "heartbeat": heartbeat,
    }
    # A process that is stopped in the middle of a transaction must not hold its rows for longer than its lease: nobody
    # could take them back.
    idle = {"idle_in_transaction_session_timeout": str(max(1, int(keepalive * 500)))}
    # A row that a caller's open transaction has locked must hold up nobody else: see the flusher, and `patience`.
    both = _PLANS | SHORT_LOCK_TIMEOUT | idle
    shared = Lane("shared", 1, settings=both, max_waiting=MAX_WAITING_CALLS, answer_within=patience)
    rest = pool_size - 2
    commit = Lane("commit", 1, settings=both, answer_within=patience)
    found["commit"] = commit if rest > 1 else shared
    # Picks of all queues share it: nothing there may wait for a lock either.
    found["claim"] = Lane("claim", 1, settings=both, answer_within=patience) if rest > 2 else shared
    found["client"] = (
        Lane("client", rest - 2, settings=CLIENT_SETTINGS | idle, max_waiting=MAX_WAITING_CALLS)
        if rest > 2
        else shared
    )
    return found
