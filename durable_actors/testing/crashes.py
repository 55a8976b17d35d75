"""Crash anywhere: a scenario must end the same, wherever a worker dies.

A scenario is an async function that gets a bench, inserts, signals, drains and advances, and may return a value, e.g.
what a fake service counted. It runs on a fresh database each time, so it must make everything that it needs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import Final
from weakref import WeakKeyDictionary

import attrs

from durable_actors._wording import counted
from durable_actors.machine import canonical_json
from durable_actors.testing.bench import Bench, BenchMaker
from durable_actors.testing.crash_plan import CrashPoint, Numbered
from durable_actors.testing.step_alone import in_task

Scenario = Callable[[Bench], Awaitable[object]]

MAX_INSTANCES: Final = 10_000
FIELDS: Final = (
    "machine",
    "version",
    "status",
    "step",
    "state",
    "result",
    "last_error",
    "partition_key",
    "tags",
)
"""What must be the same of every instance, apart from its unique key. Ids may differ: a crash may skip some."""


@attrs.frozen
class Ending:
    """How a scenario ended."""

    value: object
    """What it returned."""
    instances: Counter[str]
    """Every instance, as text."""
    runs: tuple[str, ...]
    """Every run of a step, in order: machine, instance and step."""


async def crash_anywhere(bench: Bench | BenchMaker, scenario: Scenario) -> list[CrashPoint]:
    """Run a scenario without a crash, then with one crash at every point, and assert that it always ends the same.

    The worker dies once after every run of a step, before its outcome is committed, and once after every commit. Each
    time another worker takes over and the scenario goes on. Compared are the value that the scenario returns, and the
    status, step, state, result and error of all instances. Returns the points.

    Each run takes a fresh database: some 50 ms for a few steps.
    """
    __tracebackhide__ = True
    expected = await _undisturbed(_maker(bench), scenario)
    points = [CrashPoint(run, committed) for run in range(len(expected.runs)) for committed in (False, True)]
    for point in points:
        await check_crashes(bench, scenario, [point])
    return points


async def check_crashes(bench: Bench | BenchMaker, scenario: Scenario, points: Iterable[CrashPoint]) -> None:
    """Run a scenario with crashes at these points, and assert that it ends as without them. Points past its end count.

    `strategies.crash_points` draws points for Hypothesis.
    """
    __tracebackhide__ = True
    maker, chosen = _maker(bench), frozenset(points)
    expected = await _undisturbed(maker, scenario)
    plan = Numbered(chosen)
    try:
        found = await _run(maker, scenario, plan)
    except Exception as exc:
        raise AssertionError(f"the scenario raised {exc!r}, {_told(chosen, plan)}") from exc
    problems = list(_differences(expected, found))
    if problems:
        raise AssertionError("\n".join([f"the scenario ended differently, {_told(chosen, plan)}", *problems]))


def _differences(expected: Ending, found: Ending) -> Iterable[str]:
    if expected.value != found.value:
        yield f"it returned {found.value!r}, without a crash {expected.value!r}"
    for text, number in (expected.instances - found.instances).items():
        yield f"missing: {counted(number, 'instance')} {text}"
    for text, number in (found.instances - expected.instances).items():
        yield f"instead: {counted(number, 'instance')} {text}"


def _told(points: frozenset[CrashPoint], plan: Numbered) -> str:
    """Where the worker died, for people."""
    places = [
        f"{'after' if point.committed else 'before'} the commit of {plan.runs[point.run]} (run {point.run + 1})"
        for point in sorted(points)
        if point.run < len(plan.runs)
    ]
    return f"with a worker that died {' and '.join(places)}" if places else "without a crash"


async def _run(maker: BenchMaker, scenario: Scenario, plan: Numbered) -> Ending:
    with maker.fresh() as bench:
        bench.crash_at(plan)
        value = await in_task(partial(scenario, bench), bench.step_context())
        found = await bench.list_instances(limit=MAX_INSTANCES, full=True)
        texts = [
            canonical_json({
                **{field: getattr(each, field) for field in FIELDS},
                "unique_key": str(each.unique_key) if each.unique_key is not None else None,
                "is_child": each.parent_id is not None,
            }).decode()
            for each in found
        ]  # fmt: skip
        return Ending(value, Counter(texts), tuple(plan.runs))


_known: WeakKeyDictionary[Scenario, Ending] = WeakKeyDictionary()


async def _undisturbed(maker: BenchMaker, scenario: Scenario) -> Ending:
    """How the scenario ends without a crash. Run once."""
    if scenario not in _known:
        _known[scenario] = await _run(maker, scenario, Numbered(frozenset()))
    return _known[scenario]


def _maker(bench: Bench | BenchMaker) -> BenchMaker:
    return bench.benches if isinstance(bench, Bench) else bench
