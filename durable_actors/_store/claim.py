"""Claims: pick, read, release."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from operator import itemgetter
from types import MappingProxyType
from typing import Any, Final, cast

import attrs

from durable_actors._postgres.driver import encode
from durable_actors._postgres.driver.connection import PgConn
from durable_actors._postgres.driver.decode import decode_text_array
from durable_actors._postgres.driver.statement import Params, Row, Statement
from durable_actors._store.commands import Request, read_cancellation, read_request
from durable_actors._store.holds import HELD, OFFERED
from durable_actors._store.rows import Claim, OrphanedClaim, PickResult, Promoted, RecordedClaim, Seen
from durable_actors._store.sql import statement
from durable_actors.machine import FAILURES


@attrs.frozen
class Released:
    """Claims that were released."""

    runnable: frozenset[int]
    """The instances that run again."""
    cancelled: frozenset[int]
    """Those that have ended with their claim: their node was asked to cancel them."""
    offered: tuple[Promoted, ...]
    """Siblings of their keys, and parents of cancelled ones, that are offered now."""
    cascades: bool = False
    """Whether children of them are to be cancelled."""

    @property
    def ids(self) -> frozenset[int]:
        """All of them."""
        return self.runnable | self.cancelled


@attrs.frozen
class Owner:
    """The claiming node, its schema, and the duration of its leases."""

    schema: str
    name: str
    """`locked_by`: node and incarnation."""
    token_hash: bytes
    """Hash of a token; the token itself stays in this process."""
    lease_ttl: float


@attrs.frozen
class PickFrom:
    """Where a pick begins: the priorities to read, a position for each, and single rows."""

    priorities: Sequence[int]
    eligible_ats: Sequence[str]
    ids: Sequence[int]
    extras: Sequence[int] = ()
    shelved: Sequence[str] = ()
    by_id: Sequence[int] = ()
    """Claim only these rows, if they have no key: a shorter statement."""


async def pick_instances(
    conn: PgConn, owner: Owner, *, queue: str, limit: int, known: bytes, begin: PickFrom, now: float
) -> PickResult:
    """Claim up to `limit` due instances. `known` is `encode.text_array` of step addresses (`step_address`).

    `now` is the time on Trio's clock before this call: the lease is trusted from there. After a cancellation or
    `CommitUnknown` there may be claims that no task knows: see `release_orphans`.
    """
    if begin.by_id:
        result = await conn.run(
            statement("pick_instances_by_id", owner.schema, typed=True),
            [
                queue.encode(),
                encode.int_array(begin.by_id),
                owner.name.encode(),
                encode.number(owner.lease_ttl),
                known,
                encode.bytea(owner.token_hash),
            ],
        )
    else:
        result = await conn.run(
            statement("pick_instances", owner.schema, typed=True),
            [
                queue.encode(),
                encode.number(limit),
                owner.name.encode(),
                encode.number(owner.lease_ttl),
                known,
                encode.int_array(begin.priorities),
                encode.text_array(begin.eligible_ats),
                encode.int_array(begin.ids),
                encode.int_array(begin.extras),
                owner.schema.encode(),
                encode.text_array(begin.shelved),
                encode.bytea(owner.token_hash),
            ],
        )
    rows = cast("list[tuple[Any, ...]]", result.rows)
    if begin.by_id:
        rows = [row[:-1] for row in rows]  # without what the journal's record returned
    picked = read_pick(rows, queue=queue, trusted_until=trusted_until(now, owner.lease_ttl))
    if begin.by_id or not begin.priorities:
        picked.positions.clear()  # the rows before these were not read
    return picked


@attrs.frozen
class ClaimAtOnce:
    """What a node may claim in the transaction that makes a row runnable: one row, in one of these queues."""

    owner: Owner
    queues: Sequence[str]
    known: bytes
    """The steps that the node knows (`encode.text_array`)."""
    now: float
    """The time on Trio's clock before the call: the lease is trusted from there."""

    def call(self, ids: Sequence[int] = ()) -> tuple[Statement, Params]:
        """The statement that claims one of these rows; without ids the row that the transaction has inserted last."""
        owner = self.owner
        return statement("claim_at_once", owner.schema, typed=True), [
            encode.text_array(self.queues),
            encode.int_array(ids),
            owner.name.encode(),
            encode.number(owner.lease_ttl),
            self.known,
            encode.bytea(owner.token_hash),
        ]

    def read(self, rows: Sequence[Any]) -> list[Claim]:
        """The claims of the statement's rows. Pure."""
        until = trusted_until(self.now, self.owner.lease_ttl)
        return [
            claim
            for row in rows
            for claim in read_pick([row[:-1]], queue=row[-1], trusted_until=until).claims
        ]


def trusted_until(now: float, lease_ttl: float) -> float:
    """When the trust in a lease ends: not later than the lease, rounded down to a multiple of 1/256 of it.

    So the claims of many picks share one deadline. Moving a task's deadline costs Trio 2 to 4 µs, a tenth of a step; a
    worker that runs one claim after the other keeps its deadline.
    """
    grid = lease_ttl / 256
    return (now + lease_ttl) // grid * grid


def read_pick(rows: list[tuple[Any, ...]], *, queue: str, trusted_until: float) -> PickResult:
    """Read the rows of a pick. Pure."""
    claims: list[Claim] = []
    seen: list[Seen] = []
    positions: dict[int, tuple[str, int]] = {}
    rows.sort(key=_ORDER)
    for (
        number, priority, at, what, claim, fsm, version, step, attempt, crashes, visit, state, key, parent, awaits,
        inbox, children, round_, journal, cancellation,
    ) in rows:  # fmt: skip
        positions[priority] = (at, number)  # the last one of each priority stays
        if what != "c":
            seen.append(Seen(number, priority, at, what))
            continue
        found = Claim(
            number,
            claim,
            queue,
            priority,
            fsm,
            version,
            step,
            attempt,
            crashes,
            visit,
            state.encode(),
            key,
            parent,
            None if awaits is None else decode_text_array(awaits.encode()),
            inbox,
            children,
            round_,
            trusted_until,
        )
        found.due_at = at
        if journal == "1":  # most jobs
            found.journal = FAILURES
        elif journal is not None:
            _read_recorded(found, journal)
        if cancellation is not None:
            found.cancellation = read_cancellation(cancellation.encode())
        claims.append(found)
    return PickResult(claims, seen, positions)


def _read_recorded(claim: Claim, journal: str) -> None:
    """Trace, limit of attempts, part in a graph, level, definition, end of the lease (from every move on), limits."""
    journal, _, limited = journal.partition("\x1d")
    uses, _, weight = limited.rpartition("\x1d")
    trace, _, journal = journal.rpartition("\x1f")
    limit, _, journal = journal.rpartition("#")
    if limit:
        claim.max_attempts = int(limit)
    part, _, journal = journal.rpartition("@")
    links = int(part or 0)
    level, _, rest = journal.partition(" ")
    definition, _, lease = rest.partition(" ")
    claim.journal = int(level or 0)
    if rest or links or trace or limited:
        claim.recorded = RecordedClaim(definition or None, lease or None, links=links, trace=trace or None)
        if limited:
            claim.recorded.rate_limit, claim.recorded.weight = uses, int(weight)


_ORDER: Final = itemgetter(1, 2, 0)
"""Priority, instant, id: the order of the pick. Instants can be sorted as text: the session's time zone is UTC, its
datestyle is ISO, and for fractions of different length `+` sorts before `.` and every digit."""


async def release_claims(
    conn: PgConn,
    schema: str,
    claims: Sequence[Claim | OrphanedClaim],
    *,
    attempts: int,
    interruptions: int = 0,
    hold: int = OFFERED,
) -> Released:
    """Release claims. An instance whose node was asked to cancel it ends; the barrier of its parent counts that.

    A claim whose id is missing was lost already, or its row or its parent's is locked: then it ends with its lease.
    `interruptions` is 1 for runs that a drain ended; they do not count as attempts.
    `hold`: `HELD` if the key is busy elsewhere; the rows keep their position, and `promote_siblings` offers them again.
    `SHELVED` if this node's code does not have their step (any more); a node that has it finds them.
    """
    keys = sorted({claim.partition_key for claim in claims if claim.partition_key is not None})
    children = [claim.id for claim in claims if claim.parent_id is not None]
    params = [
        encode.int_array([claim.id for claim in claims]),
        encode.text_array([claim.claim_id for claim in claims]),
        encode.number(attempts),
        encode.number(hold),
        encode.number(interruptions),
    ]
    calls = [(statement("release_claims", schema), params)]
    if keys and hold != HELD:
        calls.append((statement("promote_siblings", schema), [encode.text_array(keys)]))
    if children:
        calls.append((statement("join_parents", schema), [encode.int_array(children)]))
    done, *riders = [result.rows for result in await conn.batch(calls)]
    ended = frozenset(int(row[0] or 0) for row in done if row[3] == b"cancelled")
    return Released(
        frozenset(int(row[0] or 0) for row in done) - ended,
        ended,
        tuple(each for rows in riders for each in read_promoted(rows)),
        any(row[4] == b"t" for row in done),
    )


async def promote_siblings(conn: PgConn, schema: str, keys: Sequence[str]) -> list[Promoted]:
    """Offer the first held row of each key to the pick again."""
    result = await conn.run(statement("promote_siblings", schema), [encode.text_array(keys)])
    return read_promoted(result.rows)


def read_promoted(rows: list[Row]) -> list[Promoted]:
    """Read promoted rows: of join_parents also whether children of one are to be cancelled. Pure."""
    return [
        Promoted(int(row[0] or 0), (row[1] or b"").decode(), len(row) > 2 and row[2] == b"t") for row in rows
    ]


async def probe_locks(conn: PgConn, schema: str, ids: Sequence[int]) -> set[int]:
    """Which of these instances are not locked at the moment."""
    result = await conn.run(statement("probe_locks", schema), [encode.int_array(ids)])
    return {int(row[0] or 0) for row in result.rows}


@attrs.frozen
class ClaimRow:
    """The current owner of an instance."""

    claim_id: str | None
    visit: int
    status: str
    state: bytes
    request: Request | None = None
    """What a command asks of the node that runs it."""


async def read_claims(conn: PgConn, schema: str, ids: Sequence[int]) -> dict[int, ClaimRow]:
    """Read, without locking, who owns these instances. Deleted ones are missing."""
    result = await conn.run(statement("read_claims", schema, read_only=True), [encode.int_array(ids)])
    return {
        int(row[0] or 0): ClaimRow(
            None if row[1] is None else row[1].decode(),
            int(row[2] or 0),
            (row[3] or b"").decode(),
            row[4] or b"",
            None if row[5] is None else read_request(row[5]),
        )
        for row in result.rows
    }


async def read_requests(conn: PgConn, schema: str, owner: str) -> dict[str, Request]:
    """What commands ask of this node, by claim id. What is not a request is left out."""
    rows = (await conn.run(statement("read_requests", schema, read_only=True), [owner.encode()])).rows
    found = (((row[1] or b"").decode(), read_request(row[2] or b"null")) for row in rows)
    return {claim_id: request for claim_id, request in found if request is not None}


@attrs.frozen
class QueueShape:
    """What a feeder needs to know about its queue."""

    priorities: tuple[int, ...]
    """Priorities that have offered rows, due or not."""
    next_due: float | None
    """Seconds until the next future row is due; None if there is none."""
    shelved: tuple[str, ...]
    """Addresses of the steps of shelved rows, which some node could not run."""
    next_deadline: float | None
    """Seconds until the next deadline of an await or barrier; None if there is none."""
    pauses: Mapping[str, float] = MappingProxyType({})
    """Seconds until the pause of a machine is over, infinity: not by itself; "" is the whole queue. A paused queue has
    neither priorities nor shelved steps."""
    next_token: float | None = None
    """Seconds until throttled rows are to be looked at (`read_thawed`); None: none is throttled."""


async def read_queue(conn: PgConn, schema: str, queue: str, *, since: float = 0.0) -> QueueShape:
    """Read which priorities and shelved steps a queue has, and when its next future row is due.

    A row that became due in the last `since` seconds counts as a future one: the pick that was sent then missed it.
    """
    params = [queue.encode(), encode.number(since)]
    result = await conn.run(statement("read_queue", schema, read_only=True), params)
    due = [float(row[1]) for row in result.rows if row[0] is not None and row[1] is not None]
    return QueueShape(
        tuple(int(row[0]) for row in result.rows if row[0] is not None),
        min(due, default=None),
        tuple(row[2].decode() for row in result.rows if row[2] is not None),
        min((float(row[3]) for row in result.rows if row[3] is not None), default=None),
        {row[4].decode(): _seconds_left(row[5]) for row in result.rows if row[4] is not None},
        next((float(row[1]) for row in result.rows if row[0] is None and row[1] is not None), None),
    )


async def read_queue_pauses(conn: PgConn, schema: str, queues: Sequence[str]) -> dict[str, dict[str, float]]:
    """The pauses of these queues, each as in `QueueShape.pauses`. A queue that is not paused has none."""
    call = statement("read_pauses", schema, read_only=True)
    found: dict[str, dict[str, float]] = {queue: {} for queue in queues}
    for row in (await conn.run(call, [encode.text_array(queues)])).rows:
        found[(row[0] or b"").decode()][(row[1] or b"").decode()] = _seconds_left(row[6])
    return found


def _seconds_left(value: bytes | None) -> float:
    return math.inf if value is None else float(value)


@attrs.define
class WorkSeen:
    """What the server has seen while it waited."""

    due: dict[str, int] = attrs.field(factory=dict[str, int])
    """The queues that have a due row, each with the most urgent priority that has one."""
    tokens: set[str] = attrs.field(factory=set[str])
    """The queues in which a throttled row may have its token."""
    cascades: bool = False
    """Whether children are to be cancelled."""
    paused_machines: dict[str, set[str]] = attrs.field(factory=dict[str, set[str]])
    """The machines that are paused at the end of the wait, by queue."""


async def wait_for_work(
    conn: PgConn, schema: str, queues: Sequence[str], *, every: float, patience: float
) -> WorkSeen:
    """Wait on the server until one of the queues has a due row, or for `patience` seconds; it checks every `every`."""
    params = [encode.text_array(queues), encode.number(every), encode.number(patience)]
    rows = (await conn.run(statement("wait_for_work", schema, read_only=True), params)).rows
    seen = WorkSeen()
    for queue, priority, machine in rows:
        if queue is None:
            seen.cascades = True
        elif priority is None and machine is None:
            seen.tokens.add(queue.decode())
        elif machine is None:
            seen.due[queue.decode()] = int(priority or 0)
        else:
            seen.paused_machines.setdefault(queue.decode(), set()).add(machine.decode())
    return seen
