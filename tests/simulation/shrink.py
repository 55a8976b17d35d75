"""From a failing schedule to the least that fails the same way, and how to see it again."""

from __future__ import annotations

from collections.abc import Callable

from tests.simulation.plan import Plan
from tests.simulation.run import Report

Runner = Callable[[Plan], Report]


def shrink(report: Report, run: Runner, *, most: int = 60) -> tuple[Report, frozenset[int]]:
    """Leave out items, strikes and kinds of faults, one after another, as long as the same rule is violated.

    Costs at most `most` runs. Returns the last report that fails, and the numbers of what was left out.
    """
    assert report.violation is not None
    plan, rule = report.plan, report.violation.rule
    dropped: frozenset[int] = frozenset()
    found, runs, progress = report, 0, True
    while progress and runs < most:
        progress = False
        for number in range(plan.elements):
            smaller = dropped | {number}
            if number in dropped or runs >= most:
                continue
            runs += 1
            again = run(plan.without(smaller))
            if again.violation is not None and again.violation.rule == rule:
                found, dropped, progress = again, smaller, True
    return found, dropped


def told(
    report: Report, dropped: frozenset[int], *, last: int = 60, program: str = "tests.simulation"
) -> str:
    """What a person needs: the rule, the way to see it again, the plan, the end of the history."""
    plan = report.plan
    again = f"python -m {program} --seed {plan.seed}"
    if dropped:
        again += f" --drop {','.join(map(str, sorted(dropped)))}"
    lines = [
        f"seed {plan.seed} violates {report.violation}",
        f"again: {again}",
        f"{plan.nodes} nodes, concurrency {plan.concurrency}, prefetch {plan.prefetch}, {plan.options}",
        f"{plan.rates}",
        *(f"  {item}" for item in plan.items),
        *(f"  {strike}" for strike in plan.strikes),
        *(f"  {order}" for order in plan.orders),
        *([f"  {plan.clockwork}"] if plan.clockwork is not None else []),
        f"the last {min(last, len(report.history))} of {len(report.history)} events:",
        *(f"  {event[0]:9.4f}  {' '.join(map(str, event[1:]))}" for event in report.history[-last:]),
    ]
    return "\n".join(lines)
