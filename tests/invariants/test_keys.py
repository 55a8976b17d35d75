"""I9, I10 and I11: a planted violation each, beside what is none."""

from __future__ import annotations

import attrs
import pytest
from tests.invariants.history_builder import LEASE, Tale, run

LIVE = ("runnable", "executing", "awaiting_signal", "awaiting_children")


@pytest.fixture
def tale() -> Tale:
    """Two rows of a key."""
    tale = Tale()
    tale.put(1, partition_key="k")
    tale.put(2, partition_key="k")
    return tale


# -- I9 one running step per key, in order


def test_one_after_the_other_is_fine(tale):
    run(tale, 1, "a")
    tale.commit(1, "done")
    run(tale, 2, "b")
    tale.commit(2, "done")
    assert tale.sentences() == ""


def test_two_executing_rows_of_a_key(tale):
    tale.pick(1, "a")
    tale.pick(2, "b")
    assert tale.broken() == {"I9"}
    assert "two instances of key 'k' are executing" in tale.sentences()


def zombie(tale: Tale, *, lost: bool = False, thread: bool = True, over: float = 3.0) -> Tale:
    """A thread outlives its lease, and somebody else runs under its key."""
    tale.pick(1, "a")
    row = tale.rows[1]
    tale.begin(1, thread=thread)
    if lost:
        tale.tell("sessions_lost", pid=9)
    tale.sleep(LEASE)
    tale.give_back(1, crash=True, eligible_at=tale.now + 99)
    run(tale, 2, "b")
    tale.sleep(over)
    tale.tell("end", 1, row=row, thread=thread)
    tale.commit(2, "done")
    return tale


def test_a_thread_that_outlives_its_lease_keeps_its_key(tale):
    assert zombie(tale).broken() == {"I9"}
    assert "two steps of key 'k' ran at once" in tale.sentences()


def test_a_thread_whose_session_was_lost_cannot_be_helped(tale):
    assert zombie(tale, lost=True).broken() == set()


def test_other_code_can(tale):
    assert "I9" in zombie(tale, lost=True, thread=False).broken()


def test_a_run_again_of_the_same_instance_counts(tale):
    tale.pick(1, "a")
    row = tale.rows[1]
    tale.begin(1, thread=True)
    tale.sleep(LEASE)
    tale.give_back(1, crash=True)
    run(tale, 1, "b")
    tale.commit(1, "done")
    tale.tell("end", 1, row=row, thread=True)
    assert tale.broken() == {"I9"}


def test_a_pick_out_of_order(tale):
    tale.pick(2, "b")
    assert tale.broken() == {"I9"}
    assert "claimed before instance 1 of its key" in tale.sentences()


def test_a_worker_that_may_not_know_the_machine_of_the_first_row():
    tale = Tale()
    tale.put(1, partition_key="k", fsm="new")
    tale.put(2, partition_key="k")
    tale.pick(2, "b")
    assert tale.broken() == set()
    tale.commit(2, "done")
    tale.pick(1, "a")  # it does know it
    assert tale.broken() == {"I9"}


def test_a_pick_that_could_not_see_the_first_row(tale):
    tale.pick(2, "b")
    tale.commit(2, "done")
    tale.pick(1, "a")
    assert tale.broken() == {"I9"}
    first, *others = tale.changes  # nobody has seen that insert committed when the pick began
    blind = [
        attrs.evolve(other, snapshot=attrs.evolve(other.snapshot, running=frozenset({first.txid}), xmin=1))
        for other in others
    ]
    tale.changes = [first, *blind]
    assert tale.broken() == set()


@pytest.mark.parametrize("columns", [{"eligible_at": 9e9}, {"hold": 2}, {"priority": 5}])
def test_rows_that_give_up_their_place(columns):
    tale = Tale()
    tale.put(1, partition_key="k", **columns)
    tale.put(2, partition_key="k")
    tale.put(3)
    tale.pick(3, "x")
    tale.pick(2, "b")
    assert tale.broken() == set()


def test_a_step_that_runs_ahead_of_a_due_sibling(tale):
    run(tale, 1, "a")
    tale.commit(1, "executing", visit=2)
    assert tale.broken() == {"I9"}
    assert "ran ahead although instance 2" in tale.sentences()


# -- I10 unique keys


def test_a_unique_key_with_two_occupants():
    tale = Tale()
    tale.put(1, unique_key="u", unique_scope=LIVE)
    tale.put(2, unique_key="other", unique_scope=LIVE)
    assert tale.broken() == set()
    tale.put(3, unique_key="u", unique_scope=LIVE)
    assert tale.broken() == {"I10"}


def test_a_key_is_free_when_its_row_leaves_the_scope():
    tale = Tale()
    tale.put(1, unique_key="u", unique_scope=LIVE)
    run(tale)
    tale.commit(1, "done")
    tale.put(2, unique_key="u", unique_scope=LIVE)
    assert tale.sentences() == ""
    tale = Tale()
    tale.put(1, unique_key="u", unique_scope=(*LIVE, "done"))
    run(tale)
    tale.commit(1, "done")
    tale.put(2, unique_key="u", unique_scope=LIVE)
    assert tale.broken() == {"I10"}


# -- I11 barriers


def family(count: int = 2, **columns) -> Tale:
    tale = Tale()
    tale.put(1)
    run(tale, 1, "p", outcome="ScheduleChildren", next="join", children=count)
    counts = {"visit": 2, "await_step": "join", "children_total": count, "children_pending": count}
    tx = tale.commit(1, "awaiting_children", **(counts | columns))
    for number in range(10, 10 + count):
        tale.put(number, tx=tx, parent_id=1, barrier=2)
    return tale


def ends(tale: Tale, number: int, status: str = "done") -> int:
    run(tale, number, f"c{number}")
    return tale.commit(number, status)


def opens(tale: Tale, tx: int | None = None, **columns) -> None:
    tale.put(1, tx=tx, **({"status": "runnable", "step": "join", "await_step": None} | columns))


def test_a_barrier_that_opens_when_all_have_ended_is_fine():
    tale = family()
    tale.put(1, tx=ends(tale, 10), children_pending=1)
    opens(tale, ends(tale, 11), children_pending=0)
    assert tale.sentences() == ""


def test_a_barrier_that_opens_too_early():
    tale = family()
    opens(tale, ends(tale, 10), children_pending=1)
    assert tale.broken() == {"I11"}
    assert "opened while it waited for 1 of 2" in tale.sentences()


def test_a_barrier_that_opens_for_nothing():
    tale = family()
    opens(tale)
    assert tale.broken() == {"I11"}


def test_a_barrier_may_open_on_a_failure_or_a_deadline():
    tale = family(wake_on_failure=True)
    opens(tale, ends(tale, 10, "failed"), children_pending=1)
    assert tale.sentences() == ""
    tale = family(await_deadline=1007.0)
    tale.sleep(5)
    opens(tale, await_deadline=None)
    assert tale.sentences() == ""


def test_a_child_that_is_counted_twice():
    tale = family(3)
    tale.put(1, tx=ends(tale, 10), children_pending=2)
    tale.put(1, children_pending=1)
    assert tale.broken() == {"I11"}


def test_a_child_that_is_not_counted():
    tale = family()
    ends(tale, 10)
    assert tale.broken() == {"I11"}
    opens(tale, ends(tale, 11), children_pending=1)
    assert tale.broken() == {"I11"}


def test_a_barrier_that_stays_shut():
    tale = family(1)
    tale.put(1, tx=ends(tale, 10), children_pending=0)
    assert tale.broken() == {"I11"}
    assert "its barrier did not open" in tale.sentences()


def test_a_child_that_was_retried_is_waited_for_again():
    tale = family()
    tale.put(1, tx=ends(tale, 10, "failed"), children_pending=1)
    again = tale.put(10, status="runnable", claim_id=None, rev=2)
    tale.put(1, tx=again, children_pending=2)
    assert tale.broken(operator=True) == set()


def test_children_that_a_stale_outcome_left():
    tale = family()
    tale.put(99, parent_id=1, barrier=2)
    assert tale.broken() == {"I11"}
    tale = family()
    tale.put(99, parent_id=1, barrier=7)
    assert "outside of the outcome" in tale.sentences()


def test_a_barrier_that_miscounts_its_children():
    tale = family(2, children_total=3)
    assert "counts 3 children, and 2 were inserted" in tale.sentences()


def test_a_quorum():
    tale = family(3, children_pending=2)
    tale.put(1, tx=ends(tale, 10), children_pending=1)
    opens(tale, ends(tale, 12), children_pending=0)
    ends(tale, 11)
    assert tale.sentences() == ""
