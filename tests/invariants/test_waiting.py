"""I6, I7 and I9 to I11 on hand-made histories: each planted violation is reported, its lawful neighbour is not."""

from __future__ import annotations

import attrs
import pytest
from tests.invariants.history_builder import LEASE, HistoryBuilder, run

LIVE = ("runnable", "executing", "awaiting_signal", "awaiting_children")


@pytest.fixture
def builder() -> HistoryBuilder:
    builder = HistoryBuilder()
    builder.put(1)
    return builder


def park(builder: HistoryBuilder, claim: str = "a", *, awaited: tuple[int, ...] = (), **columns) -> int:
    """Run the step of an instance until it awaits."""
    builder.pick(1, claim)
    builder.begin(1, awaited=list(awaited), signals=list(awaited))
    builder.end(1, outcome="Await", awaits=["go"])
    return builder.commit(1, "awaiting_signal", **({"awaits": ["go"]} | columns))


def wake(builder: HistoryBuilder, tx: int | None = None) -> None:
    builder.put(1, tx=tx, status="runnable", await_deadline=None)


def signalled(builder: HistoryBuilder, signal: int = 7) -> None:
    """A signal for somebody who sleeps: it wakes him in its own transaction."""
    wake(builder, builder.send(signal, 1))


# -- I6 a signal is consumed by exactly the commit that saw it


def test_signals_that_are_handed_and_taken_are_fine(builder):
    park(builder)
    signalled(builder)
    builder.pick(1, "b")
    builder.begin(1, awaited=[7], signals=[7])
    builder.end(1, outcome="Next", next="start", consumed=[])
    builder.take(7, tx=builder.commit(1, "runnable", visit=2, awaits=None))
    builder.send(8, 1)
    builder.pick(1, "c")
    builder.begin(1, awaited=[], signals=[8])
    builder.end(1, outcome="Next", next="start", consumed=[8])
    builder.take(8, tx=builder.commit(1, "runnable", visit=3))
    builder.send(9, 1)
    builder.pick(1, "d")
    builder.begin(1, awaited=[], signals=[9])
    builder.end(1, outcome="Done")
    builder.take(9, tx=builder.commit(1, "done"))
    assert builder.sentences() == ""


def test_a_signal_that_nobody_consumed(builder):
    builder.send(7, 1)
    builder.take(7)
    assert builder.broken() == {"I6"}
    assert "by no outcome" in builder.sentences()


def test_a_signal_that_a_release_consumed(builder):
    builder.send(7, 1)
    builder.pick(1, "a")
    builder.take(7, tx=builder.give_back(1))
    assert builder.broken() == {"I6"}


def test_a_signal_that_the_step_was_not_given(builder):
    park(builder)
    signalled(builder)
    builder.pick(1, "b")
    builder.begin(1, awaited=[7], signals=[7])
    builder.send(8, 1)  # while it runs
    builder.end(1, outcome="Next", next="start", consumed=[])
    commit = builder.commit(1, "runnable", visit=2, awaits=None)
    builder.take(7, tx=commit)
    builder.take(8, tx=commit)
    assert builder.broken() == {"I6"}
    assert "signal 8 was consumed by a step that was not given it" in builder.sentences()


def test_a_signal_that_outlives_the_outcome_it_was_handed_to(builder):
    park(builder)
    signalled(builder)
    builder.pick(1, "b")
    builder.begin(1, awaited=[7], signals=[7])
    builder.end(1, outcome="Next", next="start", consumed=[])
    builder.commit(1, "runnable", visit=2, awaits=None)
    assert builder.broken() == {"I6"}
    assert "outlived its outcome" in builder.sentences()


def test_a_retry_consumes_nothing(builder):
    park(builder)
    signalled(builder)
    builder.pick(1, "b")
    builder.begin(1, awaited=[7], signals=[7])
    builder.end(1, outcome="Retry")
    commit = builder.commit(1, "runnable", attempt=1)
    assert builder.sentences() == ""
    builder.take(7, tx=commit)
    assert "a retry consumed a signal" in builder.sentences()


@pytest.mark.parametrize(("end", "said"), [("failed", "failed"), ("cancelled", "was cancelled")])
def test_a_failure_consumes_nothing(builder, end, said):
    """It may be retried, and is then handed the same."""
    park(builder)
    signalled(builder)
    builder.pick(1, "b")
    builder.begin(1, awaited=[7], signals=[7])
    builder.end(1, outcome="Stop")
    commit = builder.commit(1, end)
    assert builder.sentences() == ""
    builder.take(7, tx=commit)
    assert f"an instance that {said} consumed a signal" in builder.sentences()


def test_an_await_keeps_what_it_awaits_again(builder):
    park(builder)
    signalled(builder)
    park(builder, "b", awaited=(7,))
    assert builder.sentences() == ""
    signalled(builder, 8)
    park(builder, "c", awaited=(7, 8), awaits=["other"])
    assert builder.broken() == {"I6"}


def test_an_inbox_that_outlives_its_instance(builder):
    builder.send(7, 1)
    builder.pick(1, "a")
    builder.begin(1)
    builder.end(1)
    builder.commit(1, "done")
    assert builder.broken() == {"I6"}


# -- I7 no wake-up is lost


def test_a_signal_that_does_not_wake(builder):
    park(builder)
    builder.send(7, 1)
    assert builder.broken() == {"I7"}
    assert "it sleeps on" in builder.sentences()


def test_a_wake_that_comes_in_another_transaction(builder):
    park(builder)
    builder.send(7, 1)
    wake(builder)
    assert builder.broken() == {"I7"}


def test_a_signal_of_another_name_does_not_wake(builder):
    park(builder)
    builder.send(7, 1, "other")
    assert builder.sentences() == ""


def test_a_park_that_overlooks_a_signal(builder):
    builder.pick(1, "a")
    builder.begin(1)
    builder.send(7, 1)
    builder.end(1)
    commit = builder.commit(1, "awaiting_signal", awaits=["go"])
    assert builder.broken() == {"I7"}
    wake(builder, commit)
    assert builder.sentences() == ""


def test_a_signal_that_was_acknowledged_and_never_written(builder):
    builder.effect("sent", 1, name="go")
    assert builder.broken() == {"I7"}
    builder.send(7, 1)
    assert builder.sentences() == ""
    builder.effect("sent", 1, name="go")
    assert builder.broken() == {"I7"}


def test_a_deadline_that_nobody_heeds(builder):
    park(builder, await_deadline=builder.now + 30)
    builder.sleep(45)
    assert builder.sentences() == ""
    builder.sleep(20)
    assert builder.broken() == {"I7"}


def test_a_due_row_that_nobody_takes(builder):
    builder.sleep(25)
    assert builder.broken() == {"I7"}
    assert builder.broken(ended=builder.now - 10) == set()


def test_a_held_row_that_nobody_offers(builder):
    builder.put(1, partition_key="k", hold=1)
    builder.sleep(25)
    assert "held behind its key" in builder.sentences()


@pytest.mark.parametrize("columns", [{"hold": 2}, {"eligible_at": 9e9}])
def test_rows_that_have_a_reason_to_wait(columns):
    builder = HistoryBuilder()
    builder.put(1, **columns)
    builder.sleep(25)
    assert builder.sentences() == ""


def test_a_queue_that_is_busy_has_a_reason_to_let_rows_wait(builder):
    builder.put(2)
    builder.sleep(25)
    builder.pick(2, "a")
    assert builder.sentences() == ""


def test_an_outage_does_not_count(builder):
    builder.effect("outage")
    builder.sleep(100)
    builder.effect("recovered")
    assert builder.sentences() == ""


# -- I9 one running step per key, in order


@pytest.fixture
def siblings() -> HistoryBuilder:
    """Two rows of a key."""
    builder = HistoryBuilder()
    builder.put(1, partition_key="k")
    builder.put(2, partition_key="k")
    return builder


def test_one_after_the_other_is_fine(siblings):
    run(siblings, 1, "a")
    siblings.commit(1, "done")
    run(siblings, 2, "b")
    siblings.commit(2, "done")
    assert siblings.sentences() == ""


def test_two_executing_rows_of_a_key(siblings):
    siblings.pick(1, "a")
    siblings.pick(2, "b")
    assert siblings.broken() == {"I9"}
    assert "two instances of key 'k' are executing" in siblings.sentences()


def zombie(
    builder: HistoryBuilder, *, lost: bool = False, thread: bool = True, over: float = 3.0
) -> HistoryBuilder:
    """A thread outlives its lease, and somebody else runs under its key."""
    builder.pick(1, "a")
    row = builder.rows[1]
    builder.begin(1, thread=thread)
    if lost:
        builder.effect("sessions_lost", pid=9)
    builder.sleep(LEASE)
    builder.give_back(1, crash=True, eligible_at=builder.now + 99)
    run(builder, 2, "b")
    builder.sleep(over)
    builder.effect("end", 1, row=row, thread=thread)
    builder.commit(2, "done")
    return builder


def test_a_thread_that_outlives_its_lease_keeps_its_key(siblings):
    assert zombie(siblings).broken() == {"I9"}
    assert "two steps of key 'k' ran at once" in siblings.sentences()


def test_a_thread_whose_session_was_lost_cannot_be_helped(siblings):
    assert zombie(siblings, lost=True).broken() == set()


def test_other_code_can(siblings):
    assert "I9" in zombie(siblings, lost=True, thread=False).broken()


def test_a_run_again_of_the_same_instance_counts(siblings):
    siblings.pick(1, "a")
    row = siblings.rows[1]
    siblings.begin(1, thread=True)
    siblings.sleep(LEASE)
    siblings.give_back(1, crash=True)
    run(siblings, 1, "b")
    siblings.commit(1, "done")
    siblings.effect("end", 1, row=row, thread=True)
    assert siblings.broken() == {"I9"}


def test_a_pick_out_of_order(siblings):
    siblings.pick(2, "b")
    assert siblings.broken() == {"I9"}
    assert "claimed before instance 1 of its key" in siblings.sentences()


def test_a_worker_that_may_not_know_the_machine_of_the_first_row():
    builder = HistoryBuilder()
    builder.put(1, partition_key="k", fsm="new")
    builder.put(2, partition_key="k")
    builder.pick(2, "b")
    assert builder.broken() == set()
    builder.commit(2, "done")
    builder.pick(1, "a")  # it does know it
    assert builder.broken() == {"I9"}


def test_a_pick_that_could_not_see_the_first_row(siblings):
    siblings.pick(2, "b")
    siblings.commit(2, "done")
    siblings.pick(1, "a")
    assert siblings.broken() == {"I9"}
    first, *others = siblings.changes  # nobody has seen that insert committed when the pick began
    blind = [
        attrs.evolve(other, snapshot=attrs.evolve(other.snapshot, running=frozenset({first.txid}), xmin=1))
        for other in others
    ]
    siblings.changes = [first, *blind]
    assert siblings.broken() == set()


@pytest.mark.parametrize(
    "columns", [{"eligible_at": 9e9}, {"hold": 2}, {"hold": 4}, {"hold": 5}, {"priority": 5}]
)
def test_rows_that_give_up_their_place(columns):
    builder = HistoryBuilder()
    builder.put(1, partition_key="k", **columns)
    builder.put(2, partition_key="k")
    builder.put(3)
    builder.pick(3, "x")
    builder.pick(2, "b")
    assert builder.broken() == set()


@pytest.mark.parametrize("hold", [1, 3])
def test_rows_that_keep_their_place(hold):
    builder = HistoryBuilder()
    builder.put(1, partition_key="k", hold=hold)
    builder.put(2, partition_key="k")
    builder.put(3)
    builder.pick(3, "x")
    builder.pick(2, "b")
    assert builder.broken() == {"I9"}


def test_a_step_that_runs_ahead_of_a_due_sibling(siblings):
    run(siblings, 1, "a")
    siblings.commit(1, "executing", visit=2)
    assert siblings.broken() == {"I9"}
    assert "ran ahead although instance 2" in siblings.sentences()


# -- I10 unique keys


def test_a_unique_key_with_two_occupants():
    builder = HistoryBuilder()
    builder.put(1, unique_key="u", unique_scope=LIVE)
    builder.put(2, unique_key="other", unique_scope=LIVE)
    assert builder.broken() == set()
    builder.put(3, unique_key="u", unique_scope=LIVE)
    assert builder.broken() == {"I10"}


def test_a_key_is_free_when_its_row_leaves_the_scope():
    builder = HistoryBuilder()
    builder.put(1, unique_key="u", unique_scope=LIVE)
    run(builder)
    builder.commit(1, "done")
    builder.put(2, unique_key="u", unique_scope=LIVE)
    assert builder.sentences() == ""
    builder = HistoryBuilder()
    builder.put(1, unique_key="u", unique_scope=(*LIVE, "done"))
    run(builder)
    builder.commit(1, "done")
    builder.put(2, unique_key="u", unique_scope=LIVE)
    assert builder.broken() == {"I10"}


# -- I11 barriers


def family(count: int = 2, **columns) -> HistoryBuilder:
    builder = HistoryBuilder()
    builder.put(1)
    run(builder, 1, "p", outcome="ScheduleChildren", next="join", children=count)
    counts = {"visit": 2, "await_step": "join", "children_total": count, "children_pending": count}
    tx = builder.commit(1, "awaiting_children", **(counts | columns))
    for number in range(10, 10 + count):
        builder.put(number, tx=tx, parent_id=1, barrier=2)
    return builder


def ends(builder: HistoryBuilder, number: int, status: str = "done") -> int:
    run(builder, number, f"c{number}")
    return builder.commit(number, status)


def opens(builder: HistoryBuilder, tx: int | None = None, **columns) -> None:
    builder.put(1, tx=tx, **({"status": "runnable", "step": "join", "await_step": None} | columns))


def test_a_barrier_that_opens_when_all_have_ended_is_fine():
    builder = family()
    builder.put(1, tx=ends(builder, 10), children_pending=1)
    opens(builder, ends(builder, 11), children_pending=0)
    assert builder.sentences() == ""


def test_a_barrier_that_opens_too_early():
    builder = family()
    opens(builder, ends(builder, 10), children_pending=1)
    assert builder.broken() == {"I11"}
    assert "opened while it waited for 1 of 2" in builder.sentences()


def test_a_barrier_that_opens_for_nothing():
    builder = family()
    opens(builder)
    assert builder.broken() == {"I11"}


@pytest.mark.parametrize("end", ["failed", "cancelled"])
def test_a_barrier_may_open_on_a_failure_or_a_deadline(end):
    builder = family(wake_on_failure=True)
    opens(builder, ends(builder, 10, end), children_pending=1)
    assert builder.sentences() == ""
    builder = family(wake_on_failure=True)
    builder.put(1, tx=ends(builder, 10, end), children_pending=1)
    assert "its barrier did not open" in builder.sentences()
    builder = family(await_deadline=1007.0)
    builder.sleep(5)
    opens(builder, await_deadline=None)
    assert builder.sentences() == ""


def test_a_child_that_is_counted_twice():
    builder = family(3)
    builder.put(1, tx=ends(builder, 10), children_pending=2)
    builder.put(1, children_pending=1)
    assert builder.broken() == {"I11"}


def test_a_child_that_is_not_counted():
    builder = family()
    ends(builder, 10)
    assert builder.broken() == {"I11"}
    opens(builder, ends(builder, 11), children_pending=1)
    assert builder.broken() == {"I11"}


def test_a_barrier_that_stays_shut():
    builder = family(1)
    builder.put(1, tx=ends(builder, 10), children_pending=0)
    assert builder.broken() == {"I11"}
    assert "its barrier did not open" in builder.sentences()


def test_a_child_that_was_retried_is_waited_for_again():
    builder = family()
    builder.put(1, tx=ends(builder, 10, "failed"), children_pending=1)
    again = builder.put(10, status="runnable", claim_id=None)
    builder.put(1, tx=again, children_pending=2)
    assert builder.broken(operator=True) == set()


def test_children_that_a_stale_outcome_left():
    builder = family()
    builder.put(99, parent_id=1, barrier=2)
    assert builder.broken() == {"I11"}
    builder = family()
    builder.put(99, parent_id=1, barrier=7)
    assert "outside of the outcome" in builder.sentences()


def test_a_barrier_that_miscounts_its_children():
    builder = family(2, children_total=3)
    assert "counts 3 children, and 2 were inserted" in builder.sentences()


def test_a_quorum():
    builder = family(3, children_pending=2)
    builder.put(1, tx=ends(builder, 10), children_pending=1)
    opens(builder, ends(builder, 12), children_pending=0)
    ends(builder, 11)
    assert builder.sentences() == ""
