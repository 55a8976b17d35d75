"""Watch: has the server look for work of a queue that has none, so that this process need not wake for each look.

With a poll interval of 20 ms a process at rest took 3 % of a core, nearly all of it to wake up fifty times a second: a
bare `trio.sleep(0.02)` in a loop takes half of that. One statement looks somewhat more often on the server, a second at
a time, at a sixth of what the polls took together. The wait takes a client connection, so it is used where polls are as
quick as that, enough connections are there, and no pooler lends them. Otherwise, and when it fails, the feeder polls as
it always does.
"""

from __future__ import annotations

import math
from typing import Final

import trio

from durable_actors._engine.demand import QueueLimits
from durable_actors._engine.node import Node, logger
from durable_actors._engine.outage import TROUBLE
from durable_actors._store.claim import wait_for_work
from durable_actors.otp import Address

QUICK: Final = 0.1
"""Seconds: polls as frequent as this, or more, are the server's."""
EAGER: Final = 0.7
"""So much of the interval lies between looks: to pick and start what was found takes some of it, too."""
PATIENCE: Final = 1.0
"""Seconds per statement. Vacuum waits for its snapshot meanwhile."""
ANSWER: Final = 5.0
"""Seconds that an answer may be late; then the connection is given up."""
PAUSE: Final = 5.0
"""Seconds until the next attempt after one that failed."""


class Watch:
    """The watch over one queue. A feeder that finds nothing begins it; it ends when there is something."""

    def __init__(self, node: Node, queue: str, limits: QueueLimits) -> None:
        self._node = node
        self._queue = queue
        self._interval = limits.max_poll_interval
        self._on = False
        self._not_before = 0.0
        self._looks = False  # the server does, now

    def begin(self, nursery: trio.Nursery, feeder: Address[object]) -> float:
        """Have the server look, unless it does, or should not. Returns for how many seconds the feeder may rest."""
        client = self._node.roles["client"]
        spare = client.name != "shared" and client.size > len(self._node.feeders)
        if self._interval <= QUICK and spare and not self._on and trio.current_time() >= self._not_before:
            self._on = True
            nursery.start_soon(self._run, feeder)
        return PATIENCE if self._looks else 0.0

    async def _run(self, feeder: Address[object]) -> None:
        found = False
        try:
            while not (found or self._node.draining) and trio.current_time() >= self._not_before:
                found = await self._look()
        except TROUBLE as exc:
            self._not_before = trio.current_time() + PAUSE
            logger.debug("queue %r: the server cannot watch it, so it is polled: %s", self._queue, exc)
        finally:
            self._on = False
        if found:
            # Seen on offer: the feeder picks, and need not look before that.
            self._node.poke(self._queue)
        else:
            feeder.cast(None)

    async def _look(self) -> bool:
        """One wait; tell whether there is work.

        The connection goes back after each: a client in line has it next, and one that is too old, or of a server that
        is the primary no more, is replaced.
        """
        node = self._node
        try:
            async with node.pool.acquire(node.lane("client"), within=PATIENCE + ANSWER) as conn:
                if conn.pooled:  # it would keep one of the pooler's few server processes to itself
                    self._not_before = math.inf
                    return False
                self._looks = True
                every = self._interval * EAGER
                return await wait_for_work(
                    conn, node.owner.schema, self._queue, every=every, patience=PATIENCE
                )
        finally:
            self._looks = False
