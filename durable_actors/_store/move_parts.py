"""What the moves of `moves.MOVES` have in common: statuses, columns and statements. Values only."""

from __future__ import annotations

from typing import Final

from durable_actors.machine import Status

NOBODY: Final[frozenset[Status]] = frozenset()
RUNNABLE: Final[frozenset[Status]] = frozenset({"runnable"})
EXECUTING: Final[frozenset[Status]] = frozenset({"executing"})
SIGNAL: Final[frozenset[Status]] = frozenset({"awaiting_signal"})
CHILDREN: Final[frozenset[Status]] = frozenset({"awaiting_children"})
LIVE: Final = RUNNABLE | EXECUTING | SIGNAL | CHILDREN
FAILED: Final[frozenset[Status]] = frozenset({"failed"})

CLAIM: Final = frozenset({"status", "hold", "locked_by", "lease_expires_at", "claim_id", "claim_token_hash"})
"""What a claim sets, and what taking it back clears."""
OUTCOME: Final = frozenset(
    {
        "status", "hold", "step", "state", "result", "attempt", "visit", "crashes", "round", "eligible_at",
        "last_error", "error_type", "traceback", "partition_key", "locked_by", "lease_expires_at", "awaits",
        "await_step", "await_deadline", "manual", "children_total", "children_pending", "wake_on_failure",
    }
)  # fmt: skip
"""What the commit of an outcome writes. The claim's id stays, so that a repeated commit is recognised."""
END: Final = OUTCOME | {"finished_at"}
"""What the commit of an outcome that ends the instance writes."""
WAKE: Final = frozenset({"status", "hold", "eligible_at", "step", "await_step", "await_deadline"})
"""What ends an await. A row that becomes runnable is held if it is paused (`durable.hold_of`)."""
FAULT: Final = frozenset({"finished_at", "last_error", "error_type", "traceback"})
"""What a failure without an outcome writes."""
COUNTS: Final = frozenset({"attempt", "crashes", "interruptions", "children_pending"})
BOTH_COMMITS: Final = ("commit_outcomes", "commit_parks")
CANCELS: Final = ("cancel_instance", "cancel_children")
TAKE_BACK: Final = ("crash_claims", "reap_claims")
RUNNERS: Final = ("claim_next", "complete", "fail")
"""The calls of foreign runners: SQL functions that run statements of `AS_FUNCTIONS`."""
COUNTING: Final = (
    "join_parents", *CANCELS, "resolve_boundary", "expire_awaits", "recount_barriers", *RUNNERS,
)  # fmt: skip
"""The statements that count ended children at a barrier."""
AS_FUNCTIONS: Final = frozenset(
    {
        "pick_instances", "reap_claims", "expire_awaits", "renew_leases", "commit_parks", "park_parent",
        "insert_instances", "recheck_awaits", "join_parents", "promote_siblings",
    }
)  # fmt: skip
"""Statements whose text is also the body of an SQL function of the same name, for runners."""
