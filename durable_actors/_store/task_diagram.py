"""The diagram of a graph of children: what each comes after, and how far it is. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Final

from durable_actors._store.graph import GraphNode
from durable_actors._store.holds import OFFERED, REASONS, WAITING
from durable_actors._store.read import Instance
from durable_actors._wording import counted, seconds
from durable_actors.diagrams.model import Diagram, DiagramNode, Edge, State, chosen
from durable_actors.machine import CARRIED, ENDED

_NAMED: Final = 3
"""Of those that a task waits for, so many are named."""


def draw_tasks(parent: Instance, tasks: Sequence[GraphNode], *, now: datetime, limit: int) -> Diagram:
    """Return the diagram of the children of one barrier, with at most `limit` nodes.

    If there are more, tasks in the same state that come after and before the same others are one node. What is still
    too much is left out, and counted.
    """
    known = {task.id: task for task in tasks}
    nodes = [_node(task, known, now) for task in tasks]
    groups = _alike(tasks, nodes) if len(tasks) > limit else [[at] for at in range(len(tasks))]
    drawn = [_together(tasks, nodes, group) for group in groups]
    kept = {node.id for node in chosen(drawn, limit)[0]}
    place = {tasks[at].id: node.id for node, group in zip(drawn, groups, strict=True) for at in group}
    edges: dict[tuple[str, str], Edge] = {}
    hidden: Counter[str] = Counter()
    shown = 0
    for node, group in zip(drawn, groups, strict=True):
        if node.id not in kept:
            hidden[node.state] += len(group)
            continue
        task = tasks[group[0]]
        for need in task.needs:
            source = place.get(need, "")
            if source in kept:
                shown += len(group)
                passed = _satisfied(known[need], task)
                edges[source, node.id] = Edge(source=source, target=node.id, passed=passed)
    every = sum(len(task.needs) for task in tasks)
    gone = sum(need not in known for task in tasks for need in task.needs)
    told = ", ".join(
        f"{number} {state}" for state, number in Counter(node.state for node in nodes).most_common()
    )
    notes = [f"{counted(gone, 'line')} led from tasks that retention has deleted"] if gone else []
    return Diagram(
        kind="tasks",
        title=f"{parent.machine} {parent.id}, {parent.status}: {counted(len(tasks), 'task')} ({told})",
        nodes=tuple(node for node in drawn if node.id in kept),
        edges=tuple(edges.values()),
        notes=tuple(notes),
        hidden=dict(hidden),
        hidden_edges=every - gone - shown,
    )


def _alike(tasks: Sequence[GraphNode], nodes: Sequence[DiagramNode]) -> list[list[int]]:
    """Return the positions of tasks that look the same, in the order of the first of each group."""
    feeds: dict[int, list[int]] = {}
    for task in tasks:
        for need in task.needs:
            feeds.setdefault(need, []).append(task.id)
    groups: dict[object, list[int]] = {}
    for at, (task, node) in enumerate(zip(tasks, nodes, strict=True)):
        key = (node.state, task.needs, tuple(feeds.get(task.id, ())), task.any_end)
        groups.setdefault(key, []).append(at)
    return list(groups.values())


def _together(tasks: Sequence[GraphNode], nodes: Sequence[DiagramNode], group: Sequence[int]) -> DiagramNode:
    """Return one node for a group of tasks."""
    first = nodes[group[0]]
    if len(group) == 1:
        return first
    return DiagramNode(
        id=first.id,
        label=f"{first.label} … {nodes[group[-1]].label}",
        state=first.state,
        detail=counted(len(group), "task"),
        facts={"count": len(group), "ids": [tasks[at].id for at in group]},
    )


def label_of(task: GraphNode) -> str:
    """The name of a task for people: its key, or its machine and id."""
    return f"{task.machine.rpartition(':')[2]} {task.id}" if task.key is None else task.key


def _satisfied(upstream: GraphNode, task: GraphNode) -> bool:
    return upstream.status == "done" or (task.any_end and upstream.status in ENDED)


def _node(task: GraphNode, known: Mapping[int, GraphNode], now: datetime) -> DiagramNode:
    state, why = _state(task, known, now)
    took = _seconds(task, known, state, now)
    parts = [
        f"attempt {task.attempt + 1}"
        if task.attempt and state in {"running", "ready", "done", "failed"}
        else "",
        "" if took is None else f"{1000 * took:.0f} ms" if took < 1 else seconds(took),
        "carried over" if task.step == CARRIED else "",
        why,
    ]
    return DiagramNode(
        id=str(task.id),
        label=label_of(task),
        state=state,
        detail=", ".join(part for part in parts if part),
        facts={
            "id": task.id,
            "key": task.key,
            "machine": task.machine,
            "step": task.step,
            "status": task.status,
            "attempt": task.attempt,
            "seconds": took,
            "after": list(task.needs),
            "when": "ended" if task.any_end else "succeeded",
            "inserted_at": task.inserted_at,
            "finished_at": task.finished_at,
            "last_error": task.last_error,
        },
    )


def _state(  # noqa: PLR0911 - one line per state
    task: GraphNode, known: Mapping[int, GraphNode], now: datetime
) -> tuple[State, str]:
    """How a task is drawn, and why it does not go on."""
    error = "" if task.last_error is None else " ".join(task.last_error.split())
    match task.status:
        case "done":
            return "done", ""
        case "failed":
            return "failed", error
        case "cancelled":
            return "cancelled", error
        case "executing":
            return "running", ""
        case "awaiting_signal":
            return "waiting", "for a signal or a person"
        case "awaiting_children":
            return "waiting", "for its children"
        case _ if task.hold == WAITING:
            return "waiting", _waits(task, known)
        case _ if task.hold != OFFERED:
            return "waiting", REASONS[task.hold].name if task.hold in REASONS else f"hold {task.hold}"
        case _ if task.eligible_at > now:
            return "waiting", f"due in {seconds((task.eligible_at - now).total_seconds())}"
        case _:
            return "ready", ""


def _waits(task: GraphNode, known: Mapping[int, GraphNode]) -> str:
    """For what it waits: what has not ended, and after a retry what has ended badly."""
    missing = [each for need in task.needs if (each := known.get(need)) and not _satisfied(each, task)]
    named = ", ".join(
        f"{label_of(each)} ({each.status})" if each.status in ENDED else label_of(each)
        for each in missing[:_NAMED]
    )
    more = len(missing) - _NAMED
    return f"for {named}" + (f" and {more} more" if more > 0 else "") if named else ""


def _seconds(task: GraphNode, known: Mapping[int, GraphNode], state: State, now: datetime) -> float | None:
    """How long it took, or has taken so far, since the last task that it comes after has ended."""
    if state not in {"done", "failed", "running", "ready"}:
        return None
    ends = (each.finished_at for need in task.needs if (each := known.get(need)))
    begin = max([task.inserted_at, *(end for end in ends if end is not None)])
    until = now if task.finished_at is None else task.finished_at
    return round(max((until - begin).total_seconds(), 0.0), 3)
