"""I6 and I7: a planted violation each, beside what is none."""

from __future__ import annotations

import pytest
from tests.invariants.history_builder import Tale


@pytest.fixture
def tale() -> Tale:
    tale = Tale()
    tale.put(1)
    return tale


def park(tale: Tale, claim: str = "a", *, awaited: tuple[int, ...] = (), **columns) -> int:
    """Run the step of an instance until it awaits."""
    tale.pick(1, claim)
    tale.begin(1, awaited=list(awaited), signals=list(awaited))
    tale.end(1, outcome="Await", awaits=["go"])
    return tale.commit(1, "awaiting_signal", **({"awaits": ["go"]} | columns))


def wake(tale: Tale, tx: int | None = None) -> None:
    tale.put(1, tx=tx, status="runnable", await_deadline=None)


def signalled(tale: Tale, signal: int = 7) -> None:
    """A signal for somebody who sleeps: it wakes him in its own transaction."""
    wake(tale, tale.send(signal, 1))


# -- I6 a signal is consumed by exactly the commit that saw it


def test_signals_that_are_handed_and_taken_are_fine(tale):
    park(tale)
    signalled(tale)
    tale.pick(1, "b")
    tale.begin(1, awaited=[7], signals=[7])
    tale.end(1, outcome="Next", next="start", consumed=[])
    tale.take(7, tx=tale.commit(1, "runnable", visit=2, awaits=None))
    tale.send(8, 1)
    tale.pick(1, "c")
    tale.begin(1, awaited=[], signals=[8])
    tale.end(1, outcome="Next", next="start", consumed=[8])
    tale.take(8, tx=tale.commit(1, "runnable", visit=3))
    tale.send(9, 1)
    tale.pick(1, "d")
    tale.begin(1, awaited=[], signals=[9])
    tale.end(1, outcome="Done")
    tale.take(9, tx=tale.commit(1, "done"))
    assert tale.sentences() == ""


def test_a_signal_that_nobody_consumed(tale):
    tale.send(7, 1)
    tale.take(7)
    assert tale.broken() == {"I6"}
    assert "by no outcome" in tale.sentences()


def test_a_signal_that_a_release_consumed(tale):
    tale.send(7, 1)
    tale.pick(1, "a")
    tale.take(7, tx=tale.give_back(1))
    assert tale.broken() == {"I6"}


def test_a_signal_that_the_step_was_not_given(tale):
    park(tale)
    signalled(tale)
    tale.pick(1, "b")
    tale.begin(1, awaited=[7], signals=[7])
    tale.send(8, 1)  # while it runs
    tale.end(1, outcome="Next", next="start", consumed=[])
    commit = tale.commit(1, "runnable", visit=2, awaits=None)
    tale.take(7, tx=commit)
    tale.take(8, tx=commit)
    assert tale.broken() == {"I6"}
    assert "signal 8 was consumed by a step that was not given it" in tale.sentences()


def test_a_signal_that_outlives_the_outcome_it_was_handed_to(tale):
    park(tale)
    signalled(tale)
    tale.pick(1, "b")
    tale.begin(1, awaited=[7], signals=[7])
    tale.end(1, outcome="Next", next="start", consumed=[])
    tale.commit(1, "runnable", visit=2, awaits=None)
    assert tale.broken() == {"I6"}
    assert "outlived its outcome" in tale.sentences()


def test_a_retry_consumes_nothing(tale):
    park(tale)
    signalled(tale)
    tale.pick(1, "b")
    tale.begin(1, awaited=[7], signals=[7])
    tale.end(1, outcome="Retry")
    commit = tale.commit(1, "runnable", attempt=1)
    assert tale.sentences() == ""
    tale.take(7, tx=commit)
    assert "a retry consumed a signal" in tale.sentences()


def test_a_failure_consumes_nothing(tale):
    """It may be retried, and is then handed the same."""
    park(tale)
    signalled(tale)
    tale.pick(1, "b")
    tale.begin(1, awaited=[7], signals=[7])
    tale.end(1, outcome="Stop")
    commit = tale.commit(1, "failed")
    assert tale.sentences() == ""
    tale.take(7, tx=commit)
    assert "a failure consumed a signal" in tale.sentences()


def test_an_await_keeps_what_it_awaits_again(tale):
    park(tale)
    signalled(tale)
    park(tale, "b", awaited=(7,))
    assert tale.sentences() == ""
    signalled(tale, 8)
    park(tale, "c", awaited=(7, 8), awaits=["other"])
    assert tale.broken() == {"I6"}


def test_an_inbox_that_outlives_its_instance(tale):
    tale.send(7, 1)
    tale.pick(1, "a")
    tale.begin(1)
    tale.end(1)
    tale.commit(1, "done")
    assert tale.broken() == {"I6"}


# -- I7 no wake-up is lost


def test_a_signal_that_does_not_wake(tale):
    park(tale)
    tale.send(7, 1)
    assert tale.broken() == {"I7"}
    assert "it sleeps on" in tale.sentences()


def test_a_wake_that_comes_in_another_transaction(tale):
    park(tale)
    tale.send(7, 1)
    wake(tale)
    assert tale.broken() == {"I7"}


def test_a_signal_of_another_name_does_not_wake(tale):
    park(tale)
    tale.send(7, 1, "other")
    assert tale.sentences() == ""


def test_a_park_that_overlooks_a_signal(tale):
    tale.pick(1, "a")
    tale.begin(1)
    tale.send(7, 1)
    tale.end(1)
    commit = tale.commit(1, "awaiting_signal", awaits=["go"])
    assert tale.broken() == {"I7"}
    wake(tale, commit)
    assert tale.sentences() == ""


def test_a_signal_that_was_acknowledged_and_never_written(tale):
    tale.tell("sent", 1, name="go")
    assert tale.broken() == {"I7"}
    tale.send(7, 1)
    assert tale.sentences() == ""
    tale.tell("sent", 1, name="go")
    assert tale.broken() == {"I7"}


def test_a_deadline_that_nobody_heeds(tale):
    park(tale, await_deadline=tale.now + 30)
    tale.sleep(45)
    assert tale.sentences() == ""
    tale.sleep(20)
    assert tale.broken() == {"I7"}


def test_a_due_row_that_nobody_takes(tale):
    tale.sleep(25)
    assert tale.broken() == {"I7"}
    assert tale.broken(ended=tale.now - 10) == set()


def test_a_held_row_that_nobody_offers(tale):
    tale.put(1, partition_key="k", hold=1)
    tale.sleep(25)
    assert "held behind its key" in tale.sentences()


@pytest.mark.parametrize("columns", [{"hold": 2}, {"eligible_at": 9e9}])
def test_rows_that_have_a_reason_to_wait(columns):
    tale = Tale()
    tale.put(1, **columns)
    tale.sleep(25)
    assert tale.sentences() == ""


def test_a_queue_that_is_busy_has_a_reason_to_let_rows_wait(tale):
    tale.put(2)
    tale.sleep(25)
    tale.pick(2, "a")
    assert tale.sentences() == ""


def test_an_outage_does_not_count(tale):
    tale.tell("outage")
    tale.sleep(100)
    tale.tell("recovered")
    assert tale.sentences() == ""
