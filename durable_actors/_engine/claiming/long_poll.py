"""LongPoll: the server watches the idle queues of this node, so that rows of other processes start soon.

Owns       nothing that outlives it; it takes a client connection for one statement at a time.
Receives   a wake-up: a queue became idle that is not watched.
Sends      hints to the planners: the server saw a due row; which machines are paused. A hint that children are to be
           cancelled (`Node.cascade`).
Reads      wait_for_work.sql, on the client lane.
If it dies it is restarted; the feeders poll meanwhile.
Never      claims, keeps a snapshot for more than a second, or keeps a connection that a caller waits for.

A process that wakes up ten times a second to poll spends 1 % of a core on the wake-ups alone. One statement checks all
idle queues as often, inside the server, for up to a second.

A queue that becomes idle during a statement is watched by the next one. So statements are short while queues often
become idle, and a long one is cancelled for a new queue.

While this node claims rows or commits outcomes, each statement checks once, and this actor waits between two of them:
no snapshot is held meanwhile. A snapshot that is older than a claim keeps the previous version of the row on its page,
so that the commit of the row finds no room there: one idle queue beside a busy one cost 6 % more WAL and 3 % more of
the server's CPU per job, and 8 % and 12 % where machines of five steps ran ahead, which claim rarely and commit often.
The process is awake anyway. Dead index entries can make checks expensive; after two slow ones the server
waits again, because it knows what its checks cost. (One may be slow because this process or the server is busy.)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

import trio

from durable_actors._engine.claiming.idle_queues import IdleQueue, IdleQueues
from durable_actors._engine.claiming.planner import ClaimPlanner
from durable_actors._engine.claiming.stats_refresh import CHEAP_REFRESH
from durable_actors._engine.committing.queue import Commits
from durable_actors._engine.limits import QueueLimits
from durable_actors._engine.node import Node, logger
from durable_actors._engine.outage import TRANSIENT_ERRORS
from durable_actors._postgres.driver.connection import PgConn
from durable_actors._store.claim import wait_for_work
from durable_actors.otp import Actor

MAX_STATEMENT_SECONDS: Final = 0.9
"""Seconds per statement: its snapshot delays vacuum."""
MACHINE_PAUSED_SECONDS: Final = 0.4
"""The same while a machine is paused in one of the queues: its end tells that the machine was resumed."""
ANSWER_TIMEOUT: Final = 5.0
"""Seconds that an answer may be late; then the connection is closed."""
FIRST_PAUSE: Final = 0.1
LONGEST_PAUSE: Final = 5.0
"""Seconds until the next attempt after a failure, at most; the pause doubles."""
LONGEST_DETOUR: Final = 1.0
"""The same while callers need all connections."""
SLOW_CHECKS: Final = 2
"""So many short statements in a row that took long are followed by a long one."""


def can_long_poll(node: Node, queues: Mapping[str, QueueLimits]) -> bool:
    """Whether some queue wants to be watched, and clients have another connection beside the one that this uses."""
    if not any(limits.long_poll for limits in queues.values()):
        return False
    client = node.roles["client"]
    if client.name == "client" and client.size > 1:
        return True
    logger.info(
        "pool_size=%d leaves no connection for the long poll: idle queues are polled",
        node.config.pool_size,
    )
    return False


class LongPoll(Actor[object]):
    """The long poll of one node; a message says that a queue became idle."""

    def __init__(
        self, node: Node, idle: IdleQueues, planners: Mapping[str, ClaimPlanner], commits: Commits
    ) -> None:
        self._node = node
        self._idle = idle
        self._planners = planners
        self._commits = commits
        self._wake = trio.Event()
        self._statement: trio.CancelScope | None = None  # under way
        self._ends_at = self._every = 0.0  # of that one
        self._gave_way = False
        self._waited = False  # here, so the next statement checks at once
        self._slow = 0  # such statements in a row that took long
        self._last: list[IdleQueue] = []
        self._changed_at = -math.inf
        self._failures = 0
        self._not_before = -math.inf

    async def run(self) -> None:
        """Receive messages. A separate task waits for the server; it is cancelled when this actor stops."""
        self.nursery.start_soon(self._watch)
        while True:
            await self.mailbox.receive()
            self._wake.set()
            now = trio.current_time()
            if self._statement is not None and self._ends_at - now > self._every and self._idle.new(now):
                self._statement.cancel()

    async def _watch(self) -> None:
        while True:
            self._wake = trio.Event()
            now = trio.current_time()
            queues = self._idle.choose(now)
            if now < self._not_before:
                await trio.sleep_until(self._not_before)
            elif not queues:
                with trio.move_on_at(self._idle.next_at(now)):
                    await self._wake.wait()
            elif not self._waited and self._works() and self._slow < SLOW_CHECKS:
                await self._wait_here(queues)
            elif not self._node.pool.has_free(self._node.lane("client")):
                self._pause(LONGEST_DETOUR)
            else:
                try:
                    await self._look(queues)
                except TRANSIENT_ERRORS as exc:
                    logger.debug("long poll failed, so the feeders poll: %s", exc)
                    self._pause(LONGEST_PAUSE)

    def _pause(self, longest: float) -> None:
        pause = min(FIRST_PAUSE * 2.0 ** min(self._failures, 10), longest)
        self._failures += 1
        self._not_before = trio.current_time() + pause * (0.5 + 0.5 * self._node.random())

    def _works(self) -> bool:
        """Whether this node has claimed rows or committed outcomes since the last call."""
        claimed, committed = self._idle.take_claimed(), self._commits.take_activity()
        return claimed or committed

    async def _wait_here(self, queues: list[IdleQueue]) -> None:
        """Wait until the next check."""
        for queue in queues:
            queue.watched = True
        try:
            await trio.sleep(min(queue.every for queue in queues))
        finally:
            for queue in queues:
                queue.unwatched(seen=False)
        self._waited = True

    async def _look(self, queues: list[IdleQueue]) -> None:
        """Send one statement. The connection is returned after it, so that the pool can replace an old one."""
        node = self._node
        found: dict[str, int] | None = None
        self._gave_way = False
        try:
            with trio.CancelScope() as self._statement:
                async with node.pool.acquire(
                    node.lane("client"), within=MAX_STATEMENT_SECONDS + ANSWER_TIMEOUT, on_wait=self._give_way
                ) as conn:
                    if conn.pooled:  # the statement would occupy one of the pooler's few server processes
                        self._not_before = math.inf
                        return
                    found = await self._ask(conn, queues)
        finally:
            self._statement = None
            for queue in queues:
                queue.unwatched(seen=found is not None and queue.name not in found)
        if found is not None:
            self._failures = 0
            self._tell(found)
        elif self._gave_way:
            self._pause(LONGEST_DETOUR)

    async def _ask(self, conn: PgConn, queues: list[IdleQueue]) -> dict[str, int]:
        now = trio.current_time()
        if queues != self._last:
            self._last, self._changed_at = queues, now
        self._every = min(queue.every for queue in queues)
        waited, self._waited = self._waited, False
        patience = MAX_STATEMENT_SECONDS
        if waited:
            patience = 0.0
        elif len(queues) < self._idle.watchable:  # another queue may become idle: see above
            patience = min(max(now - self._changed_at, self._every), MAX_STATEMENT_SECONDS)
        if any(self._planners[queue.name].paused_machines for queue in queues):
            patience = min(patience, MACHINE_PAUSED_SECONDS)
        self._ends_at = now + patience
        for queue in queues:
            queue.watched = True
        names = [queue.name for queue in queues]
        seen = await wait_for_work(conn, self._node.owner.schema, names, every=self._every, patience=patience)
        if seen.cascades:
            self._node.cascade()
        for name in seen.tokens:
            self._planners[name].expect_token()
        for name in names:
            self._planners[name].see_paused_machines(seen.paused_machines.get(name, ()))
        self._slow = self._slow + 1 if waited and trio.current_time() - now >= CHEAP_REFRESH else 0
        return seen.due

    def _give_way(self) -> None:
        """A caller waits for a connection: cancel the statement, so that it gets this one."""
        self._gave_way = True
        if self._statement is not None:
            self._statement.cancel()

    def _tell(self, found: dict[str, int]) -> None:
        for name, priority in found.items():
            if self._idle.of(name).hit():
                self._planners[name].seen_due(priority)
