"""The one Postgres session that holds a node's locks: the node's own, and those of its running keyed steps.

It is trusted for a while after each answer, counted from when the statement was sent; see `trust_window`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Final

import attrs
import psycopg
import trio

from durable_actors._engine.node import Node, logger
from durable_actors._postgres.driver.connection import PgConn
from durable_actors._postgres.pool.pool import AcquireContext
from durable_actors._store.key import check_session, exchange_keys, lock_node, read_held_keys
from durable_actors.errors import ConfigError, StoreUnavailable

SECOND_PROCESS: Final = 2.0
"""Seconds that a pooler may take to provide a second server process, at the start."""


SHORTEST_TRUST: Final = 0.3
"""Seconds that `dead_after` leaves of the trust, at least: a shorter pause of this process must not end keyed steps."""


def trust_window(lease_ttl: float, dead_after: float) -> float:
    """Seconds for which an answer of the session is trusted. Pure.

    Our keyed steps must have stopped before another node can have both our key and our row:

    * The server frees the locks of a host that has vanished when its keepalives go unanswered (`lanes`: idle, then two
      probes, a quarter of a lease each, in whole seconds): three quarters of a lease after the last message from us.
      Half a lease leaves the steps time to end.
    * A server that restarts or fails over, or an operator, ends the session at any time, and if we are cut off we do
      not learn it. Our row is reaped when our lock was seen free for `dead_after` (`failure_detector`): that long after
      our last answer was asked for, at the earliest. Three quarters of it leave the steps time to end.
    """
    keepalive = max(1, int(lease_ttl / 4))
    return min(lease_ttl / 2, keepalive * 2.5, max(dead_after * 0.75, SHORTEST_TRUST))


@attrs.frozen
class Exchanged:
    """The result of an exchange."""

    taken: set[str]
    """Of the keys to take, those that are locked now."""
    kept: set[str]
    """Of the keys to free, those that are still locked."""


class KeySession:
    """A session, from its first lock until it is closed. One task at a time uses it."""

    def __init__(self, node: Node, lease: AcquireContext, conn: PgConn) -> None:
        self._node = node
        self._lease: AcquireContext | None = lease
        self._conn = conn
        self._backend = 0
        self._locked = False  # it has the node's own lock
        self._trust = trust_window(node.config.lease_ttl, node.config.dead_after)
        self.trusted_until = trio.current_time() + self._trust
        """On Trio's clock; moves with every answer."""
        self.check_at = self.trusted_until
        """When to confirm it, even if there is nothing to lock or unlock."""

    @classmethod
    async def open(cls, node: Node) -> KeySession:
        """Open it and take the node's lock. `ConfigError`: a pooler shares the session with others.

        Cancelled or failed: nothing stays open.
        """
        lease = node.pool.acquire(node.lane("session"))
        session = cls(node, lease, await lease.__aenter__())
        try:
            with trio.move_on_after(node.config.lease_ttl / 2) as scope:  # no step depends on it yet
                await session._begin()
            if scope.cancelled_caught:
                raise StoreUnavailable("the new session did not answer in time")  # noqa: TRY301 - ended below, too
        except BaseException:
            await session.end()
            raise
        return session

    @property
    def backend(self) -> int:
        """The pid of the server process."""
        return self._backend

    def alive(self) -> bool:
        """Whether it is open, as far as that shows without a round trip (about 1 µs)."""
        return self._conn.alive()

    def close(self) -> None:
        """Close it; the server frees its locks. A statement under way fails."""
        self._conn.close()

    async def end(self) -> None:
        """Close it and return it to the pool. Never waits; safe to repeat."""
        self._conn.close()  # first: otherwise the pool would keep the session, and with it the locks
        lease, self._lease = self._lease, None
        if lease is not None:
            await lease.__aexit__(None, None, None)

    async def exchange(self, *, free: Sequence[str], take: Sequence[str]) -> Exchanged:
        """Unlock and lock keys in one round trip. `StoreUnavailable`: the session is gone, and all locks with it."""
        if not free and not take:
            return Exchanged(set(), set())
        sent = trio.current_time()
        schema = self._node.owner.schema
        try:
            taken, unknown = await exchange_keys(self._conn, schema, free=free, take=take)
        except (psycopg.Error, StoreUnavailable) as exc:
            if self._conn.closed:
                raise
            # Refused, e.g. "out of shared memory" because all sessions together have too many locks. Keys that were
            # locked or unlocked before the error stay so, despite the rollback: read the lock table.
            logger.warning("keeper: Postgres refused to lock %d keys: %s", len(take), exc)
            held = await read_held_keys(self._conn, schema, [*free, *take])
            taken, kept = held.intersection(take), held.intersection(free)
        else:
            kept = set[str]()
            if unknown:
                raise _pooled(f"{len(unknown)} locks of this session were not its own, e.g. {min(unknown)!r}")
        self._confirmed(sent)
        return Exchanged(taken, kept)

    async def check(self) -> None:
        """Confirm that it is open and still the same server process. Takes the node's lock if it lacks it."""
        node = self._node
        sent = trio.current_time()
        try:
            state = await check_session(self._conn, node.owner.schema, node.owner.name)
        except (psycopg.Error, StoreUnavailable) as exc:
            if self._conn.closed or not self._backend:
                raise
            # Refused, e.g. by a statement_timeout. Closing the session would free its locks: the trust window decides.
            logger.warning("keeper: Postgres refused to confirm the session: %s", exc)
            self.check_at = sent + self._trust / 6
            return
        if state.backend != self._backend:
            raise _pooled(f"it was server process {self._backend} and is {state.backend} now")
        if self._locked and not state.locked:
            raise _pooled("the lock that it had taken is gone")
        if not self._locked:
            await self._lock_node()
        self._confirmed(sent)
        self.check_at = sent + self._trust / 3

    def _confirmed(self, sent: float) -> None:
        self.trusted_until = sent + self._trust

    async def _begin(self) -> None:
        if self._conn.pooled:
            await self._test_pooler()  # before taking a lock: it could stay in another client's session
        self._backend = await self._lock_node()
        await self.check()

    async def _lock_node(self) -> int:
        node = self._node
        state = await lock_node(self._conn, node.owner.schema, node.owner.name)
        if self._backend and state.backend != self._backend:
            raise _pooled(f"it was server process {self._backend} and is {state.backend} now")
        self._locked = state.locked
        if not state.locked:
            # Our last session is cut off, and the server has not noticed it. Until we get the lock, it proves our life.
            logger.info("keeper: an earlier session of %s still has its lock", node.owner.name)
        return state.backend

    async def _test_pooler(self) -> None:
        """There is a pooler between us and the server. In session mode it does no harm.

        In transaction mode it gives our server process to the next client that asks: open a second connection that
        keeps a process in a transaction, and see whether ours has changed.
        """
        node = self._node
        before = await self._process(self._conn)
        async with self._open_another() as other, other.transaction():
            await self._process(other)
            with trio.move_on_after(SECOND_PROCESS) as scope:
                now = await self._process(self._conn)
                if now != before:
                    raise _pooled(f"it was server process {before} and is {now} now")
        if scope.cancelled_caught:
            raise _pooled(f"it waited for another client's transaction for {SECOND_PROCESS:g} s")
        logger.info("keeper: %s reaches Postgres through a pooler in session mode", node.owner.name)

    async def _process(self, conn: PgConn) -> int:
        owner = self._node.owner
        return (await check_session(conn, owner.schema, owner.name)).backend

    @asynccontextmanager
    async def _open_another(self) -> AsyncGenerator[PgConn]:
        """A second connection, by the same route."""
        dsn = self._node.roles["session"].dsn
        if dsn is None:
            async with self._node.pool.acquire(self._node.lane("client")) as conn:
                yield conn
        else:
            conn = await PgConn.open(dsn)
            try:
                yield conn
            finally:
                conn.close()


def _pooled(why: str) -> ConfigError:
    return ConfigError(
        "dsn goes through a pooler that shares sessions out between transactions (PgBouncer in transaction mode), "
        f"where session locks protect nothing: {why}. Set session_dsn to a direct connection to Postgres",
        option="session_dsn",
    )
