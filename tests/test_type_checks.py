"""The type checkers refuse what would fail at run time, and accept what works: the files of `tests/type_tests`.

Each tool runs once over all of them. A line marked `# E` must be an error of both, no other line of either; a line
marked `# R: T` is a `reveal_type` that must say T, a regular expression. A check that is silently switched off (a
generic outcome in the return union) shows up here as a missing error. README's first program and the tutorial's must
pass as they are.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "tests" / "type_tests").glob("*.py"))
PAGES = [ROOT / "README.md", ROOT / "docs" / "tutorial" / "first-machine.md"]

Findings = dict[tuple[str, int], str]
"""By file and line."""


def marked(mark: str) -> Findings:
    found: Findings = {}
    for path in FILES:
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
            if match := re.search(rf"\S.*  # {mark}\b:? ?(.*)$", line):
                found[path.name, number] = match[1]
    return found


def first_program(page: Path) -> str:
    """The first Python block of a page, each line where it is on the page."""
    text = page.read_text("utf-8")
    before, block = text.split("```python\n", 1)
    return "\n" * (before.count("\n") + 1) + block.split("```", 1)[0]


def run(*command: str, files: Sequence[Path]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *command, *map(str, files)],
        cwd=ROOT,
        # Pyright's Python wrapper asks the index for news otherwise.
        env=os.environ | {"PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


def mypy(files: Sequence[Path]) -> tuple[Findings, Findings]:
    done = run("mypy", "--strict", "--output=json", "--no-error-summary", files=files)
    assert not done.stderr, done.stderr
    errors: Findings = {}
    types: Findings = {}
    for entry in map(json.loads, done.stdout.splitlines()):
        if Path(entry["file"]).name not in {path.name for path in files}:
            continue  # the package's own errors are `make check`'s
        where = Path(entry["file"]).name, entry["line"]
        if revealed := re.fullmatch(r'Revealed type is "(.*)"', entry["message"]):
            types[where] = revealed[1]
        elif entry["severity"] == "error":
            errors[where] = entry["message"]
    return errors, types


def pyright(files: Sequence[Path]) -> tuple[Findings, Findings]:
    done = run("pyright", "--outputjson", "--pythonpath", sys.executable, files=files)
    errors: Findings = {}
    types: Findings = {}
    for entry in json.loads(done.stdout)["generalDiagnostics"]:
        where = Path(entry["file"]).name, entry["range"]["start"]["line"] + 1
        if entry["severity"] == "error":
            errors[where] = entry["message"]
        elif revealed := re.fullmatch(r'Type of ".*" is "(.*)"', entry["message"], re.DOTALL):
            types[where] = revealed[1]
    return errors, types


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("checker", [mypy, pyright])
def test_exactly_the_marked_lines_are_errors(checker, tmp_path):
    programs = []
    for page in PAGES:
        programs.append(tmp_path / f"page_{page.stem.replace('-', '_')}.py")
        programs[-1].write_text(first_program(page), "utf-8")
    errors, types = checker([*FILES, *programs])
    wanted, revealed = marked("E"), marked("R")
    assert {where: text for where, text in errors.items() if where not in wanted} == {}, "must type check"
    assert {where: text for where, text in wanted.items() if where not in errors} == {}, "must not type check"
    assert types.keys() == revealed.keys()
    for where, pattern in revealed.items():
        # mypy prefixes names with their module, also inside of brackets.
        short = re.sub(r"(?:\w+\.)+(?=\w)", "", types[where])
        assert re.fullmatch(pattern, short) or re.fullmatch(rf"(?:.*\.)?(?:{pattern})", types[where]), (
            *where,
            types[where],
        )


def test_the_cases_are_there():
    assert {path.name for path in FILES} >= {
        "config_options.py",
        "machine_authoring.py",
        "otp_calls.py",
        "postgres_connection.py",
        "workflow_authoring.py",
    }
    assert "da.insert(" in first_program(PAGES[0])
    assert len(marked("E")) > 40
    assert len(marked("R")) > 20
