"""The type checkers refuse what would fail at run time, and accept what works.

Both tools run once over `tests/type_tests/machine_authoring.py`; every marked line must be reported by both, and no
other line by either. A check that is silently switched off (a generic outcome in the return union) shows up here as
a missing error.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CASES = ROOT / "tests" / "type_tests" / "machine_authoring.py"
LINES = CASES.read_text().splitlines()
EXPECTED_ERRORS = {number for number, line in enumerate(LINES, 1) if line.endswith("# E")}
EXPECTED_TYPES = {number: line.split("# R: ")[1] for number, line in enumerate(LINES, 1) if "# R: " in line}


def run_mypy() -> tuple[dict[int, str], dict[int, str]]:
    command = [sys.executable, "-m", "mypy", "--strict", "--output=json", "--no-error-summary", str(CASES)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert not done.stderr, done.stderr
    errors, types = {}, {}
    for entry in map(json.loads, done.stdout.splitlines()):
        if entry["file"] != str(CASES.relative_to(ROOT)) and Path(entry["file"]) != CASES:
            continue  # the package's own errors are another test's
        revealed = re.fullmatch(r'Revealed type is "(.*)"', entry["message"])
        if revealed:
            types[entry["line"]] = revealed.group(1)
        elif entry["severity"] == "error":
            errors[entry["line"]] = entry["message"]
    return errors, types


def run_pyright() -> tuple[dict[int, str], dict[int, str]]:
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, str(CASES)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    errors, types = {}, {}
    for entry in json.loads(done.stdout)["generalDiagnostics"]:
        line = entry["range"]["start"]["line"] + 1
        revealed = re.fullmatch(r'Type of "(?:.*)" is "(.*)"', entry["message"])
        if entry["severity"] == "information" and revealed:
            types[line] = revealed.group(1)
        elif entry["severity"] == "error":
            errors[line] = entry["message"]
    return errors, types


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("run", [run_mypy, run_pyright])
def test_exactly_the_marked_lines_are_errors(run):
    errors, types = run()
    shown = {number: f"{LINES[number - 1].strip()} -> {text}" for number, text in errors.items()}
    assert not {number: text for number, text in shown.items() if number not in EXPECTED_ERRORS}
    assert not {number: LINES[number - 1].strip() for number in EXPECTED_ERRORS - errors.keys()}
    assert types.keys() == EXPECTED_TYPES.keys()
    for number, pattern in EXPECTED_TYPES.items():
        # mypy prefixes names with their module; the pattern's end is what counts
        assert re.fullmatch(rf"(?:.*\.)?(?:{pattern})", types[number]), (
            LINES[number - 1].strip(),
            types[number],
        )


def test_the_cases_are_there():
    assert len(EXPECTED_ERRORS) > 30
    assert len(EXPECTED_TYPES) > 12
