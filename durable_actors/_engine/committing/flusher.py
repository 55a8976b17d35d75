"""Flusher: commits the outcomes of steps in groups, and releases claims.

Owns       nothing: the queue (`Commits`) outlives it.
Receives   a wake-up: an outcome or a release was queued.
Sends      verdicts to `Completion`; hints to the feeders about siblings that a freed key offers.
Writes     commit_outcomes.sql, commit_parks.sql, commit_deletes.sql and their riders, release_claims.sql,
           crash_claims.sql. All on the commit lane.
If it dies queued outcomes stay in the queue for its next incarnation.
Never      waits for a group to grow: it commits what is queued, and repeats. Groups form while a commit is under way.

=====================================================  ===============================================================
the commit of a group                                  what the flusher does
=====================================================  ===============================================================
is refused for the data of one outcome                 finds it by bisection; only that one is refused
is refused for another reason (a time-out, a trigger)  tries the group in halves
meets a foreign lock on a row of the group             sets those outcomes aside until the row is free
meets another foreign lock                             commits outcomes that write beside their own row alone; if there
                                                       is none, tries the group in halves
of one outcome is refused alone, not for its data      sets it aside; retries it alone, on a client connection
fails because Postgres is unavailable                  retries until it works, or the claim is known to be lost
has an unknown fate                                    repeats it; if that touches no row, reads the row, which shows
                                                       whether the first attempt was committed; if that would have
                                                       deleted the row, and it is gone, `flushes` shows it
touches no row of an outcome that is not `Done`        reads the row, which shows whether a request to cancel
                                                       overrules it: the claim is released, which ends the instance
=====================================================  ===============================================================
"""

from __future__ import annotations

from typing import Final, cast

import attrs
import psycopg
import trio

from durable_actors._engine.committing.queue import MAX_BATCH, Commits, PendingCommit, Release
from durable_actors._engine.committing.releases import give_back, is_ours, refund, tell_released
from durable_actors._engine.committing.verdicts import STALE, Overruled, Refused, Verdict, blames_data
from durable_actors._engine.lanes import answer_patience
from durable_actors._engine.node import NO_HAND_OVER, Node, logger
from durable_actors._engine.outage import TRANSIENT_ERRORS, Outage
from durable_actors._postgres.driver.failures import RETRYABLE
from durable_actors._store.claim import ClaimRow, probe_locks, read_claims
from durable_actors._store.commit import commit_outcomes, overruled_by, read_flushes, was_committed
from durable_actors._store.links import FEEDS
from durable_actors._store.rows import Claim
from durable_actors._wording import counted
from durable_actors.errors import CommitUnknown, StoreUnavailable
from durable_actors.otp import Actor, ExitReason
from durable_actors.telemetry import GroupCommitted

FLUSH_TIME: Final = 10.0
"""Seconds for the last releases when the engine stops; after that, leases end the claims."""
OUTCOME_TIME: Final = 1.0
"""Seconds for the last outcomes, at least, even if `drain_timeout` is 0: usually they need a millisecond."""
LOCK_PAUSE: Final = 0.25
LONGEST_ASIDE: Final = 5.0
"""Seconds between two attempts at an outcome that Postgres refuses alone, not for its data; at most."""
APART: Final = 5.0
"""Some outcomes also write to other rows: they consume signals or end a child. If a commit meets a lock that is on none
of the group's rows, these outcomes are committed one at a time for so many seconds. Otherwise, while `signals` is
locked, each of them would delay its group by 100 ms at every halving."""
AT_ONCE: Final = 5
"""How often a deadlock or a serialization failure is retried without a pause."""
LAST_TRIES: Final = 8
"""How often the end of a drain tries to release a locked row, over two thirds of a second; then its lease ends it."""


def outcome_time(drain_timeout: float) -> float:
    """Seconds for queued outcomes when the engine stops. Pure."""
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
        self._alone = trio.Lock()  # outcomes that were set aside are tried one at a time
        # When the engine stops: refused in this turn, tried again after the others.
        self._late: list[PendingCommit] = []

    async def run(self) -> None:
        """Flush what is queued; sleep when nothing is."""
        while not self.mailbox.stopping:
            if not self._queue.entries and not self._queue.releases:
                await self.mailbox.receive()
            await self._turn()

    async def terminate(self, reason: ExitReason) -> None:  # noqa: ARG002 - the protocol's
        """In a drain: commit the last outcomes within `drain_timeout`, then release all other claims."""
        self._ending = True
        queue = self._queue
        draining = self._node.draining.value
        # At a restart be quick: other actors wait for the next incarnation, which finds the rest in the queue.
        within = outcome_time(self._node.config.drain_timeout) if draining else OUTCOME_TIME
        with trio.move_on_after(within):
            while queue.entries:
                await self._turn()
        if draining:
            for entry in list(queue.entries):
                queue.answer(entry, None, trio.current_time())
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
                entry.unknown = True  # the commit may be under way, or done without an answer
            raise
        finally:
            # All have a verdict, unless this was cancelled or failed: the next incarnation continues with the others.
            self._queue.entries.extendleft(reversed(self._queue.unanswered(batch, trio.current_time())))
            for entry in self._late:
                entry.aside = False
            self._queue.entries.extend(self._late)
            self._late.clear()
        await self._release()

    # -- outcomes

    def _groups(self, batch: list[PendingCommit]) -> list[list[PendingCommit]]:
        """Usually one. At a stop, outcomes that were refused alone are committed alone, after the others."""
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
        """Commit the group. Afterwards each outcome has a verdict, is set aside, or goes back into the queue."""
        while batch := self._queue.unanswered(batch, trio.current_time()):
            try:
                verdicts, tokens = await self._commit(batch)
                await self._resolve(batch, verdicts)
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
                    self._queue.answer(entry, verdicts.get(entry.transition.claim.id, STALE), now)
                self._queue.answered += tokens
                return

    async def _refused(self, batch: list[PendingCommit], error: psycopg.Error) -> bool:
        """Decide what happens to a batch that Postgres refused. True: try it again."""
        if blames_data(error):
            await self._bisect(batch, error)
            return False
        locked = isinstance(error, psycopg.errors.LockNotAvailable)
        if locked and self._set_apart(batch):
            return True
        self._tries += 1
        if not locked and error.sqlstate in RETRYABLE and self._tries <= AT_ONCE:
            return True
        # A foreign lock is no outage, and the statement has waited for it already.
        pause = LOCK_PAUSE * self._ending if locked else self._outage.failed(error)
        if len(batch) > 1:
            self._most = len(batch) // 2  # too many for a time-out, or one of them is the reason
            return False
        if self._lone_refusals:  # several in a row: the outcomes are not the reason
            await trio.sleep(pause)
        self._lone_refusals += 1
        self._set_aside(batch[0], error)  # last: at the next await it may be back in the queue
        return False

    def _set_apart(self, batch: list[PendingCommit]) -> bool:
        """A lock is on none of our rows: commit outcomes that write beside their own row alone. False: none does."""
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

    async def _commit(
        self, batch: list[PendingCommit], role: str = "commit"
    ) -> tuple[dict[int, Verdict], list[str]]:
        """Send a group. Returns the verdicts, and its token if it deletes rows; else no token."""
        node = self._node
        # The client lane has no time limit of its own.
        within = None if role == "commit" else answer_patience(node.owner.lease_ttl)
        token, answered = self._queue.next_token(batch)
        hand_over = node.hand_over if role == "commit" else NO_HAND_OVER
        began = trio.current_time()
        async with node.pool.acquire(node.lane(role), within=within) as conn:
            try:
                flushed = await commit_outcomes(
                    conn,
                    node.owner.schema,
                    [entry.transition for entry in batch],
                    accept_late=node.config.late_commit == "accept",
                    node=node.owner.name,
                    token=token,
                    known=answered,
                    room=hand_over.begin,
                    heir=hand_over.begin_keys,
                )
            except BaseException as exc:
                hand_over.failed(unknown_fate=not isinstance(exc, psycopg.Error))
                raise
            hand_over.done(flushed.handed)
        if node.telemetry.active:
            seconds = trio.current_time() - began
            node.telemetry.emit(GroupCommitted(count=len(flushed.committed), seconds=seconds))
        if flushed.offered:
            node.offer(flushed.offered)
        return cast("dict[int, Verdict]", flushed.committed), [] if token is None else [token]

    async def _resolve(self, batch: list[PendingCommit], verdicts: dict[int, Verdict]) -> None:
        """Read the rows that a commit did not touch, and judge by them.

        It was of unknown fate and then repeated, or the claim is no longer ours, or a request to cancel overrules it.
        """
        node = self._node
        if len(verdicts) == len(batch):
            return
        missing = [
            (entry.transition, entry.unknown, entry.sent)
            for entry in batch
            if entry.transition.claim.id not in verdicts
            and (entry.unknown or not entry.transition.outlasts_request)
        ]
        if not missing:
            return
        for entry in batch:
            entry.unknown = True  # if the read fails, the whole batch is tried again
        async with node.pool.acquire(node.lane("commit")) as conn:
            rows = await read_claims(conn, node.owner.schema, [each.claim.id for each, _, _ in missing])
            tokens = sorted({token for _, _, sent in missing for token in sent})
            flushes = await read_flushes(conn, node.owner.schema, tokens) if tokens else {}
        for each, unknown, sent in missing:
            row = rows.get(each.claim.id)
            groups = [flushes[token] for token in sent if token in flushes]
            if unknown and (found := was_committed(each, row, groups)) is not None:
                verdicts[each.claim.id] = found
            elif (request := overruled_by(each, row)) is not None:
                verdicts[each.claim.id] = Overruled(request)

    # -- set aside

    async def _set_locked_aside(self, batch: list[PendingCommit]) -> list[PendingCommit]:
        """A transaction holds a lock that this batch needs: set aside the outcomes whose rows are locked.

        Returns the others; the whole batch if none of these rows is locked. When the engine stops, nothing is set
        aside: the others are only committed first.
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
        """Queue outcomes again when their rows are free; also those that were withdrawn, which the queue drops."""
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
        """Refused alone, not for its data: try it again later; other outcomes do not wait for it."""
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
        """Commit an entry that was set aside, alone and beside the groups; retry until it has a verdict.

        On a client connection, and one entry at a time: each attempt may wait 100 ms for a lock.
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
            verdicts, tokens = await self._commit([entry], "client")
            await self._resolve([entry], verdicts)
        except StoreUnavailable as exc:
            entry.unknown = entry.unknown or isinstance(exc, CommitUnknown)
            await trio.sleep(self._outage.failed(exc))
        except psycopg.Error as exc:
            if blames_data(exc):
                self._queue.answer(entry, Refused(exc), trio.current_time())
            else:
                self._set_aside(entry, exc)
        except BaseException:
            entry.unknown = True  # the commit may be under way, or done without an answer
            raise
        else:
            self._outage.ok()
            if entry.writes_beside:
                self._apart_until = 0.0
            self._queue.answer(entry, verdicts.get(entry.transition.claim.id, STALE), trio.current_time())
            self._queue.answered += tokens

    async def _probe(self, entries: list[PendingCommit], role: str) -> set[int] | None:
        """Which of the rows that these outcomes write are not locked; None: unknown."""
        node = self._node
        rows = sorted(set[int]().union(*(entry.rows for entry in entries)))
        try:
            # Outcomes that were set aside wait for this answer, and the client lane has no time limit of its own.
            patience = answer_patience(node.owner.lease_ttl)
            async with node.pool.acquire(node.lane(role), within=patience) as conn:
                return await probe_locks(conn, node.owner.schema, rows)
        except TRANSIENT_ERRORS:
            return None

    async def _bisect(self, batch: list[PendingCommit], error: psycopg.Error) -> None:
        """Postgres refuses the data of some entry: find it by halving; the others are committed."""
        if len(batch) == 1:
            self._queue.answer(batch[0], Refused(error), trio.current_time())
            return
        middle = len(batch) // 2
        await self._flush(batch[:middle])
        await self._flush(batch[middle:])

    # -- releases

    async def _release(self) -> None:
        """Release claims. While Postgres is unavailable, they stay queued; after a drain, their leases end them."""
        node, queue = self._node, self._queue
        while queue.releases:
            how, claims = queue.take_releases(self._most_released)
            try:
                async with node.pool.acquire(node.lane("commit")) as conn:
                    released = await give_back(node, conn, how, claims)
                    await refund(node, conn, claims, released)
                    missing = [claim for claim in claims if claim.id not in released.ids]
                    rows = dict[int, ClaimRow]()
                    if missing:
                        rows = await read_claims(conn, node.owner.schema, [claim.id for claim in missing])
            except BaseException as exc:
                refused = isinstance(exc, psycopg.Error)
                if refused and len(claims) == 1:
                    await self._release_again(attrs.evolve(how, refused=True), claims)
                    continue
                # Fenced by the claim, so a second release does no harm. A forgotten one would wait for its lease.
                queue.releases.setdefault(how, []).extend(claims)
                if refused:
                    self._most_released = len(claims) // 2  # one of them is the reason: a trigger, a lock
                elif not isinstance(exc, TRANSIENT_ERRORS):
                    raise
                else:
                    await trio.sleep(self._outage.failed(exc))
                return  # outcomes go first, and the actor may have to stop
            else:
                self._outage.ok()
                self._most_released = min(self._most_released * 2, MAX_BATCH)
                logger.debug("released %d claims", len(claims))
                node.offer([*released.offered])
                if released.cascades or any(claim.recorded.links & FEEDS for claim in claims):
                    node.cascade()  # one that has ended with its claim has told nobody
                tell_released(node, how, claims, released)
                again = [claim for claim in missing if is_ours(claim, rows)]
                queue.releasing.difference_update([claim.claim_id for claim in claims])
                queue.releasing.update([claim.claim_id for claim in again])
                await self._release_again(how, again)

    async def _release_again(self, how: Release, claims: list[Claim]) -> None:
        """Try again to release claims that are still ours: their rows were locked (a pick, a caller), or refused."""
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
