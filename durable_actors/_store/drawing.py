"""`drawing`: read an instance or a machine, for its diagram. Sans-I/O, as the other dialogues."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final

import attrs

from durable_actors._option_checks import count, flag
from durable_actors._postgres.driver import encode
from durable_actors._postgres.driver.statement import Params, Row, Statement
from durable_actors._store.dialogues import inspecting
from durable_actors._store.foreign import Dialogue
from durable_actors._store.graph import GraphNode, graph_node
from durable_actors._store.holds import OFFERED, REASONS
from durable_actors._store.observe import NEWEST
from durable_actors._store.read import Instance
from durable_actors._store.sql import statement
from durable_actors._store.task_diagram import draw_tasks
from durable_actors._wording import counted, seconds
from durable_actors.diagrams.model import Diagram, State, capped
from durable_actors.errors import NoTarget
from durable_actors.machine import (
    Defined,
    End,
    MachineSpec,
    Passage,
    Standing,
    current_registry,
    draw_machine,
    draw_observed,
    draw_workflow,
    spec_of,
)

MOST_NODES: Final = 10_000
"""Nodes of a diagram, at most."""
_RECORDS: Final = 10_000
"""Records of an instance that are looked at."""
_INSTANCES: Final = 200
"""Instances of a machine whose journals are looked at: the newest."""
_FEW_INSTANCES: Final = 50
_FEW_RECORDS: Final = 100
"""The same for pages, which are read again and again."""
_WINDOW: Final = 20_000
"""Rows that are looked at to find them."""
_WAITS: Final = {"awaiting_signal", "awaiting_children"}
_NO_WAY: Final = {"asked", "crashed", "reaped"}
"""Kinds of records that lead nowhere, unless they end the instance."""
_FAILED: Final = {"failed", "crashed", "reaped", "rejected", "timed_out"}
"""Kinds of records that can be the end of an instance, as failed."""


def drawing(
    schema: str,
    target: int | str | bytes | Defined,
    *,
    barrier: int | None = None,
    steps: bool = False,
    limit: int = MOST_NODES,
) -> Dialogue[Diagram]:
    """The diagram of an instance: of its graph of children if it has one, else (or with `steps`) of its steps.

    Of a machine: of its steps. Raises `NoTarget`. A few statements, which lock nothing.
    """
    count("limit", limit, least=1, most=MOST_NODES)
    flag("steps", steps)
    if barrier is not None:
        count("barrier", barrier, least=0, most=NEWEST)
    if (machine := spec_of(target)) is not None:
        return (yield from _drawing_machine(schema, machine, limit))
    assert isinstance(target, int | str | bytes)
    instance = yield from inspecting(schema, target)
    if not steps:
        rows = yield _graph_call(schema, instance.id, barrier)
        tasks: list[GraphNode] = [graph_node(row) for row in rows]
        if tasks:
            return draw_tasks(instance, tasks, now=datetime.now(UTC), limit=limit)
        if barrier is not None:
            raise NoTarget(f"instance {instance.id} has no children of barrier {barrier}")
    groups = [_group(row) for row in (yield _paths_call(schema, [instance.id]))]
    passed = _passed(groups, waits=instance.status in _WAITS)
    standing = _standing(instance, passed)
    spec = current_registry().get(instance.machine, instance.version)
    passages = [each.passage for each in passed]
    if spec is not None and spec.tasks and not steps:  # they have not been started yet
        title = f"{instance.machine} {instance.id}, {instance.status}: {counted(len(spec.tasks), 'task')}"
        diagram = draw_workflow(spec, title, "waiting")
    elif spec is None:
        diagram = draw_observed(standing.title, passages, standing)
    else:
        diagram = draw_machine(spec, passages, standing)
    return capped(_with_parent(diagram, instance), limit)


def _drawing_machine(schema: str, spec: MachineSpec, limit: int) -> Dialogue[Diagram]:
    """The diagram of a machine from its source, and from the journals of its newest instances. Two statements.

    The tasks of a workflow are declared, so there is nothing to observe.
    """
    if spec.tasks:
        return capped(draw_workflow(spec), limit)
    passages, seen = yield from _observing(schema, spec.name, instances=_INSTANCES, records=_RECORDS)
    return capped(_with_seen(draw_machine(spec, passages), seen), limit)


def drawing_by_name(schema: str, name: str, *, limit: int = MOST_NODES) -> Dialogue[Diagram]:
    """The diagram of the newest version of a machine that this process knows, else of what journals show of it.

    For pages: it looks at fewer journals than `drawing`, and not far back in each.
    """
    specs = [each for each in current_registry().specs.values() if each.name == name]
    spec = max(specs, key=lambda each: each.version, default=None)
    if spec is not None and spec.tasks:
        return capped(draw_workflow(spec), limit)
    passages, seen = yield from _observing(schema, name, instances=_FEW_INSTANCES, records=_FEW_RECORDS)
    diagram = draw_observed(name, passages, None) if spec is None else draw_machine(spec, passages)
    return capped(_with_seen(diagram, seen), limit)


def _observing(
    schema: str, name: str, *, instances: int, records: int
) -> Dialogue[tuple[list[Passage], int]]:
    """The ways that the newest instances of a machine took, and how many instances these are."""
    nothing: Sequence[bytes | None] = [None] * 7
    params = [encode.number(NEWEST), encode.number(_WINDOW), encode.number(instances), None]
    rows = yield statement("list_instances", schema, read_only=True), [*params, encode.text(name), *nothing]
    ids = [int(row[0]) for row in rows if row[0] is not None]
    groups = [_group(row) for row in (yield _paths_call(schema, ids, records))] if ids else []
    return [each.passage for each in _passed(groups, waits=False)], len(ids)


def _with_seen(diagram: Diagram, seen: int) -> Diagram:
    note = f"observed in the journals of the newest {counted(seen, 'instance')}"
    return attrs.evolve(diagram, notes=(*diagram.notes, note)) if seen else diagram


def _graph_call(schema: str, parent: int, barrier: int | None) -> tuple[Statement, Params]:
    params = [encode.number(parent), encode.number(barrier)]
    return statement("read_graph", schema, read_only=True), params


def _paths_call(schema: str, ids: Sequence[int], records: int = _RECORDS) -> tuple[Statement, Params]:
    return statement("read_paths", schema, read_only=True), [encode.int_array(ids), encode.number(records)]


@attrs.frozen
class _Group:
    """A way that instances took, how often, and the last revision."""

    passage: Passage
    times: int
    rev: int


def _group(row: Row) -> _Group:
    step, kind, to_step = ((value or b"").decode() for value in row[:3])
    failed = kind == "failed" or (kind in _FAILED and row[3] == b"t")
    end: End | None = "done" if kind == "done" else "failed" if failed else None
    # Await without `then`, Retry, and what ran again after a crash stay in their step.
    target = None if end is not None else to_step or step
    return _Group(Passage(step, target, kind, end), int(row[4] or 0), int(row[5] or 0))


def _passed(groups: Sequence[_Group], *, waits: bool) -> list[_Group]:
    """Without the way that an instance has not taken yet, because it waits before it."""
    last = max(groups, key=lambda each: each.rev, default=None)
    open_wait = last if waits and last is not None and last.times == 1 else None
    # What somebody decided has a record of its own. A crash leads back to the same step, without an outcome.
    return [
        each
        for each in groups
        if each is not open_wait and (each.passage.end is not None or each.passage.move not in _NO_WAY)
    ]


def _standing(instance: Instance, passed: Sequence[_Group]) -> Standing:
    left = {each.passage.source for each in passed}
    state, detail = _state(instance)
    ended: End | None = (
        "done" if instance.status == "done" else "failed" if instance.status == "failed" else None
    )
    return Standing(
        title=f"instance {instance.id} of {instance.machine} v{instance.version}: "
        f"{instance.status} in {instance.step}",
        step=instance.step,
        state=state,
        detail=detail,
        ended=ended,
        passed=frozenset(left),
    )


def _state(instance: Instance) -> tuple[State, str]:  # noqa: PLR0911 - one line per state
    attempt = f"attempt {instance.attempt + 1}" if instance.attempt else ""
    error = " ".join((instance.last_error or "").split())
    match instance.status:
        case "done":
            return "done", ""
        case "failed":
            return "failed", error
        case "cancelled":
            return "cancelled", error
        case "executing":
            return "running", attempt
        case "awaiting_children":
            return "waiting", "for its children"
        case "awaiting_signal" if instance.boundary is not None:
            return "waiting", f"for a person: {instance.boundary.title or instance.boundary.kind}"
        case "awaiting_signal":
            return "waiting", "for a signal"
        case _ if instance.hold != OFFERED:
            return "waiting", REASONS[instance.hold].name if instance.hold in REASONS else ""
        case _:
            ahead = (instance.eligible_at - datetime.now(UTC)).total_seconds()
            parts = [attempt, f"due in {seconds(ahead)}" if ahead > 0 else ""]
            return "waiting" if ahead > 0 else "ready", ", ".join(part for part in parts if part)


def _with_parent(diagram: Diagram, instance: Instance) -> Diagram:
    if instance.parent_id is None:
        return diagram
    note = f"it is a child of instance {instance.parent_id}"
    return attrs.evolve(diagram, notes=(*diagram.notes, note))
