"""Truncation: what the janitor does about long journals of instances that live on. Its own walk along the ids.

An instance gets a snapshot after every `moves` moves, and what lies before the snapshot before that one is deleted: so
its journal tells its last `moves` moves at least, and about twice as many at most. The records go in small batches, the
newest first: a history that is read meanwhile has a snapshot after what is missing, which is no gap.

No index has the long journals, and no commit looks for them. Each round looks at some random pages of the journal: the
longer a journal is, the more pages it is on, and the sooner it is met. Of 50 million records (10^7 instances) a round
meets one of 2,000 records every other time; the walk alone would need 17 hours to come by. The walk finds the others by
their rows' `rev`. Both remember who they are, and each round looks at them again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

import psycopg
import trio

from durable_actors._engine.lanes import answer_patience
from durable_actors._engine.node import Node, logger
from durable_actors._postgres.driver.connection import PgConn
from durable_actors._store.retention import (
    LongJournals,
    find_long_journals,
    sample_long_journals,
    snapshot_journal,
    truncate_journal,
)
from durable_actors._wording import counted
from durable_actors.telemetry import JournalsTruncated

T = TypeVar("T")

LOOK: Final = 500
"""Rows per statement of the walk: about 1 ms."""
PAGES: Final = 200
"""Pages of the journal that a round looks at: about 2 ms, and as much again for 150,000 other pages."""
BATCH: Final = 500
"""Records per statement: about 10 ms."""
MOST_KNOWN: Final = 1000
"""Instances that are looked at in every round; the walk finds the others."""
REST: Final = 2.0
"""The pause after a statement is its duration times this."""
LEAST_PAUSE: Final = 0.01


class Truncation:
    """The long journals that one janitor knows of, and where its walk is."""

    def __init__(self, node: Node, moves: int) -> None:
        self._node = node
        self._moves = moves
        self._position = 0
        self._known: tuple[int, ...] = ()
        self._complained = False
        self._snapshots = self._records = 0

    async def round(self, rows: float) -> None:
        """See to the long journals that are known, then look at so many rows for others."""
        if self._known:
            # Those that have ended since are forgotten here.
            self._known = await self._see_to(await self._look(ids=self._known))
        met = await self._paced(
            lambda conn, schema: sample_long_journals(
                conn, schema, moves=self._moves, pages=PAGES, most=MOST_KNOWN
            )
        )
        new = tuple(number for number in met if number not in self._known)
        if new:
            self._remember(await self._see_to(await self._look(ids=new)))
        while rows > 0:
            found = await self._look(after=self._position, limit=LOOK)
            self._remember(await self._see_to(found))
            if found.last is None or found.looked < LOOK:
                self._position = 0
                return
            self._position = found.last
            rows -= found.looked

    def _remember(self, numbers: tuple[int, ...]) -> None:
        self._known = tuple(dict.fromkeys((*self._known, *numbers)))[:MOST_KNOWN]

    async def _look(
        self, *, after: int = 0, limit: int = 0, ids: tuple[int, ...] | None = None
    ) -> LongJournals:
        return await self._paced(
            lambda conn, schema: find_long_journals(
                conn, schema, moves=self._moves, after=after, limit=limit, ids=ids
            )
        )

    async def _see_to(self, found: LongJournals) -> tuple[int, ...]:
        """Write the snapshots that are due, and delete what may go. Returns who has a long journal."""
        for number in sorted({*found.grown, *found.hides}):
            try:
                if number in found.grown:
                    await self._snapshot(number)
                await self._truncate(number)
            except psycopg.OperationalError:  # a time-out of locks or statements, an outage
                raise
            except psycopg.Error as exc:  # somebody's trigger, or a row that no record can have
                self._complain(number, exc)
        return found.ids

    async def _snapshot(self, number: int) -> None:
        taken = await self._paced(
            lambda conn, schema: snapshot_journal(conn, schema, number, moves=self._moves)
        )
        self._snapshots += taken is not None

    async def _truncate(self, number: int) -> None:
        """Delete batch by batch. Cancelled: a batch is all or nothing, and the next round goes on."""
        gone: int | None = BATCH
        while gone == BATCH:
            gone = await self._paced(
                lambda conn, schema: truncate_journal(conn, schema, number, moves=self._moves, most=BATCH)
            )
            self._records += gone or 0

    async def _paced(self, call: Callable[[PgConn, str], Awaitable[T]]) -> T:
        """One statement, and the pause after it."""
        node, began = self._node, trio.current_time()
        patience = answer_patience(node.owner.lease_ttl)
        async with node.pool.acquire(node.lane("client"), within=patience) as conn:
            result = await call(conn, node.owner.schema)
        await trio.sleep(max(REST * (trio.current_time() - began), LEAST_PAUSE))
        return result

    def _complain(self, number: int, error: psycopg.Error) -> None:
        """Log that a journal stays as it is; once, for it is met again in every round."""
        if not self._complained:
            self._complained = True
            logger.warning(
                "retention: the journal of instance %s cannot be shortened: %s (further ones are not logged)",
                number,
                error,
            )

    def report(self) -> None:
        """Tell what was done since the last report."""
        snapshots, records = self._snapshots, self._records
        self._snapshots = self._records = 0
        if not snapshots and not records:
            return
        logger.debug(
            "retention: wrote %s of live instances, and deleted %s that lie further back",
            counted(snapshots, "snapshot"),
            counted(records, "record"),
        )
        if self._node.telemetry.active:
            self._node.telemetry.emit(JournalsTruncated(snapshots=snapshots, records=records))
