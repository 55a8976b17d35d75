"""Claim one row, for `execute_next`. There is no feeder: nothing is remembered between two calls."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Final, TypeVar

import trio

from durable_actors._engine.claiming.cursor import HEAD
from durable_actors._engine.claiming.feeder import pick_event, waits_ended
from durable_actors._engine.claiming.planner import MAX_PICK
from durable_actors._engine.lanes import answer_patience
from durable_actors._engine.node import Node
from durable_actors._engine.outage import TRANSIENT_ERRORS
from durable_actors._postgres.driver.connection import PgConn
from durable_actors._postgres.pool.lock_retry import retry_while_locked
from durable_actors._store.claim import PickFrom, QueueShape, pick_instances, read_queue, release_claims
from durable_actors._store.lease import read_orphans
from durable_actors._store.limits import read_thawed
from durable_actors._store.rows import Claim, PickResult, Promoted
from durable_actors._store.signal import expire_awaits
from durable_actors.errors import CommitUnknown, StoreUnavailable

T = TypeVar("T")

UNDO_TIME: Final = 10.0
"""Seconds for releasing what a call has claimed and does not run."""
FIRST_PAUSE: Final = 0.005
LONGEST_PAUSE: Final = 0.2
"""Seconds between two attempts to release a row that is locked."""


async def claim_one(node: Node, queue: str, only: Sequence[int] | None = None) -> Claim | None:
    """Claim the most urgent due row of a queue that this process can run; None if there is none.

    Rows that the pick holds or shelves leave its index. Rows that it leaves for later are passed by. Throttled rows
    whose token has come are given to the pick by id, which decides.
    """
    shape, thawed = await on_claim_lane(node, partial(_look, node, queue))
    shelved = [step for step in shape.shelved if step in node.catalog.names]
    places: dict[int, tuple[str, int]] = {}
    ids = thawed if only is None else list(only)
    seen: set[int] = set()
    while shape.priorities or shelved or (thawed and ids):
        priorities = sorted(shape.priorities) if only is None else []
        starts = [places.get(priority, HEAD) for priority in priorities]
        begin = PickFrom(
            priorities=priorities,
            eligible_ats=[at for at, _ in starts],
            ids=[number for _, number in starts],
            extras=ids,
            shelved=shelved if only is None else (),
        )
        picked = await _pick(node, queue, begin)
        if picked.claims:
            return picked.claims[0]
        new = {row.id for row in picked.seen} - seen
        if not new:
            return None
        seen |= new
        places |= picked.positions
        ids = [number for number in ids if number not in seen]
        if shelved and any(row.postponed for row in picked.seen):
            shelved = []  # one of them may be left again and again, and hide the rows behind it
    return None


async def _look(node: Node, queue: str, conn: PgConn) -> tuple[QueueShape, list[int]]:
    """Read what the queue has, and throttled rows whose token has come; wake instances whose deadline passed."""
    schema = node.owner.schema
    shape = await read_queue(conn, schema, queue)
    if shape.next_deadline is not None and shape.next_deadline <= 0:
        expired = await expire_awaits(conn, schema, queue, limit=MAX_PICK)
        if expired:
            waits_ended(node, expired)
        shape = await read_queue(conn, schema, queue)
    if shape.next_token is None or shape.next_token > 0:
        return shape, []
    return shape, (await read_thawed(conn, schema, queue, limit=MAX_PICK)).ids


async def _pick(node: Node, queue: str, begin: PickFrom) -> PickResult:
    """Pick one row. Not cancelled while the statement is under way: nobody would know what it has claimed."""
    patience = answer_patience(node.owner.lease_ttl)
    try:
        async with node.pool.acquire(node.lane("claim")) as conn:
            asked = trio.current_time()
            with trio.CancelScope(shield=True, deadline=asked + patience):
                picked = await pick_instances(
                    conn, node.owner, queue=queue, limit=1, known=node.catalog.array, begin=begin, now=asked
                )
                if node.telemetry.active:
                    seconds = trio.current_time() - asked
                    node.telemetry.emit(pick_event(queue, picked, wanted=1, seconds=seconds))
                return picked
            raise CommitUnknown(f"Postgres did not answer a pick within {patience:g} s")
    except StoreUnavailable:
        await undo_pick(node, queue)
        raise


async def undo_pick(node: Node, queue: str) -> None:
    """Release what the node may have claimed, if Postgres answers. Otherwise its lease ends the claim.

    A row that is locked is not released: a pick of its key's siblings locks it for a moment. So look until none is
    left.
    """
    owner, schema, pause = node.owner.name, node.owner.schema, FIRST_PAUSE
    with trio.move_on_after(UNDO_TIME, shield=True), contextlib.suppress(*TRANSIENT_ERRORS):
        while True:
            async with node.pool.acquire(node.lane("claim")) as conn:
                claims = await read_orphans(conn, schema, owner=owner, queue=queue, known=[])
                if not claims:
                    return
                released = await release_claims(conn, schema, claims, attempts=0)
            node.offer([*(Promoted(number, queue) for number in released.runnable), *released.offered])
            if len(released.ids) == len(claims):
                return
            await trio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)


async def on_claim_lane(node: Node, call: Callable[[PgConn], Awaitable[T]]) -> T:
    """Run a call of a statement that may be refused for a lock; it is tried again."""
    return await retry_while_locked(node.pool, node.lane("claim"), call)
