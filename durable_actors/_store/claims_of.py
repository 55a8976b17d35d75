"""What one node has claimed, for the dashboard."""

from __future__ import annotations

from datetime import datetime

import attrs

from durable_actors._postgres.driver import encode
from durable_actors._postgres.driver.connection import PgConn
from durable_actors._postgres.driver.decode import decode_instant
from durable_actors._store.sql import statement


@attrs.frozen(kw_only=True)
class HeldClaim:
    """An instance that a node has claimed."""

    id: int
    machine: str
    version: int
    step: str
    queue: str
    attempt: int
    since: datetime | None
    """When it was claimed, or when its current step began."""
    lease_until: datetime | None


async def read_claims_of(conn: PgConn, schema: str, incarnation: str, *, limit: int) -> tuple[HeldClaim, ...]:
    """Read the claims of a node, the longest held first."""
    params = [encode.text(incarnation), encode.number(limit)]
    rows = (await conn.run(statement("list_claims", schema, read_only=True), params)).rows
    return tuple(
        HeldClaim(
            id=int(row[0] or 0),
            machine=(row[1] or b"").decode(),
            version=int(row[2] or 0),
            step=(row[3] or b"").decode(),
            queue=(row[4] or b"").decode(),
            attempt=int(row[5] or 0),
            since=decode_instant(row[6]),
            lease_until=decode_instant(row[7]),
        )
        for row in rows
    )
