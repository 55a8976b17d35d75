"""The statements of the bench, beside those of the store."""

from __future__ import annotations

from typing import Final

from durable_actors._postgres.driver.statement import Statement

NOW: Final = Statement("bench_now", "select durable.now()", read_only=True)
ADVANCE: Final = Statement(
    "bench_advance", "update durable.bench_clock set ahead = ahead + make_interval(secs => $1::float8)"
)
STOP: Final = Statement(
    "bench_stop", "update durable.bench_clock set stopped = coalesce(stopped, pg_catalog.now())"
)
"""The clock stands still from now on, but for ADVANCE."""
GO: Final = Statement("bench_go", "update durable.bench_clock set stopped = null")
"""It goes on with the server's time."""
NEXT_SLOT: Final = Statement(
    "bench_next_slot",
    """
    select extract(epoch from min(s.fire_at) - durable.now())::float8 from durable.schedules s
     where s.paused is null and s.disabled_at is null
    """,
    read_only=True,
)
"""Seconds until a schedule fires."""
QUEUES: Final = Statement(
    "bench_queues",
    "select distinct g.queue from durable.gen_durable g where g.finished_at is null order by 1",
    read_only=True,
)
"""The queues that have instances which have not ended."""
HAS_QUEUE: Final = Statement(
    "bench_has_queue", "select 1 from durable.gen_durable g where g.queue = $1::text limit 1", read_only=True
)
"""Whether there is an instance in this queue, in whatever status. $1 name."""
LIVE: Final = Statement(
    "bench_live",
    """
    select g.queue, g.id from durable.gen_durable g
     where g.finished_at is null and ($1::bigint is null or g.id = $1) and ($2::text is null or g.fsm = $2)
     order by g.queue, g.id
    """,
    read_only=True,
)
"""Of an instance or a machine: the instances that have not ended, by queue. $1 id or null · $2 machine or null."""
DUE: Final = Statement(
    "bench_due",
    """
    select exists (
        select 1 from durable.gen_durable g
         where g.status = 'runnable' and durable.due(g.eligible_at)
           and (durable.offered(g.status, g.hold)
                or g.hold = 3 and exists (
                    select 1 from durable.limit_waits w
                     where w.key = g.limited_by and w.queue = g.queue and w.next_at <= durable.now()))
           and ($1::bigint is null or g.id = $1) and ($2::text is null or g.fsm = $2)
           and ($3::text is null or g.queue = $3))
    """,
    read_only=True,
)
"""Whether anything is due. $1 id or null · $2 machine or null · $3 queue or null."""
WAITING: Final = Statement(
    "bench_waiting",
    """
    select g.id, count(*) over () from durable.gen_durable g where g.finished_at is null order by g.id limit $1::int
    """,
    read_only=True,
)
"""The instances that have not ended, oldest first, and how many there are. $1 limit."""
BURY: Final = Statement(
    "bench_bury",
    """
    update durable.gen_durable g
       set lease_expires_at = least(pg_catalog.now(), durable.now()) - interval '1 second'
     where g.id = any ($1::bigint[]) and g.claim_id = any ($2::uuid[]) and g.status = 'executing'
    """,
)
"""A worker has died, and its lease ends now instead of in a minute. $1 ids · $2 claims.

By both clocks: the reaper goes by the server's, and the records have the bench's, which stands still during a drain."""
RUN_NOW: Final = Statement(
    "bench_run_now",
    """
    update durable.gen_durable g set eligible_at = durable.now()
     where g.id = any ($1::bigint[]) and g.status = 'runnable' and g.crashes > 0 and g.eligible_at > durable.now()
    """,
)
"""Crash re-runs that are backed off become due. $1 ids."""
FORGET: Final = Statement(
    "bench_forget",
    """
    with inbox as (delete from durable.signals s where s.target_id = $1::bigint)
    delete from durable.gen_durable g where g.id = $1::bigint
    """,
)
"""The instance that `run_step` made is removed. $1 id."""
SENT: Final = Statement(
    "bench_sent",
    "select s.name, s.payload from durable.bench_signals s where s.target_id = $1::bigint order by s.id",
    read_only=True,
)
"""Every signal that was sent to an instance, also after its end. $1 id."""
