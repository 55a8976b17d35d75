"""Flusher: commits the outcomes of steps, in groups.

Owns       transitions that wait for their commit, and claims that wait to be given back.
Receives   `commit` from step tasks that wait for the verdict, `leave` from those that do not; `release`.
Sends      verdicts to the waiting tasks; settles what nobody waits for; hints to the feeders about siblings that a
           freed key lets go.
Writes     commit_outcomes.sql (+ promote_siblings.sql), release_claims.sql, on the commit lane.
If it dies the tasks that wait, and what was left, wait for its next incarnation: the queue outlives it.
Never      lingers: it takes what is queued, commits, repeats. Groups form while a commit is under way.

A poison entry (data that Postgres refuses) is bisected out and fails alone. A group that is refused for another reason
(a time-out, a broken trigger) is tried in halves; who is refused alone is set aside for a while. When the store is
away, tasks wait as long as their leases are trusted, and what was left until its claim is known to be lost. A commit of
unknown fate is repeated as it was; if it then touches no row, the row is read: it tells whether the first one had
happened.
"""

from __future__ import annotations

from typing import Final

import attrs
import psycopg
import trio

from durable_actors._engine.commits import MAX_BATCH, Commits, Entry, Release, waiting
from durable_actors._engine.node import Node, answer_patience, logger
from durable_actors._engine.outage import TROUBLE, Outage
from durable_actors._engine.verdicts import STALE, Refused, blames_data
from durable_actors._postgres.failures import RETRYABLE
from durable_actors._store.claim import ClaimState, probe_locks, read_claims, release_claims
from durable_actors._store.commit import commit_outcomes, was_committed
from durable_actors._store.rows import Claim, Committed
from durable_actors.errors import CommitUnknown, StoreUnavailable
from durable_actors.otp import Actor, ExitReason

FLUSH_TIME: Final = 10.0
"""Seconds that the last releases have at a stop; then their leases end them."""
OUTCOME_TIME: Final = 1.0
"""Seconds that the last outcomes have at least, also when steps have none: mostly they need a millisecond."""
LOCK_PAUSE: Final = 0.25
LONGEST_ASIDE: Final = 5.0
"""Seconds between two attempts at an outcome that Postgres refuses alone, and not for its data."""
AT_ONCE: Final = 5
"""So often a deadlock or a serialization failure is tried again without a pause."""
LAST_TRIES: Final = 8
"""So often, over two thirds of a second, the end of a drain tries to give a locked row back; then its lease ends it."""


def outcome_time(drain_timeout: float) -> float:
    """Seconds for outcomes whose steps have ended when the engine stops. Pure."""
    return max(drain_timeout, OUTCOME_TIME)


class Flusher(Actor[object]):
    """The actor; a message is nothing but a wake-up."""

    def __init__(self, node: Node, queue: Commits) -> None:
        self._node = node
        self._queue = queue
        self._outage = Outage(node, "flusher")
        self._ending = False
        self._most = MAX_BATCH
        self._tries = 0
        # At a stop: refused in this turn, tried again when the others had theirs.
        self._late: list[Entry] = []

    async def run(self) -> None:
        """Flush whatever is queued; sleep when nothing is."""
        while not self.mailbox.stopping:
            if not self._queue.entries and not self._queue.releases:
                await self.mailbox.receive()
            await self._turn()

    async def terminate(self, reason: ExitReason) -> None:  # noqa: ARG002 - the protocol's
        """The last outcomes of a drain, for as long as steps have; what is left goes back, with all other claims."""
        self._ending = True
        queue = self._queue
        draining = self._node.draining
        # At a restart there is a next incarnation, for which others wait, and nothing is lost.
        within = outcome_time(self._node.config.drain_timeout) if draining else OUTCOME_TIME
        with trio.move_on_after(within):
            while queue.entries:
                await self._turn()
        if draining:
            for entry in list(queue.entries):
                entry.give_up()
        with trio.move_on_after(FLUSH_TIME if draining else OUTCOME_TIME) as scope:
            while queue.releases:
                await self._release()
        if scope.cancelled_caught and draining:
            count = sum(len(claims) for claims in queue.releases.values())
            logger.warning("flusher: %d claims could not be given back, their leases end them", count)

    async def _turn(self) -> None:
        batch = self._queue.take(self._most)
        try:
            await self._flush(batch)
        except BaseException:
            for entry in batch:
                entry.unknown = True  # a commit may be under way, or done and not answered
            raise
        finally:
            # All answered, unless this is cancelled or fails: the next incarnation goes on with the rest.
            self._queue.entries.extendleft(reversed(waiting(batch)))
            for entry in self._late:
                entry.aside = False
            self._queue.entries.extend(self._late)
            self._late.clear()
        await self._release()

    # -- outcomes

    async def _flush(self, batch: list[Entry]) -> None:
        """Bring every entry of the batch to its verdict, or until nobody waits for it, or back to the queue."""
        while batch := waiting(batch):
            try:
                committed = await self._commit(batch)
                await self._resolve(batch, committed)
            except psycopg.errors.LockNotAvailable:
                batch = await self._set_locked_aside(batch)
            except StoreUnavailable as exc:
                for entry in batch:
                    entry.unknown = entry.unknown or isinstance(exc, CommitUnknown)
                await trio.sleep(self._outage.failed(exc))
            except psycopg.Error as exc:
                if not await self._refused(batch, exc):
                    return
            else:
                self._outage.over()
                self._tries, self._most = 0, min(self._most * 2, MAX_BATCH)
                for entry in batch:
                    entry.answer(committed.get(entry.transition.claim.id, STALE))
                return

    async def _refused(self, batch: list[Entry], error: psycopg.Error) -> bool:
        """Decide what becomes of a batch that Postgres refuses; True: try it again."""
        if blames_data(error):
            await self._bisect(batch, error)
            return False
        self._tries += 1
        if error.sqlstate in RETRYABLE and self._tries <= AT_ONCE:
            return True
        pause = self._outage.failed(error)
        if len(batch) > 1:
            self._most = len(batch) // 2  # too much for a time-out, or one of them is the reason
            return False
        await trio.sleep(pause)
        self._set_aside(batch[0], error)  # the last thing: it may be back in the queue at the next await
        return False

    async def _commit(self, batch: list[Entry]) -> dict[int, Committed]:
        node = self._node
        async with node.pool.acquire(node.lane("commit")) as conn:
            flushed = await commit_outcomes(
                conn,
                node.owner.schema,
                [entry.transition for entry in batch],
                accept_late=node.config.late_commit == "accept",
            )
        if flushed.offered:
            node.offer(flushed.offered)
        return flushed.committed

    async def _resolve(self, batch: list[Entry], committed: dict[int, Committed]) -> None:
        """After an unknown commit was repeated: read the rows it did not touch, and learn what they tell."""
        node = self._node
        missing = [
            entry.transition
            for entry in batch
            if entry.unknown and entry.transition.claim.id not in committed
        ]
        if not missing:
            return
        for entry in batch:
            entry.unknown = True  # committed just now, and should the read fail, all of it is tried again
        async with node.pool.acquire(node.lane("commit")) as conn:
            rows = await read_claims(conn, node.owner.schema, [each.claim.id for each in missing])
        for each in missing:
            found = was_committed(each, rows.get(each.claim.id))
            if found is not None:
                committed[each.claim.id] = found

    async def _set_locked_aside(self, batch: list[Entry]) -> list[Entry]:
        """Somebody holds a row of this batch (a signal in a caller's open transaction): only that instance waits.

        Returns what to go on with. At a stop nobody is left to wait beside us: the others go first.
        """
        free = await self._probe(sorted(set[int]().union(*(entry.rows for entry in batch))))
        ready = [entry for entry in batch if entry.rows <= free]
        if not self._ending:
            for entry in batch:
                if not entry.rows <= free:
                    entry.aside = True
                    self.nursery.start_soon(self._wait_unlocked, entry)
        elif not ready:
            await trio.sleep(LOCK_PAUSE)
        return ready

    async def _wait_unlocked(self, entry: Entry) -> None:
        """Queue an entry again when its rows are free; forget it when its task has gone."""
        pause = 0.01
        try:
            while entry.wanted() and not entry.rows <= await self._probe(sorted(entry.rows)):
                await trio.sleep(pause)
                pause = min(pause * 2, LOCK_PAUSE)
        finally:
            self._bring_back(entry)

    def _bring_back(self, entry: Entry) -> None:
        entry.aside = False
        self._queue.entries.append(entry)
        self.address.cast(None)

    def _set_aside(self, entry: Entry, error: psycopg.Error) -> None:
        """Refused alone, and not for its data: it is tried again later, and nobody waits for it."""
        if not entry.refusals:
            number = entry.transition.claim.id
            logger.warning("instance %d: Postgres refuses its outcome, trying again: %s", number, error)
        entry.refusals += 1
        entry.aside = True
        if self._ending:
            self._late.append(entry)
        else:
            self.nursery.start_soon(self._wait_aside, entry)

    async def _wait_aside(self, entry: Entry) -> None:
        try:
            await trio.sleep(min(LOCK_PAUSE * 2.0 ** min(entry.refusals, 10), LONGEST_ASIDE))
        finally:
            self._bring_back(entry)

    async def _probe(self, rows: list[int]) -> set[int]:
        node = self._node
        try:
            # Every outcome waits for this answer, and the client lane has no end of its own.
            patience = answer_patience(node.owner.lease_ttl)
            lane = node.lane(
                "commit" if self._ending else "client"
            )  # at a stop callers may hold all of theirs
            async with node.pool.acquire(lane, within=patience) as conn:
                return await probe_locks(conn, node.owner.schema, rows)
        except TROUBLE:
            return set()

    async def _bisect(self, batch: list[Entry], error: psycopg.Error) -> None:
        """Data that Postgres refuses: find the one entry that carries it; the others must not suffer."""
        if len(batch) == 1:
            batch[0].answer(Refused(error))
            return
        middle = len(batch) // 2
        await self._flush(batch[:middle])
        await self._flush(batch[middle:])

    # -- releases

    async def _release(self) -> None:
        """Give claims back. While the store is away they wait; at a drain's end their leases end them."""
        node, queue = self._node, self._queue
        while queue.releases:
            how, claims = queue.releases.popitem()
            try:
                async with node.pool.acquire(node.lane("commit")) as conn:
                    released, promoted = await release_claims(
                        conn,
                        node.owner.schema,
                        claims,
                        attempts=how.attempts,
                        interruptions=how.interruptions,
                        hold=how.hold,
                    )
                    missing = [claim for claim in claims if claim.id not in released]
                    rows = dict[int, ClaimState]()
                    if missing:
                        rows = await read_claims(conn, node.owner.schema, [claim.id for claim in missing])
            except BaseException as exc:
                # Fenced by the claim: giving back twice does no harm, forgetting one costs a lease.
                queue.releases.setdefault(how, []).extend(claims)
                if not isinstance(exc, TROUBLE):
                    raise
                await trio.sleep(self._outage.failed(exc))
                return  # outcomes first, and a look at whether we are to stop
            else:
                self._outage.over()
                logger.debug("released %d claims", len(claims))
                node.offer(promoted)
                if not how.hold:
                    for claim in claims:
                        node.poke(claim.queue, number=claim.id)
                await self._release_again(how, [claim for claim in missing if _is_ours(claim, rows)])

    async def _release_again(self, how: Release, claims: list[Claim]) -> None:
        """These are still ours, their rows were locked (a pick, a caller): forgetting them would cost a lease."""
        if not claims:
            return
        again = attrs.evolve(how, tries=how.tries + 1)
        if not self._ending:
            self.nursery.start_soon(self._queue_later, again, claims)
        elif again.tries < LAST_TRIES:
            await self._queue_later(again, claims)

    async def _queue_later(self, how: Release, claims: list[Claim]) -> None:
        try:
            # A float power overflows at 1024, after four minutes.
            await trio.sleep(min(0.005 * 2.0 ** min(how.tries, 10), LOCK_PAUSE))
        finally:
            self._queue.releases.setdefault(how, []).extend(claims)
            self.address.cast(None)


def _is_ours(claim: Claim, rows: dict[int, ClaimState]) -> bool:
    row = rows.get(claim.id)
    return row is not None and row.claim_id == claim.claim_id and row.status == "executing"
