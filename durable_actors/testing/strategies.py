"""Strategies for Hypothesis, which is not installed with `durable-actors[testing]`.

::

    @given(points=crash_points())
    async def test_any_two_crashes(durable_benches, points):
        await check_crashes(durable_benches, scenario, points)
"""

from __future__ import annotations

from hypothesis import strategies as st

from durable_actors.testing.crash_plan import CrashPoint


def crash_points(*, most: int = 2, runs: int = 20) -> st.SearchStrategy[frozenset[CrashPoint]]:
    """Up to `most` points in the first `runs` runs of a scenario. Shrinks towards fewer and earlier crashes."""
    point = st.builds(CrashPoint, run=st.integers(0, runs - 1), committed=st.booleans())
    return st.frozensets(point, min_size=1, max_size=most)
