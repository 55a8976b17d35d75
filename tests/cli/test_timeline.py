"""A history as a timeline: times relative to its start, waits as gaps, attempts, errors, commands."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from durable_actors._timeline import timeline
from durable_actors.journal import ErrorInfo, Record

BEGAN = datetime(2026, 1, 1, tzinfo=UTC)


def record(rev: int, kind: str, after: float = 0.0, **fields: Any) -> Record:
    return Record(instance_id=1, rev=rev, at=BEGAN + timedelta(seconds=after), kind=kind, **fields)


def lines(*records: Record) -> list[str]:
    return [" ".join(filter(None, (each.offset, each.kind, each.text))) for each in timeline(records)]


def test_an_order():
    assert lines(
        record(1, "started", step="begin", data={"row": {"queue": "shop"}}),
        record(2, "claimed", 0.1, step="begin", visit=1, attempt=0, node="web:1"),
        record(3, "parked", 0.2, step="begin", to_step="ship", attempt=0, node="web:1", seconds=0.012,
               data={"awaits": ["paid"], "deadline": "2026-01-04T00:00:00+00:00"}),
        record(4, "woken", 86400 * 2 + 0.2, step="begin", to_step="ship", data={"signals": [{"name": "paid"}]}),
        record(5, "claimed", 86400 * 2 + 0.2, step="ship", attempt=0, node="web:2"),
        record(6, "retry", 86400 * 2 + 2.2, step="ship", attempt=0, node="web:2", seconds=2.0,
               error=ErrorInfo(text="ValueError: no stock"), data={"eligible_at": "2026-01-03T00:00:04+00:00"}),
        record(7, "claimed", 86400 * 2 + 4.2, step="ship", attempt=1, node="web:2"),
        record(8, "done", 86400 * 2 + 4.3, step="ship", attempt=1, node="web:2", seconds=0.1),
    ) == [
        "+0.0 s started in step begin, queue shop",
        "+0.1 s claimed begin · run 1, on web:1",
        "+0.2 s parked begin → ship, awaits 'paid', until 2026-01-04 00:00:00 · run 1, 12 ms, on web:1",
        "┆ 2 d it awaited a signal named 'paid'",
        "+2 d woken → ship, signal 'paid'",
        "+2 d claimed ship · run 1, on web:2",
        "┆ 2.0 s the step ran",
        "+2 d retry ship, again at 2026-01-03 00:00:04 · run 1, 2.0 s, on web:2 · ValueError: no stock",
        "┆ 2.0 s it waited for its next run",
        "+2 d claimed ship · run 2, on web:2",
        "+2 d done ship · run 2, 100 ms, on web:2",
    ]  # fmt: skip


def test_a_wake_up_changes_nothing_of_what_the_instance_does():
    assert lines(
        record(1, "started", step="s", data={"row": {"queue": "q"}}),
        record(2, "claimed", step="s", attempt=0, node="n"),
        record(3, "wakeup", 2.0, step="s", visit=1, attempt=0),
        record(4, "done", 4.0, step="s", attempt=0, seconds=4.0),
    )[2:5] == ["┆ 2.0 s the step ran", "+2.0 s wakeup s, the notifier was told", "┆ 2.0 s the step ran"]


def test_moves_that_were_not_recorded_are_said_to_be_missing():
    found = lines(
        record(1, "started", step="s"), record(3, "next", step="s", to_step="t"), record(6, "done", step="t")
    )
    assert found[1] == "┆ 1 move was not recorded"
    assert found[3] == "┆ 2 moves were not recorded"


def test_a_command_shows_who_and_why():
    found = lines(
        record(
            9, "revived", step="s", by="ada", data={"command": {"type": "retry", "reason": "stock is back"}}
        )
    )
    assert found == ["+0.0 s revived s · by ada, stock is back"]


@pytest.mark.parametrize(
    ("before", "text"),
    [
        (
            record(1, "spawned", step="s", to_step="t", data={"children_total": 3}),
            "it waited for its children",
        ),
        (record(1, "next", step="s", to_step="t", data={"keeps_claim": True}), "the step ran"),
        (record(1, "next", step="s", to_step="t"), "it waited to be claimed"),
        (record(1, "held", step="s"), "it waited for its partition key"),
        (record(1, "shelved", step="s"), "it waited for a node that has its step"),
        (record(1, "failed", step="s"), "it had ended"),
        (record(1, "reaped", step="s"), "it waited to be claimed"),
    ],
)
def test_a_gap_says_what_the_instance_waited_for(before: Record, text: str):
    assert lines(before, record(2, "claimed", 5.0, step="t"))[1] == f"┆ 5.0 s {text}"


def test_a_gap_before_a_reap_may_be_a_dead_node():
    found = lines(record(1, "claimed", step="s"), record(2, "reaped", 30.0, step="s"))
    assert found[1] == "┆ 30 s its node ran the step, or was gone"


@pytest.mark.parametrize(
    ("before", "ran", "text"),
    [
        ("next", 4.9, "the step ran"),
        ("next", 0.1, "it waited to be claimed"),
        ("next", 2.0, "it ran, or waited to be claimed"),
        ("retry", 2.0, "it ran, or waited for its next run"),
        ("retry", 0.1, "it waited for its next run"),
        ("paused", 2.0, "the step ran"),
    ],
)
def test_a_gap_before_an_outcome_whose_claim_is_not_recorded(before: str, ran: float, text: str):
    found = lines(record(1, before, step="s"), record(3, "done", 5.0, step="s", seconds=ran))
    assert found[1] == f"┆ 5.0 s {text}"


def test_a_gap_in_which_moves_are_missing():
    found = lines(record(1, "started", step="s"), record(3, "paused", 5.0, step="s", by="ada"))
    assert found[1] == "┆ 5.0 s it ran, or waited to be claimed"


def test_a_step_runs_on_while_its_instance_is_paused():
    found = lines(
        record(1, "claimed", step="s"),
        record(2, "paused", 2.0, step="s"),
        record(3, "resumed", 4.0, step="s"),
        record(4, "paused", 6.0, step="s"),
        record(5, "next", 8.0, step="s", to_step="t", seconds=8.0),
        record(6, "paused", 8.0, step="t"),
        record(7, "resumed", 10.0, step="t"),
    )
    assert found[1::2][:4] == ["┆ 2.0 s the step ran"] * 4
    assert found[-2] == "┆ 2.0 s it was paused"


def test_no_history():
    assert lines() == []


def test_a_history_that_retention_has_shortened():
    row = {"status": "awaiting_signal"}
    assert lines(
        record(20, "snapshot", data={"retention": True, "row": row}),
        record(21, "woken", 60.0, step="ask", to_step="ship"),
        record(40, "snapshot", 60.5, data={"retention": True, "row": row}),
    ) == [
        "┆ the records before revision 20 were deleted by retention",
        "+0.0 s snapshot the whole row, for retention",
        "┆ 60 s it awaited a signal",
        "+60 s woken → ship",
        "┆ the records before revision 40 were deleted by retention",
        "+60 s snapshot the whole row, for retention",
    ]


@pytest.mark.parametrize(
    ("parks", "text"),
    [
        (
            record(1, "parked", step="s", to_step="t", data={"awaits": ["x"]}),
            "it awaited a signal named 'x'",
        ),
        (record(1, "spawned", step="s", to_step="t"), "it waited for its children"),
        (record(1, "asked", step="s", to_step="t"), "it waited for a person"),
    ],
)
def test_the_limits_of_the_next_step_change_nothing_of_what_the_instance_does(parks: Record, text: str):
    uses = "api:a\x1e3\x1fgpt\x1f!gpu"
    found = lines(
        parks,
        record(2, "limited", step="s", data={"columns": {"rate_limit": uses}}),
        record(3, "woken", 60.0, step="s", to_step="t"),
    )
    assert found[1:3] == ["+0.0 s limited s, uses api:a (3), gpt, a slot of gpu", f"┆ 60 s {text}"]


def test_limits_that_end_and_a_limit_that_holds_it():
    found = lines(
        record(1, "limited", step="s", data={"columns": {"rate_limit": None}}),
        record(2, "throttled", 1.0, step="s", data={"limited_by": "api:acme"}),
        record(3, "claimed", 61.0, step="s"),
    )
    assert [found[0], *found[2:4]] == [
        "+0.0 s limited s, no limits",
        "+1.0 s throttled s, by the limit api:acme",
        "┆ 60 s it waited for a limit",
    ]


def test_what_comes_after_others_waits_for_them():
    started = record(1, "started", step="s", data={"row": {"queue": "q", "hold": 5}})
    assert lines(started, record(2, "unblocked", 5.0, step="s"), record(3, "claimed", 7.0, step="s"))[
        1::2
    ] == [
        "┆ 5.0 s it waited for what it comes after",
        "┆ 2.0 s it waited to be claimed",
    ]
    ended = record(4, "done", 5.0, step="s", attempt=0, seconds=2.0)
    assert "┆ 5.0 s it ran, or waited for what it comes after" in lines(started, ended)
    cancelled = {"upstream": 3, "reason": "upstream failed: fetch failed"}
    assert lines(record(2, "doomed", step="s", data={"columns": {"cancellation": cancelled}})) == [
        "+0.0 s doomed s, upstream failed: fetch failed"
    ]
    revived = record(3, "revived", step="s", data={"hold": 5})
    assert (
        lines(revived, record(4, "unblocked", 5.0, step="s"))[1]
        == "┆ 5.0 s it waited for what it comes after"
    )


def test_a_compensation_says_where_it_goes():
    assert lines(record(1, "compensating", step="book", to_step="undo", by="ada")) == [
        "+0.0 s compensating book → undo · by ada"
    ]
