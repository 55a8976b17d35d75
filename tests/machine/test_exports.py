"""The public face of the language: names, where they say they live, documentation, and purity."""

import inspect
import subprocess
import sys
import types

import durable_actors.machine as machine
import pytest

CONTRACT = [
    "Machine",
    "step",
    "job",
    "Context",
    "Signal",
    "ChildView",
    "Outcome",
    "Next",
    "Retry",
    "Await",
    "ScheduleChildren",
    "Done",
    "Stop",
    "Replay",
    "Child",
    "KEEP",
    "Cancel",
    "Error",
    "InsertOptions",
]


@pytest.mark.parametrize("name", CONTRACT)
def test_the_contract_names_exist(name):
    value = getattr(machine, name)
    if not isinstance(value, types.UnionType | machine.Keep):
        assert value.__module__ == "durable_actors"


def test_the_outcome_union_is_closed():
    names = [member.__name__ for member in machine.Outcome.__args__]
    assert names == ["Next", "Retry", "Await", "ScheduleChildren", "Done", "Stop"]


@pytest.mark.parametrize("name", machine.__all__)
def test_every_export_is_documented(name):
    value = getattr(machine, name)
    if not (inspect.isclass(value) or inspect.isfunction(value)):
        return
    assert value.__doc__, name
    for attribute, member in vars(value).items() if inspect.isclass(value) else ():
        if inspect.isfunction(member) and not attribute.startswith("_"):
            assert member.__doc__, f"{name}.{attribute}"


def test_the_language_is_pure():
    code = """if True:
        import sys, msgspec, attrs, inspect, json  # what these load is theirs
        before = set(sys.modules)
        import durable_actors.machine
        loaded = {name.split(".")[0] for name in set(sys.modules) - before}
        print(sorted(loaded & {"trio", "psycopg", "asyncio", "time"}))
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
