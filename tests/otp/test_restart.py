"""The restart decision: every strategy x restart type x exit reason, and the window."""

from __future__ import annotations

import itertools
from typing import get_args

import pytest
from durable_actors.otp._exit import Error, ExitReason, Normal, Shutdown
from durable_actors.otp._restart import (
    AutoShutdown,
    Backoff,
    GiveUp,
    Leave,
    RestartThese,
    RestartType,
    Sibling,
    StopSupervisor,
    Strategy,
    decide,
)
from hypothesis import given, strategies as st

REASONS: dict[str, ExitReason] = {
    "normal": Normal(),
    "shutdown": Shutdown("x"),
    "error": Error(ValueError("x")),
}

# OTP's table (supervisor.erl, do_restart/3), written out.
RESTARTED = {
    ("permanent", "normal"): True,
    ("permanent", "shutdown"): True,
    ("permanent", "error"): True,
    ("transient", "normal"): False,
    ("transient", "shutdown"): False,
    ("transient", "error"): True,
    ("temporary", "normal"): False,
    ("temporary", "shutdown"): False,
    ("temporary", "error"): False,
}

# Of five children the third fails. Its siblings: permanent, temporary, (it), transient, permanent.
PLANS = {
    "one_for_one": ((), (2,), ()),
    "rest_for_one": ((4, 3), (2, 3, 4), ()),
    "one_for_all": ((4, 3, 1, 0), (0, 2, 3, 4), (1,)),
}


def plan(siblings, failed, reason, **options):
    settings = {
        "strategy": "one_for_one",
        "auto_shutdown": "never",
        "intensity": 3,
        "period": 5.0,
        "history": (),
        "now": 100.0,
    }
    return decide(siblings, failed, reason, **(settings | options))


@pytest.mark.parametrize(
    ("strategy", "restart", "reason"),
    list(itertools.product(get_args(Strategy), get_args(RestartType), REASONS)),
)
def test_every_combination(strategy, restart, reason):
    siblings = [Sibling("permanent"), Sibling("temporary"), Sibling(restart), Sibling("transient")]
    siblings.append(Sibling("permanent"))
    found = plan(siblings, 2, REASONS[reason], strategy=strategy)
    if not RESTARTED[restart, reason]:
        assert found == Leave()
        return
    stop, start, drop = PLANS[strategy]
    assert found == RestartThese(stop=stop, start=start, drop=drop, history=(100.0,))


@pytest.mark.parametrize("strategy", ["rest_for_one", "one_for_all"])
def test_ended_and_due_siblings_are_not_stopped_but_started(strategy):
    siblings = [
        Sibling("permanent"),
        Sibling("transient", status="ended"),
        Sibling("permanent", status="due"),
        Sibling("temporary", status="ended"),
    ]
    found = plan(siblings, 0, REASONS["error"], strategy=strategy)
    assert isinstance(found, RestartThese)
    assert (found.stop, found.start, found.drop) == ((), (0, 1, 2), ())


@pytest.mark.parametrize(
    ("auto", "others", "expected"),
    [
        ("never", [("alive", True)], Leave()),
        ("any_significant", [("alive", True)], StopSupervisor()),
        ("all_significant", [("alive", True)], Leave()),
        ("all_significant", [("due", True)], Leave()),
        ("all_significant", [("ended", True), ("alive", False)], StopSupervisor()),
        ("all_significant", [], StopSupervisor()),
    ],
)
@pytest.mark.parametrize("restart", ["transient", "temporary"])
def test_auto_shutdown(auto: AutoShutdown, others, expected, restart):
    siblings = [Sibling(restart, significant=True)]
    siblings += [Sibling("transient", significant, status) for status, significant in others]
    assert plan(siblings, 0, Normal(), auto_shutdown=auto) == expected
    assert plan([Sibling("temporary"), *siblings], 0, Normal(), auto_shutdown=auto) == Leave()


def test_a_restarted_significant_child_does_not_shut_down():
    found = plan(
        [Sibling("transient", significant=True)], 0, REASONS["error"], auto_shutdown="any_significant"
    )
    assert isinstance(found, RestartThese)


@pytest.mark.parametrize(
    ("history", "intensity", "expected"),
    [
        ((), 0, GiveUp(1)),
        ((), 1, None),
        ((99.0,), 1, GiveUp(2)),
        ((95.0,), 1, GiveUp(2)),  # exactly a period ago still counts
        ((94.999,), 1, None),
        ((94.0, 96.0, 99.0), 3, None),
        ((95.0, 96.0, 99.0), 3, GiveUp(4)),
    ],
)
def test_intensity(history, intensity, expected):
    found = plan([Sibling("permanent")], 0, Normal(), history=history, intensity=intensity)
    if expected is None:
        assert isinstance(found, RestartThese)
        assert found.history == (*(t for t in history if t >= 95.0), 100.0)
    else:
        assert found == expected


def test_the_intensity_is_the_supervisors_not_the_childs():
    siblings = [Sibling("permanent"), Sibling("permanent")]
    first = plan(siblings, 0, Normal(), intensity=1)
    assert isinstance(first, RestartThese)
    assert plan(siblings, 1, Normal(), intensity=1, history=first.history) == GiveUp(2)


@given(
    st.lists(st.sampled_from(get_args(RestartType)), min_size=1, max_size=6),
    st.data(),
    st.sampled_from(get_args(Strategy)),
)
def test_plans_are_ordered_and_complete(kinds, data, strategy):
    siblings = [Sibling(k, status=data.draw(st.sampled_from(["alive", "due", "ended"]))) for k in kinds]
    failed = data.draw(st.integers(0, len(kinds) - 1))
    found = plan(siblings, failed, REASONS["error"], strategy=strategy)
    if kinds[failed] == "temporary":
        assert found == Leave()
        return
    assert isinstance(found, RestartThese)
    assert list(found.stop) == sorted(found.stop, reverse=True)
    assert list(found.start) == sorted(found.start)
    assert failed in found.start
    assert failed not in found.stop
    assert all(siblings[i].status == "alive" for i in found.stop)
    # whatever is stopped comes back, unless it is temporary
    assert set(found.stop) - set(found.drop) <= set(found.start)
    assert all(kinds[i] == "temporary" for i in found.drop)


def test_backoff():
    backoff = Backoff(initial=0.1, factor=2, maximum=1, reset_after=10)
    assert [backoff.delay(n) for n in range(1, 8)] == [0, 0.1, 0.2, 0.4, 0.8, 1, 1]
    assert backoff.delay(10_000) == 1
    assert backoff.next_streak(4, lived=9.9) == 5
    assert backoff.next_streak(4, lived=10) == 1
