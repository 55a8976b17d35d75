"""Rules broken on purpose: small nodes must notice each within a few hundred schedules, or the checks prove nothing."""

from __future__ import annotations

import pytest
from tests.simulation.shrink import shrink, told
from tests.simulation.small.__main__ import PROGRAM
from tests.simulation.small.breakages import BREAKAGES, Breakage, first_noticed

pytestmark = pytest.mark.slow

MOST = 300
FIRST = {
    "lease": 30, "consume more": 105, "no deadline": 440, "unknown done": 20, "unknown failed": 50, "no kept": 30,
    "no reset": 270, "no restart": 770, "visit": 98, "deletes children": 84, "fence": 40, "strays": 50, "consume": 10,
    "unsaid": 355, "late start": 470, "greedy": 30,
}  # fmt: skip
"""Where to begin with those that show rarely."""
RULES: dict[str, set[str]] = {
    "fence": {"I4"},
    "visit": {"I4"},
    "lease": {"I4"},
    "double claim": {"I2"},
    "rev": {"I4"},
    "renewals": {"I5", "calm"},
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
    "cuts too far": {"journal"},
    "unrecorded wake": {"journal"},
    "unsaid": {"journal"},
    "proceed": {"I1", "I7"},
    "trust": {"I5"},
    "no renewal": {"calm"},
    "no deadline": {"I5"},
    "wrong clock": {"I5", "calm", "storm"},
    "late start": {"I5"},
    "keyed steps": {"I9"},
    "long trust": {"I9"},
    "no reaper": {"I7"},
    "dead at once": {"I2"},
    "restart proves": {"I2"},
    "unknown failed": {"result", "internal error"},
    "unknown done": {"I1"},
    "no awaits": {"I7"},
    "consume all": {"I7"},
    "no kept": {"storm"},
    "no reset": {"I7"},
    "no free slot": {"slots"},
    "greedy": {"slots", "storm"},
    "no restart": {"I7", "internal error"},
}


@pytest.mark.parametrize("breakage", BREAKAGES, ids=lambda each: each.name)
def test_a_broken_rule_is_noticed(breakage: Breakage):
    report = first_noticed(breakage, MOST, FIRST.get(breakage.name, 0))
    assert report is not None, f"{breakage.text}: nobody noticed in {MOST} schedules"
    assert report.violation.rule in RULES[breakage.name], told(report, frozenset(), program=PROGRAM)


def test_a_failing_schedule_is_shrunk_and_told():
    breakage = next(each for each in BREAKAGES if each.name == "recheck")
    report = first_noticed(breakage, MOST, 10)
    smaller, dropped = shrink(report, breakage.simulate, most=25)
    assert smaller.violation is not None
    assert smaller.violation.rule == "I7"
    assert len(smaller.plan.items) <= 2
    text = told(smaller, dropped, program=PROGRAM)
    assert f"python -m tests.simulation.small --seed {report.plan.seed} --drop" in text
    assert "VIOLATION" in text
