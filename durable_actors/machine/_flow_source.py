"""The source of a function as a syntax tree, and what its names mean. Nothing is executed. Pure."""

from __future__ import annotations

import ast
import builtins
import inspect
import linecache
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType, ModuleType
from typing import Any, Final

import attrs

UNKNOWN: Final = object()
"""A name whose meaning is not known without running the function."""

_SCOPES: Final = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)


@attrs.frozen(eq=False)
class Source:
    """A function: its syntax tree, and what it sees."""

    names: Mapping[str, object]
    """What the names from outside it stand for."""
    body: list[ast.stmt]
    line: int
    """The number of the line in its file that is line 1 of the tree."""
    this: str | None
    """The name of its first parameter: `self`."""
    local: dict[str, list[ast.expr]]
    """What is assigned to each of its local names. A name with an empty list gets its values elsewhere."""

    def meaning(self, node: ast.expr) -> object:
        """The object that a name, or an attribute of a module, stands for; else UNKNOWN."""
        if isinstance(node, ast.Attribute):
            owner = self.meaning(node.value)
            return vars(owner).get(node.attr, UNKNOWN) if isinstance(owner, ModuleType) else UNKNOWN
        if not isinstance(node, ast.Name) or node.id in self.local:
            return UNKNOWN
        return self.names.get(node.id, UNKNOWN)

    def returned(self) -> Iterator[ast.expr | None]:
        """What its own `return` statements return, not those of functions inside it."""
        return (node.value for node in _own(self.body) if isinstance(node, ast.Return))

    def calls(self) -> Iterator[ast.Call]:
        """All calls in its body, in the order of the source."""
        found = [each for node in self.body for each in ast.walk(node) if isinstance(each, ast.Call)]
        return iter(sorted(found, key=lambda each: (each.lineno, each.col_offset)))

    def line_of(self, node: ast.AST) -> int:
        """The number of its line in the file."""
        return self.line + getattr(node, "lineno", 1) - 1


def source_of(func: Callable[..., Any]) -> Source | None:
    """Read the source of a function; None if there is none, as of one that was typed into a shell."""
    inner: object = inspect.unwrap(func)
    if not isinstance(inner, FunctionType):
        return None
    try:
        linecache.checkcache(inner.__code__.co_filename)
        lines, first = inspect.getsourcelines(inner)
        # Inside `if` it may be indented, as methods are; dedent would fail for a text that is not.
        tree = ast.parse("if 1:\n" + "".join(lines) if lines[0][:1].isspace() else "".join(lines))
    except (OSError, TypeError, SyntaxError, IndexError):
        return None
    node: ast.AST = tree.body[0]
    if isinstance(node, ast.If):
        first, node = first - 1, node.body[0]
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return None
    names = [each.arg for each in (*node.args.posonlyargs, *node.args.args)]
    return Source(_outside(inner), node.body, first, names[0] if names else None, _locals(node))


def _outside(func: FunctionType) -> Mapping[str, object]:
    """What a function sees: names of the functions around it, of its module, and those that are built in."""
    free: dict[str, object] = {}
    for name, cell in zip(func.__code__.co_freevars, func.__closure__ or (), strict=False):
        try:
            free[name] = cell.cell_contents
        except ValueError:  # not assigned yet
            free[name] = UNKNOWN
    return ChainMap(free, func.__globals__, builtins.__dict__)


def _own(body: list[ast.stmt]) -> Iterator[ast.AST]:
    """The nodes of a body, without those of functions and classes inside it."""
    todo: list[ast.AST] = [*reversed(body)]
    while todo:
        node = todo.pop()
        yield node
        if not isinstance(node, _SCOPES):
            todo += reversed(list(ast.iter_child_nodes(node)))


def _locals(function: ast.FunctionDef | ast.AsyncFunctionDef) -> dict[str, list[ast.expr]]:
    arguments = function.args
    several = [each for each in (arguments.vararg, arguments.kwarg) if each is not None]
    every = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, *several)
    found: dict[str, list[ast.expr]] = {each.arg: [] for each in every}
    for node in _own(function.body):
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                found.setdefault(name, []).append(value)
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                found.setdefault(name, []).append(value)
            case ast.NamedExpr(target=ast.Name(id=name), value=value):
                found.setdefault(name, []).append(value)
            case ast.Name(id=name, ctx=ast.Store()):
                found.setdefault(name, [])
            case _:
                pass
    return found
