"""Control: learns what commands ask of this node, for the instances that it runs, and which of its queues are paused.

Owns       nothing: requests are in their rows, and go to `ActiveClaims`, which outlives it.
Receives   nothing; a message makes it check at once whether a look is due.
Sends      requests to their claims (`ActiveClaims.request`), pauses to the planners.
Reads      read_requests.sql and read_pauses.sql on the heartbeat lane: once a second, while a step of this node has
           been running for one.
If it dies it is restarted, and looks again.
Never      writes, waits for a lock, or looks for the sake of short steps: a node at rest and a node whose steps all end
           within a second send no statement.

So a node learns of a request within about a second, whether all its slots are busy or not. A step that ends sooner is
not worth a look: its commit meets the request in the row. It learns of a paused queue as soon: claims that wait for a
slot are released before the slots are free. With short steps, the refresh after the next pick tells it.

The heartbeat lane always has a connection of its own, also with the smallest pool, and no call of a user is ever on it:
its statements are short, and none waits for a lock for more than 100 ms. A look is one page of an index, so a renewal
waits for it for less than a millisecond.
"""

from __future__ import annotations

import math
from typing import Final

import trio

from durable_actors._engine.node import Node
from durable_actors._engine.outage import TRANSIENT_ERRORS, Outage
from durable_actors._store.claim import read_queue_pauses, read_requests
from durable_actors.otp import Actor

LONG_STEP: Final = 1.0
"""Seconds for which a step must have been running before this node looks for its sake."""
LOOK_EVERY: Final = 1.0
"""Seconds from one look to the next; also between two checks whether a step has become that old."""


def next_look(oldest: float, looked_at: float) -> float:
    """When the next look is due. Pure.

    `oldest` is when the step that has been running for longest began; infinity if none runs.
    """
    return max(looked_at + LOOK_EVERY, oldest + LONG_STEP)


class Control(Actor[object]):
    """The actor."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._outage = Outage(node, "control")

    async def run(self) -> None:
        """Look while there is something to look for."""
        looked_at = -math.inf
        while True:
            now = trio.current_time()
            oldest = self._oldest_step()
            if oldest + LONG_STEP > now:
                self._outage.close()  # the steps for which it failed to look have ended
            due = next_look(oldest, looked_at)
            if due > now:
                with trio.move_on_at(min(due, now + LOOK_EVERY)):
                    await self.mailbox.receive()
                continue
            looked_at = now
            try:
                await self._look()
            except TRANSIENT_ERRORS as exc:
                looked_at = trio.current_time() + self._outage.failed(exc) - LOOK_EVERY
            else:
                self._outage.ok()

    def _oldest_step(self) -> float:
        """When the step that has been running for longest began: 0.2 µs per claim."""
        tasks = (active.task for active in self._node.claims.all())
        return min((task.since for task in tasks if task is not None), default=math.inf)

    async def _look(self) -> None:
        node = self._node
        async with node.pool.acquire(node.lane("heartbeat")) as conn:
            found = await read_requests(conn, node.owner.schema, node.owner.name)
            pauses = await read_queue_pauses(conn, node.owner.schema, [*node.queues])
        now = trio.current_time()
        for queue, paused in pauses.items():
            node.queues[queue].learn_pauses(paused, now)
        for claim_id, request in found.items():
            node.claims.request(claim_id, request)
