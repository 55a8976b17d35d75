"""Graphs: children that come after other children of their barrier. Written with the spawn, told by who ends one, read.

The row of a child says what its part is (`gen_durable.links`); the table `graph` has the edges, and how many of them a
child still waits for. A child that comes after others is runnable and held (`holds.WAITING`) until
`tell_dependents.sql` offers it, in the transaction that ends the last of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final, cast

import attrs

from durable_actors._postgres.driver import encode
from durable_actors._postgres.driver.connection import PgConn
from durable_actors._postgres.driver.decode import decode_instant, decode_int_array
from durable_actors._postgres.driver.statement import Params, Row, Statement
from durable_actors._store.claim import Owner, read_pick, read_promoted, trusted_until
from durable_actors._store.foreign import Dialogue
from durable_actors._store.links import Graph
from durable_actors._store.rows import Claim, Promoted
from durable_actors._store.sql import statement
from durable_actors.errors import StateError
from durable_actors.machine import ChildView, Status, decode_json

UNTOLD: Final = 100
"""Ended instances whose dependents one statement tells."""


@attrs.frozen
class GraphNode:
    """One child of a graph, for people."""

    id: int
    barrier: int
    key: str | None
    machine: str
    step: str
    status: Status
    hold: int
    """Why it is not offered, if it is runnable (`_store/holds.py`); `WAITING`: for what it comes after."""
    attempt: int
    needs: tuple[int, ...]
    """The ids of those that it comes after."""
    any_end: bool
    """Whether it runs however those end."""
    waits: int
    """How many of those it waits for."""
    inserted_at: datetime
    eligible_at: datetime
    """When it could run for the first time, or again; of one that came after others, since when it does not wait."""
    finished_at: datetime | None
    last_error: str | None


def graph_params(ids: Sequence[int | None], graph: Graph, feeds: Sequence[Sequence[int]]) -> list[bytes]:
    """The parameters of insert_graph.sql: `ids` are the children's; None: its unique key was occupied. Pure."""
    chosen = [
        at
        for at, (number, needs, fed) in enumerate(zip(ids, graph.needs, feeds, strict=True))
        if number is not None and (needs or fed)
    ]
    return [
        encode.int_array([ids[at] for at in chosen]),
        encode.text_array([_ids(ids, graph.needs[at]) for at in chosen]),
        encode.bool_array([graph.any_end[at] for at in chosen]),
        encode.text_array([_ids(ids, feeds[at]) for at in chosen]),
    ]


def _ids(ids: Sequence[int | None], positions: Sequence[int]) -> str | None:
    found = [str(number) for at in positions if (number := ids[at]) is not None]
    return "{" + ",".join(found) + "}" if found else None


def announcing(schema: str) -> tuple[Statement, Params]:
    """The statement that must come before the outcomes of a transaction that tells of their ends."""
    return statement("will_tell", schema), []


@attrs.frozen
class Room:
    """What a node may take at once of the dependents that its own commit is about to offer."""

    owner: Owner
    queues: Mapping[str, int]
    """How many of each queue."""
    priorities: Sequence[int]
    """Those of rows that were on offer in these queues."""
    known: bytes
    """The steps that the node knows (`encode.text_array`)."""
    now: float
    """The time on Trio's clock before the call: leases are trusted from there."""


def telling(
    schema: str, ended: Sequence[int], room: Room | None = None
) -> dict[str, tuple[Statement, Params]]:
    """The statements that tell the dependents of ended instances, in the transaction that ends them, in this order."""
    ids = encode.int_array(ended)
    taker: Params = [None, None, None, *[encode.int_array(())] * 3, encode.text_array(())]
    if room is not None:
        taker = [
            room.owner.name.encode(),
            encode.number(room.owner.lease_ttl),
            encode.bytea(room.owner.token_hash),
            encode.text_array([*room.queues]),
            encode.int_array([*room.queues.values()]),
            encode.int_array(room.priorities),
            room.known,
        ]
    return {
        "lock_owed": (statement("lock_owed", schema), [ids]),
        "tell_dependents": (statement("tell_dependents", schema, typed=True), [ids, *taker]),
    }


def read_told(rows: list[tuple[Any, ...]], room: Room | None) -> tuple[list[Promoted], list[Claim]]:
    """Read the rows of tell_dependents.sql: what is on offer, and what is handed over, the most urgent first. Pure."""
    offered = [Promoted(row[1], row[0]) for row in rows if row[4] == "o"]
    by_queue: dict[str, list[tuple[Any, ...]]] = {}
    for row in rows:
        if row[4] == "c":
            by_queue.setdefault(row[0], []).append(row[1:])
    if room is None:
        return offered, []
    until = trusted_until(room.now, room.owner.lease_ttl)
    picked = [read_pick(found, queue=queue, trusted_until=until) for queue, found in by_queue.items()]
    return offered, [claim for each in picked for claim in each.claims]


@attrs.frozen
class Told:
    """What one call of `tell_untold` has done."""

    offered: tuple[Promoted, ...]
    """Dependents that are offered now."""
    more: bool
    """Whether there may be more to tell at once."""


def telling_untold(schema: str, *, most: int = UNTOLD) -> Dialogue[Told]:
    """Tell the dependents of instances that ended in another way than by the commit of an outcome."""
    rows = yield statement("tell_untold", schema), [encode.number(most)]
    looked = next((int(row[0] or 0) for row in rows if row[1] is None), 0)
    return Told(tuple(read_promoted([row for row in rows if row[1] is not None])), looked == most)


async def read_dependencies(
    conn: PgConn, schema: str, ids: Sequence[int]
) -> dict[int, dict[str, ChildView] | StateError]:
    """What these instances come after, by key, each with its end. What retention has deleted is missing.

    A result that does not decode is the answer for its instance: it must not cost the others theirs.
    """
    call = statement("read_dependencies", schema, read_only=True)
    rows = (await conn.run(call, [encode.int_array(ids)])).rows
    views = {int(row[2]): _view(row[2:]) for row in rows if row[2] is not None}
    found: dict[int, dict[str, ChildView] | StateError] = {number: {} for number in ids}
    for owner, needs, *_ in rows:
        if owner is not None and needs is not None:
            found[int(owner)] = _named([views[each] for each in decode_int_array(needs) if each in views])
    return found


def _named(views: Sequence[ChildView | StateError]) -> dict[str, ChildView] | StateError:
    named: dict[str, ChildView] = {}
    for view in views:
        if isinstance(view, StateError):
            return view
        named[str(view.id) if view.key is None else view.key] = view
    return named


def _view(row: Sequence[bytes | None]) -> ChildView | StateError:
    number, key, fsm, status, result, error = row
    try:
        decoded = (
            None if result is None else decode_json(result, what=f"result of instance {int(number or 0)}")
        )
    except StateError as exc:
        return exc
    return ChildView(
        int(number or 0),
        (fsm or b"").decode(),
        cast("Status", (status or b"").decode()),
        decoded,
        None if error is None else error.decode(),
        None if key is None else key.decode(),
    )


async def read_graph(conn: PgConn, schema: str, parent: int, barrier: int | None = None) -> list[GraphNode]:
    """The children of one barrier in spawn order, with what each comes after.

    `barrier` None: the latest one whose children come after each other. An empty list: there is none.
    """
    params = [encode.number(parent), encode.number(barrier)]
    rows = (await conn.run(statement("read_graph", schema, read_only=True), params)).rows
    return [graph_node(row) for row in rows]


def graph_node(row: Row) -> GraphNode:
    """Read a row of read_graph.sql. Pure."""
    return GraphNode(
        id=int(row[0] or 0),
        barrier=int(row[1] or 0),
        key=None if row[2] is None else row[2].decode(),
        machine=(row[3] or b"").decode(),
        step=(row[4] or b"").decode(),
        status=cast("Status", (row[5] or b"").decode()),
        hold=int(row[6] or 0),
        attempt=int(row[7] or 0),
        needs=() if row[8] is None else decode_int_array(row[8]),
        any_end=row[9] == b"t",
        waits=int(row[10] or 0),
        inserted_at=cast("datetime", decode_instant(row[11])),
        eligible_at=cast("datetime", decode_instant(row[12])),
        finished_at=decode_instant(row[13]),
        last_error=None if row[14] is None else row[14].decode(),
    )
