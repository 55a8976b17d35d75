"""What tells moves apart that lead from and to the same statuses: predicates over a row before and after. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, cast

from durable_actors._store.holds import HELD, OFFERED, PAUSED, SHELVED, THROTTLED, WAITING
from durable_actors.machine import decode_or_text

Row = Mapping[str, Any]
"""Columns of a row by name, all or some. Those that are missing are not compared."""

MAX_KEY: Final = 2000
MAX_NAMES: Final = 2600
"""Bytes that the indexes of runnable rows hold: of a partition key; of queue, machine and step together."""


def is_claimed(old: Row, new: Row) -> bool:
    """Offered, held, shelved or throttled; or it has waited for what it comes after until now, and is handed over."""
    if new["claim_id"] in {None, old["claim_id"]}:
        return False
    same = new.get("eligible_at") == old.get("eligible_at")
    return old["hold"] == WAITING or (old["hold"] in {OFFERED, HELD, SHELVED, THROTTLED} and same)


def same_claim(old: Row, new: Row) -> bool:
    return bool(new["claim_id"] == old["claim_id"])


def same_visit(old: Row, new: Row) -> bool:
    return same_claim(old, new) and bool(new["visit"] == old["visit"])


def next_visit(old: Row, new: Row) -> bool:
    return same_claim(old, new) and bool(new["visit"] == old["visit"] + 1)


def same_or_next_visit(old: Row, new: Row) -> bool:
    return same_visit(old, new) or next_visit(old, new)


def asks(row: Row) -> bool:
    """Whether it waits for a person."""
    manual = row.get("manual")
    return row["status"] == "awaiting_signal" and manual is not None and "decision" not in manual


def is_parked(old: Row, new: Row) -> bool:
    return same_or_next_visit(old, new) and not asks(new)


def is_asked(old: Row, new: Row) -> bool:
    return next_visit(old, new) and asks(new)


def is_decided(kind: str, old: Row, new: Row) -> bool:
    """The decision is in the row; of one that has failed it is in the error."""
    if not asks(old) or is_unfit(old, new):
        return False
    if new["status"] == "failed":
        told = "rejected" if kind == "rejected" else "nobody decided in time"
        return (new["last_error"] or "").startswith(told) and new["manual"] is None
    return bool(new["manual"]["decision"]["kind"] == kind)


def given_back(old: Row, new: Row) -> bool:
    return new["claim_id"] is None and new["attempt"] - old["attempt"] in {0, 1}


def is_cancelled(old: Row, new: Row) -> bool:
    """By the commit of its owner, which keeps the claim's id; or by others, who clear it and count nothing."""
    return same_claim(old, new) or (new["claim_id"] is None and new["attempt"] == old["attempt"])


def is_compensating(old: Row, new: Row) -> bool:
    """Nothing else sets the cancellation."""
    set_now = old["cancellation"] is None and new["cancellation"] is not None
    return set_now and bool(new["visit"] == old["visit"] + 1)


def is_crashed(old: Row, new: Row) -> bool:
    """`crash_claims` knows which exception was raised, and says so."""
    if new["status"] == "failed":
        return given_back(old, new) and "without an outcome (the last time: " in (new["last_error"] or "")
    return given_back(old, new) and (new["last_error"] or "").startswith(f"crash {new['crashes']}: ")


def is_reaped(old: Row, new: Row) -> bool:
    return given_back(old, new) and not is_crashed(old, new) and not is_unfit(old, new)


def is_unfit(_old: Row, new: Row) -> bool:
    if new["status"] != "failed":
        return False
    names = f"{new['queue']}{new['fsm']}{new['step']}"
    return len((new["partition_key"] or "").encode()) > MAX_KEY or len(names.encode()) > MAX_NAMES


def enters_awaited(old: Row, new: Row) -> bool:
    return bool(new["step"] == (old["await_step"] or old["step"]))


def is_expired(old: Row, new: Row) -> bool:
    return (
        enters_awaited(old, new)
        and old["await_deadline"] is not None
        and bool(old["await_deadline"] <= new["eligible_at"])
    )


def counts_down(old: Row, new: Row) -> bool:
    return bool(new["children_pending"] < old["children_pending"])


def is_joined(old: Row, new: Row) -> bool:
    return enters_awaited(old, new) and bool(new["children_pending"] <= old["children_pending"])


def counts_up(old: Row, new: Row) -> bool:
    return bool(new["children_pending"] > old["children_pending"])


def is_offered(old: Row, new: Row) -> bool:
    return bool(new["hold"] == OFFERED != old["hold"] != WAITING)


def is_held(old: Row, new: Row) -> bool:
    return bool(new["hold"] == HELD != old["hold"])


def is_shelved(_old: Row, new: Row) -> bool:
    return bool(new["hold"] == SHELVED)


def is_throttled(_old: Row, new: Row) -> bool:
    return bool(new["hold"] == THROTTLED)


def is_dropped(_old: Row, new: Row) -> bool:
    """The limit that was full is in the cancellation."""
    return bool(new["hold"] == OFFERED) and _cancelled_by(new, "limit")


def has_pause(row: Row) -> bool:
    """Whether a command has paused it, as `durable.asked_to_pause` decides it."""
    request = row["request"]
    if isinstance(request, str | bytes):  # as it was read
        request = decode_or_text(request.encode() if isinstance(request, str) else request)
    return isinstance(request, dict) and cast("dict[str, object]", request).get("kind") == "pause"


def is_paused(old: Row, new: Row) -> bool:
    """A paused row that is runnable is held with reason 4, and no other one is: `durable.hold_of`."""
    held = PAUSED if new["status"] == "runnable" else old["hold"]
    return bool(
        old["status"] == new["status"] and has_pause(new) and not has_pause(old) and new["hold"] == held
    )


def is_resumed(old: Row, new: Row) -> bool:
    was = has_pause(old) or old["hold"] == PAUSED
    return bool(
        was
        and old["status"] == new["status"]
        and new["request"] is None
        and new["hold"] in {OFFERED, WAITING}
    )


def is_revived(_old: Row, new: Row) -> bool:
    return bool(new["attempt"] == new["crashes"] == 0 and new["hold"] in {OFFERED, WAITING})


def is_unblocked(old: Row, new: Row) -> bool:
    return bool(old["hold"] == WAITING and new["hold"] == OFFERED)


def _cancelled_by(row: Row, name: str) -> bool:
    """Whether its cancellation names such a cause."""
    told = row["cancellation"]
    if isinstance(told, str | bytes):  # as it was read
        told = decode_or_text(told.encode() if isinstance(told, str) else told)
    return isinstance(told, dict) and name in cast("dict[str, object]", told)


def is_doomed(old: Row, new: Row) -> bool:
    """Its upstream is in the cancellation. One that is paused stays so."""
    held = PAUSED if has_pause(old) else OFFERED
    names = _cancelled_by(new, "upstream")
    return names and old["cancellation"] is None and old["hold"] in {PAUSED, WAITING} and new["hold"] == held


def is_hastened(old: Row, new: Row) -> bool:
    return bool(new["eligible_at"] < old["eligible_at"])


def is_wakeup(old: Row, new: Row) -> bool:
    return bool(new["status"] == old["status"])


def is_signalled(old: Row, new: Row) -> bool:
    return bool(new["inbox"] and not old["inbox"])
