"""Children: spawned in the commit that parks their parent, started singly by a running step, read by barrier."""

from __future__ import annotations

import hashlib
import json
import uuid
from collections import Counter
from collections.abc import Sequence
from typing import Final, cast

import attrs

from durable_actors._postgres.driver import encode
from durable_actors._postgres.driver.connection import PgConn
from durable_actors._postgres.driver.statement import Params
from durable_actors._store.claim import promote_siblings
from durable_actors._store.commit import limit_params, pair_params
from durable_actors._store.graph import graph_params
from durable_actors._store.insert import MAX_OCCUPANT_READS, Insertion, in_chunks, insert_call, tags_literal
from durable_actors._store.links import Graph, links_of
from durable_actors._store.rows import Claim, Committed, Transition
from durable_actors._store.sql import statement
from durable_actors.machine import ChildView, InsertPlan, Status, decode_json

ROWS_PER_INSERT: Final = 5000
"""Rows per insert statement: bounds memory, and keeps each statement under a second."""

_NAMESPACE: Final = uuid.UUID("8b3c6f0e-2d0a-5b57-9a43-6c1f0a7f4e21")


@attrs.frozen
class Spawn:
    """Children to insert, and when their parent continues."""

    plans: Sequence[InsertPlan]
    then: str
    quorum: int | None
    """How many must end; None: all."""
    wake_on_failure: bool
    timeout: float | None
    cancel_rest: bool = False
    """Cancel the children that still live then."""
    graph: Graph | None = None
    """None: no child has a key or comes after another."""


async def schedule_children(
    conn: PgConn,
    schema: str,
    transition: Transition,
    spawn: Spawn,
    *,
    accept_late: bool,
    node: str | None = None,
) -> Committed | None:
    """Insert the children and park the parent on their barrier, in one transaction; None if the claim is stale.

    The parent's row is locked first, for the whole transaction. So no reaper can take it between the insert and the
    park; that would leave children which a re-run spawns again.
    """
    claim = transition.claim
    async with conn.transaction():
        late = b"t" if accept_late else b"f"
        fence = [encode.number(claim.id), claim.claim_id.encode(), encode.number(claim.visit), late]
        if not (await conn.run(statement("lock_parent", schema), fence)).rows:
            return None
        children = await _insert_children(conn, schema, spawn, claim.id, claim.visit + 1)
        inserted = len(children)
        needed = inserted if spawn.quorum is None else min(spawn.quorum, inserted)
        result = await conn.run(
            statement("park_parent", schema),
            [
                encode.number(claim.id),
                spawn.then.encode(),
                transition.state,
                encode.number(inserted),
                encode.number(needed),
                b"t" if spawn.wake_on_failure else b"f",
                encode.number(spawn.timeout),
                claim.step.encode(),
                encode.number(claim.attempt),
                encode.text(node),
                encode.number(claim.round),
                encode.text(claim.recorded.lease_until),
                transition.handled,
                encode.text(claim.recorded.definition),
                b"t" if spawn.cancel_rest else b"f",
            ],
        )
        if transition.relimits:
            await conn.run(statement("write_limits", schema), limit_params([transition]))
        if transition.consumed:
            pairs = pair_params([(claim.id, signal) for signal in transition.consumed])
            await conn.run(statement("consume_signals", schema), pairs)
        keys = [] if claim.partition_key is None else [claim.partition_key]
        offered = await promote_siblings(conn, schema, keys) if keys else []
    [[_, visit, status, *_]] = result.rows
    return Committed(
        int(visit or 0), cast("Status", (status or b"").decode()), offered=tuple(offered), children=children
    )


async def _insert_children(conn: PgConn, schema: str, spawn: Spawn, parent: int, barrier: int) -> list[int]:
    """Insert the children, and which of them come after which. Returns the ids of those that are new."""
    graph = spawn.graph
    links = None if graph is None else links_of(graph)
    found: list[int | None] = []
    for chunk in in_chunks(spawn.plans, rows=ROWS_PER_INSERT):
        first = len(found)
        part = None if links is None else links.part(first, first + len(chunk))
        insertion = Insertion(chunk if part is None else part.firm(chunk))
        while insertion.pending:
            call = insert_call(
                insertion.pending,
                schema,
                parent_id=parent,
                barrier=barrier,
                links=None if part is None else part.only(insertion.places),
            )
            insertion.answered((await conn.run(*call)).rows)
        found += insertion.ids()
    if graph is not None and links is not None and any(links.links):
        await conn.run(statement("insert_graph", schema), graph_params(found, graph, links.feeds))
    return [number for number in found if number is not None]


def child_uid(
    caller: int, step: str, machine: str, key: str, *, kind: str, initial: str | None = None
) -> uuid.UUID:
    """The identity of an instance that a step starts: equal for every run of the step. Pure.

    `initial` is the step that the instance begins in, if that is not the machine's own. Otherwise it must be None: that
    keeps the identities of the first release, and a step that is re-run after an upgrade does not start its child
    twice.
    """
    parts = [kind, caller, step, machine, key]
    return uuid.uuid5(_NAMESPACE, json.dumps(parts if initial is None else [*parts, initial]))


def args_digest(plan: InsertPlan, state: bytes) -> bytes:
    """A digest of the arguments of a child; `state` is in canonical form. Pure.

    Where and when the child runs (queue, priority, schedule, version) and its labels are not part of the digest: they
    may differ in a re-run after a deploy or at a later time.
    """
    key = None if plan.unique_key is None else plan.unique_key.hex()
    return hashlib.sha256(json.dumps([plan.partition_key, key]).encode() + state).digest()


@attrs.frozen
class Started:
    """The result of a start from inside a step."""

    id: int | None
    """None if another instance occupies its unique key."""
    new: bool
    """False if an earlier run or a concurrent call of the same step has started it."""
    occupant: int | None
    """The instance that occupies its unique key; None if that is not visible."""
    conflict: bool = False
    """Whether it was started before with other arguments."""


async def start_child(
    conn: PgConn,
    schema: str,
    claim: Claim,
    plan: InsertPlan,
    *,
    uid: uuid.UUID,
    as_child: bool,
    key: str | None = None,
    digest: bytes | None = None,
) -> Started | None:
    """Insert an instance from inside a step, or find the one that an earlier run inserted; None if the claim is stale.

    With a `digest` of its arguments, an instance that was started with another digest is reported as a conflict. If the
    statement returns neither an id nor an occupant, the occupant was committed after its snapshot: it is repeated.
    """
    params = _start_params(claim, plan, uid, as_child=as_child, key=key, digest=digest)
    found: Started | None = None
    for attempt in range(MAX_OCCUPANT_READS):
        rows = (await conn.run(statement("start_child", schema), params)).rows
        if not rows:
            return None
        [[number, new, occupant, conflict]] = rows
        found = Started(
            None if number is None else int(number),
            new == b"t",
            None if occupant is None else int(occupant),
            conflict == b"t",
        )
        # The second attempt sees a concurrent call with the same identity, which the first may not see.
        if found.id is not None or (attempt > 0 and found.occupant is not None):
            break
    return found


def _start_params(
    claim: Claim, plan: InsertPlan, uid: uuid.UUID, *, as_child: bool, key: str | None, digest: bytes | None
) -> Params:
    return [
        encode.number(claim.id),
        claim.claim_id.encode(),
        encode.number(claim.visit),
        str(uid).encode(),
        plan.machine.encode(),
        encode.number(plan.version),
        plan.step.encode(),
        plan.state,
        plan.queue.encode(),
        encode.number(plan.priority),
        encode.text(plan.partition_key),
        encode.bytea(plan.unique_key),
        ("{" + ",".join(plan.unique_scope) + "}").encode(),
        None if plan.eligible_at is None else plan.eligible_at.isoformat().encode(),
        encode.number(plan.delay),
        b"t" if as_child else b"f",
        encode.text(tags_literal(plan)),
        None if plan.labels is None else plan.labels.meta,
        encode.bytea(digest),
        encode.text(key),
        encode.number(plan.journal),
        encode.text(plan.fingerprint),
        encode.number(plan.max_attempts),
        encode.text(plan.fair_key),
        encode.text(plan.limits),
    ]


async def count_children(conn: PgConn, schema: str, parent: int, barrier: int) -> Counter[Status]:
    """Count a barrier's children by status."""
    params = [encode.number(parent), encode.number(barrier)]
    rows = (await conn.run(statement("count_children", schema, read_only=True), params)).rows
    return Counter({cast("Status", (status or b"").decode()): int(count or 0) for status, count in rows})


async def read_children(
    conn: PgConn, schema: str, parent: int, barrier: int, *, after: int, limit: int
) -> list[ChildView]:
    """A page of a barrier's children, in spawn order."""
    params = [encode.number(parent), encode.number(barrier), encode.number(after), encode.number(limit)]
    rows = (await conn.run(statement("read_children", schema, read_only=True), params)).rows
    return [
        ChildView(
            int(number or 0),
            (fsm or b"").decode(),
            cast("Status", (status or b"").decode()),
            None
            if result is None
            else decode_json(result, what=f"result of child {(number or b'?').decode()}"),
            None if error is None else error.decode(),
            None if key is None else key.decode(),
        )
        for number, fsm, status, result, error, key in rows
    ]
