"""Flusher: commits the outcomes of steps, in groups.

Owns       transitions that wait for their commit, and claims that wait to be given back.
Receives   `commit` from step tasks (which wait for the verdict), `release` from feeders and step tasks.
Sends      verdicts to the waiting tasks; hints to the feeders about siblings that a freed key lets go.
Writes     commit_outcomes.sql (+ promote_siblings.sql), release_claims.sql, on the commit lane.
If it dies the tasks that wait are told to try again with its next incarnation: the queue outlives it.
Never      lingers: it takes what is queued, commits, repeats. Groups form while a commit is under way.

A poison entry (data that Postgres refuses) is bisected out and fails alone. When the store is away, entries wait as
long as their leases are trusted. A commit of unknown fate is repeated as it was; if it then touches no row, the row
is read: it tells whether the first one had happened.
"""

from __future__ import annotations

from collections import deque
from typing import Final

import attrs
import outcome
import psycopg
import trio
from trio.lowlevel import Abort, RaiseCancelT, Task

from durable_actors._engine.leases import Held
from durable_actors._engine.node import Node, logger
from durable_actors._engine.outage import TROUBLE, Outage
from durable_actors._postgres.failures import RETRYABLE
from durable_actors._store.claim import ClaimState, probe_locks, read_claims, release_claims
from durable_actors._store.commit import commit_outcomes, was_committed
from durable_actors._store.rows import Claim, Committed, Transition
from durable_actors.errors import CommitUnknown, Duplicate
from durable_actors.otp import Actor, Address, ExitReason

MAX_BATCH: Final = 1000
MAX_BYTES: Final = 32_000_000
"""States and results of one group. Postgres takes no message of 1 GB; a thousand large ones must not come near that."""
FLUSH_TIME: Final = 10.0
"""Seconds that the last outcomes and releases have at a stop; then their leases end them."""
LOCK_PAUSE: Final = 0.25
LAST_TRIES: Final = 8
"""So often, over two thirds of a second, the end of a drain tries to give a locked row back; then its lease ends it."""

_DATA: Final = frozenset({"22", "23", "54"})
"""SQLSTATE classes that blame the data: exceptions, constraints, limits. Others blame the server or us: try again."""


@attrs.frozen
class Stale:
    """The fence refused the transition: this worker no longer owns the claim."""


@attrs.frozen
class Refused:
    """Postgres refused the data of this very transition; nothing was written."""

    error: psycopg.Error | Duplicate


Verdict = Committed | Stale | Refused

STALE: Final = Stale()


def blames_data(error: psycopg.Error) -> bool:
    """Whether the transition's own data are refused: trying again would not help."""
    return (error.sqlstate or "")[:2] in _DATA


class _Entry:
    """A transition on its way, and the task that waits for it (None once it has gone)."""

    __slots__ = ("aside", "held", "task", "transition", "unknown")

    def __init__(self, transition: Transition, held: Held, task: Task) -> None:
        self.transition = transition
        self.held = held
        self.task: Task | None = task
        self.aside = False
        """It waits for a foreign row lock, outside of the queue."""
        self.unknown = False
        """It was sent once, and nobody knows whether it was committed. Stays true across restarts of the flusher."""

    @property
    def rows(self) -> set[int]:
        """The instances that its commit writes."""
        claim = self.transition.claim
        parent = claim.parent_id
        return {claim.id} if parent is None or not self.transition.ends else {claim.id, parent}

    def answer(self, verdict: Verdict) -> None:
        task, self.task = self.task, None
        if task is not None:
            trio.lowlevel.reschedule(task, outcome.Value(verdict))


@attrs.frozen
class _Release:
    """Claims to give back alike."""

    attempts: int
    hold: bool
    tries: int = 0
    """How often their rows were found locked."""


class Commits:
    """The flusher's queue: made before it, and valid across its restarts."""

    def __init__(self, wake: Address[object]) -> None:
        self._wake = wake
        self.entries: deque[_Entry] = deque()
        self.releases: dict[_Release, list[Claim]] = {}

    async def commit(self, transition: Transition, held: Held) -> Verdict:
        """Queue a transition and wait until it is committed or refused.

        Cancelled: a transition not sent yet is withdrawn; one that is under way may be committed.
        """
        entry = _Entry(transition, held, trio.lowlevel.current_task())
        self.entries.append(entry)
        self._wake.cast(None)

        def abort(_: RaiseCancelT) -> Abort:
            entry.task = None
            return Abort.SUCCEEDED

        verdict: Verdict = await trio.lowlevel.wait_task_rescheduled(abort)
        return verdict

    def release(self, claim: Claim, *, attempts: int, hold: bool = False) -> None:
        """Queue a claim to be given back. Fenced: one that was committed meanwhile is not touched."""
        self.releases.setdefault(_Release(attempts, hold), []).append(claim)
        self._wake.cast(None)

    def take(self) -> list[_Entry]:
        """The next group: distinct instances, nobody who has gone, at most `MAX_BATCH` and about `MAX_BYTES`."""
        batch: dict[int, _Entry] = {}
        later: list[_Entry] = []
        size = 0
        while self.entries and len(batch) < MAX_BATCH and size < MAX_BYTES:
            entry = self.entries.popleft()
            if entry.task is None:
                continue  # withdrawn: cancelled before it was sent
            number = entry.transition.claim.id
            if number in batch:  # an old claim's late outcome beside the new one's: one row, one update
                later.append(entry)
            else:
                batch[number] = entry
                size += len(entry.transition.state or b"") + len(entry.transition.result or b"")
        self.entries.extendleft(reversed(later))
        return list(batch.values())


def _waiting(batch: list[_Entry]) -> list[_Entry]:
    """Those whose task still waits. One that has gone lost its lease, or its drain's time was up."""
    return [entry for entry in batch if entry.task is not None and not entry.aside]


class Flusher(Actor[object]):
    """The actor; a message is nothing but a wake-up."""

    def __init__(self, node: Node, queue: Commits) -> None:
        self._node = node
        self._queue = queue
        self._outage = Outage(node, "flusher")
        self._ending = False

    async def run(self) -> None:
        """Flush whatever is queued; sleep when nothing is."""
        while not self.mailbox.stopping:
            if not self._queue.entries and not self._queue.releases:
                await self.mailbox.receive()
            await self._turn()

    async def terminate(self, reason: ExitReason) -> None:  # noqa: ARG002 - the protocol's
        """The last outcomes and releases of a drain, for as long as there is time."""
        self._ending = True
        with trio.move_on_after(FLUSH_TIME) as scope:
            while self._queue.entries or self._queue.releases:
                await self._turn()
        if scope.cancelled_caught:
            count = sum(len(claims) for claims in self._queue.releases.values())
            logger.warning("flusher: %d claims could not be given back, their leases end them", count)

    async def _turn(self) -> None:
        batch = self._queue.take()
        try:
            await self._flush(batch)
        finally:
            # All answered, unless this is cancelled or fails: the next incarnation goes on with the rest.
            self._queue.entries.extendleft(reversed(_waiting(batch)))
        await self._release()

    # -- outcomes

    async def _flush(self, batch: list[_Entry]) -> None:
        """Bring every entry of the batch to its verdict, or until nobody waits for it."""
        while batch := _waiting(batch):
            try:
                committed = await self._commit(batch)
                await self._resolve(batch, committed)
            except TROUBLE as exc:
                if isinstance(exc, psycopg.Error) and blames_data(exc):
                    await self._bisect(batch, exc)
                    return
                if isinstance(exc, psycopg.errors.LockNotAvailable):
                    await self._set_locked_aside(batch)
                    continue
                if isinstance(exc, CommitUnknown):
                    for entry in batch:
                        entry.unknown = True
                if not (isinstance(exc, psycopg.Error) and exc.sqlstate in RETRYABLE):
                    await trio.sleep(self._outage.failed(exc))
            else:
                self._outage.over()
                for entry in batch:
                    entry.answer(committed.get(entry.transition.claim.id, STALE))

    async def _commit(self, batch: list[_Entry]) -> dict[int, Committed]:
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

    async def _resolve(self, batch: list[_Entry], committed: dict[int, Committed]) -> None:
        """After an unknown commit was repeated: read the rows it did not touch, and learn what they tell."""
        node = self._node
        missing = [
            entry.transition
            for entry in batch
            if entry.unknown and entry.transition.claim.id not in committed
        ]
        if not missing:
            return
        async with node.pool.acquire(node.lane("commit")) as conn:
            rows = await read_claims(conn, node.owner.schema, [each.claim.id for each in missing])
        for each in missing:
            found = was_committed(each, rows.get(each.claim.id))
            if found is not None:
                committed[each.claim.id] = found

    async def _set_locked_aside(self, batch: list[_Entry]) -> None:
        """Somebody holds a row of this batch (a signal in a caller's open transaction): only that instance waits."""
        free = await self._probe(sorted(set[int]().union(*(entry.rows for entry in batch))))
        for entry in batch:
            if not entry.rows <= free:
                if self._ending:  # nobody is left to wait beside us: the whole batch does
                    await trio.sleep(LOCK_PAUSE)
                    return
                entry.aside = True
                self.nursery.start_soon(self._wait_unlocked, entry)

    async def _wait_unlocked(self, entry: _Entry) -> None:
        """Queue an entry again when its rows are free; forget it when its task has gone."""
        pause = 0.01
        try:
            while entry.task is not None and not entry.rows <= await self._probe(sorted(entry.rows)):
                await trio.sleep(pause)
                pause = min(pause * 2, LOCK_PAUSE)
        finally:
            entry.aside = False
            self._queue.entries.append(entry)
            self.address.cast(None)

    async def _probe(self, rows: list[int]) -> set[int]:
        node = self._node
        try:
            async with node.pool.acquire(node.lane("client")) as conn:
                return await probe_locks(conn, node.owner.schema, rows)
        except TROUBLE:
            return set()

    async def _bisect(self, batch: list[_Entry], error: psycopg.Error) -> None:
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
                        conn, node.owner.schema, claims, attempts=how.attempts, hold=how.hold
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

    async def _release_again(self, how: _Release, claims: list[Claim]) -> None:
        """These are still ours, their rows were locked: forgetting them would cost a lease.

        By another node's pick, which looks at the running row of a key, or by a caller's transaction.
        """
        if not claims:
            return
        again = attrs.evolve(how, tries=how.tries + 1)
        if not self._ending:
            self.nursery.start_soon(self._queue_later, again, claims)
        elif again.tries < LAST_TRIES:
            await self._queue_later(again, claims)

    async def _queue_later(self, how: _Release, claims: list[Claim]) -> None:
        try:
            doublings = min(how.tries, 10)  # a float power overflows at 1024, after four minutes
            await trio.sleep(min(0.005 * 2.0**doublings, LOCK_PAUSE))
        finally:
            self._queue.releases.setdefault(how, []).extend(claims)
            self.address.cast(None)


def _is_ours(claim: Claim, rows: dict[int, ClaimState]) -> bool:
    row = rows.get(claim.id)
    return row is not None and row.claim_id == claim.claim_id and row.status == "executing"
