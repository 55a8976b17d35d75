"""I1 to I5, I8 and I12 on hand-made histories: each planted violation is reported, its lawful neighbour is not."""

from __future__ import annotations

import attrs
import pytest
from tests.invariants.history_builder import LEASE, HistoryBuilder, run


def one() -> HistoryBuilder:
    builder = HistoryBuilder()
    builder.put(1)
    return builder


@pytest.fixture
def builder() -> HistoryBuilder:
    return one()


def test_claims_that_come_and_go_are_fine(builder):
    builder.pick(1, "a")
    builder.give_back(1)
    builder.pick(1, "b")
    builder.sleep(LEASE)
    builder.give_back(1, crash=True, eligible_at=builder.now + 3)
    run(builder, claim="c", outcome="Retry")
    builder.commit(1, "runnable", attempt=3)
    run(builder, claim="d")
    builder.commit(1, "done")
    assert builder.sentences() == ""


# -- I1 commit before proceed


def test_a_step_that_runs_from_committed_rows_is_fine():
    builder = one()
    run(builder, outcome="Next", next="b")
    builder.commit(1, "executing", visit=2, step="b")
    builder.begin(1)
    builder.end(1, outcome="Done")
    builder.commit(1, "done")
    assert builder.sentences() == ""


def test_a_step_that_ran_ahead_of_its_commit():
    builder = one()
    row = run(builder, outcome="Next", next="b")
    builder.begin(1, row=attrs.evolve(row, visit=2, step="b"))  # the commit was lost: no row tells of visit 2
    builder.give_back(1, crash=True)
    assert builder.broken() == {"I1"}
    assert "never committed" in builder.sentences()


def forgotten(builder: HistoryBuilder, **columns) -> HistoryBuilder:
    """The server crashes, and forgets a claim whose step has begun."""
    builder.put(2)
    builder.pick(2, "x")
    builder.effect("begin", 1, row=attrs.evolve(builder.rows[1], claim_id="a", **columns))
    return builder


def test_a_claim_that_a_crash_of_the_server_forgot():
    builder = forgotten(one())
    assert builder.broken() == {"I1"}  # there was no crash
    builder.effect("sessions_lost")
    assert builder.sentences() == ""
    builder = forgotten(one(), visit=2)  # a visit that was never committed
    builder.effect("outage")
    assert builder.broken() == {"I1"}
    builder = HistoryBuilder()
    builder.put(1, partition_key="k")  # its pick waits for the disk
    forgotten(builder).effect("outage")
    assert builder.broken() == {"I1"}


def test_a_step_that_began_while_its_commit_was_under_way():
    builder = one()
    run(builder, outcome="Next", next="b")
    commit = builder.commit(1, "executing", visit=2, step="b")
    builder.begin(1)
    builder.end(1)
    builder.put(2)  # its snapshot does not see that commit yet
    last = builder.changes[-1]
    seen = attrs.evolve(last.snapshot, xmin=commit, xmax=last.txid, running=frozenset({commit}))
    builder.changes[-1] = attrs.evolve(last, snapshot=seen)
    assert builder.broken() == {"I1"}
    assert "before the row was committed" in builder.sentences()


def test_a_step_that_began_before_its_pick():
    builder = one()
    builder.begin(1, row=attrs.evolve(builder.rows[1], claim_id="a"))
    builder.pick(1, "a")
    assert "before the row was written" in builder.sentences()


def test_a_step_that_is_not_the_rows():
    builder = one()
    builder.pick(1, "a")
    builder.begin(1, step="other")
    assert builder.broken() == {"I1"}


def test_an_outcome_that_was_committed_while_its_step_ran():
    builder = one()
    builder.pick(1, "a")
    builder.begin(1)
    row = builder.rows[1]
    builder.commit(1, "runnable", visit=2)
    builder.effect("end", 1, row=row)
    assert builder.broken() == {"I1"}
    assert "before its step had ended" in builder.sentences()


def test_a_cancellation_replaces_every_outcome_but_done():
    builder = one()
    run(builder, outcome="Retry")
    builder.commit(1, "cancelled")
    assert builder.sentences() == ""
    builder = one()
    run(builder, outcome="Done")
    builder.commit(1, "cancelled")
    assert builder.broken() == {"I1"}


def test_an_outcome_of_a_step_that_never_ran():
    builder = one()
    run(builder, outcome="Next", next="start")
    builder.commit(1, "runnable", visit=2)
    builder.pick(1, "b")
    builder.commit(1, "done")
    assert "never ran" in builder.sentences()


def test_an_outcome_that_the_step_did_not_return():
    builder = one()
    run(builder, outcome="Done")
    builder.commit(1, "runnable", visit=2)
    assert "the step returned Done" in builder.sentences()
    builder = one()
    run(builder, outcome="Next", next="b")
    builder.commit(1, "runnable", visit=2, step="c")
    assert builder.broken() == {"I1"}


def test_an_outcome_that_was_refused_and_handled():
    builder = one()
    run(builder, outcome="Done")  # Postgres refused the result; the default `handle` stops
    builder.commit(1, "failed")
    assert builder.sentences() == ""


def test_an_insert_that_was_acknowledged_and_lost():
    builder = one()
    builder.effect("inserted", 1)
    assert builder.sentences() == ""
    builder.effect("inserted", 7)
    assert builder.broken() == {"I1"}


def test_an_instance_that_its_own_commit_deleted():
    builder = one()
    builder.put(1, status=None)
    assert builder.broken() == {"I1"}, "its step has not run"
    builder = one()
    run(builder)
    builder.put(1, status=None)
    assert builder.sentences() == ""
    builder = one()
    run(builder, outcome="Next")
    builder.put(1, status=None)
    assert builder.broken() == {"I1"}, "its step wanted something else"


def test_a_live_instance_that_was_deleted():
    builder = one()
    builder.put(1, status=None)
    assert builder.broken() == {"I1"}
    builder = one()
    run(builder)
    builder.commit(1, "done")
    builder.put(1, status=None)
    assert builder.sentences() == ""


# -- I2 one live claim per instance


def test_a_claim_that_takes_a_live_one_over(builder):
    builder.pick(1, "a")
    builder.pick(1, "b")
    assert builder.broken() == {"I2"}
    assert "while another claim of it was live" in builder.sentences()


@pytest.mark.parametrize("status", ["awaiting_signal", "awaiting_children"])
def test_a_claim_of_a_parked_instance(builder, status):
    run(builder)
    builder.commit(1, status, visit=2, awaits=["go"])
    builder.pick(1, "b")
    assert builder.broken() == {"I2"}


def test_a_step_that_ran_twice_under_one_claim(builder):
    builder.pick(1, "a")
    builder.begin(1)
    builder.begin(1)
    assert builder.broken() == {"I2"}


def robbed(builder: HistoryBuilder) -> HistoryBuilder:
    """A claim is taken back at once, and its worker goes on."""
    builder.pick(1, "a")
    row = builder.rows[1]
    builder.begin(1)
    builder.give_back(1, crash=True)
    builder.effect("left", 1, row=row)
    return builder


def test_a_claim_that_was_taken_from_the_living(builder):
    assert robbed(builder).broken() == {"I2"}
    assert "taken from a worker that was alive" in builder.sentences()


def test_a_claim_of_a_worker_that_is_dead_or_cut_off(builder):
    builder.pick(1, "a")
    builder.begin(1)
    builder.give_back(1, crash=True)
    assert builder.broken() == set()  # it recorded nothing afterwards
    builder = HistoryBuilder()
    builder.put(1)
    builder.effect("sessions_lost", pid=9)
    assert robbed(builder).broken() == set()


def test_a_worker_that_stands_still_is_alive(builder):
    builder.effect("paused")
    assert robbed(builder).broken() == {"I2"}
    builder = HistoryBuilder()
    builder.put(1)
    builder.effect("paused")
    builder.effect("resumed")  # its keeper may have given up its session, and needs a moment for a new one
    assert robbed(builder).broken() == set()


# -- I3 fences only grow


def test_a_visit_that_goes_back(builder):
    run(builder)
    builder.commit(1, "runnable", visit=2)
    builder.put(1, visit=1)
    assert "I3" in builder.broken()
    assert "visit went back from 2 to 1" in builder.sentences()


def test_a_visit_that_leaps(builder):
    run(builder)
    builder.commit(1, "runnable", visit=3)
    assert "I3" in builder.broken()


def test_a_visit_that_grows_by_itself(builder):
    builder.put(1, visit=2)
    assert "visit grew without an outcome" in builder.sentences()


def test_a_revision_that_goes_back(builder):
    run(builder)
    builder.commit(1, "runnable", rev=5, attempt=1)
    builder.pick(1, "b")
    builder.commit(1, "runnable", rev=4, attempt=2)
    assert builder.broken() == {"I3"}


def test_a_claim_that_comes_back(builder):
    builder.pick(1, "a")
    builder.give_back(1)
    builder.pick(1, "b")
    builder.give_back(1)
    builder.pick(1, "a")
    assert builder.broken() == {"I3"}
    assert "came back" in builder.sentences()


def test_a_claim_that_two_instances_share(builder):
    builder.put(2)
    builder.pick(1, "a")
    builder.pick(2, "a")
    assert builder.broken() == {"I3"}


# -- I4 a stale write changes nothing


@pytest.mark.parametrize(
    "columns", [{"state": 7}, {"step": "b"}, {"attempt": 2}, {"status": "done"}, {"claim_id": "a"}]
)
def test_a_write_to_a_row_that_nobody_owns(builder, columns):
    builder.pick(1, "a")
    builder.give_back(1)
    builder.put(1, **columns)  # what the old owner would do if nothing fenced it
    assert "I4" in builder.broken()


@pytest.mark.parametrize("columns", [{"state": 7}, {"step": "b"}, {"attempt": 2}, {"partition_key": "k"}])
def test_a_write_under_a_foreign_claim(builder, columns):
    builder.pick(1, "a")
    builder.put(1, **columns)  # no outcome: it would end the claim, or advance the visit
    assert builder.broken() == {"I4"}


def test_an_outcome_that_another_worker_wrote(builder):
    builder.pick(1, "a", locked_by="n1", writer="w1")
    builder.give_back(1, writer="w2", crash=True)  # anybody may reap
    builder.pick(1, "b", locked_by="n2", writer="w2")
    builder.commit(1, "done", writer="w1")
    assert builder.broken() == {"I4"}
    assert "w1 wrote under a claim of w2" in builder.sentences()


def test_an_outcome_after_the_lease(builder):
    builder.pick(1, "a")
    builder.sleep(LEASE + 1)
    builder.commit(1, "done")
    assert builder.broken() == set()
    assert builder.broken(late_commit="reject") == {"I4"}


def test_a_wake_that_changes_the_state(builder):
    run(builder)
    builder.commit(1, "awaiting_signal", visit=2, awaits=["go"], await_step="b")
    builder.put(1, status="runnable", step="b", await_step=None, state=9)
    assert builder.broken() == {"I4"}


def test_a_write_behind_the_audits_back(builder):
    builder.rows[1] = attrs.evolve(builder.rows[1], state=5)
    assert builder.broken() == {"I4"}
    builder.put(1, hold=1)
    assert builder.broken() == {"I4"}


# -- I5 the trust window


def late(builder: HistoryBuilder, *, thread: bool = False) -> HistoryBuilder:
    """A step whose lease is over, and which goes on for five seconds."""
    more = {"thread": True} if thread else {}
    builder.pick(1, "a")
    row = builder.rows[1]
    builder.begin(1, **more)
    builder.sleep(LEASE)
    builder.give_back(1, crash=True)
    builder.sleep(5)
    builder.effect("end", 1, row=row, **more)
    return builder


def test_a_step_that_outlives_its_lease():
    assert late(one()).broken() == {"I5"}
    assert "beyond its lease" in late(one()).sentences()


def test_a_thread_may_outlive_its_lease():
    assert late(one(), thread=True).sentences() == ""


def test_a_thread_may_not_begin_after_it():
    builder = one()
    builder.pick(1, "a")
    row = builder.rows[1]
    builder.sleep(LEASE + 2)
    builder.give_back(1, crash=True)
    builder.effect("begin", 1, row=row, thread=True)
    assert builder.broken() == {"I5"}


def test_a_lease_that_was_renewed_counts():
    builder = one()
    builder.pick(1, "a")
    builder.begin(1)
    builder.sleep(LEASE / 2)
    builder.put(1, lease_expires_at=builder.now + LEASE)
    builder.sleep(LEASE / 2 + 3)
    builder.end(1)
    builder.commit(1, "done")
    assert builder.sentences() == ""


def test_a_lease_that_was_renewed_too_late_does_not():
    builder = one()
    builder.pick(1, "a")
    builder.begin(1)
    builder.sleep(LEASE + 3)
    builder.end(1)
    builder.put(1, lease_expires_at=builder.now + LEASE)
    builder.commit(1, "done")
    assert builder.broken() == {"I5"}


def test_time_in_which_a_process_stood_still_does_not_count():
    builder = one()
    builder.pick(1, "a")
    row = builder.rows[1]
    builder.begin(1)
    builder.effect("paused")
    builder.sleep(LEASE)
    builder.give_back(1, crash=True)
    builder.sleep(5)
    builder.effect("resumed")
    builder.now -= 0.9  # at once, before it comes to a checkpoint
    builder.effect("left", 1, row=row)
    assert builder.sentences() == ""
    builder.sleep(2)
    builder.effect("left", 1, row=row)
    assert builder.broken() == {"I5"}


def test_a_step_of_another_process_does_not_profit_from_a_pause():
    builder = one()
    builder.effect("paused", pid=99)
    assert late(builder).broken() == {"I5"}


def test_a_claim_that_was_given_back_under_its_step():
    for thread in (False, True):
        builder = one()
        builder.pick(1, "a")
        row = builder.rows[1]
        builder.begin(1, thread=thread)
        builder.give_back(1)
        builder.effect("end", 1, row=row, thread=thread)
        assert builder.broken() == {"I5"}
        assert "given back while its step ran" in builder.sentences()


# -- I8 terminal rows never change


@pytest.mark.parametrize("columns", [{"result": 3}, {"status": "runnable"}, {"inbox": True}, {"rev": 9}])
@pytest.mark.parametrize("status", ["done", "failed"])
def test_a_write_to_an_instance_that_has_ended(builder, status, columns):
    run(builder)
    builder.commit(1, status)
    builder.put(1, **columns)
    assert builder.broken() == {"I8"}


@pytest.mark.parametrize("end", ["failed", "cancelled"])
def test_an_operator_may_retry(builder, end):
    run(builder)
    builder.commit(1, end)
    builder.put(1, status="runnable", claim_id=None, attempt=0, crashes=0)
    assert builder.broken() == {"I8"}
    assert builder.broken(operator=True) == set()
    builder.effect("retried", 1)
    assert builder.broken() == set()


# -- I12 nothing stays executing without a live owner


def test_a_claim_that_nobody_took_back(builder):
    builder.pick(1, "a")
    builder.sleep(LEASE + 7)
    assert builder.broken() == {"I12"}
    builder.give_back(1, crash=True)
    assert builder.broken() == {"I12"}


def test_a_claim_that_was_taken_back_in_time(builder):
    builder.pick(1, "a")
    builder.sleep(LEASE + 4)
    builder.give_back(1, crash=True)
    assert builder.broken() == set()


def test_nobody_can_reap_in_an_outage(builder):
    builder.pick(1, "a")
    builder.sleep(LEASE)
    builder.effect("outage")
    builder.sleep(60)
    builder.effect("recovered")
    builder.sleep(3)
    builder.give_back(1, crash=True)
    assert builder.broken() == set()


def test_nor_while_somebody_holds_the_row(builder):
    builder.pick(1, "a")
    builder.sleep(LEASE + 2)
    signal = builder.put(1, inbox=True)  # in a transaction that stays open
    builder.sleep(20)
    builder.put(2)
    last = builder.changes[-1]
    seen = attrs.evolve(last.snapshot, xmin=signal, running=frozenset({signal}))
    builder.changes[-1] = attrs.evolve(last, snapshot=seen)
    builder.give_back(1, crash=True)
    assert builder.broken() == set()


# -- what a violation shows


def test_a_violation_tells_its_story(builder):
    builder.pick(1, "aaaaaaaa-1")
    builder.pick(1, "bbbbbbbb-2", writer="w2")
    text = builder.sentences()
    assert (
        text.splitlines()[0] == "I2, instance 1: an instance was claimed while another claim of it was live"
    )
    assert "+1.0000 s" in text
    assert "aaaaaaaa" in text
    assert "by w2" in text
