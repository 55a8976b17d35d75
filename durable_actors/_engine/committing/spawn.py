"""Scheduling children: one transaction per parent, on a client connection, never in a group of the flusher."""

from __future__ import annotations

from typing import Final

import psycopg
import trio

from durable_actors._engine.committing.flusher import LOCK_PAUSE
from durable_actors._engine.committing.verdicts import STALE, Overruled, Refused, Verdict, blames_data
from durable_actors._engine.lanes import answer_patience
from durable_actors._engine.node import Node
from durable_actors._engine.outage import TRANSIENT_ERRORS, Outage
from durable_actors._postgres.driver.failures import RETRYABLE
from durable_actors._store.children import Spawn, schedule_children
from durable_actors._store.claim import read_claims
from durable_actors._store.commit import overruled_by, was_committed
from durable_actors._store.rows import Transition
from durable_actors.errors import CommitUnknown, Duplicate

SLOWEST: Final = 500
"""Children per second that even an overloaded server inserts; ours did 30,000."""
LONGEST_WAIT: Final = 2.0
"""Seconds between two attempts at a lock, at most. Each attempt occupies a connection of the client lane for 100 ms.
The lane has few connections, and many parents may wait for one lock."""


async def spawn_children(node: Node, transition: Transition, spawn: Spawn) -> Verdict:
    """Insert the children and park the parent, atomically. Retries while Postgres is unavailable, until the lease ends.

    Cancelled: all or nothing was written; the row shows which.
    """
    outage = Outage(node, f"spawning children of instance {transition.claim.id}")
    try:
        return await _spawn(node, transition, spawn, outage)
    finally:
        outage.close()


async def _spawn(node: Node, transition: Transition, spawn: Spawn, outage: Outage) -> Verdict:
    unknown, pause = False, LOCK_PAUSE
    accept_late = node.config.late_commit == "accept"
    # The lease is renewed meanwhile: without a limit, a silent connection would block the step until TCP gives up.
    patience = answer_patience(node.owner.lease_ttl) + len(spawn.plans) / SLOWEST
    while True:
        try:
            async with node.pool.acquire(node.lane("client"), within=patience) as conn:
                done = await schedule_children(
                    conn, node.owner.schema, transition, spawn, accept_late=accept_late, node=node.owner.name
                )
                asked = None
                if done is None:
                    # The row shows whether the first attempt was committed, or a request to cancel it overrules this.
                    rows = await read_claims(conn, node.owner.schema, [transition.claim.id])
                    row = rows.get(transition.claim.id)
                    done = was_committed(transition, row) if unknown else None
                    asked = overruled_by(transition, row)
        except TRANSIENT_ERRORS as exc:
            if isinstance(exc, psycopg.Error) and blames_data(exc):
                return Refused(exc)
            unknown = unknown or isinstance(exc, CommitUnknown)
            # Wait for a lock without the connection, so that others can use it.
            locked = isinstance(exc, psycopg.Error) and exc.sqlstate in RETRYABLE
            await trio.sleep(pause if locked else outage.failed(exc))
            pause = min(pause * 2, LONGEST_WAIT)
        except Duplicate as exc:  # a child with on_duplicate="raise"
            return Refused(exc)
        else:
            outage.ok()
            if done is None:
                return STALE if asked is None else Overruled(asked)
            node.offer(list(done.offered))
            return done
