"""What a step gets beside its state: its inbox, awaited signals, a decision, children, what it comes after.

These are read when the step starts, not when its row is claimed: the claim may have been in the buffer for a while. An
instance that was never signalled, awaited neither a signal nor a decision (then its `awaits` is empty, not None) and
began at once needs no statement. If it had to wait for a slot, its inbox is read (`Dispatcher` sets the flag); one
statement reads the inboxes and decisions of many instances.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Final

import attrs
import psycopg

from durable_actors._engine.running.batched import Batched
from durable_actors._postgres.pool.pool import ConnectionPool
from durable_actors._store.children import count_children, read_children
from durable_actors._store.graph import read_dependencies
from durable_actors._store.rows import Claim
from durable_actors._store.signal import PAGE_SIZE, Inbox, read_awaited, read_inboxes, read_matching
from durable_actors.errors import StateError
from durable_actors.machine import (
    MOST_CHILDREN,
    NO_DEPENDENCIES,
    ChildView,
    Decision,
    ScheduledRun,
    Signal,
    Status,
)

MOST_DEPENDENTS: Final = 100
"""Instances whose dependencies one statement reads. If each comes after 1,000 others, that takes about 20 ms."""


@attrs.frozen
class StepInputs:
    """The fields of a context that are not in the row."""

    signals: tuple[Signal, ...] = ()
    awaited: tuple[Signal, ...] = ()
    more_signals: bool = False
    """The inbox has more than `PAGE_SIZE`."""
    decision: Decision | None = None
    """What a person decided at the boundary that led to the step."""
    scheduled: ScheduledRun | None = None
    """The slot for which a schedule started the instance."""
    children: tuple[ChildView, ...] | None = ()
    """None: there are too many to read, so they are counted."""
    children_counts: Mapping[Status, int] | None = None
    """By status; None: to be counted from `children`."""
    unseen: tuple[int, ...] = ()
    """Ids of awaited signals beyond the first `PAGE_SIZE`. They were there when the step began, so they must not
    wake it when it parks again; and as the step has not seen them, nothing consumes them."""
    dependencies: Mapping[str, ChildView] = NO_DEPENDENCIES
    """What the child comes after, by key."""


NO_INPUTS = StepInputs()


class InputLoader:
    """Reads the inputs for the step tasks of one engine."""

    def __init__(
        self,
        pool: ConnectionPool,
        lane: str,
        schema: str,
        *,
        beside: str | None = None,
        patience: float | None = None,
    ) -> None:
        """Read on `lane`, or on the lane `beside`, where an answer may take `patience` seconds at most."""
        self._pool = pool
        self._lane = lane
        self._schema = schema
        self._patience = patience
        self._inboxes: Batched[int, Inbox] = Batched(partial(self._fetch, lane), split_on=psycopg.Error)
        # A slow pick may occupy the claim lane: an instance that awaited nothing must not wait for it.
        self._beside: Batched[int, Inbox] = Batched(
            partial(self._fetch, beside or lane), split_on=psycopg.Error
        )

        self._dependencies: Batched[int, dict[str, ChildView] | StateError] = Batched(
            self._read_dependencies, limit=MOST_DEPENDENTS, split_on=psycopg.Error
        )

    async def load(self, claim: Claim, *, needs: bool = False) -> StepInputs:
        """The inputs of the claim's step; `needs`: also what it comes after.

        Raises `StoreUnavailable`, or `StateError` for a result.
        """
        signals: tuple[Signal, ...] = ()
        awaited: tuple[Signal, ...] = ()
        unseen: tuple[int, ...] = ()
        decision: Decision | None = None
        scheduled: ScheduledRun | None = None
        more = False
        # The inbox flag is as old as the claim, and a signal may have come since. An instance that awaited one must not
        # conclude that it timed out.
        if claim.inbox or claim.awaits is not None:
            found = await (self._beside if claim.awaits is None else self._inboxes).get(claim.id)
            decision, scheduled = found.decision, found.scheduled
            more = len(found) > PAGE_SIZE
            signals = tuple(found[:PAGE_SIZE])
        if claim.awaits:
            names = claim.awaits
            awaited = tuple(signal for signal in signals if signal.name in names)
            if more:  # awaited signals may be beyond the first page
                async with self._pool.acquire(self._lane) as conn:
                    matching = await read_matching(conn, self._schema, claim.id, names)
                    awaited = tuple(await read_awaited(conn, self._schema, claim.id, names))
                unseen = tuple(set(matching) - {signal.id for signal in awaited})
        children: tuple[ChildView, ...] | None = ()
        counts: Mapping[Status, int] | None = None
        if claim.children_total > MOST_CHILDREN:
            children, counts = None, await self._count(claim)
        elif claim.children_total:
            children = await self._children(claim)
        dependencies = NO_DEPENDENCIES
        if needs:
            read = await self._dependencies.get(claim.id)
            if isinstance(read, StateError):
                raise read
            dependencies = MappingProxyType(read)
        return StepInputs(signals, awaited, more, decision, scheduled, children, counts, unseen, dependencies)

    async def _children(self, claim: Claim) -> tuple[ChildView, ...]:
        """All children, page by page; the connection is returned between two pages."""
        found: list[ChildView] = []
        while True:
            after = found[-1].id if found else 0
            async with self._pool.acquire(self._lane) as conn:
                page = await read_children(
                    conn, self._schema, claim.id, claim.visit, after=after, limit=PAGE_SIZE
                )
            found += page
            if len(page) < PAGE_SIZE:
                return tuple(found)

    async def _read_dependencies(self, ids: list[int]) -> Mapping[int, dict[str, ChildView] | StateError]:
        async with self._pool.acquire(self._lane) as conn:
            return await read_dependencies(conn, self._schema, ids)

    async def _count(self, claim: Claim) -> Mapping[Status, int]:
        async with self._pool.acquire(self._lane) as conn:
            return await count_children(conn, self._schema, claim.id, claim.visit)

    async def _fetch(self, lane: str, ids: list[int]) -> Mapping[int, Inbox]:
        # The client lane has no time limit of its own, and the lease is renewed as long as the step waits.
        within = None if lane == self._lane else self._patience
        async with self._pool.acquire(lane, within=within) as conn:
            # One more than a page shows that there are more.
            return await read_inboxes(conn, self._schema, ids, limit=PAGE_SIZE + 1)
