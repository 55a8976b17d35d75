"""Facts and records by hand, and a short text for a fact."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
from durable_actors.journal import ErrorInfo, Fact, Projection, Record, fold, runnable_key

RUN = 7
START = datetime(2026, 1, 1, tzinfo=UTC)
KEY = runnable_key(RUN, 1, "begin", 0, 0)
NEXT = runnable_key(RUN, 2, "ship", 0, 0)
MICROSECOND = 1e-6


def at(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


def fact(kind: str, seconds: float = 0, *, rev: int = 1, run: int = RUN, **data: Any) -> Fact:
    return Fact(kind, run, "default", at(seconds), rev, data)


def started(**more: Any) -> Fact:
    data = {"machine": "shop:Checkout", "version": 1, "queue": "default", "level": "claims"}
    place = {"step": "begin", "visit": 1, "round": 0, "attempt": 0}
    return fact("run_started", **{**data, **place, "parent": None, "row": {"priority": 5}, **more})


def intent(
    attempt: int = 0, visible: float = 0, *, step: str = "begin", visit: int = 1, **more: Any
) -> dict[str, Any]:
    key = runnable_key(RUN, visit, step, more.pop("round", 0), attempt)
    return {
        "runnable_key": key,
        "idempotency_key": f"{RUN}/{visit}/{step}",
        "step": step,
        "visit": visit,
        "round": int(key.split("#")[1].split(".")[0]),
        "attempt": attempt,
        "visible_at": at(visible),
        **more,
    }


def scheduled(attempt: int = 0, visible: float = 0, **more: Any) -> Fact:
    return fact("attempt_scheduled", **intent(attempt, visible, **more))


def claimed(seconds: float = 0, claim: str = "a", *, until: float = 60, key: str = KEY, **more: Any) -> Fact:
    data = {"runnable_key": key, "claim_id": claim, "owner": "node", "token_hash": f"#{claim}"}
    return fact("attempt_claimed", seconds, **{**data, "lease_until": at(until), **more})


def owned(kind: str, seconds: float, claim: str = "a", *, key: str = KEY, **more: Any) -> Fact:
    """A fact of the owner of a claim."""
    return fact(kind, seconds, runnable_key=key, claim_id=claim, token_hash=f"#{claim}", **more)


def heartbeat(seconds: float, claim: str = "a", *, until: float, **more: Any) -> Fact:
    return owned("attempt_heartbeat", seconds, claim, lease_until=at(until), **more)


def completed(seconds: float, claim: str = "a", *, result: Any = "ok", **more: Any) -> Fact:
    return owned("attempt_completed", seconds, claim, result={"value": result}, **more)


def failed(seconds: float, claim: str = "a", **more: Any) -> Fact:
    return owned("attempt_failed", seconds, claim, **{"ended_by": "outcome", "error": None, **more})


def applied(seconds: float = 30, *, key: str = KEY, result: Any = "ok", **more: Any) -> Fact:
    return fact("runnable_applied", seconds, runnable_key=key, result={"value": result}, **more)


def wakeup(key: str = KEY) -> Fact:
    return fact("live_wakeup_emitted", 1, runnable_key=key)


def terminal(status: str = "failed", seconds: float = 90) -> Fact:
    return fact("run_terminal", seconds, status=status, step="begin", visit=1, round=0, attempt=0)


def manual(step: str = "begin", boundary: int = 2, *, seconds: float = 5, kind: str = "approval") -> Fact:
    following = {"step": "ship", "visit": 2, "round": 0, "attempt": 0, "await_step": "ship"}
    return fact("manual_step_paused", seconds, step=step, manual=kind, boundary=boundary, next=following)


def resolved(step: str = "begin", boundary: int = 2, action: str = "approve") -> Fact:
    return fact("manual_step_resolved", 6, step=step, boundary=boundary, action=action)


def child(
    number: int = 100, *, key: str = "k", machine: str = "shop:Parcel", attempt: int = 0, **more: Any
) -> Fact:
    origin = {"runnable_key": KEY, "step": "begin", "attempt": attempt}
    data = {"child": number, "machine": machine, "trigger": "start", "child_key": key, "origin": origin}
    return fact("child_run_started", 3, **{**data, **more})


def reasons(projection: Projection) -> list[str]:
    return [anomaly.reason for anomaly in projection.anomalies]


def changes_only_anomalies(before: list[Fact], odd: Fact, reason: str) -> None:
    """`odd` is refused for this reason and leaves everything else as it is."""
    was, now = fold(before), fold([*before, odd])
    assert reasons(now) == [*reasons(was), reason]
    assert without_anomalies(now) == without_anomalies(was)


def without_anomalies(projection: Projection) -> Projection:
    return msgspec.structs.replace(projection, anomalies=[], rev=0)


def record(kind: str, rev: int = 2, seconds: float = 10, **fields: Any) -> Record:
    return Record(instance_id=RUN, rev=rev, at=at(seconds), kind=kind, **fields)


PLACE = ("step", "visit", "round", "attempt")
ROW = {"row": "…"}


def line(one: Fact) -> str:
    """A fact as a short text. Times are seconds after the start; a place is step/visit#round.attempt."""
    return " ".join([one.kind, *_shown(dict(one.data))])


def _shown(data: dict[str, Any]) -> list[str]:
    data = {**data, **(ROW if "row" in data else {})}
    if all(name in data for name in PLACE):
        step, visit, round_, attempt = (data.pop(name) for name in PLACE)
        data = {"place": f"{step}/{visit}#{round_}.{attempt}", **data}
    if "idempotency_key" in data:
        assert data.pop("idempotency_key") == data["runnable_key"].rpartition("#")[0]
    return [f"{name}={_short(value)}" for name, value in data.items()]


def _short(value: Any) -> str:
    if isinstance(value, datetime):
        return f"{(value - START).total_seconds():+g}s"
    if isinstance(value, dict):
        return "{" + " ".join(_shown(value)) + "}"
    if isinstance(value, list):
        return "[" + " ".join(_short(each) for each in value) + "]"
    if isinstance(value, ErrorInfo):
        return value.text
    return str(value)
