"""What the rules of the layout want to know of a file of the package. Each file is parsed once per process."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import attrs

ROOT = Path(__file__).parent.parent
PACKAGE = sorted((ROOT / "durable_actors").rglob("*.py"))
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@attrs.define
class Source:
    """What is in a file."""

    lines: int
    says_what_it_is_for: bool
    """It has a docstring, or nothing that needs one."""
    names: set[str]
    """Functions, classes, their methods and constants, as `name` or `Class.name`."""
    functions: list[tuple[str, int]] = attrs.field(factory=list)
    """Each function, and how many lines it has."""
    members: dict[str, set[str]] = attrs.field(factory=dict)
    """Class name → its methods and attributes."""
    imports: list[ast.Import | ast.ImportFrom] = attrs.field(factory=list)
    hidden_imports: list[tuple[str, ast.Import | ast.ImportFrom]] = attrs.field(factory=list)
    """Those inside of a function, with its name."""


@cache
def source_of(path: Path) -> Source:
    text = path.read_text("utf-8")
    tree = ast.parse(text)
    found = Source(
        lines=len(text.splitlines()),
        says_what_it_is_for=bool(ast.get_docstring(tree)) or not tree.body,
        names=set(_names_in(tree)),
    )
    _look(tree, found)
    return found


def _names_in(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, FUNCTIONS | ast.ClassDef):
            yield node.name
        if isinstance(node, ast.AnnAssign | ast.Assign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (target.id for target in targets if isinstance(target, ast.Name))
        if isinstance(node, ast.ClassDef):
            yield from (f"{node.name}.{each.name}" for each in node.body if isinstance(each, FUNCTIONS))


def _look(tree: ast.Module, found: Source) -> None:
    """One walk. With each node go the function that it is in, and the classes."""
    left: list[tuple[ast.AST, str | None, tuple[set[str], ...]]] = [(tree, None, ())]
    while left:
        node, function, classes = left.pop()
        if isinstance(node, FUNCTIONS):
            found.functions.append((node.name, (node.end_lineno or 0) - node.lineno + 1))
            for members in classes:
                members.add(node.name)
            function = node.name
        elif isinstance(node, ast.ClassDef):
            classes = (*classes, found.members.setdefault(node.name, set()))
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found.imports.append(node)
            if function is not None:
                found.hidden_imports.append((function, node))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            for members in classes:
                members.add(node.target.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            for members in classes:
                members.add(node.attr)
        left += [(child, function, classes) for child in ast.iter_child_nodes(node)]
