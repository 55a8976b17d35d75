"""The public surface: where things say they live, and that everything says what it is for."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest
from durable_actors import otp
from durable_actors.errors import DurableError

PUBLIC = {name: getattr(otp, name) for name in otp.__all__}
CLASSES = [c for c in PUBLIC.values() if inspect.isclass(c)]


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
    code = "import sys, durable_actors.otp; print('\\n'.join(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = {m for m in run.stdout.split() if m.startswith(("psycopg", "durable_actors."))}
    allowed = ("durable_actors.otp", "durable_actors.errors", "durable_actors._version")
    assert [m for m in loaded if not m.startswith(allowed)] == []
