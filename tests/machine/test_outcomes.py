"""Outcomes are frozen, checked values: a mistake is raised in the line that makes it."""

import copy
from datetime import timedelta
from math import inf, nan

import attrs
import durable_actors.machine as da
import pytest
from durable_actors.errors import InvalidOutcome

TOO_LONG = 101 * 365.25 * 86_400


class Door:
    """Makes a machine inside of a test, where the registry is isolated."""

    @staticmethod
    def machine():
        class Gate(da.Machine):
            @da.step
            async def start(self, ctx):
                return da.Done()

            @da.step
            async def open(self, ctx):
                return da.Done()

            def helper(self, ctx):
                return None

        return Gate


def test_a_step_is_referenced_or_named():
    gate = Door.machine()
    assert da.Next(gate().open) == da.Next(gate.open) == da.Next("open")
    assert da.Next(gate().open).step == "open"
    assert da.Next(gate().open).owner is gate
    assert da.Next("open").owner is None
    assert da.Await("go", then=gate.open) == da.Await("go", then="open")
    assert da.ScheduleChildren(gate.open, []) == da.ScheduleChildren("open", [])


def test_defaults():
    outcome = da.Next("open")
    assert (outcome.state, outcome.partition_key, outcome.consume) == (da.KEEP, da.KEEP, ())
    retry = da.Retry()
    assert (retry.state, retry.delay) == (da.KEEP, 0.0)
    waiting = da.Await("go")
    assert (waiting.names, waiting.state, waiting.then, waiting.timeout, waiting.consume) == (
        ("go",),
        da.KEEP,
        None,
        None,
        (),
    )
    family = da.ScheduleChildren("open", ())
    assert (family.children, family.state, family.join, family.timeout, family.rest) == (
        (),
        da.KEEP,
        "all",
        None,
        "leave",
    )
    assert da.Done().result is None
    assert da.Replay is da.Retry
    assert repr(da.KEEP) == "KEEP"


def test_none_is_a_state_and_keep_is_not_none():
    assert da.Retry(None).state is None
    assert da.Next("open", None).state is None


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: da.Retry(delay=timedelta(minutes=1)).delay, 60.0),
        (lambda: da.Retry(delay=3).delay, 3.0),
        (lambda: da.Retry(delay=60 * 86_400).delay, 60 * 86_400.0),
        (lambda: da.Await("x", timeout=0).timeout, 0.0),
        (lambda: da.Await("x", timeout=timedelta(days=60)).timeout, 60 * 86_400.0),
        (lambda: da.ScheduleChildren("x", [], timeout=1.5).timeout, 1.5),
    ],
)
def test_durations_become_seconds(make, expected):
    result = make()
    assert result == expected
    assert type(result) is float


@pytest.mark.parametrize(
    "bad", [-1, -0.001, nan, inf, -inf, TOO_LONG, 2**5000, timedelta(-1), "5", None, True, b"1"]
)
@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda value: da.Retry(delay=value), r"Retry\(delay=...\)"),
        (lambda value: da.Await("x", timeout=value), r"Await\(timeout=...\)"),
        (lambda value: da.ScheduleChildren("x", [], timeout=value), r"ScheduleChildren\(timeout=...\)"),
    ],
)
def test_bad_durations_are_refused_by_name(make, what, bad):
    if bad is None and "delay" not in what:
        make(bad)  # None means: no limit
        return
    with pytest.raises(InvalidOutcome, match=what):
        make(bad)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ("go", ("go",)),
        (["a", "b", "a"], ("a", "b")),
        ({"a"}, ("a",)),
        ((name for name in "xy"), ("x", "y")),
    ],
)
def test_await_names(names, expected):
    assert da.Await(names).names == expected


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ([], "is empty"),
        ("", "must not be empty"),
        (["a", ""], "must not be empty"),
        (None, "must be the name of a signal"),
        (b"go", "must be the name of a signal"),
        ({"a": 1}, "must be the name of a signal"),
        ([1], "must be a str"),
        (["a\0"], "NUL"),
        ("\ud800", "surrogates"),
        ("x" * 256, "at most 255"),
    ],
)
def test_bad_await_names(names, text):
    with pytest.raises(InvalidOutcome, match=text):
        da.Await(names)


def test_consume_takes_signals_and_ids_once_each():
    signals = [da.Signal(7, "a"), da.Signal(8, "b")]
    assert da.Next("x", consume=[*signals, 7, 9]).consume == (7, 8, 9)
    assert da.Await("x", consume=iter(signals)).consume == (7, 8)


@pytest.mark.parametrize("bad", [["7"], [0], [-1], [True], [1.0], [2**63], "7", 7, da.Signal(7, "a"), [None]])
def test_bad_consume(bad):
    with pytest.raises(InvalidOutcome, match=r"consume=..."):
        da.Next("x", consume=bad)


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        ("", "must not be empty"),
        (None, "give a step"),
        (5, "give a step"),
        (len, "decorate it with @da.step"),
        ("x\0", "NUL"),
    ],
)
def test_bad_steps(bad, text):
    for make in (da.Next, lambda step: da.ScheduleChildren(step, [])):
        with pytest.raises(InvalidOutcome, match=text):
            make(bad)


def test_an_undecorated_method_is_not_a_step():
    gate = Door.machine()
    with pytest.raises(InvalidOutcome, match=r"not a step: .*helper.*@da.step"):
        da.Next(gate().helper)
    with pytest.raises(InvalidOutcome, match=r"Await\(then=...\) is not a step"):
        da.Await("go", then=gate.helper)


@pytest.mark.parametrize("key", ["", 5, "a\0b", "\udcff", "é" * 1001])
def test_bad_partition_keys(key):
    with pytest.raises(InvalidOutcome, match="partition_key"):
        da.Next("x", partition_key=key)


def test_partition_key_none_clears_it():
    assert da.Next("x", partition_key=None).partition_key is None
    assert da.Next("x", partition_key="a").partition_key == "a"


def test_children_become_child_values():
    gate = Door.machine()

    @da.job
    def task(args):
        return None

    family = da.ScheduleChildren(
        "open", [gate, task, da.Child(task, args=1, priority=-1), da.Child("by:name")]
    )
    assert [child.machine for child in family.children] == [gate, task, task, "by:name"]
    assert family.children[2].options == {"args": 1, "priority": -1}


def test_children_from_a_generator():
    gate = Door.machine()
    assert len(da.ScheduleChildren("open", (gate for _ in range(3)), join=3).children) == 3


@pytest.mark.parametrize(
    ("children", "text"),
    [
        ("abc", "list of children"),
        (None, "list of children"),
        ({"a": 1}, "list of children"),
        ([len], "decorate functions with @da.job"),
        ([5], "machine class, a job or a registered name"),
        ([object], "machine class, a job"),
        ([da.Machine], "machine class, a job"),
    ],
)
def test_bad_children(children, text):
    with pytest.raises(InvalidOutcome, match=text):
        da.ScheduleChildren("x", children)


def test_an_object_of_a_machine_is_not_a_child():
    with pytest.raises(InvalidOutcome, match="not objects of them"):
        da.Child(Door.machine()())


def test_unknown_child_options_are_refused_with_a_guess():
    with pytest.raises(InvalidOutcome, match=r"'prioritty': did you mean priority\?"):
        da.Child("x", prioritty=1)
    with pytest.raises(InvalidOutcome, match="the options are state, args"):
        da.Child("x", zzz=1)
    with pytest.raises(InvalidOutcome, match="two names for the same option"):
        da.Child("x", state=1, args=1)
    with pytest.raises(InvalidOutcome, match="is not a child of this barrier"):
        da.Child("x", unique_key="k", on_duplicate="return")


@pytest.mark.parametrize("join", ["all", "any_failed", 1, 2])
def test_joins(join):
    assert da.ScheduleChildren("x", [da.Child("a"), da.Child("b")], join=join).join == join


@pytest.mark.parametrize("join", ["any", "", 0, -1, True, 1.0, None, 3])
def test_bad_joins(join):
    with pytest.raises(InvalidOutcome, match=r"ScheduleChildren\(join=...\)"):
        da.ScheduleChildren("x", [da.Child("a"), da.Child("b")], join=join)


def test_a_quorum_of_no_children_is_fine():
    assert da.ScheduleChildren("x", [], join=2).join == 2


def test_the_old_name_of_an_option_says_the_new_one():
    with pytest.raises(
        InvalidOutcome, match=r"ScheduleChildren\(deadline=...\) is now called timeout=: give timeout=60"
    ):
        da.ScheduleChildren("x", [], deadline=60)
    with pytest.raises(InvalidOutcome, match="has no option 'dead_line'"):
        da.ScheduleChildren("x", [], dead_line=60)


def test_bad_rest():
    with pytest.raises(InvalidOutcome, match="rest"):
        da.ScheduleChildren("x", [], rest="kill")


@pytest.mark.parametrize(
    "value",
    [
        da.Next("x"),
        da.Retry(),
        da.Await("x"),
        da.ScheduleChildren("x", []),
        da.Done(1),
        da.Stop("x"),
        da.Error("x"),
    ],
)
def test_outcomes_are_frozen_and_comparable(value):
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        value.state = 1
    assert value == copy.copy(value)
    assert not hasattr(value, "__dict__")


def test_outcomes_match_by_position():
    match da.Next("ship", 1):
        case da.Next(step, state):
            assert (step, state) == ("ship", 1)


def test_cancel_can_be_raised_and_returned():
    with pytest.raises(da.Cancel) as caught:
        raise da.Cancel("no stock")
    assert caught.value.reason == "no stock"
    assert str(da.Cancel("no stock")) == "no stock"
    assert da.Cancel().reason == "cancelled"
