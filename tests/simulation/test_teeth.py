"""Rules broken on purpose: each must be noticed within a few schedules, or the checks prove nothing."""

from __future__ import annotations

import pytest
from tests.simulation.breakages import BREAKAGES, Breakage
from tests.simulation.run import Report, simulate
from tests.simulation.shrink import shrink, told

pytestmark = pytest.mark.slow

SEEDS = 40
FIRST = {
    "lease": 262, "moved": 0, "strays": 4, "recheck": 2, "consume": 55, "dedup": 21, "deletes children": 25,
    "overrule": 1, "release asked": 1, "counts requests": 2, "pauses": 1, "cuts too far": 4, "unsaid": 24,
    "proceed": 1, "trust": 1, "no deadline": 1, "keyed steps": 20, "consume all": 4,
}  # fmt: skip
"""The seed that notices it today. After a change of the engine another one does: the search goes on from here."""


def caught(breakage: Breakage) -> Report:
    """The first schedule that notices it."""
    first = FIRST.get(breakage.name, 0)
    for seed in range(first, first + SEEDS):
        plan = breakage.plan(seed)
        with breakage.applied(plan) as broken:
            report = simulate(plan, broken, patience=breakage.patience)
        if report.violation is not None:
            return report
    pytest.fail(f"{breakage.text}: nobody noticed in {SEEDS} schedules")


RULES = {
    "fence": {"I4"},
    "visit": {"I4"},
    "lease": {"I4"},
    "double claim": {"I2"},
    "rev": {"I4"},
    "renewals": {"I5", "I2"},
    "moved": {"I2"},
    "strays": {"I2"},
    "recheck": {"I7"},
    "wake": {"I7"},
    "consume": {"I6"},
    "consume more": {"I6"},
    "dedup": {"result"},
    "join": {"I7"},
    "deletes live rows": {"retention"},
    "deletes children": {"retention"},
    "overrule": {"cancel"},
    "release asked": {"cancel"},
    "reap asked": {"cancel"},
    "uncounted cancel": {"I7"},
    "counts requests": {"I11"},
    "receipt": {"receipt"},
    "no control": {"I7"},
    "pauses": {"pause"},
    "paused ahead": {"pause"},
    "cuts too far": {"journal"},
    "unrecorded wake": {"journal"},
    "unsaid": {"journal"},
    "slots": {"slots"},
    "charge": {"rate"},
    "thaw": {"I7"},
    "turned twice": {"I16"},
    "unrecorded slot": {"I16"},
    "refunds": {"refund"},
    "no turn": {"I7"},
    "early": {"graph"},
    "told again": {"graph"},
    "untold": {"I7"},
    "forgets failures": {"graph"},
    "proceed": {"I1", "I4", "I2", "I9"},
    "trust": {"I5"},
    "no deadline": {"I5"},
    "keyed steps": {"I9"},
    "no reaper": {"I12", "I7"},
    "dead at once": {"I2"},
    "old statistics": {"storm"},
    "no awaits": {"I7"},
    "consume all": {"I7", "I6", "result"},
}


@pytest.mark.parametrize("breakage", BREAKAGES, ids=lambda each: each.name)
def test_a_broken_rule_is_noticed(breakage: Breakage):
    report = caught(breakage)
    assert report.violation is not None
    assert report.violation.rule in RULES[breakage.name], told(report, frozenset())


def test_a_failing_schedule_is_shrunk_and_told():
    breakage = next(each for each in BREAKAGES if each.name == "recheck")
    with breakage.applied(breakage.plan(0)) as broken:
        report = caught(breakage)
        smaller, dropped = shrink(report, lambda plan: simulate(plan, broken, patience=15.0), most=25)
    assert smaller.violation is not None
    assert smaller.violation.rule == "I7"
    assert len(smaller.plan.items) <= 2
    assert not smaller.plan.strikes
    text = told(smaller, dropped)
    assert f"--seed {report.plan.seed} --drop" in text
    assert "VIOLATION" in text
