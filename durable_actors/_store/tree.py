"""The family of an instance: who started whom, and what each waits for. Pure, but for the statements that it names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Final, cast

import attrs
import msgspec

from durable_actors._option_checks import count
from durable_actors._postgres.driver import encode
from durable_actors._postgres.driver.decode import decode_instant, decode_int_array, decode_text_array
from durable_actors._postgres.driver.statement import Params, Row, Statement
from durable_actors._store.holds import REASONS, WAITING
from durable_actors._store.read import ParentRun
from durable_actors._store.sql import statement
from durable_actors._wording import counted, seconds
from durable_actors.errors import NoTarget
from durable_actors.machine import Status

ANCESTORS: Final = 100
"""Generations above the target that are read, at most."""
DEEPEST: Final = 100
MOST: Final = 10_000


@attrs.frozen(kw_only=True)
class TreeNode:
    """An instance in its family."""

    id: int
    machine: str
    version: int
    step: str
    """The current step, or the one in which it ended."""
    status: Status
    queue: str
    attempt: int
    locked_by: str | None
    """The node and incarnation that runs it now."""
    parent_run: ParentRun | None
    """Who started it, in which step and under which key; None for an instance without a parent."""
    rerun_of: int | None = None
    """The instance that `rerun` started it from."""
    waits_for: str
    """What it waits for, or how it failed, for people; empty for one that is done. Its wording may change."""
    inserted_at: datetime
    finished_at: datetime | None
    counts: Mapping[str, int]
    """The number of all its children by status, shown or not."""
    children: tuple[TreeNode, ...] = ()
    """The children that are shown, by id."""
    hidden: int = 0
    """How many children are not shown, because of a limit."""
    key: str | None = None
    """Its name among the children of its barrier (`Child(key=...)`, a task of a workflow)."""
    after: tuple[int, ...] = ()
    """Those that it comes after, by id: at most 20 of them."""
    after_count: int = 0
    """How many these are in all."""

    @property
    def hidden_counts(self) -> Mapping[str, int]:
        """The children that are not shown, by status."""
        left = Counter(self.counts)
        left.subtract(child.status for child in self.children)
        return {status: number for status, number in left.items() if number > 0}

    def walk(self) -> Iterator[TreeNode]:
        """Iterate over this instance and all that are shown below it, parents first."""
        todo: list[TreeNode] = [self]
        while todo:
            node = todo.pop()
            yield node
            todo += reversed(node.children)


@attrs.frozen(kw_only=True)
class Tree:
    """The family of an instance. See `durable_actors.tree`."""

    target: int
    """The instance that was asked for. It is always shown, with all its ancestors."""
    root: TreeNode
    """The first ancestor. If it has a `parent_run`, that row is gone, or it has more than 100 descendants in line."""
    shown: int
    """How many instances are shown."""
    truncated: bool
    """Whether some are not: a node has `hidden` children, or there are ancestors above the root."""

    def walk(self) -> Iterator[TreeNode]:
        """Iterate over all instances that are shown, parents first."""
        return self.root.walk()

    def find(self, number: int) -> TreeNode | None:
        """Return the node of an instance; None if it is not shown."""
        return next((node for node in self.walk() if node.id == number), None)


def check_limits(depth: int, children: int, limit: int) -> None:
    """Raise `ConfigError` unless the limits are in range."""
    count("depth", depth, least=0, most=DEEPEST)
    count("children", children, least=1, most=MOST)
    count("limit", limit, least=1, most=MOST)


def tree_call(schema: str, number: int, *, depth: int, children: int, limit: int) -> tuple[Statement, Params]:
    """The statement that reads the family of an instance."""
    params = [number, depth, children, limit, ANCESTORS]
    return statement("read_tree", schema, read_only=True), [encode.number(each) for each in params]


def origins_call(schema: str, ids: Sequence[int]) -> tuple[Statement, Params]:
    """The statement that reads who started these instances."""
    return statement("read_origins", schema, read_only=True), [encode.int_array(ids)]


def origins_of(rows: Sequence[Row]) -> dict[int, ParentRun]:
    """Read the rows of read_origins.sql: child → who started it. Pure."""
    started: dict[str, tuple[str | None, str | None]] = {}
    spawned: dict[tuple[int, int], str | None] = {}
    for what, number, parent, barrier, _, step, key in rows:
        if what == b"told" and barrier is None:
            started[_text(number) or ""] = (_text(step), _text(key))
        elif what == b"told":
            spawned[int(parent or 0), int(barrier or 0)] = _text(step)
    found: dict[int, ParentRun] = {}
    for what, number, parent, barrier, machine, step, key in rows:
        if what != b"child":
            continue
        own = (_text(step), _text(key))
        if step is None and barrier is None:
            own = started.get(_text(number) or "", own)
        elif step is None:
            own = (spawned.get((int(parent or 0), int(barrier or 0))), None)
        found[int(number or 0)] = ParentRun(int(parent or 0), _text(machine), *own)
    return found


def tree_of(target: int, rows: Sequence[Row], origins: Mapping[int, ParentRun]) -> Tree:
    """Build the tree of the rows of read_tree.sql. Raises `NoTarget`. Pure."""
    found = sorted(
        ((int(row[2] or 0), int(row[0] or 0), row) for row in rows), key=lambda each: (-each[0], -each[1])
    )
    if not any(number == target for _, number, _ in found):
        raise NoTarget(f"there is no instance {target}")
    below: dict[int, list[TreeNode]] = {}
    node: TreeNode | None = None
    for level, number, row in found:  # the deepest first, so that its parents find it
        node = _node(row, origins.get(number), tuple(reversed(below.pop(number, ()))))
        if level:
            below.setdefault(int(row[1] or 0), []).append(node)
    assert node is not None
    truncated = node.parent_run is not None or any(each.hidden for each in node.walk())
    return Tree(target=target, root=node, shown=len(found), truncated=truncated)


def _node(row: Row, origin: ParentRun | None, children: tuple[TreeNode, ...]) -> TreeNode:
    counts = {} if row[19] is None else msgspec.json.decode(row[19], type=dict[str, int])
    inserted = decode_instant(row[17])
    assert inserted is not None
    return TreeNode(
        id=int(row[0] or 0),
        machine=_text(row[3]) or "",
        version=int(row[4] or 0),
        step=_text(row[5]) or "",
        status=cast("Status", _text(row[6])),
        queue=_text(row[7]) or "",
        attempt=int(row[8] or 0),
        locked_by=_text(row[9]),
        parent_run=origin,
        rerun_of=None if row[20] is None else int(row[20]),
        waits_for=_waits_for(row),
        inserted_at=inserted,
        finished_at=decode_instant(row[18]),
        counts=counts,
        children=children,
        hidden=max(sum(counts.values()) - len(children), 0),
        key=_text(row[21]),
        after=() if row[22] is None else decode_int_array(row[22]),
        after_count=int(row[23] or 0),
    )


def _waits_for(row: Row) -> str:  # noqa: PLR0911 - one line per reason
    status, owner, hold, due = _text(row[6]), _text(row[9]), int(row[10] or 0), float(row[11] or 0)
    match status:
        case "awaiting_signal":
            names = ", ".join(map(repr, () if row[13] is None else decode_text_array(row[13])))
            return f"awaits a signal named {names}{_deadline(row[12])}"
        case "awaiting_children":
            total = counted(int(row[15] or 0), "child", "children")
            return f"waits for {int(row[14] or 0)} more of {total}{_deadline(row[12])}"
        case "executing":
            return f"runs on {owner}"
        case "runnable" if hold == WAITING:
            return f"waits for {int(row[24] or 0)} of {counted(int(row[23] or 0), 'instance')} that it comes after"
        case "runnable" if hold in REASONS and hold:
            return REASONS[hold].explanation
        case "runnable":
            return f"due in {seconds(due)}" if due > 0 else f"is due in queue {_text(row[7])!r}"
        case _:  # it has ended
            return " ".join((_text(row[16]) or "").split())


def _deadline(left: bytes | None) -> str:
    if left is None:
        return ""
    ahead = float(left)
    return (
        f" until its deadline in {seconds(ahead)}"
        if ahead > 0
        else f", its deadline passed {seconds(-ahead)} ago"
    )


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode()
