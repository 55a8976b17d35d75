"""The demo's worker process: claims one instance and commits step after step until it is killed.

`python -m durable_actors.cli.demo_worker DSN SCHEMA ID STEPS` prints `claim <uuid>` once, then `<step>`
after each committed step.
"""

from __future__ import annotations

import sys
import uuid
from typing import Final

import trio

from durable_actors._postgres import encode
from durable_actors._postgres.connection import PgConn
from durable_actors._postgres.statement import Statement
from durable_actors._store.sql import in_schema

PAUSE: Final = 0.02
"""Seconds that a step "works"."""

CLAIM: Final = """
update durable.gen_durable
   set status = 'executing', claim_id = $2::uuid, locked_by = $3::text,
       lease_expires_at = now() + make_interval(secs => 60), updated_at = now()
 where id = $1::bigint and status in ('runnable', 'executing')
returning visit, (state->>'step')::int
"""

COMMIT: Final = """
update durable.gen_durable
   set state = $4::jsonb, visit = visit + 1, rev = rev + 1, updated_at = now()
 where id = $1::bigint and claim_id = $2::uuid and visit = $3::bigint
returning visit
"""


class Worker:
    """One claim on one instance. Every write carries the fence: id, claim, visit."""

    def __init__(self, conn: PgConn, schema: str, instance: int) -> None:
        self._conn = conn
        self._claim = Statement("demo_claim", in_schema(CLAIM, schema))
        self._commit = Statement("demo_commit", in_schema(COMMIT, schema))
        self._instance = encode.number(instance)
        self.claim_id = uuid.uuid4()
        self.visit = 0
        self.step = 0

    async def claim(self, owner: str) -> None:
        """Take the instance over; whoever had it can no longer write."""
        params = [self._instance, str(self.claim_id).encode(), owner.encode()]
        [[visit, step]] = (await self._conn.run(self._claim, params)).rows
        self.visit, self.step = int(visit or 0), int(step or 0)

    async def commit(self) -> bool:
        """Commit the next step; False when the fence refuses it."""
        state = encode.json({"step": self.step + 1})
        params = [self._instance, str(self.claim_id).encode(), encode.number(self.visit), state]
        rows = (await self._conn.run(self._commit, params)).rows
        if rows:
            self.visit, self.step = self.visit + 1, self.step + 1
        return bool(rows)


async def work(dsn: str, schema: str, instance: int, steps: int) -> None:
    """Claim, then commit a step every `PAUSE` seconds."""
    conn = await PgConn.open(dsn)
    try:
        worker = Worker(conn, schema, instance)
        await worker.claim("demo-worker")
        print("claim", worker.claim_id, flush=True)  # noqa: T201 - the demo reads it
        while worker.step < steps:
            await trio.sleep(PAUSE)
            if not await worker.commit():
                sys.exit("the claim was lost")
            print(worker.step, flush=True)  # noqa: T201
    finally:
        conn.close()


if __name__ == "__main__":
    trio.run(work, sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
