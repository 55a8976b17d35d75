"""The lanes of a node's connection pool, and which role uses which. Pure."""

from __future__ import annotations

from typing import Final

from durable_actors._postgres.pool.lane import Lane
from durable_actors._postgres.pool.lock_retry import CLIENT_SETTINGS, MAX_WAITING_CALLS, SHORT_LOCK_TIMEOUT

# Postgres's statistics of a queue table are outdated within a minute: "almost no row is executing", "the table is
# empty". Generic plans with index paths are always right (docs/explanation/performance.md).
_PLANS: Final = {
    "plan_cache_mode": "force_generic_plan",
    "enable_seqscan": "off",
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
    "jit": "off",
}

_CLAIMS: Final = {"enable_bitmapscan": "off"}
"""For lanes that clients do not use: listings by tags need bitmaps. A pick asks of each key whether an earlier sibling
waits, and a commit offers the first held row of a key. A bitmap scan does not mark the index entries of ended siblings
as dead, so every pick would read all of them again until the next vacuum; an index scan marks them. And it reads all
held rows of a key to sort them, where an index scan stops at the first."""

MAX_KEYED_CALLS: Final = 16
"""Calls of `execute_next` on one client that may run a step with a partition key at the same time. Each has a session
of its own."""
SHORTEST_PATIENCE: Final = 5.0
SHORTEST_BEAT: Final = 2.0
"""Seconds that the heartbeat waits for an answer, at least."""


def answer_patience(lease_ttl: float) -> float:
    """Seconds for which the engine waits for the answer to a statement. Pure.

    Half a lease; not less than what a loaded server may take. One connection may fall silent while the others work (a
    firewall dropped it): without a limit the leases would be renewed for ever, and nothing committed or picked.
    """
    return max(lease_ttl / 2, SHORTEST_PATIENCE)


def lanes(pool_size: int, *, session_dsn: str | None, keepalive: float) -> dict[str, Lane]:
    """Divide the node's connections into lanes, and assign a lane to each role. Pure.

    Session locks and heartbeats always have a connection of their own; so have commits, then claims, if the pool is
    large enough. Clients and maintenance use the rest.
    """
    patience = answer_patience(keepalive)
    # A statement that waits for a lock here would delay the renewal of every lease: see the heartbeat.
    beats = _PLANS | SHORT_LOCK_TIMEOUT
    heartbeat = Lane("heartbeat", 1, settings=beats, answer_within=max(keepalive / 2, SHORTEST_BEAT))
    found = {
        "session": Lane("session", 1, settings=_session_settings(keepalive), dsn=session_dsn),
        "heartbeat": heartbeat,
    }
    idle = _idle_settings(keepalive)
    # A row that a caller's open transaction has locked must delay nothing else: see the flusher, and `lock_retry`.
    both = _PLANS | SHORT_LOCK_TIMEOUT | idle
    shared = Lane("shared", 1, settings=both, max_waiting=MAX_WAITING_CALLS, answer_within=patience)
    rest = pool_size - 2
    commit = Lane("commit", 1, settings=both | _CLAIMS, answer_within=patience)
    found["commit"] = commit if rest > 1 else shared
    # The picks of all queues share this lane: no statement there may wait for a lock either.
    found["claim"] = Lane("claim", 1, settings=both | _CLAIMS, answer_within=patience) if rest > 2 else shared
    found["client"] = (
        Lane("client", rest - 2, settings=CLIENT_SETTINGS | idle, max_waiting=MAX_WAITING_CALLS)
        if rest > 2
        else shared
    )
    return found


def client_lanes(pool_size: int, *, session_dsn: str | None, keepalive: float) -> dict[str, Lane]:
    """The lanes of a client without an engine. Pure.

    Its calls have `pool_size` connections. `execute_next` opens others when it is first called: two for its own
    statements, and one for each step with a partition key while that runs.
    """
    settings = _PLANS | _CLAIMS | SHORT_LOCK_TIMEOUT | _idle_settings(keepalive)
    patience = answer_patience(keepalive)
    work = Lane("work", 2, settings=settings, max_waiting=MAX_WAITING_CALLS, answer_within=patience)
    return {
        "session": call_sessions(session_dsn=session_dsn, keepalive=keepalive),
        "heartbeat": work,
        "commit": work,
        "claim": work,
        "client": Lane("client", pool_size, settings=CLIENT_SETTINGS, max_waiting=MAX_WAITING_CALLS),
    }


def call_sessions(*, session_dsn: str | None, keepalive: float) -> Lane:
    """The sessions of calls of `execute_next` that run a step with a partition key. Pure."""
    settings = _session_settings(keepalive)
    return Lane("call sessions", MAX_KEYED_CALLS, settings=settings, dsn=session_dsn)


def _session_settings(keepalive: float) -> dict[str, str]:
    keep = str(max(1, int(keepalive / 4)))
    return {"tcp_keepalives_idle": keep, "tcp_keepalives_interval": keep, "tcp_keepalives_count": "2"}


def _idle_settings(keepalive: float) -> dict[str, str]:
    """A process that is stopped (SIGSTOP) in a transaction must not lock its rows for longer than its lease.

    No reaper could take them back.
    """
    return {"idle_in_transaction_session_timeout": str(max(1, int(keepalive * 500)))}
