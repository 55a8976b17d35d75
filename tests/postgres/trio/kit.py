"""Helpers for the tests of the Trio connection."""

from __future__ import annotations

import os
from typing import Any

from durable_actors._postgres.trio.wait import TrioWaiter
from psycopg.pq import TransactionStatus
from tests.kit import Session

SLEEP = "select pg_sleep(30)"


class Probe(Session):
    """A second connection that watches what the server does for the first."""

    async def busy(self, conn: TrioWaiter[Any]) -> None:
        """Wait until the server is in the middle of something for `conn`."""
        await self.eventually(
            "select count(*) from pg_stat_activity where pid = %s and wait_event = 'PgSleep'",
            conn.info.backend_pid,
        )

    def ids(self) -> list[int]:
        """What table `scratch` holds."""
        return self.value("select coalesce(array_agg(id order by id), '{}') from scratch")


async def answers(conn: Any) -> None:
    """See that the connection is idle and gives the answer to *this* question."""
    assert conn.info.transaction_status == TransactionStatus.IDLE
    token = os.urandom(8).hex()
    assert await (await conn.execute("select %s", [token])).fetchone() == (token,)


async def execute(conn: Any) -> None:
    await conn.execute(SLEEP)
