"""I13 and I14 on hand-made histories: planted violations are reported, and nothing in the lawful one next to them."""

from __future__ import annotations

from typing import Any

import pytest
from tests.invariants.history_builder import HistoryBuilder, run


@pytest.fixture
def builder() -> HistoryBuilder:
    found = HistoryBuilder()
    found.put(1)
    return found


def ask(
    builder: HistoryBuilder, answer: object = None, *, key: str = "k", command: str = "cancel", **data: Any
) -> None:
    """What somebody who gave a command has noted."""
    builder.effect("asked", 1, command=command, key=key)
    builder.effect("answered", 1, command=command, key=key, **({"answer": answer} | data))


# -- I13 commands do what they answered


def test_a_command_that_did_what_it_answered(builder):
    builder.effect("asked", 1, command="cancel", key="k")
    builder.cancel(1, "k")
    builder.effect("answered", 1, command="cancel", key="k", answer="cancelled")
    ask(builder, "cancelled")  # again, with the same key
    assert builder.sentences() == ""


def test_an_answer_without_a_receipt(builder):
    ask(builder, "cancelled")
    assert builder.broken() == {"I13"}
    assert "no receipt" in builder.sentences()


def test_an_answer_that_its_receipt_does_not_give(builder):
    builder.effect("asked", 1, command="cancel", key="k")
    builder.cancel(1, "k")
    builder.effect("answered", 1, command="cancel", key="k", answer="requested")
    assert "says 'cancelled'" in builder.sentences()


def test_an_answer_before_the_commit(builder):
    builder.effect("asked", 1, command="cancel", key="k")
    builder.effect("answered", 1, command="cancel", key="k", answer="cancelled")
    builder.cancel(1, "k")
    assert "before it was committed" in builder.sentences()


def test_a_command_that_was_carried_out_twice(builder):
    builder.effect("asked", 1, command="cancel", key="k")
    builder.cancel(1, "k")
    tx = builder.put(1, status="runnable", attempt=0, crashes=0, request=None)
    builder.receipt(1, "retry", 1, tx)
    builder.cancel(1, "k")
    assert builder.broken() == {"I13"}
    assert "2 times" in builder.sentences()


def test_a_refusal_and_a_receipt(builder):
    builder.effect("asked", 1, command="cancel", key="k")
    builder.effect("answered", 1, command="cancel", key="k", refused="Conflict")
    builder.cancel(1, "k")
    assert "was refused, and carried out" in builder.sentences()
    builder.effect("asked", 1, command="cancel", key="k")  # nobody knows what came of this attempt
    assert builder.sentences() == ""


def test_a_receipt_without_its_effect(builder):
    builder.receipt(1, "cancel", "cancelled", builder.pick(1, "a"))
    assert "has not cancelled it" in builder.sentences()


def test_a_cancellation_that_nobody_asked_for(builder):
    builder.put(1, status="cancelled", request='{"kind": "cancel"}')
    assert builder.broken() == {"I13"}
    assert "nobody had asked" in builder.sentences()


def test_a_request_without_a_command(builder):
    builder.pick(1, "a")
    builder.put(1, request='{"kind": "cancel"}')
    assert "requested without a command" in builder.sentences()


@pytest.mark.parametrize(
    ("status", "columns"),
    [
        ("runnable", {"visit": 2}),  # Next
        ("executing", {"visit": 2}),  # Next, running ahead
        ("awaiting_signal", {"awaits": ["go"]}),
        ("failed", {}),
    ],
)
def test_an_instance_that_was_asked_to_end_and_goes_on(builder, status, columns):
    run(builder)
    builder.ask(1)
    builder.commit(1, status, **columns)
    assert builder.broken() == {"I13"}
    assert "asked to end, and went on" in builder.sentences()


def test_an_instance_that_was_asked_to_end_and_is_given_back(builder):
    builder.pick(1, "a")
    builder.ask(1)
    builder.give_back(1, crash=True)
    assert builder.broken() == {"I13"}


@pytest.mark.parametrize("end", ["done", "cancelled"])
def test_an_instance_that_was_asked_to_end_and_ends(builder, end):
    run(builder)
    builder.ask(1)
    builder.put(1, lease_expires_at=builder.now + 20)  # renewed meanwhile
    builder.commit(1, end)
    assert builder.sentences() == ""


def test_force_takes_the_claim_from_a_step_that_runs(builder):
    builder.pick(1, "a", writer="w")
    builder.begin(1)
    row = builder.rows[1]
    builder.cancel(1)
    builder.effect("left", 1, row=row)
    assert builder.sentences() == ""


def test_a_worker_that_gives_up_a_claim_whose_step_runs(builder):
    builder.pick(1, "a", writer="w")
    builder.begin(1)
    row = builder.rows[1]
    builder.ask(1)
    builder.put(1, status="cancelled", writer="w", claim_id=None, locked_by=None, lease_expires_at=None)
    builder.effect("left", 1, row=row)
    assert builder.broken() == {"I5"}


# -- I14 retention removes nothing that lives


def end(builder: HistoryBuilder, number: int) -> None:
    builder.pick(number, f"c{number}")
    builder.commit(number, "done")


def test_a_row_that_ended_long_ago(builder):
    end(builder, 1)
    builder.sleep(10)
    builder.put(1, status=None)
    assert builder.sentences(retention=10.0) == ""
    assert builder.broken(retention=20.0) == {"I14"}


def test_a_row_that_occupies_its_key():
    builder = HistoryBuilder()
    builder.put(1, unique_key="k", unique_scope=("runnable", "executing", "done"))
    end(builder, 1)
    builder.put(1, status=None)
    assert builder.broken() == {"I14"}
    assert "unique key" in builder.sentences()


@pytest.mark.parametrize(("barrier", "wrong"), [(2, {"I14"}), (1, set[str]()), (None, {"I14"})])
def test_a_child_that_its_parent_may_read(barrier, wrong):
    builder = HistoryBuilder()
    builder.put(1, visit=2, children_total=1)
    builder.put(2, parent_id=1, barrier=barrier)
    end(builder, 2)
    builder.put(2, status=None)
    assert {name for name in builder.broken() if name == "I14"} == wrong
    builder.pick(1, "a")
    builder.commit(1, "done")
    builder.put(3, parent_id=1, barrier=barrier)
    end(builder, 3)
    builder.put(3, status=None)
    assert len([line for line in builder.sentences().splitlines() if line.startswith("I14")]) == len(wrong)
