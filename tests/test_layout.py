"""The rules that matter are tests: sizes, layers told in prose, words that must not occur."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest
from durable_actors._engine.claims import MOVES, ClaimState
from tests.sources import PACKAGE, ROOT, relative, source_of

TESTS = sorted((ROOT / "tests").rglob("*.py"))
SQL = sorted((ROOT / "durable_actors").rglob("*.sql"))
OTHERS = [p for folder in ("bench", "examples") for p in sorted((ROOT / folder).rglob("*.py"))]


# A rule is one test for all files: one for each file were three thousand tests, and 7 s of CPU.


def test_files_stay_small():
    found = {relative(path): source_of(path).lines for path in PACKAGE if source_of(path).lines > 500}
    assert not found, "split by verb or by actor"


def test_functions_stay_small():
    found = {
        f"{relative(path)}::{name}": lines
        for path in PACKAGE
        for name, lines in source_of(path).functions
        if lines > 60
    }
    assert not found


def test_test_files_stay_small():
    lines = {relative(path): len(path.read_text("utf-8").splitlines()) for path in TESTS}
    assert not {path: count for path, count in lines.items() if count > 600}, (
        "one test file per statement or actor"
    )


MAP = [ROOT / "ARCHITECTURE.md", *sorted((ROOT / "docs" / "internals").glob("*.md"))]


def test_every_module_is_on_the_map():
    text = "\n".join(page.read_text("utf-8") for page in MAP)
    missing = [
        name
        for path in PACKAGE
        if (name := relative(path)) not in text and path.name not in {"__init__.py", "_version.py"}
    ]
    assert not missing, "docs/internals has a line per module"


@cache
def members_of_classes() -> dict[str, set[str]]:
    """Class name → the methods and attributes of all classes of that name."""
    found: dict[str, set[str]] = {}
    for path in PACKAGE:
        for owner, members in source_of(path).members.items():
            found.setdefault(owner, set()).update(members)
    return found


@pytest.mark.parametrize("page", [*MAP, ROOT / "docs" / "explanation" / "guarantees.md"], ids=relative)
def test_the_places_that_the_map_names_exist(page: Path):
    text = page.read_text("utf-8")
    package = ROOT / "durable_actors"
    places = re.findall(r"`([\w/]+\.py)::([\w.]+)`", text)
    gone = [
        f"{file}::{name}"
        for file, name in places
        if not (package / file).exists() or name not in source_of(package / file).names
    ]
    members = members_of_classes()
    gone += [
        f"{owner}.{name}"
        for owner, name in re.findall(r"`([A-Z]\w+)\.(\w+)`", text)
        if owner in members and name not in members[owner]
    ]
    statements = {path.name for path in SQL}
    gone += [name for name in re.findall(r"`(\w+\.sql)`", text) if name not in statements]
    assert not gone, "renamed or moved: say where it is now"


def life_of_a_claim() -> list[str]:
    """The first columns of the tables in ARCHITECTURE.md."""
    text = (ROOT / "ARCHITECTURE.md").read_text("utf-8").split("## The life of a claim")[1]
    return re.findall(r"^\| (.+?) \|", text.split("\n## ")[0], re.MULTILINE)


def test_the_map_has_every_state_and_move_of_a_claim():
    cells = life_of_a_claim()
    states = [cell for cell in cells if cell.isupper() and "→" not in cell]
    assert states == [state.name for state in ClaimState]
    told = [
        (old, new)
        for cell in cells
        if "→" in cell
        for old in cell.split(" → ")[0].split(", ")
        for new in cell.split(" → ")[1].split(", ")
    ]
    assert len(told) == len(set(told)), "a move has one row"
    assert set(told) == {(old.name, new.name) for old, several in MOVES.items() for new in several}


# A word is built from two halves so that this file does not contain what it forbids.
FORBIDDEN = {
    "unfinished work": re.compile("|".join(("TO" + "DO", "FIX" + "ME", "Not" + "ImplementedError"))),
    "unsafe serialisation": re.compile(r"\bpick" + r"le\b|(?<![\w.])eva" + r"l\(|(?<![\w.])exe" + r"c\("),
    "a machine's path": re.compile(r"(?<![\w.])/(?:wo" + r"rk|ro" + r"ot)/|/tm" + r"p/[a-z]"),
}


@pytest.mark.parametrize("reason", FORBIDDEN)
def test_words_that_must_not_occur(reason: str):
    pattern, files = FORBIDDEN[reason], [*PACKAGE, *SQL, *OTHERS]
    found = {relative(path): match[0] for path in files if (match := pattern.search(path.read_text("utf-8")))}
    assert not found


def test_notifications_stay_banned():
    channels = re.compile("|".join((r"\bLIS" + r"TEN\b", r"\bNOT" + r"IFY\b", "pg_no" + "tify")))
    excused = re.compile("banned|never|no listen", re.IGNORECASE)
    assert not [
        f"{relative(path)}: {line}"
        for path in [*PACKAGE, *SQL]
        for line in path.read_text("utf-8").splitlines()
        if channels.search(line) and not excused.search(line)
    ]


WITHOUT_IMPORT_CYCLES = ("_engine", "_postgres", "_store", "cli", "journal", "machine", "otp")
"""Sub-packages whose modules are checked."""


@cache
def module_file(name: str) -> Path | None:
    base = ROOT.joinpath(*name.split("."))
    return next((file for file in (base.with_suffix(".py"), base / "__init__.py") if file in PACKAGE), None)


@cache
def imports_of(path: Path) -> frozenset[Path]:
    """The modules of this package that a file imports: also for type checking only, and inside functions."""
    found: set[Path | None] = set()
    for node in source_of(path).imports:
        if isinstance(node, ast.Import):
            found |= {module_file(alias.name) for alias in node.names}
        else:
            assert node.level == 0, "imports are absolute"
            module = node.module or ""
            # A name of a package may be one of its modules: then that is what is imported.
            found |= {module_file(f"{module}.{alias.name}") or module_file(module) for alias in node.names}
    return frozenset(file for file in found if file is not None and file != path)


@pytest.mark.parametrize("package", WITHOUT_IMPORT_CYCLES)
def test_no_module_imports_itself_through_others(package: str):
    modules = [path for path in PACKAGE if path.is_relative_to(ROOT / "durable_actors" / package)]
    assert modules
    cycles: list[str] = []
    for start in modules:
        reached, unseen = set[Path](), [start]
        while unseen:
            new = imports_of(unseen.pop()) - reached
            reached |= new
            unseen += new
        if start in reached:
            cycles.append(relative(start))
    assert not cycles, "these import each other: move what both need, or describe it by a Protocol"
