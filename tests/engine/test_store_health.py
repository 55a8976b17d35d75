"""One outage, many witnesses."""

from __future__ import annotations

from durable_actors._engine.store_health import StoreHealth


def test_the_first_tells_the_beginning_and_the_last_the_end():
    health = StoreHealth()
    assert [health.failed("a", 1.0), health.failed("b", 2.0), health.failed("a", 3.0)] == [True, False, False]
    assert health.works("a", 4.0) is None
    assert health.works("b", 6.0) == 5.0
    assert not health.away
    assert health.works("b", 7.0) is None
    assert health.failed("b", 8.0)


def test_one_that_is_gone_does_not_hold_the_end_up():
    """It was restarted, or its step was cancelled, while the store was away."""
    health = StoreHealth()
    health.failed("a", 1.0)
    health.failed("b", 1.0)
    health.forget("a")
    assert health.works("b", 2.0) == 1.0
    health.failed("a", 3.0)
    health.forget("a")
    assert health.works("c", 5.0) == 2.0
