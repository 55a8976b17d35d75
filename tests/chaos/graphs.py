"""Random graphs of tasks, and what each task must come to. Pure."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from graphlib import TopologicalSorter
from typing import Any, Final

import attrs

UPSTREAM: Final = "upstream"
"""The error of a task that was cancelled because one that it comes after did not succeed begins so."""


@attrs.frozen
class Task:
    """One task of a graph."""

    key: str
    after: tuple[str, ...] = ()
    any_end: bool = False
    """Whether it runs whatever became of those that it comes after."""
    bad: bool = False
    """Whether it fails for good."""
    fails: int = 0
    """How often it fails before it succeeds."""

    @property
    def number(self) -> int:
        """What it adds to the results that it is given."""
        return int(self.key.removeprefix("t"))


def random_graph(rng: random.Random, tasks: int) -> list[Task]:
    """Tasks in any order: one may come after another that stands behind it."""
    names = [f"t{n}" for n in range(tasks)]
    order = rng.sample(names, tasks)
    made: dict[str, Task] = {}
    for place, name in enumerate(order):
        fan = 0 if place == 0 else rng.choice((0, 1, 1, 2, 2, 3, place))
        after = tuple(rng.sample(order[:place], min(fan, place)))
        made[name] = Task(
            name,
            after,
            any_end=rng.random() < 0.3,
            bad=rng.random() < 0.12,
            fails=rng.choice((0, 0, 0, 1)),
        )
    return [made[name] for name in names]


def to_state(tasks: Sequence[Task]) -> list[dict[str, Any]]:
    """As JSON."""
    return [attrs.asdict(task) for task in tasks]


def from_state(state: Sequence[Mapping[str, Any]]) -> list[Task]:
    """From JSON."""
    return [Task(**{**each, "after": tuple(each["after"])}) for each in state]


def expected(tasks: Sequence[Task]) -> dict[str, list[Any]]:
    """By key: the status in which each task ends, and its result."""
    by_key = {task.key: task for task in tasks}
    ends: dict[str, list[Any]] = {}
    for key in TopologicalSorter({task.key: task.after for task in tasks}).static_order():
        task = by_key[key]
        before = [ends[name] for name in task.after]
        if not task.any_end and any(status != "done" for status, _ in before):
            ends[key] = ["cancelled", None]
        elif task.bad:
            ends[key] = ["failed", None]
        else:
            ends[key] = ["done", task.number + sum(result for status, result in before if status == "done")]
    return ends


def may_come_to(tasks: Sequence[Task], found: Mapping[str, Sequence[Any]]) -> list[str]:
    """What is wrong with the ends of tasks some of which were cancelled or retried; each sentence is a failure.

    A result tells what the task was given when it ran. It may have been retried since, and so may those before it: the
    order is checked where it is decided (I15), here only that no end is impossible.
    """
    wrong: list[str] = []
    for task in tasks:
        status, result = found.get(task.key, (None, None))
        if status == "done" and (task.bad or not isinstance(result, int) or result < task.number):
            wrong.append(f"task {task.key} is done with {result!r}")
        if status is None:
            wrong.append(f"task {task.key} is missing")
    return wrong
