from datetime import timedelta

import durable_actors.machine as da
import pytest
from durable_actors.errors import InvalidOutcome
from durable_actors.machine._checks import seconds
from hypothesis import given, strategies as st


@given(attempt=st.integers(0, 10**6), random=st.floats(0, 1))
def test_the_default_delay_stays_between_half_and_all_of_its_base(attempt, random):
    base = min(2**attempt, 300) if attempt < 20 else 300
    assert base / 2 <= da.default_backoff(attempt, random) <= base


@given(attempt=st.integers(0, 10**4))
def test_the_default_delay_never_shrinks(attempt):
    assert da.default_backoff(attempt, 1.0) <= da.default_backoff(attempt + 1, 1.0)


@pytest.mark.parametrize(
    ("attempt", "delay"), [(0, 1), (1, 2), (2, 4), (8, 256), (9, 300), (10, 300), (10_000, 300)]
)
def test_the_default_delay_without_jitter(attempt, delay):
    assert da.default_backoff(attempt, 1.0) == delay


@given(st.floats(0, 3e9) | st.integers(0, 3 * 10**9) | st.timedeltas(timedelta(0), timedelta(days=36_000)))
def test_every_sensible_duration_is_taken(value):
    expected = value.total_seconds() if isinstance(value, timedelta) else float(value)
    assert seconds(value, what="x", error=InvalidOutcome) == expected


@given(st.floats() | st.integers() | st.timedeltas() | st.text() | st.none() | st.booleans())
def test_a_duration_is_a_finite_number_or_a_clear_error(value):
    error = None
    result = 0.0
    try:
        result = seconds(value, what="the delay", error=InvalidOutcome)
    except InvalidOutcome as caught:
        error = str(caught)
    assert error is None or error.startswith("the delay must be")
    assert 0 <= result < 3.2e9


def test_zero_is_refused_where_it_makes_no_sense():
    with pytest.raises(InvalidOutcome, match="greater than 0"):
        seconds(0, what="x", error=InvalidOutcome, positive=True)
