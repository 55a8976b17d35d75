"""mypy and pyright agree on what type checks and what does not: tests/type_tests/otp_*.py.

In those files ``# E:`` marks a line that must be an error, ``# R: T`` a `reveal_type` that must say T.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
FILES = sorted((ROOT / "tests" / "type_tests").glob("otp*.py"))

Findings = dict[tuple[str, int], str]


def expected(mark: str) -> Findings:
    found: Findings = {}
    for path in FILES:
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
            if f"# {mark}: " in line:
                found[path.name, number] = line.partition(f"# {mark}: ")[2]
    return found


def mypy() -> tuple[Findings, Findings]:
    command = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", "--hide-error-context"]
    run = subprocess.run([*command, *map(str, FILES)], capture_output=True, text=True, cwd=ROOT, check=False)
    errors: Findings = {}
    reveals: Findings = {}
    for line in run.stdout.splitlines():
        match = re.match(r".*?(otp\w*\.py):(\d+): (error|note): (.*)", line)
        if match is None:
            continue
        where, text = (match[1], int(match[2])), match[4]
        if match[3] == "error":
            errors[where] = text
        elif text.startswith("Revealed type is "):
            reveals[where] = re.sub(r"[\w.]+\.", "", text.removeprefix("Revealed type is ").strip('"'))
    assert errors or reveals, run.stdout + run.stderr
    return errors, reveals


def pyright() -> tuple[Findings, Findings]:
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable]
    # Its Python wrapper asks the index for news otherwise.
    env = os.environ | {"PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"}
    run = subprocess.run(
        [*command, *map(str, FILES)], capture_output=True, text=True, cwd=ROOT, env=env, check=False
    )
    errors: Findings = {}
    reveals: Findings = {}
    for finding in json.loads(run.stdout)["generalDiagnostics"]:
        where = Path(finding["file"]).name, finding["range"]["start"]["line"] + 1
        if finding["severity"] == "error":
            errors[where] = finding["message"]
        elif match := re.match(r'Type of ".*" is "(.*)"', finding["message"], re.DOTALL):
            reveals[where] = match[1]
    return errors, reveals


@pytest.mark.parametrize("checker", [mypy, pyright], ids=["mypy", "pyright"])
def test_types(checker):
    assert FILES
    errors, reveals = checker()
    wanted = expected("E")
    assert {k: v for k, v in errors.items() if k not in wanted} == {}, "must type check"
    assert {k: v for k, v in wanted.items() if k not in errors} == {}, "must not type check"
    assert reveals == expected("R")
