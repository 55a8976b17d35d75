"""Schedules: seeds that once failed, seeds that are new every day, and the proof that a seed repeats itself."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import attrs
import pytest
from tests.simulation.breakages import clocked, graphs, limited
from tests.simulation.plan import make_plan
from tests.simulation.process import Violation
from tests.simulation.run import simulate
from tests.simulation.shrink import shrink, told

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent.parent

REGRESSIONS = {
    4: "an idle feeder on a slow store asked for the shape of its queue hundreds of times a second",
    1319: "a node that came back between a reaper's look and its reap lost claims that it had renewed",
    5642: "keys that were wanted while the keeper confirmed its session, slowly, were never asked for again",
}
"""Seeds that found a bug, and what it was. Plans and engine change, so each is a breakage in `test_teeth`, too."""


def check(seed: int) -> None:
    report = simulate(make_plan(seed))
    if report.violation is not None:
        pytest.fail(told(*shrink(report, simulate)), pytrace=False)


@pytest.mark.parametrize("seed", [*REGRESSIONS, *range(100, 108)])
def test_a_known_schedule_keeps_every_invariant(seed: int):
    check(seed)


def test_new_schedules_keep_every_invariant():
    for seed in (int.from_bytes(os.urandom(4)) for _ in range(4)):
        check(seed)


@pytest.mark.parametrize("seed", [*range(3), "new"])
def test_graphs_keep_every_invariant(seed: int | str):
    """A dependent runs after all it comes after, once; nodes die, and replies are lost."""
    number = seed if isinstance(seed, int) else int.from_bytes(os.urandom(4))
    report = simulate(graphs(attrs.evolve(make_plan(number), orders=())), patience=150.0)
    assert report.violation is None, told(report, frozenset())


@pytest.mark.parametrize("seed", [*range(3), "new"])
def test_limits_keep_every_invariant(seed: int | str):
    """No more tokens than there are, no more slots, and whatever was throttled runs in the end; nodes die and drain."""
    number = seed if isinstance(seed, int) else int.from_bytes(os.urandom(4))
    report = simulate(limited(attrs.evolve(make_plan(number), orders=(), clockwork=None)), patience=150.0)
    assert report.violation is None, told(report, frozenset())
    assert report.counts["throttle"]


@pytest.mark.parametrize("seed", [*range(3), "new"])
def test_schedules_keep_every_invariant(seed: int | str):
    """Every slot is accounted for once, although three nodes decide about each of them."""
    number = seed if isinstance(seed, int) else int.from_bytes(os.urandom(4))
    report = simulate(clocked(attrs.evolve(make_plan(number), orders=())), patience=150.0)
    assert report.violation is None, told(report, frozenset())
    assert report.counts["slot fired"]


def test_a_seed_repeats_itself_in_the_same_process_and_in_another():
    seeds = (7, 11)
    first = [simulate(make_plan(seed)).digest for seed in seeds]
    assert first == [simulate(make_plan(seed)).digest for seed in seeds]
    program = (
        "from tests.simulation.run import simulate; from tests.simulation.plan import make_plan; "
        f"print(*(simulate(make_plan(seed)).digest for seed in {seeds}))"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "12345", "PYTHONPATH": str(ROOT)}
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment
    )
    assert found.stdout.split() == first


def test_other_seeds_are_other_schedules():
    assert len({simulate(make_plan(seed)).digest for seed in range(3)}) == 3


def test_the_command_runs_seeds_in_several_processes():
    """Its work must be importable there; so must a violation that comes back be picklable."""
    command = [sys.executable, "-m", "tests.simulation", "--seconds", "1", "--first", "100", "--jobs", "2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=50, check=False)
    assert (done.returncode, "schedules in" in done.stdout) == (0, True), done.stdout + done.stderr
    again = pickle.loads(pickle.dumps(Violation("I2", "two claims")))
    assert (str(again), again.rule) == ("I2: two claims", "I2")
