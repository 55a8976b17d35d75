from __future__ import annotations

import attrs
import durable_actors as da
import pytest
from durable_actors._engine.committing.transition import MAX_ATTEMPT, failure, plan_children, transition
from durable_actors._store.rows import UNRECORDED, Claim, Transition
from durable_actors.machine import ENDED, Signal, current_registry, isolated_registry, plan_insert
from hypothesis import given, strategies as st


@attrs.frozen
class Count:
    n: int = 0


with isolated_registry():

    class Shop(da.Machine[Count], name="shop"):
        @da.step
        async def start(self, ctx: da.Context[Count]) -> da.Outcome: ...

        @da.step
        async def ship(self, ctx: da.Context[Count]) -> da.Outcome: ...


SPEC = current_registry().find(Shop)


def claim(**columns: object) -> Claim:
    values: dict[str, object] = {field.name: 0 for field in attrs.fields(Claim)} | {"recorded": UNRECORDED}
    values |= {
        "id": 1,
        "claim_id": "c",
        "fsm": "shop",
        "version": 1,
        "step": "start",
        "attempt": 3,
        "visit": 5,
    }
    values |= {
        "state": b"{}",
        "partition_key": "p",
        "awaits": None,
        "inbox": False,
        "queue": "q",
        "cancellation": None,
    }
    return Claim(**(values | columns))  # type: ignore[arg-type]


def facts(found: Transition) -> dict[str, object]:
    """What differs from doing nothing."""
    default = Transition(found.claim, found.status, found.step, found.attempt)
    names = [field.name for field in attrs.fields(Transition)]
    changed = {name: getattr(found, name) for name in names if getattr(found, name) != getattr(default, name)}
    return {"status": found.status, "step": found.step, "attempt": found.attempt} | changed


S = Count(2)
TABLE: list[tuple[da.Outcome, dict[str, object]]] = [
    (da.Next(Shop.ship), {"status": "runnable", "step": "ship", "attempt": 0, "advance": 1}),
    (
        da.Next("ship", S, partition_key="x"),
        {
            "status": "runnable",
            "step": "ship",
            "attempt": 0,
            "advance": 1,
            "state": b'{"n":2}',
            "rekey": True,
            "partition_key": "x",
        },
    ),
    (
        da.Next("start", partition_key=None),
        {"status": "runnable", "step": "start", "attempt": 0, "advance": 1, "rekey": True},
    ),
    (
        da.Retry(S, delay=9),
        {
            "status": "runnable",
            "step": "start",
            "attempt": 4,
            "state": b'{"n":2}',
            "delay": 9.0,
            "keeps_awaits": True,
        },
    ),
    (da.Done([1]), {"status": "done", "step": "start", "attempt": 3, "result": b"[1]"}),
    (da.Done(), {"status": "done", "step": "start", "attempt": 3, "result": b"null"}),
    (da.Stop("no"), {"status": "failed", "step": "start", "attempt": 3, "last_error": "no"}),
    (
        da.Await("a"),
        {"status": "awaiting_signal", "step": "start", "attempt": 3, "awaits": ("a",)},
    ),
    (
        da.Await(["a", "b"], S, then=Shop.ship, timeout=5),
        {
            "status": "awaiting_signal",
            "step": "start",
            "attempt": 0,
            "advance": 1,
            "state": b'{"n":2}',
            "awaits": ("a", "b"),
            "await_step": "ship",
            "timeout": 5.0,
        },
    ),
    (
        da.ScheduleChildren(Shop.ship, [], S),
        {
            "status": "awaiting_children",
            "step": "start",
            "attempt": 0,
            "advance": 1,
            "state": b'{"n":2}',
            "await_step": "ship",
        },
    ),
]


@pytest.mark.parametrize(("outcome", "row"), TABLE)
def test_the_contracts_table(outcome, row):
    found = transition(claim(), SPEC, outcome)
    assert facts(found) == row
    assert found.ends == (found.status in ENDED)


def test_the_same_key_is_no_change():
    found = transition(claim(), SPEC, da.Next("ship", partition_key="p"), keep_claim=True)
    assert (found.rekey, found.keep_claim) == (False, True)


def test_another_key_never_runs_ahead():
    for key in ("x", None):
        assert not transition(claim(), SPEC, da.Next("ship", partition_key=key), keep_claim=True).keep_claim
    assert not transition(claim(), SPEC, da.Next("ship"), keep_claim=False).keep_claim


def test_a_retry_remembers_what_went_wrong():
    assert transition(claim(), SPEC, da.Retry()).last_error is None
    assert "no luck" in (transition(claim(), SPEC, da.Retry(), error=ValueError("no luck")).last_error or "")


def test_an_await_from_handle_never_resets_the_attempt():
    found = transition(claim(), SPEC, da.Await("a", then="ship"), error=ValueError())
    assert (found.attempt, found.advance, found.await_step) == (3, 1, "ship")


def test_attempts_do_not_overflow():
    assert transition(claim(attempt=MAX_ATTEMPT), SPEC, da.Retry()).attempt == MAX_ATTEMPT


def test_what_cannot_be_stored():
    for outcome in (
        da.Next("ship", {"n": "x"}),
        da.Retry(object()),
        da.Done(object()),
        da.Done(float("inf")),
    ):
        with pytest.raises(da.StateError, match="shop"):
            transition(claim(), SPEC, outcome)


def test_a_failure_can_always_be_stored():
    found = failure(claim(), ValueError("a\0b"))
    assert found.status == "failed"
    assert found.last_error
    assert "\0" not in found.last_error


names = st.sampled_from("abc")


@given(
    handed=st.lists(st.tuples(st.integers(1, 30), names), unique_by=lambda pair: pair[0]),
    awaited=st.lists(names, min_size=1, unique=True),
    consume=st.lists(st.integers(1, 30)),
    kind=st.sampled_from(["Next", "Retry", "Await", "ScheduleChildren", "Done", "Stop"]),
)
def test_what_becomes_of_handed_signals(handed, awaited, consume, kind):
    """CONTRACT.md, signals: exactly the handed and the named ones, and a pack that goes on is kept."""
    signals = [Signal(id=number, name=name, payload=None) for number, name in handed]
    outcome: da.Outcome = {
        "Next": lambda: da.Next("ship", consume=consume),
        "Retry": da.Retry,
        "Await": lambda: da.Await(awaited, consume=consume),
        "ScheduleChildren": lambda: da.ScheduleChildren("ship", []),
        "Done": da.Done,
        "Stop": lambda: da.Stop("x"),
    }[kind]()
    found = transition(claim(awaits=("a",), inbox=True), SPEC, outcome, handed=signals)
    ids = {number for number, _ in handed}
    consumed, kept = set(found.consumed), set(found.kept)
    assert not consumed & kept
    match kind:
        case "Next":
            assert consumed == ids | set(consume)
        case "ScheduleChildren":
            assert consumed == ids
        case "Await":
            assert kept == {number for number, name in handed if name in awaited and number not in consume}
            assert consumed == (ids - kept) | set(consume)
        case _:
            assert not consumed
            assert not kept


@attrs.frozen
class Tally:
    """Would be read as a Count, without its total."""

    n: int
    total: int


@pytest.mark.parametrize(
    "outcome",
    [
        da.Next("ship", Tally(1, 2)),
        da.Retry(Tally(1, 2)),
        da.Await("go", Tally(1, 2)),
        da.Await("go", Tally(1, 2), then="ship"),
        da.ScheduleChildren("ship", [], Tally(1, 2)),
    ],
    ids=repr,
)
def test_a_state_of_another_class_is_refused(outcome: da.Outcome):
    with pytest.raises(da.StateError, match="the state is a Tally, not a Count"):
        transition(claim(), SPEC, outcome, handed=[], keep_claim=False)


def test_arguments_of_another_class_are_refused():
    with isolated_registry():

        @da.job
        def task(args: Count) -> None: ...

        for ref in (task, Shop):
            with pytest.raises(da.StateError, match="the state is a Tally, not a Count"):
                plan_insert(current_registry().find(ref), {"args": Tally(1, 2)})
        child = da.Child(task, args=Tally(1, 2))
        with pytest.raises(da.StateError, match="the state is a Tally, not a Count"):
            plan_children(da.ScheduleChildren("ship", [child]))
