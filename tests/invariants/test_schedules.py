"""I16, on evidence made by hand."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
from tests.invariants.history import History
from tests.invariants.schedules import (
    ScheduleEvidence,
    SlotInstance,
    SlotRecord,
    i16_every_slot_is_accounted_for,
)

LAWFUL = ScheduleEvidence(
    name="tick",
    every=10.0,
    created=1003.0,
    changed=1003.0,
    last_slot=1050.0,
    records=[
        SlotRecord(slot=1010.0, last_slot=1010.0, outcome="fired", kind="slot", instance_id=1),
        SlotRecord(slot=1020.0, last_slot=1030.0, outcome="skipped"),
        SlotRecord(slot=1040.0, last_slot=1040.0, outcome="buffered"),
        SlotRecord(slot=1040.0, last_slot=1040.0, outcome="fired", kind="caught_up", instance_id=2),
        SlotRecord(slot=1044.0, last_slot=1044.0, outcome="fired", kind="run_now", instance_id=3),
        SlotRecord(slot=1050.0, last_slot=1050.0, outcome="buffered"),
    ],
    instances=[
        SlotInstance(id=1, slot=1010.0, kind="slot"),
        SlotInstance(id=2, slot=1040.0, kind="caught_up"),
        SlotInstance(id=3, slot=1044.0, kind="run_now"),
    ],
)


def said(**changes: Any) -> list[str]:
    evidence = attrs.evolve(LAWFUL, **changes)
    history = History(changes=[], lease=1.0, reap_interval=1.0, ended=0.0, patience=1.0, schedules=[evidence])
    return [each.sentence for each in i16_every_slot_is_accounted_for(history)]


def test_a_lawful_schedule():
    assert said() == []
    assert said(last_slot=None, records=[], instances=[]) == []
    assert said(created=1010.5, changed=1010.5) == []  # its first slot came while it was written


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"records": LAWFUL.records[1:]}, "slot 1010.000 has no record"),
        ({"records": [LAWFUL.records[0], *LAWFUL.records[2:]]}, "slot 1020.000 has no record"),
        ({"last_slot": 1060.0}, "slot 1060.000 has no record"),
        ({"last_slot": 1040.0}, "of one after 1040.000, the last decided one"),
        ({"records": [*LAWFUL.records, LAWFUL.records[0]]}, "slot 1010.000 was decided 2 times"),
        ({"instances": [*LAWFUL.instances, SlotInstance(id=9, slot=1010.0, kind="slot")]}, "has 2 instances"),
        (
            {"instances": [*LAWFUL.instances, SlotInstance(id=9, slot=1030.0, kind="slot")]},
            "instance 9 of slot 1030.000 has no record",
        ),
    ],
)
def test_a_planted_violation_is_told(changes: dict[str, Any], text: str):
    assert any(text in sentence for sentence in said(**changes))
