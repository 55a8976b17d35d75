"""Rows that a hand, a bug or an attacker has written: each with what must become of it."""

from __future__ import annotations

import random
from typing import Any, Literal

import attrs

UUID = "5b8f2c1e-6f0e-4b5e-9a51-0c8e8b1b8f11"
INT4 = 2**31 - 1
INT8 = 2**63 - 1

Fate = Literal["failed", "done", "cancelled", "shelved", "waits"]


@attrs.frozen
class Hostile:
    """A row and its fate; `reason` is in what `show` says of it (its last error, or why it waits)."""

    name: str
    fate: Fate
    reason: str
    columns: dict[str, Any]


def row(name: str, fate: Fate, reason: str, /, **columns: Any) -> Hostile:
    return Hostile(name, fate, reason, {"fsm": "order", "step": "start", "state": '{"order": 1}', **columns})


def executing(**columns: Any) -> dict[str, Any]:
    """As if a worker had it; its lease is over unless told otherwise."""
    lease = {"claim_id": UUID, "locked_by": "ghost:1", "lease_expires_at": "-infinity"}
    return {"status": "executing", **lease, **columns}


_VISIBLE = bytes(33 + value % 90 for value in range(256))


def noise(length: int) -> str:
    """Text that does not compress: an index entry of this many bytes."""
    return random.Random(1).randbytes(length).translate(_VISIBLE).decode()


DEEP = "[" * 3000 + "]" * 3000
parked: dict[str, Any] = {"status": "awaiting_signal", "awaits": "{go}", "await_deadline": "-infinity"}

STATES = [
    row("state: wrong type", "failed", "$.order", state='{"order": "one"}'),
    row("state: missing field", "failed", "order", state="{}"),
    row("state: null", "failed", "does not fit Order", state="null"),
    row("state: number", "failed", "does not fit Order", state="17"),
    row("state: array", "failed", "does not fit Order", state="[1]"),
    row("state: text", "failed", "does not fit Order", state='"x"'),
    row("state: number no float holds", "failed", "does not fit Order", state='{"order": 1e100000}'),
    row("state: a long number", "done", "", state='{"order": 1e400}'),
    row("state: deep", "failed", "does not fit Order", state=f'{{"order": {DEEP}}}'),
    row("state: deep, ignored field", "failed", "nested too deeply", state=f'{{"order": 1, "x": {DEEP}}}'),
    row("state: a million", "failed", "does not fit Order", state=f'"{"x" * 1_000_000}"'),
    row("free state: number", "failed", "does not fit", fsm="free", state="17"),
    row(
        "job: wrong arguments",
        "waits",
        "it is scheduled",
        fsm="typed job",
        step="perform",
        state='{"order": []}',
    ),
]

STEPS = [
    row("step: unknown", "shelved", "knows step 'nowhere' of order/1", step="nowhere"),
    row("step: empty", "shelved", "knows step '' of order/1", step=""),
    row("step: long", "shelved", "knows step", step=noise(2400)),
    row("step: too long", "failed", "step name", step=noise(2700)),
    row("step: huge", "failed", "step name", step=noise(300_000)),
    row("step: lines", "shelved", "knows step 'a\\nb' of order/1", step="a\nb"),
    row("step: of another machine", "shelved", "knows step 'perform' of order/1", step="perform"),
    row("step: the separator, like a known step", "shelved", "knows o/1", fsm="o", step="\x1f1\x1fstart"),
    row("step: the separator, unlike any", "shelved", "knows step", step="\x1f\x1f"),
    row("step: behind a known one", "shelved", "knows step", step="start\x1f"),
    row("await_step: unknown", "shelved", "knows step 'nowhere' of order/1", **parked, await_step="nowhere"),
    row("await_step: dunder", "shelved", "knows step '__init__' of order/1", **parked, await_step="__init__"),
    row("await_step: empty", "shelved", "knows step '' of order/1", **parked, await_step=""),
]

MACHINES = [
    row("machine: unknown", "shelved", "knows nobody/1", fsm="nobody"),
    row("machine: empty", "shelved", "knows /1", fsm=""),
    row("machine: newer version", "shelved", "knows order/2", fsm_version=2),
    row("machine: version 0", "shelved", "knows order/0", fsm_version=0),
    row("machine: version negative", "shelved", "knows order/-1", fsm_version=-1),
    row("machine: version huge", "shelved", f"knows order/{INT4}", fsm_version=INT4),
    row("machine: version least", "shelved", "knows order/-2147483648", fsm_version=-(2**31)),
    row("machine: version in the name", "shelved", "knows order/1/1", fsm="order/1"),
    row(
        "machine: version and step in the name",
        "shelved",
        "knows order\x1f1\x1fstart/1",
        fsm="order\x1f1\x1fstart",
    ),
    row("machine: name too long", "failed", "machine name", fsm=noise(5000)),
    row("machine: name far too long", "failed", "machine name", fsm=noise(1_000_000)),
]

NUMBERS = [
    row("attempt: most", "done", "", attempt=INT4),
    row("attempt: most, retries", "waits", "it is scheduled", attempt=INT4, step="again"),
    row("attempt: most, job", "failed", "", fsm="typed job", step="perform", attempt=INT4),
    row("attempt: most, crashed", "done", "", **executing(attempt=INT4)),
    row("crashes: most", "waits", "it is scheduled", **executing(crashes=INT4)),
    row("visit: most", "done", "", visit=INT8),
    row("visit: most, next", "failed", "out of range", visit=INT8, step="on"),
    row("visit: most, children", "failed", "out of range", visit=INT8, step="split"),
    row("rev: most", "done", "", rev=INT8),
    row("rev: most, next", "done", "", rev=INT8, step="on"),
    row("rev: most, parked", "done", "", rev=INT8, **parked),
    row("rev: most, parks", "waits", "awaits a signal", rev=INT8, step="park"),
    row("rev: most, children", "done", "", rev=INT8, step="split"),
    row("rev: most, crashed", "done", "", **executing(rev=INT8)),
    row("rev: least", "done", "", rev=-INT8),
    row("priority: least", "done", "", priority=-32768),
    row("priority: most", "done", "", priority=32767),
    row("weight: odd", "waits", "no node has declared", weight=-(2**31), rate_limit="\x01; drop"),
    row("id: negative", "done", "", id=-5),
    row("id: 0, before all times", "done", "", id=0, eligible_at="-infinity"),
    row("children: more than there are", "done", "", children_total=INT4, children_pending=INT4),
    row("children: fewer than none", "done", "", children_total=-INT4),
    row("parent: itself", "done", "", id=777_001, parent_id=777_001, barrier=1),
    row("parent: nobody", "done", "", parent_id=INT8, barrier=INT8),
    row("parent: nobody, negative", "done", "", parent_id=-1, barrier=-1),
]

TIMES = [
    row("eligible: never", "waits", "it is scheduled", eligible_at="infinity"),
    row("eligible: always", "done", "", eligible_at="-infinity"),
    row("eligible: before Christ", "done", "", eligible_at="0044-03-15 12:00:00+00 BC"),
    row("eligible: end of time", "waits", "it is scheduled", eligible_at="294276-12-31 23:59:59+00"),
    row("deadline: never", "waits", "awaits a signal", **{**parked, "await_deadline": "infinity"}),
    row("deadline: always", "done", "", **parked),
    row("deadline: before Christ", "done", "", **{**parked, "await_deadline": "4713-01-01 00:00:00+00 BC"}),
    row("lease: never over", "done", "", **executing(lease_expires_at="infinity")),
    row("lease: far future", "done", "", **executing(lease_expires_at="294276-12-31 23:59:59+00")),
    row("lease: always over", "done", "", **executing()),
    row("inserted, updated: odd", "done", "", inserted_at="infinity", updated_at="-infinity"),
]

SHAPES = [
    row("hold: behind no key", "done", "", hold=1),
    row("hold: behind an empty key", "done", "", hold=1, partition_key=""),
    row("hold: behind a free key", "done", "", hold=1, partition_key="free key"),
    row("hold: shelved, known", "done", "", hold=2),
    row("hold: parked", "done", "", **parked, hold=1),
    row("hold: throttled, by nobody", "waits", "it waits for a limit", hold=3),
    row("hold: paused, by nobody", "waits", "it is paused", hold=4),
    row(
        "hold: paused, key", "waits", "it is paused", hold=4, partition_key="shared", eligible_at="-infinity"
    ),
    row("hold: paused, parked", "done", "", **parked, hold=4),
    row("hold: paused, crashed", "done", "", **executing(hold=4)),
    row("hold: waits for nobody", "waits", "that it comes after", hold=5, partition_key="shared"),
    row("status: cancelled", "cancelled", "", status="cancelled", finished_at="-infinity"),
    row("status: cancelled, held", "cancelled", "", status="cancelled", finished_at="infinity", hold=4),
    row("request: odd", "done", "", request='{"cancel": 1e100000}'),
    row("request: null", "done", "", request="null", step="on"),
    row(
        "request: huge", "done", "", request=f'["{noise(300_000).replace(chr(92), "").replace(chr(34), "")}"]'
    ),
    row("request: of a ghost", "done", "", **executing(request="[[]]")),
    row("rerun_of: nobody", "done", "", rerun_of=-INT8),
    row("rerun_of: itself, recorded", "done", "", rerun_of=INT8, journal=4, step="on"),
    row("manual: a text", "done", "", manual='"x"', awaits="{}"),
    row("manual: a list, parked", "done", "", **{**parked, "manual": "[[]]", "awaits": "{}"}),
    row("manual: a decision of nobody", "done", "", manual='{"decision": 5}', awaits="{}"),
    row(
        "manual: a decision with odd fields",
        "done",
        "",
        step="on",
        awaits="{}",
        manual='{"decision": {"kind": "approved", "by": [], "comment": 1e99999, "at": "yesterday"}}',
    ),
    row("manual: no claim's", "done", "", manual='{"kind": "approval"}'),
    row(
        "manual: overdue, leads nowhere",
        "failed",
        "nobody decided in time: 5",
        **{**parked, "awaits": "{}", "manual": '{"kind": "nobody knows", "title": 5}', "await_step": None},
    ),
    row(
        "manual: opened by a hand",
        "waits",
        "it waits for an approval",
        **{
            **parked,
            "awaits": "{}",
            "manual": '{"kind": "approval", "then": [], "title": {}}',
            "await_deadline": None,
        },
    ),
    row("inbox: empty", "done", "", inbox=True),
    row("awaits: without waiting", "done", "", awaits="{go}"),
    row("awaits: nulls", "done", "", **{**parked, "awaits": "{NULL,NULL}"}),
    row("awaits: nothing", "done", "", **{**parked, "awaits": "{}"}),
    row("awaits: two dimensions", "done", "", **{**parked, "awaits": '{{a,"b c"},{"",NULL}}'}),
    row("awaits: bounds", "done", "", **{**parked, "awaits": "[5:6]={go,x}"}),
    row("awaits: huge", "done", "", **{**parked, "awaits": "{" + ",".join(map(str, range(20_000))) + "}"}),
    row("barrier: nobody left", "done", "", status="awaiting_children", await_deadline="-infinity"),
    row("deadline: runnable", "done", "", await_deadline="-infinity"),
    row("error: huge", "done", "", last_error=noise(500_000)),
    row("result: early", "done", "", result='{"a": 1e100000}'),
    row("token: odd", "done", "", claim_token_hash=b"\xff\x00", claim_id=UUID),
    row("request: none, but not null", "done", "", request="null"),
    row("request: a list", "done", "", request="[1]"),
    row(
        "request: odd fields",
        "cancelled",
        "",
        step="on",
        request='{"kind": "cancel", "by": 1, "at": "infinity"}',
    ),
    row(
        "request: a step that nobody has",
        "shelved",
        "",
        **executing(request='{"kind": "cancel", "on_cancel": "gone"}'),
    ),
    row(
        "request: to the end of visits",
        "shelved",
        "",
        **executing(visit=2**63 - 1, request='{"kind": "cancel", "on_cancel": "gone", "children": "cancel"}'),
    ),
    row("cancellation: no object", "cancelled", "", cancellation="[1]", step="on"),
    row("cancellation: none, but not null", "cancelled", "", cancellation="null"),
    row(
        "cancellation: odd fields", "cancelled", "", cancellation='{"by": 1, "at": "infinity", "reason": []}'
    ),
    row("cancellation: deep, crashed", "cancelled", "", **executing(cancellation=DEEP)),
    row("cancellation: an odd upstream", "cancelled", "", cancellation='{"upstream": "x"}', links=1),
    row(
        "cancellation: an upstream that never was",
        "cancelled",
        "",
        cancellation='{"upstream": 99999}',
        links=3,
    ),
    row("max_attempts: none of ours", "done", "", max_attempts=-5),
    row("links: of no graph", "done", "", links=3, child_key="k" * 9000),
    row("links: no number of ours", "done", "", links=-32768, journal=4),
    row("links: waits for nobody", "waits", "it waits for instances that it comes after", links=1, hold=5),
    row(
        "barrier: cancels its rest",
        "done",
        "",
        status="awaiting_children",
        await_deadline="-infinity",
        cancel_rest=True,
    ),
    row(
        "request: an odd pause",
        "waits",
        "it was paused",
        **executing(request='{"kind": "pause", "by": 1, "at": "infinity"}'),
    ),
    row("request: nobody's", "done", "", request='{"kind": "nobody knows", "at": "yesterday"}'),
    row("request: deep, crashed", "done", "", **executing(request=DEEP)),
    row("request: a long text", "done", "", request=f'"{noise(9000).encode().hex()}"'),
    row("definition: another one", "done", "", journal=2, fingerprint=b"\xff\x00", step="on"),
    row("definition: empty", "done", "", journal=4, fingerprint=b""),
    row("definition: huge", "done", "", journal=3, fingerprint=noise(200_000).encode()),
    row("unique key: no text", "done", "", unique_key=b"\xff\x00\xfe"),
    row("key: long", "done", "", partition_key="k" * 2000),
    row("key: too long, parked", "failed", "partition key", **parked, partition_key=noise(5000)),
    row("key: almost too long, crashed", "failed", "partition key", **executing(partition_key=noise(2690))),
    row("key: odd", "done", "", partition_key="'; drop table durable.gen_durable; --\u202e"),
]

ALL = [*STATES, *STEPS, *MACHINES, *NUMBERS, *TIMES, *SHAPES]
