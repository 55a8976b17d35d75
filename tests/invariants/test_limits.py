"""I17, on histories made by hand."""

from __future__ import annotations

from typing import Any

import pytest
from tests.invariants.history_builder import HistoryBuilder
from tests.invariants.limits import Slots

DROPPED = {"limit": "gpu", "visit": 1, "reason": "the limit gpu is full"}


class Users(HistoryBuilder):
    """Instances 1 to 3, which use a slot of a limit that has two."""

    def __init__(self, *, kept: bool = False, slot: str = "gpu:a", **columns: Any) -> None:
        super().__init__()
        self.options: dict[str, Any] = {"slots": {"gpu": Slots(2, kept)}}
        for number in (1, 2, 3):
            self.put(number, slot=slot, **columns)

    def take(self, number: int, **columns: Any) -> None:  # type: ignore[override]
        self.pick(number, f"claim {number}", **columns)

    def wrong(self) -> bool:
        return "I17" in self.broken(**self.options)


def test_a_slot_that_is_given_back_may_be_taken() -> None:
    users = Users()
    users.take(1)
    users.take(2)
    users.commit(1, "awaiting_signal", awaits=["go"])
    users.take(3)
    assert not users.wrong()


def test_more_holders_than_slots() -> None:
    users = Users()
    for number in (1, 2, 3):
        users.take(number)
    assert users.wrong()


@pytest.mark.parametrize("slot", [None, "cpu", "gpus:a"])
def test_other_limits_do_not_matter(slot: str | None) -> None:
    users = Users(slot=slot)
    for number in (1, 2, 3):
        users.take(number)
    assert not users.wrong()


def test_keys_have_slots_each() -> None:
    users = Users()
    users.take(1)
    users.take(2)
    users.put(3, slot="gpu:b")
    users.take(3)
    assert not users.wrong()


def test_who_is_claimed_to_be_ended_has_no_slot() -> None:
    users = Users()
    users.take(1)
    users.take(2)
    users.put(3, cancellation=DROPPED)
    users.take(3)
    assert not users.wrong()


@pytest.mark.parametrize(
    ("columns", "wrong"),
    [
        ({"status": "awaiting_signal", "awaits": ["go"]}, True),
        ({"status": "runnable", "step": "t", "visit": 2, "slot": None}, True),
        ({"status": "runnable", "step": "t", "visit": 2, "slot": "tpu"}, False),
        ({"status": "done"}, False),
    ],
)
def test_a_kept_slot_is_had_until_the_instance_ends(columns: dict[str, Any], wrong: bool) -> None:
    users = Users(kept=True)
    users.take(1)
    users.take(2)
    users.commit(1, columns.pop("status"), **columns)
    users.take(3)
    assert users.wrong() is wrong
