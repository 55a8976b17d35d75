"""I13 on hand-made histories of pauses and decisions: what is planted is reported, and nothing in the lawful one."""

from __future__ import annotations

from typing import Any

import pytest
from tests.invariants.history_builder import HistoryBuilder, run

PAUSE = {"queue": "default", "machine": None, "until": None}


@pytest.fixture
def builder() -> HistoryBuilder:
    found = HistoryBuilder()
    found.put(1)
    return found


def test_a_pause_and_its_resume(builder):
    builder.pause(1)
    builder.resume(1)
    run(builder)
    builder.pause(1)
    builder.commit(1, "runnable", visit=2, hold=4, eligible_at=builder.now)
    builder.resume(1)
    run(builder, claim="b")
    builder.pause(1)
    builder.commit(1, "done")
    assert builder.sentences() == ""


def test_a_claim_of_what_is_paused(builder):
    builder.pause(1)
    builder.pick(1, "a", hold=0)
    assert "it was paused, and entered a step" in builder.sentences()


def test_a_step_that_was_asked_to_pause_and_runs_ahead(builder):
    run(builder)
    builder.pause(1)
    builder.commit(1, "executing", visit=2)
    assert "it was paused, and entered a step" in builder.sentences()


def test_a_step_that_was_asked_to_pause_and_is_offered_again(builder):
    run(builder)
    builder.pause(1)
    builder.commit(1, "runnable", visit=2)
    assert "it is paused, and offered" in builder.sentences()


def test_a_pause_that_nobody_asked_for_or_ended(builder):
    builder.put(1, hold=4, request='{"kind": "pause"}')
    assert "paused without a command" in builder.sentences()
    builder.put(1, hold=0, request=None)
    assert "resumed without a command" in builder.sentences()
    builder.pause(1)
    builder.put(1, hold=0, request=None, priority=3)  # no move at all
    assert "nobody has resumed it" in builder.sentences()


def pause_queue(builder: HistoryBuilder, target: str = "default", **result: Any) -> None:
    builder.effect("asked", command="pause", key="k", target=target)
    builder.tx += 1
    builder.sleep(1)
    builder.receipt(target, "pause", PAUSE | result, builder.tx, "k")
    builder.effect("answered", command="pause", key="k", target=target, answer=target)


@pytest.mark.parametrize(
    ("target", "result", "wrong"),
    [
        ("default", {}, True),
        ("default/m", {"machine": "m"}, True),
        ("default/n", {"machine": "n"}, False),
        ("other", {"queue": "other"}, False),
        ("default", {"until": "1970-01-01T00:16:43+00:00"}, False),  # over by then
    ],
)
def test_a_claim_in_a_paused_queue(builder, target, result, wrong):
    pause_queue(builder, target, **result)
    builder.pick(1, "a")
    assert (f"and {target} was paused" in builder.sentences()) is wrong
    assert builder.broken() == ({"I13"} if wrong else set())


def test_a_claim_before_the_answer_and_after_the_resume(builder):
    builder.put(2)
    builder.effect("asked", command="pause", key="k", target="default")
    builder.tx += 1
    builder.receipt("default", "pause", PAUSE, builder.tx, "k")
    builder.pick(1, "a")
    builder.effect("answered", command="pause", key="k", target="default", answer="default")
    builder.sleep(1)
    builder.tx += 1
    builder.receipt("default", "resume", PAUSE, builder.tx)
    builder.pick(2, "b")
    assert builder.sentences() == ""


def ask(builder: HistoryBuilder, **columns: Any) -> None:
    """It waits for an approval."""
    builder.pick(1, "a")
    builder.begin(1)
    builder.end(1, outcome="Approval", next="go")
    manual = {"kind": "approval", "then": "go"}
    builder.commit(1, "awaiting_signal", **({"visit": 2, "awaits": [], "manual": manual} | columns))


def test_a_decision_that_counts_once(builder):
    ask(builder)
    builder.decide(1)
    builder.pick(1, "b")
    builder.begin(1, decision={"kind": "approved", "by": "ada"})
    assert builder.sentences() == ""


def test_a_boundary_whose_step_is_not_the_one_of_its_outcome(builder):
    ask(builder, manual={"kind": "approval", "then": "other"})
    assert builder.broken() == {"I1"}


def test_a_second_decision(builder):
    ask(builder)
    builder.decide(1)
    builder.decide(1, "approve", by="bob")
    assert "its transaction has not approved it" in builder.sentences()


def test_a_decision_that_nobody_has_taken(builder):
    ask(builder)
    builder.decide(1)
    builder.receipts.clear()
    assert "it was approved by 0 commands" in builder.sentences()


def test_a_row_and_a_step_that_tell_another_decision(builder):
    ask(builder)
    builder.decide(1, comment="what nobody wrote")
    assert "its row tells another decision" in builder.sentences()
    builder.pick(1, "b")
    builder.begin(1, decision={"kind": "approved", "by": "bob"})
    assert "a step was told another decision" in builder.sentences()


def test_a_step_that_begins_when_its_claim_was_taken_reads_what_is_there_then(builder):
    """Its worker was stopped after the pick. Its outcome is stale; the row's decision may be gone."""
    ask(builder)
    builder.decide(1)
    builder.pick(1, "b")
    builder.put(
        1, status="runnable", claim_id=None, locked_by=None, lease_expires_at=None, attempt=1, crashes=1
    )
    builder.now += 1
    builder.effect("begin", 1, claim="b")
    assert "a step was told another decision" not in builder.sentences()
