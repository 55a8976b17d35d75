"""Yardsticks for one partition key: commits one after the other, and a bare loop that hands the key on in each commit.

One raw connection each. The loop has neither user code nor leases to renew; its writes are fenced by the claim, on the
same table and rows. Both statements of a job are one transaction and one round trip.
"""

from __future__ import annotations

from psycopg import pq
from psycopg.pq import ExecStatus

from bench.ceiling import SETUP
from bench.meter import Meter

DONE = """
update durable.gen_durable g
   set status = 'done', result = 'null', locked_by = null, lease_expires_at = null,
       finished_at = now(), updated_at = now()
 where g.id = $1::bigint and g.claim_id = $2::uuid
returning g.partition_key"""

NEXT = """
update durable.gen_durable g
   set status = 'executing', hold = 0, locked_by = 'loop', claim_id = gen_random_uuid(),
       lease_expires_at = now() + interval '60 s', updated_at = now()
 where g.id = (select y.id from durable.gen_durable y
                where y.partition_key = $1::text and y.status = 'runnable' and y.eligible_at <= now()
                order by y.priority, y.eligible_at, y.id limit 1 for no key update skip locked)
returning g.id, g.claim_id, g.state"""


def _open(dsn: str, **statements: str) -> pq.PGconn:
    conn = pq.PGconn.connect(dsn.encode())
    conn.exec_(f"{SETUP}; set enable_bitmapscan = off".encode())
    for name, text in statements.items():
        _checked(conn.prepare(name.encode(), text.encode()))
    return conn


def _checked(result: pq.abc.PGresult | None) -> pq.abc.PGresult:
    assert result is not None
    if result.status not in {ExecStatus.TUPLES_OK, ExecStatus.COMMAND_OK, ExecStatus.PIPELINE_SYNC}:
        raise RuntimeError(result.error_message.decode())
    return result


def hand_on(meter: Meter, dsn: str, *, count: int, key: str) -> dict[str, float]:
    """Complete so many rows of a key, one after the other."""
    conn = _open(dsn, done=DONE, next=NEXT)
    parameter = key.encode()
    meter.start()
    found = _checked(conn.exec_prepared(b"next", [parameter]))
    conn.enter_pipeline_mode()
    for _ in range(count):
        done = [found.get_value(0, 0), found.get_value(0, 1)]
        conn.send_query_prepared(b"done", done)
        conn.send_query_prepared(b"next", [parameter])
        conn.pipeline_sync()
        _checked(conn.get_result())
        conn.get_result()  # the end of the first statement's results
        found = _checked(conn.get_result())
        conn.get_result()
        _checked(conn.get_result())  # the transaction is committed
    return meter.stop(count)


def commits(meter: Meter, dsn: str, *, count: int) -> dict[str, float]:
    """So many transactions of one row each."""
    conn = _open(dsn)
    _checked(conn.exec_(b"create table if not exists public.commits (n bigint)"))
    _checked(conn.prepare(b"commit", b"insert into public.commits values ($1::bigint)"))
    meter.start()
    for number in range(count):
        _checked(conn.exec_prepared(b"commit", [b"%d" % number]))
    return meter.stop(count)
