"""Both type checkers know the rows of a TrioConnection: tests/type_tests/postgres_connection.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("checker", [["mypy", "--strict"], ["pyright", "--pythonpath", sys.executable]])
def test_types(checker):
    file = "tests/type_tests/postgres_connection.py"
    run = subprocess.run(
        [sys.executable, "-m", *checker, file], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.stdout, run.stderr
    assert file not in run.stdout, run.stdout
