"""The life of an attempt: a table of what each fact does in each state.

A cell is the name of an action, or the reason of an anomaly: then nothing changes. The caller has checked that the run
has not ended; facts of an ended run are `terminal_run` whatever the state of the attempt.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, Literal

import msgspec

from durable_actors.journal.facts import Fact, is_intent
from durable_actors.journal.moves import digest
from durable_actors.journal.projection import Attempt, Claim, lease_is_over

State = Literal["absent", "hidden", "visible", "claimed", "lapsed", "completed", "failed", "expired"]
"""hidden, visible: available before and from `visible_at` on. claimed, lapsed: before and from the lease's end on."""

Attempts = dict[str, Attempt]

COLUMNS: Final = (
    "attempt_scheduled",
    "attempt_claimed",
    "attempt_heartbeat",
    "attempt_completed",
    "attempt_failed",
    "claim_released",
    "claim_expired",
    "runnable_applied",
    "live_wakeup_emitted",
)


def _row(*cells: str) -> dict[str, str]:
    return dict(zip(COLUMNS, cells, strict=True))


_UNKNOWN: Final = "unknown_runnable_intent"
_EARLY: Final = "attempt_not_visible"
_ACTIVE: Final = "active_claim"
_OVER: Final = "expired_claim"
_ENDED: Final = "terminal_attempt"
_STALE: Final = "stale_claim"
_NO_RESULT: Final = "result_not_completed"

# fmt: off
TABLE: Final[Mapping[State, Mapping[str, str]]] = {
    #                 scheduled  claimed   heartbeat completed   failed    released   expired   applied     wakeup
    "absent":    _row("create",  _UNKNOWN, _UNKNOWN, _UNKNOWN,   _UNKNOWN, _UNKNOWN,  _UNKNOWN, _UNKNOWN,   _UNKNOWN),
    "hidden":    _row("compare", _EARLY,   _STALE,   _STALE,     _STALE,   _STALE,    _STALE,   _NO_RESULT, "mark"),
    "visible":   _row("compare", "claim",  _STALE,   _STALE,     _STALE,   _STALE,    _STALE,   _NO_RESULT, "mark"),
    "claimed":   _row("compare", _ACTIVE,  "extend", "complete", "fail",   "release", _ACTIVE,  _NO_RESULT, "mark"),
    "lapsed":    _row("compare", "claim",  _OVER,    _OVER,      _OVER,    "expire",  "expire", _NO_RESULT, "mark"),
    "completed": _row("compare", _ENDED,   _STALE,   "repeat",   _STALE,   _STALE,    _STALE,   "apply",    "mark"),
    "failed":    _row("compare", _ENDED,   _STALE,   _STALE,     _STALE,   _STALE,    _STALE,   "apply",    "mark"),
    "expired":   _row("compare", _ENDED,   _STALE,   _STALE,     _STALE,   _STALE,    _STALE,   _NO_RESULT, "mark"),
}
# fmt: on


def state_of(attempt: Attempt | None, fact: Fact) -> State:
    """The state of an attempt as a fact meets it.

    A store may decide about a lease by other means than its end. `late`: it accepted the fact because the claim was
    current. `proof` other than "lease": the node was proved dead or had stopped.
    """
    if attempt is None:
        return "absent"
    if attempt.status == "available":
        return "visible" if attempt.visible_at <= fact.at else "hidden"
    if attempt.status != "claimed":
        return attempt.status
    if fact.kind == "claim_expired":
        unknown = attempt.claim is None or attempt.claim.lease_until is None
        over = unknown or fact.data["proof"] != "lease" or lease_is_over(attempt.claim, fact.at)
    else:
        over = not fact.data.get("late") and lease_is_over(attempt.claim, fact.at)
    return "lapsed" if over else "claimed"


def apply_to_attempt(attempts: Attempts, fact: Fact) -> str | None:
    """Change the attempt that the fact names. Return the reason if it is an anomaly; then nothing was changed."""
    attempt = attempts.get(fact.data["runnable_key"])
    cell = TABLE[state_of(attempt, fact)][fact.kind]
    if attempt is None:
        return _create(attempts, fact) if cell == "create" else cell
    action = _ACTIONS.get(cell)
    return cell if action is None else action(attempts, attempt, fact)


def intent_of(data: Mapping[str, Any], *, retry: bool = False) -> Attempt | None:
    """The attempt that an intent describes, or None if the intent is not well formed."""
    return _attempt(data, retry=retry) if is_intent(data) else None


def _attempt(data: Mapping[str, Any], *, retry: bool = False) -> Attempt:
    attempt = Attempt(
        key=data["runnable_key"],
        step=data["step"],
        visit=data["visit"],
        round=data["round"],
        attempt=data["attempt"],
        visible_at=data["visible_at"],
        idempotency_key=data["idempotency_key"],
        retry=retry,
    )
    if "input" in data:
        attempt.input = digest(data["input"])
    return attempt


def _is_same_intent(one: Attempt, other: Attempt) -> bool:
    return (one.idempotency_key, one.attempt, one.step, one.input, one.visible_at) == (
        other.idempotency_key,
        other.attempt,
        other.step,
        other.input,
        other.visible_at,
    )


def _create(attempts: Attempts, fact: Fact) -> str | None:
    intent = _attempt(fact.data)
    attempts[intent.key] = intent
    return None


def _compare(_: Attempts, attempt: Attempt, fact: Fact) -> str | None:
    return None if _is_same_intent(attempt, _attempt(fact.data)) else "conflicting_runnable_intent"


def _claim(_: Attempts, attempt: Attempt, fact: Fact) -> str | None:
    data = fact.data
    attempt.claim = Claim(
        data["claim_id"],
        data["owner"],
        data.get("since", fact.at),
        data.get("lease_until"),
        data.get("token_hash"),
    )
    attempt.status = "claimed"
    return None


def _has_fence(attempt: Attempt, fact: Fact) -> bool:
    """Claim id and token hash must be those of the claim. A fact that was fenced by the id alone names no hash."""
    claim = attempt.claim
    if claim is None or fact.data["claim_id"] != claim.id:
        return False
    return bool(fact.data.get("token_hash", claim.token_hash) == claim.token_hash)


def _extend(_: Attempts, attempt: Attempt, fact: Fact) -> str | None:
    if attempt.claim is None or not _has_fence(attempt, fact):
        return _STALE
    attempt.claim = msgspec.structs.replace(attempt.claim, lease_until=fact.data["lease_until"])
    return None


def _complete(_: Attempts, attempt: Attempt, fact: Fact) -> str | None:
    if not _has_fence(attempt, fact):
        return _STALE
    attempt.status = "completed"
    attempt.result = fact.data["result"]
    return None


def _repeat(_: Attempts, attempt: Attempt, fact: Fact) -> str | None:
    if not _has_fence(attempt, fact):
        return _STALE
    return None if fact.data["result"] == attempt.result else "conflicting_completion"


def _fail(attempts: Attempts, attempt: Attempt, fact: Fact) -> str | None:
    if not _has_fence(attempt, fact):
        return _STALE
    following = fact.data.get("retry")
    if following is not None:
        intent = intent_of(following, retry=True)
        if intent is None:
            return "malformed_entry"
        known = attempts.get(intent.key)
        if known is not None and not _is_same_intent(known, intent):
            return "conflicting_runnable_intent"
        attempts.setdefault(intent.key, intent)
    attempt.status = "failed"
    attempt.error = fact.data.get("error")
    return None


def _release(_: Attempts, attempt: Attempt, fact: Fact) -> str | None:
    if not _has_fence(attempt, fact):
        return _STALE
    attempt.status = "available"
    attempt.claim = None
    attempt.visible_at = fact.data.get("eligible_at") or attempt.visible_at
    return None


def _expire(_: Attempts, attempt: Attempt, fact: Fact) -> str | None:
    if not _has_fence(attempt, fact):
        return _STALE
    attempt.status = "expired"
    return None


def _apply(_: Attempts, attempt: Attempt, fact: Fact) -> str | None:
    result = fact.data["result"]
    if attempt.applied:
        return None if result == attempt.result else "conflicting_result"
    if attempt.status == "failed":  # an error route: `handle` returned an outcome
        if fact.data.get("transition") is None:
            return _NO_RESULT
        attempt.result = result
    elif result != attempt.result:
        return "conflicting_result"
    attempt.applied = True
    return None


def _mark(_: Attempts, attempt: Attempt, __: Fact) -> str | None:
    attempt.woken = True
    return None


Action = Callable[[Attempts, Attempt, Fact], str | None]

_ACTIONS: Final[Mapping[str, Action]] = {
    "compare": _compare,
    "claim": _claim,
    "extend": _extend,
    "complete": _complete,
    "repeat": _repeat,
    "fail": _fail,
    "release": _release,
    "expire": _expire,
    "apply": _apply,
    "mark": _mark,
}

ACTIONS: Final[Mapping[str, str]] = {
    "create": "it becomes available",
    "compare": "nothing if the intent is the same, else `conflicting_runnable_intent`",
    "claim": "it is claimed, and an earlier fence is dead",
    "extend": "with the fence: the lease is extended, else `stale_claim`",
    "complete": "with the fence: it is completed, else `stale_claim`",
    "repeat": "nothing if claim and result are the same; another result is `conflicting_completion`, another claim "
    "`stale_claim`",
    "fail": "with the fence: it has failed, and a retry becomes available, else `stale_claim`",
    "release": "with the fence: it is available again, else `stale_claim`",
    "expire": "with the fence: the claim is over, else `stale_claim`",
    "apply": "once, with the result of the completion, else `conflicting_result`; after a failure only with a "
    "transition, else `result_not_completed`",
    "mark": "noted",
}
"""What each action of the table does."""
