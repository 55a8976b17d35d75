"""Janitor: deletes instances that ended long enough ago, with their signals, history and checkpoints; and records.

Owns       where its walks along the ids are; after a restart they begin anew, at the first row.
Receives   nothing; a message makes it begin a round at once.
Sends      nothing.
Writes     delete_ended.sql, write_keeps.sql; by its `Truncation` snapshot_journal.sql and truncate_journal.sql; on the
           client lane.
Reads      read_keeps.sql, find_long_journals.sql.
If it dies it is restarted, and every other node has one, too: no leader, ordered SKIP LOCKED, small batches.
Never      waits for a row, uses the connection of picks or commits, or works for more than a third of the time.

No index has the finished rows, so that ending a row costs no more. They are found on the way along the primary key: a
row that ended before a time was inserted before it, and ids are given in about that order. For each age there is a
*front*: it deletes what it meets and stops where rows are younger than the age, so a round reads the rows that have
become old since the last one, and a few more. A row that had not ended when a front passed it is left for the *lap*,
which goes round all old rows, some thousands in a round. A front stays a tenth of its age behind, so that few rows are
left for the lap.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

import attrs
import psycopg
import trio

from durable_actors._engine.lanes import answer_patience
from durable_actors._engine.maintenance.truncation import Truncation
from durable_actors._engine.node import Node, logger
from durable_actors._engine.outage import TRANSIENT_ERRORS, Outage
from durable_actors._store.retention import Ages, Swept, delete_ended, read_keeps, write_keeps
from durable_actors._wording import counted
from durable_actors.otp import Actor
from durable_actors.retention import DAY, Retention
from durable_actors.telemetry import InstancesDeleted

BATCH: Final = 500
"""Rows per statement: about 15 ms if all of them are deleted, 2 ms if none is."""
FIRST_LOOK: Final = 20
"""Rows that a walk looks at first: usually there is nothing to do."""
LEAST: Final = 1
"""Rows per statement after refusals and time-outs: the row that nobody can delete must be found alone."""
REST: Final = 2.0
"""The pause after a statement is its duration times this."""
LEAST_PAUSE: Final = 0.01
LAP_RATE: Final = 500.0
"""Rows per second of the interval that the lap looks at."""
LAP_MOST: Final = 10_000
"""Rows per round of the lap, at most: 50 ms of the server, once in a minute."""
MOST_FRONTS: Final = 8
"""Fronts of longer ages are left out: the lap finds their rows."""
LAG: Final = 0.1
"""How far a front stays behind, as a share of its age."""
LEAST_LAG: Final = 1.0
INSERTED: Final = DAY
"""Seconds for which what a step inserted is kept, at least: a step that runs again must find it."""

LINE_EVERY: Final = 60.0
"""Seconds between two lines in the log about what was deleted, at least."""
NOTHING: Final = Swept(0, None, None, 0, 0, 0, 0)


def ages_of(retention: Retention) -> Ages:
    """What the statement is told."""
    return Ages(retention.done, retention.cancelled, retention.failed, INSERTED)


def fronts_of(ages: Ages, keeps: Iterable[float]) -> list[float]:
    """The ages that have a front, shortest first. Pure."""
    given = {age for age in (ages.done, ages.cancelled, ages.failed, *keeps) if age is not None}
    return sorted(given)[:MOST_FRONTS]


@attrs.define
class Walk:
    """One walk along the ids: where it is, and how far it looks next. Pure."""

    old: float
    """It stops where rows were inserted less than this many seconds ago."""
    position: int = 0
    """The last id that it has dealt with."""
    size: int = FIRST_LOOK

    def saw(self, swept: Swept) -> bool:
        """Go on behind what a statement has dealt with. Returns whether there may be more of it now."""
        asked, self.size = self.size, min(self.size * 5, BATCH)
        if swept.last_old is None:
            return False
        self.position = swept.last_old
        return swept.looked >= asked and swept.last_old == swept.last


class Janitor(Actor[object]):
    """The actor."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._retention = node.config.retention
        self._outage = Outage(node, "janitor")
        self._fronts: dict[float, Walk] = {}
        self._lap = Walk(0.0)
        self._most = BATCH
        self._told: int | None = None
        self._complained = False
        self._deleted = NOTHING
        self._unlogged = NOTHING
        self._next_line = -math.inf
        moves = None if self._retention is None else self._retention.history
        self._truncation = None if moves is None else Truncation(node, moves)

    async def run(self) -> None:
        """Say what the machines here want; then a round in every interval."""
        interval = 60.0 if self._retention is None else self._retention.interval
        # Nodes that start together should not walk together; and not while this one starts its work.
        wait = interval * self._node.random()
        if self._retention is not None and self._node.swept_at is None:
            self._node.swept_at = trio.current_time()
        while True:
            try:
                await self._tell()
            except TRANSIENT_ERRORS as exc:
                wait = max(wait, self._outage.failed(exc))
            with trio.move_on_after(wait):
                await self.mailbox.receive()
            if self._retention is None:
                wait = interval
                continue
            began = trio.current_time()
            try:
                await self._round(self._retention)
            except TRANSIENT_ERRORS as exc:
                wait = max(self._outage.failed(exc), min(interval, 1.0))
            else:
                self._outage.ok()
                self._node.swept_at = began
                wait = interval
            self._report()

    async def _tell(self) -> None:
        """Record `keep=` of the machines that this node knows, once for each change of what it knows."""
        node, generation = self._node, self._node.catalog.generation
        if self._told == generation:
            return
        async with node.pool.acquire(node.lane("client")) as conn:
            await write_keeps(conn, node.owner.schema, node.catalog.specs)
        self._told = generation

    async def _round(self, retention: Retention) -> None:
        """All fronts as far as they go, then a part of the lap, and of the walk along long journals."""
        node, ages = self._node, ages_of(retention)
        rows = min(LAP_RATE * retention.interval, LAP_MOST)
        async with node.pool.acquire(node.lane("client")) as conn:
            keeps = await read_keeps(conn, node.owner.schema)
        wanted = fronts_of(ages, keeps)
        self._fronts = {age: self._fronts.get(age) or Walk(age + max(age * LAG, LEAST_LAG)) for age in wanted}
        for front in self._fronts.values():
            await self._walk(front, ages, rows=math.inf)
        if wanted:
            self._lap.old = wanted[0]
            if not await self._walk(self._lap, ages, rows=rows):
                self._lap.position = 0
        if self._truncation is not None:
            await self._truncation.round(rows)

    async def _walk(self, walk: Walk, ages: Ages, *, rows: float) -> bool:
        """Walk until nothing is old, or for so many rows. Returns whether there may be more."""
        walk.size = FIRST_LOOK
        while rows > 0:
            swept = await self._sweep(walk, ages)
            rows -= swept.looked
            if not walk.saw(swept):
                return False
        return True

    async def _sweep(self, walk: Walk, ages: Ages) -> Swept:
        """One statement, and the pause after it. One that takes too long or is refused is repeated with fewer rows.

        Cancelled: the statement is all or nothing, and the walk stays where it was.
        """
        while True:
            walk.size = min(walk.size, self._most)
            began = trio.current_time()
            try:
                swept = await self._delete(walk, ages)
            except psycopg.Error as exc:
                if self._most > LEAST:
                    self._most = max(self._most // 2, LEAST)
                    await trio.sleep(LEAST_PAUSE * 10)
                    continue
                if isinstance(exc, psycopg.OperationalError):  # a time-out of locks or statements, a deadlock
                    raise
                # Somebody's trigger, or a foreign key from another table: this row stays, and is no obstacle.
                swept = await self._delete(walk, ages, only_look=True)
                self._complain(swept, exc)
            else:
                self._most = min(self._most * 2, BATCH)
            self._deleted = _sum(self._deleted, swept)
            await trio.sleep(max(REST * (trio.current_time() - began), LEAST_PAUSE))
            return swept

    async def _delete(self, walk: Walk, ages: Ages, *, only_look: bool = False) -> Swept:
        node, patience = self._node, answer_patience(self._node.owner.lease_ttl)
        async with node.pool.acquire(node.lane("client"), within=patience) as conn:
            return await delete_ended(
                conn,
                node.owner.schema,
                ages,
                after=walk.position,
                limit=walk.size,
                old=walk.old,
                only_look=only_look,
            )

    def _complain(self, swept: Swept, error: psycopg.Error) -> None:
        """Log that a row cannot be deleted; once, for it is met again on every lap."""
        if not self._complained:
            self._complained = True
            logger.warning(
                "retention: instance %s cannot be deleted, and stays: %s (further ones are not logged)",
                swept.last,
                error,
            )

    def _report(self) -> None:
        """Tell what was deleted since the last report."""
        if self._truncation is not None:
            self._truncation.report()
        gone, self._deleted = self._deleted, NOTHING
        self._log(gone)
        if gone.deleted and self._node.telemetry.active:
            self._node.telemetry.emit(
                InstancesDeleted(
                    done=gone.done, cancelled=gone.cancelled, failed=gone.failed, records=gone.records
                )
            )

    def _log(self, gone: Swept) -> None:
        """Log what was deleted, at most one line a minute: what comes before it is in the next one."""
        self._unlogged = gone = _sum(self._unlogged, gone)
        if not gone.deleted or trio.current_time() < self._next_line:
            return
        self._unlogged, self._next_line = NOTHING, trio.current_time() + LINE_EVERY
        logger.info(
            "retention: deleted %s (%d done, %d cancelled, %d failed) and %s",
            counted(gone.deleted, "instance"),
            gone.done,
            gone.cancelled,
            gone.failed,
            counted(gone.records, "record"),
        )


def _sum(one: Swept, other: Swept) -> Swept:
    return Swept(
        one.looked + other.looked,
        other.last,
        other.last_old,
        one.done + other.done,
        one.cancelled + other.cancelled,
        one.failed + other.failed,
        one.records + other.records,
    )
