"""The questions that a projection answers, its stored form, and rows."""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec
import pytest
from durable_actors.journal import (
    COLUMNS,
    NOT_IN_THE_JOURNAL,
    REASONS,
    Checkpoint,
    Projection,
    differences,
    expand_all,
    fold,
    make_checkpoint,
    row_of,
    usable,
)
from durable_actors.journal.facts import place_of
from tests.journal.kit import (
    KEY,
    NEXT,
    applied,
    at,
    claimed,
    completed,
    fact,
    intent,
    manual,
    scheduled,
    started,
    terminal,
)
from tests.journal.row_model import RowModel

PLANNED = fact("runnables_planned", runnables=[intent()])
WAIT = fact("wait_opened", 5, names=["paid"], next={"step": "ship", "visit": 2, "round": 0, "attempt": 0})
DONE = [started(), scheduled(), claimed(), completed(4)]

HISTORIES = {
    "terminal": [*DONE, applied(), manual(), terminal()],
    "manual": [*DONE, scheduled(step="bill"), applied(), manual()],
    "completed_not_applied": [*DONE, fact("runnables_planned", runnables=[intent(step="ship", visit=2)])],
    "planned_not_scheduled": [
        started(),
        scheduled(step="bill"),
        claimed(0, key="7/1/bill#0.0", until=5),
        PLANNED,
    ],
    "expired_claim": [started(), scheduled(), claimed(until=5), scheduled(step="bill")],
    "visible": [started(), scheduled(), scheduled(step="bill"), claimed(until=999)],
    "claimed": [started(), scheduled(), claimed(until=999), scheduled(step="bill", visible=99)],
    "scheduled_later": [started(), scheduled(visible=99)],
    "idle": [*DONE, applied()],
    "started": [started()],
    "waiting": [*DONE, applied(), WAIT],
    "absent": [],
}


@pytest.mark.parametrize("reason", REASONS)
def test_the_first_reason_that_holds_is_told(reason):
    """C10. Each history but the last few would have a later reason, too."""
    assert fold(HISTORIES[reason]).reason(at(20)) == reason


def test_missing_intents_and_applications_are_derived_from_the_facts():
    """R30, R31, R56: what a recovery would have to append, in order."""
    projection = fold([started(), PLANNED])
    assert [one.key for one in projection.pending_dispatches()] == [KEY]
    assert fold([scheduled()], projection).pending_dispatches() == []
    assert fold([PLANNED, PLANNED], projection).pending_dispatches() == projection.pending_dispatches()
    both = [started(), scheduled(), claimed(), completed(4)]
    both += [
        fact("attempt_scheduled", **intent(step="ship", visit=2)),
        claimed(5, key=NEXT),
        completed(6, key=NEXT),
    ]
    assert [one.key for one in fold(both).ready_to_apply()] == [KEY, NEXT]


def test_the_most_urgent_attempt_comes_first():
    """C2: by time, then attempt, then key."""
    facts = [scheduled(step="b", visible=2), scheduled(step="c", visible=1), scheduled(step="a", visible=1)]
    assert [one.step for one in fold(facts).visible(at(9))] == ["a", "c", "b"]


def test_a_projection_is_stored_and_read_again():
    """R11: with the exact revision that it covers."""
    model = RowModel("full", [5, 17, 3, 250] * 40).run(30)
    projection = fold(expand_all(model.records))
    checkpoint = make_checkpoint(projection)
    assert checkpoint.rev == projection.rev == model.records[-1].rev
    assert usable(checkpoint, head=checkpoint.rev) == projection
    assert usable(checkpoint, head=checkpoint.rev + 5) == projection


@pytest.mark.parametrize(
    "bad",
    [
        None,
        Checkpoint(0, 1, b"{}"),
        Checkpoint(9, 1, b"{}"),
        Checkpoint(9, 1, b'{"rev": 9}'),
        Checkpoint(2, 2, b"{}"),
        Checkpoint(2, 1, b"garbage"),
        Checkpoint(2, 1, b"\xff\xfe"),
        Checkpoint(2, 1, b"[]"),
        Checkpoint(2, 1, b'{"rev": 3}'),
        Checkpoint(2, 1, b'{"rev": 2, "attempts": 5}'),
    ],
)
def test_a_checkpoint_that_cannot_be_used_is_as_good_as_none(bad):
    """R12."""
    assert usable(bad, head=8) is None


def test_an_empty_projection():
    assert (Projection().status, Projection().reason(at(0))) == ("absent", "absent")
    with pytest.raises(ValueError, match="begins with neither started nor snapshot"):
        row_of(Projection())


def test_columns_are_told_from_the_level_that_records_them():
    for level, told in {
        "outcomes": {"outcomes"},
        "claims": {"outcomes", "claims"},
        "full": set(COLUMNS.values()),
    }.items():
        model = RowModel(level)
        row = row_of(fold(expand_all(model.records)))
        assert {name for name, first in COLUMNS.items() if first in told} <= set(row)
        assert not {name for name, first in COLUMNS.items() if first not in told} & set(row)
        assert not set(row) & set(NOT_IN_THE_JOURNAL) - {"lease_expires_at"}


def test_after_an_operators_pause_a_sparse_journal_does_not_tell_the_status():
    """A wait may have ended without a record."""
    model = RowModel("outcomes")
    for move in (model.claim, model.park, model.wake, model.suspend):
        move()
    row = row_of(fold(expand_all(model.records)))
    assert differences(row, model.row) == {}
    assert "status" not in row
    assert (row["fsm"], row["priority"], row["rev"]) == ("shop:Checkout", 5, model.row["rev"])


def test_rows_are_compared_whatever_the_form_of_their_times_and_bytes():
    utc = datetime(2026, 1, 1, tzinfo=UTC)
    expected = {
        "eligible_at": utc,
        "finished_at": "2026-01-01T00:00:00Z",
        "c": "\\x6f",
        "d": 1,
        "e": None,
        "f": "2026-01-01 is a text.",
    }
    same = {
        "eligible_at": "2026-01-01T01:00:00+01:00",
        "finished_at": utc,
        "c": b"o",
        "d": 1,
        "e": None,
        "f": "2026-01-01 is a text.",
    }
    assert differences(expected, same) == {}
    assert differences(expected, {**same, "d": 2, "z": 5}) == {"d": (1, 2)}
    assert differences(expected, {}) == {}


@pytest.mark.parametrize("name", ["state", "result", "meta"])
@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, True),
        ({"paid": [0]}, {"paid": [False]}),
        ({"n": 1}, {"n": 1.0}),
        ("2026-01-01T00:00:00+00:00", "2026-01-01T01:00:00+01:00"),
    ],
)
def test_values_that_json_tells_apart_differ(name, one, other):
    """A state is what its step gets: true is not 1, and a text that looks like an instant is a text."""
    assert differences({name: one}, {name: other}) == {name: (one, other)}
    assert differences({name: one}, {name: one}) == {}
    assert differences({name: {"a": 1, "b": 2}}, {name: {"b": 2, "a": 1}}) == {}


@pytest.mark.parametrize(
    "change", [{"step": "ship"}, {"state": {"n": 9}}, {"queue": "other"}, {"rev": 9}, {"hold": 1}]
)
def test_a_tampered_row_differs(change):
    """Case 46, as far as the pure part goes."""
    model = RowModel("full")
    model.claim()
    told = row_of(fold(expand_all(model.records)))
    [name] = change
    assert list(differences(told, {**model.row, **change})) == [name]


def test_a_notifier_that_is_slower_than_a_snapshot():
    """It was told of an attempt that ended before the snapshot: which is none that was never scheduled."""
    model = RowModel("full")
    model.claim()
    model.next()
    model.snapshot()
    step = "s"
    wakeup = {"kind": "wakeup", "step": step, "attempt": 0, "data": {"visible_at": model.records[0].at}}
    for visit, anomalies in ((1, 0), (2, 0), (3, 1)):
        told = msgspec.structs.replace(model.records[-1], rev=99, visit=visit, **wakeup)
        found = fold(expand_all([*model.records, told])).anomalies
        assert len(found) == anomalies, (visit, found)
    assert place_of("7/2/a/b#1#3.4") == (2, 3, 4)
    assert place_of("nonsense") > (2**60, 0, 0)


def test_a_projection_is_a_value():
    base = fold([started(), scheduled()])
    before = msgspec.json.encode(base)
    fold([claimed(), completed(3), applied(4), manual()], base)
    assert msgspec.json.encode(base) == before
