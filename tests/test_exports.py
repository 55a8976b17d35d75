"""The public face: names of the contract, where they say they live, that each says what it is for."""

from __future__ import annotations

import ast
import importlib
import inspect
import subprocess
import sys
import types
from pathlib import Path

import durable_actors as da
import pytest
from durable_actors import errors
from durable_actors._exports import MODULES, NAMES
from tests.sources import PACKAGE, relative, source_of

ROOT = Path(da.__file__).parent

CONTRACT = {
    "authoring": "Machine step job Context Signal ChildView Outcome Next Retry Await ScheduleChildren Done Stop Replay "
    "Child KEEP Cancel Error Workflow task",
    "client": "insert insert_many signal signal_many signal_with_start "
    "result inspect retry cancel receipts Receipt list_instances Filter open_client InsertOptions "
    "sync aio",
    "history": "history iter_history state_at diff verify anomalies rebuild accept recover export_history "
    "import_history Record Problem VerifyReport RecoveryReport PostgresJournal explain Explanation tree Tree "
    "TreeNode ParentRun",
    "running": "Config Queue Wakeup serve start_engine open_engine execute_next Engine migrate",
    "runners": "claim_next heartbeat complete fail Claimed",
    "errors": "DurableError ConfigError DefinitionError StateError InvalidOutcome StepTimeout UnknownMachine Duplicate "
    "Conflict NoTarget InstanceFailed InstanceCancelled TooManyChildren LeaseLost StoreUnavailable CommitUnknown "
    "RevConflict InvalidJournalEntry ProtocolAnomaly",
    "packages": "otp telemetry journal",
}
PUBLIC = {name: getattr(da, name) for name in da.__all__}


@pytest.mark.parametrize("group", CONTRACT)
def test_the_contracts_names(group):
    assert [name for name in CONTRACT[group].split() if name not in da.__all__] == []


def test_all_is_complete():
    assert len(set(da.__all__)) == len(da.__all__)
    named = {
        name for name, value in vars(da).items() if not name.startswith("_") and not inspect.ismodule(value)
    }
    assert named == {
        name for name in da.__all__ if not name.startswith("_") and not inspect.ismodule(PUBLIC[name])
    }


@pytest.mark.parametrize("name", PUBLIC)
def test_everything_lives_at_a_public_path(name):
    module = getattr(PUBLIC[name], "__module__", None)
    if module is None or isinstance(PUBLIC[name], types.UnionType) or name == "KEEP":
        return
    assert not any(part.startswith("_") for part in module.split(".")), module
    assert getattr(importlib.import_module(module), PUBLIC[name].__name__) is PUBLIC[name]


@pytest.mark.parametrize("name", PUBLIC)
def test_everything_is_documented(name):
    value = PUBLIC[name]
    if not (inspect.isclass(value) or inspect.isfunction(value) or inspect.ismodule(value)):
        return
    assert value.__doc__, name
    for attribute, member in vars(value).items() if inspect.isclass(value) else ():
        if not attribute.startswith("_") and (inspect.isfunction(member) or isinstance(member, property)):
            assert inspect.getdoc(member), f"{name}.{attribute}"


ERRORS = {
    name: value for name, value in PUBLIC.items() if inspect.isclass(value) and issubclass(value, Exception)
}


def test_errors_are_one_tree():
    parents = {
        "ConfigError": {"DurableError", "ValueError"},
        "DefinitionError": {"DurableError", "TypeError"},
        "NotADependency": {"DefinitionError"},
        "StateError": {"DurableError", "ValueError"},
        "InvalidOutcome": {"DurableError", "TypeError"},
        "StepTimeout": {"DurableError", "TimeoutError"},
        "UnknownMachine": {"DurableError", "LookupError"},
        "Duplicate": {"DurableError"},
        "Conflict": {"DurableError"},
        "RevConflict": {"Conflict"},
        "InvalidJournalEntry": {"DurableError"},
        "ProtocolAnomaly": {"DurableError"},
        "RateLimited": {"DurableError"},
        "NoTarget": {"DurableError", "LookupError"},
        "InstanceFailed": {"DurableError"},
        "InstanceCancelled": {"InstanceFailed"},
        "TooManyChildren": {"DurableError"},
        "LeaseLost": {"DurableError"},
        "SchemaError": {"DurableError"},
        "StoreUnavailable": {"DurableError"},
        "PoolTimeout": {"StoreUnavailable"},
        "CommitUnknown": {"StoreUnavailable"},
        "DurableError": {"Exception"},
        "Cancel": {"Exception"},  # raised by users, at the engine
    }
    assert {name: {base.__name__ for base in value.__bases__} for name, value in ERRORS.items()} == parents
    for name in parents:
        if name not in {"Cancel", "DurableError"}:
            assert name in (errors.__doc__ or ""), f"{name} is missing in the drawing"


def test_errors_carry_data():
    duplicate = da.Duplicate("k", 7)
    assert (duplicate.key, duplicate.existing_id, "'k'" in str(duplicate)) == ("k", 7, True)
    failed = da.InstanceFailed(3, "no stock")
    assert (failed.id, failed.reason, "no stock" in str(failed)) == (3, "no stock", True)
    config = da.ConfigError("x=1 is bad", option="x", value=1)
    assert (config.option, config.value) == ("x", 1)
    state = da.StateError("t", machine="m", version=2, step="s", path="$.a")
    assert (state.machine, state.version, state.step, state.path) == ("m", 2, "s", "$.a")


def test_the_two_retries_are_one():
    assert da.Replay is da.Retry


def test_the_outcomes_are_eight():
    assert [each.__name__ for each in da.Outcome.__args__] == [
        "Next",
        "Retry",
        "Await",
        "ScheduleChildren",
        "Pause",
        "Approval",
        "Done",
        "Stop",
    ]


def test_the_layout_is_told_where_the_reader_lands():
    text = da.__doc__ or ""
    for package in (
        "cli",
        "testing",
        "engine",
        "_engine",
        "client",
        "sync",
        "aio",
        "_store",
        "otp",
        "machine",
        "journal",
        "_postgres",
    ):
        assert package in text


def test_the_package_is_typed():
    assert (ROOT / "py.typed").exists()


def test_importing_does_nothing():
    """No I/O, no signal handler, no thread, no logging set-up; and neither asyncio nor the tests' tools are loaded."""
    script = (
        "import sys, threading, logging, signal\n"
        "before = signal.getsignal(signal.SIGINT)\n"
        "import durable_actors\n"
        "assert threading.active_count() == 1\n"
        "assert not logging.getLogger().handlers\n"
        "assert signal.getsignal(signal.SIGINT) is before\n"
        "assert not {'pytest', 'hypothesis', 'durable_actors.testing', 'durable_actors.cli'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", script], check=True)


def test_the_table_of_names_is_what_type_checkers_read():
    """`__init__.py` imports under TYPE_CHECKING what `_exports` imports when it is asked for."""
    tree = ast.parse((ROOT / "__init__.py").read_text("utf-8"))
    [block] = [node for node in tree.body if isinstance(node, ast.If)]
    imports = {
        node.module.removeprefix("durable_actors").removeprefix("."): {alias.name for alias in node.names}
        for node in block.body
        if isinstance(node, ast.ImportFrom) and node.module is not None
    }
    modules = imports.pop("")
    assert imports == {module: set(names.split()) for module, names in NAMES.items()}
    assert modules <= MODULES
    assert {name for names in imports.values() for name in names} | modules | {"__version__"} == set(
        da.__all__
    )


def test_the_bench_is_an_attribute_too():
    """`import durable_actors as da` is enough for `da.testing`, which imports its tools only then."""
    script = (
        "import sys, durable_actors as da\n"
        "assert 'durable_actors.testing' not in sys.modules\n"
        "print(da.testing.Bench.__name__)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert done.stdout == "Bench\n"


def test_names_that_are_not_there():
    with pytest.raises(AttributeError, match="module 'durable_actors' has no attribute 'insrt'"):
        da.insrt  # noqa: B018 - an attribute that is not there
    assert not hasattr(da, "_nothing")
    assert set(da.__all__) <= set(dir(da))


IMPORTS = {
    "import durable_actors": set[str](),
    "import durable_actors as da; da.errors": {"errors"},
    "import durable_actors as da; da.job, da.Machine, da.Done": {
        "errors",
        "machine",
        "_option_checks",
        "_journal_level",
        "_limits",
        "_wording",
        "_scheduling",
        "diagrams",
    },
    "import durable_actors.cli": {"cli", "errors"},
    "from durable_actors.cli import cli; cli(['--help'], standalone_mode=False)": {"cli", "errors"},
    "import durable_actors as da; da.insert": None,
}
"""Packages that a line imports, beside those that every one does; None: also the database's driver and Trio."""


@pytest.mark.parametrize("line", IMPORTS)
def test_what_a_line_imports(line):
    """What is imported is counted, not the time: `import durable_actors` and `--help` must stay quick."""
    script = f"import sys\n{line}\nprint('modules', *sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    names = done.stdout.splitlines()[-1].split()
    found = {
        name for name in names if name.partition(".")[0] in {"durable_actors", "psycopg", "trio", "asyncio"}
    }
    ours = {name.split(".")[1] for name in found if name.startswith("durable_actors.")}
    expected = IMPORTS[line]
    if expected is None:
        assert {"psycopg", "trio"} <= found
        return
    assert not {"psycopg", "trio", "asyncio"} & found
    assert ours - {"_exports", "_version"} <= expected


def test_our_own_modules_are_imported_at_the_top():
    """An import inside a function hides a cycle."""
    found = [
        f"{relative(path)}::{function}: {ast.unparse(node)}"
        for path in PACKAGE
        for function, node in source_of(path).hidden_imports
        for name in (
            [node.module or ""] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
        )
        if name.startswith("durable_actors")
    ]
    assert not found


def test_every_module_says_what_it_is_for():
    found = [path for path in PACKAGE if not source_of(path).says_what_it_is_for]
    assert [relative(path) for path in found if path.name != "_version.py"] == []
