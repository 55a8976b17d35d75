"""The rules that matter are tests: sizes, layers told in prose, words that must not occur."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest
from durable_actors._engine.claims import MOVES, ClaimState

ROOT = Path(__file__).parent.parent
PACKAGE = sorted((ROOT / "durable_actors").rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
SQL = sorted((ROOT / "durable_actors").rglob("*.sql"))
OTHERS = [p for folder in ("bench", "examples") for p in sorted((ROOT / folder).rglob("*.py"))]


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", PACKAGE, ids=relative)
def test_files_and_functions_stay_small(path: Path):
    source = path.read_text("utf-8")
    assert len(source.splitlines()) <= 500, "split by verb or by actor"
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or 0) - node.lineno + 1
            assert length <= 60, f"{node.name} has {length} lines"


@pytest.mark.parametrize("path", TESTS, ids=relative)
def test_test_files_stay_small(path: Path):
    assert len(path.read_text("utf-8").splitlines()) <= 600, "one test file per statement or actor"


MAP = [ROOT / "ARCHITECTURE.md", *sorted((ROOT / "docs" / "internals").glob("*.md"))]


def test_every_module_is_on_the_map():
    text = "\n".join(page.read_text("utf-8") for page in MAP)
    missing = [
        name
        for path in PACKAGE
        if (name := relative(path)) not in text and path.name not in {"__init__.py", "_version.py"}
    ]
    assert not missing, "docs/internals has a line per module"


def names_in(path: Path) -> set[str]:
    """Functions, classes, their methods and constants of a file, as `name` or `Class.name`."""
    found: set[str] = set()
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.AnnAssign | ast.Assign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
        if isinstance(node, ast.ClassDef):
            found |= {
                f"{node.name}.{each.name}"
                for each in node.body
                if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
            }
    return found


@cache
def members_of_classes() -> dict[str, set[str]]:
    """Class name → the methods and attributes of all classes of that name."""
    found: dict[str, set[str]] = {}
    for path in PACKAGE:
        for owner in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(owner, ast.ClassDef):
                names = found.setdefault(owner.name, set())
                for node in ast.walk(owner):
                    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                        names.add(node.name)
                    elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                        names.add(node.target.id)
                    elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                        names.add(node.attr)
    return found


@pytest.mark.parametrize("page", [*MAP, ROOT / "docs" / "explanation" / "guarantees.md"], ids=relative)
def test_the_places_that_the_map_names_exist(page: Path):
    text = page.read_text("utf-8")
    package = ROOT / "durable_actors"
    places = re.findall(r"`([\w/]+\.py)::([\w.]+)`", text)
    gone = [
        f"{file}::{name}"
        for file, name in places
        if not (package / file).exists() or name not in names_in(package / file)
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


@pytest.mark.parametrize("path", [*PACKAGE, *SQL, *OTHERS], ids=relative)
def test_words_that_must_not_occur(path: Path):
    text = path.read_text("utf-8")
    found = {reason: match[0] for reason, pattern in FORBIDDEN.items() if (match := pattern.search(text))}
    assert not found


@pytest.mark.parametrize("path", [*PACKAGE, *SQL], ids=relative)
def test_notifications_stay_banned(path: Path):
    lines = path.read_text("utf-8").splitlines()
    channels = re.compile("|".join((r"\bLIS" + r"TEN\b", r"\bNOT" + r"IFY\b", "pg_no" + "tify")))
    excused = re.compile("banned|never|no listen", re.IGNORECASE)
    assert not [line for line in lines if channels.search(line) and not excused.search(line)]


WITHOUT_IMPORT_CYCLES = ("_engine", "_postgres", "_store", "cli", "journal", "machine", "otp")
"""Sub-packages whose modules are checked."""


def module_file(name: str) -> Path | None:
    base = ROOT.joinpath(*name.split("."))
    return next((file for file in (base.with_suffix(".py"), base / "__init__.py") if file in PACKAGE), None)


@cache
def imports_of(path: Path) -> frozenset[Path]:
    """The modules of this package that a file imports: also for type checking only, and inside functions."""
    found: set[Path | None] = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found |= {module_file(alias.name) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
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
