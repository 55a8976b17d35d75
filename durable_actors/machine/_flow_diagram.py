"""The diagram of a machine: its steps, what leads from one to the other, and where an instance stands. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, get_args

import attrs

from durable_actors._wording import counted, seconds
from durable_actors.diagrams.model import Diagram, DiagramNode, Edge, State
from durable_actors.machine._flow import End, Flow, FlowEdge, Unseen, flow_of
from durable_actors.machine._registry import current_registry
from durable_actors.machine._spec import MachineRef, MachineSpec, TaskSpec

START: Final = "start"
HANDLE: Final = "handle"
CANCEL: Final = "cancel"
_BOTH: Final[tuple[End, ...]] = get_args(End)
_MOST_UNSEEN: Final = 5
_LABELS: Final = {
    "parked": "a signal",
    "spawned": "children",
    "proceeded": "somebody lets it proceed",
    "approved": "approved",
    "rejected": "rejected",
    "timed_out": "nobody decided",
    "retry": "retry",
    "failed": "error",
    "crashed": "crash",
    "reaped": "crash",
    "compensating": "cancelled",
}
"""What is written on an edge that only journals show, by the kind of their record."""


@attrs.frozen
class Passage:
    """A way that instances took, by their journals."""

    source: str
    target: str | None
    """The step that was entered; None if the instance ended."""
    move: str
    """The kind of the record."""
    end: End | None = None


@attrs.frozen(kw_only=True)
class Standing:
    """Where an instance stands in its machine."""

    title: str
    step: str
    """The current step, or the one in which it ended."""
    state: State
    detail: str = ""
    ended: End | None = None
    passed: frozenset[str] = frozenset()
    """The steps that it has left, by its journal."""


def machine_graph(machine: MachineRef) -> Diagram:
    """Return the diagram of a machine or job, from its source: which step leads to which, and on what condition.

    Of a workflow: its tasks, and what each comes after. Nothing is executed and no database is needed;
    `durable_actors.diagrams.render` draws it. What the source does not show is told in its `notes`, as are steps that
    nothing enters.
    """
    spec = current_registry().find(machine)
    return draw_workflow(spec) if spec.tasks else draw_machine(spec)


def draw_machine(
    spec: MachineSpec, passages: Sequence[Passage] = (), standing: Standing | None = None
) -> Diagram:
    """Return the diagram of a machine, with what its journals show; of an instance, with where it stands."""
    flow = flow_of(spec)
    edges = _with_passages(flow.edges, passages, taken=standing is not None)
    # A task has a step for results that are carried over, of which nobody wants to know unless it is used.
    known = [spec.initial] if spec.kind == "job" else [*spec.steps]
    steps = [*known, *_unknown_steps(known, edges, standing)]
    nodes = _nodes(spec, steps, edges, standing)
    entries = [Edge(source=START, target=_step(spec.initial))]
    if spec.on_cancel is not None:
        entries.append(Edge(source=CANCEL, target=_step(spec.on_cancel), flow="error"))
    drawn = (*entries, *edges)
    # The steps of a workflow are not the user's.
    notes = [] if spec.tasks else [*_dead(nodes, drawn, flow), *_not_shown(flow)]
    gone = [name for name in steps if name not in spec.steps]
    if gone:
        notes.append(f"this version of the machine has no step {', '.join(gone)}: only journals know it")
    title = str(spec) if standing is None else standing.title
    return Diagram(kind="steps", title=title, nodes=nodes, edges=drawn, notes=tuple(notes))


def draw_workflow(spec: MachineSpec, title: str | None = None, state: State = "plain") -> Diagram:
    """Return the diagram of the tasks of a workflow, all in the same state."""
    nodes = tuple(
        DiagramNode(
            id=f"task:{name}",
            label=name,
            state=state,
            detail=_options(spec, task),
            facts={
                "key": name,
                "machine": task.machine.name,
                "queue": task.machine.queue,
                "max_attempts": task.machine.max_attempts,
                "timeout": task.machine.steps[task.machine.initial].timeout,
                "after": list(task.after),
                "when": "ended" if task.any_end else "succeeded",
            },
        )
        for name, task in spec.tasks.items()
    )
    edges = tuple(
        Edge(source=f"task:{each}", target=f"task:{name}")
        for name, task in spec.tasks.items()
        for each in task.after
    )
    heading = f"{spec}: {counted(len(nodes), 'task')}" if title is None else title
    return Diagram(kind="tasks", title=heading, nodes=nodes, edges=edges)


def _options(workflow: MachineSpec, task: TaskSpec) -> str:
    """What is special about a task, for people."""
    machine = task.machine
    limit = machine.steps[machine.initial].timeout
    parts = [
        "" if machine.queue == workflow.queue else f"queue {machine.queue}",
        "" if limit is None else f"timeout {seconds(limit)}",
        "however those end" if task.any_end else "",
    ]
    return ", ".join(part for part in parts if part)


def draw_observed(title: str, passages: Sequence[Passage], standing: Standing | None) -> Diagram:
    """Return the diagram of a machine whose source is not here: what journals show of it."""
    edges = _with_passages((), passages, taken=standing is not None)
    names = _unknown_steps((), edges, standing)
    here = () if standing is None else (standing,)
    nodes = tuple(
        [_node(name, standing) for name in names] + [_end(end, standing) for end in _ends(edges, here)]
    )
    note = (
        "its machine is not known here, so only what journals show is drawn; name the module that defines it"
    )
    return Diagram(kind="steps", title=title, nodes=nodes, edges=edges, notes=(note,))


def _step(name: str) -> str:
    """The id of the node of a step."""
    return f"step:{name}"


def _with_passages(flow: Sequence[FlowEdge], passages: Sequence[Passage], *, taken: bool) -> tuple[Edge, ...]:
    """The edges of the source and, marked, those that only journals show."""
    passed: set[int] = set()
    more: dict[Edge, None] = {}
    for passage in passages:
        found = _match(flow, passage)
        if found is not None:
            passed.add(found)
        else:
            more[
                Edge(
                    source=_step(passage.source),
                    target=_target(passage.target, passage.end, ""),
                    label=_LABELS.get(passage.move, ""),
                    flow="error" if passage.end == "failed" else "plain",
                    observed=True,
                    passed=taken,
                )
            ] = None
    shown = [
        Edge(
            source=HANDLE if each.source is None else _step(each.source),
            target=_target(each.target, each.end, HANDLE),
            label=each.label if each.target or each.end else "runs the step again",
            flow=each.means,
            passed=taken and at in passed,
        )
        for at, each in enumerate(flow)
    ]
    return (*shown, *more)


def _match(flow: Sequence[FlowEdge], passage: Passage) -> int | None:
    """The edge that an instance took: of its step, else of `handle`; of the same kind, else to the same place."""
    for source in (passage.source, None):
        near = [
            at
            for at, each in enumerate(flow)
            if each.source == source and (each.target, each.end) == (passage.target, passage.end)
        ]
        exact = [at for at in near if flow[at].move == passage.move]
        if exact or near:
            return (exact or near)[0]
    return None


def _target(step: str | None, end: End | None, same: str) -> str:
    return f"end:{end}" if end is not None else same if step is None else _step(step)


def _unknown_steps(known: Iterable[str], edges: Sequence[Edge], standing: Standing | None) -> list[str]:
    """Steps that journals or the row name, and the machine does not have."""
    seen = dict.fromkeys(
        each.removeprefix("step:")
        for edge in edges
        for each in (edge.source, edge.target)
        if each.startswith("step:")
    )
    if standing is not None:
        seen[standing.step] = None
    return [name for name in seen if name not in set(known)]


def _nodes(
    spec: MachineSpec, steps: Sequence[str], edges: Sequence[Edge], standing: Standing | None
) -> tuple[DiagramNode, ...]:
    nodes = [DiagramNode(id=START, label="start", shape="start")]
    nodes += (_node(name, standing) for name in steps)
    if any(edge.source == HANDLE for edge in edges):
        nodes.append(DiagramNode(id=HANDLE, label="an error in any step", detail="handle", shape="start"))
    if spec.on_cancel is not None:
        nodes.append(DiagramNode(id=CANCEL, label="a request to cancel", shape="start"))
    here = () if standing is None else (standing,)
    return (*nodes, *(_end(end, standing) for end in _ends(edges, here)))


def _node(name: str, standing: Standing | None) -> DiagramNode:
    facts = {"step": name}
    if standing is None:
        return DiagramNode(id=_step(name), label=name, facts=facts)
    if name == standing.step:
        current = standing.ended != "done"
        state: State = standing.state if current else "done"
        detail = standing.detail if current else ""
        return DiagramNode(
            id=_step(name), label=name, state=state, detail=detail, current=current, facts=facts
        )
    return DiagramNode(
        id=_step(name), label=name, state="done" if name in standing.passed else "plain", facts=facts
    )


def _ends(edges: Sequence[Edge], standings: Sequence[Standing]) -> list[End]:
    reached = {edge.target for edge in edges} | {f"end:{each.ended}" for each in standings}
    return [end for end in _BOTH if f"end:{end}" in reached]


def _end(end: End, standing: Standing | None) -> DiagramNode:
    here = standing is not None and standing.ended == end
    return DiagramNode(
        id=f"end:{end}",
        label=end,
        shape="end",
        state=end if here else "plain",
        current=here and end == "done",
        detail=standing.detail if here and standing is not None and end == "done" else "",
    )


def _dead(nodes: Sequence[DiagramNode], edges: Sequence[Edge], flow: Flow) -> list[str]:
    """Say which steps nothing enters."""
    following: dict[str, list[str]] = {}
    for edge in edges:
        following.setdefault(edge.source, []).append(edge.target)
    reached = {node.id for node in nodes if node.shape == "start" or node.current}
    todo = [*reached]
    while todo:
        for target in following.get(todo.pop(), ()):
            if target not in reached:
                reached.add(target)
                todo.append(target)
    dead = [node.label for node in nodes if node.shape == "box" and node.id not in reached]
    if not dead:
        return []
    sure = "" if not (flow.unseen or flow.without_source) else ", as far as the source shows"
    return [f"nothing enters {', '.join(dead)}{sure}; insert(step=...) could start there"]


def _not_shown(flow: Flow) -> list[str]:
    notes = [f"not followed: {_place(each)}" for each in flow.unseen[:_MOST_UNSEEN]]
    more = len(flow.unseen) - _MOST_UNSEEN
    if more > 0:
        notes.append(f"… and {more} more places are not followed")
    if flow.without_source:
        notes.append(f"the source of {', '.join(flow.without_source)} is not there")
    return notes


def _place(unseen: Unseen) -> str:
    where = "handle" if unseen.step is None else unseen.step
    return (
        f"{unseen.text} (step {where}, line {unseen.line})"
        if unseen.step
        else f"{unseen.text} ({where}, line {unseen.line})"
    )
