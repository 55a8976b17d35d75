"""I15, on histories made by hand."""

from __future__ import annotations

from typing import Any

import pytest
from tests.invariants.history import Needs
from tests.invariants.history_builder import HistoryBuilder, run

UPSTREAM = {"upstream": 1, "reason": "upstream failed: a failed"}


class Graph(HistoryBuilder):
    """Instances 1 and 2, and 3 that comes after both."""

    def __init__(self, *, any_end: bool = False) -> None:
        super().__init__()
        self.options: dict[str, Any] = {"needs": {3: Needs((1, 2), any_end)}}
        self.put(1)
        self.put(2)
        self.put(3, hold=5)

    def finish(self, number: int, status: str = "done", **more: Any) -> int:
        run(self, number, f"claim {number}", outcome="Done")
        return self.commit(number, status, **more)

    def unblock(self, tx: int | None = None) -> None:
        self.put(3, hold=0, tx=tx, eligible_at=self.now)

    def doom(self, tx: int | None = None) -> None:
        self.put(3, hold=0, tx=tx, eligible_at=self.now, cancellation=UPSTREAM)

    def wrong(self) -> bool:
        return "I15" in self.broken(**self.options)


def test_in_order() -> None:
    graph = Graph()
    graph.finish(1)
    graph.unblock(graph.finish(2))
    graph.finish(3)
    assert not graph.wrong(), graph.sentences(**graph.options)


@pytest.mark.parametrize("ended", [[], [1], [2]])
def test_unblocked_too_early(ended: list[int]) -> None:
    graph = Graph()
    for number in ended:
        graph.finish(number)
    graph.unblock()
    assert graph.wrong()


@pytest.mark.parametrize("ended", [[], [1], [2]])
def test_claimed_while_it_waits(ended: list[int]) -> None:
    graph = Graph()
    for number in ended:
        graph.finish(number)
    graph.pick(3, "claim", hold=0)
    assert graph.wrong()


def test_handed_over() -> None:
    graph = Graph()
    graph.finish(1)
    graph.pick(3, "claim", hold=0, tx=graph.finish(2))
    assert not graph.wrong(), graph.sentences(**graph.options)


def test_handed_over_and_unblocked() -> None:
    graph = Graph()
    graph.finish(1)
    tx = graph.finish(2)
    graph.pick(3, "claim", hold=0, tx=tx)
    graph.put(3, hold=5, status="runnable")
    graph.unblock()
    assert graph.wrong()


def test_unblocked_twice() -> None:
    graph = Graph()
    graph.finish(1)
    graph.unblock(graph.finish(2))
    graph.put(3, hold=5)
    graph.unblock()
    assert graph.wrong()


@pytest.mark.parametrize("any_end", [False, True])
def test_after_one_that_failed(any_end: bool) -> None:
    graph = Graph(any_end=any_end)
    graph.finish(1)
    graph.unblock(graph.finish(2, "failed"))
    assert graph.wrong() is not any_end


@pytest.mark.parametrize("any_end", [False, True])
def test_doomed(any_end: bool) -> None:
    graph = Graph(any_end=any_end)
    graph.doom(graph.finish(2, "failed"))
    assert graph.wrong() is any_end


def test_doomed_without_a_reason() -> None:
    graph = Graph()
    graph.doom(graph.finish(2))
    assert graph.wrong()


def test_doomed_and_run() -> None:
    graph = Graph()
    graph.doom(graph.finish(2, "failed"))
    run(graph, 3, "claim 3")
    assert graph.wrong()


def test_forgotten() -> None:
    graph = Graph()
    graph.finish(1)
    graph.finish(2)
    graph.sleep(5)
    assert not graph.wrong()
    graph.sleep(60)
    assert graph.wrong()


def test_not_told_of_a_failure() -> None:
    graph = Graph()
    graph.finish(2, "failed")
    graph.sleep(60)
    assert graph.wrong()


def test_one_that_still_runs_is_waited_for() -> None:
    graph = Graph()
    graph.finish(1)
    graph.pick(2, "claim", lease_expires_at=graph.now + 1000)
    graph.sleep(60)
    assert not graph.wrong()
