"""What the moves of `moves.MOVES` are made of: `Move`, and the statuses, columns and statements that they share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Literal

import attrs

from durable_actors._store.move_rules import Row
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
STARTS: Final = (
    "insert_plain", "insert_held", "insert_linked", "insert_instances", "start_child", "rerun_instance", "complete",
    "turn_schedule",
)  # fmt: skip
BOTH_COMMITS: Final = ("commit_outcomes", "commit_parks")
CANCELS: Final = ("cancel_instance", "cancel_children")
TAKE_BACK: Final = ("crash_claims", "reap_claims")
RUNNERS: Final = ("claim_next", "complete", "fail")
"""The calls of foreign runners: SQL functions that run statements of `AS_FUNCTIONS`."""
COUNTING: Final = (
    "join_parents", *CANCELS, "resolve_boundary", "expire_awaits", "recount_barriers", *RUNNERS,
)  # fmt: skip
"""The statements that count ended children at a barrier."""
TELLING: Final = ("tell_dependents", "tell_untold", *RUNNERS)
"""The statements that tell instances of the end of what they come after."""
AS_FUNCTIONS: Final = frozenset(
    {
        "pick_instances", "reap_claims", "expire_awaits", "renew_leases", "commit_parks", "park_parent",
        "insert_instances", "recheck_awaits", "join_parents", "promote_siblings", "cancel_children", "tell_dependents",
        "write_limits",
    }
)  # fmt: skip
"""Statements whose text is also the body of an SQL function of the same name, for runners."""


MoveName = Literal[
    "started", "claimed", "next", "retry", "parked", "asked", "spawned", "done", "failed", "cancelled",
    "compensating", "released", "crashed", "reaped", "unfit", "expired", "proceeded", "approved", "rejected",
    "timed_out", "woken", "child_ended", "joined", "recounted", "held", "shelved", "throttled",
    "dropped", "limited", "offered", "revived", "unblocked",
    "doomed", "hastened", "paused", "resumed", "child_started", "wakeup", "restored", "deleted", "finished", "renewed",
    "signalled", "requested", "rebuilt", "snapshot",
]  # fmt: skip

MAX_REV: Final = 2**63 - 1
"""`rev` stays here: a row written by hand must not refuse the statement that moves it."""

ALWAYS: Final = frozenset({"rev", "updated_at", "unique_guard"})
"""Columns that follow from the others: every move may change them."""


def _any(_old: Row, _new: Row) -> bool:
    return True


@attrs.frozen(kw_only=True)
class Move:
    """One way in which a row changes."""

    name: MoveName
    meaning: str
    before: frozenset[Status]
    """The statuses that it starts from; none: there is no row."""
    after: frozenset[Status]
    """The statuses that it ends in; none: the row is gone."""
    statements: tuple[str, ...]
    """The SQL files that make it."""
    functions: tuple[str, ...] = ()
    """The SQL functions, called by those files, that make it."""
    columns: frozenset[str] = frozenset()
    """The columns that it may change, beside those of `ALWAYS`."""
    when: Callable[[Row, Row], bool] = _any
    """What tells it from other moves between the same statuses."""
    counts: bool = True
    """Whether `rev` counts it."""
    first: bool = True
    """Of a move that begins a row: whether it is the first of all, with `rev` 1."""

    def fits(self, old: Row | None, new: Row | None) -> bool:
        """Whether this change of a row may be this move."""
        if old is None or new is None:
            return self._begins(new) if old is None else self._ends(old)
        return (
            old["status"] in self.before
            and new["status"] in self.after
            and new["rev"] == (min(old["rev"], MAX_REV - 1) + 1 if self.counts else old["rev"])
            and changed(old, new) <= self.columns
            and self.when(old, new)
        )

    def _begins(self, new: Row | None) -> bool:
        begins = not self.before and new is not None and new["status"] in self.after
        return begins and (not self.first or (new is not None and new["rev"] == 1))

    def _ends(self, old: Row) -> bool:
        return not self.after and old["status"] in self.before


def changed(old: Row, new: Row) -> frozenset[str]:
    """The columns in which two versions of a row differ, without those of `ALWAYS`."""
    return frozenset(name for name, value in new.items() if old[name] != value) - ALWAYS
