"""The conservation sums: what commands excuse, and what they do not."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
from tests.chaos.sums import Commands, Row, check_sums
from tests.chaos.workload import Ack, Insert, Plan, Send

FAMILY = {"good": 3, "bad": 1, "generation": 0}
INSERTS = (
    Insert(at=0, sender=0, key="chain:0", machine="chaos.Chain", state={}, result=[0]),
    Insert(at=0, sender=0, key="courier:0", machine="chaos.Courier", state={}, result="delivered", children=2),
    Insert(at=0, sender=0, key="receiver:0", machine="chaos.Tally", state={}, result={"tick": 1}),
    Insert(
        at=0, sender=0, key="family:0", machine="chaos.Family", state=FAMILY, result=[[3, 4], [3, 4]], children=8
    ),
)  # fmt: skip
SENDS = (Send(at=0, sender=0, target="receiver:0", name="tick", payload=1, dedup_key="tick:0"),)
COURIER, FAMILY_ID = 2, 4


def rows() -> dict[int, Row]:
    """As it must be."""
    found = [
        Row(
            id=number, machine=each.machine, key=each.key, status=each.status, result=each.result, parent_id=None,
            last_error=None,
        )
        for number, each in enumerate(INSERTS, 1)
    ]  # fmt: skip
    child = Row(id=0, machine="chaos.job", key=None, status="done", result=1, parent_id=None, last_error=None)
    found += [attrs.evolve(child, id=10 + n, parent_id=COURIER if n else None) for n in range(2)]
    for barrier in (2, 3):
        for n in range(4):
            bad = n == 3
            child = attrs.evolve(child, id=barrier * 10 + n, parent_id=FAMILY_ID, barrier=barrier)
            found.append(attrs.evolve(child, status="failed" if bad else "done", result=None if bad else n))
    return {row.id: row for row in found}


def wrong(
    changes: dict[int, dict[str, Any]] | None = None,
    *,
    cancelled: set[int] = frozenset(),  # type: ignore[assignment]
    retried: set[int] = frozenset(),  # type: ignore[assignment]
    without: tuple[int, ...] = (),
    sent: int = 1,
) -> list[str]:
    found = rows()
    for number, columns in (changes or {}).items():
        found[number] = attrs.evolve(found[number], **columns)
    for number in without:
        del found[number]
    acks = [Ack(sender=0, key=each.key, id=number) for number, each in enumerate(INSERTS, 1)]
    acks += [Ack(sender=0, key="tick:0", id=None)] * sent
    commands = Commands(frozenset(cancelled), frozenset(retried))
    return check_sums(Plan(INSERTS, SENDS), list(found.values()), acks, 0, commands)


ENDED = {"status": "cancelled", "result": None}


def test_all_is_well():
    assert wrong() == []


@pytest.mark.parametrize("number", [1, 3])
def test_who_was_cancelled_by_a_command_may_be_cancelled(number):
    assert wrong({number: ENDED}, cancelled={number}) == []
    assert len(wrong({number: ENDED})) == 2
    assert wrong(
        {number: {"result": [7]}}, cancelled={number}, retried={number}
    )  # it comes to the same, or to nothing


def test_whoever_is_cancelled_takes_no_signals():
    assert wrong({3: ENDED}, cancelled={3}, sent=0) == []
    assert wrong({3: ENDED}, cancelled={2, 3}, sent=0) == []
    assert wrong(sent=0)


def test_a_courier_that_is_cancelled_hires_fewer():
    assert wrong({2: ENDED}, cancelled={2}, without=(10, 11)) == []
    assert wrong(cancelled={2}, without=(10,))


def test_a_family_counts_the_children_that_were_not_cancelled():
    told = {"result": [[3, 4], [1, 4]]}
    assert wrong({32: ENDED, 4: told}, cancelled={32}) == []
    assert wrong({32: ENDED, 4: {"result": [[3, 4], [2, 4]]}}, cancelled={32})
    assert wrong({32: ENDED, 4: {"result": [[3, 4], [1, 3]]}}, cancelled={32})
    assert wrong({4: told})
    assert wrong({32: ENDED, 4: {"result": [[3, 4], [1, 3]]}}, cancelled={32}, retried={31}) == []
    assert wrong({4: {"result": [[3, 4], [9, 4]]}}, retried={31})


@pytest.mark.parametrize(
    ("way", "status", "result", "by", "ok"),
    [
        ("plain", "done", "approved", {"approve"}, True),
        ("plain", "done", "approved", {"reject"}, False),
        ("plain", "done", "rejected", {"approve", "reject"}, True),
        ("plain", "done", "timed_out", {"approve"}, False),
        ("timeout", "done", "timed_out", set[str](), True),
        ("pause", "done", "approved", {"approve"}, False),
        ("pause", "done", "approved", {"proceed", "approve"}, True),
        ("strict", "failed", None, {"reject"}, True),
        ("plain", "failed", None, {"reject"}, False),
        ("strict", "done", "rejected", {"reject"}, False),
    ],
)
def test_a_desk_ends_as_people_decided(way, status, result, by, ok):
    desk = Row(
        id=90, machine="chaos.Desk", key=f"desk:{way}:0:1", status=status, result=result, parent_id=None,
        last_error="rejected by chaos: no" if status == "failed" else None,
    )  # fmt: skip
    commands = Commands(decided={name: frozenset({90}) for name in by})
    assert (check_sums(Plan((), ()), [desk], [], 0, commands) == []) is ok


def test_what_hangs_is_cancelled():
    assert wrong({1: {"machine": "chaos.Hang"}})
