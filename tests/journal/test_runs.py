"""The facts of the run thread: boundaries, ends, children, waits, indexes."""

from __future__ import annotations

import msgspec
import pytest
from durable_actors.journal import (
    CATALOG,
    FACTS,
    Fact,
    Thread,
    expand_all,
    fold,
    fold_indexes,
    run_thread,
    runnable_key,
)
from tests.journal.golden import RECORDS
from tests.journal.kit import (
    KEY,
    applied,
    at,
    changes_only_anomalies,
    child,
    claimed,
    completed,
    fact,
    intent,
    manual,
    reasons,
    record,
    resolved,
    scheduled,
    started,
    terminal,
)
from tests.journal.row_model import RowModel

RUNNING = [started(), scheduled(), claimed()]
APPLIED = [*RUNNING, completed(4), applied(4)]
PLACE = {"step": "ship", "visit": 2, "round": 0, "attempt": 0}
NEXT = {**PLACE, "await_step": "ship"}
WAITING = [*APPLIED, fact("wait_opened", 5, names=["paid"], next=NEXT)]
BARRIER = [*APPLIED, fact("barrier_opened", 5, total=3, pending=2, wake_on_failure=True, next=NEXT)]


def test_a_start_is_idempotent_unless_it_is_another_one():
    assert fold([started(), started()]) == fold([started()])
    changes_only_anomalies([started()], started(machine="shop:Other"), "conflicting_workflow")
    changes_only_anomalies([started()], started(queue="other"), "conflicting_workflow")
    changes_only_anomalies([started()], started(parent={"run": 1, "barrier": None}), "conflicting_workflow")


# Manual boundaries.


def test_a_boundary_pauses_the_run_until_it_is_resolved():
    """Case 14, R63, R64, R68."""
    projection = fold([*APPLIED, manual()])
    assert (projection.status, projection.manual.kind, projection.reason(at(9))) == (
        "paused",
        "approval",
        "manual",
    )
    after = fold([resolved(), fact("attempt_scheduled", **intent(step="ship", visit=2))], projection)
    assert (after.manual, after.status, reasons(after)) == (None, "runnable", [])


def test_an_equal_pause_is_idempotent_and_a_second_one_is_not():
    """Case 14, R65, R66."""
    assert fold([*APPLIED, manual(), manual()]) == fold([*APPLIED, manual()])
    changes_only_anomalies([*APPLIED, manual()], manual("ship"), "active_manual_step")
    changes_only_anomalies([*APPLIED, manual()], manual(kind="pause"), "active_manual_step")


@pytest.mark.parametrize("stale", [resolved("ship"), resolved(boundary=9)])
def test_a_resolution_must_match_the_open_boundary(stale):
    """Case 14, R67."""
    changes_only_anomalies([*APPLIED, manual()], stale, "stale_manual_resolution")
    changes_only_anomalies(APPLIED, resolved(), "stale_manual_resolution")


def test_no_manual_fact_follows_the_end():
    """Case 14, R68, R71: the end clears the boundary."""
    history = [*APPLIED, manual(), terminal()]
    assert fold(history).manual is None
    changes_only_anomalies(history, manual(), "terminal_run")
    changes_only_anomalies(history, resolved(), "terminal_run")


def test_an_operators_pause_hides_the_attempts_of_a_run():
    pause = fact("run_suspended", by="ann", reason="looks odd")
    projection = fold([started(), scheduled(), pause])
    assert projection.visible(at(9)) == []
    assert projection.reason(at(9)) == "manual"
    assert fold([pause], projection) == projection
    changes_only_anomalies([started(), pause], fact("run_suspended", by="bob"), "active_manual_step")
    assert len(fold([fact("run_resumed")], projection).visible(at(9))) == 1
    changes_only_anomalies([started()], fact("run_resumed"), "stale_manual_resolution")


# The end.


def every_fact() -> list[Fact]:
    """One well-formed fact of every kind that belongs to a run or a queue."""
    found = {one.kind: one for each in RECORDS.values() for one in expand_all([each])}
    assert set(found) == set(FACTS)
    elsewhere = {"run_revived", "run_snapshot", "run_indexed", "run_cataloged"}
    return [one for kind, one in sorted(found.items()) if kind not in elsewhere]


@pytest.mark.parametrize("late", every_fact(), ids=lambda one: one.kind)
@pytest.mark.parametrize(
    "history", [RUNNING, [*APPLIED, manual()], WAITING], ids=["claimed", "paused", "waiting"]
)
def test_after_the_end_every_fact_is_an_anomaly(history, late):
    """Case 15, R69, R72."""
    changes_only_anomalies([*history, terminal()], late, "terminal_run")


@pytest.mark.parametrize("history", [RUNNING, [started(), scheduled()], [*APPLIED, manual()]])
def test_the_end_empties_all_views(history):
    """Case 15, R69 to R71."""
    projection = fold([*history, terminal("cancelled")])
    later = at(10_000)
    assert projection.visible(later) == projection.expired(later) == []
    assert projection.pending_dispatches() == projection.ready_to_apply() == []
    assert (projection.manual, projection.wait, projection.status) == (None, None, "cancelled")
    assert projection.reason(later) == "terminal"


def test_only_a_failed_or_cancelled_run_can_be_revived():
    revive = fact("run_revived")
    changes_only_anomalies([*RUNNING, terminal("done")], revive, "terminal_run")
    changes_only_anomalies(RUNNING, revive, "malformed_entry")
    projection = fold([*RUNNING, terminal(), revive, scheduled(visible=95)])
    assert (reasons(projection), projection.status) == ([], "runnable")
    assert [one.key for one in projection.visible(at(95))] == [KEY], "the same key, as a new attempt"


# Waits and barriers.


def test_a_wait_is_opened_once_and_resolved_where_it_said():
    assert (fold(WAITING).status, fold(WAITING).reason(at(9))) == ("awaiting_signal", "waiting")
    again = fact("wait_opened", 6, names=["other"], next=NEXT)
    changes_only_anomalies(WAITING, again, "active_wait")
    changes_only_anomalies(WAITING, manual(), "active_wait")
    changes_only_anomalies(WAITING, fact("barrier_opened", total=1, pending=1, next=NEXT), "active_wait")
    changes_only_anomalies(WAITING, fact("barrier_resolved", why="joined", **PLACE), "stale_wait")
    changes_only_anomalies(
        WAITING, fact("wait_resolved", why="signal", **{**PLACE, "visit": 3}), "stale_wait"
    )
    changes_only_anomalies(APPLIED, fact("wait_resolved", why="signal", **PLACE), "stale_wait")
    changes_only_anomalies(APPLIED, fact("wait_opened", names=[], next={}), "malformed_entry")
    assert fold([*WAITING, fact("wait_resolved", why="signal", **PLACE)]).wait is None


def test_a_barrier_counts_what_follows_from_its_count():
    """R33: the run goes on only after its children's ends are durable."""
    count = {"count": 1, "pending": 1, "failed": False}
    changes_only_anomalies(BARRIER, fact("barrier_counted", **{**count, "pending": 0}), "conflicting_barrier")
    changes_only_anomalies(WAITING, fact("barrier_counted", **count), "stale_wait")
    joined = fact("barrier_resolved", why="joined", **PLACE)
    changes_only_anomalies([*BARRIER, fact("barrier_counted", **count)], joined, "conflicting_barrier")
    assert fold([*BARRIER, fact("barrier_counted", **{**count, "failed": True}), joined]).wait is None
    assert fold([*BARRIER, fact("barrier_counted", count=2, pending=0), joined]).wait is None
    assert fold([*BARRIER, fact("barrier_resolved", why="deadline", **PLACE)]).wait is None
    recounted = fold(
        [*BARRIER, fact("barrier_counted", **count), fact("barrier_counted", count=-1, pending=2)]
    )
    assert (recounted.run.children_pending, reasons(recounted)) == (2, [])


# Children.


def test_a_child_is_known_by_its_identity_not_by_the_attempt():
    """Case 16, R57 to R61."""
    history = [*RUNNING, child()]
    assert fold([*history, child(attempt=3)]) == fold(history)
    kept = fold(history).children[100]
    assert (kept.machine, kept.trigger, kept.child_key) == ("shop:Parcel", "start", "k")
    assert kept.origin == {"runnable_key": KEY, "step": "begin", "attempt": 0}


@pytest.mark.parametrize(
    "other", [{"key": "other"}, {"machine": "shop:Other"}, {"trigger": "later"}, {"number": 101}]
)
def test_a_child_with_another_identity_conflicts(other):
    """Case 16, R62."""
    changes_only_anomalies([*RUNNING, child()], child(**other), "conflicting_child_run")


@pytest.mark.parametrize(
    "origin", [{}, {"runnable_key": KEY}, {"runnable_key": KEY, "step": 1, "attempt": 0}]
)
def test_a_child_without_its_origin_is_malformed(origin):
    """Case 16, R59."""
    changes_only_anomalies(RUNNING, child(origin=origin), "malformed_entry")


def test_a_child_of_a_step_that_is_over_is_stale():
    """R62: stale parent contexts and ended parents."""
    after = [*APPLIED, fact("attempt_scheduled", **intent(step="ship", visit=2))]
    changes_only_anomalies(after, child(), "stale_claim")
    changes_only_anomalies([*RUNNING, terminal()], child(), "terminal_run")


def test_a_child_knows_its_parent():
    """R60."""
    assert fold(expand_all([RECORDS["started"]])).run.parent == {"run": 3, "barrier": 4}
    context = {"machine": "shop:Order", "step": "pack", "key": "k"}
    assert fold(expand_all([RECORDS["started, by a step"]])).run.parent == {"run": 3, "barrier": 4, **context}


def test_another_definition_is_a_notice_once():
    """C14: reported with every definition that differs, and neither raised nor in the way."""
    history = [*RUNNING, fact("definition_differs", fingerprint="00ff", step="begin", runnable_key=KEY)]
    changes_only_anomalies(RUNNING, history[-1], "other_definition")
    again = fold([*history, history[-1], fact("definition_differs", fingerprint="ff00", step="begin")])
    assert [(one.reason, one.detail, one.step) for one in again.anomalies] == [
        ("other_definition", "00ff", "begin"),
        ("other_definition", "ff00", "begin"),
    ]
    assert all(one.is_notice for one in again.anomalies)
    assert fold(history, on_anomaly="raise").anomalies == again.anomalies[:1]


def test_a_definition_that_is_the_first_one_again_is_no_anomaly():
    first = RECORDS["started"]
    row = {**first.data["row"], "fingerprint": "\\x00ff"}
    records = [msgspec.structs.replace(first, data={"row": row}), RECORDS["claimed"]]
    told = expand_all([*records, RECORDS["next, by another definition"]])
    assert reasons(fold(told)) == []


# Commands.


def test_a_command_with_the_same_key_is_a_second_delivery():
    """C8."""
    history = [started(), fact("run_signal_received", type="retry", key="once", by="ann", reason="x")]
    assert len(fold(history).commands) == 1
    assert fold([*history, fact("run_signal_received", type="retry", key="once")]) == fold(history)
    another = fold([*history, fact("run_signal_received", type="retry", key="twice")])
    assert [one.key for one in another.commands] == ["once", "twice"]
    without = fold([started(), *[fact("run_signal_received", type="retry")] * 2])
    assert len(without.commands) == 2
    assert fold([started(), fact("run_signal_received", type="signal")]).commands == []


# Threads and indexes.


def test_the_identity_of_a_thread_is_its_kind_and_key():
    """R7."""
    threads = {one.thread for each in RECORDS.values() for one in expand_all([each], queue="mail")}
    assert {one.name for one in threads} == {
        "run:7",
        "dispatch:mail",
        "dispatch:checkout",
        "run_index:shop:Checkout",
        "key_index:order:42",
        "catalog:all",
    }
    assert all(Thread.parse(one.name) == one for one in threads)
    assert run_thread(7).instance_id == 7
    for bad in ("run", "nowhere:7"):
        with pytest.raises(ValueError, match="is not the name of a thread"):
            Thread.parse(bad)
    with pytest.raises(ValueError, match="is not the thread of an instance"):
        _ = CATALOG.instance_id


def start(run: int, machine: str = "shop:Checkout", queue: str = "default") -> list[Fact]:
    row = {**RECORDS["started"].data["row"], "fsm": machine, "queue": queue}
    return list(
        expand_all([msgspec.structs.replace(record("started", 1, data={"row": row}), instance_id=run)])
    )


def test_indexes_and_catalog_are_rebuilt_from_starts_alone():
    """Case 17, R5, R6: by id, whatever the order of the facts."""
    facts = [*start(9), *start(8, queue="mail"), *start(7, machine="mail:Send")]
    indexes = fold_indexes(reversed(facts))
    assert indexes == fold_indexes([*facts, *facts]), "duplicates change nothing"
    assert [one.run for one in indexes[CATALOG].runs()] == [7, 8, 9]
    assert [one.run for one in indexes[CATALOG].runs(machine="shop:Checkout", queue="mail")] == [8]
    assert [one.run for one in indexes[Thread("run_index", "mail:Send")].runs()] == [7]
    assert [one.run for one in indexes[Thread("key_index", "order:42")].runs()] == [7, 8, 9]


def test_the_list_of_runs_is_redacted():
    """R6: no input, result, error, claim or key."""
    [entry] = fold_indexes(start(7))[CATALOG].runs()
    assert set(msgspec.structs.asdict(entry)) == {"run", "machine", "queue", "at"}


@pytest.mark.parametrize("other", [{"queue": "other"}, {"machine": "shop:Other"}])
def test_a_run_has_one_machine_and_one_queue(other):
    """Case 17: the first fact stays, in the catalog and in the index of its unique key."""
    indexes = fold_indexes([*start(7), *start(7, **other)])
    assert [one.reason for one in indexes[CATALOG].anomalies] == ["conflicting_run_catalog"]
    assert indexes[CATALOG].runs() == fold_indexes(start(7))[CATALOG].runs()
    by_key = indexes[Thread("key_index", "order:42")]
    assert [one.reason for one in by_key.anomalies] == ["conflicting_run_index"]


def test_an_index_fact_without_its_fields_is_malformed():
    indexes = fold_indexes([fact("run_cataloged", machine="m"), fact("run_indexed", index="machine")])
    assert [one.reason for one in indexes[CATALOG].anomalies] == ["malformed_entry"] * 2


# Snapshots.


def test_a_snapshot_is_a_base_that_needs_nothing_before_it():
    model = RowModel("full", [1, 4, 0, 3] * 30).run(20)
    model.move("snapshot", {}, row=None)
    [snapshot] = [one for one in model.records if one.kind == "snapshot"][-1:]
    whole, alone = fold(expand_all(model.records)), fold(expand_all([snapshot]))
    assert reasons(whole) == []
    assert alone == whole


def test_a_snapshot_that_contradicts_a_complete_history_is_an_anomaly():
    model = RowModel("full")
    model.claim()
    model.row["step"] = "elsewhere"
    model.snapshot()
    projection = fold(expand_all(model.records))
    assert reasons(projection) == ["conflicting_snapshot"]
    assert projection.run.step == "begin"


def test_a_snapshot_may_follow_moves_that_were_not_recorded():
    """The journal was off for a while."""
    model = RowModel("claims")
    model.row |= {"journal": "off"}
    model.claim()
    model.next()
    model.row |= {"journal": "full"}
    model.snapshot()
    projection = fold(expand_all(model.records))
    assert (reasons(projection), projection.run.level, projection.run.visit) == ([], "full", 2)


def test_a_snapshot_of_a_damaged_row_is_malformed():
    changes_only_anomalies([started()], fact("run_snapshot", rev=9, row={"fsm": 1}), "malformed_entry")


# Levels below "claims".


def test_moves_that_were_not_recorded_are_caught_up_with():
    model = RowModel("outcomes")
    for move in (model.claim, model.park, model.wake, model.claim, model.reap, model.claim, model.next):
        model.now = at((model.now - at(0)).total_seconds() + 1)
        move()
    assert [one.kind for one in model.records] == ["started", "parked", "next"]
    projection = fold(expand_all(model.records))
    assert reasons(projection) == []
    assert projection.attempts[runnable_key(7, 1, "begin", 1, 1)].applied


def test_nothing_is_caught_up_with_in_a_complete_journal():
    place = {"step": "begin", "visit": 1, "round": 0, "attempt": 1}
    changes_only_anomalies([started(), scheduled()], fact("run_caught_up", **place), "malformed_entry")
    sparse = started(level="outcomes")
    changes_only_anomalies([sparse, scheduled(2)], fact("run_caught_up", **place), "stale_claim")
    ended = [sparse, scheduled(), claimed(), completed(5), applied(5)]
    changes_only_anomalies(ended, fact("run_caught_up", **{**place, "attempt": 0}), "terminal_attempt")
