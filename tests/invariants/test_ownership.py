"""I2, I3, I4, I8 and I12: a planted violation each, beside what is none."""

from __future__ import annotations

import attrs
import pytest
from tests.invariants.history_builder import LEASE, Tale, run


@pytest.fixture
def tale() -> Tale:
    tale = Tale()
    tale.put(1)
    return tale


def test_claims_that_come_and_go_are_fine(tale):
    tale.pick(1, "a")
    tale.give_back(1)
    tale.pick(1, "b")
    tale.sleep(LEASE)
    tale.give_back(1, crash=True, eligible_at=tale.now + 3)
    run(tale, claim="c", outcome="Retry")
    tale.commit(1, "runnable", attempt=3)
    run(tale, claim="d")
    tale.commit(1, "done")
    assert tale.sentences() == ""


# -- I2 one live claim per instance


def test_a_claim_that_takes_a_live_one_over(tale):
    tale.pick(1, "a")
    tale.pick(1, "b")
    assert tale.broken() == {"I2"}
    assert "while another claim of it was live" in tale.sentences()


@pytest.mark.parametrize("status", ["awaiting_signal", "awaiting_children"])
def test_a_claim_of_a_parked_instance(tale, status):
    run(tale)
    tale.commit(1, status, visit=2, awaits=["go"])
    tale.pick(1, "b")
    assert tale.broken() == {"I2"}


def test_a_step_that_ran_twice_under_one_claim(tale):
    tale.pick(1, "a")
    tale.begin(1)
    tale.begin(1)
    assert tale.broken() == {"I2"}


def robbed(tale: Tale) -> Tale:
    """A claim is taken back at once, and its worker goes on."""
    tale.pick(1, "a")
    row = tale.rows[1]
    tale.begin(1)
    tale.give_back(1, crash=True)
    tale.tell("left", 1, row=row)
    return tale


def test_a_claim_that_was_taken_from_the_living(tale):
    assert robbed(tale).broken() == {"I2"}
    assert "taken from a worker that was alive" in tale.sentences()


def test_a_claim_of_a_worker_that_is_dead_or_cut_off(tale):
    tale.pick(1, "a")
    tale.begin(1)
    tale.give_back(1, crash=True)
    assert tale.broken() == set()  # it never told anything again
    tale = Tale()
    tale.put(1)
    tale.tell("sessions_lost", pid=9)
    assert robbed(tale).broken() == set()


def test_a_worker_that_stands_still_is_alive(tale):
    tale.tell("paused")
    assert robbed(tale).broken() == {"I2"}
    tale = Tale()
    tale.put(1)
    tale.tell("paused")
    tale.tell("resumed")  # its keeper may have given up its session, and needs a moment for a new one
    assert robbed(tale).broken() == set()


# -- I3 fences only grow


def test_a_visit_that_goes_back(tale):
    run(tale)
    tale.commit(1, "runnable", visit=2)
    tale.put(1, visit=1)
    assert "I3" in tale.broken()
    assert "visit went back from 2 to 1" in tale.sentences()


def test_a_visit_that_leaps(tale):
    run(tale)
    tale.commit(1, "runnable", visit=3)
    assert "I3" in tale.broken()


def test_a_visit_that_grows_by_itself(tale):
    tale.put(1, visit=2)
    assert "visit grew without an outcome" in tale.sentences()


def test_a_revision_that_goes_back(tale):
    run(tale)
    tale.commit(1, "runnable", rev=5, attempt=1)
    tale.pick(1, "b")
    tale.commit(1, "runnable", rev=4, attempt=2)
    assert tale.broken() == {"I3"}


def test_a_claim_that_comes_back(tale):
    tale.pick(1, "a")
    tale.give_back(1)
    tale.pick(1, "b")
    tale.give_back(1)
    tale.pick(1, "a")
    assert tale.broken() == {"I3"}
    assert "came back" in tale.sentences()


def test_a_claim_that_two_instances_share(tale):
    tale.put(2)
    tale.pick(1, "a")
    tale.pick(2, "a")
    assert tale.broken() == {"I3"}


# -- I4 a stale write changes nothing


@pytest.mark.parametrize(
    "columns", [{"state": 7}, {"step": "b"}, {"attempt": 2}, {"status": "done"}, {"claim_id": "a"}]
)
def test_a_write_to_a_row_that_nobody_owns(tale, columns):
    tale.pick(1, "a")
    tale.give_back(1)
    tale.put(1, **columns)  # what the old owner would do if nothing fenced it
    assert "I4" in tale.broken()


@pytest.mark.parametrize("columns", [{"state": 7}, {"step": "b"}, {"attempt": 2}, {"partition_key": "k"}])
def test_a_write_under_a_foreign_claim(tale, columns):
    tale.pick(1, "a")
    tale.put(1, **columns)  # no outcome: it would end the claim, or advance the visit
    assert tale.broken() == {"I4"}


def test_an_outcome_that_another_worker_wrote(tale):
    tale.pick(1, "a", locked_by="n1", writer="w1")
    tale.give_back(1, writer="w2", crash=True)  # anybody may reap
    tale.pick(1, "b", locked_by="n2", writer="w2")
    tale.commit(1, "done", writer="w1")
    assert tale.broken() == {"I4"}
    assert "w1 wrote under a claim of w2" in tale.sentences()


def test_an_outcome_after_the_lease(tale):
    tale.pick(1, "a")
    tale.sleep(LEASE + 1)
    tale.commit(1, "done")
    assert tale.broken() == set()
    assert tale.broken(late_commit="reject") == {"I4"}


def test_a_wake_that_changes_the_state(tale):
    run(tale)
    tale.commit(1, "awaiting_signal", visit=2, awaits=["go"], await_step="b")
    tale.put(1, status="runnable", step="b", await_step=None, state=9)
    assert tale.broken() == {"I4"}


def test_a_write_behind_the_audits_back(tale):
    tale.rows[1] = attrs.evolve(tale.rows[1], state=5)
    assert tale.broken() == {"I4"}
    tale.put(1, hold=1)
    assert tale.broken() == {"I4"}


# -- I8 terminal rows never change


@pytest.mark.parametrize("columns", [{"result": 3}, {"status": "runnable"}, {"inbox": True}, {"rev": 9}])
@pytest.mark.parametrize("status", ["done", "failed"])
def test_a_write_to_an_instance_that_has_ended(tale, status, columns):
    run(tale)
    tale.commit(1, status)
    tale.put(1, **columns)
    assert tale.broken() == {"I8"}


def test_an_operator_may_retry(tale):
    run(tale)
    tale.commit(1, "failed")
    tale.put(1, status="runnable", claim_id=None, attempt=0, crashes=0, rev=2)
    assert tale.broken() == {"I8"}
    assert tale.broken(operator=True) == set()
    tale.tell("retried", 1)
    assert tale.broken() == set()


# -- I12 nothing stays executing without a live owner


def test_a_claim_that_nobody_took_back(tale):
    tale.pick(1, "a")
    tale.sleep(LEASE + 7)
    assert tale.broken() == {"I12"}
    tale.give_back(1, crash=True)
    assert tale.broken() == {"I12"}


def test_a_claim_that_was_taken_back_in_time(tale):
    tale.pick(1, "a")
    tale.sleep(LEASE + 4)
    tale.give_back(1, crash=True)
    assert tale.broken() == set()


def test_nobody_can_reap_in_an_outage(tale):
    tale.pick(1, "a")
    tale.sleep(LEASE)
    tale.tell("outage")
    tale.sleep(60)
    tale.tell("recovered")
    tale.sleep(3)
    tale.give_back(1, crash=True)
    assert tale.broken() == set()


def test_nor_while_somebody_holds_the_row(tale):
    tale.pick(1, "a")
    tale.sleep(LEASE + 2)
    signal = tale.put(1, inbox=True)  # in a transaction that stays open
    tale.sleep(20)
    tale.put(2)
    last = tale.changes[-1]
    seen = attrs.evolve(last.snapshot, xmin=signal, running=frozenset({signal}))
    tale.changes[-1] = attrs.evolve(last, snapshot=seen)
    tale.give_back(1, crash=True)
    assert tale.broken() == set()


def test_a_violation_tells_its_story(tale):
    tale.pick(1, "aaaaaaaa-1")
    tale.pick(1, "bbbbbbbb-2", writer="w2")
    text = tale.sentences()
    assert (
        text.splitlines()[0] == "I2, instance 1: an instance was claimed while another claim of it was live"
    )
    assert "+1.0000 s" in text
    assert "aaaaaaaa" in text
    assert "by w2" in text
