"""The large simulation's checks, and four more: looks of reapers, quiet schedules, loops, slots."""

from __future__ import annotations

from collections import Counter
from typing import Any

from durable_actors.machine import Context
from tests.simulation.book import HAIR, Book
from tests.simulation.plan import Plan
from tests.simulation.process import Process, World
from tests.simulation.server import Server
from tests.simulation.statements import SECOND
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
        self._seen: dict[tuple[int, str], tuple[int, int]] = {}
        """Since when a server session found an owner's lock free, whenever it looked, and the owner's last lease."""
        self._scene = server._scene
        self._scene.owner_locked = self._look_at

    def _look_at(self, owner: str) -> bool:
        key, locked, last = (
            (self._scene.backend, owner),
            f"\2{owner}" in self.server.locks,
            self._last_lease(owner),
        )
        since, before = self._seen.pop(key, (0, -1))
        if not locked:
            self._seen[key] = (since if before >= last else self.server.now(), last)
        return locked

    def _last_lease(self, owner: str) -> int:
        """It moves whenever the owner claims or renews anything."""
        return max(
            (row.lease for row in self.server.tables.rows.values() if row.locked_by == owner), default=0
        )

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

    def _reaped(self, old: Row) -> None:
        """Within the lease only if one session found its owner's lock free over `dead_after` seconds; nothing moved.

        Not stricter: the lock may have been taken and lost again between two looks, or taken after the last.
        """
        now, owner = self.server.now(), self.owners.get(old.locked_by)
        if old.lease <= now or owner is None or owner.dead:
            return
        # Of the row itself: another may have moved since the statement, which was some messages ago.
        name = old.locked_by
        proofs = (at for (_, seen), (at, last) in self._seen.items() if seen == name and last >= old.lease)
        if now - min(proofs, default=now) < (self.dead_after - HAIR) * SECOND:
            self.fail("I2", f"instance {old.id}: {old.claim_id} of {owner.name} was reaped within its lease")
