"""ThrottledRows: when a feeder looks for throttled rows."""

from __future__ import annotations

import math

from durable_actors._engine.claiming.throttled import ThrottledRows
from durable_actors._store.rows import PickResult


def test_what_ends_while_a_look_is_under_way_is_looked_at_next():
    """The look was sent before, so it may have missed the end."""
    rows = ThrottledRows()
    rows.expect("gpu")
    assert rows.look() == {"gpu"}
    rows.expect("gpu")
    rows.found([], 2.0, 10.0)
    assert rows.look_at == -math.inf
    assert rows.look() == {"gpu"}
    rows.found([], 2.0, 10.0)
    assert rows.look_at == 12.0
    assert rows.look() == frozenset()


def test_a_look_that_failed_is_told_again():
    rows = ThrottledRows()
    rows.expect("gpu")
    rows.look()
    rows.expect("tpu")
    rows.failed()
    assert rows.look() == {"gpu", "tpu"}


def test_a_look_that_was_answered_is_not_told_again():
    rows = ThrottledRows()
    rows.expect("gpu")
    rows.look()
    rows.found([1], None, 0.0)
    rows.failed()
    assert rows.look() == frozenset()


def test_what_ends_between_a_look_and_its_pick_is_looked_at_after_the_pick():
    rows = ThrottledRows()
    rows.expect()
    rows.look()
    rows.found([1], 2.0, 0.0)
    rows.expect("gpu")
    rows.picked(PickResult([], [], {}), 0.0)
    assert rows.look() == {"gpu"}
