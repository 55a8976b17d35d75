"""Samples of queues and nodes for the dashboard: one per interval for the whole cluster, kept in `samples`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime
from itertools import pairwise
from typing import Final

import msgspec

from durable_actors._postgres.driver import encode
from durable_actors._postgres.driver.connection import PgConn
from durable_actors._postgres.driver.statement import Row
from durable_actors._store.limits import count_throttled, find_undeclared
from durable_actors._store.observe import NodeView, count_statuses, read_nodes
from durable_actors._store.pauses import read_pause_list
from durable_actors._store.rates import read_rates
from durable_actors._store.sql import statement
from durable_actors.machine import builtin_queues

CAP: Final = 10_001
"""Rows that are counted of each queue and kind: 10,001 means "more than 10,000"."""


SMALL: Final = 8 * 1024 * 1024
"""Bytes of a table whose rows are counted: some ten thousand of them, in some milliseconds."""


class PauseSample(msgspec.Struct, frozen=True, kw_only=True):
    """The pause of a queue, or of a machine in it."""

    machine: str | None
    at: datetime
    until: datetime | None = None
    by: str | None = None
    reason: str | None = None


class QueueSample(msgspec.Struct, frozen=True, kw_only=True):
    """The work of one queue. Counts end at 10,001."""

    queue: str
    due: int = 0
    scheduled: int = 0
    held: int = 0
    shelved: int = 0
    paused: int = 0
    executing: int = 0
    asks: int = 0
    """Instances that wait for a person."""
    throttled: int = 0
    """Instances that wait for a limit."""
    oldest_due: float | None = None
    """Seconds that the oldest due row has waited, among those that were counted."""
    capped: bool = False
    """Whether there are more rows on offer than were counted."""
    pauses: tuple[PauseSample, ...] = ()
    nodes: int = 0
    """Live nodes that serve it."""
    slots: int = 0
    """Steps that they run at the same time."""
    fair: bool = False
    """Whether one of them shares it among fair keys."""

    @property
    def paused_whole(self) -> PauseSample | None:
        """The pause of the queue itself."""
        return next((each for each in self.pauses if each.machine is None), None)


class NodeSample(msgspec.Struct, frozen=True, kw_only=True):
    """One incarnation of a node that is alive or has claims."""

    incarnation: str
    state: str
    claims: int
    queues: dict[str, int]
    version: str | None = None
    started_at: datetime | None = None
    seen_at: datetime | None = None
    stopped_at: datetime | None = None
    pid: int | None = None


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """What one sample has found."""

    at: datetime
    queues: tuple[QueueSample, ...] = ()
    nodes: tuple[NodeSample, ...] = ()
    failed: int = 0
    """Failed instances, up to 10,001."""
    limits: dict[str, int] = {}
    """How many instances wait for each limit, of each queue up to 10,001: the 100 with most of them."""
    undeclared: tuple[str, ...] = ()
    """Limits for which instances wait and which nobody has declared: the first ten."""
    statuses: dict[str, int] = {}
    """About how many instances have each status; empty if the table is large and was never analyzed."""
    estimated: bool = True
    """Whether these come from the statistics of the planner. A small table is counted."""
    inserts: int = 0
    """Rows ever inserted, updated, and signals sent: two samples make rates."""
    updates: int = 0
    signals: int = 0

    def queue(self, name: str) -> QueueSample | None:
        """The queue of this name, if it has work or is served."""
        return next((each for each in self.queues if each.queue == name), None)

    def total(self, kind: str) -> int:
        """The sum of one of the counts over all queues."""
        return sum(getattr(each, kind) for each in self.queues)

    @property
    def partly(self) -> tuple[str, ...]:
        """What is counted in all queues together, and of which there is more: each queue may have more of it."""
        return tuple(kind for kind in ("held", "executing", "asks") if self.total(kind) >= CAP)


async def take_sample(conn: PgConn, schema: str, *, interval: float) -> Sample | None:
    """Take the sample of this interval and write it; None if somebody else does.

    Cancelled, or an error: the row of the interval stays empty, and nobody takes this one.
    """
    rows = (await conn.run(statement("begin_sample", schema), [encode.number(interval)])).rows
    if not rows:
        return None
    sample = await measure(conn, schema)
    params = [rows[0][0], msgspec.json.encode(sample)]
    await conn.run(statement("finish_sample", schema), params)
    return sample


async def measure(conn: PgConn, schema: str) -> Sample:
    """Count what waits and runs, up to the cap. Reads no finished row but failed ones, through their index."""
    cap = encode.number(CAP)
    queues = (await conn.run(statement("sample_queues", schema, read_only=True), [cap])).rows
    failed, statuses, estimated = await _read_statuses(conn, schema)
    undeclared = await find_undeclared(conn, schema, lines=CAP, limit=10)
    throttled, limits = await count_throttled(conn, schema, cap=CAP)
    nodes = await read_nodes(conn, schema)
    rates = await read_rates(conn, schema)
    counted = {(row[0] or b"").decode(): row for row in queues}
    live = [each for each in nodes if each.alive]
    served = {name for each in live for name in each.queues} - builtin_queues()
    return Sample(
        at=datetime.fromtimestamp(rates.at, UTC),
        queues=tuple(
            _queue(name, counted.get(name), live, throttled[name])
            for name in sorted(counted.keys() | served | throttled.keys())
        ),
        nodes=tuple(_node(each) for each in nodes if each.alive or each.claims),
        failed=failed,
        limits=dict(limits.most_common(100)),
        undeclared=undeclared,
        statuses=statuses,
        estimated=estimated,
        inserts=rates.inserts,
        updates=rates.updates,
        signals=rates.signals,
    )


async def _read_statuses(conn: PgConn, schema: str) -> tuple[int, dict[str, int], bool]:
    """Failed instances up to the cap, instances by status, and whether the latter are estimates."""
    params = [schema.encode(), encode.number(CAP)]
    rows = (await conn.run(statement("estimate_statuses", schema, read_only=True), params)).rows
    single = {row[0]: int(row[2] or 0) for row in rows if row[1] is None}
    found = {row[1].decode(): int(row[2] or 0) for row in rows if row[1] is not None}
    estimated = single[b"bytes"] > SMALL
    if not estimated:
        exact: Counter[str] = Counter()
        for statuses in (await count_statuses(conn, schema)).values():
            exact.update(statuses)
        found = dict(exact)
    return single[b"failed"], found, estimated


def _queue(name: str, row: Row | None, live: list[NodeView], throttled: int) -> QueueSample:
    nodes = sum(name in node.queues for node in live)
    slots = sum(node.queues.get(name, 0) for node in live)
    fair = any(name in node.fair for node in live)
    if row is None:
        return QueueSample(queue=name, nodes=nodes, slots=slots, fair=fair, throttled=throttled)
    due, later, held, shelved, paused, executing, asks = (int(each or 0) for each in row[1:8])
    pauses = tuple(
        PauseSample(machine=each.machine, at=each.at, until=each.until, by=each.by, reason=each.reason)
        for each in read_pause_list(name, row[10])
    )
    return QueueSample(
        queue=name, due=due, scheduled=later, held=held, shelved=shelved, paused=paused, executing=executing,
        asks=asks, throttled=throttled, oldest_due=None if row[8] is None else float(row[8]), capped=row[9] == b"t",
        pauses=pauses, nodes=nodes, slots=slots, fair=fair,
    )  # fmt: skip


def _node(view: NodeView) -> NodeSample:
    return NodeSample(
        incarnation=view.incarnation, state=view.state, claims=view.claims, queues=dict(view.queues),
        version=view.version, started_at=view.started_at, seen_at=view.seen_at, stopped_at=view.stopped_at,
        pid=view.pid,
    )  # fmt: skip


async def read_samples(conn: PgConn, schema: str, *, after: int = 0, limit: int = 1) -> dict[int, Sample]:
    """Read the newest samples behind a slot: slot → sample, newest first. Those that cannot be read are left out."""
    params = [encode.number(after), encode.number(limit)]
    rows = (await conn.run(statement("read_samples", schema, read_only=True), params)).rows
    found: dict[int, Sample] = {}
    for slot, _, data in rows:
        try:
            found[int(slot or 0)] = msgspec.json.decode(data or b"null", type=Sample)
        except (ValueError, RecursionError):
            continue  # of another release, or written by hand
    return found


def rates_of(samples: Mapping[int, Sample]) -> list[tuple[datetime, float, float]]:
    """Inserts and updates per second between samples, oldest first. Pure."""
    found: list[tuple[datetime, float, float]] = []
    ordered = [samples[slot] for slot in sorted(samples)]
    for before, after in pairwise(ordered):
        passed = (after.at - before.at).total_seconds()
        if passed > 0:
            inserts = max(after.inserts - before.inserts, 0) / passed
            updates = max(after.updates - before.updates, 0) / passed
            found.append((after.at, inserts, updates))
    return found
