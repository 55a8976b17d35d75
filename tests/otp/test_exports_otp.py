"""The public surface: where things say they live, and that everything says what it is for."""

from __future__ import annotations

import ast
import inspect
import sys
from pathlib import Path

import pytest
from durable_actors import otp
from durable_actors.errors import DurableError

PUBLIC = {name: getattr(otp, name) for name in otp.__all__}
CLASSES = [c for c in PUBLIC.values() if inspect.isclass(c)]

LEAVES = {"durable_actors.errors", "durable_actors._trio_inside"}


def test_all_is_sorted_and_complete():
    assert sorted(otp.__all__) == otp.__all__
    public = {n for n in vars(otp) if not n.startswith("_") and not inspect.ismodule(vars(otp)[n])}
    assert public == set(otp.__all__)


@pytest.mark.parametrize(
    "name", [n for n, v in PUBLIC.items() if inspect.isclass(v) or inspect.isfunction(v)]
)
def test_everything_is_documented_at_its_public_path(name):
    thing = PUBLIC[name]
    assert thing.__module__ == "durable_actors.otp"
    assert inspect.getdoc(thing)
    if inspect.isclass(thing):
        assert thing.__doc__, "its own, not its base's"
        for attribute, value in vars(thing).items():
            if not attribute.startswith("_") and (inspect.isfunction(value) or isinstance(value, property)):
                assert inspect.getdoc(value), f"{name}.{attribute}"


def test_errors_are_one_tree():
    errors = [c for c in CLASSES if issubclass(c, BaseException)]
    assert len(errors) == 14
    for error in errors:
        assert issubclass(error, otp.OtpError)
        assert issubclass(error, DurableError)


def test_no_database_and_nothing_from_above():
    """`durable_actors` itself imports everything, so the sources are asked, not `sys.modules`."""
    allowed = {*sys.stdlib_module_names, "attrs", "outcome", "trio"}
    for path in Path(otp.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            match node:
                case ast.Import(names=names):
                    modules = [alias.name for alias in names]
                case ast.ImportFrom(module=str(module), level=0):
                    modules = [module]
                case ast.ImportFrom():
                    raise AssertionError("relative import")
                case _:
                    continue
            for module in modules:
                ours = module.startswith("durable_actors.otp.") or module in LEAVES
                assert ours or module.partition(".")[0] in allowed, f"{path.name} imports {module}"
