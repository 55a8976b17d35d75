"""Keeper: holds this node's session locks: the node's own, and the partition keys of its running steps.

Owns       one Postgres session for its whole life, on a lane of its own.
Receives   a wake-up: a feeder wants keys, or a key is idle. The requests are in `Keys`, which outlives it.
Sends      answers to the feeders that wait; cancellation to keyed steps when the session is lost; hints about rows
           whose key was busy.
Writes     no row on the session, only locks (lock_node, take_keys, free_keys); promote_siblings.sql on the claim lane.
If it dies its session ends and all keyed steps of this node are cancelled: other nodes can take their keys.
Never      claims, commits, renews or runs user code.

The session is lost when the server closes it, or when no answer came within the trust window (the server may have taken
this host for vanished and freed the locks). All keyed steps are cancelled at once. Each row is released when its task
has exited, attempt + 1, without waiting for its lease: the claim is still ours, only the key is not. A thread cannot be
cancelled: it stays in the table as owner, so that this node starts no other step of its key. A new session takes the
node's own lock again; until then, other nodes may come to regard this one as dead (`failure_detector`).

If an answer is overdue, the keeper waits a little longer before it closes the session: this process itself may have
been late, because it was stopped or blocked by user code. Closing a session that still exists would give the keys of
running threads to other nodes.
"""

from __future__ import annotations

from typing import Final

import trio

from durable_actors._engine.keys.locks import Keys, keys_of
from durable_actors._engine.keys.session import KeySession, trust_window
from durable_actors._engine.node import Node, logger
from durable_actors._engine.outage import TRANSIENT_ERRORS, Outage
from durable_actors._store.claim import promote_siblings
from durable_actors._wording import counted
from durable_actors.errors import StoreUnavailable
from durable_actors.otp import Actor

__all__ = ["Keeper", "Keys"]

LINGER: Final = 0.005
"""Seconds that a key stays locked without an owner. The next row of a key is usually picked by the node that ran the
last one, a round trip later: then the key costs no statement. Other nodes retry for longer (`BUSY_KEY_PAUSES`)."""
LOOK_INTERVAL: Final = 0.1
"""Seconds between checks of the socket (1 µs) while keyed steps run: they show that the server closed the session."""
MAX_OVERDUE_LOOKS: Final = 20
"""Checks, `LOOK_INTERVAL` seconds apart, of a session whose answer is overdue, before it is closed. Counted, not timed:
a process that is stopped again meanwhile makes no checks."""
OFFER_INTERVAL: Final = 0.25
"""Seconds between two searches for busy keys whose rows are to be offered again."""


class Keeper(Actor[object]):
    """The actor; a message is nothing but a wake-up."""

    def __init__(self, node: Node, keys: Keys) -> None:
        self._node = node
        self._keys = keys
        self._session: KeySession | None = None
        self._ended: KeySession | None = None  # closed, and not yet returned to the pool
        self._outage = Outage(node, "keeper")
        self._retry_at = 0.0

    async def init(self) -> None:
        """Open the session before feeders need it. If Postgres is unavailable, keep trying. `ConfigError`: a pooler."""
        try:
            await self._open()
        except TRANSIENT_ERRORS as exc:
            self._fail(exc)
        self.nursery.start_soon(self._watch)
        self.nursery.start_soon(self._offer)

    async def run(self) -> None:
        """Answer requests, unlock idle keys, confirm the session; sleep when there is nothing to do."""
        try:
            while True:
                try:
                    await self._turn()
                except TRANSIENT_ERRORS as exc:
                    self._fail(exc)
                with trio.move_on_at(self._next_turn()):
                    await self.mailbox.receive()
        finally:
            self._lose("the keeper has ended")
            await self._give_back()

    async def _turn(self) -> None:
        if self._session is None:
            if trio.current_time() < self._retry_at:
                return
            await self._open()
        session = self._session
        assert session is not None
        if not session.alive():
            raise StoreUnavailable("the server closed the session")
        await self._exchange(session)
        if trio.current_time() >= session.check_at:
            await session.check()

    def _next_turn(self) -> float:
        session, keys = self._session, self._keys
        if session is None:
            return self._retry_at
        if keys.pending:
            return 0.0
        now = trio.current_time()
        until = session.check_at
        if keys.table.owned:
            until = min(until, now + LOOK_INTERVAL)
        idle = keys.table.next_idle
        return until if idle is None else min(until, idle + LINGER)

    async def _exchange(self, session: KeySession) -> None:
        """Unlock idle keys and lock wanted ones, in one round trip."""
        keys, now = self._keys, trio.current_time()
        idle = keys.table.next_idle
        # When one key is due, unlock those that soon will be, too: a statement for each would cost more than it frees.
        free = keys.table.take_idle(now - LINGER / 2) if idle is not None and idle + LINGER <= now else []
        wanted = keys_of(keys.collect())
        if not free and not wanted:
            return
        here = keys.table.locked_among(wanted)
        exchanged = await session.exchange(free=free, take=[key for key in wanted if key not in here])
        if self._session is not session:
            raise StoreUnavailable("the session was given up meanwhile")
        keys.answer(exchanged.taken | here)
        keys.table.unlocked(kept=exchanged.kept, now=trio.current_time())

    # -- the session

    async def _open(self) -> None:
        await self._give_back()
        self._session = await KeySession.open(self._node)
        self._keys.opened()
        self._outage.ok()
        logger.debug("keeper: the session is server process %d", self._session.backend)

    def _fail(self, error: Exception) -> None:
        self._lose(f"the session with its partition key is gone: {error}")
        self._retry_at = trio.current_time() + self._outage.failed(error)

    async def _watch(self) -> None:
        """Doubt a session whose answer is overdue, even if a statement still waits for it."""
        window = trust_window(self._node.config.lease_ttl, self._node.config.dead_after)
        while True:
            session = self._session
            until = trio.current_time() + window / 2 if session is None else session.trusted_until
            await trio.sleep_until(until)
            session = self._session
            if session is not None and trio.current_time() >= session.trusted_until:
                await self._on_overdue(session, f"could not be confirmed within {window:g} s")

    async def _on_overdue(self, session: KeySession, why: str) -> None:
        """Cancel keyed steps, because their locks may be gone; close the session only if it still does not answer."""
        self._keys.up = False
        self._interrupt(f"the session with its partition key {why}")
        self.address.cast(None)
        for _ in range(MAX_OVERDUE_LOOKS):
            await trio.sleep(LOOK_INTERVAL)
            if self._session is not session:
                return
            if trio.current_time() < session.trusted_until:
                logger.info("keeper: the session %s, but it is alive: this process was late", why)
                self._keys.opened()
                return
        self._lose(f"the session with its partition key {why}")
        self.address.cast(None)

    def _lose(self, why: str) -> None:
        """The locks are gone, or may be: close the session and cancel every keyed step."""
        session, self._session = self._session, None
        if session is None:
            return
        session.close()
        self._ended = session
        self._keys.lose()
        self._interrupt(why)

    def _interrupt(self, why: str) -> None:
        """Cancel every running keyed step, and free the keys of claims whose step has not begun."""
        cancelled = 0
        self._keys.losses += 1
        for active in self._node.claims.live():
            if active.claim.partition_key is None:
                continue
            if active.between_steps:
                # No code of its step has run: its feeder takes the key again, or releases the row.
                self._keys.free(active.claim)
                self._node.notify(active.claim.queue)
            else:
                cancelled += self._node.claims.interrupt(active, why)
        if cancelled:
            logger.warning("keeper: %s with a partition key cancelled: %s", counted(cancelled, "step"), why)

    async def _give_back(self) -> None:
        ended, self._ended = self._ended, None
        if ended is not None:
            await ended.end()

    # -- rows whose key was busy

    async def _offer(self) -> None:
        """Offer the rows of busy keys again, each key after a growing pause."""
        node, busy = self._node, self._keys.busy
        outage = Outage(node, "keeper (busy keys)")
        while True:
            await trio.sleep(OFFER_INTERVAL)
            due = busy.due(trio.current_time())
            if not due:
                continue
            try:
                async with node.pool.acquire(node.lane("claim")) as conn:
                    promoted = await promote_siblings(conn, node.owner.schema, sorted(due))
            except TRANSIENT_ERRORS as exc:
                await trio.sleep(outage.failed(exc))
            else:
                outage.ok()
                busy.offered(due, trio.current_time())
                node.offer(promoted)
