"""What a poll of an empty queue costs: one look, and no pick until there is something."""

from __future__ import annotations

import durable_actors as da
import psycopg
import trio
from durable_actors.machine import isolated_registry

CALLS = """
select coalesce(sum(calls) filter (where query like '%recursive p(priority)%'), 0)::int,
       coalesce(sum(calls) filter (where query like '%judge_keys%'), 0)::int
  from pg_stat_statements s join pg_database d on d.oid = s.dbid where d.datname = current_database()
"""


def calls(connection: psycopg.Connection) -> tuple[int, int]:
    row = connection.execute(CALLS).fetchone()
    assert row is not None
    return row


async def test_an_idle_queue_is_looked_at_and_not_picked_from(durable_dsn):
    with isolated_registry(), psycopg.connect(durable_dsn, autocommit=True) as connection:
        connection.execute("create extension if not exists pg_stat_statements")
        ran = trio.Event()

        @da.job(name="late")
        async def late(args: dict) -> None:
            ran.set()

        quick = da.Config(dsn=durable_dsn, queues={"default": 2}, poll_interval=0.02, max_poll_interval=0.02)
        with trio.fail_after(30):
            async with da.open_engine(quick):
                looks = 0
                while looks < 3:  # the first pick was empty, polls have begun
                    await trio.sleep(0.02)
                    looks, _ = calls(connection)
                looks, picks = calls(connection)
                seen = looks
                while seen < looks + 10:
                    await trio.sleep(0.02)
                    seen, picked = calls(connection)
                assert picked == picks
                # Somebody elsewhere inserts, with a priority that nobody here has heard of.
                connection.execute(
                    "insert into durable.gen_durable (fsm, step, priority) values ('late', 'perform', 7)"
                )
                await ran.wait()
