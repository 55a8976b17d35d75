"""The other loops of a small node: flusher, heartbeat, reaper, keeper. They act; the product's parts say what to do."""

from __future__ import annotations

from typing import TYPE_CHECKING

import psycopg
import trio
from durable_actors._engine.committing.flusher import LOCK_PAUSE
from durable_actors._engine.committing.queue import Entry, waiting
from durable_actors._engine.committing.verdicts import STALE
from durable_actors._engine.keys.keeper import LINGER, OFFER_EVERY
from durable_actors._engine.keys.locks import keys_of
from durable_actors._engine.keys.session import trust_window
from durable_actors._engine.maintenance.failure_detector import Watch, judge_owners, wait_for_next
from durable_actors._engine.outage import TRANSIENT_ERRORS, Outage
from durable_actors._store.claim import promote_siblings, read_claims, release_claims
from durable_actors._store.commit import commit_outcomes, was_committed
from durable_actors._store.key import check_session, exchange_keys, lock_node
from durable_actors._store.lease import OwnerState, read_owners, reap_claims, renew_leases, sweep_keys
from durable_actors._store.rows import Committed
from durable_actors.errors import CommitUnknown, StoreUnavailable

if TYPE_CHECKING:
    from tests.simulation.small.host import Host


class Flusher:
    """Commits outcomes in groups, gives claims back."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self._outage = Outage(host.node, "flusher")

    async def run(self) -> None:
        commits = self.host.commits
        while True:
            if not commits.entries and not commits.releases:
                await self.host.outcomes.wait(float("inf"))
            batch = commits.take()
            try:
                await self._flush(batch)
            finally:
                commits.entries.extendleft(reversed(waiting(batch)))
            await self._release()

    async def _flush(self, batch: list[Entry]) -> None:
        while batch := waiting(batch):
            try:
                committed = await self._commit(batch)
                await self._resolve(batch, committed)
            except psycopg.errors.LockNotAvailable:
                await trio.sleep(LOCK_PAUSE)
            except StoreUnavailable as exc:
                await self._away(batch, exc)
            except psycopg.Error as exc:
                await trio.sleep(self._outage.failed(exc))
            else:
                self._outage.ok()
                for entry in batch:
                    entry.answer(committed.get(entry.transition.claim.id, STALE))

    async def _away(self, batch: list[Entry], error: StoreUnavailable) -> None:
        for entry in batch:
            entry.unknown = entry.unknown or isinstance(error, CommitUnknown)
        await trio.sleep(self._outage.failed(error))

    async def _commit(self, batch: list[Entry]) -> dict[int, Committed]:
        node = self.host.node
        late = node.config.late_commit == "accept"
        async with node.pool.acquire("commit") as conn:
            changes = [entry.transition for entry in batch]
            flushed = await commit_outcomes(conn, node.owner.schema, changes, accept_late=late)
        node.offer(flushed.offered)
        return flushed.committed

    async def _resolve(self, batch: list[Entry], committed: dict[int, Committed]) -> None:
        """What was repeated, and touched no row: the row tells whether it was done the first time."""
        node = self.host.node
        unsure = [e.transition for e in batch if e.unknown and e.transition.claim.id not in committed]
        if not unsure:
            return
        async with node.pool.acquire("commit") as conn:
            rows = await read_claims(conn, node.owner.schema, [each.claim.id for each in unsure])
        for each in unsure:
            found = was_committed(each, rows.get(each.claim.id))
            if found is not None:
                committed[each.claim.id] = found

    async def _release(self) -> None:
        node, releases = self.host.node, self.host.commits.releases
        while releases:
            how, claims = releases.popitem()
            try:
                async with node.pool.acquire("commit") as conn:
                    _, promoted = await release_claims(
                        conn,
                        node.owner.schema,
                        claims,
                        attempts=how.attempts,
                        interruptions=how.interruptions,
                        hold=how.hold,
                    )
            except BaseException as exc:
                releases.setdefault(how, []).extend(claims)
                if not isinstance(exc, TRANSIENT_ERRORS):
                    raise
                await trio.sleep(self._outage.failed(exc))
                return
            self._outage.ok()
            node.offer(promoted)
            if not how.hold:
                for claim in claims:
                    node.poke(claim.queue, number=claim.id)


class Heartbeat:
    """Renews the claims; trust counts from when a renewal was sent."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self._outage = Outage(host.node, "heartbeat")

    async def run(self) -> None:
        interval = self.host.node.owner.lease_ttl / 3
        pause = interval
        while True:
            await trio.sleep(pause)
            try:
                await self.beat()
            except TRANSIENT_ERRORS as exc:
                pause = min(self._outage.failed(exc), interval)
            else:
                self._outage.ok()
                pause = interval

    def trusted_until(self, sent: float) -> float:
        return sent + self.host.node.owner.lease_ttl

    async def beat(self) -> None:
        node, host = self.host.node, self.host
        claims = node.claims.live()
        if not claims:
            return
        async with node.pool.acquire("heartbeat") as conn:
            sent = host.now()
            renewed = await renew_leases(
                conn, node.owner.schema, [held.claim for held in claims], lease_ttl=node.owner.lease_ttl
            )
            until = self.trusted_until(sent)
            node.claims.extend((held for held in claims if held.claim.claim_id in renewed), until)
            missing = [held for held in claims if held.claim.claim_id not in renewed]
            if missing:
                rows = await read_claims(conn, node.owner.schema, [held.claim.id for held in missing])
                for held in missing:
                    row = rows.get(held.claim.id)
                    if row is None or row.claim_id != held.claim.claim_id:
                        node.claims.lose(held, "its claim is another's")


class Reaper:
    """Takes back what the dead and the silent have left."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self._watch = Watch()
        self._outage = Outage(host.node, "reaper")
        self._sweep_at = 0.0

    async def run(self) -> None:
        while True:
            try:
                wait = await self.round()
            except TRANSIENT_ERRORS as exc:
                wait = self._outage.failed(exc)
            else:
                self._outage.ok()
            await trio.sleep(wait)

    async def round(self) -> float:
        node, host = self.host.node, self.host
        while True:
            owners, dead, next_look = await self._look()
            if not dead and not any(each.soonest_expiry <= 0 for each in owners):
                break
            async with node.pool.acquire("reap") as conn:
                reaped, promoted = await reap_claims(
                    conn, node.owner.schema, limit=100, dead=dead, max_crashes=None
                )
            node.offer(promoted)
            for each in reaped:
                node.poke(each.queue, number=each.id)
            if not reaped:
                break
        if host.plan_has_keys and host.now() >= self._sweep_at:
            await self._sweep()
            self._sweep_at = host.now() + node.config.reap_interval
        wait = wait_for_next(
            owners, next_look=next_look, now=host.now(), reap_interval=node.config.reap_interval
        )
        return wait + 0.02 * node.random()

    async def _look(self) -> tuple[list[OwnerState], dict[str, float], float | None]:
        node, host = self.host.node, self.host
        async with node.pool.acquire("reap") as conn:
            asked = host.now()
            owners = await read_owners(conn, node.owner.schema)
            session = (conn.opened_at, owners[0].backend if owners else 0)
        verdict = judge_owners(
            self._watch, owners, me=node.owner.name, session=session, asked=asked, seen=host.now(),
            dead_after=node.config.dead_after,
        )  # fmt: skip
        self._watch = verdict.watch
        dead = {each.owner: each.latest_expiry for each in owners if each.owner in verdict.dead}
        return owners, dead, verdict.next_look

    async def _sweep(self) -> None:
        node = self.host.node
        async with node.pool.acquire("reap") as conn:
            stuck, _ = await sweep_keys(conn, node.owner.schema, after="", limit=100)
            if stuck:
                node.offer(await promote_siblings(conn, node.owner.schema, stuck))


class Keeper:
    """Holds the session with the node's lock and the keys of its steps. Without it, nothing with a key may run."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self._outage = Outage(host.node, "keeper")
        self._trusted = 0.0

    async def run(self) -> None:
        while True:
            error: Exception
            try:
                await self._hold()
            except TRANSIENT_ERRORS as exc:
                error = exc
            finally:
                self._lose()
                self.host.keeps.set()
            await trio.sleep(self._outage.failed(error))

    async def _hold(self) -> None:
        """Answer, unlock, confirm, until the session is gone."""
        host, node = self.host, self.host.node
        window = trust_window(node.owner.lease_ttl)
        async with node.pool.acquire("session") as conn:
            try:
                self._trusted = trio.current_time() + window
                await self._in_time(lock_node(conn, node.owner.schema, node.owner.name))
                host.keys.opened()
                host.keeps.set()
                self._outage.ok()
                while True:
                    await host.locks.wait(self._pause(window))
                    if not conn.alive():  # type: ignore[attr-defined]
                        raise StoreUnavailable("the server closed the session")
                    await self._in_time(self._turn(conn, window))
                    await self._offer()
            finally:
                conn.close()  # or the pool would keep the locks

    def _pause(self, window: float) -> float:
        keys, now = self.host.keys, trio.current_time()
        if keys.pending:
            return 0.0
        idle = keys.table.next_idle
        until = self._trusted - 0.2 * window - now
        until = max(until if idle is None else min(until, idle + LINGER - now), 0.0)
        return min(until, OFFER_EVERY) if len(keys.busy) or keys.table.owned else until

    async def _in_time(self, call: object) -> None:
        with trio.move_on_at(self._trusted) as scope:
            await call  # type: ignore[misc]
        if scope.cancelled_caught:
            raise StoreUnavailable("no answer within the trust window")

    async def _turn(self, conn: object, window: float) -> None:
        keys, owner, sent = self.host.keys, self.host.node.owner, trio.current_time()
        free = keys.table.take_idle(sent - LINGER / 2)
        wanted = keys_of(keys.collect())
        here = keys.table.locked_among(wanted)
        take = [key for key in wanted if key not in here]
        if not free and not wanted:
            if sent < self._trusted - 0.2 * window - LINGER:
                return
            state = await check_session(conn, owner.schema, owner.name)  # type: ignore[arg-type]
            if not state.locked:  # our last session had it, and the server had not noticed its end
                await lock_node(conn, owner.schema, owner.name)  # type: ignore[arg-type]
            self._trusted = sent + window
            return
        taken, kept = await exchange_keys(conn, owner.schema, free=free, take=take)  # type: ignore[arg-type]
        keys.answer(taken | here)
        keys.table.unlocked(kept=kept, now=trio.current_time())
        self._trusted = sent + window

    async def _offer(self) -> None:
        node, busy = self.host.node, self.host.keys.busy
        due = busy.due(trio.current_time())
        if not due:
            return
        try:
            async with node.pool.acquire("client") as conn:
                promoted = await promote_siblings(conn, node.owner.schema, sorted(due))
        except TRANSIENT_ERRORS:
            return
        busy.offered(due, trio.current_time())
        node.offer(promoted)

    def _lose(self) -> None:
        """The locks are gone: nothing may run under them."""
        node, keys = self.host.node, self.host.keys
        keys.lose()
        for held in node.claims.live():
            if held.claim.partition_key is None:
                continue
            if held.waits:
                keys.free(held.claim)
                node.poke(held.claim.queue)
            else:
                node.claims.interrupt(held, "the session with its key is gone")
