"""Leases: the owner renews them; any node takes back a claim whose lease has expired."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

import attrs

from durable_actors._postgres.driver import encode
from durable_actors._postgres.driver.connection import PgConn
from durable_actors._postgres.driver.statement import Row
from durable_actors._store.claim import promote_siblings, read_promoted, release_claims
from durable_actors._store.rows import Claim, OrphanedClaim, Promoted, Raised
from durable_actors._store.sql import statement
from durable_actors.machine import ENDED

RUNNER: Final = "runner:"
"""How the owner of a runner's claim begins (`claim_next`). It has no session lock: its lease tells whether it lives."""


async def renew_leases(conn: PgConn, schema: str, claims: Sequence[Claim], *, lease_ttl: float) -> set[str]:
    """Renew leases; return the renewed claim ids. A missing one is not necessarily lost: see `read_claims`."""
    result = await conn.run(
        statement("renew_leases", schema),
        [
            encode.int_array([claim.id for claim in claims]),
            encode.text_array([claim.claim_id for claim in claims]),
            encode.number(lease_ttl),
        ],
    )
    renewed = {(row[0] or b"").decode(): row[1] for row in result.rows}
    for claim in claims:
        if (
            claim.recorded.lease_until is not None and claim.claim_id in renewed
        ):  # its record will say until when
            claim.recorded.lease_until = (renewed[claim.claim_id] or b"").decode()
    return set(renewed)


@attrs.frozen
class OwnerState:
    """A node that holds claims, as the database sees it."""

    owner: str
    claims: int
    soonest_expiry: float
    """Seconds until its first lease expires; negative if it has expired."""
    latest_expiry: float
    """When its last lease expires, on the server's clock. It moves when the node claims or renews anything."""
    alive: bool
    """Whether a session holds the owner's lock. If not, the node is gone or has lost its session."""
    server_up: float
    """Seconds since the server started. A restart releases every lock and proves nothing about nodes."""
    backend: int
    """Pid of the server process that ran this query."""


async def read_owners(conn: PgConn, schema: str) -> list[OwnerState]:
    """Read which nodes hold claims."""
    result = await conn.run(statement("read_owners", schema, read_only=True), [schema.encode()])
    return [
        OwnerState(
            owner=(row[0] or b"").decode(),
            claims=int(row[1] or 0),
            soonest_expiry=float(row[2] or 0),
            latest_expiry=float(row[3] or 0),
            alive=row[4] == b"t",
            server_up=float(row[5] or 0),
            backend=int(row[6] or 0),
        )
        for row in result.rows
    ]


@attrs.frozen
class Reaped:
    """A claim that was taken back."""

    id: int
    queue: str
    status: str
    """`runnable`, `failed` if its step crashed too often, or `cancelled` if its node was asked to cancel it."""
    machine: str
    step: str
    fault: str | None
    """Why it failed."""
    cascades: bool = False
    """Whether its children are to be cancelled."""


async def reap_claims(
    conn: PgConn,
    schema: str,
    *,
    limit: int,
    dead: Mapping[str, float] = MappingProxyType({}),
    max_crashes: int | None = None,
) -> tuple[list[Reaped], list[Promoted]]:
    """Take back up to `limit` claims whose lease has expired or whose owner is in `dead`; the steps run again.

    `dead` maps owners to their `latest_expiry` at the time when they were found dead: claims that were made or renewed
    since are not taken back, nor are those of an owner that has its session lock again.

    Returns the reaped claims, and rows that are offered now: siblings of their keys, parents of ended children. It is
    one transaction, so a barrier counts a child in the transaction that ends the child.
    """
    params = [
        encode.number(limit),
        encode.text_array(dead),
        encode.number(max_crashes),
        encode.float_array(dead.values()),
        schema.encode(),
    ]
    async with conn.transaction():
        return await _taken_back(
            conn, schema, (await conn.run(statement("reap_claims", schema), params)).rows
        )


async def crash_claims(
    conn: PgConn,
    schema: str,
    claims: Sequence[Claim],
    *,
    error: str,
    raised: Raised | None = None,
    max_crashes: int | None = None,
) -> tuple[list[Reaped], list[Promoted]]:
    """Release claims whose step raised an `error` that `handle` does not get: each counts as a crash of its worker.

    Returns the released claims, and rows that are offered now. A missing one was lost already, or its row or its
    parent's row is locked: then it is still ours.
    """
    params = [
        encode.int_array([claim.id for claim in claims]),
        encode.text_array([claim.claim_id for claim in claims]),
        encode.text_array([error] * len(claims)),
        encode.number(max_crashes),
        None if raised is None else raised.type.encode(),
        None if raised is None or raised.traceback is None else raised.traceback.encode(),
    ]
    async with conn.transaction():
        return await _taken_back(
            conn, schema, (await conn.run(statement("crash_claims", schema), params)).rows
        )


async def _taken_back(conn: PgConn, schema: str, rows: list[Row]) -> tuple[list[Reaped], list[Promoted]]:
    """Offer the rows that the end of these claims makes runnable: siblings of their keys, parents of ended ones."""
    reaped = [
        Reaped(
            id=int(row[0] or 0),
            queue=(row[1] or b"").decode(),
            status=(row[3] or b"").decode(),
            machine=(row[4] or b"").decode(),
            step=(row[5] or b"").decode(),
            fault=None if row[6] is None else row[6].decode(),
            cascades=row[7] == b"t",
        )
        for row in rows
    ]
    keys = sorted({row[2].decode() for row in rows if row[2] is not None})
    offered = await promote_siblings(conn, schema, keys) if keys else []
    ended = [each.id for each in reaped if each.status in ENDED]
    if ended:
        joined = await conn.run(statement("join_parents", schema), [encode.int_array(ended)])
        offered += read_promoted(joined.rows)
    return reaped, offered


async def read_orphans(
    conn: PgConn, schema: str, *, owner: str, queue: str, known: Sequence[str]
) -> list[OrphanedClaim]:
    """Read the owner's claims of a queue whose claim ids are not in `known`."""
    params = [owner.encode(), queue.encode(), encode.text_array(known)]
    return [
        OrphanedClaim(
            int(row[0] or 0),
            (row[1] or b"").decode(),
            None if row[2] is None else row[2].decode(),
            None if row[3] is None else int(row[3]),
        )
        for row in (await conn.run(statement("read_orphans", schema, read_only=True), params)).rows
    ]


async def release_orphans(
    conn: PgConn, schema: str, *, owner: str, queue: str, known: Sequence[str]
) -> tuple[int, list[Promoted]]:
    """Release the owner's claims of a queue whose claim ids are not in `known`. They never ran: attempts stay.

    Returns how many, and the rows that are offered now: these and siblings of their keys. They are read first and then
    released by claim id: the server may execute a statement after its connection was given up, when `known` is
    outdated.
    """
    orphans = await read_orphans(conn, schema, owner=owner, queue=queue, known=known)
    if not orphans:
        return 0, []
    released = await release_claims(conn, schema, orphans, attempts=0)
    again = [Promoted(number, queue) for number in sorted(released.runnable)]
    return len(released.ids), [*again, *released.offered]


async def sweep_keys(conn: PgConn, schema: str, *, after: str, limit: int) -> tuple[list[str], str | None]:
    """Find keys whose held rows nothing will release. Returns them, and where to continue (None: at the end).

    Also offers rows that are held without any key; only SQL by hand makes such rows.
    """
    params = [after.encode(), encode.number(limit)]
    rows = (await conn.run(statement("sweep_keys", schema, read_only=True), params)).rows
    if rows and rows[0][0] is None:
        rows = rows[1:]
        await conn.run(statement("free_holds", schema), [encode.number(limit)])
    stuck = [row[0].decode() for row in rows if row[0] is not None and row[1] == b"t"]
    last = rows[-1][0] if len(rows) == limit else None
    return stuck, None if last is None else last.decode()
