"""`flow_of`: which step leads to which, read from the source of a machine. Nothing is executed. Pure.

An outcome names its steps as references (`Next(self.ship)`), so the syntax tree of a step shows the steps that it can
lead to. Calls in `return` statements are followed into methods of the machine and into functions. What is still not
seen (a step that is chosen by a value, an outcome that comes from elsewhere) is listed in `unseen`.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from datetime import timedelta
from types import FunctionType
from typing import Any, Final, Literal, TypeGuard

import attrs

from durable_actors._wording import counted, seconds
from durable_actors.machine._child import Child
from durable_actors.machine._flow_source import UNKNOWN, Source, source_of
from durable_actors.machine._outcome import (
    OUTCOME_TYPES,
    Approval,
    Await,
    Done,
    Next,
    Pause,
    Retry,
    ScheduleChildren,
    Stop,
)
from durable_actors.machine._spec import MachineSpec, spec_of
from durable_actors.machine._step_ref import StepRef

Means = Literal["plain", "wait", "error"]
End = Literal["done", "failed"]

DEEPEST: Final = 50
"""Functions that are followed from one step, at most."""
_BY_NAME: Final = {kind.__name__: kind for kind in OUTCOME_TYPES} | {"Replay": Retry}
_CUT: Final = 40
_UNITS: Final = {
    "weeks": 604800,
    "days": 86400,
    "hours": 3600,
    "minutes": 60,
    "seconds": 1,
    "milliseconds": 0.001,
}
"""Arguments of `timedelta`, in seconds."""


@attrs.frozen
class FlowEdge:
    """What a step can lead to."""

    source: str | None
    """The step; None for `handle`, which any step's error leads to."""
    target: str | None
    """The step that is entered; None if the instance ends."""
    label: str = ""
    """On what condition, for people: "approved", "signal 'paid' or 1 h"."""
    means: Means = "plain"
    """Goes on at once, waits for something first, or follows something that went wrong."""
    end: End | None = None
    """How the instance ends, if it does. Neither target nor end: the step whose error `handle` got runs again."""
    move: str = "next"
    """The kind of the record that a journal has of it."""


@attrs.frozen
class Unseen:
    """A place whose outcome the source does not show."""

    step: str | None
    line: int
    text: str


@attrs.frozen(kw_only=True)
class Flow:
    """The edges of a machine, as far as its source shows them."""

    edges: tuple[FlowEdge, ...]
    unseen: tuple[Unseen, ...]
    without_source: tuple[str, ...]
    """Steps whose source is not there: defined in a shell, or by compiled code."""


def flow_of(spec: MachineSpec) -> Flow:
    """Read the edges of a machine from the source of its steps."""
    if spec.kind == "job":
        return _job_flow(spec)
    reader = _Reader(spec)
    missing = [name for name, step in spec.steps.items() if not reader.read(name, step.func)]
    for name, step in spec.steps.items():
        if step.retry is not None and step.retry.attempts > 1:
            label = f"error, up to {step.retry.attempts} runs"
            reader.edges.append(FlowEdge(name, name, label, "error", move="retry"))
    if not spec.handle.is_default:
        reader.read(None, inspect.getattr_static(spec.definition, "handle"))
    return Flow(
        edges=tuple(dict.fromkeys(reader.edges)),
        unseen=tuple(dict.fromkeys(reader.unseen)),
        without_source=tuple(missing),
    )


def _job_flow(spec: MachineSpec) -> Flow:
    step = spec.initial
    last = counted(spec.max_attempts or 1, "attempt")
    edges = [
        FlowEdge(step, None, end="done", move="done"),
        FlowEdge(step, step, "error, retry", "error", move="retry"),
        FlowEdge(step, None, f"after {last}", "error", "failed", "failed"),
    ]
    if spec.max_attempts == 1:
        del edges[1]
    return Flow(edges=tuple(edges), unseen=(), without_source=())


class _Reader:
    """Reads the steps of one machine."""

    def __init__(self, spec: MachineSpec) -> None:
        self._spec = spec
        self.edges: list[FlowEdge] = []
        self.unseen: list[Unseen] = []

    def read(self, step: str | None, func: Any) -> bool:
        """Add the edges of a step, and of what it returns the outcomes of. Return whether its source was there."""
        todo, seen = [func], {inspect.unwrap(func)}
        for each in todo:  # grows
            source = source_of(each)
            if source is None:
                if each is func:
                    return False
                continue
            for call in source.calls():
                self._outcome(step, source, call)
            for value in source.returned():
                for other in self._followed(step, source, value, set()):
                    if inspect.unwrap(other) not in seen and len(seen) < DEEPEST:
                        seen.add(inspect.unwrap(other))
                        todo.append(other)
        return True

    # -- what is returned

    def _followed(
        self, step: str | None, source: Source, value: ast.expr | None, names: set[str]
    ) -> Iterator[Any]:
        """Yield the functions whose outcome this is. What is neither that nor an outcome is unseen."""
        match value:
            case ast.Call() if self._kind(source, value) is not None:
                return
            case ast.Call(func=called) if (function := self._function(source, called)) is not None:
                yield function
            case ast.Await(value=inner) | ast.NamedExpr(value=inner):
                yield from self._followed(step, source, inner, names)
            case ast.IfExp() | ast.BoolOp():
                for each in value.values if isinstance(value, ast.BoolOp) else (value.body, value.orelse):
                    yield from self._followed(step, source, each, names)
            case ast.Name(id=name) if name in names or source.local.get(name):
                for each in () if name in names else source.local[name]:
                    yield from self._followed(step, source, each, {*names, name})
            case None | ast.Constant(value=None):  # of a helper: nothing yet
                return
            case _:
                self._not_seen(step, source, value)

    def _function(self, source: Source, called: ast.expr) -> Any:
        """The function that is called: a method of the machine, or a name that is known before the call."""
        if _is_self(called, source):
            found: Any = inspect.getattr_static(self._spec.definition, called.attr, None)
            for wrapper in ("func", "__func__"):  # of a step; of a static method or a class method
                found = getattr(found, wrapper, found)
        else:
            found = source.meaning(called)
        return found if isinstance(found, FunctionType) and source_of(found) is not None else None

    def _not_seen(self, step: str | None, source: Source, node: ast.expr) -> None:
        self.unseen.append(Unseen(step, source.line_of(node), _text(node)))

    # -- outcomes

    def _kind(self, source: Source, call: ast.Call) -> type[Any] | None:
        """The class of an outcome that a call makes; None if it makes none."""
        found = source.meaning(call.func)
        if isinstance(found, type):
            return found if found in OUTCOME_TYPES else None
        name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        # Imported inside the function: only the name is known.
        return _BY_NAME.get(name) if found is UNKNOWN else None

    def _outcome(self, step: str | None, source: Source, call: ast.Call) -> None:
        kind = self._kind(source, call)
        if kind is None:
            return
        given = {each.arg: each.value for each in call.keywords if each.arg}
        first = call.args[0] if call.args else given.get("step", given.get("then", given.get("names")))
        limit = _limit(source, given.get("timeout"))
        if kind is Next:
            self._to(step, source, call, first, FlowEdge(step, None))
        elif kind is Retry:
            self.edges.append(FlowEdge(step, step, "retry", move="retry"))
        elif kind is Await:
            label = f"signal {_signals(source, first)}" + (f" or {limit}" if limit else "")
            self._to(
                step, source, call, given.get("then"), FlowEdge(step, None, label, "wait", move="parked")
            )
        elif kind is ScheduleChildren:
            what = call.args[1] if len(call.args) > 1 else given.get("children")
            label = _children(source, what) + (f" or {limit}" if limit else "")
            self._to(step, source, call, first, FlowEdge(step, None, label, "wait", move="spawned"))
        elif kind is Pause:
            label = "somebody lets it proceed"
            self._to(step, source, call, first, FlowEdge(step, None, label, "wait", move="proceeded"))
        elif kind is Approval:
            self._approval(step, source, call, first, given)
        elif kind is Done:
            self.edges.append(FlowEdge(step, None, end="done", move="done"))
        elif kind is Stop:
            self.edges.append(FlowEdge(step, None, "", "error", "failed", "failed"))

    def _approval(
        self,
        step: str | None,
        source: Source,
        call: ast.Call,
        first: ast.expr | None,
        given: dict[str, ast.expr],
    ) -> None:
        approved = FlowEdge(step, None, "approved", "wait", move="approved")
        self._to(step, source, call, first, approved)
        limit = _limit(source, given.get("timeout"))
        ends = [("on_reject", "rejected", "rejected")]
        if limit:
            late = "on_timeout" if "on_timeout" in given else "on_reject"
            ends.append((late, f"nobody decides within {limit}", "timed_out"))
        for option, label, move in ends:
            edge = FlowEdge(step, None, label, "error", move=move)
            if option in given and not _is_none(given[option]):
                self._to(step, source, call, given[option], edge)
            else:
                self.edges.append(attrs.evolve(edge, end="failed"))

    def _to(
        self, step: str | None, source: Source, call: ast.Call, target: ast.expr | None, edge: FlowEdge
    ) -> None:
        """Add the edge for each step that the expression can stand for; without one it leads to the same step."""
        if target is None or _is_none(target):
            self.edges.append(attrs.evolve(edge, target=step))
            return
        names, complete = self._steps_in(source, target, set())
        self.edges += (attrs.evolve(edge, target=name) for name in names)
        if not complete:
            self._not_seen(step, source, call)

    # -- references to steps

    def _steps_in(self, source: Source, node: ast.expr, names: set[str]) -> tuple[list[str], bool]:
        """Return the steps that an expression can stand for, and whether these are all."""
        steps = self._spec.steps
        parts: list[ast.expr]
        match node:
            case ast.Attribute(attr=attr) if attr in steps and self._is_machine(source, node.value):
                return [attr], True
            case ast.Constant(value=str() as name):
                return ([name], True) if name in steps else ([], False)
            case ast.IfExp(body=one, orelse=other):
                parts = [one, other]
            case ast.BoolOp(values=values):
                parts = values
            case ast.NamedExpr(value=value):
                parts = [value]
            case ast.Subscript(value=ast.Dict(values=values)):
                parts = values
            case ast.Subscript(value=ast.Tuple(elts=values) | ast.List(elts=values)):
                parts = values
            case ast.Name(id=name) if name in names:
                return [], True
            case ast.Name(id=name) if source.local.get(name):
                parts = source.local[name]
                names = {*names, name}
            case _:
                found = source.meaning(node)
                known: object = found.name if isinstance(found, StepRef) else found
                return ([known], True) if isinstance(known, str) and known in steps else ([], False)
        results = [self._steps_in(source, each, names) for each in parts]
        return [name for found, _ in results for name in found], all(complete for _, complete in results)

    def _is_machine(self, source: Source, node: ast.expr) -> bool:
        """Whether an expression is the machine: `self`, its class or a base, `type(self)`, `super()`."""
        match node:
            case ast.Name(id=name) if name == source.this:
                return True
            case ast.Call(func=ast.Name(id="type" | "super")):
                return True
            case _:
                found = source.meaning(node)
                return isinstance(found, type) and issubclass(self._spec.definition, found)


def _is_self(node: ast.expr, source: Source) -> TypeGuard[ast.Attribute]:
    return (
        isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == source.this
    )


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _text(node: ast.expr) -> str:
    found = " ".join(ast.unparse(node).split())
    return found if len(found) <= _CUT else found[: _CUT - 1] + "…"


def _value(source: Source, node: ast.expr) -> object:
    return node.value if isinstance(node, ast.Constant) else source.meaning(node)


def _limit(source: Source, node: ast.expr | None) -> str:
    """A timeout for people; empty if there is none."""
    if node is None or _is_none(node):
        return ""
    found = _number(source, node)
    return _text(node) if found is None else seconds(found)


def _number(source: Source, node: ast.expr) -> float | None:
    """A number, or seconds of a timedelta, as far as the source has it: products and sums of what is known."""
    match node:
        case ast.BinOp(left=left, op=ast.Mult() | ast.Add() as op, right=right):
            one, other = _number(source, left), _number(source, right)
            if one is None or other is None:
                return None
            return one * other if isinstance(op, ast.Mult) else one + other
        case ast.Call(func=called, args=[], keywords=parts) if source.meaning(called) is timedelta:
            units = {each.arg or "": _number(source, each.value) for each in parts}
            known = {name: value for name, value in units.items() if value is not None and name in _UNITS}
            return (
                sum(_UNITS[name] * value for name, value in known.items())
                if len(known) == len(parts)
                else None
            )
        case _:
            found = _value(source, node)
            return found if isinstance(found, int | float) else None


def _signals(source: Source, node: ast.expr | None) -> str:
    """The names of signals for people."""
    if node is None:
        return "…"
    parts = node.elts if isinstance(node, ast.List | ast.Tuple | ast.Set) else [node]
    values = [(each, _value(source, each)) for each in parts]
    return " or ".join(repr(value) if isinstance(value, str) else _text(each) for each, value in values)


def _children(source: Source, node: ast.expr | None) -> str:
    """The machines of the children, as far as the source names them."""
    names: dict[str, None] = {}
    given = [] if node is None else [node]
    if isinstance(node, ast.Name):
        given += source.local.get(node.id, ())
    for each in (part for expression in given for part in ast.walk(expression)):
        if isinstance(each, ast.Name | ast.Attribute):
            found = source.meaning(each)
            spec = None if found is Child else spec_of(found)
            if spec is not None:
                names[spec.name.rpartition(":")[2].rpartition("<locals>.")[2]] = None
    listed = ", ".join(list(names)[:3]) + (", …" if len(names) > 3 else "")
    return f"children: {listed}" if listed else "children"
