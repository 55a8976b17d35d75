"""Graphs of children, for the store's tests: spawned, stepped and read by key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import psycopg
from durable_actors._store.children import Spawn, schedule_children
from durable_actors._store.commit import Flushed, commit_outcomes
from durable_actors._store.graph import Room, telling_untold
from durable_actors._store.links import Graph
from durable_actors._store.rows import Claim, Status, Transition
from durable_actors.machine import InsertPlan
from tests.store.kit import OWNER, SCHEMA, claims, insert, known_steps, outcome, plan, rows
from tests.store.stepping import commit

Edges = Mapping[str, str]
"""Key → the keys that it comes after, one letter each."""


def graph_of(edges: Edges, *, ended: str = "") -> Graph:
    """A graph; the children in `ended` run however those end that they come after."""
    keys = list(edges)
    return Graph(
        keys, [tuple(keys.index(each) for each in edges[key]) for key in keys], [k in ended for k in keys]
    )


@attrs.define
class Family:
    """A parent and its children, by key."""

    db: psycopg.Connection
    conn: Any
    parent: int
    ids: dict[str, int]

    def keys(self, ids: Any) -> str:
        by_id = {number: key for key, number in self.ids.items()}
        return "".join(sorted(by_id.get(number, "?") for number in ids))

    def column(self, key: str, columns: str = "status") -> Any:
        [row] = rows(self.db, columns, f"id = {self.ids[key]}")
        return row[0] if len(row) == 1 else row

    def statuses(self) -> dict[str, str]:
        found = dict(rows(self.db, "child_key, status", f"parent_id = {self.parent}"))
        return {key: found[key] for key in self.ids}

    def waits(self) -> dict[str, int]:
        tables = "durable.graph e join durable.gen_durable g using (id)"
        return dict(
            self.db.execute(f"select g.child_key, e.waits from {tables} where e.waits > 0").fetchall()
        )

    def offered(self) -> str:
        return self.keys(
            n for (n,) in rows(self.db, "id", f"parent_id = {self.parent} and durable.offered(status, hold)")
        )

    async def claim(self) -> dict[str, Claim]:
        found = await claims(self.conn)
        return {self.keys([each.id]): each for each in found}

    async def run(self, **ends: Status) -> str:
        """Claim what is offered, and commit these ends, together; the rest is released. Returns what was claimed."""
        found = await self.claim()
        await commit(self.conn, *(ending(found[key], status) for key, status in ends.items()))
        left = [claim.id for key, claim in found.items() if key not in ends]
        self.db.execute(
            "update durable.gen_durable set status = 'runnable', locked_by = null, lease_expires_at = null,"
            " claim_id = null, claim_token_hash = null where id = any (%s)",
            [left],
        )
        return "".join(sorted(found))

    async def tell(self) -> str:
        """What the actor does with all that is untold; who is offered by that."""
        offered: list[int] = []
        more = True
        while more:
            call = telling_untold(SCHEMA)
            statement, params = next(call)
            try:
                call.send((await self.conn.run(statement, params)).rows)
            except StopIteration as exc:
                offered += [each.id for each in exc.value.offered]
                more = exc.value.more
        return self.keys(offered)


def ending(claim: Claim, status: Status) -> Transition:
    """An end; of a doomed one the end that an engine commits."""
    if claim.cancellation is not None and claim.cancellation.upstream is not None:
        return outcome(claim, "cancelled", last_error=claim.cancellation.reason)
    return outcome(
        claim,
        status,
        result=b'"%d"' % claim.id if status == "done" else None,
        last_error=None if status == "done" else "boom",
    )


def room(count: int = 9, *, queue: str = "default", steps: tuple[str, ...] = ("m/1/s",)) -> Room:
    """What a node takes at once."""
    return Room(OWNER, {queue: count}, [0], known_steps(*steps), 0.0)


async def hand_over(all_of: Family, taker: Room | None = None, /, **ends: Status) -> Flushed:
    """Claim what is offered, and commit these ends; the node takes what they offer."""
    found = await all_of.claim()
    return await commit_outcomes(
        all_of.conn,
        SCHEMA,
        [ending(found[key], status) for key, status in ends.items()],
        accept_late=True,
        room=lambda _queues: taker or room(),
    )


async def family(
    db: psycopg.Connection,
    conn: Any,
    edges: Edges,
    *,
    ended: str = "",
    columns: Mapping[str, Any] | None = None,
    parent: Mapping[str, Any] | None = None,
    **how: Any,
) -> Family:
    """Spawn children that come after each other."""
    [number] = insert(db, **(parent or {}))
    [claim] = [each for each in await claims(conn) if each.id == number]
    plans: list[InsertPlan] = [plan(**(columns or {})) for _ in edges]
    options = {"quorum": None, "wake_on_failure": False, "timeout": None} | how
    after = Transition(claim, "awaiting_children", claim.step, attempt=0, advance=1)
    done = await schedule_children(
        conn,
        SCHEMA,
        after,
        Spawn(plans, "then", graph=graph_of(edges, ended=ended), **options),
        accept_late=True,
    )
    assert done is not None
    return Family(db, conn, number, dict(zip(edges, done.children, strict=True)))
