"""A process that is stopped between two statements of a transaction gives its rows up before its lease is over."""

from __future__ import annotations

import psycopg
import pytest
import trio
from durable_actors._engine.lanes import lanes
from durable_actors._postgres.driver.connection import PgConn
from durable_actors._postgres.driver.statement import Statement
from durable_actors.errors import StoreUnavailable

LOCK = Statement("lock", "select id from durable.gen_durable where id = $1::bigint for no key update")


@pytest.mark.parametrize("role", ["client", "commit", "claim"])
async def test_a_stopped_worker_does_not_hold_its_row(durable_dsn: str, role: str):
    """As when a worker is stopped while it schedules children: the reaper passes locked rows over (I12)."""
    settings = lanes(6, session_dsn=None, keepalive=0.4)[role].settings
    insert = "insert into durable.gen_durable (fsm, step) values ('m', 's') returning id"
    with psycopg.connect(durable_dsn, autocommit=True) as other:
        [number] = other.execute(insert).fetchone() or [0]
        conn = await PgConn.open(durable_dsn, settings=settings)
        with pytest.raises(StoreUnavailable):
            async with conn.transaction():
                await conn.run(LOCK, [b"%d" % number])
                # Nothing more comes from there: the server ends that transaction by itself.
                other.execute("set lock_timeout = '20s'")
                row = await trio.to_thread.run_sync(
                    other.execute, "select 1 from durable.gen_durable for update"
                )
                assert row.fetchone() == (1,)
                await conn.run(LOCK, [b"%d" % number])
        conn.close()
