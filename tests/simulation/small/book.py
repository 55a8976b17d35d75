"""The large simulation's checks, and three more: quiet schedules, loops, slots."""

from __future__ import annotations

from collections import Counter
from typing import Any

from durable_actors.machine import Context
from tests.simulation.book import Book
from tests.simulation.plan import Plan
from tests.simulation.process import Process, World
from tests.simulation.server import Server
from tests.simulation.tables import Row, Tx

CLAIMS = 25
"""Of one instance: usual are up to ten."""


class SmallBook(Book):
    """All checks of one schedule."""

    def __init__(self, world: World, server: Server, plan: Plan) -> None:
        super().__init__(world, server, dead_after=plan.options["dead_after"])
        rates = plan.rates
        self._calm = not (
            plan.strikes or rates.slow or rates.lost_request or rates.lost_reply or rates.refused
        )
        self._slots = plan.concurrency
        self._counts: Counter[int] = Counter()

    def changed(self, tx: Tx, old: Row | None, new: Row) -> None:
        super().changed(tx, old, new)
        what = tx.why[new.id][0]
        if what == "claim":
            self._counts[new.id] += 1
            if self._counts[new.id] > CLAIMS:
                self.fail("storm", f"instance {new.id} was claimed {CLAIMS} times for so little work")
        elif self._calm and what in {"reap", "release"} and old is not None and new.attempt > old.attempt:
            self.fail("calm", f"instance {new.id} was taken from its worker, though nothing was wrong")

    def _began(
        self, process: Process, ctx: Context[Any], row: Row, claim: str, handed: frozenset[int]
    ) -> None:
        super()._began(process, ctx, row, claim, handed)
        steps = sum(run.process is process for run in self.running.values())
        if steps > self._slots:
            self.fail("slots", f"{process.name} runs {steps} steps of {self._slots}")
