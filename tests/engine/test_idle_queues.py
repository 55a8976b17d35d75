from __future__ import annotations

import math

import pytest
from durable_actors._engine.claiming.idle_queues import LONGEST_PAUSE, IdleQueues
from durable_actors._engine.limits import QueueLimits


def queues(**every: float) -> tuple[IdleQueues, list[int]]:
    asked: list[int] = []
    found = IdleQueues(
        {name: QueueLimits(1, 0, 1, 1.0, 5.0, each) for name, each in every.items()},
        on_change=lambda: asked.append(1),
    )
    return found, asked


def names(of: IdleQueues, now: float) -> list[str]:
    return [queue.name for queue in of.choose(now)]


def test_a_queue_is_watched_while_its_feeder_has_room():
    found, asked = queues(a=0.1, b=0.1, c=0.0)
    assert names(found, 0.0) == []
    found.of("b").rest(0.0)
    found.of("c").rest(0.0)
    assert len(asked) == 2
    assert names(found, 0.0) == ["b"], "c is not to be watched"
    found.of("b").busy()
    assert names(found, 1.0) == []
    assert found.watchable == 2


def test_a_queue_asks_once_until_somebody_chooses():
    """A busy feeder goes to sleep a thousand times a second."""
    found, asked = queues(a=0.1)
    queue = found.of("a")
    for _ in range(5):
        queue.rest(0.0)
    queue.busy()
    assert len(asked) == 1
    assert found.choose(0.0) == []
    queue.rest(0.0)
    assert len(asked) == 2, "else it would never be watched"
    [chosen] = found.choose(0.0)
    chosen.watched = True
    queue.rest(0.0)
    assert len(asked) == 2, "the server watches it already"
    assert not found.new(0.0)


def test_what_cannot_be_claimed_is_watched_again_after_a_growing_pause():
    found, _ = queues(a=0.1)
    queue, now, pauses = found.of("a"), 0.0, list[float]()
    queue.rest(now)
    for _ in range(6):
        assert queue.hit()
        queue.rest(now)
        assert names(found, now) == []
        pauses.append(found.next_at(now) - now)
        now = found.next_at(now)
        assert names(found, now) == ["a"]
    assert pauses == pytest.approx([0.2, 0.4, 0.8, LONGEST_PAUSE, LONGEST_PAUSE, LONGEST_PAUSE])
    assert queue.hit()
    queue.claimed()
    queue.rest(now)
    assert names(found, now) == ["a"], "a claim ends it"
    assert found.next_at(now) == math.inf


def test_a_look_that_saw_nothing_ends_the_growth():
    found, _ = queues(a=0.1)
    queue = found.of("a")
    queue.rest(0.0)
    for now in (1.0, 2.0, 3.0):
        assert queue.hit()
        queue.rest(now)
    queue.unwatched(seen=True)
    assert queue.hit()
    queue.rest(10.0)
    assert found.next_at(10.0) == pytest.approx(10.2)


def test_a_hit_on_a_feeder_that_is_full_tells_nobody():
    found, _ = queues(a=0.1)
    queue = found.of("a")
    assert not queue.hit()
    queue.rest(0.0)
    queue.busy()
    assert not queue.hit()
    queue.rest(0.0)
    assert names(found, 0.0) == ["a"], "no pause: it was not told"


def test_claims_of_any_queue_are_reported_once():
    found, _ = queues(a=0.1, b=0.0, c=0.1)
    assert not found.take_claimed()
    found.of("b").claimed()
    found.of("c").claimed()
    assert found.take_claimed(), "also of a queue that is not watched"
    assert not found.take_claimed()


def test_an_unknown_queue_is_nobodys():
    found, asked = queues()
    found.of("x").rest(0.0)
    assert not asked
    assert found.next_at(0.0) == math.inf
