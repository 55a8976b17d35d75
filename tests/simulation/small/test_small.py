"""Schedules of small nodes: some are the same every day, some are new; and the proof that a seed repeats itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import attrs
import pytest
from tests.simulation.driver import Rates
from tests.simulation.plan import Item, Strike
from tests.simulation.run import Report
from tests.simulation.shrink import shrink, told
from tests.simulation.small.__main__ import PROGRAM
from tests.simulation.small.plan import SHAPES, make_plan
from tests.simulation.small.run import simulate

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent.parent.parent


def check(seed: int) -> Report:
    report = simulate(make_plan(seed))
    if report.violation is not None:
        smaller, dropped = shrink(report, simulate)
        pytest.fail(told(smaller, dropped, program=PROGRAM), pytrace=False)
    return report


def test_known_schedules_keep_every_invariant_and_meet_every_protocol_and_every_fault():
    seen: set[str] = set()
    for seed in range(150):
        seen |= check(seed).counts.keys()
    faults = {f"fault {fault}" for shape in SHAPES.values() for fault in shape.faults}
    moves = {"claim", "commit", "renew", "release", "reap", "signal", "expire", "hold", "promote", "join"}
    moves |= {"cancel", "ask", "retry", "cancel cancelled", "cancel requested", "retry done"}
    assert seen >= faults | moves


REGRESSIONS = {
    1794987080063: "a feeder that was cancelled with its whole tree found the step pool closed, and failed of it",
    1794986338586: "a due row that was locked was picked hundreds of times while a refresh was postponed",
}
"""Seeds that found a bug, and what it was."""


@pytest.mark.parametrize("seed", REGRESSIONS)
def test_a_schedule_that_found_a_bug_keeps_every_invariant(seed: int):
    check(seed)


def test_new_schedules_keep_every_invariant():
    first = int.from_bytes(os.urandom(4))
    for seed in range(first, first + 50):
        check(seed)


def test_a_bug_of_a_host_that_is_killed_while_it_stands_still_reaches_nobody():
    """The bug ends an actor when its process goes on, and here that is only to be killed."""
    strikes = (Strike(0.2, "pause", 0, 60.0), Strike(0.25, "bug", 0, 1.0))
    items = (Item("chain-0", "chain", 0.3, 1, 0.01),)
    for seed in range(10):  # it decides which actor
        plan = attrs.evolve(make_plan(seed), nodes=2, items=items, strikes=strikes, rates=Rates(), lasts=9.0)
        assert simulate(plan).violation is None


@pytest.mark.parametrize("cut", [0, 1])
def test_a_node_that_is_cut_off_while_the_server_restarts_ends_its_keyed_step_before_another_begins(cut: int):
    """Its key and its lock are gone, and it does not learn it; its lease is long. Found as seed 571."""
    options = {"lease_ttl": 4.0, "dead_after": 0.9, "reap_interval": 0.2}
    items = tuple(Item(f"chain-{number}", "chain", 0.1, 1, 12.0, key="red") for number in range(2))
    strikes = (Strike(1.0, "cut", cut, 3.0), Strike(1.05, "restart", 0, 0.2))
    reaps = 0
    for seed in range(6):  # it decides who runs what for how long
        plan = make_plan(seed)
        plan = attrs.evolve(plan, nodes=2, concurrency=1, prefetch=0, items=items, strikes=strikes, orders=())
        report = simulate(attrs.evolve(plan, rates=Rates(), lasts=6.0, options=plan.options | options))
        assert report.violation is None, told(report, frozenset(), program=PROGRAM)
        reaps += report.counts["reap"]
    assert reaps, "nobody was taken for dead"


def test_a_seed_repeats_itself_in_the_same_process_and_in_another():
    seeds = tuple(range(7, 19))
    first = [simulate(make_plan(seed)).digest for seed in seeds]
    assert first == [simulate(make_plan(seed)).digest for seed in seeds]
    assert len(set(first)) == len(seeds)
    program = (
        "from tests.simulation.small.run import simulate; from tests.simulation.small.plan import make_plan; "
        f"print(*(simulate(make_plan(seed)).digest for seed in {seeds}))"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "12345", "PYTHONPATH": str(ROOT)}
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment
    )
    assert found.stdout.split() == first
