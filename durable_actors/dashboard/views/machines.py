"""Machines: which there are, who has them, and the graph of each with how many instances stand in every step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import attrs

from durable_actors._postgres.driver.connection import PgConn
from durable_actors._store.dialogues import run_dialogue
from durable_actors._store.drawing import drawing_by_name
from durable_actors._store.observe import NodeView, read_nodes
from durable_actors._store.steps import KINDS, WINDOW, StepCount, StepKind, Steps, longest, read_steps
from durable_actors._wording import seconds
from durable_actors.dashboard.desk import Desk, Nav, Page, View
from durable_actors.dashboard.render import number
from durable_actors.dashboard.views.instance import inline_svg
from durable_actors.dashboard.web import Request
from durable_actors.diagrams import Diagram, DiagramNode
from durable_actors.diagrams.model import State
from durable_actors.errors import NoTarget
from durable_actors.machine import MachineSpec, builtin_machines, current_registry

MOST: Final = 300
"""Machines that the list shows."""
DRAWN: Final = 60
"""Nodes of a diagram."""
_STATES: Final[tuple[tuple[StepKind, State], ...]] = (
    ("running", "running"), ("ready", "ready"), ("waiting", "waiting"), ("held", "waiting"), ("shelved", "waiting"),
    ("limited", "waiting"),    ("paused", "waiting"), ("scheduled", "waiting"), ("failed", "failed"),
)  # fmt: skip
"""How a step is drawn: by the first kind that it has."""


@attrs.frozen(kw_only=True)
class Tally:
    """What stands in a step, in a version or in a machine."""

    counts: Mapping[str, int]
    """By kind."""
    oldest: float | None
    """Seconds, of those that have neither ended nor are yet to come."""
    p95: float | None

    @property
    def live(self) -> int:
        """Those that have not ended."""
        return sum(count for kind, count in self.counts.items() if kind != "failed")


def tally(counts: Iterable[StepCount]) -> Tally:
    """Add up. Pure."""
    found = [*counts]
    live = [each for each in found if each.kind != "failed"]
    return Tally(
        counts={kind: sum(each.count for each in found if each.kind == kind) for kind in KINDS},
        oldest=longest(*(each.oldest for each in live)),
        p95=longest(*(each.p95 for each in live)),
    )


async def machines(desk: Desk, request: Request) -> View:
    """List the machines that nodes have, that this process knows, or that instances stand in."""
    part = request.query.get("q", "").strip()
    steps = await desk.sampler.shared("steps", read_steps)
    nodes = await desk.sampler.shared("nodes", read_nodes)
    names = [each for each in known_names(nodes, steps) if part in each]
    found = [_machine(name, nodes, steps) for name in names[:MOST]]
    data = {
        "machines": found,
        "q": part,
        "left_out": max(len(names) - MOST, 0),
        "capped": steps.capped,
        "partly": steps.partly,
    }
    return View(template="machines.html", title="Machines", data=data, extra={"window": WINDOW})


def known_names(nodes: Iterable[NodeView], steps: Steps) -> list[str]:
    """All machines that are known from anywhere, without those of this package. Pure but for the registry."""
    own = {name for name, _ in builtin_machines()}
    names = {each.name for each in current_registry().specs.values()}
    names |= {each.rpartition("/")[0] for node in nodes if node.alive for each in node.machines}
    names |= {each.machine for each in steps.counts}
    return sorted(names - own)


def _machine(name: str, nodes: Sequence[NodeView], steps: Steps) -> dict[str, Any]:
    counts = steps.of(name)
    versions = {each.version for each in counts} | {version for version, _ in _serving(name, nodes)}
    return {
        "name": name,
        "versions": sorted(versions),
        "nodes": len({node for _, node in _serving(name, nodes)}),
        **_shown(tally(counts)),
    }


def _shown(found: Tally) -> dict[str, Any]:
    return {**attrs.asdict(found), "live": found.live}


def _serving(name: str, nodes: Iterable[NodeView]) -> list[tuple[int, str]]:
    """The live nodes that have a machine: version and incarnation."""
    found: list[tuple[int, str]] = []
    for node in nodes:
        for each in node.machines if node.alive else ():
            machine, _, version = each.rpartition("/")
            if machine == name and version.isascii() and version.isdigit():
                found.append((int(version), node.incarnation))
    return found


async def machine(desk: Desk, request: Request, name: str) -> View:
    """Show one machine: its graph with live counts, its steps and its versions."""
    steps = await desk.sampler.shared("steps", read_steps)
    nodes = await desk.sampler.shared("nodes", read_nodes)
    counts, serving, spec = steps.of(name), _serving(name, nodes), _spec(name)
    diagram = await desk.sampler.shared(f"diagram {name}", partial(_draw, name=name))
    if not counts and not serving and spec is None and not diagram.edges:
        raise NoTarget(
            f"no machine {name[:200]!r} is known: no node has it, and none of its instances is kept"
        )
    drawn = with_counts(diagram, steps, name)
    data = {
        "name": name,
        "versions": versions_of(counts, serving),
        "steps": steps_of(counts, serving, nodes, spec, name),
        "tasks": [] if spec is None else tasks_of(spec, steps),
        "total": _shown(tally(counts)),
        "diagram": drawn,
        "capped": steps.capped,
        "partly": steps.partly,
        "about": None if spec is None else _about(spec),
    }
    extra = {"drawing": inline_svg(drawn) if drawn.nodes else None, "window": WINDOW, "kinds": KINDS}
    return View(template="machine.html", title=f"Machine {name}", data=data, extra=extra)


async def _draw(conn: PgConn, schema: str, *, name: str) -> Diagram:
    return await run_dialogue(conn, drawing_by_name(schema, name, limit=DRAWN))


def _spec(name: str) -> MachineSpec | None:
    specs = [each for each in current_registry().specs.values() if each.name == name]
    return max(specs, key=lambda each: each.version, default=None)


def _about(spec: MachineSpec) -> dict[str, Any]:
    return {
        "kind": "workflow" if spec.tasks else spec.kind,
        "queue": spec.queue,
        "initial": spec.initial,
        "max_attempts": spec.max_attempts,
        "source": ":".join(spec.identity),
    }


def versions_of(counts: Iterable[StepCount], serving: Sequence[tuple[int, str]]) -> list[dict[str, Any]]:
    """Each version: what stands in it, and which nodes have it. Pure."""
    found = [*counts]
    known = {each.version for each in found} | {version for version, _ in serving}
    return [
        {
            "version": version,
            "nodes": sorted(node for each, node in serving if each == version),
            **_shown(tally(each for each in found if each.version == version)),
        }
        for version in sorted(known, reverse=True)
    ]


def steps_of(
    counts: Iterable[StepCount],
    serving: Sequence[tuple[int, str]],
    nodes: Iterable[NodeView],
    spec: MachineSpec | None,
    name: str,
) -> list[dict[str, Any]]:
    """Each step that somebody knows, or that instances stand in, in the order of the source. Pure."""
    found = [*counts]
    names = {} if spec is None else dict.fromkeys(spec.steps)
    for node in nodes:
        for version in sorted({version for version, each in serving if each == node.incarnation}):
            names |= dict.fromkeys((node.steps or {}).get(f"{name}/{version}", ()))
    known = set(names)
    names |= dict.fromkeys(sorted({each.step for each in found} - known))
    return [
        {
            "step": step,
            "known": step in known or not known,
            **_shown(tally(each for each in found if each.step == step)),
        }
        for step in names
    ]


def tasks_of(spec: MachineSpec, steps: Steps) -> list[dict[str, Any]]:
    """Each task of a workflow, which is a machine of its own. Pure."""
    return [
        {
            "task": name,
            "machine": task.machine.name,
            "after": task.after,
            **_shown(tally(steps.of(task.machine.name))),
        }
        for name, task in spec.tasks.items()
    ]


def with_counts(diagram: Diagram, steps: Steps, name: str) -> Diagram:
    """Write into a diagram how many instances stand in each step or task. Pure."""
    nodes = tuple(_counted(node, _at(node, steps, name)) for node in diagram.nodes)
    return attrs.evolve(diagram, title=name, nodes=nodes)


def _at(node: DiagramNode, steps: Steps, name: str) -> tuple[StepCount, ...]:
    """What stands in a step of this machine, or in a task, which is a machine of its own."""
    facts = node.facts
    if "step" in facts:
        return tuple(each for each in steps.of(name) if each.step == facts["step"])
    return steps.of(facts["machine"]) if "machine" in facts else ()


def _counted(node: DiagramNode, counts: Sequence[StepCount]) -> DiagramNode:
    if not counts:
        return node
    found = tally(counts)
    kinds = [kind for kind in KINDS if found.counts[kind]]
    ages = {kind: longest(*(each.oldest for each in counts if each.kind == kind)) for kind in kinds}
    # Only the first kind has its age: a box has room for some forty characters.
    parts = [
        f"{number(found.counts[kind])} {kind}"
        + (f" ({seconds(ages[kind])})" if kind == kinds[0] and ages[kind] is not None else "")
        for kind in kinds
    ]
    state = next((state for kind, state in _STATES if found.counts[kind]), node.state)
    facts = {**node.facts, **_shown(found)}
    return attrs.evolve(node, detail=" · ".join(parts), state=state, facts=facts, quiet=True)


PAGES: Final = (
    Page(path="/machines", view=machines, nav=Nav("Machines", "/machines", "m")),
    Page(path="/machines/{name}", view=machine),
)
