from __future__ import annotations

import pytest
from durable_actors._engine.claiming.poll_timer import PollTimer, poll_pause
from durable_actors._engine.claiming.stats_refresh import refresh_pause
from durable_actors._engine.limits import QueueLimits, demand
from hypothesis import given, strategies as st


def limits(concurrency=10, prefetch=0, min_demand=1, poll=1.0, most=5.0) -> QueueLimits:
    return QueueLimits(concurrency, prefetch, min_demand, poll, most)


@pytest.mark.parametrize(
    ("of", "running", "buffered", "wanted"),
    [
        (limits(10), 0, 0, 10),
        (limits(10), 4, 0, 6),
        (limits(10), 10, 0, 0),
        (limits(10, prefetch=5), 0, 0, 15),
        (limits(10, prefetch=5), 10, 0, 5),
        (limits(10, prefetch=5), 10, 5, 0),
        (limits(10, min_demand=4), 7, 0, 0),  # three free: not worth a round trip yet
        (limits(10, min_demand=4), 6, 0, 4),
        (limits(2, min_demand=10), 0, 0, 2),  # idle: takes what there is
        (limits(2, min_demand=10**6), 1, 0, 0),  # counts as two: waits for both
        (limits(1), 3, 0, 0),  # a restarted feeder may find more running than it may start
    ],
)
def test_demand(of, running, buffered, wanted):
    assert demand(of, running=running, buffered=buffered) == wanted


sizes = st.integers(0, 200)
limits_ = st.builds(
    limits,
    st.integers(1, 100),
    st.integers(0, 100),
    st.integers(1, 10**6),
    st.floats(0.01, 60),
    st.floats(0.01, 60),
)


@given(limits_, sizes, sizes)
def test_demand_never_overfills_and_never_starves(of, running, buffered):
    wanted = demand(of, running=running, buffered=buffered)
    room = of.concurrency + of.prefetch
    assert 0 <= wanted <= max(room - running - buffered, 0)
    if running + buffered == 0:
        assert wanted == room  # an idle queue always asks (H24)
    if wanted:
        assert wanted >= min(of.min_demand, room) or running + buffered == 0


@pytest.mark.parametrize(("empty", "pause"), [(0, 1.0), (1, 1.0), (2, 2.0), (3, 4.0), (4, 5.0), (10**9, 5.0)])
def test_poll_pause(empty, pause):
    assert poll_pause(limits(), empty_polls=empty) == pause


@given(limits_, st.integers(0, 10**12))
def test_poll_pause_is_bounded_and_grows(of, empty):
    pause = poll_pause(of, empty_polls=empty)
    assert 0 <= pause <= of.max_poll_interval
    assert poll_pause(of, empty_polls=empty + 1) >= pause


def test_only_a_poll_that_was_due_counts():
    timer = PollTimer(limits(most=8.0))
    assert timer.polled(10.0, found_work=False) == 11.0
    for step in range(1, 10):  # a slot becomes free: the feeder picks, and that is no poll
        assert timer.polled(10.0 + step / 10, found_work=False) == 11.0
    assert timer.polled(11.0, found_work=False) == 13.0
    assert timer.polled(13.5, found_work=False) == 17.5
    assert timer.polled(17.5, found_work=False) == 25.5
    assert timer.polled(20.0, found_work=False) == 25.5


def test_work_resets_the_poll_pause():
    timer = PollTimer(limits(most=8.0))
    for now in (0.0, 1.0, 3.0, 7.0):
        timer.polled(now, found_work=False)
    assert timer.polled(8.0, found_work=True) == 9.0
    assert timer.polled(8.5, found_work=False) == 9.0
    assert timer.polled(9.0, found_work=False) == 10.0, "the first empty poll after work"
    assert timer.polled(10.0, found_work=False) == 12.0


def test_refreshes_of_a_queue_full_of_dead_entries_take_a_twentieth_of_the_time():
    assert refresh_pause(0.001) == 0.0, "a cheap one may follow every short pick"
    assert refresh_pause(0.05) == pytest.approx(1.0)
    assert refresh_pause(10.0) == 2.0
