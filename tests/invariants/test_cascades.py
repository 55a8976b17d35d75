"""What I13 says about families and compensations, on hand-made histories: planted violations, and lawful neighbours."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.invariants.history_builder import HistoryBuilder

WITH_CHILDREN = '{"kind": "cancel", "children": "cancel"}'
BY_PARENT = json.dumps({"kind": "cancel", "children": "cancel", "parent": 1})


@pytest.fixture
def family() -> HistoryBuilder:
    """A parent, and two children: 2 waits, 3 runs."""
    found = HistoryBuilder()
    found.put(1)
    found.put(2, parent_id=1)
    found.put(3, parent_id=1)
    found.pick(3, "c")
    return found


def end(builder: HistoryBuilder, number: int, **columns: Any) -> int:
    """Somebody ends it as cancelled: without a receipt."""
    free = {"claim_id": None, "locked_by": None, "lease_expires_at": None}
    return builder.put(number, **({"status": "cancelled", "request": BY_PARENT} | free | columns))


def test_children_that_are_cancelled_with_their_parent(family):
    family.cancel(1, request=WITH_CHILDREN)
    end(family, 2)
    family.put(3, request=BY_PARENT)
    end(family, 3)
    assert family.sentences() == ""


def test_children_that_are_cancelled_and_their_parent_is_not(family):
    end(family, 2)
    assert "with its parent, which was not" in family.sentences()
    assert family.broken() == {"I13"}


def test_a_child_that_is_left_alone(family):
    """It was ended by those who clear up; one that came to its end by itself, or by another command, was not."""
    family.cancel(1, request=WITH_CHILDREN)
    family.cancel(2, "closing:1")
    family.commit(3, "done")
    [sentence] = [each for each in family.sentences().splitlines() if "nobody has cancelled it" in each]
    assert "instance 1, 2" in sentence
    assert family.broken() == {"I13"}


def test_a_child_that_was_asked_for_itself_is_asked_for_its_children_too(family):
    family.ask(3)
    family.cancel(1, request=WITH_CHILDREN)
    end(family, 2)
    family.put(3, request=WITH_CHILDREN)
    end(family, 3, request=WITH_CHILDREN)
    assert family.sentences() == ""


def test_the_rest_of_a_barrier():
    for reached in (True, False):
        builder = HistoryBuilder()
        builder.put(
            1, fsm="chaos.Rest", status="awaiting_children", visit=2, children_pending=1, children_total=3
        )
        builder.put(2, parent_id=1, barrier=2)
        builder.put(4, parent_id=1, barrier=1)
        builder.put(1, status="runnable", children_pending=0)
        if reached:
            end(builder, 2)
        else:
            builder.cancel(2, "closing:1")
        builder.cancel(4, "closing:2")
        assert ("nobody has cancelled it" in builder.sentences()) is not reached


def test_the_child_whose_end_opens_the_barrier_is_not_left_alone():
    """Those who clear up cancel it; in that transaction the parent's row is written first."""
    builder = HistoryBuilder()
    builder.put(
        1, fsm="chaos.Rest", status="awaiting_children", visit=2, children_pending=1, children_total=2
    )
    builder.put(2, parent_id=1, barrier=2)
    tx = builder.put(1, status="runnable", children_pending=0)
    builder.cancel(2, "closing:1", tx=tx)
    assert "nobody has cancelled it" not in builder.sentences()


def compensating(builder: HistoryBuilder) -> None:
    builder.put(9, fsm="chaos.Undo", step="start", status="awaiting_signal", awaits=["never"])
    entered = {
        "status": "runnable",
        "step": "undo",
        "visit": 2,
        "awaits": None,
        "cancellation": {"reason": "x"},
    }
    tx = builder.put(9, **entered)
    builder.receipt(9, "cancel", "requested", tx)
    builder.pick(9, "u")
    builder.begin(9)


def test_who_compensates_ends_as_cancelled(family):
    compensating(family)
    family.end(9, outcome="Done")
    family.commit(9, "cancelled", request=None, round=1)
    assert "it ended" not in family.sentences()
    assert "compensate" not in family.sentences()


@pytest.mark.parametrize("status", ["done", "failed"])
def test_who_compensates_and_ends_otherwise(family, status: str):
    compensating(family)
    family.end(9, outcome="Done")
    family.commit(9, status, round=1)
    assert f"it compensates, and is {status}" in family.sentences()


def test_who_ends_before_it_has_compensated(family):
    compensating(family)
    end(family, 9, request=None)
    assert "its step 'undo' has not come to its end" in family.sentences()
