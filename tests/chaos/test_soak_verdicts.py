"""What a soak makes of its readings: leaks are found, noise and warm-up are not."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from tests.chaos.soak_verdicts import LIMITS, Limit, Sample, Verdict, judge, limit_of, table

END = 1800


def of(name: str, value: Callable[[float], float], *, every: int = 10) -> Verdict:
    [verdict] = judge([Sample(at, {name: value(at)}) for at in range(0, END + 1, every)])
    return verdict


@pytest.mark.parametrize("name", LIMITS)
def test_what_stays_is_flat_and_what_doubles_is_not(name: str):
    limit = LIMITS[name]
    size = 10 * (limit.slack + 1)
    rng = random.Random(1)
    assert of(name, lambda _: size * rng.uniform(0.97, 1.03)).flat
    assert of(name, lambda at: size * (1 + 3 * at / END)).word == "GROWS"


def test_a_warm_up_is_no_growth_and_less_is_never_bad():
    assert of("memory w1", lambda at: 40 + min(at, END / 5)).flat
    assert of("memory w1", lambda at: 90 - at / END * 50).flat


def test_the_limit_is_a_part_and_some_more():
    verdict = of("memory w1", lambda at: 100.0 if at < END / 2 else 108.0)
    assert (verdict.early, verdict.late, verdict.allowed, verdict.flat) == (100, 108, 108, True)
    assert of("memory w1", lambda at: 100.0 if at < END / 2 else 108.1).flat is False


def test_a_leak_of_one_connection_every_five_minutes_is_found():
    assert of("connections of w1", lambda at: 6 + at // 300).flat is False
    assert of("descriptors w1", lambda at: 15 + at // 300).flat is False


def test_saw_teeth_are_flat_and_growing_ones_are_not():
    name = "dead rows of gen_durable"
    assert of(name, lambda at: at % 60 * 200).flat
    assert of(name, lambda at: at % 60 * 200 * (1 + 4 * at / END)).flat is False


def test_too_few_samples_are_no_verdict():
    assert of("memory w1", lambda _: 40.0, every=END // 4).word == "too short"
    assert judge([]) == []


def test_what_has_no_limit_is_told():
    verdict = of("rows", lambda at: at)
    assert (verdict.flat, verdict.word) == (None, "told")


def test_limits_go_by_the_longest_beginning():
    assert limit_of("connections of w1") is LIMITS["connections of"]
    assert limit_of("connections") is LIMITS["connections"]
    assert limit_of("memory w12") is LIMITS["memory"]
    assert limit_of("rows of nodes") is None


def test_the_table():
    limit = Limit("MB", 0.05, 3, "")
    lines = table([Verdict(measure="memory w1", early=40.0, late=50.5, limit=limit)]).splitlines()
    assert [cell.strip() for cell in lines[2].strip("|").split("|")] == [
        "memory w1",
        "40 MB",
        "50.50 MB",
        "+5% +3 MB",
        "GROWS",
    ]
