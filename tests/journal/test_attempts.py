"""The life of an attempt: the cases of the protocol, and its table cell by cell."""

from __future__ import annotations

import pytest
from durable_actors.journal import ANOMALIES, Fact, Projection, ProtocolAnomaly, fold, replay, runnable_key
from durable_actors.journal.attempts import ACTIONS, COLUMNS, TABLE, state_of
from tests.journal.golden import RECORDS
from tests.journal.kit import (
    KEY,
    MICROSECOND,
    applied,
    at,
    changes_only_anomalies,
    claimed,
    completed,
    fact,
    failed,
    heartbeat,
    intent,
    owned,
    reasons,
    scheduled,
    started,
    terminal,
    wakeup,
)


def attempt(projection: Projection, key: str = KEY):
    return projection.attempts[key]


def test_a_wakeup_before_the_intent_is_unknown():
    """Case 3, R23."""
    changes_only_anomalies([], wakeup(), "unknown_runnable_intent")
    assert fold([wakeup()]).attempts == {}


def test_an_intent_without_wakeup_is_visible_after_a_rebuild():
    """Case 4, R24."""
    projection = fold([scheduled(visible=5)])
    assert [one.key for one in projection.visible(at(5))] == [KEY]
    assert projection.visible(at(5 - MICROSECOND)) == []
    assert not attempt(projection).woken
    assert attempt(fold([wakeup()], projection)).woken


@pytest.mark.parametrize("other", [{"input": {"n": 2}}, {"visible": 9}, {"idempotency_key": "other"}])
def test_an_equal_intent_is_idempotent_and_another_one_conflicts(other):
    """Case 5, R25, R26, C3: the first intent stays in force."""
    first = [scheduled(visible=5, input={"n": 1})]
    assert fold([*first, *first]) == fold(first)
    changes_only_anomalies(
        first, scheduled(**{"visible": 5, "input": {"n": 1}, **other}), "conflicting_runnable_intent"
    )


def test_an_intent_may_not_change_its_step():
    """Case 5, C3."""
    changed = Fact("attempt_scheduled", 7, "default", at(0), 1, intent() | {"step": "other"})
    changes_only_anomalies([scheduled()], changed, "conflicting_runnable_intent")


def test_a_claim_is_refused_before_visible_at_and_accepted_at_it():
    """Case 6, R42, C1."""
    changes_only_anomalies([scheduled(visible=5)], claimed(5 - MICROSECOND), "attempt_not_visible")
    projection = fold([scheduled(visible=5), claimed(5)])
    assert (attempt(projection).status, reasons(projection)) == ("claimed", [])


def test_a_second_claim_is_refused_until_the_lease_is_over():
    """Case 7, R40, R41: at the end of the lease it is accepted, and the old fence is dead."""
    history = [scheduled(), claimed(0, "a", until=60)]
    changes_only_anomalies(history, claimed(60 - MICROSECOND, "b"), "active_claim")
    assert [one.key for one in fold(history).expired(at(60))] == [KEY]
    assert fold(history).expired(at(60 - MICROSECOND)) == []
    taken = [*history, claimed(60, "b", until=120)]
    assert (attempt(fold(taken)).claim.id, reasons(fold(taken))) == ("b", [])
    changes_only_anomalies(taken, completed(61, "a"), "stale_claim")


def test_a_heartbeat_needs_the_whole_fence():
    """Case 8, R36, R38, R39."""
    history = [scheduled(), claimed(0, "a", until=60)]
    changes_only_anomalies(history, _with(heartbeat(10, until=70), token_hash="#b"), "stale_claim")
    changes_only_anomalies(history, heartbeat(10, "b", until=70), "stale_claim")
    extended = fold([*history, heartbeat(10, until=70)])
    assert attempt(extended).claim.lease_until == at(70)


def _with(one: Fact, **data) -> Fact:
    return Fact(one.kind, one.run, one.queue, one.at, one.rev, {**one.data, **data})


def test_a_store_that_fences_by_the_claim_alone_names_no_token():
    """CONTRACT: outcomes are fenced by id, claim and visit."""
    one = completed(10)
    bare = Fact(
        one.kind,
        one.run,
        one.queue,
        one.at,
        one.rev,
        {k: v for k, v in one.data.items() if k != "token_hash"},
    )
    assert attempt(fold([scheduled(), claimed(), bare])).status == "completed"


@pytest.mark.parametrize("late", [heartbeat(60, until=120), completed(60), failed(60, retry=intent(1, 70))])
def test_at_the_end_of_its_lease_an_owner_has_lost(late):
    """Case 9, R43: a failure that is refused schedules no retry."""
    changes_only_anomalies([scheduled(), claimed(until=60)], late, "expired_claim")


@pytest.mark.parametrize("late", [heartbeat(60, until=120), completed(60), failed(60, retry=intent(1, 70))])
def test_a_late_write_that_the_store_accepted_counts(late):
    """`late_commit="accept"`: the claim was current, and the record says that it was late."""
    projection = fold([scheduled(), claimed(until=60), _with(late, late=True)])
    assert reasons(projection) == []
    assert attempt(projection).status == {
        "attempt_heartbeat": "claimed",
        "attempt_completed": "completed",
    }.get(late.kind, "failed")


def test_a_repeated_completion_is_idempotent_and_another_one_is_not():
    """Case 10, R49, R50, R51."""
    history = [scheduled(), claimed(), completed(10)]
    assert fold([*history, completed(11)]) == fold(history)
    changes_only_anomalies(history, completed(11, result="other"), "conflicting_completion")
    changes_only_anomalies(history, completed(11, "b"), "stale_claim")


def test_a_retry_is_invisible_until_its_own_time_also_after_a_rebuild():
    """Case 11, R52."""
    history = [scheduled(), claimed(), failed(10, retry=intent(1, 40, round=1))]
    key = runnable_key(7, 1, "begin", 1, 1)
    for projection in (fold(history), fold(history[2:], fold(history[:2]))):
        assert attempt(projection).status == "failed"
        assert projection.visible(at(40 - MICROSECOND)) == []
        assert [(one.key, one.retry) for one in projection.visible(at(40))] == [(key, True)]


def test_a_retry_that_contradicts_a_known_intent_changes_nothing():
    history = [scheduled(), scheduled(1, 50), claimed()]
    changes_only_anomalies(history, failed(10, retry=intent(1, 40)), "conflicting_runnable_intent")
    changes_only_anomalies(history, failed(10, retry={"step": "begin"}), "malformed_entry")


def test_a_result_is_applied_once_and_only_after_its_completion():
    """Case 12, R53, R54, R55."""
    history = [started(), scheduled(), claimed()]
    changes_only_anomalies(history, applied(), "result_not_completed")
    changes_only_anomalies(history, applied(key="other"), "unknown_runnable_intent")
    done = [*history, completed(10)]
    assert [one.key for one in fold(done).ready_to_apply()] == [KEY]
    changes_only_anomalies(done, applied(result="other"), "conflicting_result")
    twice = fold([*done, applied(), applied()])
    assert twice == fold([*done, applied()])
    assert twice.ready_to_apply() == []
    changes_only_anomalies([*done, applied()], applied(result="other"), "conflicting_result")


def test_a_failure_is_applied_only_with_a_transition():
    """C5: an error route."""
    history = [started(), scheduled(), claimed(), failed(10)]
    changes_only_anomalies(history, applied(), "result_not_completed")
    assert attempt(fold([*history, applied(transition="next")])).applied


@pytest.mark.parametrize("end", [completed(10), failed(10), owned("claim_expired", 60, proof="lease")])
def test_an_attempt_that_ended_cannot_be_claimed(end):
    """Case 13."""
    changes_only_anomalies([scheduled(), claimed(), end], claimed(99, "b"), "terminal_attempt")


def test_a_released_attempt_is_available_again():
    history = [scheduled(), claimed(), owned("claim_released", 10)]
    projection = fold(history)
    assert (attempt(projection).status, attempt(projection).claim) == ("available", None)
    assert reasons(fold([claimed(11, "b")], projection)) == []
    changes_only_anomalies([scheduled(), claimed()], owned("claim_released", 10, "b"), "stale_claim")


def test_a_claim_is_taken_from_a_live_lease_only_with_proof():
    """CONTRACT §5: from a node that was proved dead."""
    history = [scheduled(), claimed(until=60)]
    changes_only_anomalies(history, owned("claim_expired", 59, proof="lease"), "active_claim")
    for taken in (owned("claim_expired", 60, proof="lease"), owned("claim_expired", 5, proof="dead")):
        assert attempt(fold([*history, taken])).status == "expired"


def test_siblings_of_one_run_may_be_scheduled_at_the_same_time():
    """R32."""
    other = scheduled(step="bill")
    assert len(fold([scheduled(), other]).visible(at(0))) == 2


# The table as the protocol has it (PROTOCOL §c.7), then cell by cell.

PROTOCOL = """
absent    | → available | unknown     | unknown  | unknown     | unknown  | unknown     | unknown        | unknown         | unknown
hidden    | idempotent  | not_visible | stale    | stale       | stale    | stale       | stale          | not_completed   | mark
visible   | idempotent  | → claimed   | stale    | stale       | stale    | stale       | stale          | not_completed   | mark
claimed   | idempotent  | active      | → extend | → completed | → failed | → available | active         | not_completed   | mark
lapsed    | idempotent  | → claimed   | expired  | expired     | expired  | → expired   | → expired      | not_completed   | mark
completed | idempotent  | terminal    | stale    | idempotent  | stale    | stale       | stale          | → applied       | mark
failed    | idempotent  | terminal    | stale    | stale       | stale    | stale       | stale          | → applied       | mark
expired   | idempotent  | terminal    | stale    | stale       | stale    | stale       | stale          | not_completed   | mark
"""  # noqa: E501 - a table
WORDS = {
    "unknown": "unknown_runnable_intent",
    "not_visible": "attempt_not_visible",
    "stale": "stale_claim",
    "active": "active_claim",
    "expired": "expired_claim",
    "terminal": "terminal_attempt",
    "not_completed": "result_not_completed",
    "→ available": ("create", "release"),
    "idempotent": ("compare", "repeat"),
    "→ claimed": ("claim",),
    "→ extend": ("extend",),
    "→ completed": ("complete",),
    "→ failed": ("fail",),
    "→ expired": ("expire",),
    "→ applied": ("apply",),
    "mark": ("mark",),
}


def test_the_table_is_the_protocols():
    rows = [[cell.strip() for cell in row.split("|")] for row in PROTOCOL.strip().splitlines()]
    assert [row[0] for row in rows] == list(TABLE)
    for state, *cells in rows:
        for kind, cell in zip(COLUMNS, cells, strict=True):
            meant = WORDS[cell]
            assert TABLE[state][kind] == meant or TABLE[state][kind] in meant, (state, kind)


AVAILABLE, CLAIMED = [started(), scheduled(visible=5)], [started(), scheduled(), claimed(1, until=60)]
HISTORIES = {
    "absent": [started()],
    "hidden": AVAILABLE,
    "visible": AVAILABLE,
    "claimed": CLAIMED,
    "lapsed": CLAIMED,
    "completed": [*CLAIMED, completed(10)],
    "failed": [*CLAIMED, failed(10)],
    "expired": [*CLAIMED, owned("claim_expired", 60, proof="lease")],
}
NOW = {"hidden": 4, "visible": 5, "claimed": 59, "lapsed": 60}


def meeting(kind: str, state: str) -> Fact:
    """A fact that meets an attempt in this state, with the current fence."""
    seconds = NOW.get(state, 70)
    same = {"attempt_scheduled": intent(visible=5 if state in {"hidden", "visible"} else 0)}
    more = {
        "attempt_claimed": {"claim_id": "b", "owner": "node", "lease_until": at(200)},
        "attempt_heartbeat": {"lease_until": at(200)},
        "attempt_completed": {"result": {"value": "ok"}},
        "attempt_failed": {"ended_by": "outcome"},
        "claim_expired": {"proof": "lease"},
        "runnable_applied": {"result": {"value": "ok"}, "transition": "next"},
    }
    data = same.get(kind) or {"runnable_key": KEY, "claim_id": "a", **more.get(kind, {})}
    return Fact(kind, 7, "default", at(seconds), 1, data)


@pytest.mark.parametrize("kind", COLUMNS)
@pytest.mark.parametrize("state", TABLE)
def test_a_cell_of_the_table(state, kind):
    history, odd = HISTORIES[state], meeting(kind, state)
    before = fold(history)
    assert state_of(before.attempts.get(KEY), odd) == state
    cell = TABLE[state][kind]
    if cell in ANOMALIES:
        changes_only_anomalies(history, odd, cell)
    else:
        assert cell in ACTIONS
        after = fold([*history, odd])
        assert reasons(after) == []
        expected = {"compare": before, "repeat": before}.get(cell)
        assert expected is None or after == expected
        becomes = {
            "create": "available",
            "claim": "claimed",
            "extend": "claimed",
            "complete": "completed",
            "fail": "failed",
            "release": "available",
            "expire": "expired",
        }.get(cell)
        assert becomes is None or after.attempts[KEY].status == becomes


@pytest.mark.parametrize("kind", COLUMNS)
@pytest.mark.parametrize("state", TABLE)
def test_every_cell_is_terminal_run_after_the_end(state, kind):
    """The last row of the table, R72."""
    changes_only_anomalies([*HISTORIES[state], terminal()], meeting(kind, state), "terminal_run")


def test_an_anomaly_can_be_raised():
    """The knob: `on_anomaly="raise"`."""
    with pytest.raises(ProtocolAnomaly, match="live_wakeup_emitted is unknown_runnable_intent") as caught:
        fold([wakeup()], on_anomaly="raise")
    with pytest.raises(ProtocolAnomaly):
        replay([RECORDS["wakeup"]], on_anomaly="raise")
    assert (caught.value.instance_id, caught.value.rev) == (7, 1)


@pytest.mark.parametrize(
    "bad",
    [
        fact("no_such_kind"),
        fact("attempt_claimed", runnable_key=KEY),
        fact("attempt_scheduled", **{**intent(), "visible_at": "soon"}),
        fact("runnables_planned", runnables=[{}]),
        fact("runnables_planned", runnables=["a"]),
        fact("run_terminal", status="gone", step="begin", visit=1, round=0, attempt=0),
        Fact("attempt_scheduled", 8, "default", at(0), 1, intent()),
    ],
    ids=lambda one: one.kind,
)
def test_what_is_incomplete_is_malformed(bad):
    """C7: semantic damage is an anomaly, not an error."""
    changes_only_anomalies([started()], bad, "malformed_entry")


def test_what_needs_a_run_is_malformed_without_one():
    changes_only_anomalies([], terminal(), "malformed_entry")
