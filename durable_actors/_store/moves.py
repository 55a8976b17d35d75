"""Every way in which a row of `gen_durable` changes, in one list.

A move is one change of one row by one statement. It adds 1 to `rev`, and its name is the kind of its journal record.
Four changes are no moves and leave `rev` as it is: a renewed lease, the flag that a signal was sent, a request to the
node that runs it, and a row that is written as its journal says, and was right already. An insert is the first: it sets
`rev` to 1.

A new way to change a row is a line here, and a name in the field `moves` in the header of its SQL file.
tests/store/test_sql_files.py compares the two; tests/store/test_moves.py runs every statement, and fails on a change
that its statement does not declare.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Final, Literal

import attrs

from durable_actors._store.move_parts import (
    BOTH_COMMITS,
    CANCELS,
    CHILDREN,
    CLAIM,
    COUNTING,
    COUNTS,
    END,
    EXECUTING,
    FAILED,
    FAULT,
    LIVE,
    NOBODY,
    OUTCOME,
    RUNNABLE,
    RUNNERS,
    SIGNAL,
    TAKE_BACK,
    WAKE,
)
from durable_actors._store.move_rules import (
    Row,
    counts_down,
    counts_up,
    enters_awaited,
    given_back,
    is_asked,
    is_cancelled,
    is_claimed,
    is_compensating,
    is_crashed,
    is_decided,
    is_expired,
    is_hastened,
    is_held,
    is_joined,
    is_offered,
    is_parked,
    is_paused,
    is_reaped,
    is_resumed,
    is_revived,
    is_shelved,
    is_signalled,
    is_unfit,
    is_wakeup,
    next_visit,
    same_claim,
    same_visit,
)
from durable_actors.machine import ENDED, Status

MoveName = Literal[
    "started", "claimed", "next", "retry", "parked", "asked", "spawned", "done", "failed", "cancelled",
    "compensating", "released", "crashed", "reaped", "unfit", "expired", "proceeded", "approved", "rejected",
    "timed_out", "woken", "child_ended", "joined", "recounted", "held", "shelved", "offered", "revived", "hastened",
    "paused", "resumed", "child_started", "wakeup", "restored", "deleted", "renewed", "signalled", "requested",
    "rebuilt", "snapshot",
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


def move_of(old: Row | None, new: Row | None, among: Iterable[Move] | None = None) -> Move | None:
    """The move that this change is; None: no move changes a row like this.

    A row does not always tell which statement wrote it. A signal that comes after the deadline leaves the same row as
    the deadline, and a spawn without children the same as `Next`: then it is the first of the two in `MOVES`, unless
    `among` says which moves are possible.
    """
    return next((move for move in (MOVES if among is None else among) if move.fits(old, new)), None)


# -- the list

MOVES: Final = (
    Move(
        name="started",
        meaning="inserted",
        before=NOBODY,
        after=RUNNABLE,
        statements=("insert_plain", "insert_instances", "start_child", "rerun_instance", "complete"),
    ),
    Move(
        name="claimed",
        meaning="picked by a node: a new claim",
        before=RUNNABLE,
        after=EXECUTING,
        statements=("pick_instances", "pick_instances_by_id", "claim_next"),
        columns=CLAIM,
        when=is_claimed,
    ),
    Move(
        name="next",
        meaning="`Next` was committed; it may keep its claim and run ahead",
        before=EXECUTING,
        after=RUNNABLE | EXECUTING,
        statements=(*BOTH_COMMITS, "complete"),
        columns=OUTCOME,
        when=next_visit,
    ),
    Move(
        name="retry",
        meaning="`Retry` was committed",
        before=EXECUTING,
        after=RUNNABLE,
        statements=(*BOTH_COMMITS, "complete", "fail"),
        columns=OUTCOME,
        when=same_visit,
    ),
    Move(
        name="parked",
        meaning="`Await` was committed",
        before=EXECUTING,
        after=SIGNAL,
        statements=("commit_parks", "complete"),
        columns=OUTCOME,
        when=is_parked,
    ),
    Move(
        name="asked",
        meaning="`Pause` or `Approval` was committed: it waits for a person",
        before=EXECUTING,
        after=SIGNAL,
        statements=("commit_parks", "complete"),
        columns=OUTCOME,
        when=is_asked,
    ),
    Move(
        name="spawned",
        meaning="`ScheduleChildren` was committed; it enters `then` at once if it waits for no child",
        before=EXECUTING,
        after=CHILDREN | RUNNABLE,
        statements=("park_parent", "complete"),
        columns=OUTCOME | {"cancel_rest"},
        when=next_visit,
    ),
    Move(
        name="done",
        meaning="`Done` was committed",
        before=EXECUTING,
        after=frozenset({"done"}),
        statements=(*BOTH_COMMITS, "complete"),
        columns=END,
        when=same_visit,
    ),
    Move(
        name="failed",
        meaning="`Stop` was committed",
        before=EXECUTING,
        after=FAILED,
        statements=(*BOTH_COMMITS, "complete", "fail"),
        columns=END,
        when=same_visit,
    ),
    Move(
        name="cancelled",
        meaning="by the command, by whoever ends a claim whose node was asked to, or as the outcome of its step",
        before=LIVE,
        after=frozenset({"cancelled"}),
        statements=(*BOTH_COMMITS, *CANCELS, "release_claims", *TAKE_BACK, *RUNNERS),
        columns=END | CLAIM | {"request"},
        when=is_cancelled,
    ),
    Move(
        name="compensating",
        meaning="cancelled, and its machine has a step for that (`on_cancel`), which it enters",
        before=LIVE,
        after=RUNNABLE,
        statements=(*CANCELS, "release_claims", *TAKE_BACK, *RUNNERS),
        functions=("compensate",),
        columns=OUTCOME | CLAIM | {"request", "cancellation"},
        when=is_compensating,
    ),
    Move(
        name="released",
        meaning="given back without an outcome: a drain, a busy key, a step that the node lacks",
        before=EXECUTING,
        after=RUNNABLE,
        statements=("release_claims", "rebuild_instance"),
        columns=CLAIM | {"attempt", "interruptions", "shelved_step"},
        when=given_back,
    ),
    Move(
        name="crashed",
        meaning="its step ended without an outcome (`SystemExit` and the like); failed after too many crashes",
        before=EXECUTING,
        after=RUNNABLE | FAILED,
        statements=("crash_claims",),
        columns=CLAIM | FAULT | {"attempt", "crashes", "eligible_at"},
        when=is_crashed,
    ),
    Move(
        name="reaped",
        meaning="taken from a node that is dead, silent or has stopped; failed after too many crashes",
        before=EXECUTING,
        after=RUNNABLE | FAILED,
        statements=("reap_claims", "claim_next"),
        columns=CLAIM | FAULT | {"attempt", "crashes", "interruptions", "eligible_at"},
        when=is_reaped,
    ),
    Move(
        name="unfit",
        meaning="failed, because no index can hold it: only SQL by hand writes such a row",
        before=LIVE,
        after=FAILED,
        statements=(
            "pick_instances",
            "expire_awaits",
            "join_parents",
            *TAKE_BACK,
            *CANCELS,
            "resolve_boundary",
            *RUNNERS,
        ),
        functions=("count_ended",),
        columns=CLAIM | WAKE | FAULT | COUNTS | {"shelved_step", "manual"},
        when=is_unfit,
    ),
    Move(
        name="expired",
        meaning="woken by the deadline of its await or barrier",
        before=SIGNAL | CHILDREN,
        after=RUNNABLE,
        statements=("expire_awaits", "claim_next"),
        columns=WAKE,
        when=is_expired,
    ),
    Move(
        name="proceeded",
        meaning="the command `proceed`: the boundary of a `Pause` is resolved",
        before=SIGNAL,
        after=RUNNABLE,
        statements=("resolve_boundary",),
        columns=WAKE | {"manual"},
        when=partial(is_decided, "proceeded"),
    ),
    Move(
        name="approved",
        meaning="the command `approve`: the boundary of an `Approval` is resolved",
        before=SIGNAL,
        after=RUNNABLE,
        statements=("resolve_boundary",),
        columns=WAKE | {"manual"},
        when=partial(is_decided, "approved"),
    ),
    Move(
        name="rejected",
        meaning="the command `reject`; failed if the `Approval` names no step for that",
        before=SIGNAL,
        after=RUNNABLE | FAILED,
        statements=("resolve_boundary",),
        columns=WAKE | FAULT | {"manual"},
        when=partial(is_decided, "rejected"),
    ),
    Move(
        name="timed_out",
        meaning="nobody decided in time: as if it were rejected, unless the `Approval` names a step for that",
        before=SIGNAL,
        after=RUNNABLE | FAILED,
        statements=("expire_awaits", "claim_next"),
        columns=WAKE | FAULT | {"manual"},
        when=partial(is_decided, "timed_out"),
    ),
    Move(
        name="woken",
        meaning="woken by a signal, or by the recheck after its park",
        before=SIGNAL,
        after=RUNNABLE,
        statements=("send_signals", "signal_from_step", "recheck_awaits", "wake_lost_waits", "complete"),
        functions=("send_signals",),
        columns=WAKE | {"inbox"},
        when=enters_awaited,
    ),
    Move(
        name="child_ended",
        meaning="a child has ended, and the barrier stays closed",
        before=CHILDREN,
        after=CHILDREN,
        statements=COUNTING,
        functions=("count_ended",),
        columns=frozenset({"children_pending"}),
        when=counts_down,
    ),
    Move(
        name="joined",
        meaning="a child has ended, and the barrier opens",
        before=CHILDREN,
        after=RUNNABLE,
        statements=COUNTING,
        functions=("count_ended",),
        columns=WAKE | {"children_pending"},
        when=is_joined,
    ),
    Move(
        name="recounted",
        meaning="a child that had ended was revived: it is waited for again",
        before=CHILDREN,
        after=CHILDREN,
        statements=("retry_instance", "recount_barriers"),
        columns=frozenset({"children_pending"}),
        when=counts_up,
    ),
    Move(
        name="held",
        meaning="a sibling of its partition key goes first",
        before=RUNNABLE,
        after=RUNNABLE,
        statements=("pick_instances", "claim_next"),
        columns=frozenset({"hold"}),
        when=is_held,
    ),
    Move(
        name="shelved",
        meaning="the node that read it lacks its machine, version or step, or its machine is paused in its queue",
        before=RUNNABLE,
        after=RUNNABLE,
        statements=("pick_instances", "claim_next"),
        columns=frozenset({"hold", "shelved_step"}),
        when=is_shelved,
    ),
    Move(
        name="offered",
        meaning="nothing holds it any longer",
        before=RUNNABLE,
        after=RUNNABLE,
        statements=("promote_siblings", "free_holds", "pick_instances", *RUNNERS),
        functions=("judge_siblings",),
        columns=frozenset({"hold"}),
        when=is_offered,
    ),
    Move(
        name="revived",
        meaning="the command `retry`: it runs again in the step where it ended",
        before=frozenset({"failed", "cancelled"}),
        after=RUNNABLE,
        statements=("retry_instance",),
        columns=CLAIM | {"attempt", "crashes", "eligible_at", "finished_at", "request"},
        when=is_revived,
    ),
    Move(
        name="hastened",
        meaning="the command `run_now`: it was not due yet, and is now",
        before=RUNNABLE,
        after=RUNNABLE,
        statements=("hasten_instance",),
        columns=frozenset({"eligible_at"}),
        when=is_hastened,
    ),
    Move(
        name="paused",
        meaning="the command `pause`: nothing picks it; if a step runs, from its end on",
        before=LIVE,
        after=LIVE,
        statements=("pause_instance",),
        columns=frozenset({"hold", "request"}),
        when=is_paused,
    ),
    Move(
        name="resumed",
        meaning="the command `resume`: its pause has ended",
        before=LIVE,
        after=LIVE,
        statements=("resume_instance",),
        columns=frozenset({"hold", "request"}),
        when=is_resumed,
    ),
    Move(
        name="child_started",
        meaning="its step has started a child (`ctx.start_child`)",
        before=EXECUTING,
        after=EXECUTING,
        statements=("start_child",),
        when=same_claim,
    ),
    Move(
        name="wakeup",
        meaning="a notifier was told of its attempt; nothing else changes",
        before=LIVE,
        after=LIVE,
        statements=("record_wakeup",),
        when=is_wakeup,
    ),
    Move(
        name="restored",
        meaning="the command `rebuild`: it was gone, and is written as its journal says",
        before=NOBODY,
        after=LIVE - EXECUTING | ENDED,
        statements=("restore_instance",),
        first=False,
    ),
    Move(
        name="deleted",
        meaning="deleted, when it had ended: by retention, or by the commit of `Done` (`keep=0`)",
        before=ENDED,
        after=NOBODY,
        statements=("delete_ended", "delete_done"),
    ),
    Move(
        name="renewed",
        meaning="its lease was extended; no move",
        before=EXECUTING,
        after=EXECUTING,
        statements=("renew_leases", "heartbeat"),
        columns=frozenset({"lease_expires_at"}),
        when=same_claim,
        counts=False,
    ),
    Move(
        name="signalled",
        meaning="a signal was sent to it for the first time, and does not wake it; no move",
        before=LIVE,
        after=LIVE,
        statements=("send_signals", "signal_from_step"),
        functions=("send_signals",),
        columns=frozenset({"inbox"}),
        when=is_signalled,
        counts=False,
    ),
    Move(
        name="requested",
        meaning="a command asks the node that runs it to cancel it; no move",
        before=EXECUTING,
        after=EXECUTING,
        statements=CANCELS,
        columns=frozenset({"request"}),
        counts=False,
    ),
    Move(
        name="rebuilt",
        meaning="the command `rebuild`: it is as its journal says; no move, unless that ends a claim",
        before=LIVE | ENDED,
        after=LIVE - EXECUTING | ENDED,
        statements=("rebuild_instance",),
        columns=frozenset({"inbox"}),
        counts=False,
    ),
    Move(
        name="snapshot",
        meaning="the command `accept`: its history begins anew with the row; `rebuild`, if the row was wrong; "
        "retention, in a long history",
        before=LIVE | ENDED,
        after=LIVE | ENDED,
        statements=("accept_instance", "rebuild_instance", "snapshot_journal"),
        columns=END
        | CLAIM
        | {"inbox", "shelved_step", "interruptions", "request", "cancellation", "cancel_rest"},
    ),
)
"""Every move, and the four changes that are none."""

OUTCOMES: Final = frozenset(move.name for move in MOVES if move.columns >= OUTCOME)
"""The moves that commit what a step returned."""


def moves_by(statement: str) -> tuple[Move, ...]:
    """The moves that an SQL file may make."""
    return tuple(move for move in MOVES if statement in move.statements)
