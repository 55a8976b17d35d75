"""The part of the book that watches limits and schedules: rates, slots, refunds; what became of each slot."""

from __future__ import annotations

import json
import math
from collections import Counter
from datetime import datetime
from types import SimpleNamespace
from typing import Any

from durable_actors.machine import Context
from tests.invariants.schedules import (
    ScheduleEvidence,
    SlotInstance,
    SlotRecord,
    i16_every_slot_is_accounted_for,
)
from tests.simulation.limits import SECOND, uses_of
from tests.simulation.plan import Plan
from tests.simulation.small_tables import LimitRow
from tests.simulation.tables import Row, Tx

HAIR = 1e-4
"""Tokens: instants are rounded to microseconds."""


class FlowChecks:
    """Told of the same events as `Book`."""

    world: Any
    server: Any
    counts: Counter[str]

    def __init__(self) -> None:
        self._buckets: dict[str, tuple[float, float]] = {}
        """Per key of a limit: the tokens that are spent, and when that was so. Not read from the store's own level."""
        self._paid: dict[str, dict[str, float]] = {}
        """Per claim what it was charged: of those whose step has not begun."""
        self._unused: Counter[str] = Counter()
        """Per key how much of that may still be given back."""
        self._slots: list[tuple[str, SlotInstance]] = []

    def fail(self, rule: str, text: str) -> None:
        raise NotImplementedError

    def flows(self, tx: Tx, old: Row | None, new: Row, what: str) -> None:
        """A row has changed."""
        if what == "claim" and new.rate_limit is not None and not _only_ends(new):
            self._charged(tx, new)
        if new.rate_limit is not None and new.status == "executing" and not _only_ends(new):
            self._has_slot(tx, new)
        about = None if new.meta is None else json.loads(new.meta).get("durable:schedule")
        if about is None:
            return
        if old is None:
            self.counts["slot fired"] += 1
            self._slots.append(
                (about["name"], SlotInstance(id=new.id, slot=_seconds(about["slot"]), kind=about["kind"]))
            )
        if new.status == "failed":
            self.fail("result", f"instance {new.id} of slot {about['slot']} failed: {new.last_error}")

    # -- limits

    def _limit(self, tx: Tx, key: str) -> LimitRow:
        found: LimitRow = tx.read("limits", key.partition(":")[0])
        return found

    def _spent(self, key: str, interval: float) -> float:
        spent, at = self._buckets.get(key, (0.0, 0.0))
        return max(spent - (self.server.now() / SECOND - at) / interval, 0.0)

    def _charged(self, tx: Tx, row: Row) -> None:
        """A bucket of `burst` tokens, which fills at the rate: what is claimed must fit in, or find it full."""
        for use in uses_of(row.rate_limit):
            limit = self._limit(tx, use.key)
            if use.slot or limit.interval is None:
                continue
            self.counts["charged"] += 1
            # Of the statement, not of its commit: a reply may be late, and a transaction began before it.
            spent = self._spent(use.key, limit.interval)
            if spent + min(use.weight, limit.burst) > limit.burst + HAIR:
                text = f"instance {row.id} was claimed with weight {use.weight:g} of {use.key}"
                self.fail("rate", f"{text}, of which {spent:.3f} are spent")
            self._buckets[use.key] = (spent + use.weight, self.server.now() / SECOND)
            self._paid.setdefault(row.claim_id, {})[use.key] = use.weight
            self._unused[use.key] += use.weight

    def charged(self, key: str, weight: float) -> None:
        """A level is changed by a call: what was charged for steps that never began is given back, once."""
        self.counts["refunded" if weight < 0 else "spent"] += 1
        if weight < 0 and -weight > self._unused[key] + HAIR:
            self.fail(
                "refund", f"{-weight:g} of {key} are given back, and {self._unused[key]:g} were not used"
            )
        self._unused[key] += min(weight, 0.0)
        limit: LimitRow = self.server.tables.small["limits", key.partition(":")[0]]
        if limit.interval is not None:
            spent = max(self._spent(key, limit.interval) + weight, 0.0)
            self._buckets[key] = (spent, self.server.now() / SECOND)

    def began(self, claim: str) -> None:
        """Its step runs: what it was charged is used."""
        for key, weight in self._paid.pop(claim, {}).items():
            self._unused[key] -= weight

    def _has_slot(self, tx: Tx, row: Row) -> None:
        for use in uses_of(row.rate_limit):
            limit = self._limit(tx, use.key)
            if not use.slot or limit.slots is None:
                continue
            self.counts["slot taken"] += 1
            holders = [each.id for each in tx.all() if each.status == "executing" and _uses(each, use.key)]
            if len(holders) > limit.slots:
                self.fail(
                    "slots", f"instances {holders} have a slot of {use.key}, and there are {limit.slots}"
                )

    # -- schedules

    def ticked(self, ctx: Context[Any]) -> None:
        """A step of an instance that a schedule has started: it knows its slot."""
        slot = ctx.scheduled_for
        known = {each.id: each.slot for _, each in self._slots}
        if slot is None or known.get(ctx.id) != slot.timestamp():
            self.fail("I16", f"instance {ctx.id} runs for slot {slot}, not for {known.get(ctx.id)}")

    def schedules_ended(self, plan: Plan) -> bool:
        """Whether every slot that was to fire has."""
        found = [row for (table, _), row in self.server.tables.small.items() if table == "schedules"]
        over = all(row.next_slot is None and row.buffered is None for row in found)
        return over and len(found) == (plan.clockwork is not None)

    def check_schedules(self) -> None:
        """I16, with the checker of real runs: every slot has its record, and its instance if it fired."""
        small = self.server.tables.small
        log = [row for (table, _), row in small.items() if table == "schedule_log"]
        evidence = [
            ScheduleEvidence(
                name=row.name,
                every=row.spec["every"],
                created=row.created_at.timestamp(),
                changed=row.changed_at.timestamp(),
                last_slot=row.last_slot and row.last_slot.timestamp(),
                records=[
                    SlotRecord(
                        slot=each.slot.timestamp(), last_slot=each.last_slot.timestamp(), outcome=each.outcome,
                        kind=each.kind, instance_id=each.instance_id,
                    )
                    for each in log if each.name == row.name
                ],
                instances=[each for name, each in self._slots if name == row.name],
                deciding=math.inf,  # messages may be slower than anything
            )
            for (table, _), row in small.items() if table == "schedules"
        ]  # fmt: skip
        for each in evidence:
            self.counts["slot decided"] += len(each.records)
        for violation in i16_every_slot_is_accounted_for(SimpleNamespace(schedules=evidence))[:1]:  # type: ignore[arg-type]
            self.fail("I16", violation.sentence)


def _uses(row: Row, key: str) -> bool:
    return row.rate_limit is not None and any(use.slot and use.key == key for use in uses_of(row.rate_limit))


def _only_ends(row: Row) -> bool:
    """Whoever claims it ends it: that needs no token."""
    return row.cancellation is not None and "upstream" in json.loads(row.cancellation)


def _seconds(slot: str) -> float:
    return datetime.fromisoformat(slot).timestamp()
