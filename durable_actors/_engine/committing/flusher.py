"""Flusher: commits the outcomes of steps in groups, and releases claims.

Owns       nothing that would die with it: the queue (`Commits`) outlives it.
Receives   a wake-up: an outcome or a release was queued.
Sends      verdicts to `Completion`; hints to the feeders about siblings that a freed key offers.
Writes     commit_outcomes.sql (+ promote_siblings.sql), release_claims.sql, crash_claims.sql, on the commit lane.
If it dies queued outcomes wait for its next incarnation.
Never      lingers: it takes what is queued, commits, repeats. Groups form while a commit is under way.

A poison entry (data that Postgres refuses) is bisected out and fails alone. A group that is refused for another reason
(a time-out, a broken trigger) is tried in halves. An outcome that is refused alone is set aside and tried again alone,
on a client's connection, while the others are committed. The same holds for a foreign lock, unless it is on a row of
the group: then only those instances wait until it is gone. While Postgres is unavailable, an outcome waits until its
claim is known to be lost. A commit of unknown fate is repeated as it was; if it then touches no row, the row is read,
which shows whether the first one had happened.
"""

from __future__ import annotations

from typing import Final

import attrs
import psycopg
import trio

from durable_actors._engine.committing.queue import MAX_BATCH, Commits, PendingCommit, Release
from durable_actors._engine.committing.verdicts import STALE, Refused, blames_data
from durable_actors._engine.lanes import answer_patience
from durable_actors._engine.node import Node, logger
from durable_actors._engine.outage import TRANSIENT_ERRORS, Outage
from durable_actors._postgres.driver.connection import PgConn
from durable_actors._postgres.driver.failures import RETRYABLE
from durable_actors._store.claim import ClaimState, probe_locks, read_claims, release_claims
from durable_actors._store.commit import commit_outcomes, was_committed
from durable_actors._store.lease import crash_claims
from durable_actors._store.rows import Claim, Committed, Promoted
from durable_actors._wording import counted
from durable_actors.errors import CommitUnknown, StoreUnavailable
from durable_actors.otp import Actor, ExitReason

FLUSH_TIME: Final = 10.0
"""Seconds that the last releases have at a stop; then their leases end them."""
OUTCOME_TIME: Final = 1.0
"""Seconds that the last outcomes have at least, also when steps have none: mostly they need a millisecond."""
LOCK_PAUSE: Final = 0.25
LONGEST_ASIDE: Final = 5.0
"""Seconds between two attempts at an outcome that Postgres refuses alone, and not for its data."""
APART: Final = 5.0
"""Seconds for which, after a lock that is on none of our rows, outcomes that write beside their own row (they consume
signals, or end a child) go alone: with `signals` locked, each would cost its group a search of 100 ms per halving."""
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
        self._most_released = MAX_BATCH
        self._lone_refusals = 0  # since the last group that was committed
        self._apart_until = 0.0
        self._locked: list[PendingCommit] = []  # set aside until their rows are free
        self._more_locked = trio.Event()
        self._alone = trio.Lock()  # of those that are set aside one at a time is tried
        # At a stop: refused in this turn, tried again when the others had theirs.
        self._late: list[PendingCommit] = []

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
        draining = self._node.draining.value
        # At a restart there is a next incarnation, for which others wait, and nothing is lost.
        within = outcome_time(self._node.config.drain_timeout) if draining else OUTCOME_TIME
        with trio.move_on_after(within):
            while queue.entries:
                await self._turn()
        if draining:
            for entry in list(queue.entries):
                queue.withdraw(entry, trio.current_time())
        with trio.move_on_after(FLUSH_TIME if draining else OUTCOME_TIME) as scope:
            while queue.releases:
                await self._release()
        if scope.cancelled_caught and draining:
            count = sum(len(claims) for claims in queue.releases.values())
            logger.warning("%s could not be given back; leases end what is left", counted(count, "claim"))

    async def _turn(self) -> None:
        batch = self._queue.take(trio.current_time(), self._most)
        try:
            for group in self._groups(batch):
                await self._flush(group)
        except BaseException:
            for entry in batch:
                entry.unknown = True  # a commit may be under way, or done and not answered
            raise
        finally:
            # All answered, unless this is cancelled or fails: the next incarnation goes on with the rest.
            self._queue.entries.extendleft(reversed(self._queue.unanswered(batch, trio.current_time())))
            for entry in self._late:
                entry.aside = False
            self._queue.entries.extend(self._late)
            self._late.clear()
        await self._release()

    # -- outcomes

    def _groups(self, batch: list[PendingCommit]) -> list[list[PendingCommit]]:
        """Mostly one. At a stop who was refused alone goes alone, after the others."""
        if self._ending:
            fine = [entry for entry in batch if not entry.refusals]
            return [fine, *([entry] for entry in batch if entry.refusals)]
        if self._apart_until:
            if trio.current_time() >= self._apart_until:
                self._apart_until = 0.0
            else:
                self._try_apart(batch)
        return [batch]

    async def _flush(self, batch: list[PendingCommit]) -> None:
        """Bring every outcome of the group to its verdict, set it aside, or leave it for the queue."""
        while batch := self._queue.unanswered(batch, trio.current_time()):
            try:
                committed = await self._commit(batch)
                await self._resolve(batch, committed)
            except psycopg.errors.LockNotAvailable as exc:
                ready = await self._set_locked_aside(batch)
                if len(ready) == len(batch) and not await self._refused(batch, exc):
                    return
                batch = ready
            except StoreUnavailable as exc:
                for entry in batch:
                    entry.unknown = entry.unknown or isinstance(exc, CommitUnknown)
                await trio.sleep(self._outage.failed(exc))
            except psycopg.Error as exc:
                if not await self._refused(batch, exc):
                    return
            else:
                self._outage.ok()
                self._tries, self._most, self._lone_refusals = 0, min(self._most * 2, MAX_BATCH), 0
                now = trio.current_time()
                for entry in batch:
                    self._queue.answer(entry, committed.get(entry.transition.claim.id, STALE), now)
                return

    async def _refused(self, batch: list[PendingCommit], error: psycopg.Error) -> bool:
        """Decide what becomes of a batch that Postgres refuses; True: try it again."""
        if blames_data(error):
            await self._bisect(batch, error)
            return False
        locked = isinstance(error, psycopg.errors.LockNotAvailable)
        if locked and self._set_apart(batch):
            return True
        self._tries += 1
        if not locked and error.sqlstate in RETRYABLE and self._tries <= AT_ONCE:
            return True
        # Somebody's lock is no outage, and has been waited for already.
        pause = LOCK_PAUSE * self._ending if locked else self._outage.failed(error)
        if len(batch) > 1:
            self._most = len(batch) // 2  # too much for a time-out, or one of them is the reason
            return False
        if self._lone_refusals:  # one after the other: it is not them
            await trio.sleep(pause)
        self._lone_refusals += 1
        self._set_aside(batch[0], error)  # the last thing: it may be back in the queue at the next await
        return False

    def _set_apart(self, batch: list[PendingCommit]) -> bool:
        """A lock is in the way, and on none of our rows: those that write elsewhere, too, go alone. Tell if some do."""
        if self._ending:
            return False
        if not self._try_apart(batch):
            return False
        self._apart_until = trio.current_time() + APART
        return True

    def _try_apart(self, batch: list[PendingCommit]) -> bool:
        beside = [entry for entry in batch if entry.writes_beside]
        for entry in beside:
            self._try_later(entry)
        return bool(beside)

    async def _commit(self, batch: list[PendingCommit], role: str = "commit") -> dict[int, Committed]:
        node = self._node
        # The client lane has no end of its own.
        within = None if role == "commit" else answer_patience(node.owner.lease_ttl)
        async with node.pool.acquire(node.lane(role), within=within) as conn:
            flushed = await commit_outcomes(
                conn,
                node.owner.schema,
                [entry.transition for entry in batch],
                accept_late=node.config.late_commit == "accept",
            )
        if flushed.offered:
            node.offer(flushed.offered)
        return flushed.committed

    async def _resolve(self, batch: list[PendingCommit], committed: dict[int, Committed]) -> None:
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

    # -- set aside

    async def _set_locked_aside(self, batch: list[PendingCommit]) -> list[PendingCommit]:
        """Somebody holds a lock that this batch needs: if it is on a row of an instance, only that instance waits.

        Returns what to go on with; all of it when none of these rows is seen locked. At a stop nobody is left to wait
        beside us: the others go first.
        """
        free = await self._probe(batch, "commit")
        if free is None:
            return batch
        ready = [entry for entry in batch if entry.rows <= free]
        if len(ready) == len(batch):
            return batch
        if not self._ending:
            if not self._locked:
                self.nursery.start_soon(self._wait_unlocked)
            for entry in batch:
                if not entry.rows <= free:
                    entry.aside = True
                    self._locked.append(entry)
            self._more_locked.set()
        elif not ready:
            await trio.sleep(LOCK_PAUSE)
        return ready

    async def _wait_unlocked(self) -> None:
        """Queue outcomes again when their rows are free; drop those that were withdrawn."""
        pause = 0.01
        try:
            while self._locked:
                self._more_locked = trio.Event()
                free = await self._probe(self._locked, "client") or set[int]()
                for entry in [each for each in self._locked if not self._wants(each) or each.rows <= free]:
                    self._locked.remove(entry)
                    self._bring_back(entry)
                if not self._locked:
                    return
                with trio.move_on_after(pause):
                    await self._more_locked.wait()
                pause = 0.01 if self._more_locked.is_set() else min(pause * 2, LOCK_PAUSE)
        finally:
            while self._locked:
                self._bring_back(self._locked.pop())

    def _wants(self, entry: PendingCommit) -> bool:
        return self._queue.wants(entry, trio.current_time())

    def _bring_back(self, entry: PendingCommit) -> None:
        entry.aside = False
        self._queue.entries.append(entry)
        self.address.cast(None)

    def _set_aside(self, entry: PendingCommit, error: psycopg.Error) -> None:
        """Refused alone, and not for its data: it is tried again later, and nobody waits for it."""
        if not entry.refusals:
            instance_id = entry.transition.claim.id
            logger.warning("instance %d: Postgres refuses its outcome, trying again: %s", instance_id, error)
        entry.refusals += 1
        if self._ending:
            entry.aside = True
            self._late.append(entry)
        else:
            self._try_later(entry)

    def _try_later(self, entry: PendingCommit) -> None:
        if not entry.aside:
            entry.aside = True
            self.nursery.start_soon(self._try_alone, entry)

    async def _try_alone(self, entry: PendingCommit) -> None:
        """Commit an entry that was set aside, alone and beside the groups, however often that takes.

        On a client's connection, and one at a time: what waits for a lock waits 100 ms there, each time.
        """
        try:
            while self._wants(entry):
                if entry.refusals:
                    await trio.sleep(min(LOCK_PAUSE * 2.0 ** min(entry.refusals, 10), LONGEST_ASIDE))
                async with self._alone:
                    if self._wants(entry):
                        await self._try_once(entry)
        finally:
            entry.aside = False
            if entry.open:
                self._bring_back(entry)

    async def _try_once(self, entry: PendingCommit) -> None:
        try:
            committed = await self._commit([entry], "client")
            await self._resolve([entry], committed)
        except StoreUnavailable as exc:
            entry.unknown = entry.unknown or isinstance(exc, CommitUnknown)
            await trio.sleep(self._outage.failed(exc))
        except psycopg.Error as exc:
            if blames_data(exc):
                self._queue.answer(entry, Refused(exc), trio.current_time())
            else:
                self._set_aside(entry, exc)
        except BaseException:
            entry.unknown = True  # a commit may be under way, or done and not answered
            raise
        else:
            self._outage.ok()
            if entry.writes_beside:
                self._apart_until = 0.0
            self._queue.answer(entry, committed.get(entry.transition.claim.id, STALE), trio.current_time())

    async def _probe(self, entries: list[PendingCommit], role: str) -> set[int] | None:
        """Which of the rows that these write nobody has locked; None: that cannot be told."""
        node = self._node
        rows = sorted(set[int]().union(*(entry.rows for entry in entries)))
        try:
            # What was set aside waits for this answer, and the client lane has no end of its own.
            patience = answer_patience(node.owner.lease_ttl)
            async with node.pool.acquire(node.lane(role), within=patience) as conn:
                return await probe_locks(conn, node.owner.schema, rows)
        except TRANSIENT_ERRORS:
            return None

    async def _bisect(self, batch: list[PendingCommit], error: psycopg.Error) -> None:
        """Data that Postgres refuses: find the one entry that carries it; the others must not suffer."""
        if len(batch) == 1:
            self._queue.answer(batch[0], Refused(error), trio.current_time())
            return
        middle = len(batch) // 2
        await self._flush(batch[:middle])
        await self._flush(batch[middle:])

    # -- releases

    async def _release(self) -> None:
        """Give claims back. While the store is away they wait; at a drain's end their leases end them."""
        node, queue = self._node, self._queue
        while queue.releases:
            how, claims = queue.take_releases(self._most_released)
            try:
                async with node.pool.acquire(node.lane("commit")) as conn:
                    released, promoted = await self._give_back(conn, how, claims)
                    missing = [claim for claim in claims if claim.id not in released]
                    rows = dict[int, ClaimState]()
                    if missing:
                        rows = await read_claims(conn, node.owner.schema, [claim.id for claim in missing])
            except BaseException as exc:
                refused = isinstance(exc, psycopg.Error)
                if refused and len(claims) == 1:
                    await self._release_again(attrs.evolve(how, refused=True), claims)
                    continue
                # Fenced by the claim: giving back twice does no harm, forgetting one costs a lease.
                queue.releases.setdefault(how, []).extend(claims)
                if refused:
                    self._most_released = len(claims) // 2  # one of them is the reason: a trigger, a lock
                elif not isinstance(exc, TRANSIENT_ERRORS):
                    raise
                else:
                    await trio.sleep(self._outage.failed(exc))
                return  # outcomes first, and a look at whether we are to stop
            else:
                self._outage.ok()
                self._most_released = min(self._most_released * 2, MAX_BATCH)
                logger.debug("released %d claims", len(claims))
                node.offer(promoted)
                if not how.hold:
                    for claim in claims:
                        node.notify(claim.queue, instance_id=claim.id)
                again = [claim for claim in missing if _is_ours(claim, rows)]
                queue.releasing.difference_update([claim.claim_id for claim in claims])
                queue.releasing.update([claim.claim_id for claim in again])
                await self._release_again(how, again)

    async def _give_back(
        self, conn: PgConn, how: Release, claims: list[Claim]
    ) -> tuple[set[int], list[Promoted]]:
        node = self._node
        if how.crash is None:
            return await release_claims(
                conn,
                node.owner.schema,
                claims,
                attempts=how.attempts,
                interruptions=how.interruptions,
                hold=how.hold,
            )
        most = node.config.max_crashes
        crashed, promoted = await crash_claims(
            conn, node.owner.schema, claims, error=how.crash, raised=how.raised, max_crashes=most
        )
        for each in crashed:
            if each.status == "failed":
                logger.error(
                    "instance %d failed: %s, step %s: %s", each.id, each.machine, each.step, each.fault
                )
                node.on_final(each.id)
        return {each.id for each in crashed}, promoted

    async def _release_again(self, how: Release, claims: list[Claim]) -> None:
        """These are still ours, and were locked (a pick, a caller) or refused: forgetting them would cost a lease."""
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
            longest = LONGEST_ASIDE if how.refused else LOCK_PAUSE
            await trio.sleep(min(0.005 * 2.0 ** min(how.tries, 10), longest))
        finally:
            self._queue.releases.setdefault(how, []).extend(claims)
            self.address.cast(None)


def _is_ours(claim: Claim, rows: dict[int, ClaimState]) -> bool:
    row = rows.get(claim.id)
    return row is not None and row.claim_id == claim.claim_id and row.status == "executing"
