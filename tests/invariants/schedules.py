"""I16: every slot of a schedule is accounted for exactly once. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

import attrs

if TYPE_CHECKING:
    from tests.invariants.history import History, Violation

SLOT_KINDS: Final = frozenset({None, "slot", "caught_up"})
"""Of records and instances that stand for a slot; the others are `run_now` and `backfill`."""
MAX_SLOTS: Final = 100_000
DECIDING: Final = 5.0
"""Seconds that may pass from the instant after which the first slot comes to the write of its schedule: by default."""


@attrs.frozen(kw_only=True)
class SlotRecord:
    """A row of `schedule_log`: what became of a slot, or of a run of them. Times are seconds of the server's clock."""

    slot: float
    last_slot: float
    outcome: str
    kind: str | None = None
    instance_id: int | None = None


@attrs.frozen(kw_only=True)
class SlotInstance:
    """An instance that a schedule has started."""

    id: int
    slot: float
    kind: str


@attrs.frozen(kw_only=True)
class ScheduleEvidence:
    """A schedule with a period, at the end of a run: where it stands, its records, and its instances."""

    name: str
    every: float
    created: float
    changed: float
    """When it was last defined; the same as `created`, if that never changed."""
    last_slot: float | None
    """The last slot that is decided; None: none is."""
    records: Sequence[SlotRecord] = ()
    instances: Sequence[SlotInstance] = ()
    deciding: float = DECIDING
    """Seconds from the instant after which its first slot comes to `created`, at most."""


def i16_every_slot_is_accounted_for(history: History) -> list[Violation]:
    """From the first slot after its definition to the last one that is decided, each slot has exactly one record.

    * It fired and has one instance, or it was skipped. One that waited (`buffered`) has a second record, with its end.
    * No two instances stand for one slot, and each that does has its record.
    """
    return [
        _violation(found.name, sentence, instances)
        for found in history.schedules
        for sentence, instances in (*_uncounted(found), *_doubled(found))
    ]


def _uncounted(found: ScheduleEvidence) -> Iterator[tuple[str, tuple[int, ...]]]:
    if found.last_slot is None or found.changed != found.created:
        return  # another definition may have had other slots
    first = (math.floor(found.created / found.every) + 1) * found.every
    known = [record.slot for record in found.records if record.kind in SLOT_KINDS]
    first = min([first, *(slot for slot in known if slot > found.created - found.deciding)])
    slots = [first + n * found.every for n in range(round((found.last_slot - first) / found.every) + 1)]
    if len(slots) > MAX_SLOTS:
        return
    decided: Counter[float] = Counter()
    waited: Counter[float] = Counter()
    for record in found.records:
        if record.kind in SLOT_KINDS:
            covered = [slot for slot in slots if record.slot <= slot <= record.last_slot]
            (waited if record.outcome == "buffered" else decided).update(covered)
            if not covered:
                yield (
                    f"{record} is of no slot, or of one after {found.last_slot:.3f}, the last decided one",
                    (),
                )
    for slot in slots:
        if decided[slot] > 1:
            yield f"slot {slot:.3f} was decided {decided[slot]} times", ()
        elif not decided[slot] and not waited[slot]:
            yield f"slot {slot:.3f} has no record", ()


def _doubled(found: ScheduleEvidence) -> Iterator[tuple[str, tuple[int, ...]]]:
    mine = [each for each in found.instances if each.kind in SLOT_KINDS]
    fired = {record.instance_id for record in found.records if record.outcome == "fired"}
    by_slot: dict[float, list[int]] = {}
    for each in mine:
        by_slot.setdefault(each.slot, []).append(each.id)
        if each.id not in fired:
            yield f"instance {each.id} of slot {each.slot:.3f} has no record", (each.id,)
    for slot, ids in by_slot.items():
        if len(ids) > 1:
            yield f"slot {slot:.3f} has {len(ids)} instances", tuple(ids)


def _violation(name: str, sentence: str, instances: tuple[int, ...]) -> Violation:
    from tests.invariants.history import Violation  # noqa: PLC0415 - it has this module's values

    return Violation("I16", instances, f"schedule {name}: {sentence}", ())
