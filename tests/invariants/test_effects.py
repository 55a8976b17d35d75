"""I1 and I5: a planted violation each, beside what is none."""

from __future__ import annotations

import attrs
from tests.invariants.history_builder import LEASE, Tale, run


def one() -> Tale:
    tale = Tale()
    tale.put(1)
    return tale


# -- I1 commit before proceed


def test_a_step_that_runs_from_committed_rows_is_fine():
    tale = one()
    run(tale, outcome="Next", next="b")
    tale.commit(1, "executing", visit=2, step="b")
    tale.begin(1)
    tale.end(1, outcome="Done")
    tale.commit(1, "done")
    assert tale.sentences() == ""


def test_a_step_that_ran_ahead_of_its_commit():
    tale = one()
    row = run(tale, outcome="Next", next="b")
    tale.begin(1, row=attrs.evolve(row, visit=2, step="b"))  # the commit was lost: no row tells of visit 2
    tale.give_back(1, crash=True)
    assert tale.broken() == {"I1"}
    assert "never committed" in tale.sentences()


def forgotten(tale: Tale, **columns) -> Tale:
    """The server crashes, and forgets a claim whose step has begun."""
    tale.put(2)
    tale.pick(2, "x")
    tale.tell("begin", 1, row=attrs.evolve(tale.rows[1], claim_id="a", **columns))
    return tale


def test_a_claim_that_a_crash_of_the_server_forgot():
    tale = forgotten(one())
    assert tale.broken() == {"I1"}  # there was no crash
    tale.tell("sessions_lost")
    assert tale.sentences() == ""
    tale = forgotten(one(), visit=2)  # a visit that was never committed
    tale.tell("outage")
    assert tale.broken() == {"I1"}
    tale = Tale()
    tale.put(1, partition_key="k")  # its pick waits for the disk
    forgotten(tale).tell("outage")
    assert tale.broken() == {"I1"}


def test_a_step_that_began_while_its_commit_was_under_way():
    tale = one()
    run(tale, outcome="Next", next="b")
    commit = tale.commit(1, "executing", visit=2, step="b")
    tale.begin(1)
    tale.end(1)
    tale.put(2)  # its snapshot does not see that commit yet
    last = tale.changes[-1]
    seen = attrs.evolve(last.snapshot, xmin=commit, xmax=last.txid, running=frozenset({commit}))
    tale.changes[-1] = attrs.evolve(last, snapshot=seen)
    assert tale.broken() == {"I1"}
    assert "before the row was committed" in tale.sentences()


def test_a_step_that_began_before_its_pick():
    tale = one()
    tale.begin(1, row=attrs.evolve(tale.rows[1], claim_id="a"))
    tale.pick(1, "a")
    assert "before the row was written" in tale.sentences()


def test_a_step_that_is_not_the_rows():
    tale = one()
    tale.pick(1, "a")
    tale.begin(1, step="other")
    assert tale.broken() == {"I1"}


def test_an_outcome_that_was_committed_while_its_step_ran():
    tale = one()
    tale.pick(1, "a")
    tale.begin(1)
    row = tale.rows[1]
    tale.commit(1, "runnable", visit=2)
    tale.tell("end", 1, row=row)
    assert tale.broken() == {"I1"}
    assert "before its step had ended" in tale.sentences()


def test_an_outcome_of_a_step_that_never_ran():
    tale = one()
    run(tale, outcome="Next", next="start")
    tale.commit(1, "runnable", visit=2)
    tale.pick(1, "b")
    tale.commit(1, "done")
    assert "never ran" in tale.sentences()


def test_an_outcome_that_the_step_did_not_return():
    tale = one()
    run(tale, outcome="Done")
    tale.commit(1, "runnable", visit=2)
    assert "the step returned Done" in tale.sentences()
    tale = one()
    run(tale, outcome="Next", next="b")
    tale.commit(1, "runnable", visit=2, step="c")
    assert tale.broken() == {"I1"}


def test_an_outcome_that_was_refused_and_handled():
    tale = one()
    run(tale, outcome="Done")  # Postgres refused the result; the default `handle` stops
    tale.commit(1, "failed")
    assert tale.sentences() == ""


def test_an_insert_that_was_acknowledged_and_lost():
    tale = one()
    tale.tell("inserted", 1)
    assert tale.sentences() == ""
    tale.tell("inserted", 7)
    assert tale.broken() == {"I1"}


def test_a_live_instance_that_was_deleted():
    tale = one()
    tale.put(1, status=None)
    assert tale.broken() == {"I1"}
    tale = one()
    run(tale)
    tale.commit(1, "done")
    tale.put(1, status=None)
    assert tale.sentences() == ""


# -- I5 the trust window


def late(tale: Tale, *, thread: bool = False) -> Tale:
    """A step whose lease is over, and which goes on for five seconds."""
    more = {"thread": True} if thread else {}
    tale.pick(1, "a")
    row = tale.rows[1]
    tale.begin(1, **more)
    tale.sleep(LEASE)
    tale.give_back(1, crash=True)
    tale.sleep(5)
    tale.tell("end", 1, row=row, **more)
    return tale


def test_a_step_that_outlives_its_lease():
    assert late(one()).broken() == {"I5"}
    assert "beyond its lease" in late(one()).sentences()


def test_a_thread_may_outlive_its_lease():
    assert late(one(), thread=True).sentences() == ""


def test_a_thread_may_not_begin_after_it():
    tale = one()
    tale.pick(1, "a")
    row = tale.rows[1]
    tale.sleep(LEASE + 2)
    tale.give_back(1, crash=True)
    tale.tell("begin", 1, row=row, thread=True)
    assert tale.broken() == {"I5"}


def test_a_lease_that_was_renewed_counts():
    tale = one()
    tale.pick(1, "a")
    tale.begin(1)
    tale.sleep(LEASE / 2)
    tale.put(1, lease_expires_at=tale.now + LEASE)
    tale.sleep(LEASE / 2 + 3)
    tale.end(1)
    tale.commit(1, "done")
    assert tale.sentences() == ""


def test_a_lease_that_was_renewed_too_late_does_not():
    tale = one()
    tale.pick(1, "a")
    tale.begin(1)
    tale.sleep(LEASE + 3)
    tale.end(1)
    tale.put(1, lease_expires_at=tale.now + LEASE)
    tale.commit(1, "done")
    assert tale.broken() == {"I5"}


def test_time_in_which_a_process_stood_still_does_not_count():
    tale = one()
    tale.pick(1, "a")
    row = tale.rows[1]
    tale.begin(1)
    tale.tell("paused")
    tale.sleep(LEASE)
    tale.give_back(1, crash=True)
    tale.sleep(5)
    tale.tell("resumed")
    tale.now -= 0.9  # at once, before it comes to a checkpoint
    tale.tell("left", 1, row=row)
    assert tale.sentences() == ""
    tale.sleep(2)
    tale.tell("left", 1, row=row)
    assert tale.broken() == {"I5"}


def test_a_step_of_another_process_does_not_profit_from_a_pause():
    tale = one()
    tale.tell("paused", pid=99)
    assert late(tale).broken() == {"I5"}


def test_a_claim_that_was_given_back_under_its_step():
    for thread in (False, True):
        tale = one()
        tale.pick(1, "a")
        row = tale.rows[1]
        tale.begin(1, thread=thread)
        tale.give_back(1)
        tale.tell("end", 1, row=row, thread=thread)
        assert tale.broken() == {"I5"}
        assert "given back while its step ran" in tale.sentences()
