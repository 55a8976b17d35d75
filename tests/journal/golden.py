"""A record of every kind, as the store writes it, by the name of its case."""

from __future__ import annotations

from typing import Any

import msgspec
from durable_actors.journal import ErrorInfo, Record
from tests.journal.kit import at, record

PLACE: dict[str, Any] = {"step": "begin", "visit": 1, "attempt": 0}
CLAIM: dict[str, Any] = {**PLACE, "claim_id": "a", "node": "n1"}
PARKED: dict[str, Any] = {"step": "begin", "visit": 2, "attempt": 0}
ERROR = ErrorInfo(text="ValueError: no stock", type="ValueError")
ROW: dict[str, Any] = {
    "fsm": "shop:Checkout",
    "fsm_version": 1,
    "step": "begin",
    "queue": "checkout",
    "journal": "claims",
    "eligible_at": msgspec.to_builtins(at(5)),
    "unique_key": "order:42",
    "parent_id": 3,
    "barrier": 4,
    "state": {"n": 0},
}


def time(seconds: float) -> str:
    return msgspec.to_builtins(at(seconds))


def command(kind: str) -> dict[str, Any]:
    return {"command": {"type": kind, "key": "once", "reason": "because"}}


RECORDS: dict[str, Record] = {
    "started": record("started", 1, by="ann", data={"row": ROW}),
    "started, by a step": record(
        "started",
        1,
        data={"row": ROW, "parent": {"id": 3, "machine": "shop:Order", "step": "pack", "key": "k"}},
    ),
    "claimed": record("claimed", **CLAIM, data={"lease_until": time(70), "token_hash": "#a"}),
    "next": record("next", **CLAIM, to_step="ship", data={}),
    "next, late and renewed": record(
        "next", seconds=80, **CLAIM, to_step="ship", data={"renewed_until": time(75), "late": True}
    ),
    "next, on the same claim": record(
        "next", **CLAIM, to_step="ship", data={"keeps_claim": True, "lease_until": time(70)}
    ),
    "next, by another definition": record("next", **CLAIM, to_step="ship", data={"definition": "00ff"}),
    "next, by handle": record("next", **CLAIM, to_step="ship", error=ERROR, data={"state": {"n": 1}}),
    "next, at level outcomes": record(
        "next", **CLAIM, to_step="ship", data={"folded": {"at": time(8)}, "columns": {"partition_key": "k"}}
    ),
    "retry": record("retry", **CLAIM, error=ERROR, data={"eligible_at": time(20)}),
    "retry, in a later round": record("retry", **CLAIM, data={"eligible_at": time(20), "round": 3}),
    "parked": record("parked", **CLAIM, to_step="ship", data={"awaits": ["paid"], "deadline": time(99)}),
    "parked, same step": record("parked", **CLAIM, data={"awaits": ["paid"]}),
    "parked, by handle": record(
        "parked", **CLAIM | {"attempt": 2}, to_step="ship", error=ERROR, data={"awaits": ["paid"]}
    ),
    "spawned": record(
        "spawned",
        **CLAIM,
        to_step="ship",
        data={
            "children_total": 2,
            "children_pending": 1,
            "wake_on_failure": True,
            "children": [
                {"id": 100, "machine": "shop:Parcel", "step": "start"},
                {"id": 101, "machine": "shop:Parcel", "step": "start"},
            ],
        },
    ),
    "spawned, none needed": record(
        "spawned", **CLAIM, to_step="ship", data={"children_total": 0, "children_pending": 0}
    ),
    "done": record("done", **CLAIM, data={"result": 42}),
    "failed": record("failed", **CLAIM, error=ERROR, data={}),
    "cancelled": record("cancelled", **PLACE, by="ann", data=command("cancel")),
    "cancelled, executing, at level outcomes": record(
        "cancelled", **CLAIM, by="ann", data={**command("cancel"), "folded": {}}
    ),
    "compensating": record(
        "compensating",
        **PLACE,
        to_step="undo",
        by="ann",
        data={**command("cancel"), "columns": {"cancellation": {"by": "ann"}}},
    ),
    "released": record("released", **CLAIM, data={"to_attempt": 0, "eligible_at": time(0), "hold": 1}),
    "released, counted": record("released", **CLAIM, data={"to_attempt": 1, "eligible_at": time(0)}),
    "crashed": record("crashed", **CLAIM, error=ERROR, data={"to_attempt": 1, "eligible_at": time(12)}),
    "crashed too often": record(
        "crashed", **CLAIM, error=ERROR, data={"to_attempt": 0, "eligible_at": time(12), "failed": True}
    ),
    "reaped": record(
        "reaped", seconds=70, **CLAIM, data={"to_attempt": 1, "eligible_at": time(72), "proof": "lease"}
    ),
    "reaped from a node that stopped": record(
        "reaped", **CLAIM, data={"to_attempt": 0, "eligible_at": time(10), "proof": "stopped"}
    ),
    "reaped too often": record(
        "reaped",
        **CLAIM,
        error=ErrorInfo(text="quarantined"),
        data={"to_attempt": 0, "eligible_at": time(10), "proof": "dead", "failed": True},
    ),
    "woken": record(
        "woken", **PARKED, to_step="ship", by="bob", data={"signals": [{"id": 9, "name": "paid"}]}
    ),
    "expired": record("expired", **PARKED, to_step="ship", data={"waited_for": "signal"}),
    "expired barrier": record("expired", **PARKED, to_step="ship", data={"waited_for": "children"}),
    "child_ended": record("child_ended", **PARKED, data={"count": 1, "pending": 1, "failed": True}),
    "joined": record("joined", **PARKED, to_step="ship", data={"count": 2, "pending": 0}),
    "recounted": record("recounted", **PARKED, data={"count": 1, "pending": 2}),
    "held": record("held", **PLACE),
    "shelved": record("shelved", **PLACE),
    "throttled": record("throttled", **PLACE, data={"limited_by": "api"}),
    "dropped": record("dropped", **PLACE, data={"columns": {"cancellation": {"limit": "api", "visit": 1}}}),
    "limited": record("limited", **PLACE, data={"columns": {"rate_limit": "api"}}),
    "offered": record("offered", **PLACE),
    "revived": record("revived", **PLACE | {"attempt": 3}, by="ann", data={**command("retry"), "round": 4}),
    "revived, to wait": record(
        "revived",
        **PLACE | {"attempt": 3},
        by="ann",
        data={**command("retry"), "hold": 5, "columns": {"cancellation": None}},
    ),
    "unblocked": record("unblocked", **PLACE, data={"eligible_at": time(10)}),
    "doomed": record(
        "doomed", **PLACE, data={"eligible_at": time(10), "columns": {"cancellation": {"upstream": 3}}}
    ),
    "hastened": record(
        "hastened", **PLACE | {"attempt": 2}, by="ann", data={**command("run_now"), "round": 2}
    ),
    "child_started": record(
        "child_started",
        **CLAIM,
        data={"child": {"id": 100, "machine": "shop:Parcel", "step": "start", "key": "k", "meta": {"a": 1}}},
    ),
    "unfit when it was woken": record(
        "unfit",
        **PARKED,
        to_step="ship",
        error=ErrorInfo(text="its partition key has 3000 bytes"),
        data={"eligible_at": time(10)},
    ),
    "unfit": record("unfit", **PLACE, error=ErrorInfo(text="its partition key has 3000 bytes")),
    "asked": record(
        "asked",
        **CLAIM,
        to_step="ship",
        data={"boundary": {"kind": "approval", "then": "ship", "title": "ok?"}},
    ),
    "timed_out": record(
        "timed_out",
        **PARKED,
        to_step="bill",
        data={"decision": {"kind": "timed_out", "at": "2026-01-01T00:00:10Z"}},
    ),
    "timed_out for good": record(
        "timed_out", **PARKED, error=ErrorInfo(text="nobody decided in time: ok?"), data={"failed": True}
    ),
    "paused": record("paused", **PLACE, by="ann", data=command("pause")),
    "resumed": record("resumed", **PLACE, by="ann", data=command("resume")),
    "resumed, to wait": record("resumed", **PLACE, by="ann", data={**command("resume"), "hold": 5}),
    "approved": record(
        "approved",
        **PARKED,
        to_step="ship",
        by="ann",
        data={**command("approve"), "decision": {"kind": "approved", "by": "ann", "comment": "fine"}},
    ),
    "rejected": record("rejected", **PARKED, to_step="bill", by="ann", data=command("reject")),
    "rejected for good": record(
        "rejected",
        **PARKED,
        by="ann",
        error=ErrorInfo(text="rejected"),
        data={**command("reject"), "failed": True},
    ),
    "proceeded": record("proceeded", **PARKED, to_step="ship", by="ann", data=command("proceed")),
    "snapshot": record("snapshot", 9, data={"row": {**ROW, "status": "runnable", "visit": 3, "attempt": 1}}),
    "wakeup": record("wakeup", **PLACE),
}
