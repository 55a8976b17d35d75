"""Which nodes are proved dead: a table of looks, and properties over random ones."""

from __future__ import annotations

import attrs
import pytest
from durable_actors._engine.maintenance.failure_detector import (
    EXPIRY_MARGIN,
    LOCKED_ROW_PAUSE,
    Judgement,
    SuspectLog,
    judge_owners,
    wait_for_next,
)
from durable_actors._store.lease import OwnerState
from hypothesis import given, strategies as st

DEAD_AFTER = 10.0


def owner(
    name: str = "a", *, alive: bool = False, up: float = 1e6, latest: float = 60.0, soonest: float = 50.0
):
    return OwnerState(name, 1, soonest, latest, alive, up, 4711)


def looks(
    *seen: tuple[float, list[OwnerState]], session: object = 1, watch: SuspectLog | None = None
) -> Judgement:
    verdict = Judgement(watch or SuspectLog(), (), None)
    for at, owners in seen:
        verdict = judge_owners(
            verdict.log, owners, me="me", session=session, asked=at, seen=at, dead_after=DEAD_AFTER
        )
    return verdict


def test_two_looks_far_enough_apart_prove_it():
    first = looks((0.0, [owner()]))
    assert first.dead == ()
    assert first.next_look == DEAD_AFTER
    assert looks((9.999, [owner()]), watch=first.log).dead == ()
    assert looks((10.0, [owner()]), watch=first.log).dead == ("a",)


def test_a_runner_is_not_judged_by_its_silence():
    """It has no session, and renews as rarely as its lease allows."""
    runner = owner("runner:cron")
    assert looks((0.0, [runner]), (20.0, [runner])).dead == ()


def test_a_slow_look_counts_for_less():
    """What a look shows was true at some moment between asking and seeing: count the shorter time."""
    slow = judge_owners(
        SuspectLog(), [owner()], me="me", session=1, asked=0.0, seen=5.0, dead_after=DEAD_AFTER
    )
    assert looks((10.0, [owner()]), watch=slow.log).dead == ()
    assert looks((15.0, [owner()]), watch=slow.log).dead == ("a",)
    late = judge_owners(slow.log, [owner()], me="me", session=1, asked=14.0, seen=16.0, dead_after=DEAD_AFTER)
    assert late.dead == ()


@pytest.mark.parametrize(
    ("between", "why"),
    [
        ([owner(alive=True)], "its lock was held"),
        ([], "it had no claims"),
        ([owner(latest=61.0)], "it claimed or renewed something"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_sign_of_life_between_the_looks_begins_anew(between: list[OwnerState], why: str):
    last = [owner(latest=61.0)]
    assert looks((0.0, [owner()]), (5.0, between), (10.0, last)).dead == (), why
    assert looks((0.0, [owner()]), (5.0, between), (10.0, last), (20.0, last)).dead == ("a",), why


def test_another_session_begins_anew():
    """After a crash or a failover of the server all locks are free at once, and the reaper's session is another one."""
    first = looks((0.0, [owner("a"), owner("b")]))
    again = looks((10.0, [owner("a"), owner("b")]), session=2, watch=first.log)
    assert again.dead == ()
    assert again.next_look == 20.0
    assert looks((20.0, [owner("a"), owner("b")]), session=2, watch=again.log).dead == ("a", "b")


def test_a_server_that_has_just_started_proves_nothing():
    verdict = looks((0.0, [owner(up=1.0)]), (10.0, [owner(up=10.0)]))
    assert verdict.dead == ()
    assert verdict.next_look == pytest.approx(10.0 + EXPIRY_MARGIN)
    assert looks((10.1, [owner(up=10.1)]), watch=verdict.log).dead == ("a",)


def test_never_ourselves():
    verdict = looks((0.0, [owner("me")]), (100.0, [owner("me")]))
    assert verdict.dead == ()
    assert verdict.next_look is None
    assert verdict.log.suspects == {}


@pytest.mark.parametrize(
    ("owners", "next_look", "wait"),
    [
        ([], None, 30.0),
        ([owner(soonest=50.0)], None, 30.0),
        ([owner(soonest=5.0), owner(soonest=8.0)], None, 5.0 + EXPIRY_MARGIN),
        ([owner(soonest=5.0)], 102.0, 2.0),
        ([owner(soonest=-3.0)], None, LOCKED_ROW_PAUSE),
        ([owner(soonest=50.0)], 90.0, EXPIRY_MARGIN),
    ],
)
def test_the_sleep_ends_with_the_first_thing_due(
    owners: list[OwnerState], next_look: float | None, wait: float
):
    found = wait_for_next(owners, next_look=next_look, now=100.0, reap_interval=30.0)
    assert found == pytest.approx(wait)


@attrs.frozen
class Look:
    step: float
    took: float
    session: int
    alive: bool
    renewed: bool
    up: float


LOOKS = st.lists(
    st.builds(
        Look,
        step=st.floats(0, 12),
        took=st.floats(0, 3),
        session=st.sampled_from([1, 1, 1, 1, 2]),
        alive=st.sampled_from([False, False, False, True]),
        renewed=st.sampled_from([False, False, False, True]),
        up=st.sampled_from([1e6, 1e6, 5.0, DEAD_AFTER, 10.5]),
    ),
    max_size=30,
)


@given(LOOKS)
def test_dead_means_free_for_long_enough_on_one_session(script: list[Look]):
    """Against the rule written out: find the run of looks that proves it, or there must be no verdict."""
    now, latest, watch = 0.0, 60.0, SuspectLog()
    history: list[tuple[float, Look, float]] = []
    for look in script:
        now += look.step
        asked, seen = now, now + look.took
        now = seen
        latest += look.renewed
        state = owner(alive=look.alive, up=look.up, latest=latest)
        verdict = judge_owners(
            watch, [state], me="me", session=look.session, asked=asked, seen=seen, dead_after=DEAD_AFTER
        )
        watch = verdict.log
        history.append((seen, look, latest))
        run: list[float] = []  # when the unbroken run of proofs was seen, newest first
        for when, each, expiry in reversed(history):
            if each.alive or each.session != look.session or expiry != latest:
                break
            run.append(when)
        proved = bool(run) and asked - run[-1] >= DEAD_AFTER and look.up > DEAD_AFTER
        assert bool(verdict.dead) == proved
        if not look.alive and not proved:
            assert verdict.next_look is not None
            assert verdict.next_look > asked - 1e-9
