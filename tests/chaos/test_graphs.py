"""The graphs of the chaos runs."""

from __future__ import annotations

import random

from tests.chaos.graphs import Task, expected, from_state, may_come_to, random_graph, to_state


def test_what_tasks_come_to() -> None:
    tasks = [
        Task("t1", ("t3",)),  # after one that stands behind it
        Task("t2", ("t1", "t4")),
        Task("t3"),
        Task("t4", bad=True),
        Task("t5", ("t2", "t1"), any_end=True),
        Task("t6", ("t2",)),
    ]
    assert expected(tasks) == {
        "t3": ["done", 3],
        "t1": ["done", 4],
        "t4": ["failed", None],
        "t2": ["cancelled", None],
        "t5": ["done", 9],
        "t6": ["cancelled", None],
    }


def test_a_graph_is_the_seeds_and_survives_json() -> None:
    tasks = random_graph(random.Random("7"), 12)
    assert tasks == random_graph(random.Random("7"), 12)
    assert from_state(to_state(tasks)) == tasks
    assert len(expected(tasks)) == 12
    assert any(task.after for task in tasks)


def test_impossible_ends_are_told() -> None:
    tasks = [Task("t1"), Task("t2", ("t1",)), Task("t3", bad=True)]
    assert not may_come_to(tasks, {"t1": ("done", 1), "t2": ("cancelled", None), "t3": ("failed", None)})
    wrong = may_come_to(tasks, {"t1": ("done", None), "t3": ("done", 3)})
    assert [sentence.split()[1] for sentence in wrong] == ["t1", "t2", "t3"]
