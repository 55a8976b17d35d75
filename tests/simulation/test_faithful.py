"""The simulated statements mean what the SQL means: random walks of calls, on both.

The suite takes the same walks each time. Walks with new seeds, which each test prints:
DURABLE_MODEL_EXAMPLES=50 pytest -m slow tests/simulation/test_faithful.py, and a few in `make simulate`.
"""

from __future__ import annotations

import os

import pytest
from tests.simulation.faithful import walk

NEW = [f"new {number}" for number in range(int(os.environ.get("DURABLE_MODEL_EXAMPLES", "0")))]
KINDS = {
    "insert": 2, "pick": 5, "pick_fair": 3, "look_fair": 1, "begin": 2,
    "commit": 9, "commit_again": 1, "spawn": 3, "signal": 3, "renew": 1,
    "release": 1, "crash": 1, "retry": 1, "hasten": 1, "rerun": 1, "cancel": 2, "cascade": 2, "decide": 3, "strays": 1,
    "reap": 1, "stop": 1, "hold": 1, "maintain": 2,
    "time": 3, "tell": 2, "untold": 2, "delete": 1, "pause": 2, "stop_queue": 2, "truncate": 2,
}  # fmt: skip
GRAPHS = {
    "insert": 2, "pick": 9, "commit": 8, "spawn": 4, "cancel": 1, "retry": 3, "pause": 1, "untold": 2, "reap": 1,
    "crash": 1, "time": 2, "release": 1, "maintain": 1, "delete": 1,
}  # fmt: skip
LIMITS = {
    "insert": 4, "pick": 12, "pick_fair": 2, "commit": 4, "spawn": 1, "signal": 1, "release": 2, "crash": 1, "reap": 1,
    "cancel": 1, "retry": 1, "pause": 1, "time": 1, "maintain": 1, "rerun": 1,
    "thaw": 8, "charge": 1, "block": 1, "redeclare": 1, "rest": 1, "soon": 3, "forget_keys": 1,
}  # fmt: skip
SCHEDULES = {
    "put": 2, "turn": 8, "adopt": 1, "enable": 2, "due": 3, "pick": 4, "commit": 4, "cancel": 1, "rerun": 1, "begin": 2,
    "stop_queue": 1, "delete": 1, "maintain": 1,
}  # fmt: skip


@pytest.mark.parametrize("seed", [0, 1, 2, 3, 4, 1200457576, *NEW])
@pytest.mark.slow
async def test_the_model_does_what_the_sql_does(durable_dsn: str, seed: int | str):
    await walk(durable_dsn, seed, KINDS)


@pytest.mark.parametrize("seed", [12, 14, 15, *NEW])
@pytest.mark.slow
async def test_the_model_does_what_the_sql_does_with_graphs(durable_dsn: str, seed: int | str):
    """Among children that come after each other."""
    kinds = await walk(durable_dsn, seed, GRAPHS, eager=True)
    assert seed not in {12, 14} or kinds >= {"unblocked", "doomed"}


@pytest.mark.parametrize("seed", [0, 2, 3, 4, *NEW])
@pytest.mark.slow
async def test_the_model_does_what_the_sql_does_with_limits(durable_dsn: str, seed: int | str):
    """Rates, slots, several at once, unknown ones; keys that are blocked, charged, given back to."""
    kinds = await walk(durable_dsn, seed, LIMITS, limited=True)
    assert seed != 2 or kinds >= {"seen t", "thawed"}


@pytest.mark.parametrize("seed", [0, 1, *NEW])
@pytest.mark.slow
async def test_the_model_does_what_the_sql_does_with_schedules(durable_dsn: str, seed: int | str):
    """Slots that fire, overlap, find their queue paused, are skipped or wait; definitions of nodes and operators."""
    await walk(durable_dsn, seed, SCHEDULES)
