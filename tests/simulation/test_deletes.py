"""Commits that delete (`keep=0`), in worlds of lost answers, late messages and dead nodes: each told as it was."""

from __future__ import annotations

from collections import Counter

import attrs
import pytest
from tests.simulation.driver import Rates
from tests.simulation.plan import Item, Plan, Strike, make_plan
from tests.simulation.run import Report, simulate

pytestmark = pytest.mark.slow

SEEDS = range(4)


def brief(seed: int) -> Plan:
    """Jobs whose rows are deleted when they are done; leases that end under way, and answers that do not come."""
    plan = attrs.evolve(make_plan(seed), orders=())
    items = tuple(
        Item(f"brief-{n}", "brief", 0.4 * n, n, 0.3, journal=("auto", "full", "off")[n % 3])
        for n in range(20)
    )
    options = {
        **plan.options,
        "lease_ttl": 1.0,
        "reap_interval": 0.3,
        "dead_after": 0.3,
        "late_commit": "accept",
    }
    rates = Rates(lost_reply=0.35, lost_request=0.1, slow=0.1, delay=3.0, lag=0.05)
    cuts = tuple(Strike(0.4 + 2.0 * n, "cut", n % 2, 3.5) for n in range(4))
    return attrs.evolve(
        plan, nodes=2, items=items, options=options, rates=rates, strikes=cuts, lasts=10.0, clockwork=None
    )


def run(seed: int, broken: frozenset[str] = frozenset()) -> Report:
    return simulate(brief(seed), broken, patience=150.0)


def test_every_commit_is_told_as_it_was():
    counts: Counter[str] = Counter()
    for seed in SEEDS:
        report = run(seed)
        assert report.violation is None, (seed, report.violation)
        counts += report.counts
    assert counts["finished"] >= 12 * len(SEEDS)
    assert counts["finished, told"] > 6 * len(SEEDS)


def first(broken: frozenset[str] = frozenset(), seeds: int = 20) -> str:
    """The rule that the first schedule breaks which notices it."""
    for seed in range(seeds):
        report = run(seed, broken)
        if report.violation is not None:
            return report.violation.rule
    pytest.fail("nobody noticed")


def test_a_commit_that_leaves_no_token_is_noticed():
    assert first(frozenset({"token"})) == "fate"


def test_a_fence_that_lets_stale_commits_delete_is_noticed():
    assert first(frozenset({"fence"})) in {"I4", "fate", "retention"}
