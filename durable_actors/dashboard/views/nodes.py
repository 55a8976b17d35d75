"""Nodes: who works here, what each serves and runs; and the supervision tree of the engine in this process."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Final

import attrs

from durable_actors._postgres.driver.connection import PgConn
from durable_actors._store.claims_of import HeldClaim, read_claims_of
from durable_actors._store.observe import NodeView, read_nodes
from durable_actors.dashboard.desk import Desk, Nav, Page, View
from durable_actors.dashboard.web import Request
from durable_actors.errors import ConfigError, NoTarget
from durable_actors.machine import builtin_machines, builtin_queues
from durable_actors.otp import Node as TreeNode

MOST: Final = 200
"""Nodes that the list shows: live ones first, then those that were seen last."""
CLAIMS: Final = 100
TASKS: Final = 50
"""Tasks of pools that the tree shows."""
_ORDER: Final = {"alive": 0, "runner": 1, "lost": 2, "stopped": 3}


async def nodes(desk: Desk, request: Request) -> View:
    """List the nodes that work here, and those that did in the last days."""
    found = sorted(await desk.read(read_nodes), key=_rank)
    data = {
        "nodes": [_shown(desk, each) for each in found[:MOST]],
        "left_out": max(len(found) - MOST, 0),
    }
    return View(template="nodes.html", title="Nodes", data=data)


def _rank(view: NodeView) -> tuple[bool, int, float]:
    """Live ones first, and lost ones that still hold claims; then those that were seen last. Pure."""
    past = view.state in {"lost", "stopped"} and not view.claims
    return (
        past,
        0 if past else _ORDER[view.state],
        -(view.seen_at or datetime.min.replace(tzinfo=UTC)).timestamp(),
    )


def _shown(desk: Desk, view: NodeView) -> dict[str, Any]:
    queues = {name: slots for name, slots in view.queues.items() if name not in builtin_queues()}
    own = {f"{name}/{version}" for name, version in builtin_machines()}
    return {
        **attrs.asdict(view, recurse=False),
        "state": view.state,
        "queues": queues,
        "machines": [each for each in view.machines if each not in own],
        "slots": sum(queues.values()),
        "here": _is_here(desk, view.incarnation),
    }


def _is_here(desk: Desk, incarnation: str) -> bool:
    return desk.engine is not None and desk.engine.incarnation == incarnation


async def node(desk: Desk, request: Request, incarnation: str) -> View:
    """Show one node: what it serves, what it has claimed, and its tree if it lives in this process."""

    async def read(conn: PgConn, schema: str) -> tuple[NodeView | None, tuple[HeldClaim, ...]]:
        found = [each for each in await read_nodes(conn, schema) if each.incarnation == incarnation]
        return next(iter(found), None), await read_claims_of(conn, schema, incarnation, limit=CLAIMS)

    view, claims = await desk.read(read)
    if view is None:
        raise NoTarget(
            f"no node {incarnation[:200]!r} is known: rows of nodes that stopped are kept for some days"
        )
    tree = _tree(desk, incarnation)
    data = {
        "node": _shown(desk, view),
        "claims": claims,
        "claims_capped": view.claims > len(claims),
        "tree": tree,
    }
    return View(template="node.html", title=f"Node {incarnation}", data=data)


def _tree(desk: Desk, incarnation: str) -> TreeNode | None:
    if desk.engine is None or desk.engine.incarnation != incarnation:
        return None
    try:
        return desk.engine.snapshot(tasks=TASKS)
    except ConfigError:  # it has not started yet
        return None


PAGES: Final = (
    Page(path="/nodes", view=nodes, nav=Nav("Nodes", "/nodes", "n")),
    Page(path="/nodes/{incarnation}", view=node),
)
