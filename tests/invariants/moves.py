"""What a change of an instance did: every move that the engine makes, told from the row before and after. Pure.

=========  ==============================================  ===============================================
move       from → to                                       made by
=========  ==============================================  ===============================================
INSERT     nothing → a row                                 a client, a step, a parent's outcome
PICK       runnable → executing, a new claim               a feeder
RENEW      executing, a later lease                        the heartbeat
COMMIT     executing → anything, the claim kept            the outcome of the step, fenced
RELEASE    executing → runnable, the claim cleared         its worker: a drain, a busy key, a cancelled step
REAP       the same, crashes + 1; or failed: quarantined   a reaper
           (unchanged: its node had stopped in order)
CRASH      the same, and `last_error` says what it raised  its worker: SystemExit and the like in a step
WAKE       awaiting_signal → runnable                      a signal, the park's recheck, a deadline
COUNT      awaiting_children, fewer (or more) pending      a child's end (or its retry)
OPEN       awaiting_children → runnable                    the last child, or a deadline
OFFER      runnable, another hold                          the pick, a promotion
FLAG       nothing but the mark that its inbox is in use   a signal
RETRY      failed → runnable                               an operator
DELETE     a row → nothing                                 retention
FOREIGN    anything else                                   nobody: a write that no rule allows
=========  ==============================================  ===============================================
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from typing import Final

import attrs
from tests.invariants.changes import InstanceState, Status


class Move(enum.Enum):
    """See the table above."""

    INSERT = enum.auto()
    PICK = enum.auto()
    RENEW = enum.auto()
    COMMIT = enum.auto()
    RELEASE = enum.auto()
    REAP = enum.auto()
    CRASH = enum.auto()
    WAKE = enum.auto()
    COUNT = enum.auto()
    OPEN = enum.auto()
    OFFER = enum.auto()
    FLAG = enum.auto()
    RETRY = enum.auto()
    DELETE = enum.auto()
    FOREIGN = enum.auto()


def move_of(old: InstanceState | None, new: InstanceState | None) -> Move:
    """Tell what a change did."""
    if old is None:
        return Move.INSERT
    if new is None:
        return Move.DELETE
    return _FROM[old.status](old, new)


def _from_runnable(old: InstanceState, new: InstanceState) -> Move:
    if new.status == "executing" and new.claim_id not in {None, old.claim_id}:
        return _only(old, new, Move.PICK, "status", "hold", "claim_id", "locked_by", "lease_expires_at")
    return _quiet(old, new, Move.OFFER, "hold")


def _from_executing(old: InstanceState, new: InstanceState) -> Move:
    if new.claim_id == old.claim_id:
        if new.status != "executing" or new.visit == old.visit + 1:
            return Move.COMMIT if new.visit - old.visit in {0, 1} else Move.FOREIGN
        return _quiet(old, new, Move.RENEW, "lease_expires_at")
    if new.claim_id is not None or new.locked_by is not None:
        return Move.FOREIGN
    return _given_back(old, new)


def _given_back(old: InstanceState, new: InstanceState) -> Move:
    given_back = (*_CLAIM, "status", "attempt", "rev", "hold")
    if new.crashes == old.crashes and new.status == "runnable" and new.attempt - old.attempt in {0, 1}:
        if new.attempt == old.attempt and new.eligible_at != old.eligible_at:
            return _only(
                old, new, Move.REAP, *given_back, "eligible_at"
            )  # its node had stopped in good order
        return _only(old, new, Move.RELEASE, *given_back)
    if new.crashes == old.crashes + 1 and new.status in {"runnable", "failed"}:
        move = Move.CRASH if _tells_crash(new) else Move.REAP
        return _only(old, new, move, *given_back, "crashes", "eligible_at", "last_error")
    return Move.FOREIGN


def _tells_crash(new: InstanceState) -> bool:
    """crash_claims.sql says what was raised; reap_claims.sql, which has seen nothing, does not."""
    told = new.last_error or ""
    if new.status == "failed":
        return told.startswith("quarantined: ") and "without an outcome (the last time: " in told
    return told.startswith(f"crash {new.crashes}: ")


def _from_await(old: InstanceState, new: InstanceState) -> Move:
    if new.status == "runnable" and new.step == (old.await_step or old.step):
        return _only(old, new, Move.WAKE, *_WOKEN, "inbox")
    return _quiet(old, new, Move.FLAG)


def _from_barrier(old: InstanceState, new: InstanceState) -> Move:
    if new.status == "runnable" and new.step == (old.await_step or old.step):
        return _only(old, new, Move.OPEN, *_WOKEN, "children_pending")
    return _quiet(old, new, Move.COUNT, "children_pending")


def _from_end(old: InstanceState, new: InstanceState) -> Move:
    if old.status == "failed" and new.status == "runnable" and not new.attempt and not new.crashes:
        free = ("status", "hold", "attempt", "crashes", "rev", "eligible_at", "claim_id")
        return _only(old, new, Move.RETRY, *free)
    return Move.FOREIGN


_FROM: Final[Mapping[Status, Callable[[InstanceState, InstanceState], Move]]] = {
    "runnable": _from_runnable,
    "executing": _from_executing,
    "awaiting_signal": _from_await,
    "awaiting_children": _from_barrier,
    "done": _from_end,
    "failed": _from_end,
}
_CLAIM: Final = ("claim_id", "locked_by", "lease_expires_at")
_WOKEN: Final = ("status", "eligible_at", "step", "await_step", "await_deadline", "rev")


def _only(old: InstanceState, new: InstanceState, move: Move, *free: str) -> Move:
    """The move, if nothing changed but these columns."""
    same = attrs.evolve(new, **{name: getattr(old, name) for name in free})
    return move if same == old else Move.FOREIGN


def _quiet(old: InstanceState, new: InstanceState, move: Move, *free: str) -> Move:
    """The move, if nothing changed but these columns and the inbox's mark; that alone is a FLAG."""
    if all(getattr(old, name) == getattr(new, name) for name in free):
        return _only(old, new, Move.FLAG, "inbox")
    return _only(old, new, move, *free)
