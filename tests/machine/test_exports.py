"""The public face of the language: names, where they say they live, documentation, and purity."""

import ast
import inspect
import types
from pathlib import Path

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
    "Pause",
    "Approval",
    "Decision",
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
    assert names == ["Next", "Retry", "Await", "ScheduleChildren", "Pause", "Approval", "Done", "Stop"]


@pytest.mark.parametrize("name", machine.__all__)
def test_every_export_is_documented(name):
    value = getattr(machine, name)
    if not (inspect.isclass(value) or inspect.isfunction(value)):
        return
    assert value.__doc__, name
    for attribute, member in vars(value).items() if inspect.isclass(value) else ():
        if inspect.isfunction(member) and not attribute.startswith("_"):
            assert member.__doc__, f"{name}.{attribute}"


@pytest.mark.parametrize(
    "path", sorted(Path(machine.__file__).parent.glob("*.py")), ids=lambda path: path.name
)
def test_the_language_is_pure(path):
    imported = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(node.module)
    assert not {name.split(".")[0] for name in imported} & {
        "trio",
        "psycopg",
        "asyncio",
        "time",
        "random",
        "os",
    }
    ours = {name for name in imported if name.startswith("durable_actors")}
    allowed = (
        "durable_actors.machine.",
        "durable_actors.errors",
        "durable_actors._option_checks",
        "durable_actors._wording",
        "durable_actors._journal_level",
        "durable_actors._limits",
        "durable_actors._scheduling.",
        "durable_actors.diagrams",
    )
    assert all(name.startswith(allowed) for name in ours)
